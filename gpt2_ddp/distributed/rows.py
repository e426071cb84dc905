"""Tensors whose rows are divided among the ranks of a group: of W ranks, rank r has rows [r·c, (r + 1)·c), with
c = ceil(rows / W). Imported by sharded trainings only."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def most_rows(whole: Tensor, ranks: int) -> int:
    """Rows of the first rank; no rank has more."""
    return -(-len(whole) // ranks)


def padded(tensor: Tensor, rows: int) -> Tensor:
    """The tensor with so many rows; the last ones are zeros."""
    return F.pad(tensor, (*[0, 0] * (tensor.dim() - 1), 0, rows - len(tensor))).contiguous()


def gather(part: Tensor, rank: int, group: dist.ProcessGroup) -> tuple[list[Tensor], Any]:
    """Starts to gather padded parts on a rank of the group; they are there once the work is done."""
    parts = [torch.empty_like(part) for _ in range(group.size())] if rank == group.rank() else []
    return parts, dist.gather(part, parts or None, group=group, group_dst=rank, async_op=True)


def scatter(part: Tensor, whole: Tensor | None, rank: int, group: dist.ProcessGroup) -> Any:
    """Starts to scatter the padded parts of a rank's `whole` tensor, each into its rank's `part`."""
    parts = None if whole is None else [*padded(whole, group.size() * len(part)).chunk(group.size())]
    return dist.scatter(part, parts, group=group, group_src=rank, async_op=True)
