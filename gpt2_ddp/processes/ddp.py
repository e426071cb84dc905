"""What DistributedDataParallel leaves to its user."""

from collections.abc import Callable

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def settle_buckets(model: nn.Module, optimizer: AcceleratedOptimizer, loss: Callable[[], Tensor]) -> None:
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
