"""A stranger's own evaluation and numbers in rows:
classes of docs/, killed and resumed; wrong numbers."""

import math
import os
import signal
from contextlib import nullcontext
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from close import assert_close
from commands import expect_error
from pages import ROOT, load_docs
from ranks import in_turn, run_ranks, run_until_killed
from runs import assert_same, before_each_step, change, is_intact, rows, status, training_config

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.training.task import check_numbers

noise_scale = load_docs("noise_scale")
NoiseScale = noise_scale.NoiseScale
MANY = pytest.mark.slow


def example():
    """The class `Rhymes` of the page."""
    page = (ROOT / "docs/extend.md").read_text()
    (block,) = [
        part for part in page.split("```") if part.startswith("python\n") and "class Rhymes" in part
    ]
    found = {"__name__": "mine"}
    exec(block.removeprefix("python"), found)
    return found["Rhymes"]


def mine(config, dies_at=0, differs=False):
    """Trains the class of the page. The last rank is killed
    before a step, or each rank has a score of its own."""
    from gpt2_ddp.training import loop

    def die(run):
        if (
            run.step == dies_at
            and run.accelerator.process_index == run.accelerator.num_processes - 1
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    if dies_at:
        before_each_step(die)
    rank = int(os.environ.get("RANK", "0"))
    own = example()

    class Both(NoiseScale, own):
        def row_fields(self, step):
            return super().row_fields(step) | own.row_fields(self, step) | {"asked": step}

        def evaluate(self, model, poll):
            assert (model.training, torch.is_grad_enabled()) == (False, False)
            return super().evaluate(model, poll) | ({"rhymes": rank / 4} if differs else {})

    return loop.train(config, Both).outcome


def first_step(config, corpus, world, size):
    """In plain PyTorch: the noise scale of the first step
    with micro-batches of a size, and its layers' norms."""
    windows = Windows(TokenStream(corpus, read_manifest(corpus), "train"), 32)
    torch.manual_seed(config.seed)
    model = GPT(config.model, 512)
    tokens = windows.read(
        Permutation(config.seed, len(windows)).items_at(np.arange(13)).astype(np.int64)
    )[0]

    def norms(windows):
        model.zero_grad()
        model(windows[:, :-1], windows[:, 1:]).backward()
        return [
            torch.cat([p.grad.flatten() for p in part.parameters()]).norm().item()
            for part in (model, *model.h)
        ]

    small = sum(norms(tokens[rank * size :][:size])[0] ** 2 for rank in range(world)) / world
    norm, *layers = norms(tokens)
    signal = (13 * norm**2 - size * small) / (13 - size)
    noise = (small - norm**2) / (1 / size - 1 / 13)
    return 32 * noise / signal, layers


@pytest.mark.parametrize(("world", "size"), [(2, 2), pytest.param(3, 3, marks=MANY)])
def test_own_numbers_are_in_the_rows_on_any_number_of_processes_and_resume(
    world, size, corpus, tmp_path
):
    """Bitwise, and with the noise scale. Of 13 windows,
    the last micro-batches have fewer, or none."""
    changes = {"eval.every": 4, "train.global_batch_tokens": 13 * 32}

    def config(name):
        return training_config(corpus, tmp_path, changes | {"run_name": name})

    whole = tmp_path / "whole"
    parts = tmp_path / "parts"
    assert run_ranks(mine, world, config("whole")) == ["completed"] * world
    run_until_killed(mine, world, config("parts"), 7)
    if world == 2:
        ((said,), (other,)) = run_ranks(in_turn, world, (mine, config("parts"), 0, True))
        assert said.startswith('evaluate()["rhymes"] = 0.0: rank 1 has 0.25')
        assert said == other
        assert status(parts)["state"] == "failed"
    assert run_ranks(mine, world, config("parts")) == ["completed"] * world
    assert_same(whole, parts)
    found = rows(parts)
    assert [row.get("asked", 0) for row in found] == [row["step"] for row in found] == [*range(11)]
    assert [row["step"] for row in found if row.get("rhymes") in (0, 0.5, 1)] == [0, 4, 8, 10]
    scale, layers = first_step(config("parts"), corpus, world, size)
    assert_close([found[1][f"grad_norm/h.{n}"] for n in (0, 1)], layers, 1e-5)
    assert_close(found[1]["noise_scale"], scale, 1e-3)
    assert is_intact(parts)
    change(parts / "metrics.jsonl", '"grad_norm/h.0": ', '"grad_norm/h.0": 1')
    assert not is_intact(parts)


NUMBERS = [
    ("evaluate", {"a": True}, '["a"] = True'),
    ("evaluate", {"a": "1"}, '["a"] = 1'),
    ("row_fields", {"a": None}, '["a"] = None'),
    ("row_fields", {"val_loss": 1.0}, '["val_loss"] = 1.0'),
    ("evaluate", {"step": 1.0}, '["step"] = 1.0'),
    ("row_fields", {"loss": 1.0}, '["loss"] = 1.0'),
    ("row_fields", {"chain": 1.0}, '["chain"] = 1.0'),
    ("evaluate", {"event": 1.0}, '["event"] = 1.0'),
    ("evaluate", {"tokens/a": 1.0}, '["tokens/a"] = 1.0'),
    ("row_fields", {"x_per_second": 1.0}, '["x_per_second"] = 1.0'),
    ("evaluate", {"taken": 1.0}, '["taken"] = 1.0'),
    ("evaluate", {"val_loss": 1.0, "val_mine": 2, "grad_norm/x": -0.5}, ""),
    ("evaluate", {"val_loss": math.nan, "a": math.inf}, ""),
    ("row_fields", {"a": 1, "b": -2.5}, ""),
]


@pytest.mark.parametrize(("method", "numbers", "problem"), NUMBERS)
def test_a_wrong_number_is_one_error_line(method, numbers, problem):
    with pytest.raises(UserError) if problem else nullcontext() as caught:
        found = check_numbers(method, numbers, {"taken"})
        assert found == {
            name: value if math.isfinite(value) else None for name, value in numbers.items()
        }
    if caught:
        assert str(caught.value).startswith(f"{method}(){problem}: ")
        assert len(caught.value.mistakes) == 1


def measuring(shares=4, parallel="ddp"):
    """The noise scale's task in one process, on steps
    of 8 items of 3 tokens, in so many micro-batches."""
    task = object.__new__(NoiseScale)
    task.averages = (0.0, 0.0)
    task.units_per_item = 3
    task.feed = MagicMock(step_size=8)
    task.config = MagicMock(**{"launch.parallel": parallel})
    task.feed.batch.share.return_value = [[range(8 // shares)]] * shares
    task.accelerator = MagicMock(num_processes=1, reduce=lambda value, reduction: value)
    task.accelerator.scaler.get_scale.return_value = 1024.0
    task._check_measurable()
    return task


def row_of(task, signal, noise):
    """The fields of a step whose squared norms are the expected ones of such gradients. That of the
    first micro-batch, of 6 of the step's 24 tokens, has the loss scale."""
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
    assert task.averages == before  # a bad step counts nothing
    assert row_of(task, -500.0, 40.0) == {}  # the average signal is not positive


@pytest.mark.parametrize(
    ("toy", "field"),
    [
        ({"shares": 1}, "train.micro_batch_size"),
        ({"parallel": "fsdp"}, "launch.parallel"),
    ],
)
def test_a_training_that_cannot_measure_the_noise_scale(toy, field):
    expect_error(field, measuring, **toy)
