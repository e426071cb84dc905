"""What differs between DDP and sharding: here each rank has the whole model; `training.fsdp` has
the other way."""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar, cast

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import Part
from gpt2_ddp.checkpoint.loading import fill
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.records.metrics import Metrics
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import Task

T = TypeVar("T")


class Replicated:
    """A model that each rank has whole. DDP averages the gradients of several ranks, in buckets
    that stay allocated.

    Attributes:
        part: this rank's part of a checkpoint.
        replicas: the ranks that have the same as this one; None: all.
        keeps_gradients: whether gradients stay allocated between steps, as views of DDP's buckets.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.keeps_gradients = accelerator.num_processes > 1
        self.part = Part(is_own=is_main_process())
        self.replicas: dist.ProcessGroup | None = None

    def prepare(
        self, model: nn.Module, task: Task[RunConfig]
    ) -> tuple[nn.Module, AcceleratedOptimizer]:
        """The task's model on its device as the loop calls it, with the main process's weights; its
        optimizer. Collective."""
        model.to(self.accelerator.device)
        # Model and optimizer are on the device already. Accelerate's placing would import
        # torch.distributed.tensor and sympy, 0.5 s.
        optimizer = task.build_optimizer()
        return cast(
            tuple[nn.Module, AcceleratedOptimizer],
            self.accelerator.prepare(model, optimizer, device_placement=[False, False]),
        )

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Context of each micro-batch but a step's last one, in whose backward pass the ranks
        average their gradients."""
        return self.accelerator.no_sync(model)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clips the gradients; returns their global norm before, fp32 scalar, equal on all
        ranks."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def evaluating(self, model: nn.Module) -> AbstractContextManager[nn.Module]:
        """Context of an evaluation, with the model for it."""
        # Accelerate's unwrap_model would import Dynamo, 1 s
        if isinstance(model, DistributedDataParallel):
            return nullcontext(cast(nn.Module, model.module))
        return nullcontext(model)

    def warm_up(self, model: nn.Module, optimizer: Optimizer, loss: Callable[[], Tensor]) -> None:
        """Runs one backward pass of zero gradients, and restores buffers (BatchNorm's statistics).

        After its first backward pass, DDP rebuilds its buckets and sums gradients in another order.
        Without a warm-up, the first step after a resume would sum in another order than the same
        step of an uninterrupted run. With 3 or more processes, its bits would differ.

        `loss`: scalar, on inputs of the usual shapes; a compiled model would compile for others."""
        if not isinstance(model, DistributedDataParallel):
            return
        buffers = [buffer.clone() for buffer in model.buffers()]
        (loss() * 0).backward()
        # as in training: gradients stay views of the buckets
        optimizer.zero_grad(set_to_none=False)
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value)

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or optimizer state that this rank holds."""
        return tensor

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of the run's tensors, as a checkpoint has it: here, all."""
        return {**tensors}

    def fill(self, targets: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Copies values of a checkpoint into the targets of all ranks, by their names
        (`loading.fill`). Collective."""
        fill(targets, values)

    def sample(
        self, model: nn.Module, stop: StopRequest, metrics: Metrics, function: Callable[[], T]
    ) -> T | None:
        """The main process's result of `function`, which generates text; None after an exception,
        and on the other ranks. Collective. Raises: Interrupted."""
        return stop.run_on_main(lambda: metrics.attempt("sample", function))
