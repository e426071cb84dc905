"""A sentinel against silent corruption: data-parallel ranks hold the same parameters and optimizer state, bit for bit.

Memory that loses a bit on one rank changes its copy alone, and nothing else in a training ever compares the copies: the
rank goes on with its own, and the gradients of all are a little wrong from then on. Here all are compared by a sum over
64-bit integers, on the device, in one pass over the memory; every single flipped bit changes it. It cannot see what all
ranks have alike, such as a gradient that was wrong before it was all-reduced, nor what two changes within `PAGE` bytes
take from each other: two 64-bit words exchanged, the same bit of two words set in one and cleared in the other.
"""

import socket
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.optim import Optimizer

PAGE = 1024
"""Bytes that are summed up before their place counts: rows of a matrix that change places are found."""

SHOWN = 3
"""Tensors of a rank that are named; more of them are counted."""


class ReplicaMismatch(Exception):
    """Ranks differ in what they should have alike. The message names rank, host and tensor."""


@torch.no_grad()
def check_replicas(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Compares all ranks' parameters and optimizer state. Collective; waits for the device. What is not a parameter,
    such as BatchNorm's statistics, may differ between ranks and is left out.

    Args:
        model: plain. optimizer: raw, over its parameters.
        step: which it is, for the message.

    Raises:
        ReplicaMismatch: on every rank alike, when a tensor is not the same on all of them.
    """
    if accelerator.num_processes == 1:
        return
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():  # a tied one comes once
        state = optimizer.state.get(parameter, {})
        tensors[name] = parameter
        tensors |= {f"{kind}.{name}": value for kind, value in state.items() if isinstance(value, Tensor)}
    sums = torch.stack([sum_of(tensor).to(accelerator.device) for tensor in tensors.values()])
    extremes = torch.stack([sums, ~sums])  # the largest x, and ~ of the smallest: backends know no other way at once
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if torch.equal(extremes[0], ~extremes[1]):
        return
    hosts, of_ranks = gather_object([socket.gethostname()]), gather_object([sums.tolist()])
    raise ReplicaMismatch(_accuse(list(tensors), hosts, of_ranks, step))


def sum_of(tensor: Tensor) -> Tensor:
    """A hash of a tensor's bytes: the sum, modulo 2⁶⁴, of its pages and of the bytes behind the last whole one, each
    times an odd number of its own, so that a change of one bit never gets lost; int64 scalar on its device. The numbers
    look random, as the bits of a byte and those of its neighbour could make up for each other if they were 1, 3, 5."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.storage_offset() % 8:  # a view into something larger, where no 64-bit word begins
        data = data.clone()
    whole = len(data) // PAGE * PAGE
    pages = data[:whole].view(torch.int64).view(-1, PAGE // 8).sum(1)
    parts = torch.cat([pages, data[whole:].long()])
    numbers = torch.arange(1, len(parts) + 1, device=parts.device) * 0x1E3779B97F4A7C15
    return (parts * ((numbers ^ (numbers >> 29)) * 2 + 1)).sum()


def _accuse(names: Sequence[str], hosts: Sequence[str], of_ranks: Sequence[Sequence[int]], step: int) -> str:
    """Which ranks hold which tensor otherwise than more than half of them do; all ranks, where no such half is."""
    accused: dict[int, list[str]] = {}
    decided = True
    for name, *sums in zip(names, *of_ranks, strict=True):
        most, votes = Counter(sums).most_common(1)[0]
        known = votes > len(sums) / 2
        decided = decided and known
        for rank, own in enumerate(sums):
            if own != most or not known:
                accused.setdefault(rank, []).append(name)
    others, whose = "the other ranks'" if decided else "another rank's", "its" if len(accused) == 1 else "their"
    parts = []
    for rank, wrong in sorted(accused.items()):
        shown = ", ".join(wrong[:SHOWN]) + (f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        parts.append(f"rank {rank} (host {hosts[rank]}): {shown} differ{'s' * (len(wrong) == 1)} from {others}")
    return f"{'; '.join(parts)} at step {step}; suspect {whose} memory; the newest checkpoint is good"
