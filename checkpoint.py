"""What a run keeps on disk, written so that a crash at any moment leaves the old file or the new one, whole.

    config.json     the flags, the corpus, the commit, the versions, the device
    log.jsonl       a row an outer step
    checkpoint.npz  the method's whole state, each array in its own dtype
"""

import json
import os
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def write_file(path, write):
    """Calls write(file) on a temporary file, syncs it and renames it to path, which is never half written."""
    draft = Path(f"{path}.draft-{os.getpid()}")
    try:
        with open(draft, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def save(path, tree):
    """Writes a tree of arrays as .npz, each array in its own dtype under its path in the tree."""
    leaves = {jax.tree_util.keystr(where): np.asarray(a) for where, a in jax.tree_util.tree_leaves_with_path(tree)}
    write_file(path, lambda f: np.savez(f, **leaves))


def load(path, like):
    """Reads a tree saved by `save`.

    Raises ValueError where the file is damaged, or has not the structure, shapes and dtypes of `like`.
    """
    try:
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as arrays:
            arrays = dict(arrays)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    leaves, structure = jax.tree_util.tree_flatten_with_path(like)
    expected = {jax.tree_util.keystr(where): (a.shape, a.dtype) for where, a in leaves}
    if {name: (a.shape, a.dtype) for name, a in arrays.items()} != expected:
        raise ValueError(f"{path} holds other arrays than this run has")
    return jax.tree_util.tree_unflatten(structure, [jnp.asarray(arrays[name]) for name in expected])


def read_log(folder):
    """The rows of log.jsonl; a last line cut short by a crash is left out."""
    path = Path(folder) / "log.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def write_log(folder, rows):
    write_file(Path(folder) / "log.jsonl", lambda f: f.write("".join(json.dumps(row) + "\n" for row in rows).encode()))


def commit():
    """The git commit of this code; None outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def open_folder(folder, config):
    """Makes the folder of a run of these settings, or checks that the one there is of the same.

    Raises ValueError where it holds anything else; nothing is then touched.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        old = json.loads((folder / "config.json").read_text())["config"]
        differ = [f"{k} {old.get(k)} -> {config.get(k)}" for k in {**old, **config} if old.get(k) != config.get(k)]
        if differ:
            raise ValueError(f"{folder} holds another run ({'; '.join(differ)}); give another --out")
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there and is not a run; give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    device = jax.devices()[0]
    about = {"commit": commit(), "python": sys.version.split()[0], "jax": jax.__version__, "numpy": np.__version__}
    about["device"] = f"{device.platform}: {device.device_kind}"
    text = json.dumps({"config": config, "about": about}, indent=1)
    write_file(folder / "config.json", lambda f: f.write(text.encode()))
