"""Sharding (torch's fully_shard, FSDP2): each rank has a part of the weights, gradients and optimizer state.

A parameter is cut along its first dimension (`distributed.rows`). The forward and the backward pass of a block gather
its weights, and free them afterwards.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.metrics import Metrics
from gpt2_ddp.checkpoint.tensors import Part
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed import rows
from gpt2_ddp.distributed.launch import LONGEST
from gpt2_ddp.distributed.ranks import from_main, is_main, on_every_rank
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.strategy import Replicated

ANSWERS = {
    "FSDP_VERSION": ("2", "only version 2 is supported"),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "weights that a block has gathered are freed after its forward pass"),
    "FSDP_OFFLOAD_PARAMS": ("false", "weights stay on the devices"),
    "FSDP_AUTO_WRAP_POLICY": ("TRANSFORMER_BASED_WRAP", "transformer blocks are sharded, and the rest as one"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "use --train.activation_checkpointing true"),
}
"""What `accelerate config` may say of FSDP: by variable, the supported answer and a hint."""


def follow_accelerate(config: RunConfig) -> TrainingConfig:
    """The configuration that `accelerate config` selects by its answers on FSDP; Accelerate itself sees none of them.
    Raises: UserError for an answer that is not supported."""
    if not isinstance(config, TrainingConfig):
        raise UserError("ACCELERATE_USE_FSDP", "true", "only train_gpt2.py shards; answer no in `accelerate config`")
    for name, (supported, hint) in ANSWERS.items():
        if (answer := os.environ.get(name, supported)).lower() != supported.lower():
            raise UserError(name, answer, f"{hint}; answer {supported} in `accelerate config`")
    del os.environ["ACCELERATE_USE_FSDP"]
    launch = config.launch.model_copy(update={"parallel": "fsdp"})
    return config.model_copy(update={"launch": launch})


def count_shards(processes: int, replicas: int) -> int:
    """Parts of a model whose `launch.replicas` share the processes. Raises: UserError if they cannot."""
    if processes % replicas:
        raise UserError("launch.replicas", replicas, f"is no divisor of the {processes} processes")
    return processes // replicas


def blocks(model: Any) -> Sequence[Any]:
    """The modules that are sharded one by one, the model's `h`; the rest is sharded as one."""
    return getattr(model, "h", ())


class Sharded(Replicated):
    """A model whose parameters are cut among the ranks of a group; `launch.replicas` groups have the same parts."""

    keeps_gradients = False

    def __init__(self, accelerator: Accelerator, config: RunConfig):
        assert isinstance(config, TrainingConfig)
        self.accelerator, self._config = accelerator, config.launch
        world, replicas, precision = accelerator.num_processes, self._config.replicas, accelerator.mixed_precision
        shards = count_shards(world, replicas)
        if precision == "fp16":
            raise UserError("train.mixed_precision", "fp16", "is not supported with launch.parallel fsdp; use bf16")
        if config.train.compile == "model":
            raise UserError("train.compile", "model", "is not supported with launch.parallel fsdp; use blocks")
        if not dist.is_initialized():
            backend = "nccl" if accelerator.device.type == "cuda" else "gloo"
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        shape, names = (replicas, shards), ("replicas", "shards")
        shape, names = (shape, names) if replicas > 1 else (shape[1:], names[1:])
        self.mesh = init_device_mesh(accelerator.device.type, shape, mesh_dim_names=names)
        self.shards = self.mesh.get_group("shards")
        self.replicas = self.mesh.get_group("replicas") if replicas > 1 else None
        for group in filter(None, (self.shards, self.replicas)):
            _set_pg_timeout(LONGEST, group)  # the watchdog detects late ranks
        group: Any = None  # for what ranks with a part of their own say in the background
        if shards > 1:
            group = dist.new_group([*range(shards)], timeout=LONGEST, backend="gloo")
        self.part = Part(self.shards.rank(), shards, not self.replicas or self.replicas.rank() == 0, group)

    def prepare(self, model: Any, optimizer: Callable[[], Optimizer]) -> tuple[nn.Module, Any]:
        device = self.accelerator.device
        begins = is_main() and not next(model.parameters()).is_meta  # a new run, with this process's weights
        weights = {**model.state_dict()} if begins else {}
        half = self.accelerator.mixed_precision == "bf16"
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        for module in (*blocks(model), model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
        if from_main(bool(weights)):
            self.scatter(model.state_dict(), weights)
        prepared: Any = self.accelerator.prepare_optimizer(optimizer(), device_placement=False)
        return self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True), prepared

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[nn.Module]:
        try:
            yield model
        finally:
            for module in (*blocks(model), model):  # weights that wait for a backward pass would stay whole
                module.reshard()

    def accumulating(self, model: Any, last: bool) -> AbstractContextManager[object]:
        model.set_requires_gradient_sync(last or self._config.reduce == "each")
        return nullcontext()

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        gradients = [self.local(p.grad) for p in parameters if p.grad is not None]
        square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square, group=self.shards)
        norm = square.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    def local(self, tensor: Any) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def held(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """The rows of this rank; and all of the tensors that are not divided, in the first part."""
        parts = {name: self.local(tensor) for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        others = {} if self.part.number else {name: tensor for name, tensor in tensors.items() if name not in parts}
        return others | {name: part for name, part in parts.items() if len(part)}

    @torch.no_grad()
    def fill(self, targets: dict[str, Tensor], values: Any) -> None:
        """Fills the targets: each rank with a part of its own reads its rows of the `Tensors`. Collective."""

        def read() -> None:
            for name, target in targets.items():
                local = self.local(target)
                if not isinstance(target, DTensor):
                    local.copy_(values[name])
                elif len(local):
                    first = self.part.number * rows.most_rows(target, self.part.count)
                    local.copy_(values.rows(name, first, first + len(local)))

        on_every_rank(read if self.part.is_own else lambda: None)
        if self.replicas:
            for target in targets.values():
                dist.broadcast(self.local(target), group=self.replicas, group_src=0)

    @torch.no_grad()
    def scatter(self, targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        """Divides the main process's `values` among the `targets` of all ranks, one tensor at a time. Collective."""
        for name, target in targets.items():
            local, value = self.local(target), values.get(name)
            if not isinstance(target, DTensor):
                if value is not None:
                    local.copy_(value)
                dist.broadcast(local, src=0)
                continue
            if self.part.is_own:
                received = rows.padded(local, target, self.part.count)
                rows.scatter(received, None if value is None else value.to(received), 0, self.shards).wait()
                local.copy_(received[: len(local)])
            if self.replicas:
                dist.broadcast(local, group=self.replicas, group_src=0)

    def check_replicas(self, model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if self.replicas:
            from gpt2_ddp.training.replica_check import check_replicas

            check_replicas(self.accelerator, model, optimizer, step, self.local, self.replicas)

    @torch.no_grad()
    def sample(self, model: Any, stop: StopRequest, metrics: Metrics, function: Callable[[], Any]) -> Any:
        """All ranks generate the same text, since each pass gathers weights. An exception on any ends the run."""

        def forward(block: Any, *inputs: Any) -> Tensor:
            with torch.inference_mode(False):  # its first call allocates the memory that training uses, too
                block.unshard()
            hidden = type(block).forward(block, *inputs)
            block.reshard()
            return hidden

        model.unshard()  # embeddings, final norm and head
        for block in blocks(model):
            block.forward = partial(forward, block)
        try:
            return function()
        finally:
            for block in blocks(model):
                del block.forward
            model.reshard()
