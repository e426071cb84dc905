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
from close import assert_close, distance
from pages import load_docs
from ranks import in_turn, run_ranks, run_until_killed, start_ranks
from runs import assert_same, before_each_step, built, rows, training_config, verified

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.own_numbers import check_numbers
from gpt2_ddp.training.task import Due

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
        assert json.loads((parts / "status.json").read_text())["state"] == "failed"
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
    """Trains until an exception of `on_row` on the main process, and again; the steps of the rows that it got."""
    from gpt2_ddp.training import loop

    seen: list[int] = []

    def on_row(row: dict[str, Any]) -> None:
        seen.append(row["step"])
        if row["step"] == 7 and seen.count(7) == 1:
            raise ValueError("seven")

    try:
        loop.train(config, example(), on_row)
    except ValueError as error:
        seen.append(str(error) == "seven")
    return seen


@MANY
def test_an_exception_of_on_row_ends_all_ranks_and_the_run_resumes(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    processes = start_ranks(stopped_by_row, 2, config)
    for process, _ in processes:
        process.join(60)
    assert [process.exitcode is not None for process, _ in processes] == [True, True]
    assert processes[0][1].recv() == ([*range(8), True], None)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], "seven" in status["reason"]) == ("failed", True)
    assert run_ranks(mine, 2, config) == ["completed"] * 2
    assert [row["step"] for row in rows(tmp_path / "run")] == [*range(11)]


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


def test_the_contract_is_the_same_for_classes_of_any_package(corpus, tmp_path):
    """Evaluation mode, no gradients, checked scores."""
    seen = []

    class Mine(Pretraining):
        def evaluate(self, model, poll):
            seen.append((model.training, torch.is_grad_enabled()))
            return {"val_loss": 1.0, "mine": True}

    Mine.evaluate.__module__ = "gpt2_ddp.contrib"
    with built(training_config(corpus, tmp_path), Mine) as run:
        with pytest.raises(UserError):
            run.evaluate(lambda: None)
        assert (seen, run.model.training) == ([(False, False)], True)


class Toy(NoiseScale):
    """Ten parameters in one process, on steps of 4 micro-batches of 2 items of 3 tokens, with a loss scale. The
    gradients of tokens are independent: of mean 0.3 and standard deviation 2 each."""

    def __init__(self, monkeypatch: Any, shares: int = 4, parallel: str = "ddp"):
        feed = {"position": 0, "consumed": 0, "step_size": 2 * shares}
        feed["batch"] = SimpleNamespace(share=lambda n: [[range(2)]] * shares)
        monkeypatch.setattr(Pretraining, "build_feed", lambda self: setattr(self, "feed", SimpleNamespace(**feed)))
        monkeypatch.setattr(Pretraining, "loss", lambda self, model, batch: model(0.3 + 2 * torch.randn(6, 10)).sum())
        train = SimpleNamespace(steps=0, epochs=None, micro_batch_size=2)
        config = SimpleNamespace(parallel=parallel, train=train, global_batch_windows=8)
        config.model = SimpleNamespace(block_size=3)
        accelerator = SimpleNamespace(num_processes=1, scaler=SimpleNamespace(get_scale=lambda: 1024.0))
        accelerator.reduce = lambda value, reduction: value
        monkeypatch.setattr(Pretraining, "__init__", lambda self, config, accelerator, saved: vars(self).update(
            config=config, accelerator=accelerator, units_per_item=3, epoch_size=0,
            model=torch.nn.Linear(10, 1, bias=False)))  # fmt: skip
        super().__init__(config, accelerator, None)
        self.build_feed()

    def due(self, step: int, last: bool) -> Due:
        return Due(log=step % 2 == 0)


def test_the_noise_scale_of_gradients_of_known_covariance(monkeypatch):
    monkeypatch.setattr(noise_scale, "DECAY", 0.999)
    torch.manual_seed(0)
    task, found, measured = Toy(monkeypatch), {}, 0
    for step in range(1, 4001):
        task.feed.position, task.feed.consumed = 100 + 8 * step, 8 * step
        for _ in range(4):
            (task.loss(task.model, None) * 1024 / 24).backward()
        task.model.weight.grad /= 1024
        before, found = task.averages, task.row_fields(step)
        measured += task.averages != before
        task.model.zero_grad()
    assert measured == 2000, "in the steps whose row is written"
    assert distance(found, {"noise_scale": 2**2 / 0.3**2}) < 0.1
    assert distance(task.averages[1] / (1 - 0.999**2000), 10 * 2**2) < 0.03
    before = task.averages
    task.feed.position = 0
    for _ in range(2):
        (task.loss(task.model, None) * math.inf).backward()
    assert (task.row_fields(2), task.averages) == (found, before), "a bad step counts nothing"
    task.averages = (-1.0, 1.0)
    assert "noise_scale" not in task.row_fields(2)
    assert_close(noise_scale.estimate(5 + 40 / 6, 5 + 40 / 24, 6, 24), (5, 40))


@pytest.mark.parametrize(("toy", "field"), [
    ({"shares": 1}, "train.micro_batch_size"), ({"parallel": "fsdp"}, "launch.parallel"),
])  # fmt: skip
def test_a_training_that_cannot_measure_the_noise_scale(toy, field, monkeypatch):
    with pytest.raises(UserError) as caught:
        Toy(monkeypatch, **toy)
    assert str(caught.value).startswith(field)
