"""How a command begins and ends: with streams that work, and with a status.

    0          it is done
    1          the machine failed, or no run of a grid came to its end
    2          bad input: a flag, a file or a variable of the shell makes no sense
    128 + n    signal n ended it: 130 is Ctrl-C, 141 that nobody reads the output any more

If the status is not 0, one line says why. A fault of the program itself is not hidden: Python shows
where it is.
"""

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

import jax

CLEAR_LINE = "\r\033[K"  # for a terminal, on which Ctrl-C has left ^C


class BadInput(Exception):
    """What the user gave makes no sense."""


class Stop(BaseException):  # an Exception could be swallowed by a library's "except Exception"
    """A signal asked the program to end."""

    def __init__(self, number):
        super().__init__()
        self.number = number  # of the signal


def command(main):
    """A decorator of main(words): it returns the exit status, and ends errors in one line.

    words: those of the command line. Without an argument, the function takes them from sys.argv.
    main returns the status, or None for 0.
    """
    name = Path(main.__code__.co_filename).name

    @wraps(main)
    def run(argv=None):
        words = sys.argv[1:] if argv is None else list(argv)
        try:
            open_streams()
            with noting_ctrl_c():
                status = main(words) or 0
            sys.stdout.flush()
            return status
        except BaseException as error:
            status, reason = explain(error)
            if status is None:
                raise
            if reason:
                with suppress(OSError):  # nobody may read that either
                    say(f"{name}: {reason}")
            return status
        finally:
            discard_unread()

    return run


# ---- Ctrl-C --------------------------------------------------------------------------------------

raised = []  # what signals have raised in this command; a library's "except:" may have caught it


@contextmanager
def noting_ctrl_c():
    """Within it, Ctrl-C raises KeyboardInterrupt, as always, and this is noted in `raised`."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        # A shell script's job in the background ignores it; only the main thread may set a handler.
        yield
        return
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        raised.clear()
        signal.signal(signal.SIGINT, before)


def interrupt(number, frame):
    """The handler of Ctrl-C."""
    raise_noted(KeyboardInterrupt())


def raise_noted(error):
    """Raises what a signal asks for, and notes it in `raised`."""
    raised.append(error)
    raise error


def check_stopped():
    """Raises again what a signal has raised, if a library has caught it, as JAX does in places."""
    if raised:
        raise raised[-1]


# ---- ends ----------------------------------------------------------------------------------------


@contextmanager
def blaming_input():
    """Within it, an error is about what the user gave, and becomes BadInput.

    That is a ValueError, or an OSError for a place that is no folder, or that has no rights.
    """
    try:
        yield
    except ValueError as error:
        raise BadInput(error) from None
    except (NotADirectoryError, IsADirectoryError, PermissionError) as error:
        place = f"{error.filename}: " if error.filename else ""
        raise BadInput(f"{place}{error.strerror or error}") from None


def explain(error):
    """The exit status and the reason of what ended a command. None, None: a fault of the program.

    The reason is empty where there is nobody to read it.
    """
    if isinstance(error, BadInput):
        return 2, error
    if isinstance(error, Stop):
        return 128 + error.number, "stopped; the same command goes on from here"
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT, str(error) or "stopped"  # bench.py says what it has saved
    if isinstance(error, BrokenPipeError):
        return 128 + 13, ""  # SIGPIPE, which Windows does not have
    if isinstance(error, OSError):
        return 1, error
    if isinstance(error, MemoryError):
        return 1, "the machine is out of memory"
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
        remedy = "lower --micro-batch, --inner-batch or --head-chunk, or on several devices"
        remedy += " give --shard true"
        return 1, f"the device is out of memory; for train.py, {remedy}"
    return None, None


def say(reason):
    """Prints a reason on standard error, in one line."""
    if sys.stderr.isatty():
        print(CLEAR_LINE, end="", file=sys.stderr)
    print(reason.replace("\n", " "), file=sys.stderr)


def open_streams():
    """Makes standard output and standard error usable, whatever the shell has made of them.

    Where a stream was closed, the next file that is opened would get its number, and what a library
    writes to standard error would go into that file. So each number is given to some file. If
    standard error was closed, what Python prints to it goes to standard output. A character that
    the stream's encoding lacks is written as its number, \\u03b1. A line is written when it ends,
    so that it is seen at once through a pipe, too.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  until the process ends
    if sys.stderr is None:
        sys.stderr = sys.stdout
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a notebook's or a test's stream has no encoding
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


def discard_unread():
    """Sends what a stream cannot write nowhere, or Python would complain as it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
