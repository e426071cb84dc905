"""The classes and diffs of docs/extend.md: each does what the page says of it.

`python test_extend.py KIND FOLDER CORPUS` is the process in which a test uses a patched copy of the
package.
"""

import contextlib
import io
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from commands import ROOT, expect_error, launch
from ranks import run_ranks
from runs import assert_same, rows, train_all, training_config, verified

from gpt2_ddp.tasks.user_task import find, trust

FILES = 2
LINES = 40
"""Most files of a diff, and most added and removed lines."""


def diffs():
    """The diffs of the page, by the heading above."""
    page = (ROOT / "docs/extend.md").read_text()
    sections = [part.partition("\n") for part in re.split(r"^## ", page, flags=re.MULTILINE)]
    found = {
        title: re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for title, _, text in sections
    }
    return {
        title: diff for title, (diff,) in ((title, diff) for title, diff in found.items() if diff)
    }


def classes():
    """The files of the page, by the names of their classes."""
    page = (ROOT / "docs/extend.md").read_text()
    files = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return {
        name[1]: file
        for file in files
        if (name := re.search(r"^class (\w+)\(Pretraining\)", file, re.MULTILINE))
    }


OWN = {
    "Differential": {},
    "Mixture": {"optim.name": "muon"},
    "Tanh": {},
    "WithLion": {"optim.lr": 0.0003},
    "Trapezoid": {"optim.name": "muon", "optim.decay_steps": 6},
    "Curriculum": {"train.steps": 14},
    "ZLoss": {},
    "Rhymes": {},
}
"""What each class is trained with."""
PARTS = ("whole", "parts")


def test_each_class_of_the_page_is_trained_below():
    assert classes().keys() == OWN.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("world", "parallel"), [(2, "ddp"), (2, "fsdp")])
def test_the_classes_of_the_page_are_stopped_and_resumed(
    short_documents, tmp_path, capsys, world, parallel
):
    """Bitwise, without a word of the class, and verified with its own schedule and order."""
    # norms of gradients would be of parts
    names = [name for name in OWN if (name, parallel) != ("Rhymes", "fsdp")]
    given = {part: [] for part in PARTS}
    for name, part in product(names, PARTS):
        file = tmp_path / f"{name}.py"
        file.write_text(classes()[name])
        own = {
            "task": f"{file}:{name}",
            "launch.parallel": parallel,
            "run_name": name,
            "train.steps": 6,
            **OWN[name],
        }
        own |= {"train.global_batch_tokens": 192, "eval.tokens": 130}
        trust(find(own["task"]))
        given[part].append(training_config(short_documents, tmp_path / part, own))
    resumed = [config.model_copy(update={"task": None}) for config in given["parts"]]
    stop = (0, 0), math.nan, 4, signal.SIGTERM
    for configs, faults, end in (
        (given["whole"], (), "completed"),
        (given["parts"], stop, "stopped"),
        (resumed, (), "completed"),
    ):
        assert run_ranks(train_all, world, configs, *faults) == [[end] * len(names)] * world
    for name in names:
        one, other = (tmp_path / part / name for part in PARTS)
        assert_same(one, other)
        code, _, lines = verified(other, capsys)
        assert code == 0
        assert any("recomputed from seed" in line for line in lines), lines
        losses = [row["loss"] for row in rows(other) if "loss" in row]
        assert losses[-1] < losses[0]


def apply(diff, folder):
    """Copies the package, its scripts and presets into a folder, and applies the diff."""
    for part in ("gpt2_ddp", "scripts", "configs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "diff").write_text(diff)
    command = ["git", "apply", "--whitespace=error-all", "diff"]
    done = launch(command, folder, GIT_CEILING_DIRECTORIES=str(folder.parent))
    assert done.returncode == 0, done.stderr


def test_each_diff_is_small_and_applies(tmp_path):
    """Two files and 40 lines."""
    assert diffs().keys() == CHECKS.keys()
    for number, (title, diff) in enumerate(diffs().items()):
        files = re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
        assert 1 <= len(files) <= FILES, title
        assert len(changed) <= LINES, title
        apply(diff, tmp_path / str(number))


def task(folder, corpus):
    """It has a command, trains, resumes bitwise, evaluates, and is verified."""
    assert re.search(r"\n  train_parity +the parity of bits", run_command("--help"))
    for name, *ends in (("whole", 8), ("parts", 4, 8)):
        for epochs in ends:
            flags = [
                "--output_dir",
                folder / name,
                "--train.epochs",
                epochs,
                "--optim.name",
                "adam",
                "--optim.lr",
                0.1,
            ]
            assert "val_accuracy" in run_command("train_parity", *flags, "--train.device", "cpu")
    ranks = "-m gpt2_ddp train_parity --launch.processes 2 --train.epochs 1 --train.device cpu"
    subprocess.run(
        [sys.executable, *ranks.split(), "--output_dir", folder / "two"], check=True, timeout=200
    )
    whole, parts = (folder / name / "parity" for name in PARTS)
    assert_same(whole, parts)
    assert "accuracy" in run_command("evaluate", "--checkpoint", parts, "--device", "cpu")
    assert "is intact" in run_command("verify_run", parts)


def source(folder, corpus):
    """It prepares the same twice, and a change of the file is found."""
    from gpt2_ddp.config.tools import PrepareConfig
    from gpt2_ddp.preparation.prepare import prepare

    with contextlib.closing(sqlite3.connect(folder / "mine.db")) as database:
        database.execute("create table articles (text)")
        for number in range(100):
            database.execute(
                "insert into articles values (?)", [f"Article {number} of this source is short.\n"]
            )
        database.commit()
        source = f"sqlite:{folder}/mine.db:articles"
        configs = [
            PrepareConfig(source=source, output=f"{folder}/{name}", tokenizer="bytes")
            for name in "ab"
        ]
        for config in (*configs, configs[0]):
            prepare(config)
        one, other = (
            {file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in "ab"
        )
        assert one == other
        assert len(b"".join(one.values())) > 2 * 100 * 30
        database.execute("delete from articles where rowid = 7")
        database.commit()
    expect_error("source = sqlite:.*has changed", prepare, configs[0])
    gone = configs[0].model_copy(
        update={"source": (f"sqlite:{folder}/mine.db:b",), "output": f"{folder}/c"}
    )
    expect_error("no such table: b", prepare, gone)


CHECKS = {
    "A data source": source,
    "A small task": task,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", CHECKS)
def test_a_diff_does_what_the_page_says(title, tmp_path, corpus):
    apply(diffs()[title], tmp_path / "patched")
    command = [sys.executable, __file__, title, tmp_path, corpus]
    done = launch(command, tmp_path, PYTHONPATH=f"{tmp_path}/patched{os.pathsep}{ROOT}/tests")
    assert done.returncode == 0, done.stdout + done.stderr


def run_command(*words):
    """What `gpt2-ddp WORDS` prints; the exit code is 0."""
    from accelerate.state import AcceleratorState, GradientState

    from gpt2_ddp.__main__ import main

    sys.argv = ["gpt2-ddp", *map(str, words)]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert not code, out.getvalue()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return out.getvalue()


if __name__ == "__main__":
    import gpt2_ddp

    assert Path(gpt2_ddp.__file__).parents[1] == Path(sys.argv[2], "patched"), gpt2_ddp.__file__
    CHECKS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
