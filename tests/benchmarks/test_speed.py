"""What Accelerate and our bookkeeping cost, against a loop written by hand: counted, since times
differ by machine.

`python -m benchmarks step` measures times.
"""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from commands import ROOT
from test_baselines import TINY
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import step
from benchmarks.config import BenchmarkConfig

PRESET = str(ROOT / "configs/gpt2_124m.yaml")
STEPS = 2


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write, backward passes included."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        self.total += sum(tensor.nbytes for tensor in tensors)
        return result


class Calls:
    """Counts calls of Python functions in this thread."""

    total = 0

    def __enter__(self):
        sys.setprofile(self.add)
        return self

    def __exit__(self, *error):
        sys.setprofile(None)

    def add(self, frame, event, argument):
        self.total += event == "call"


def count(counter, contender, *arguments):
    """What a counter finds in `STEPS` steps of a contender, after two others."""

    def steps():
        yield
        with counter:
            for _ in range(STEPS):
                yield
        raise SystemExit

    with suppress(SystemExit):
        contender(partial(next, steps()), *arguments)
    AcceleratorState._reset_state(reset_partial_state=True)
    return counter.total


def compared(counter, run):
    """What counters of this class find in the whole loop, and in the bare one."""
    return count(counter(), step.ours, run), count(counter(), step.bare, run, torch.device("cpu"))


def short_run(folder, precision, changes):
    config = BenchmarkConfig(device="cpu", preset=PRESET, block_size=32)
    run = step.short_run(config, folder, 1, precision, "off", changes)
    step.random_tokens(Path(run.data.paths[0]), "bytes" if changes == TINY else "gpt2")
    return run


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_step_is_the_arithmetic_of_a_loop_written_by_hand(tmp_path, precision):
    """GPT-2's vocabulary and a thin layer, so that most of a
    step passes over parameters: one more pass would show."""
    run = short_run(tmp_path, precision, {"model.n_layer": 1, "model.n_embd": 192})
    ours, bare = compared(Traffic, run)
    assert 0.99 * bare <= ours <= 1.01 * bare


def test_a_step_makes_few_calls(tmp_path):
    """Order, digest, guard and rows together call less
    than the bare loop's `model.parameters()` does."""
    ours, bare = compared(Calls, short_run(tmp_path, "no", TINY))
    assert 0 < ours <= 1.1 * bare
