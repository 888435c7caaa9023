"""Run folders with made-up losses, for the tests of what is made from logs."""

import json
from pathlib import Path

FAMILY = ["gn", "gn_prox", "layerwise_gn"]
SEARCHES = ["gn", "layerwise_gn"]  # the methods with a line search
METHODS = [*FAMILY, "adamw", "muon", "soap"]


class Run:
    """A run folder, whose loss at step t is 2 + 3 (1 + t)^-speed + seed / 100.

    It reads 32,768 tokens, if no number of steps is given. speed is its learning rate, too.
    folder: its name; losses: one for each evaluation.
    """

    def __init__(self, path, method="gn", batch=4096, speed=0.5, seed=0, steps=0, every=1, **more):
        steps = steps or 32768 // batch
        number = len(list(path.iterdir()))
        folder = path / f"{method}-{batch}-{number}"
        folder.mkdir()
        flags = {"method": method, "model": "tiny", "data": "stdlib", "tokenizer": "bytes"}
        flags |= {"batch": batch, "inner_batch": 8, "context": 128, "steps": steps, "out": None}
        flags |= {"lr": speed, "warmup": 0.0, "seed": seed, "schedule": "cosine"}
        if method in FAMILY:
            flags |= {"schedule": "global cosine", "inner_warmup": 0.0}
        flags |= more
        flags.setdefault("corpus", {"train": flags["data"], "val": flags["data"]})
        text = json.dumps({"config": flags, "about": {}})
        (folder / "config.json").write_text(text)

        rows = []
        for t in range(0, steps + 1, every):
            loss = 2 + 3 * (1 + t) ** -speed + seed / 100
            row = {"step": t, "tokens": 1000 + t * batch, "val_loss": loss, "alpha": None}
            if method in SEARCHES and t > 0:
                row["alpha"] = [1.0, 0.5, 0.0][t % 3]
            rows.append(row)
        self.folder = str(folder)
        self.losses = [row["val_loss"] for row in rows]
        self.write(rows)

    def write(self, rows):
        lines = [json.dumps(row) + "\n" for row in rows]
        Path(self.folder, "log.jsonl").write_text("".join(lines))

    def rows(self):
        lines = Path(self.folder, "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def on(self, device):
        """Makes it a run on a device."""
        path = Path(self.folder, "config.json")
        saved = json.loads(path.read_text())
        path.write_text(json.dumps(saved | {"about": {"device": device}}))
        return self

    def cut(self, evaluations):
        """Ends the run early."""
        self.write(self.rows()[:evaluations])
        self.losses = self.losses[:evaluations]
        return self

    def diverge(self):
        """Ends the run as train.py records that the loss was no number."""
        *rows, last = self.rows()
        self.write([*rows, {"step": last["step"], "val_loss": None, "diverged": "the loss is nan"}])
        return self
