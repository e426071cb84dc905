"""What DistributedDataParallel leaves to its user."""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(model: nn.Module, optimizer: AcceleratedOptimizer, *inputs: Tensor) -> None:
    """Runs one synchronised backward of zero, so that DDP settles its buckets before the first step.

    DDP rebuilds its gradient buckets after the first backward, in the order in which gradients became ready, and from
    then on sums in another order. A resumed run would sum its first step like a fresh one: not bitwise equal from 3
    processes on.

    Args:
        inputs: of the model; what they are does not matter. Buffers (BatchNorm's statistics) keep their values.
    """
    if isinstance(model, DistributedDataParallel):
        buffers = [buffer.clone() for buffer in model.buffers()]
        (model(*inputs) * 0).sum().backward()
        optimizer.zero_grad()
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)


@torch.no_grad()
def share_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Gives every rank the main process's buffers, such as BatchNorm's running statistics."""
    if accelerator.num_processes > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
