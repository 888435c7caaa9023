"""Files that are never half written, and files that one process holds at a time."""

import errno
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

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
    """A hash in hexadecimal of the JSON text of values.

    So the order of a dict counts, and 1 is not 1.0.
    """
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
    given, and only then renamed to `path`. A draft that a killed process has left is written over.
    If two processes may write the same file at once, the caller must hold a lock.
    """
    draft = Path(f"{path}.draft")
    with named(path):
        try:
            with open(draft, "wb") as f:
                write(f)
                f.flush()
                os.fsync(f.fileno())
            if check:
                check(draft)
            os.replace(draft, path)  # after it is closed: Windows renames no open file
        except BaseException:
            with suppress(OSError):  # what went wrong first counts
                draft.unlink()
            raise
        sync(draft.parent)


def write_text(path, text):
    """`write_file` of a text, in UTF-8."""
    write_file(path, lambda file: file.write(text.encode()))


def sync(folder):
    """Makes sure that the names of the files in a folder are on disk, after a rename."""
    if os.name == "nt":
        return  # Windows opens no folder
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(folder):
    """Raises OSError if rights, or a file in its place, forbid a folder to have files. Makes none.

    It looks at the folder, or at the nearest place above it that is there. It cannot see a full
    disk, or a name that is too long.
    """
    nearest = Path(folder).absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(nearest))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(nearest))


@contextmanager
def locked(path, wait=True):
    """Holds a file as the only process. The file and its folder are created if they are not there.

    The hold ends with the context or with the process, however it ends. If another process holds
    the file, it waits, or raises BlockingIOError if `wait` is false. A file that its holder has
    removed counts no more: who waited for it makes a new one.
    """
    lock = FileLock(path)
    while not lock.is_locked:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            raise BlockingIOError(f"{path} is held by another process") from None
        except FileNotFoundError:
            continue  # its holder has removed the folder, which the next turn makes again
    try:
        yield
    finally:
        lock.release()


def hold(path, stack):
    """Holds a file until a stack closes, if no other process has it. Returns whether it is held.

    stack: an ExitStack, to which the hold is added.
    """
    try:
        stack.enter_context(locked(path, wait=False))
    except BlockingIOError:
        return False
    return True


def is_locked(path):
    """Whether a process holds a file at this moment. Creates nothing and keeps nothing open.

    It tries to hold the file. If another process does so in the same moment, it is refused.
    """
    if not Path(path).exists():
        return False
    try:
        with locked(path, wait=False):
            return False
    except BlockingIOError:
        return True
