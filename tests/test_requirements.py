"""Every package that the code imports is in requirements.txt."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_fault_9_every_import_is_in_the_standard_library_here_or_in_the_requirements():
    """So after `pip install -r requirements.txt` nothing is missing. (SOAP once was.)"""
    lines = (ROOT / "requirements.txt").read_text().split()
    known = {re.split("[>=<]", line)[0] for line in lines} | set(sys.stdlib_module_names)
    known.add("tokenizers")  # optional: where it is missing, --tokenizer says so in one line
    known.add("pynvml")  # optional: where it is missing, logs have no energy
    files = [*ROOT.glob("*.py")]
    for folder in ("kernels", "runtime", "text"):
        known.add(folder)
        files += (ROOT / folder).glob("*.py")
    known |= {path.stem for path in ROOT.glob("*.py")}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module]
            missing = {name.split(".")[0] for name in names} - known
            assert not missing, f"{path.name} imports {missing}"
