"""A stranger's own evaluation and numbers in rows: classes of docs/, killed and resumed; wrong numbers."""

import json
import math
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from close import assert_close
from pages import load_docs
from ranks import in_turn, run_ranks, run_until_killed, start_ranks
from runs import assert_same, before_each_step, rows, status, training_config, verified

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.training.own_numbers import check_numbers

noise_scale = load_docs("noise_scale")
NoiseScale: Any = noise_scale.NoiseScale
ROOT = Path(__file__).parents[1]
MANY = pytest.mark.slow


def example() -> Any:
    """The class `Rhymes` of the page."""
    page = (ROOT / "docs/extend.md").read_text(encoding="utf-8")
    files = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    block = next(file for file in files if "class Rhymes" in file)
    found: dict[str, Any] = {"__name__": "mine"}
    exec(block, found)
    return found["Rhymes"]


def mine(config: Any, dies_at: int = 0, differs: bool = False) -> str:
    """Trains the class of the page. The last rank is killed before a step, or each rank has a score of its own."""
    from gpt2_ddp.training import loop

    def die(run: Any) -> None:
        if run.step == dies_at and run.accelerator.process_index == run.accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at:
        before_each_step(die)
    rank, own = int(os.environ.get("RANK", "0")), example()

    class Both(NoiseScale, own):
        def row_fields(self, step: int) -> dict[str, float]:
            return super().row_fields(step) | own.row_fields(self, step) | {"asked": step}

        def evaluate(self, model: Any, poll: Any) -> dict[str, Any]:
            assert (model.training, torch.is_grad_enabled()) == (False, False)
            return super().evaluate(model, poll) | ({"rhymes": rank / 4} if differs else {})

    return loop.train(config, Both).outcome


def first_step(config: Any, corpus: Path, world: int, size: int) -> tuple[float, list[float]]:
    """In plain PyTorch: the noise scale of the first step with micro-batches of a size, and its layers' norms."""
    manifest = read_manifest(corpus)
    windows = Windows(TokenStream(corpus, manifest, "train"), 32)
    torch.manual_seed(config.seed)
    model = GPT(config.model, manifest.vocab_size, manifest.eot)
    tokens = windows.read(Permutation(config.seed, len(windows)).items_at(np.arange(13)).astype(np.int64))[0]

    def squares(first: int, last: int) -> list[float]:
        model.zero_grad()
        model(tokens[first:last, :-1], tokens[first:last, 1:]).backward()
        return [
            sum(p.grad.square().sum().item() for p in part.parameters() if p.grad is not None)
            for part in (model, *model.h)
        ]

    small, (big, *layers) = sum(squares(r * size, r * size + size)[0] for r in range(world)) / world, squares(0, 13)
    signal, noise = (13 * big - size * small) / (13 - size), (small - big) / (1 / size - 1 / 13)
    return 32 * noise / signal, [math.sqrt(square) for square in layers]


@pytest.mark.parametrize(("world", "size"), [(2, 2), pytest.param(1, 1, marks=MANY), pytest.param(3, 3, marks=MANY)])
def test_own_numbers_are_in_the_rows_on_any_number_of_processes_and_resume(world, size, corpus, tmp_path, capsys):
    """Bitwise, and with the noise scale. Of 13 windows, the last micro-batches have fewer, or none."""
    changes = {"eval.every": 4, "train.global_batch_tokens": 13 * 32}
    config = lambda name: training_config(corpus, tmp_path, changes | {"run_name": name})  # noqa: E731
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run_ranks(mine, world, config("whole")) == ["completed"] * world
    run_until_killed(mine, world, config("parts"), 7)
    if world == 2:
        problem = 'evaluate()["rhymes"] = 0.0: rank 1 has 0.25; return the same on every rank'
        assert run_ranks(in_turn, world, (mine, config("parts"), 0, True)) == [[problem]] * world
        assert status(parts)["state"] == "failed"
    assert run_ranks(mine, world, config("parts")) == ["completed"] * world
    assert_same(whole, parts)
    found = rows(parts)
    assert [row.get("asked", 0) for row in found] == [row["step"] for row in found] == [*range(11)]
    assert [row["step"] for row in found if row.get("rhymes") in (0, 0.5, 1)] == [0, 4, 8, 10]
    scale, layers = first_step(config("parts"), corpus, world, size)
    assert_close([found[1][f"grad_norm/h.{n}"] for n in (0, 1)], layers, 1e-5)
    assert_close(found[1]["noise_scale"], scale, 1e-3)
    assert verified(parts, capsys)[:2] == (0, [])
    file = parts / "metrics.jsonl"
    file.write_text(file.read_text().replace('"grad_norm/h.0": ', '"grad_norm/h.0": 1', 1))
    code, defects, _ = verified(parts, capsys)
    assert (code, "its chain is wrong" in defects[0]) == (1, True)


def stopped_by_row(config: Any) -> list[int]:
    """Trains until an exception of `on_row` on the main process; the steps of the rows that it got."""
    from gpt2_ddp.training import loop

    seen: list[int] = []

    def on_row(row: dict[str, Any]) -> None:
        seen.append(row["step"])
        if row["step"] == 7:
            raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        loop.train(config, example(), on_row)
    return seen


@MANY
def test_an_exception_of_on_row_ends_all_ranks_and_the_run_resumes(corpus, tmp_path):
    config, run = training_config(corpus, tmp_path), tmp_path / "run"
    (main, receiver), (other, _) = start_ranks(stopped_by_row, 2, config)
    for process in (main, other):
        process.join(60)
    assert (main.exitcode, other.exitcode) == (0, 1)
    assert receiver.recv() == ([*range(8)], None)
    assert status(run)["state"] == "failed"
    assert "seven" in status(run)["reason"]
    assert run_ranks(mine, 2, config) == ["completed"] * 2
    assert [row["step"] for row in rows(run)] == [*range(11)]


NUMBERS = """
evaluate {"a": true} | ["a"] = True: should be a Python number, not bool
evaluate {"a": "1"} | ["a"] = 1: should be a Python number, not str
row_fields {"a": null} | ["a"] = None: should be a Python number
row_fields {"a": NaN} | ["a"] = nan: should be finite
evaluate {"val_loss": 1.0, "a": Infinity} | ["a"] = inf: should be finite
row_fields {"val_loss": 1.0} | ["val_loss"] = 1.0: rows have another field
evaluate {"val_loss": 1.0, "val_mine": 2, "grad_norm/x": -0.5} |
evaluate {"val_loss": NaN} |
row_fields {"a": 1, "b": -2.5} |
"""
TAKEN = ("step", "loss", "lr", "chain", "event", "tokens/a", "x_per_second", "taken")
CASES = NUMBERS.strip().splitlines()
CASES += [
    f'{method} {{"{name}": 1.0}} | ["{name}"] = 1.0: rows have another field of this name'
    for method in ("evaluate", "row_fields")
    for name in TAKEN
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_wrong_number_is_one_error_line(case, monkeypatch):
    monkeypatch.setattr("gpt2_ddp.training.own_numbers.gather_object", lambda objects: objects)
    call, _, problem = case.partition(" |")
    method, _, values = call.partition(" ")
    numbers = json.loads(values)
    loss = math.nan if method == "evaluate" and "a" not in numbers else 1.0
    with pytest.raises(UserError) if problem else nullcontext() as caught:
        check_numbers(method, numbers, {"taken"}, loss)
    if caught:
        assert str(caught.value).startswith(f"{method}(){problem.strip()}")
        assert (len(caught.value.mistakes), caught.value.on_every_rank) == (1, True)


def measuring(shares: int = 4, parallel: str = "ddp") -> Any:
    """The noise scale's task in one process, on steps of 8 items of 3 tokens, in so many micro-batches."""
    task = object.__new__(NoiseScale)
    batch = SimpleNamespace(share=lambda n: [[range(8 // shares)]] * shares)
    scaler = SimpleNamespace(get_scale=lambda: 1024.0)
    vars(task).update(
        averages=(0.0, 0.0),
        units_per_item=3,
        feed=SimpleNamespace(step_size=8, batch=batch),
        config=SimpleNamespace(parallel=parallel, train=SimpleNamespace(micro_batch_size=2)),
        accelerator=SimpleNamespace(num_processes=1, scaler=scaler, reduce=lambda value, reduction: value),
    )
    task._check_measurable()
    return task


def row_of(task: Any, signal: float, noise: float) -> dict[str, float]:
    """The fields of a step whose squared norms are the expected ones of such gradients. That of the first micro-batch,
    of 6 of the step's 24 tokens, has the loss scale."""
    task._square = torch.tensor((signal + noise / 6) * (1024 * 6 / 24) ** 2)
    task._squared_norm = lambda: torch.tensor(signal + noise / 24)
    return task.row_fields(1)


def test_the_noise_scale_is_that_of_the_averages():
    task = measuring()
    assert_close(row_of(task, 5.0, 40.0), {"noise_scale": 8.0}, 1e-5)
    found = {"noise_scale": (0.9 * 40 + 10) / (0.9 * 5 + 20)}
    assert_close(row_of(task, 20.0, 10.0), found, 1e-5)
    before = task.averages
    assert_close(row_of(task, math.inf, 40.0), found, 1e-5)
    assert task.averages == before, "a bad step counts nothing"
    assert row_of(task, -500.0, 40.0) == {}, "the average signal is not positive"


@pytest.mark.parametrize(("toy", "field"), [
    ({"shares": 1}, "train.micro_batch_size"), ({"parallel": "fsdp"}, "launch.parallel"),
])  # fmt: skip
def test_a_training_that_cannot_measure_the_noise_scale(toy, field):
    with pytest.raises(UserError, match=field):
        measuring(**toy)
