"""A bit that changed on one rank ends the run, and the message names rank, host and tensor."""

import math
import re
import socket
from functools import partial

import pytest
import torch
from ranks import run_ranks
from runs import built, saved_steps, status, train

from gpt2_ddp.checkpoint.format import optimizer_state
from gpt2_ddp.training.replica_check import ReplicaMismatch, _describe, sum_of


def flip_bit(tensor, byte, bit):
    tensor.detach().view(-1).view(torch.uint8)[byte] ^= 1 << bit


def message_of(check, step):
    try:
        check(step)
    except ReplicaMismatch as error:
        return str(error)
    return ""


def flip_and_tell(config, flips):
    """The message of each flip, which is taken back after it; the first is of a run without any.
    Three more steps follow a last flip, on rank 1, before that is looked for. A flip: rank, tensor,
    byte (from the end if negative) and bit."""
    from gpt2_ddp.training.loop import train_step

    with built(config) as trainer:
        run, optimizer = trainer.run, trainer.optimizer.plain
        trainer.warm_up()
        for _ in range(2):
            train_step(trainer)
        tensors = dict(run.task.model.named_parameters())
        tensors |= optimizer_state(run.task.model, optimizer)
        tensors |= {f"average.{name}": value for name, value in trainer.average.values.items()}

        def check(step):
            run.progress.step, taken = step, run.step
            try:
                trainer.check_replicas()
            finally:
                run.progress.step = taken

        messages = [message_of(check, 0)]
        here = run.accelerator.process_index
        for step, (rank, name, *place) in enumerate(flips, 1):
            mine = tensors[name] if rank == here else torch.zeros(100)
            flip_bit(mine, *place)
            messages.append(message_of(check, step))
            flip_bit(mine, *place)
        messages.append(message_of(check, 0))
        if here == 1:
            flip_bit(tensors["h.1.mlp.c_fc.weight"], 4002, 6)
            run.task.model.register_buffer("statistics", torch.ones(3))
        for _ in range(3):
            train_step(trainer)
        return [*messages, message_of(check, run.step)]


def test_of_three_ranks_the_one_is_named(tiny_config, tmp_path):
    """In a GPT: large tensors and tiny ones, weights, averages, moments and step
    counts, the first bits and the last. Steps after a flip do not
    spread it to other tensors; and a buffer is nobody's business."""
    names = [
        "wte.weight",
        "h.0.ln_1.weight",
        "ln_f.bias",
        "exp_avg.wte.weight",
        "exp_avg_sq.ln_f.bias",
        "average.h.0.mlp.c_fc.weight",
    ]
    flips = [
        (i % 3, name, *place)
        for i, name in enumerate(names)
        for place in ((0, 0), (-1, 7), (77, 3))
    ]
    flips.append((1, "step.ln_f.weight", 2, 0))
    told = run_ranks(flip_and_tell, 3, tiny_config({"optim.average": 0.3}), flips)
    assert told[0] == told[1] == told[2]
    clean, *messages, again, later = told[0]
    spoiled = "h.1.mlp.c_fc.weight, average.h.1.mlp.c_fc.weight differ"
    assert re.match(rf"rank 1 \(host .*\): {spoiled} from .* at step 5;", later)
    assert clean == again == ""
    for step, ((rank, name, *_), message) in enumerate(zip(flips, messages, strict=True), 1):
        assert message.startswith(
            f"rank {rank} (host {socket.gethostname()}): {name} differs from the other ranks' "
            f"at step {step};"
        )


SHAPES = {
    "odd": torch.arange(771.0),
    "scalar": torch.tensor(3.0),
    "bf16": torch.arange(515.0).bfloat16(),
    "flags": torch.arange(13) % 3 == 0,
    "transposed": torch.arange(6000.0).view(20, 300).t(),
    "inside another": torch.arange(3000.0)[1:],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_bit_counts(name):
    """Any one bit changes the sum, the same values in another layout do not."""
    tensor = SHAPES[name]
    whole = sum_of(tensor)
    plain = tensor.clone(memory_format=torch.contiguous_format)
    assert (whole.dtype, whole.shape) == (torch.int64, ())
    assert whole == sum_of(plain)
    for byte in {*range(0, plain.nbytes, plain.nbytes // 37 + 1), plain.nbytes - 1}:
        for bit in range(8) if tensor.dtype != torch.bool else [0]:
            flip_bit(plain, byte, bit)
            assert sum_of(plain) != whole, (byte, bit)
            flip_bit(plain, byte, bit)


def test_changes_that_could_cancel_are_found():
    """Rows that change places. Of neighbouring bytes with
    weights of 1, 3, 5 ...: 3 · 1 - 1 · 2 - 1 · 1."""
    rows = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    for i in range(1, 50):
        assert sum_of(rows[[i, *range(1, i), 0, *range(i + 1, 50)]]) != sum_of(rows)
    assert sum_of(torch.tensor([3, 0, 0, 0]).byte()) != sum_of(torch.tensor([0, 1, 0, 0]).byte())
    assert sum_of(torch.zeros(0)) == 0


def test_several_ranks_and_many_tensors_are_named():
    """All of them where there is no majority."""
    ranks = [[1] * 6, [1] * 6, [1, 1, 1, 1, 1, 2], [2] * 6, [1] * 6]
    named = partial(re.findall, r"rank (\d) \(host (.)\): (.*?) differ")
    message = _describe("abcdef", "vwxyz", ranks, 7)
    assert named(message) == [("2", "x", "f"), ("3", "y", "a, b, c and 3 more")]
    assert " at step 7;" in message
    message = _describe("ab", "wxyz", [[1, 5], [1, 5], [1, 6], [1, 6]], 8)
    assert named(message) == [("0", "w", "b"), ("1", "x", "b"), ("2", "y", "b"), ("3", "z", "b")]


def damaged_in_training(config):
    """Trains; after step 10, a weight of rank 1 is not a number. Returns what that comes to."""
    from gpt2_ddp.training import loop

    step = loop.train_step

    def train_step(trainer):
        run = trainer.run
        result = step(trainer)
        if run.step == 10 and run.accelerator.process_index == 1:
            run.task.model.wte.weight.data[3, 3] = math.nan
        return result

    loop.train_step = train_step
    with pytest.raises(ReplicaMismatch) as corrupted:
        train(config)
    return str(corrupted.value)


def test_a_training_ends_before_it_saves_what_was_damaged(tiny_config, tmp_path):
    """Also where the last step's weights would end the run as diverged, on that rank alone."""
    config = tiny_config({"optim.grad_clip": 0.0})
    for said in run_ranks(damaged_in_training, 3, config):
        assert re.match(r"rank 1 \(host .*wte.weight .*at step 10", said), said
    run = tmp_path / "runs/run"
    assert status(run)["state"] == "failed"
    assert "rank 1 (host " in status(run)["reason"]
    assert saved_steps(run) == [0, 5]
