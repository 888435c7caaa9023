"""C4 as it comes: `data.py c4` with the real `datasets`, from a server that is a Hugging Face.

It fails as networks do: forbidden for a while, too many requests, a connection that ends early.
"""

import gzip
import json
import os
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
from sample_text import serving

import data

COMMIT = "1" * 40
TRAIN = "en/c4-train.00000-of-01024.json.gz"
VAL = "en/c4-validation.00000-of-00008.json.gz"
TEXTS = {
    "train": [f"training document {i}: {i * i} cats.\n" for i in range(900)],
    "val": [f"validation document {i}: {i * i} dogs.\n" for i in range(90)],
}


def zipped(texts):
    """The content of a file in C4's format."""
    rows = [json.dumps({"text": text, "url": "x"}) + "\n" for text in texts]
    return gzip.compress("".join(rows).encode(), mtime=0)


FILES = {"README.md": b"# C4\n", TRAIN: zipped(TEXTS["train"]), VAL: zipped(TEXTS["val"])}


def listed(name):
    """What the server's list of files says of one."""
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40}


class Hub(BaseHTTPRequestHandler):
    """A dataset with FILES. The next requests for the training file fail as `failures` says."""

    failures = []  # each a status, or "cut": the connection ends after a third
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode())

    def do_GET(self):
        path = self.path.partition("?")[0]
        file = re.sub(r"^/datasets/allenai/c4/resolve/\w+/", "", path)
        if re.fullmatch(r"/api/datasets/allenai/c4/revision/\w+", path):
            self.answer_json({"id": "allenai/c4", "sha": COMMIT, "siblings": []})
        elif re.fullmatch(r"/api/datasets/allenai/c4/tree/\w+/en", path):
            self.answer_json([listed(TRAIN), listed(VAL)])
        elif file not in FILES:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        elif file == TRAIN and self.failures:
            self.fail(FILES[file], self.failures.pop(0))
        else:
            self.send_file(FILES[file])

    do_HEAD = do_GET

    def fail(self, body, failure):
        if failure == "cut":
            self.close_connection = True
            self.send_file(body, share=1 / 3)
        else:
            self.answer(failure, b"{}")

    def send_file(self, body, share=1):
        """The bytes that are asked for, or the first share of them."""
        first, last = 0, len(body) - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            first, last = map(int, asked.groups())
        content = body[first : last + 1]
        headers = {
            "ETag": '"2"',
            "X_Repo_Commit": COMMIT,
            "Content_Range": f"bytes {first}-{last}/{len(body)}",
            "Content_Length": len(content),
        }
        self.answer(206 if asked else 200, content[: int(share * len(content))], **headers)


@pytest.fixture
def hub():
    with serving(Hub) as address:
        yield address


@pytest.mark.parametrize("failures", [[], [403, 429, "cut", 503, 403]])
def test_c4_comes_whole_and_in_order_through_any_failures(hub, tmp_path, failures):
    """Every document comes once. A second command, without a network, finds all of it made."""
    Hub.failures = list(failures)
    command = [sys.executable, data.__file__, "c4", "--tokens", "1000", "--tokenizer", "bytes"]
    environment = os.environ | {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
    for address in (hub, "http://127.0.0.1:9"):
        environment["HF_ENDPOINT"] = address
        pipes = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, cwd=tmp_path, env=environment, **pipes)
        assert done.returncode == 0 and "1 file, 900 documents" in done.stdout, done.stderr
    assert not Hub.failures
    for side, texts in TEXTS.items():
        files = Path(tmp_path, "data").glob(f"*/*.{side}.bin")
        (path,) = [path for path in files if path.stat().st_size]
        content = bytes(np.fromfile(path, np.uint16).astype(np.uint8)).decode()
        assert content.split("\0") == [*texts, ""]
