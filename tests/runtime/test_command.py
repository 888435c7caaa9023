"""How commands end, as real processes: Ctrl-C, nobody who reads, closed streams, other shells."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import AS_A_USER, SMALL, run

import train
from runtime import command, live

ROOT = Path(train.__file__).parent
TRAIN = ["train.py", *SMALL, "--method", "muon", "--data", "text.txt", "--out", "new"]
BENCH = ["bench.py", "--rows", "muon: opt", "--repeat", "1", "--inner-batch", "1"]
PLOT = ["plot.py", "r", "--out", "pictures"]
SAMPLE = ["sample.py", "--out", "r", "the cat"]
QUICK = AS_A_USER | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # it compiles faster
QUICK["PYTHONUNBUFFERED"] = ""  # what is printed waits in a buffer, as it does by default
DATA = ["data.py", "text.txt", "--tokenizer", "bytes"]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def words_of(command, *options):
    """The words that start one of our commands."""
    name, *flags = command
    return [sys.executable, *options, str(ROOT / name), *flags]


def done(command, *options, redirect="", **variables):
    """A command that has ended. redirect: what a shell is to do with its streams."""
    shell = ["sh", "-c", f'exec "$@" {redirect}', "sh", *words_of(command, *options)]
    pipes = {"capture_output": True, "text": True, "encoding": "utf-8"}
    return subprocess.run(shell, env=QUICK | variables, **pipes)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    """A folder with a text and a finished run r."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lines = [f"{i} cats sat on {i * i} mats\n" + "\n" * (i % 9 == 0) for i in range(3000)]
        Path("text.txt").write_text("".join(lines), encoding="utf-8")
        assert run("--method", "muon", "--out", "r", "--steps", "1") == 0
    return folder


@pytest.fixture
def with_run(one_run, monkeypatch):
    """The working directory has a run r."""
    monkeypatch.chdir(one_run)
    return one_run


@pytest.mark.parametrize("command", [TRAIN, BENCH, PLOT, SAMPLE, DATA], ids=lambda words: words[0])
def test_where_nobody_reads_a_command_ends_without_a_word(with_run, command):
    """As in `python bench.py | head -1`: the status that a shell gives for SIGPIPE."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words_of(command), env=QUICK, **pipes)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


def test_an_error_that_nobody_reads_keeps_its_status(with_run):
    """As in `python plot.py nowhere 2>&1 | true`; and a full disk is one line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    separate = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words_of(["plot.py", "nowhere"]), env=QUICK, **pipes)
    process.stdout.close()
    assert process.wait() == 2
    process = subprocess.Popen(words_of(["plot.py", "--help"]), env=QUICK, **separate)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0
    if not Path("/dev/full").exists():  # which not every system has
        return
    ended = done(PLOT, redirect=">/dev/full")
    says = "plot.py: [Errno 28] No space left on device\n"
    assert (ended.returncode, ended.stderr) == (1, says)


def test_ctrl_c_while_it_measures_is_one_line(with_run):
    """In bench.py, which keeps what it has measured."""
    command = ["bench.py", "--repeat", "1", "--inner-batch", "1", "--json", "new/a.json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(words_of(command), env=QUICK, **pipes)
    for _ in range(3):  # what it measures on, the names of the columns, a row
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    kept = len(json.loads(Path("new/a.json").read_text(encoding="utf-8"))["rows"])
    assert kept >= 1
    assert re.fullmatch(rf"bench\.py: stopped; {kept} of \d+ rows are in new/a\.json\n", err)


@pytest.mark.parametrize("command", [PLOT, DATA], ids=lambda words: words[0])
@pytest.mark.parametrize("redirect", ["2>&-", ">&- 2>&- <&-"])
def test_closed_streams_change_nothing_else(with_run, command, redirect):
    ended = done(command, redirect=redirect)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert bool(ended.stdout) == (redirect == "2>&-")


TRY_NUMBER = """
import os
from runtime import command
command.open_streams()
print(os.open(os.devnull, os.O_RDONLY))
"""


def test_no_file_gets_the_number_of_a_closed_stream():
    """Or what a library writes to standard error would go into that file."""
    shell = ["sh", "-c", 'exec "$@" 2>&- <&-', "sh", sys.executable, "-c", TRY_NUMBER]
    environment = QUICK | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(shell, env=environment, capture_output=True, text=True)
    assert int(ended.stdout) > 2


@pytest.mark.parametrize(
    "redirect, out, err",
    [
        (">&-", "", "plot.py: nowhere does not exist\n"),
        ("2>&-", "plot.py: nowhere does not exist\n", ""),
        (">&- 2>&-", "", ""),
    ],
)
def test_where_a_stream_is_closed_an_error_is_said_on_the_other(with_run, redirect, out, err):
    ended = done(["plot.py", "nowhere"], redirect=redirect)
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, out, err)


HELP = """
import bench, data, plot, sample, train, tutorial
for module in (bench, data, plot, sample, train, tutorial):
    try:
        module.main(["--help"])
    except SystemExit as end:
        print("status", end.code)
"""


def test_without_docstrings_the_help_is_there():
    """Of every command, under python -OO."""
    environment = AS_A_USER | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-OO", "-c", HELP]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.count("usage: ") == ended.stdout.count("status 0") == 6
    words = " ".join(ended.stdout.split())
    assert "outer steps; where it is not given" in words


def test_in_another_shell_a_run_is_the_same(with_run):
    """Without UTF-8 and without docstrings: the same samples, and a run whose text is not ASCII."""
    strange = done(SAMPLE, "-OO", **ASCII)
    assert (strange.returncode, strange.stderr) == (0, "")
    plain = done(SAMPLE)
    assert strange.stdout == plain.stdout.encode("ascii", "backslashreplace").decode()

    lines = [f"größe {i} α\n" + "\n" * (i % 9 == 0) for i in range(3000)]
    Path("text.txt").rename("ascii.txt")
    Path("text.txt").write_text("".join(lines), encoding="utf-8")
    ended = done([*TRAIN, "--out", "other", "--steps", "1"], "-OO", **ASCII)
    Path("ascii.txt").rename("text.txt")
    assert (ended.returncode, ended.stderr) == (0, "")


def test_ctrl_c_is_ignored_where_the_shell_wants_it_so():
    """As in the background of a script; also while a run would save its state first."""

    @command.command
    def main(words):
        os.kill(os.getpid(), signal.SIGINT)
        with live.Signals():
            os.kill(os.getpid(), signal.SIGINT)
        return 5

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main([]) == 5
    finally:
        signal.signal(signal.SIGINT, before)
