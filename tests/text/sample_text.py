"""Texts that the tests of this folder prepare, and where the vocabulary of gpt2 may be."""

import gzip
import json
import os
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

CACHE = Path(__file__).resolve().parents[3] / "shared" / "tiktoken-cache"
VOCABULARY = "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"  # tiktoken's name for gpt2's merges
needs_vocabulary = pytest.mark.skipif(
    not CACHE.exists() and not Path(os.environ.get("TIKTOKEN_CACHE_DIR", ""), VOCABULARY).exists(),
    reason="gpt2's vocabulary is neither beside the repository nor in TIKTOKEN_CACHE_DIR",
)


@contextmanager
def serving(handler):
    """The address of a server that answers requests by a handler, within the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def documents_of(n, seed=0):
    """n documents of a bit more than 4096 characters each; no two lines are alike.

    Each ends with an empty line, so that a .txt file of them is cut into just these documents.
    """
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(n):
        words = rng.integers(0, 2**32, (65, 8))
        lines = [" ".join(f"{word:08x}" for word in row) for row in words]
        found.append("\n".join(lines) + "\n\n")
    return found


def write_text(path, documents):
    """A .txt file of these documents; its path, as a str."""
    path.write_text("".join(documents), encoding="utf-8")
    return str(path)


def write_c4(path, documents):
    """A gzipped file in C4's format."""
    path.parent.mkdir(exist_ok=True)
    rows = [json.dumps({"text": document, "url": "x"}) + "\n" for document in documents]
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write("".join(rows))
