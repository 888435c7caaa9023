"""C4 as it comes: `data.py c4` with the real `datasets`, from a server here that answers as Hugging Face does.

It fails as networks do: forbidden for a while, too many requests, a connection that ends in the middle of a file.
"""

import gzip
import json
import os
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import data

COMMIT = "1" * 40
TEXTS = {
    side: [f"{side}, document {i}: {i * i} cats.\n" for i in range(n)]
    for side, n in (("train", 900), ("val", 90))
}
NAMES = {
    "train": "en/c4-train.00000-of-01024.json.gz",
    "val": "en/c4-validation.00000-of-00008.json.gz",
}


def zipped(texts):
    return gzip.compress(
        "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode(), mtime=0
    )


FILES = {"README.md": b"# C4\n", **{NAMES[side]: zipped(texts) for side, texts in TEXTS.items()}}


class Hub(BaseHTTPRequestHandler):
    """A dataset with FILES. Of requests for training text the next ones end as `failures` says."""

    failures = []
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

    def do_GET(self):
        path = self.path.partition("?")[0]
        file = re.sub(r"^/datasets/allenai/c4/resolve/\w+/", "", path)
        if re.fullmatch(r"/api/datasets/allenai/c4/revision/\w+", path):
            self.answer(
                200, json.dumps({"id": "allenai/c4", "sha": COMMIT, "siblings": []}).encode()
            )
        elif re.fullmatch(r"/api/datasets/allenai/c4/tree/\w+/en", path):
            about = lambda name: {
                "type": "file",
                "path": name,
                "size": len(FILES[name]),
                "oid": "0" * 40,
            }
            self.answer(200, json.dumps([about(name) for name in NAMES.values()]).encode())
        elif file not in FILES:
            self.answer(404, b"{}", X_Error_Code="EntryNotFound")
        else:
            self.send_file(
                FILES[file],
                self.failures.pop(0) if file == NAMES["train"] and self.failures else None,
            )

    do_HEAD = do_GET

    def send_file(self, body, failure):
        if failure and failure != "cut":
            self.answer(failure, b"{}")
            return
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = map(int, asked.groups()) if asked else (0, len(body) - 1)
        part, where = body[first : last + 1], f"bytes {first}-{last}/{len(body)}"
        headers = {
            "ETag": '"2"',
            "X_Repo_Commit": COMMIT,
            "Content_Range": where,
            "Content_Length": len(part),
        }
        self.close_connection = failure == "cut"
        self.answer(206 if asked else 200, part[: len(part) // 3] if failure else part, **headers)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("failures", [[], [403, 429, "cut", 503, 403]])
def test_c4_comes_whole_and_in_order_through_any_failures(hub, tmp_path, failures):
    """The token files hold every document once; a second command finds them made, with the network gone."""
    Hub.failures = list(failures)
    command = [sys.executable, data.__file__, "c4", "--tokens", "1000", "--tokenizer", "bytes"]
    environment = os.environ | {
        "HF_ENDPOINT": hub,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
    }
    for address in (hub, "http://127.0.0.1:9"):
        environment["HF_ENDPOINT"] = address
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0 and "990 documents: " in done.stdout, done.stderr
    assert not Hub.failures
    for side, texts in TEXTS.items():
        (path,) = [p for p in Path(tmp_path, "data").glob(f"*/*.{side}.bin") if p.stat().st_size]
        assert bytes(np.fromfile(path, np.uint16).astype(np.uint8)).decode() == "".join(
            text + "\0" for text in texts
        )
