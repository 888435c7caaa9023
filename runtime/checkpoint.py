"""What a run keeps on disk, written so that a crash at any moment leaves the old file or the new one, whole.

    config.json     the flags, the corpus, the commit, the versions, the device
    log.jsonl       a row an evaluation
    checkpoint.npz  the method's whole state, each array in its own dtype; checkpoint.previous.npz: the one before
    warmup.npz      in the warm-up, its state
"""

import itertools
import json
import os
import platform
import subprocess
import sys
import zipfile
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from runtime import files, parallel

ROOT = Path(__file__).resolve().parents[1]  # of the project


def write_file(*args):
    """files.write_file, in the first of several processes."""
    if jax.process_index() == 0:
        files.write_file(*args)


def remove(path):
    """Removes a file, and the draft of it that a kill has left, where they are; in the first of several processes."""
    if jax.process_index() == 0:
        for left in (path, Path(f"{path}.draft")):
            left.unlink(missing_ok=True)


def save(path, tree):
    """Writes a tree of arrays as .npz, each array in its own dtype under its path in the tree, and reads it again.

    Raises OSError where what is read is not what was written: zip files hold a checksum of each of their parts.
    """

    def check(draft):
        with zipfile.ZipFile(draft) as f:
            if f.testzip():
                raise OSError(f"{path}: what was written is not what is read")

    leaves = {jax.tree_util.keystr(where): parallel.whole(a) for where, a in jax.tree_util.tree_leaves_with_path(tree)}
    write_file(path, lambda f: np.savez(f, **leaves), check)


def save_state(folder, state):
    """Writes a run's state; the one before stays beside it."""
    newest, before = (Path(folder) / f"checkpoint{name}.npz" for name in ("", ".previous"))
    draft = newest.with_name("checkpoint.next.npz")
    save(draft, state)
    if jax.process_index() == 0:
        if newest.exists():
            before.unlink(missing_ok=True)
            try:
                os.link(newest, before)  # at no moment is there none
            except OSError:  # a disk that has no links
                os.replace(newest, before)
        os.replace(draft, newest)
        files.sync(newest.parent)


DAMAGED = (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)  # what reading may raise


def read_arrays(path):
    """{name: array} of an .npz file; nothing in it is executed. Raises ValueError where it is damaged."""
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as arrays:
            return dict(arrays)
    except DAMAGED as error:
        raise ValueError(f"{path} cannot be read: {error}") from None


def load(path, like):
    """Reads a tree saved by `save`.

    Raises ValueError where the file is damaged, or has not the structure, shapes and dtypes of `like`.
    """
    arrays = read_arrays(path)
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(where): (a.shape, a.dtype) for where, a in leaves}
    if {name: (a.shape, a.dtype) for name, a in arrays.items()} != expected:
        raise ValueError(f"{path} holds other arrays than this run has")
    return jax.tree_util.tree_unflatten(structure, [jnp.asarray(arrays[name]) for name in expected])


REAL, COUNTS = (int, float), ("step", "tokens", "tokens_line_search")
ROW = {**dict.fromkeys(COUNTS, int), **dict.fromkeys(("val_loss", "val_bpb", "input_wait"), REAL)}
ROW |= dict.fromkeys(("train_loss", "lr", "alpha", "seconds", "refused"), (*REAL, type(None)))  # of a row of the log


def read_log(folder):
    """The rows of log.jsonl; none where there is no such file. Raises OSError where it is damaged."""
    path = Path(folder) / "log.jsonl"
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} cannot be read: {error}") from None


def write_log(folder, rows):
    """Writes log.jsonl anew. NaN and infinity, which JSON has not, are refused with a ValueError."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    write_file(Path(folder) / "log.jsonl", lambda f: f.write(text.encode()))


def resume(folder, init):
    """The state and the log's rows that a run's folder holds, or None and []; init(): a state like it, not computed.

    A damaged checkpoint is put aside, with a warning, and the one before is taken. Raises OSError where that is damaged
    too, and FloatingPointError where the run diverged before.
    """
    rows, like = read_log(folder), jax.eval_shape(init)
    if not all(isinstance(row, dict) for row in rows):
        raise OSError(f"{folder}/log.jsonl has a line that is no JSON object")
    if rows and "diverged" in rows[-1]:
        raise FloatingPointError(f"{folder}: {rows[-1]['diverged']}")
    if not all(isinstance(row.get(name, ""), kind) for row in rows for name, kind in ROW.items()):
        raise OSError(f"{folder}/log.jsonl has a row without what a row has; another --out begins anew")
    newest, before = found = [Path(folder) / f"checkpoint{name}.npz" for name in ("", ".previous")]
    if not any(path.exists() for path in found):
        return None, []
    try:
        state = load(newest if newest.exists() else before, like)
    except ValueError as error:
        if not (newest.exists() and before.exists()):
            raise OSError(error) from None
        try:
            state = load(before, like)
        except ValueError as other:
            raise OSError(f"{error}; {other}") from None
        print(f"{error}; going on from the one before, step {int(state.t)}", file=sys.stderr)
        parallel.wait()  # until all have read it
        if jax.process_index() == 0:
            names = (newest.with_name(f"checkpoint.damaged{i or ''}.npz") for i in itertools.count())
            os.replace(newest, next(path for path in names if not path.exists()))
    return state, [row for row in rows if row["step"] <= int(state.t)]


@contextmanager
def alone(folder):
    """Holds a run's folder, made where there is none, against other processes; the hold ends with the process.

    Raises ValueError where another one has it. Of the processes of one run the first holds it.
    """
    with ExitStack() as stack:
        taken = False
        if jax.process_index() == 0:
            try:
                stack.enter_context(files.locked(Path(folder) / "lock", wait=False))
            except BlockingIOError:
                taken = True
        if parallel.largest(taken):
            raise ValueError(f"{folder} is in use by another run; give another --out")
        yield


def keep_programs(folder):
    """Compiled programs stay in folder between runs, unless JAX is told of another place for them."""
    if not jax.config.jax_compilation_cache_dir:  # by machine: a program of one CPU may not run on another
        jax.config.update("jax_compilation_cache_dir", f"{folder}/{platform.node()}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def code(*modules):
    """A hash of the source of these files of the project; where none is named, of all but those that only show."""
    every = [path for room in ("", "kernels", "text", "runtime") for path in sorted((ROOT / room).glob("*.py"))]
    paths = [path for path in every if path.stem in (modules or {path.stem} - {"bench", "plot", "report"})]
    return files.digest([[path.name, path.read_text()] for path in paths])


def commit():
    """The git commit of this code, "-dirty" behind it where files differ; None outside a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def check_folder(folder, config):
    """Raises ValueError where folder holds anything but a run of these settings, or nothing."""
    folder, nothing = Path(folder), {"lock", "config.json.draft"}  # what a kill may leave of a run not begun
    if not folder.exists() or (folder.is_dir() and {path.name for path in folder.iterdir()} <= nothing):
        return
    try:
        old = json.loads((folder / "config.json").read_text())
        then, _ = dict(old["config"]), old["about"]["code"]  # the latter for open_folder
    except files.UNREADABLE:
        raise ValueError(f"{folder} is there and is not a run; give another --out") from None
    differ = [f"{k} {then.get(k)} -> {config[k]}" for k in config if then.get(k) != config[k]]
    if differ:
        raise ValueError(f"{folder} holds another run ({'; '.join(differ)}); give another --out")


def open_folder(folder, config):
    """Makes the folder of a run of these settings where there is none; where there is one of other code, says so."""
    folder = Path(folder)
    if (folder / "config.json").exists():
        if json.loads((folder / "config.json").read_text())["about"]["code"] != code():
            print(f"{folder} was begun with other code; another --out begins anew", file=sys.stderr)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        device = jax.devices()[0]
        about = {"commit": commit(), "code": code(), "python": sys.version.split()[0]}
        about |= {"jax": jax.__version__, "numpy": np.__version__, "device": f"{device.platform}: {device.device_kind}"}
        text = json.dumps({"config": config, "about": about}, indent=1)
        write_file(folder / "config.json", lambda f: f.write(text.encode()))
