"""What a model has learnt, for a person to see: text that it goes on with."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import model
from runtime import checkpoint, files, flags
from text.tokenizer import tokenizer

LENGTH = 200  # ids at most
TEMPERATURE = 0.8  # below 1: likelier words


def read(folder):
    """The network, the weights (the average where there is one) and the tokenizer of a run.

    Raises ValueError where the folder holds none, or none that has saved its state.
    """
    try:
        config = json.loads((Path(folder) / "config.json").read_text())["config"]
        kinds = {name: flag.kind for name, flag in flags.fields_of(model.Config).items()}
        if wrong := [name for name, kind in kinds.items() if type(config[name]) is not kind]:
            raise TypeError(f"its {wrong[0]} is {config[wrong[0]]!r}")
        network = model.Config(**{name: config[name] for name in kinds})
        ids = tokenizer(config["tokenizer"], config["vocab_size"])
        arrays = checkpoint.read_arrays(Path(folder) / "checkpoint.npz")
        part = ".average" if ".average['head']" in arrays else ".params"
        like = jax.eval_shape(partial(model.init, network), jax.random.key(0))
        params = jax.tree_util.tree_map_with_path(lambda at, _: arrays[part + jax.tree_util.keystr(at)], like)
        if jax.tree.map(lambda a: (a.shape, a.dtype), params) != jax.tree.map(lambda a: (a.shape, a.dtype), like):
            raise ValueError("its arrays are not of the sizes that config.json says")
    except files.UNREADABLE as error:
        raise ValueError(f"{folder} holds no run to generate from: {error}") from None
    return network, params, ids


@partial(jax.jit, static_argnums=0)
def following(network, params, window, n, key):
    """An id drawn for the place behind the first n of window, int32 [1, T]."""
    h = model.hidden(network, params, window)[0, n - 1]
    return jax.random.categorical(key, model.head(network, h, params["head"]) / TEMPERATURE)


def generate(folder, text, seed=0):
    """The text, and what the model of a run goes on with until a document ends, LENGTH ids at most.

    Raises ValueError where folder is none of a run.
    """
    if not folder:
        raise ValueError("generate needs --out, the folder of a run")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below 2^32")
    network, params, tok = read(folder)
    ids = [tok.end_of_text, *tok.encode(text).tolist()]
    for key in jax.random.split(jax.random.key(seed), LENGTH):
        last = ids[-network.context :]
        window = np.zeros((1, network.context), np.int32)
        window[0, : len(last)] = last
        ids.append(int(following(network, params, jnp.asarray(window), len(last), key)))
        if ids[-1] == tok.end_of_text:
            break
    return tok.decode([i for i in ids if i != tok.end_of_text])
