"""What a run keeps on disk. A crash at any moment leaves the old file or the new one, whole.

config.json               the flags, the hash of the text, the commit, the versions, the device
log.jsonl                 a row per evaluation
text.json                 hashes of the parts of the text that the run has read
checkpoint.npz            the method's whole state, each array in its own dtype
checkpoint.previous.npz   the state that was saved before
checkpoint.next.npz       while a state is saved, its draft
checkpoint.damaged.npz    a state that could not be read, put aside
lock                      held by the process that works here
warmup.npz                during the warm-up, its state
"""

import itertools
import json
import os
import platform
import re
import subprocess
import sys
import zipfile
import zlib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jax
import numpy as np

from runtime import files, parallel
from runtime.command import BadInput

ROOT = Path(__file__).resolve().parents[1]  # of the project
FOLDERS = ("", "kernels", "text", "runtime")  # of the code that a run uses
# Files in them that cannot change what a run computes: other commands, and what is only shown.
NOT_COUNTED = {"bench", "comparison", "energy", "experiments", "packed", "pages", "plot"}
NOT_COUNTED |= {"progress", "report", "sample", "tables", "tutorial"}


# ---- arrays ----


def write_file(path, write, check=None):
    """files.write_file in the first process; the others do nothing."""
    if jax.process_index() == 0:
        files.write_file(path, write, check)


def write_text(path, text):
    """files.write_text in the first process; the others do nothing."""
    if jax.process_index() == 0:
        files.write_text(path, text)


def remove(path):
    """Removes a file, and the draft of it that a kill may have left. Neither need be there."""
    if jax.process_index() == 0:
        Path(path).unlink(missing_ok=True)
        Path(f"{path}.draft").unlink(missing_ok=True)


def save(path, tree, shared=False):
    """Writes a tree of arrays as .npz: each array in its own dtype, under its path in the tree.

    shared: whether another run may write the file at the same time; then one waits for the other.
    Reads the file again before it gets its name. Raises OSError if what is read is not what was
    written, by the checksum that a zip file holds of each of its parts, and TypeError for a dtype
    that .npz does not know, such as bfloat16.
    """
    arrays = {}
    for where, a in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(where)
        array = parallel.whole(a)
        if array.dtype.kind == "V":  # it would be read as bytes without a meaning
            raise TypeError(f"{path}: {name} is {array.dtype}, which .npz cannot hold")
        arrays[name] = array

    def check(draft):
        if is_damaged(draft, arrays.keys()):
            raise OSError(f"{path}: what was written is not what is read")

    with ExitStack() as stack:
        if shared and jax.process_index() == 0:
            stack.enter_context(files.locked(Path(path).with_name("lock")))
        write_file(path, lambda f: np.savez(f, **arrays), check)


def is_damaged(path, names):
    """Whether an .npz file has not just these arrays, or one with another checksum than it says."""
    try:
        with zipfile.ZipFile(path) as file:
            has_all = {f"{name}.npy" for name in names} == {*file.namelist()}
            return not has_all or file.testzip() is not None
    except (OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return True


def read_arrays(path):
    """{name: array} of an .npz file; nothing in it is executed. Raises ValueError if damaged."""
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        reason = error
        if "pickle" in str(error):  # NumPy would load anything that is no .npz file by pickle
            reason = "it is no .npz file"
        raise ValueError(f"{path} cannot be read: {reason}") from None


def load(path, like):
    """Reads a tree of numpy arrays that `save` wrote; the caller spreads them over its devices.

    Raises ValueError if the file is damaged, or if the tree's structure, shapes or dtypes are not
    those of `like`.
    """
    arrays = read_arrays(path)
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(where): a for where, a in leaves}
    difference = find_difference(arrays, expected)
    if difference:
        raise ValueError(f"{path} holds other arrays than this run has: {difference}")
    in_order = [arrays[name] for name in expected]
    return jax.tree_util.tree_unflatten(structure, in_order)


def find_difference(found, expected):
    """The first difference in names, shapes and dtypes of two {name: array}, as a text, or None."""
    for name in expected | found:
        there, here = describe(found.get(name)), describe(expected.get(name))
        if there == here:
            continue
        difference = f"{name} is {there} there, {here} here"
        if without_width(there) == without_width(here):
            difference += " (was JAX_ENABLE_X64 another one then?)"
        return difference
    return None


def describe(a):
    """The dtype and the shape of an array, such as float32 [2, 3]."""
    if a is None:
        return "missing"
    return f"{a.dtype} {list(a.shape)}"


def without_width(description):
    """What `describe` says, without whether its numbers are of 32 or of 64 bits."""
    return re.sub("(float|int)(32|64) ", r"\1 ", description)


# ---- the state of a run ----


def state_files(folder):
    """The paths of a run's newest checkpoint and of the one before."""
    return Path(folder) / "checkpoint.npz", Path(folder) / "checkpoint.previous.npz"


def save_state(folder, state):
    """Writes the state of a run. The one that was saved before stays beside it."""
    newest, previous = state_files(folder)
    following = newest.with_name("checkpoint.next.npz")
    save(following, state)
    if jax.process_index() > 0:
        return
    if newest.exists():
        previous.unlink(missing_ok=True)
        try:
            os.link(newest, previous)  # a link, so that at no moment there is no newest
        except OSError:  # a file system without links
            os.replace(newest, previous)
    os.replace(following, newest)
    files.sync(newest.parent)


def load_state(folder, like):
    """The newest state of a run that can be read; None if the run has saved none.

    If the newest is damaged, it warns, puts it aside and takes the one before. Raises OSError if
    that cannot be read either.
    """
    newest, previous = state_files(folder)
    present = [path for path in (newest, previous) if path.exists()]
    if not present:
        return None

    damage = []
    for path in present:
        state = None
        try:
            state = load(path, like)
        except ValueError as error:
            damage.append(str(error))
        if parallel.in_any(state is None):  # one process cannot read it
            damage = damage or [f"{path} cannot be read by another process"]
            continue
        if damage:
            step = int(state.t)
            print(f"{damage[0]}; resuming from the one before, step {step}", file=sys.stderr)
            put_aside(newest)
        return state
    raise OSError(f"{'; '.join(damage)}; another --out starts a new run")


def put_aside(path):
    """Renames a damaged file checkpoint.npz to checkpoint.damaged.npz, or damaged1, damaged2, .."""
    parallel.wait()  # until every process has read it
    if jax.process_index() > 0:
        return
    for number in itertools.count():
        aside = path.with_name(f"{path.stem}.damaged{number or ''}.npz")
        if not aside.exists():
            os.replace(path, aside)
            return


def resume(folder, init, last_step):
    """The state and the log rows that a run's folder holds; None and [] if it has saved no state.

    init: a function that makes a state like the saved one; it is not computed, only traced.
    last_step: the end of the run, as it is asked for now. An earlier command may have gone further;
    then its later rows are left out. Raises OSError if the log or both checkpoints are damaged, or
    one of them is gone, and FloatingPointError if the run has diverged at last_step or before.
    """
    rows = read_log(folder)
    check_log(folder, rows, last_step)
    state = load_state(folder, jax.eval_shape(init))
    # The first row is written before the first state, and the second row after it.
    if state is None:
        if len(rows) > 1:
            what = f"{folder}/log.jsonl has {len(rows)} rows, but the run's checkpoint.npz is gone"
            raise OSError(f"{what}; another --out starts a new run")
        return None, []
    if not rows:
        raise OSError(f"{folder}/log.jsonl has lost its rows; another --out starts a new run")
    # A crash between the log and the checkpoint leaves a row that is ahead of the state.
    end = min(int(state.t), last_step)
    return state, [row for row in rows if row["step"] <= end]


def is_beyond(state, last_step):
    """Whether a state is further than the end of a run of so many outer steps."""
    return (int(state.t), int(state.k)) > (last_step, 0)


# ---- the log ----

COUNTS = ("step", "tokens", "tokens_line_search")  # whole numbers in every row of a log
MEASURES = ("val_loss", "val_bpb", "input_wait")  # numbers in every row


def read_log(folder):
    """The rows of log.jsonl, [] if there is no such file. Raises OSError if it is damaged."""
    path = Path(folder) / "log.jsonl"
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} cannot be read: {error}") from None


def write_log(folder, rows):
    """Writes log.jsonl. Raises ValueError for NaN and infinity, which JSON does not have."""
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    write_text(Path(folder) / "log.jsonl", text)


def check_log(folder, rows, last_step):
    """Raises OSError if rows of a log are damaged.

    Raises FloatingPointError if the run has diverged at `last_step` or before.
    """
    for row in rows:
        if not isinstance(row, dict):
            raise OSError(f"{folder}/log.jsonl has a line that is no JSON object")
    if rows and "diverged" in rows[-1]:
        *rows, last = rows
        is_later = isinstance(last.get("step"), int) and last["step"] > last_step
        if not is_later:
            raise FloatingPointError(f"{folder}: {last['diverged']}")
    if not all(map(is_row, rows)):
        raise OSError(f"{folder}/log.jsonl has a damaged row; another --out starts a new run")


def is_row(row):
    """Whether a row of a log has what a resumed run and the commands need of it."""
    counts = all(isinstance(row.get(name), int) for name in COUNTS)
    measures = all(isinstance(row.get(name), int | float) for name in MEASURES)
    all_are_numbers = all(isinstance(value, int | float | None) for value in row.values())
    return counts and measures and all_are_numbers


# ---- the folder of a run ----


class InUse(BadInput):
    """Another process is working in the folder of a run."""


@contextmanager
def alone(folder):
    """Holds a run's folder, created if it is not there, against other runs.

    The hold ends with the context or with the process. Raises InUse if another run has the folder.
    Of the processes of one run, the first holds it.
    """
    with ExitStack() as stack:
        is_first = jax.process_index() == 0
        taken = is_first and not files.hold(Path(folder) / "lock", stack)
        refuse_taken(folder, taken)
        yield


def check_free(folder):
    """Raises InUse if another run has the folder now. Creates nothing, keeps nothing open."""
    taken = jax.process_index() == 0 and files.is_locked(Path(folder) / "lock")
    refuse_taken(folder, taken)


def refuse_taken(folder, taken):
    """Raises InUse in all processes if one of them found that another run has the folder."""
    if parallel.in_any(taken):
        raise InUse(f"{folder} is in use by another run; give another --out")


def check_folder(folder, flags, defaults, reasons):
    """Raises ValueError unless a folder is missing, is empty, or holds a run of these flags.

    flags: {name: value}, and maybe the hash of the text as "corpus"; other flags of the run do not
    matter. defaults: values of flags that the run's config.json may lack, because it is older than
    they are. reasons: {name: why another value makes another run}, of flags that need one.
    """
    folder = Path(folder)
    if not folder.exists():
        return
    if is_unborn(folder):
        return

    try:
        saved = read_config(folder)
        then = defaults | saved["config"]
        about = saved["about"]
        # reopen_folder reads both, but older runs lack the second.
        if "code" not in about or not isinstance(about.get("jax_settings", {}), dict):
            raise ValueError("it does not say how the run was made")
    except files.UNREADABLE:
        what = f"{folder} is there and is not a run"
        if (folder / "log.jsonl").exists():
            what = f"{folder} is a run whose config.json is missing or damaged"
        raise ValueError(f"{what}; give another --out") from None
    changes = []
    for name, value in flags.items():
        if then.get(name) == value:
            continue
        change = f"{name} {then.get(name)} -> {value}"
        if name == "corpus":
            change = "its text was another one"  # in place of hashes
        if name in reasons:
            change += f", {reasons[name]}"
        changes.append(change)
    if changes:
        what = "; ".join(changes)
        raise ValueError(f"{folder} holds another run ({what}); give another --out")


def is_unborn(folder):
    """Whether a folder has only what a run may leave that ended before it had a config.json."""
    leavings = {"lock", "config.json.draft"}
    return folder.is_dir() and {path.name for path in folder.iterdir()} <= leavings


def read_config(folder):
    """What config.json of a run's folder holds."""
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def write_config(folder, config):
    """Writes config.json, a dict of dicts."""
    write_text(Path(folder) / "config.json", json.dumps(config, indent=1))


def open_folder(folder, flags, renewed=()):
    """Creates the folder of a run, or reopens it.

    renewed: names of flags whose values config.json gets anew, as a run may become longer.
    """
    if (Path(folder) / "config.json").exists():
        reopen_folder(folder, {name: flags[name] for name in renewed})
    else:
        create_folder(folder, flags)


def reopen_folder(folder, renewed):
    """Renews some flags in the config.json of a run, and says what else has changed since then.

    That is the code, and variables of the shell that change what JAX computes.
    """
    saved = read_config(folder)
    config, about = saved["config"], saved["about"]
    warn_of_other_code(folder, about["code"])
    warn_of_other_settings(folder, about.get("jax_settings", {}))
    if config | renewed != config:
        write_config(folder, saved | {"config": config | renewed})


def create_folder(folder, flags):
    """Makes the folder of a run with its config.json."""
    device = jax.devices()[0]
    about = {
        "commit": commit(),
        "code": CODE,
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jax_settings": jax_settings(),
        "numpy": np.__version__,
        "device": f"{device.platform}: {device.device_kind}",
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_config(folder, {"config": flags, "about": about})


def check_text(folder, hashes):
    """Notes in text.json which text a run reads.

    hashes: {number of a group of files: the sha256 of its ids} of all groups up to now. They come
    one by one, while the run reads. Raises BadInput if it was another text before, or if text.json
    is damaged.
    """
    path = Path(folder) / "text.json"
    known = {}
    if path.exists():
        try:
            known = dict(json.loads(path.read_text(encoding="utf-8")))
        except files.UNREADABLE as error:
            raise BadInput(f"{path} cannot be read: {error}; give another --out") from None
    now = {str(group): sha256 for group, sha256 in hashes.items()}
    for group, sha256 in now.items():
        if known.get(group, sha256) != sha256:
            what = f"part {group} of the text is not what it was when this run read it"
            raise BadInput(f"{folder}: {what}; give another --out")
    if now.keys() - known.keys():
        write_text(path, json.dumps(known | now, indent=1))


# ---- the code that a run was made with ----


def hash_of_code():
    """A hash of the source files that decide what a run computes."""
    contents = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            is_hidden = path.name.startswith(".")  # such as a link that an editor keeps beside it
            if path.stem not in NOT_COUNTED and not is_hidden:
                contents.append([path.name, path.read_bytes().decode(errors="replace")])
    return files.digest(contents)


CODE = hash_of_code()  # now: someone may edit the files while this process runs


def warn_of_other_code(what, code_then):
    """Says so if a file or folder was begun with code that has changed since; the run goes on."""
    if code_then != CODE:
        print(f"{what} was begun with other code than the present one", file=sys.stderr)


def jax_settings():
    """{name: value} of JAX's own settings that change the numbers of a run.

    A person sets them by variables of the same names, in capitals.
    """
    names = (
        "jax_enable_x64",
        "jax_default_matmul_precision",
        "jax_default_prng_impl",
        "jax_threefry_partitionable",
    )
    return {name: getattr(jax.config, name) for name in names}


def warn_of_other_settings(folder, then):
    """Says so if a run was begun with other `jax_settings`; the run goes on."""
    now = jax_settings()
    changes = []
    for name, value in then.items():
        if now.get(name) != value:
            changes.append(f"{name} {value} -> {now.get(name)}")
    if changes:
        print(
            f"{folder} was begun with other settings of JAX: {'; '.join(changes)}", file=sys.stderr
        )


def commit():
    """The git commit of this code, with "-dirty" if files differ; None outside of a checkout."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Not the commit of another repository: of one that variables name, as they do in a git hook, or
    # of one that this code lies in.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    variables["GIT_CEILING_DIRECTORIES"] = str(ROOT.parent)
    options = {"capture_output": True, "encoding": "utf-8", "check": True}
    try:
        done = subprocess.run(command, cwd=ROOT, env=variables, **options)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def keep_programs(folder):
    """Keeps compiled programs in a folder between runs, unless JAX is told of another place."""
    if not jax.config.jax_compilation_cache_dir:
        machine = platform.node()  # a program of one CPU may not run on another
        jax.config.update("jax_compilation_cache_dir", f"{folder}/{machine}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
