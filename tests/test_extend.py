"""The diffs of docs/extend.md: each is small, applies to the package, and does what the page says of it.

`python test_extend.py KIND FOLDER CORPUS` is the process in which a test uses a patched copy of the package.
"""

import contextlib
import io
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from close import assert_close

ROOT = Path(__file__).parents[1]
FILES, LINES = 2, 40
"""Most files of a diff, and most added and removed lines."""


def diffs() -> dict[str, str]:
    """The diffs of the page, by the heading above."""
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    sections = [part.partition("\n") for part in re.split(r"^## ", page, flags=re.MULTILINE)]
    found = {title: re.findall(r"^```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) for title, _, text in sections}
    return {title: diff for title, (diff,) in ((title, diff) for title, diff in found.items() if diff)}


def apply(diff: str, folder: Path) -> None:
    """Copies the package, its scripts and presets into a folder, and applies the diff."""
    for part in ("gpt2_ddp", "scripts", "configs"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    command = ["git", "apply", "--whitespace=error-all", "-"]
    done = subprocess.run(command, input=diff, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_each_diff_is_small_and_applies(tmp_path):
    """Two files and 40 lines, of which none is longer than the package's."""
    assert diffs().keys() == CHECKS.keys()
    for number, (title, diff) in enumerate(diffs().items()):
        files = re.findall(r"^\+\+\+ b/(.*)$", diff, re.MULTILINE)
        changed = [line for line in diff.splitlines() if re.match(r"[+-](?!\+\+ |-- )", line)]
        assert 1 <= len(files) <= FILES, title
        assert len(changed) <= LINES, title
        assert max(map(len, changed)) <= 121, title
        apply(diff, tmp_path / str(number))


def norm(folder: Path, corpus: Path) -> None:
    """The model trains and generates."""
    from runs import rows

    train_gpt(folder, corpus, {"model.architecture": "tanh", "optim.lr": 0.02})
    losses = [row["loss"] for row in rows(folder / "run") if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    assert run_command("generate", "--checkpoint", folder / "run", "--max_new_tokens", 5)


def optimizer(folder: Path, corpus: Path) -> None:
    """It trains and resumes bitwise. The optimizers' own tests hold, bad steps included. The plan has its memory."""
    from runs import newest_checkpoint, rows, training_config

    from gpt2_ddp.model.gpt import GPT
    from gpt2_ddp.model.memory import moments_of, setting_of

    changes = {"optim.name": "lion", "optim.decay_steps": 10}
    for name, *ends in (("whole", 10), ("parts", 5, 10)):
        for steps in ends:
            train_gpt(folder / name, corpus, changes | {"train.steps": steps})
    losses = [row["loss"] for row in rows(folder / "whole/run") if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    whole, parts = (newest_checkpoint(folder / f"{name}/run") for name in ("whole", "parts"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()
    config = training_config(corpus, folder, changes)
    setting = setting_of(config, GPT(config.model, 512), "cuda", 1, "no")
    assert (setting.state, setting.copies) == (setting.parameters, True)
    found = sum(moments_of(setting)["the optimizer's step"].values())
    assert_close(found, 20 * setting.parameters)  # bytes of weights, gradients, state, and two copies
    tests = str(ROOT / "tests/test_optim.py")
    assert pytest.main([tests, "-k", "lion", "-q", "-p", "no:cacheprovider"]) == 0


def task(folder: Path, corpus: Path) -> None:
    """It has a command, trains, resumes bitwise, evaluates, and is verified."""
    from runs import newest_checkpoint

    assert re.search(r"\n  train_parity +the parity of bits", run_command("--help"))
    for name, *ends in (("whole", 8), ("parts", 4, 8)):
        for epochs in ends:
            flags = ["--output_dir", folder / name, "--train.epochs", epochs, "--optim.name", "adam", "--optim.lr", 0.1]
            assert "val_accuracy" in run_command("train_parity", *flags, "--train.device", "cpu")
    ranks = "-m gpt2_ddp train_parity --launch.processes 2 --train.epochs 1 --train.device cpu"
    subprocess.run([sys.executable, *ranks.split(), "--output_dir", folder / "two"], check=True, timeout=200)
    runs = [folder / f"{name}/parity" for name in ("whole", "parts")]
    whole, parts = map(newest_checkpoint, runs)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes()
    assert "accuracy" in run_command("evaluate", "--checkpoint", runs[1], "--device", "cpu")
    assert "is intact" in run_command("verify_run", runs[1])


def source(folder: Path, corpus: Path) -> None:
    """It prepares the same twice, and a change of the file is found."""
    from gpt2_ddp.config.tools import PrepareConfig
    from gpt2_ddp.errors import UserError
    from gpt2_ddp.preparation.prepare import prepare

    with contextlib.closing(sqlite3.connect(folder / "mine.db")) as database:
        database.execute("create table articles (text)")
        for number in range(100):
            database.execute("insert into articles values (?)", [f"Article {number} of this source is short.\n"])
        database.commit()
        configs = [
            PrepareConfig(source=f"sqlite:{folder}/mine.db:articles", output=f"{folder}/{name}", tokenizer="bytes")
            for name in "ab"
        ]
        for config in (*configs, configs[0]):
            prepare(config)
        one, other = ({file.name: file.read_bytes() for file in (folder / name).iterdir()} for name in "ab")
        assert one == other
        assert len(b"".join(one.values())) > 2 * 100 * 30
        database.execute("delete from articles where rowid = 7")
        database.commit()
    with pytest.raises(UserError, match=r"source = sqlite:.*has changed"):
        prepare(configs[0])
    with pytest.raises(UserError, match=r"no such table: b\); write sqlite:FILE:TABLE"):
        prepare(configs[0].model_copy(update={"source": f"sqlite:{folder}/mine.db:b", "output": f"{folder}/c"}))


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    "A data source": source,
    "An optimizer": optimizer,
    "A norm and an activation": norm,
    "A small task": task,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", CHECKS)
def test_a_diff_does_what_the_page_says(title, tmp_path, corpus):
    apply(diffs()[title], tmp_path / "patched")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "patched"), str(ROOT / "tests")])}
    command = [sys.executable, __file__, title, str(tmp_path), str(corpus)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def train_gpt(folder: Path, corpus: Path, changes: dict[str, object]) -> None:
    from runs import training_config

    from gpt2_ddp import api

    api.train(training_config(corpus, folder, changes))


def run_command(*words: object) -> str:
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
