"""Files are written whole or not at all, and what is held by one process no other can hold."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import AS_A_USER

import train
from runtime import files

ROOT = Path(train.__file__).parent
HOLD = """
import sys
from pathlib import Path
from runtime import files
with files.locked(Path(sys.argv[1])):
    print("held", flush=True)
    input()
"""


@pytest.fixture
def hold():
    """A function that starts a process which holds a file until it is killed."""
    holders = []

    def start(path):
        command = [sys.executable, "-c", HOLD, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        holder = subprocess.Popen(command, env=AS_A_USER | {"PYTHONPATH": str(ROOT)}, **pipes)
        holders.append(holder)
        assert holder.stdout.readline() == b"held\n"
        return holder

    yield start
    for holder in holders:
        holder.kill()
        holder.communicate()


def test_a_file_that_cannot_be_renamed_leaves_no_draft(tmp_path):
    """Its draft is closed before it is renamed, as Windows demands; the error names the path."""
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match=str(tmp_path / "a")):
        files.write_file(tmp_path / "a", lambda file: file.write(b"new"))
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_draft_is_closed_when_it_is_renamed(tmp_path, monkeypatch):
    """Windows renames no open file."""
    seen = []
    replace = os.replace

    def note(draft, path):
        seen.append(drafts[0].closed)
        replace(draft, path)

    drafts = []
    monkeypatch.setattr(os, "replace", note)
    files.write_file(tmp_path / "a", drafts.append)
    assert seen == [True]


def test_what_another_process_holds_is_seen_and_not_touched(tmp_path, hold):
    """Until that process ends, in whatever way. Nothing is created, and no file stays open."""
    path = tmp_path / "d" / "lock"
    assert not files.is_locked(path)
    assert not path.parent.exists()
    holder = hold(path)
    number_open = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for _ in range(3):
        assert files.is_locked(path)
    if number_open:
        assert len(os.listdir("/proc/self/fd")) == number_open
    with pytest.raises(BlockingIOError, match="lock is held by another process"):
        files.locked(path, wait=False).__enter__()
    holder.kill()
    holder.wait()
    assert not files.is_locked(path)
    with files.locked(path, wait=False):
        assert files.is_locked(path)


def test_a_lock_whose_folder_was_removed_is_not_held_in_vain(tmp_path, hold):
    """Who waited for it makes a new one, which then keeps the next process out."""
    path = tmp_path / "d" / "lock"
    holder = hold(path)
    with ThreadPoolExecutor(1) as pool:
        lock = files.locked(path)
        entered = pool.submit(lock.__enter__)
        time.sleep(0.2)
        path.unlink()
        path.parent.rmdir()
        holder.kill()
        entered.result(timeout=60)
        assert path.exists()
        assert files.is_locked(path)
        pool.submit(lock.__exit__, None, None, None).result(timeout=60)
    assert not files.is_locked(path)


@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc, where no folder can be made")
def test_a_lock_whose_folder_cannot_be_made_is_an_error():
    with pytest.raises(OSError, match="/proc/nothing"), files.locked("/proc/nothing/lock"):
        pass


def test_a_folder_that_cannot_be_written_is_seen_before_work_is_done(tmp_path):
    """The nearest folder that is there decides; nothing is made."""
    (tmp_path / "file").touch()
    files.check_writable(tmp_path / "a" / "b")
    files.check_writable(tmp_path)
    for path in ("file", "file/a/b"):
        with pytest.raises(OSError, match="Not a directory.*file'"):
            files.check_writable(tmp_path / path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match="Not a directory.*gone'"):
        files.check_writable(tmp_path / "gone" / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "gone"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_folder_without_the_permission_to_write(tmp_path):
    (tmp_path / "d").mkdir(mode=0o555)
    with pytest.raises(OSError, match="Permission denied.*d'"):
        files.check_writable(tmp_path / "d" / "a")
