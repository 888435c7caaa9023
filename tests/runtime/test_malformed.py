"""Bad input ends a command with one line and status 2, or 1 if the machine failed.

Whole commands are run: on a table of what a person may do, and with damage of any kind to every
file that a command reads. Nothing is overwritten.
"""

import contextlib
import gzip
import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import assert_same, everything, run
from hypothesis import given
from hypothesis import strategies as st

import comparison
import data
import recipe
import sample
import train
from runtime import flags
from text import documents, formats


def files(folder):
    """{path: what it holds}, of files and folders below folder."""
    return {
        p.relative_to(folder): p.read_bytes() if p.is_file() else None
        for p in sorted(Path(folder).rglob("*"))
    }


FLAGS = {
    "unknown flag": (
        ["--learning-rate", "1"],
        "unknown flag '--learning-rate'; did you mean --lr? --help lists every flag",
    ),
    "flag of another method": (
        ["--method", "adamw", "--damping", "1"],
        "--damping is valid only with --method gn | gn_prox | layerwise_gn | gn_cg",
    ),
    "misspelled flag": (["--stepz", "1"], "unknown flag '--stepz'; did you mean --steps?"),
    "misspelled, with its value": (
        ["--methd=gn"],
        "unknown flag '--methd'; did you mean --method?",
    ),
    "stray word": (["hello"], "unknown flag 'hello'; --help lists every flag"),
    "a value without its flag": (["tiny"], "unknown flag 'tiny'; did you mean --model tiny?"),
    "a method without its flag": (["soap"], "unknown flag 'soap'; did you mean --method soap?"),
    "flag without value": (["--lr"], "expected one argument"),
    "unknown method": (["--method", "sgd"], f"valid: {', '.join(recipe.METHODS)}"),
    "unknown model": (["--model", "7b"], "model is '7b'; valid: tiny, 5m, 45m, 150m"),
    "unknown tokenizer": (["--tokenizer", "words"], "tokenizer is 'words'; valid: bytes, gpt2"),
    "unknown corpus": (
        ["--data", "wiki"],
        "data is 'wiki'; valid: stdlib, c4, or the path of a file or folder",
    ),
    "missing file": (
        ["--data", "nowhere.txt"],
        "data is 'nowhere.txt'; valid: stdlib, c4, or the path",
    ),
    "settings of another program": (["--data", "other/config.json"], "line 1 is no JSON object"),
    "a file of no known kind": (["--data", "other/notes.md"], "that end in .txt, .jsonl"),
    "a folder without files": (["--data", "hollow"], "that end in .txt, .jsonl"),
    "a line that is no JSON": (["--data", "bad.jsonl"], "line 2 is no JSON object"),
    "gzipped, and cut short": (["--data", "bad.json.gz"], "damaged after line"),
    "empty file": (["--data", "empty.txt"], "it is empty"),
    "not text": (["--data", "picture.txt"], "not text"),
    "context beyond the corpus": (
        ["--context", "100000", "--batch", "1m"],
        "too few for a window of context 100000",
    ),
    "batch below a sequence": (
        ["--batch", "15"],
        "batch is 15 tokens, fewer than one sequence of context 16",
    ),
    "heads": (["--n-heads", "3"], "d_model 8 over n_heads 3"),
    "negative lr": (["--lr", "-0.1"], "lr is -0.1; it must be a positive number"),
    "lr that is no number": (["--lr", "fast"], "--lr is 'fast'; it must be a number"),
    "infinite lr": (["--lr", "inf"], "lr is inf"),
    "eval every": (["--eval-every", "0"], "eval_every is 0; it must be at least 1"),
    "objective": (["--method", "layerwise_gn", "--objective", "cubic"], "valid: quadratic, exact"),
    "inner": (["--inner", "sgd"], "inner is 'sgd'; valid: muon, adamw"),
    "average": (["--average", "1"], "average is 1.0; it must be at least 0 and below 1"),
    "frequency": (
        ["--method", "soap", "--frequency", "0"],
        "frequency is 0; it must be at least 1",
    ),
    "no steps": (["--steps", "0"], "steps is 0; it must be at least 1"),
    "half a step": (["--steps", "1.5"], "--steps is '1.5'; it must be a whole number"),
    "tokens": (["--tokens=-5k"], "tokens is -5000"),
    "count": (["--batch", "4x"], "--batch is '4x'; it must be a whole number up to 10^15, such as"),
    "boolean": (["--guard", "maybe"], "--guard is 'maybe'; it must be true or false"),
    "schedule": (["--schedule", "linear"], "valid: constant+inner cosine, global cosine"),
    "dtype": (["--dtype", "float16"], "valid: float32, bfloat16"),
    "seed": (["--seed", "-1"], "seed is -1"),
    "seed of 33 bits": (["--seed", "4294967296"], "seed is 4294967296"),
    "damping": (["--damping", "nan"], "damping"),
    "target": (["--target-loss", "0"], "target_loss is 0.0; it must be a positive number"),
    "target that is no number": (["--target-loss", "nan"], "target_loss is nan"),
    "vocabulary": (["--vocab-size", "300"], "tokenizer bytes has 256 ids"),
    "warm-up": (["--warmup-tokens=-1"], "warmup_tokens is -1; it must be at least 0"),
    "a flag of before": (["--warmup-fraction", "0.1"], "did you mean --warmup-tokens?"),
    "a folder that is no run": (["--out", "."], "is there and is not a run"),
    "a file as folder": (["--out", "text.txt"], "is there and is not a run"),
    "a flag that ends the flags": (["--data=--"], "data is '--'; valid: stdlib, c4"),
    "a number that ends the flags": (["--lr=--"], "--lr is '--'; it must be a number"),
    "a count of 400 digits": (
        ["--steps", "9" * 400],
        "it must be a whole number up to 10^15, such as",
    ),
    "more steps than can be counted": (["--steps", "3b"], "they must be below 2^31"),
    "a size beyond 32 bits": (
        ["--d-ff", "4b"],
        "d_ff is 4000000000; it must be at least 1 and below 2^31",
    ),
    "bytes that are no text": (
        ["--out", "a\udcff"],
        "--out is 'a\\udcff'; it must be a text in UTF-8",
    ),
    "a line break": (["--method", "a\nb"], "method is 'a\\nb'; valid: gn"),
    "a stray line break": (["a\nb"], "unknown flag 'a\\nb'"),
    "a grid with a bad member": (["--lr", "0.1,-1"], "lr is -1.0"),
    "a grid with a hole": (["--lr", "0.1,,1"], "--lr is ''"),
    "a folder of another program": (["--out", "other"], "is there and is not a run"),
}


def bad_inputs():
    """Files and folders that are no text and no run, in the current folder."""
    Path("empty.txt").touch()
    Path("picture.txt").write_bytes(b"\x89PNG\r\n\x1a\n" * 100)
    Path("bad.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')
    Path("bad.json.gz").write_bytes(gzip.compress(b'{"text": "a"}\n')[:-9])
    Path("hollow").mkdir()
    Path("other").mkdir()
    Path("other/config.json").write_text('{"architectures": []}')
    Path("other/notes.md").write_text("notes")


def files_after(error):
    """The files here, without token files of a text that is too short: others may read them."""
    found = files(Path.cwd())
    if "it is empty" in error or "are too few for a window" in error:
        return {path: content for path, content in found.items() if path.parts[0] != "data"}
    return found


@pytest.mark.parametrize("words, says", FLAGS.values(), ids=FLAGS)
def test_flags(here, capsys, words, says):
    bad_inputs()
    before = files(here)
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert says in err and err.startswith("train.py: ") and err.count("\n") == 1 and out == ""
    assert files_after(err) == before


@pytest.mark.parametrize("name", ["empty.txt", "picture.txt", "bad.jsonl", "bad.json.gz", "hollow"])
def test_texts_by_the_command_that_only_prepares_them(here, capsys, name):
    bad_inputs()
    before = files(here)
    assert data.main([name, "--tokenizer", "bytes"]) == 2
    out, err = capsys.readouterr()
    assert name in err and err.startswith("data.py: ") and err.count("\n") == 1 and out == ""
    assert files_after(err) == before


JUNK = ["", "0", "-1", "1.5", "nan", "inf", "1e400", "9" * 400, "2147483648", "1000000b", "1e5"]
JUNK += ["true", "[]", "--", "%s", "\udcff", "\n", "x" * 300, "=", ",", "1,2", "k", "text.txt/x"]
JUNK += ["..", "~", "*", "\u0663", "0x10", "1_0", "+5", "-0"]


@given(st.data())
def test_any_value_of_any_flag(draw):
    """A run, or a refusal in one line."""
    method = draw.draw(st.sampled_from(list(recipe.METHODS)))
    names = list(recipe.valid_flags(method))
    value = st.sampled_from(JUNK) | st.text(max_size=20)
    drawn = draw.draw(
        st.lists(st.tuples(st.sampled_from(names), value, st.booleans()), min_size=1, max_size=2)
    )
    words = ["--model", "tiny", "--method", method]
    for name, text, joined in drawn:
        flag = "--" + name.replace("_", "-")
        words += [f"{flag}={text}"] if joined else [flag, text]
    try:
        assert all(isinstance(recipe.configure(line), recipe.Run) for line in flags.expand(words))
    except ValueError as error:
        assert str(error).isprintable() and len(str(error)) > 10


def valid():
    """{suffix: the content of a file in that format}."""
    texts = [f"The {n} cats sat on their mats, and saw {n * n} dogs.\n" for n in range(40)]
    rows = "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode()
    table = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), table)
    zipped = gzip.compress(rows, mtime=0)
    prose = "\n".join(texts).encode()
    array = json.dumps([{"text": text} for text in texts], indent=1).encode()
    return {
        ".txt": prose,
        ".txt.gz": gzip.compress(prose, mtime=0),
        ".jsonl": rows,
        ".json": array,
        ".json.gz": zipped,
        ".jsonl.gz": zipped,
        ".parquet": table.getvalue().to_pybytes(),
    }


VALID = valid()


@pytest.mark.parametrize("suffix", formats.READERS)
@given(st.data())
def test_any_bytes_in_a_text(suffix, draw):
    """A valid file with bytes changed or its end gone: documents, or a refusal in one line."""
    content = bytearray(draw.draw(st.sampled_from([VALID[suffix], b""])))
    for at, byte in draw.draw(
        st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=3)
    ):
        if content:
            content[at % len(content)] = byte
    content = content[: draw.draw(st.none() | st.integers(0, len(content)))] + draw.draw(
        st.binary(max_size=40)
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a" + suffix)
        path.write_bytes(content)
        try:
            (source,) = documents.sources(str(path))
            texts = list(source.read())
            assert all(
                isinstance(text, str) and text.strip() and "\0" not in text for text in texts
            )
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)


def flipped(seed):
    """A function that changes one bit of a file, somewhere."""

    def change(path):
        content = bytearray(path.read_bytes())
        content[random.Random(seed).randrange(len(content))] ^= 1 << seed % 8
        path.write_bytes(content)

    return change


def a_folder(path):
    path.unlink()
    path.mkdir()


DAMAGE = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: os.truncate(path, 0),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "other bytes": lambda path: path.write_bytes(random.Random(0).randbytes(1000)),
    "a folder": a_folder,
    "nested": lambda path: path.write_text("[" * 100_000),
    **{
        text: lambda path, text=text: path.write_text(text)
        for text in ("null", "[]", "{}", '"x"', "[1]", '{"step": "a"}')
    },
    **{f"bit {seed}": flipped(seed) for seed in range(8)},
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with a text, a finished run r, its token files and its warm-up."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(
            "".join(f"{i} cats sat on {i * i} mats\n" + "\n" * (i % 9 == 0) for i in range(3000))
        )
        assert run("--method", "muon", "--out", "r", "--save-every", "1e-9") == 0
    return folder


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize(
    "name", ["config.json", "log.jsonl", "checkpoint.npz", "checkpoint.previous.npz", "lock"]
)
def test_a_runs_files(finished, tmp_path, monkeypatch, capsys, name, damage):
    """The run ends as it did, or the command with one line and no file changed."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    before = everything("r")
    if name != "lock" or damage == "a folder":
        DAMAGE[damage](Path("r", name))
    state = files("r")
    status = run("--method", "muon", "--out", "r", "--save-every", "1e-9")
    out, err = capsys.readouterr()
    assert all(
        line.startswith(("train.py: ", "r/", "r was begun with other "))
        for line in err.splitlines()
    ), err
    if status == 0:
        assert_same(everything("r"), before)
    else:
        assert status in (1, 2) and err.count("\n") == 1 and err.startswith("train.py: ")
        assert files("r") == state
    assert sample.main(["a", "--out", "r"]) in (0, 2)
    read_as_plot_does()


def read_as_plot_does():
    """Reads the run "r" into comparisons, or leaves it out; that there is none is a ValueError."""
    with contextlib.suppress(ValueError):
        table = comparison.read_runs(["r"])
        if not table.empty:
            for rows in comparison.split_tasks(table).values():
                comparison.compare_at_tokens(rows)


ANYTHING = [None, "x", -1, 1.5, True, [1], 10**30]


def test_a_run_whose_settings_are_anything(finished, tmp_path, monkeypatch, capsys):
    """Each value of its config.json in turn: train.py, sample.py and plot.py go on or refuse it."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setattr(sample, "draw", lambda *args: 0)
    monkeypatch.setattr(train, "execute_all", lambda *args: True)
    whole, refused = json.loads(Path("r/config.json").read_text()), 0
    for name, value in (
        (n, v) for i, n in enumerate(whole["config"]) for v in ANYTHING[i % 2 :: 2]
    ):
        Path("r/config.json").write_text(
            json.dumps(whole | {"config": whole["config"] | {name: value}})
        )
        for status in (run("--method", "muon", "--out", "r"), sample.main(["a", "--out", "r"])):
            assert status in (0, 2)
            refused += status == 2
        err = capsys.readouterr().err
        assert all(line.startswith(("train.py: ", "sample.py: ")) for line in err.splitlines())
        read_as_plot_does()
        capsys.readouterr()  # what plot.py leaves out
    assert refused > 120


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ["*.train.bin", "*.val.bin", "0*.json", "warmup-*.npz"])
def test_files_that_are_made_once(finished, tmp_path, monkeypatch, capsys, name, damage):
    """They are made again as they were, with a warning, or one line says why they cannot be."""
    shutil.copytree(finished, tmp_path / "copy", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "copy")
    (path,) = Path("data").rglob(name)
    before = path.read_bytes()
    DAMAGE[damage](path)
    changed = not path.is_file() or path.read_bytes() != before
    status = run("--method", "muon", "--out", "s", "--save-every", "1e-9")
    out, err = capsys.readouterr()
    if damage == "a folder":
        assert status == (1 if name.startswith("warmup") else 2)
        assert err.splitlines()[-1].startswith("train.py: ") and err.count("\n") <= 2
    else:
        assert status == 0 and path.read_bytes() == before and changed
        assert err.count("made again") == err.count("\n") <= 1
        assert_same(everything("s"), everything("r"))
