"""Prints how a trained model continues a text: `python sample.py --out RUN "text"`.

The model is the last one that the run in the folder RUN has saved. Ids are drawn one after another,
each from softmax(z / TEMPERATURE), where z are the logits of the next id. The model sees no more
than the last `context` ids.
"""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import model
from kernels import choice
from runtime import checkpoint, files, flags, parallel
from runtime.command import blaming_input, command
from text.tokenizer import tokenizer

LENGTH = 200  # ids at most
TEMPERATURE = 0.8  # of the softmax; below 1, likely ids become likelier


def read(folder):
    """The network, the weights (their average if the run has one) and the tokenizer of a run.

    Raises ValueError if the folder does not hold a run, or a run that has not saved its state, and
    if the tokenizer cannot be had.
    """
    try:
        config = checkpoint.read_config(folder)["config"]
        network = read_network(config)
        name = config["tokenizer"]
        if not isinstance(name, str):
            raise TypeError(f"its tokenizer is {name!r}")
        params = read_weights(Path(folder) / "checkpoint.npz", network)
    except files.UNREADABLE as error:
        raise ValueError(f"{folder} holds no run to sample from: {error}") from None
    return network, params, tokenizer(name, network.vocab_size)


def read_network(config):
    """The network's Config from the flags in config.json. Raises TypeError or ValueError."""
    sizes = {}
    for name, flag in flags.fields_of(model.Config).items():
        if name not in config:
            raise ValueError(f"its config.json has no {name}")
        sizes[name] = config[name]
        if type(config[name]) is not flag.kind:
            raise TypeError(f"its {name} is {config[name]!r}")
    network = model.Config(**sizes)
    network.check()
    return network


def read_weights(path, network):
    """The weights to sample from, of a checkpoint of any method.

    Raises ValueError if it is damaged, or if its arrays are missing or not of the network's sizes.
    """
    arrays = checkpoint.read_arrays(path)
    field = ".params"
    if ".average['head']" in arrays:
        field = ".average"

    def find(where, shape):
        name = field + jax.tree_util.keystr(where)
        difference = checkpoint.find_difference({name: arrays.get(name)}, {name: shape})
        if difference:
            what = "its arrays are not of the sizes that config.json says"
            raise ValueError(f"{what}: {difference}")
        return arrays[name]

    shapes = model.shapes(network)
    return jax.tree_util.tree_map_with_path(find, shapes)


@partial(jax.jit, static_argnames="network")
def draw(network, params, window, n, key):
    """Draws the id that follows the first n of a window; window: int32 [1, T]; n: from 1 to T."""
    h = model.hidden(network, params, window)[0, n - 1]
    z = model.head(network, h, params["head"])
    return jax.random.categorical(key, z / TEMPERATURE)


def generate(network, params, tok, text, seed=0):
    """The text, continued by a model until a document ends, or by LENGTH ids.

    network, params, tok: as from `read`.
    """
    choice.choose(network, params)
    params = jax.device_put(params)  # once, not for each id
    ids = [tok.end_of_text, *tok.encode(text).tolist()]
    for key in jax.random.split(jax.random.key(seed), LENGTH):
        last = ids[-network.context :]
        # One length for all, so that `draw` is compiled once. No id sees the zeros after it.
        window = np.zeros((1, network.context), np.int32)
        window[0, : len(last)] = last
        following = int(draw(network, params, jnp.asarray(window), len(last), key))
        if following == tok.end_of_text:
            break
        ids.append(following)
    return tok.decode(ids[1:])


ABOUT = 'Prints how a trained model continues a text: python sample.py --out RUN "text"'


@command
def main(words):
    """Runs the command line."""
    parser = flags.Parser(usage='sample.py --out RUN "text" [--seed N]', description=ABOUT)
    parser.add_argument("text", type=flags.utf8, help="what the model continues")
    parser.add_argument("--out", required=True, type=flags.utf8, help="the folder of a run")
    parser.add_argument("--seed", default=0, type=flags.count, help="of what is drawn [default 0]")
    with blaming_input():
        options = parser.parse_args(words)
        flags.check_range(options, ["seed"], least=0, below=2**32)
        parallel.check_devices()
        network, params, tok = read(options.out)
    checkpoint.keep_programs("data/compiled")
    print(generate(network, params, tok, options.text, options.seed))


if __name__ == "__main__":
    sys.exit(main())
