"""Run folders and their pages, for tests of reports."""

import json
import re
from html import unescape
from pathlib import Path

from runs import training_config

from gpt2_ddp.config.cli import dump
from gpt2_ddp.reports.report import write_report

BATCH = 512
SCORED = {"val_tokens": 999, "val_bits_per_byte": 1.25}
START = {
    "event": "start",
    "step": 0,
    "command": "train_gpt2.py --seed 7",
    "versions": {"torch": "2"},
}
HOSTILE = '</pre><script>alert("x")</script> & $\\foo$'


def metrics(n_rows, every=10):
    """The step-0 evaluation and n_rows logged steps; every
    fifth is evaluated, the row of step 200 is the best."""
    rows = [{"step": 0, "tokens": 0, "val_loss": 9.0, **SCORED}]
    for i in range(1, n_rows + 1):
        step = i * every
        row = {
            "step": step,
            "tokens": step * BATCH,
            "loss": 3 + 6 / i,
            "lr": 1e-3,
            "grad_norm": 1 / i,
        }
        row |= {"tokens_per_second": 256.0, "mfu": 0.25, "order_digest": f"{i:064x}"[::-1]}
        rows.append(row | ({"val_loss": 2 + abs(i - 20) / 10, **SCORED} if i % 5 == 0 else {}))
    return rows


def write_rows(run, rows, samples):
    rows = [*rows, *({"event": "sample", **sample} for sample in samples)]
    (run / "metrics.jsonl").write_text("\n".join([*map(json.dumps, rows), ""]))


def make_run(folder, rows, state="stopped", **fields):
    folder.mkdir(parents=True)
    config = training_config(
        Path("data"), folder, {"seed": 7, "optim.lr": 1e-3, "train.steps": 300, **fields}
    )
    (folder / "config.yaml").write_text(dump(config))
    (folder / "status.json").write_text(
        json.dumps({"state": state, "step": 300, "reason": "SIGTERM"})
    )
    write_rows(folder, rows, [{"step": 300, "text": "the last sample"}])
    return folder


class Page:
    """A page's source, text, and the rows of its tables of values, by their labels."""

    def __init__(self, file):
        self.source = file.read_text()
        self.text = unescape(self.source)
        tables = re.sub("<thead>.*?</thead>", "", self.source, flags=re.DOTALL)
        cells = [
            re.split(r"</t[hd]><t[hd]>", row)
            for row in re.findall(r"<tr><th>(.*?)</t[hd]></tr>", tables, re.DOTALL)
        ]
        self.rows = {
            first: others for first, *others in reversed([[*map(unescape, row)] for row in cells])
        }


def page_of(*runs):
    return Page(write_report([*runs], runs[0]))
