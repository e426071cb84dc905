"""Sums over all ranks that nobody waits for."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator


class Agreement:
    """Sums of a few integers over all ranks, one call late: each call starts a tiny all-reduce on a group of the CPU
    and reads the one before. No rank waits for another, and no GPU is synchronised. Integers, because their sums are
    the same in any order, and so on every rank and for any number of them.

    Args:
        size: how many integers; their sums have to stay below 2^63.
    """

    def __init__(self, accelerator: Accelerator, size: int):
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._sums: Sequence[int] | torch.Tensor = [0] * size
        self._pending: dist.Work | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """Takes this rank's values; returns the sums of those of the call before, zeros at first. Every rank calls it
        equally often and gets the same answers."""
        if self._pending is not None:
            self._pending.wait()
        sums = list(map(int, self._sums))
        self._sums = values
        if self._group is not None:
            self._sums = torch.tensor(values, dtype=torch.int64)
            self._pending = dist.all_reduce(self._sums, group=self._group, async_op=True)
        return sums
