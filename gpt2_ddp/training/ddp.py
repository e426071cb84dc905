"""What differs between DDP and sharding: here each rank has the whole model; `training.fsdp` has
the other way."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import Part
from gpt2_ddp.checkpoint.loading import fill
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.records.metrics import Metrics
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import Task


class Replicated:
    """A model that each rank has whole. DDP averages the gradients of several ranks, in buckets
    that stay allocated.

    Attributes:
        replicas: the ranks that have the same as this one; None: all.
    """

    replicas: Any = None
    no_sync: Callable[[nn.Module], AbstractContextManager[object]]
    """Context of each micro-batch but a step's last one, in whose backward pass the ranks average
    their gradients."""
    held: Callable[..., dict[str, Tensor]] = staticmethod(dict)
    """What this rank's part of a checkpoint has of the run's tensors: here, all."""
    clip: Callable[[list[nn.Parameter], float], Tensor] = staticmethod(nn.utils.clip_grad_norm_)
    """Clips the gradients; returns their global norm before, fp32 scalar, equal on all ranks."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        # as views of the buckets, between steps
        self.keeps_gradients = accelerator.num_processes > 1
        self.part = Part(is_own=is_main_process())  # of a checkpoint
        self.no_sync = accelerator.no_sync

    def prepare(self, model: nn.Module, task: Task) -> tuple[nn.Module, Any]:
        """The task's model on its device as the loop calls it, with the main process's weights; its
        optimizer. Collective."""
        model.to(self.accelerator.device)
        # placed already; Accelerate's placing would import torch.distributed.tensor and sympy, 0.5
        # s
        return self.accelerator.prepare(
            model, task.build_optimizer(), device_placement=[False, False]
        )

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context of an evaluation, with the model for it. Accelerate's unwrap_model would import
        Dynamo, 1 s."""
        return nullcontext(model.module if isinstance(model, DistributedDataParallel) else model)

    def warm_up(self, model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor]) -> None:
        """Runs one backward pass of zero gradients. DDP then rebuilds its buckets and sums in
        another order: without it a resumed run of 3 or more processes would not be bitwise equal.
        Restores buffers (BatchNorm's statistics).
        `loss`: scalar, on inputs of the usual shapes, since a compiled model would compile for
        others."""
        if isinstance(model, DistributedDataParallel):
            buffers = [buffer.clone() for buffer in model.buffers()]
            (loss() * 0).backward()
            # as in training: gradients stay views of the buckets
            optimizer.zero_grad(set_to_none=False)
            for buffer, value in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or optimizer state that this rank holds."""
        return tensor

    def fill(self, targets: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copies values of a checkpoint into the targets of all ranks, by their names
        (`loading.fill`). Collective."""
        fill(targets, values)

    def sample(
        self, model: nn.Module, stop: StopRequest, metrics: Metrics, function: Callable[[], Any]
    ) -> Any:
        """The main process's result of `function`, which generates text; None after an exception,
        and on the other ranks. Collective. Raises: Interrupted."""
        return stop.run_on_main(lambda: metrics.attempt("sample", function))
