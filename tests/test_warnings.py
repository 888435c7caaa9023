"""A warning is an error inside a test, and nowhere else: other people's plugins may warn."""

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import AS_A_USER


@pytest.mark.parametrize("kind", [UserWarning, RuntimeWarning, ResourceWarning])
def test_a_warning_is_an_error(kind):
    with pytest.raises(kind):
        warnings.warn("something is wrong", kind, stacklevel=1)


def test_a_plugin_that_warns_ends_nothing(tmp_path):
    """As pytest-benchmark does: it warns while it is set up, before any test."""
    plugin = "def pytest_configure(config):\n"
    plugin += "    config.issue_config_time_warning(UserWarning('not for us'), 2)\n"
    (tmp_path / "noisy.py").write_text(plugin)
    test = f"{__file__}::test_a_warning_is_an_error"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "noisy", test],
        capture_output=True,
        text=True,
        env=AS_A_USER | {"PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UserWarning: not for us" in done.stdout
    assert "3 passed" in done.stdout
