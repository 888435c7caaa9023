"""Files that a crash leaves as they were or as they should be, and that one process has at a time."""

import fcntl
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

# what reading JSON may raise, and using what it holds, where that is anything
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def digest(*what):
    """A hash of values that JSON can hold: equal for equal values, in hexadecimal."""
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


@contextmanager
def named(path):
    """What fails in it says which file it is about, as a disk that is full does not."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_file(path, write, check=lambda path: None):
    """Calls write(file) on a draft, syncs, checks and renames it to path, which is never half written.

    Of two processes one waits for the other; a draft that one that was killed has left is written over.
    """
    draft = Path(f"{path}.draft")
    with named(path), locked(draft, make=False) as f:
        try:
            f.truncate(0)
            write(f)
            f.flush()
            os.fsync(f.fileno())
            check(draft)
        except BaseException:
            draft.unlink()
            raise
        os.replace(draft, path)  # from here another process may have a draft
        sync(draft.parent)


def sync(folder):
    """What was renamed in a folder is on disk."""
    here = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(here)
    finally:
        os.close(here)


@contextmanager
def locked(path, wait=True, make=True):
    """The file, made where there is none, for one process at a time; the lock goes with its holder, however that ends.

    `make`: its folder too. Raises BlockingIOError where another process has it and there is no `wait`.
    """
    held = False
    while not held:
        if make:
            os.makedirs(path.parent, exist_ok=True)
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            with suppress(FileNotFoundError):  # or it was removed meanwhile
                held = os.path.samefile(path, f.fileno())
            if held:
                yield f
