"""Configurations, command lines and names that no one should
write: each is refused in one line, or means something."""

import os
import random
import shutil
from pathlib import Path

import pytest
import yaml
from commands import expect_error
from faults.mutations import (
    CASES,
    NASTY,
    change_value,
    check_told,
    flip,
    mangle,
    no_hang,
    open_data,
)

from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config import tools
from gpt2_ddp.config.base import leaves
from gpt2_ddp.config.cli import PROJECT, dump, load
from gpt2_ddp.config.jobs import ClassifierDataConfig
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.tools import GenerateConfig, PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import FIELD, HINT, VALUE, UserError, truncate
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.tasks.images import read_images

COMMANDS = (
    TrainingConfig,
    PrepareConfig,
    tools.EvaluateConfig,
    GenerateConfig,
    tools.ExportConfig,
    PlanConfig,
)
WORDS = [
    "&a ",
    "*a",
    "!!python/object:os.system ",
    "\t",
    '"\\0"',
    "? ",
    "[" * 500,
    "{",
    ": ",
    "---\n",
    "0x",
    ".nan",
]
WORDS += [
    "2026-99-99",
    "<<: ",
    "- ",
    "|\n",
    "'",
    "%YAML 9.9\n",
    "\x85",
    "\ufeff",
    "1" * 5000,
    "!!binary x",
    "~",
    "\r",
]


def write_something(file, rng):
    """A configuration that is there, damaged as text or in its values."""
    presets = sorted((PROJECT / "configs").rglob("*.yaml"))
    text = rng.choice([preset.read_text() for preset in presets] + [dump(load(GenerateConfig, []))])
    kind = rng.randrange(4)
    if kind == 0:
        file.write_bytes(mangle(text.encode(), rng))
    elif kind == 1:
        file.write_bytes(flip(text.encode(), rng))
    elif kind == 2:
        at = rng.randrange(len(text))
        file.write_text(text[:at] + rng.choice(WORDS) + text[at:], encoding="utf-8")
    else:
        values = yaml.safe_load(text)
        change_value(values, rng)
        file.write_text(yaml.safe_dump(values))


def check_outcome(command, argv, again):
    """Whether it is refused, in short lines; what is
    accepted can be written down and read again."""
    try:
        with no_hang():
            config = load(command, argv)
    except UserError as error:
        check_told(error)
        return True
    if hasattr(config, "trust_run_code"):  # a file cannot turn it on; test_user_task.py has that
        config = config.model_copy(update={"trust_run_code": False})
    again.write_text(dump(config))
    assert load(command, ["--config", str(again)]) == config
    return False


@pytest.mark.parametrize(("seed", "cases"), CASES)
def test_damaged_configurations(tmp_path, seed, cases):
    refused = 0
    for case in range(cases):
        rng = random.Random(f"{seed}/{case}")
        write_something(tmp_path / "c.yaml", rng)
        refused += check_outcome(
            rng.choice(COMMANDS), ["--config", str(tmp_path / "c.yaml")], tmp_path / "again.yaml"
        )
    assert refused > 0.5 * cases, refused


@pytest.mark.parametrize(("seed", "cases"), CASES)
def test_absurd_command_lines(tmp_path, seed, cases):
    refused = 0
    for case in range(cases):
        rng = random.Random(f"{seed}/{case}")
        command = rng.choice(COMMANDS)
        names = [name for name, _ in leaves(command)]
        argv = []
        for _ in range(rng.choice([1, 1, 1, 3, 100])):
            name = rng.choice(
                [*names, *names, rng.choice(names)[:-1], "config", "x" * 5000, "", "a.b.c"]
            )
            values = [f"{value!s:.6000}" for value in NASTY if value != 10**400]
            value = rng.choice([*values, "9" * 5000, "--", "-", "1 2"])
            argv += rng.choice(
                [[f"--{name}", value], [f"--{name}={value}"], [f"--{name}"], [value]]
            )
        if "--help" not in argv:
            refused += check_outcome(command, argv, tmp_path / "again.yaml")
    assert refused > 0.5 * cases, refused


def test_messages_are_short_lines():
    error = UserError("f" * 5000, "v" * 5000 + "end\0\x1b[2J\n\u202e", "c\n  " * 5000)
    check_told(error)
    (message,) = error.mistakes
    assert len(message) > 0.9 * (FIELD + VALUE + HINT)
    assert r"end\x00\x1b[2J\n\u202e" in message
    assert truncate("x" * 20, 20) == "x" * 20
    assert truncate("beginning and end", 14) == "begi ...  end"


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Names of what is not the file, or the folder, that is asked for."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    Path("folder").mkdir()
    Path("text").write_text("text " * 1000)
    with open("huge", "wb") as file:
        file.truncate(2**40)
    others = ["a" * 5000, "é" * 200, "a\0b", "a\ud800b"]
    return [*others, "pipe", "loop", "/dev/zero", "huge", "~nobody_at_all/x", "text/x"]


READERS = {
    "run to verify": lambda name: verify_run(load(tools.VerifyConfig, [name])),
    "runs to report": lambda name: read_runs(map(Path, load(tools.ReportConfig, [name]).runs)),
    "checkpoint": lambda name: find_checkpoint(Path(name)),
    "images": lambda name: read_images(
        ClassifierDataConfig.model_construct(name="images", path=name)
    ),
    "--config": lambda name: load(TrainingConfig, ["--config", name]),
    "tokenizer": load_tokenizer,
    "data": lambda name: read_manifest(Path(name)),
    "source": lambda name: prepare(
        PrepareConfig.model_construct(source=(name,), output="out", workers=1)
    ),
    "tokenizer of a source": lambda name: prepare(
        PrepareConfig.model_construct(source=("text",), output="out", tokenizer=name, workers=1)
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_names_of_other_things(names, reader):
    for name in names:
        if (reader, name) == ("source", "huge"):
            continue  # a text may have any size
        with no_hang(), pytest.raises(UserError) as caught:
            READERS[reader](name)
        check_told(caught.value)


def test_a_manifest_or_a_tokenizer_that_is_a_pipe(corpus, tmp_path):
    for name in ("manifest.json", "tokenizer.json", "train_000000.bin"):
        folder = shutil.copytree(corpus, tmp_path / name)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with no_hang():
            expect_error("Not an ordinary file", open_data, folder)
