"""What the ranks do once, what they do alike, and what they agree on."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpt2_ddp.errors import UserError, truncate

T = TypeVar("T")

PREPARATION = timedelta(days=7)
"""How long ranks wait for each other while data are prepared, fetched or hashed."""
MOST = 5
"""Differences between ranks that are told."""


def on_main(accelerator: Accelerator, function: Callable[[], T]) -> T:
    """Calls `function` on the main process alone and returns its (picklable) result on every rank.

    Raises:
        UserError: on every rank, when the main process raised it.
    """
    outcome: list[tuple[T | None, UserError | None]] = [(None, None)]
    if accelerator.is_main_process:
        outcome = [_attempt(function)]
    broadcast_object_list(outcome)
    result, error = outcome[0]
    if error is not None:
        error.on_every_rank = True
        raise error
    return result  # pyright: ignore[reportReturnType]


def on_every_rank(accelerator: Accelerator, function: Callable[[], T], patience: timedelta | None = None) -> T:
    """Calls `function` on every rank and returns each its own result, once all have succeeded.

    Args:
        patience: how long ranks wait for the slowest, where that may exceed a collective's usual time-out.

    Raises:
        UserError: on every rank, the first rank's when any raised one.
    """
    result, error = _attempt(function)
    errors = [error]
    if accelerator.num_processes > 1:
        group = dist.new_group(backend="gloo", timeout=patience) if patience else None
        errors = [error] * accelerator.num_processes
        dist.all_gather_object(errors, error, group=group)
    for failure in errors:
        if failure is not None:
            failure.on_every_rank = True
            raise failure
    return result  # pyright: ignore[reportReturnType]


def check_ranks_agree(here: Mapping[str, object]) -> None:
    """Ranks that were started with another configuration or other data would train nonsense in silence.

    Args:
        here: what has to be the same on all ranks, by the name that the user knows it by. A hash may stand for a value.

    Raises:
        UserError: on every rank, when any two of them differ: what differs, each with rank 0's value and the other's.
    """
    first, *others = gather_object([dict(here)])
    mistakes: dict[str, str] = {}
    for rank, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                hint = f"rank {rank} has {truncate(other.get(name))}; give all ranks the same"
                mistakes.setdefault(name, UserError(name, first.get(name), hint).mistakes[0])
    if mistakes:
        more = [f"and {len(mistakes) - MOST} more that differ"] * (len(mistakes) > MOST)
        error = UserError.join([*mistakes.values()][:MOST] + more)
        error.on_every_rank = True
        raise error


def sum_over_ranks(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The sum of the ranks' tensors, on all of them; collective."""
    total = accelerator.reduce(value.clone(), reduction="sum")
    assert isinstance(total, Tensor)
    return total


def _attempt(function: Callable[[], T]) -> tuple[T | None, UserError | None]:
    try:
        return function(), None
    except UserError as error:
        return None, error


def warm_up_ddp(model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor]) -> None:
    """Runs one synchronised backward of zero, so that DDP settles its buckets before the first step.

    DDP rebuilds its gradient buckets after the first backward, in the order in which gradients became ready, and from
    then on sums in another order. A resumed run would sum its first step like a fresh one: not bitwise equal from 3
    processes on.

    Args:
        loss: of the model, on inputs laid out like all others, or a compiled one would be compiled for these as well;
            what they are does not matter. Buffers (BatchNorm's statistics) keep their values.
    """
    if isinstance(model, DistributedDataParallel):
        buffers = [buffer.clone() for buffer in model.buffers()]
        (loss() * 0).backward()
        optimizer.zero_grad(set_to_none=False)  # as in training: they stay views of the buckets
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)


class AsyncSum:
    """Sums of a few integers over all ranks, returned one call late: no rank waits for another, no GPU is synchronised.

    Each call starts a small all-reduce on a gloo group and returns the result of the call before. Sums of integers are
    the same in any order.

    Args:
        size: how many integers; their sums must stay below 2^63.
    """

    def __init__(self, accelerator: Accelerator, size: int):
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._sums: Sequence[int] | Tensor = [0] * size
        self._pending: dist.Work | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """Starts the sum of `values`; returns the sums of the call before, zeros at first. Every rank calls it equally
        often and gets the same result."""
        if self._pending is not None:
            self._pending.wait()
        sums = list(map(int, self._sums))
        self._sums = values
        if self._group is not None:
            self._sums = torch.tensor(values, dtype=torch.int64)
            self._pending = dist.all_reduce(self._sums, group=self._group, async_op=True)
        return sums
