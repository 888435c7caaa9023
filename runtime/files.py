"""Files that are never half written, and files that one process holds at a time."""

import fcntl
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

# What may be raised by reading JSON from a damaged file, and by using what it holds.
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def digest(*values):
    """A hash in hexadecimal of values that JSON can hold. Equal values have equal hashes."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


@contextmanager
def named(path):
    """Adds the path to OSErrors that lack one, such as "disk full"."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_file(path, write, check=None):
    """Writes a file by write(file) such that `path` is never half written.

    The bytes go to a draft beside it, which is synced to disk, checked by check(draft) if that is
    given, and only then renamed to `path`. Of two processes that write the same file, one waits for
    the other. A draft that a killed process has left is written over.
    """
    draft = Path(f"{path}.draft")
    with named(path), locked(draft, make_folder=False) as f:
        try:
            f.truncate(0)
            write(f)
            f.flush()
            os.fsync(f.fileno())
            if check:
                check(draft)
        except BaseException:
            draft.unlink()
            raise
        os.replace(draft, path)  # from here on, another process may have a draft
        sync(draft.parent)


def sync(folder):
    """Makes sure that the names of the files in a folder are on disk, after a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path, wait=True, make_folder=True):
    """Holds a file, which is created if it is not there, as the only process.

    The hold ends with the context or with the process, however it ends. If another process holds
    the file, it waits, or raises BlockingIOError if `wait` is false.
    """
    how = fcntl.LOCK_EX
    if not wait:
        how |= fcntl.LOCK_NB

    held = False
    while not held:
        if make_folder:
            os.makedirs(path.parent, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with open(descriptor, "r+b") as f:
            fcntl.flock(f, how)
            # While this process waited, the holder may have renamed or removed the file.
            with suppress(FileNotFoundError):
                held = os.path.samefile(path, descriptor)
            if held:
                yield f
