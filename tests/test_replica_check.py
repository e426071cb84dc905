"""A bit that changed on one rank ends the run, and the message names rank, host and tensor."""

import math
import re
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from ranks import run_ranks
from runs import built, saved_steps, status, train, training_config
from torch import Tensor

from gpt2_ddp.checkpoint.tensors import optimizer_state
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.training.replica_check import ReplicaMismatch, _describe, check_replicas, sum_of


class Flip(NamedTuple):
    """A bit of a byte (from the end if negative) of a tensor, on one rank."""

    rank: int
    tensor: str
    byte: int
    bit: int


def flip_bit(tensor: Tensor, byte: int, bit: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def message_of(check: Callable[[int], None], step: int) -> str:
    try:
        check(step)
    except ReplicaMismatch as error:
        return str(error)
    return ""


def flip_and_tell(config: TrainingConfig, flips: list[Flip]) -> list[str]:
    """The message of each flip, which is taken back after it; the first is of a run without any. Three more steps
    follow a last flip, on rank 1, before that is looked for."""
    from gpt2_ddp.training.loop import train_step

    with built(config) as run:
        run.warm_up()
        for _ in range(2):
            train_step(run)
        tensors = dict(run.task.model.named_parameters())
        tensors |= optimizer_state(run.task.model, run.optimizer.plain)
        check = partial(check_replicas, run.accelerator, run.task.model, run.optimizer.plain)
        messages = [message_of(check, 0)]
        for step, (rank, name, byte, bit) in enumerate(flips, 1):
            here = rank == run.accelerator.process_index
            if here:
                flip_bit(tensors[name], byte, bit)
            messages.append(message_of(check, step))
            if here:
                flip_bit(tensors[name], byte, bit)
        messages.append(message_of(check, 0))
        if run.accelerator.process_index == 1:
            flip_bit(tensors["h.1.mlp.c_fc.weight"], 4002, 6)
            run.task.model.register_buffer("statistics", torch.ones(3))
        for _ in range(3):
            train_step(run)
        return [*messages, message_of(check, run.step)]


def test_of_three_ranks_the_one_is_named(corpus, tmp_path):
    """In a GPT: large tensors and tiny ones, weights, moments and step counts, the first bits and the last. Steps after
    a flip do not spread it to other tensors; and a buffer is nobody's business."""
    names = ["wte.weight", "h.0.ln_1.weight", "ln_f.bias", "exp_avg.wte.weight", "exp_avg_sq.ln_f.bias"]
    flips = [Flip(i % 3, name, byte, bit) for i, name in enumerate(names) for byte, bit in ((0, 0), (-1, 7), (77, 3))]
    flips.append(Flip(1, "step.ln_f.weight", 2, 0))
    told = run_ranks(flip_and_tell, 3, training_config(corpus, tmp_path), flips)
    assert told[0] == told[1] == told[2]
    clean, *messages, again, later = told[0]
    assert re.fullmatch(r"rank 1 \(host .*\): h.1.mlp.c_fc.weight differs from .* at step 5; .*", later)
    assert clean == again == ""
    for step, (flip, message) in enumerate(zip(flips, messages, strict=True), 1):
        assert message == (
            f"rank {flip.rank} (host {socket.gethostname()}): {flip.tensor} differs from the other ranks' "
            f"at step {step}; suspect its memory; the newest checkpoint is good"
        )


SHAPES: dict[str, Tensor] = {
    "odd": torch.arange(771.0),
    "scalar": torch.tensor(3.0),
    "bf16": torch.arange(515.0).bfloat16(),
    "bytes": torch.arange(2049).to(torch.uint8),
    "flags": torch.arange(13) % 3 == 0,
    "transposed": torch.arange(6000.0).view(20, 300).t(),
    "channels last": torch.arange(2160.0).view(4, 5, 12, 9).to(memory_format=torch.channels_last),
    "inside another": torch.arange(3000.0)[1:],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_counts(name):
    """Any one bit changes the sum, the same values in another layout do not."""
    tensor = SHAPES[name]
    whole = sum_of(tensor)
    assert (whole.dtype, whole.shape) == (torch.int64, ())
    assert whole == sum_of(tensor.clone(memory_format=torch.contiguous_format))
    plain = tensor.clone(memory_format=torch.contiguous_format)
    size = plain.numel() * plain.element_size()
    for byte in {*range(0, size, size // 37 + 1), size - 1}:
        for bit in range(8) if tensor.dtype != torch.bool else [0]:
            flip_bit(plain, byte, bit)
            assert sum_of(plain) != whole, (byte, bit)
            flip_bit(plain, byte, bit)


def test_changes_that_could_cancel_are_found():
    """Rows that change places. Of neighbouring bytes with weights of 1, 3, 5 ...: 3 · 1 - 1 · 2 - 1 · 1."""
    rows = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    for i in range(49):
        swapped = rows.clone()
        swapped[[i, 49]] = rows[[49, i]]
        assert sum_of(swapped) != sum_of(rows)
    count = torch.tensor([0b11, 0, 0, 0], dtype=torch.uint8)
    assert sum_of(count) != sum_of(torch.tensor([0, 0b1, 0, 0], dtype=torch.uint8))
    assert sum_of(torch.zeros(0)) == 0


def test_several_ranks_and_many_tensors_are_named():
    """All of them where there is no majority."""
    ranks = [[1] * 6, [1] * 6, [1, 1, 1, 1, 1, 2], [2] * 6, [1] * 6]
    message = _describe("abcdef", "vwxyz", ranks, 7)
    named = re.findall(r"rank (\d) \(host (.)\): (.*?) differs? from the other ranks'", message)
    assert named == [("2", "x", "f"), ("3", "y", "a, b, c and 3 more")]
    assert message.endswith(" at step 7; suspect their memory; the newest checkpoint is good")
    message = _describe("ab", "wxyz", [[1, 5], [1, 5], [1, 6], [1, 6]], 8)
    named = re.findall(r"rank (\d) \(host (.)\): (.*?) differs from another rank's", message)
    assert named == [("0", "w", "b"), ("1", "x", "b"), ("2", "y", "b"), ("3", "z", "b")]


def damaged_in_training(config: TrainingConfig, at: int, number: float) -> str:
    """Trains; after step `at`, a weight of rank 1 is multiplied by `number`. Returns what that comes to."""
    from gpt2_ddp.training import loop

    step = loop.train_step

    def train_step(run):
        result = step(run)
        if run.step == at and run.accelerator.process_index == 1:
            run.task.model.wte.weight.data[3, 3] *= number
        return result

    loop.train_step = train_step
    try:
        return train(config)
    except ReplicaMismatch as corrupted:
        return str(corrupted)


@pytest.mark.parametrize(("at", "number"), [pytest.param(6, 2.0, marks=pytest.mark.slow), (10, math.nan)])
def test_a_training_ends_before_it_saves_what_was_damaged(corpus, tmp_path, at, number):
    """Also where the last step's weights would end the run as diverged, on that rank alone."""
    changes = {"optim.grad_clip": 0.0}
    config = training_config(corpus, tmp_path, changes)
    for said in run_ranks(damaged_in_training, 3, config, at, number):
        assert said.startswith("rank 1 (host ")
        assert all(part in said for part in ("at step 10", "wte.weight")), said
    run = tmp_path / "run"
    assert status(run)["state"] == "failed"
    assert "rank 1 (host " in status(run)["reason"]
    assert saved_steps(run) == [0, 5]
