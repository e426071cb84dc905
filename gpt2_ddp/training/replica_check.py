"""The replica check: compares weights, their average and optimizer state of data-parallel ranks,
which must be equal bit for bit.

A memory error on one rank changes only its replica. Without a check training continues, and the
gradients of all ranks are slightly wrong. The check compares a hash of each tensor (`sum_of`),
computed on the device in one pass over the memory. Every single flipped bit changes the hash.

It misses errors that all ranks share, such as a gradient that was wrong before the all-reduce. It
also misses two changes within `PAGE` bytes that cancel: two 64-bit words exchanged, or one bit set
in one word and cleared in another.
"""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

PAGE = 1024
"""Bytes summed before each sum is weighted by its position: exchanged rows of a matrix are
detected."""

SHOWN = 3
"""Tensors of a rank that a message names; it counts the others."""


class ReplicaMismatch(Exception):
    """Ranks differ in weights, average or optimizer state. The message names rank, host and
    tensor."""


def replicated_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state by name, of plain model and optimizer. Buffers, such as
    BatchNorm's statistics, may differ between ranks and are left out."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # tied parameters once
        state = optimizer.state.get(parameter, {})
        tensors[name] = parameter
        tensors |= {
            f"{kind}.{name}": value for kind, value in state.items() if isinstance(value, Tensor)
        }
    return tensors


@torch.no_grad()
def check_replicas(
    accelerator: Accelerator,
    tensors: Mapping[str, Tensor],
    step: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Compares all ranks' tensors. Collective; waits for the device. Of sharded tensors, compares
    the parts of the ranks in each `group`: those with the same rank modulo the number of parts.

    Raises: ReplicaMismatch, on every rank, if a tensor differs at this step.
    """
    sums = torch.stack([sum_of(tensor).to(accelerator.device) for tensor in tensors.values()])
    extremes = torch.stack([sums, ~sums])  # largest x, and ~ of the smallest, in one all-reduce
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differs = (extremes[0] != ~extremes[1]).any().long()
    if group:  # another one's ranks may differ
        dist.all_reduce(differs)
    if not differs:
        return
    here = (socket.gethostname(), cast(list[int], sums.tolist()))
    gathered = cast(list[tuple[str, list[int]]], gather_object([here]))
    hosts = [host for host, _ in gathered]
    of_ranks = [sums for _, sums in gathered]
    parts = accelerator.num_processes // group.size() if group else 1
    raise ReplicaMismatch(_describe(list(tensors), hosts, of_ranks, step, parts))


def sum_of(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bytes, int64 scalar on its device: the sum, modulo 2⁶⁴, of its pages and
    of the bytes after the last whole page. Each has an odd factor, so one changed bit changes the
    sum. The factors look random: with 1, 3, 5, ... changes of neighbouring bytes could cancel."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a view that begins inside a 64-bit word
        data = data.clone()
    whole = len(data) // PAGE * PAGE
    pages = data[:whole].view(torch.int64).view(-1, PAGE // 8).sum(1)
    parts = torch.cat([pages, data[whole:].long()])
    numbers = torch.arange(1, len(parts) + 1, device=parts.device) * 0x1E3779B97F4A7C15
    return (parts * ((numbers ^ (numbers >> 29)) * 2 + 1)).sum()


def _describe(
    names: Sequence[str],
    hosts: Sequence[str],
    of_ranks: Sequence[Sequence[int]],
    step: int,
    parts: int = 1,
) -> str:
    """The message: tensors of each rank that differ from the majority's; of all ranks, without a
    majority."""
    differing: dict[int, list[str]] = {}
    for (name, *sums), part in product(zip(names, *of_ranks, strict=True), range(parts)):
        most, votes = Counter(sums[part::parts]).most_common(1)[0]
        for rank in range(part, len(sums), parts):
            if sums[rank] != most or 2 * votes * parts <= len(sums):  # all, without a majority
                differing.setdefault(rank, []).append(name)
    ranks: list[str] = []
    for rank, wrong in sorted(differing.items()):
        tensors = ", ".join(wrong[:SHOWN])
        if len(wrong) > SHOWN:
            tensors += f" and {len(wrong) - SHOWN} more"
        verb = "differs" if len(wrong) == 1 else "differ"
        ranks.append(f"rank {rank} (host {hosts[rank]}): {tensors} {verb} from the other ranks'")
    advice = "suspect the memory there; the newest checkpoint is good"
    return f"{'; '.join(ranks)} at step {step}; {advice}"
