"""Files that a crash leaves as they were or as they should be, and folders that one process has at a time."""

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path


def write_file(path, write, check=lambda path: None):
    """Calls write(file) on a temporary file, syncs, checks and renames it to path, which is never half written."""
    draft = Path(f"{path}.draft-{os.getpid()}")
    try:
        with open(draft, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        check(draft)
        os.replace(draft, path)
        sync(draft.parent)
    finally:
        draft.unlink(missing_ok=True)


def sync(folder):
    """What was renamed in a folder is on disk."""
    here = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(here)
    finally:
        os.close(here)


@contextmanager
def locked(path, wait=True):
    """One process at a time, in the folder of path; the lock goes with the process that holds it, however that ends.

    What one that was killed has left half written there is removed. Raises BlockingIOError where another process has
    the lock and there is no `wait`.
    """
    while True:
        os.makedirs(path.parent, exist_ok=True)
        with open(path, "a") as f:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            if path.exists() and os.path.samestat(os.fstat(f.fileno()), os.stat(path)):  # not removed meanwhile
                for draft in path.parent.glob("*.draft-*"):
                    draft.unlink()
                yield
                return
