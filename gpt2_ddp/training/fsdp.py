"""Sharding (torch's fully_shard, FSDP2): each rank has a part of the weights, gradients and
optimizer state.

A parameter is cut along its first dimension (`distributed.rows`). The forward and the backward pass
of a block gather its weights, and free them afterwards.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gpt2_ddp.checkpoint.format import Part
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import from_main, let_wait, on_every_rank
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.metrics import Metrics
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.stop import StopRequest

ANSWERS = {
    "FSDP_VERSION": ("2", "only version 2 is supported"),
    "FSDP_RESHARD_AFTER_FORWARD": (
        "true",
        "weights that a block has gathered are freed after its forward pass",
    ),
    "FSDP_OFFLOAD_PARAMS": ("false", "weights stay on the devices"),
    "FSDP_AUTO_WRAP_POLICY": (
        "TRANSFORMER_BASED_WRAP",
        "transformer blocks are sharded, and the rest as one",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "use --train.activation_checkpointing true"),
}
"""What `accelerate config` may say of FSDP: by variable, the supported answer and a hint."""


def follow_accelerate(config: RunConfig) -> TrainingConfig:
    """The configuration that `accelerate config` selects by its answers on FSDP; Accelerate itself
    sees none of them.
    Raises: UserError for an answer that is not supported."""
    if not isinstance(config, TrainingConfig):
        raise UserError(
            "ACCELERATE_USE_FSDP",
            "true",
            "only train_gpt2.py shards; answer no in `accelerate config`",
        )
    for name, (supported, hint) in ANSWERS.items():
        if (answer := os.environ.get(name, supported)).lower() != supported.lower():
            raise UserError(name, answer, f"{hint}; answer {supported} in `accelerate config`")
    del os.environ["ACCELERATE_USE_FSDP"]
    launch = config.launch.model_copy(update={"parallel": "fsdp"})
    return config.model_copy(update={"launch": launch})


def count_shards(processes: int, replicas: int) -> int:
    """Parts of a model whose `launch.replicas` share the processes. Raises: UserError if they
    cannot."""
    if processes % replicas:
        raise UserError("launch.replicas", replicas, f"is no divisor of the {processes} processes")
    return processes // replicas


def blocks(model: Any) -> Sequence[Any]:
    """The modules that are sharded one by one, the model's `h`; the rest is sharded as one."""
    return getattr(model, "h", ())


def make_model(make: Callable[[], Any]) -> tuple[Any, Iterator[tuple[str, Tensor]]]:
    """The model that `make` returns, on the meta device; and names and values of its weights, of
    another one that is made from the same seed once they are asked for. Raises: UserError for a
    buffer whose values would be unknown."""

    def initial() -> Iterator[Any]:
        torch.manual_seed(torch.initial_seed())
        yield from make().state_dict().items()

    with torch.device("meta"):
        model = make()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            raise UserError(
                "task",
                name,
                'no checkpoint has this buffer; make it with device="cpu", or persistent',
            )
    return model, initial()


class Sharded(Replicated):
    """A model whose parameters are cut among the ranks of a group; `launch.replicas` groups have
    the same parts."""

    keeps_gradients = False

    def __init__(self, accelerator: Accelerator, config: Any):
        self.accelerator = accelerator
        self._config = config.launch
        replicas = config.launch.replicas
        shards = count_shards(accelerator.num_processes, replicas)
        if accelerator.mixed_precision == "fp16":
            raise UserError(
                "train.mixed_precision",
                "fp16",
                "is not supported with launch.parallel fsdp; use bf16",
            )
        if config.train.compile == "model":
            raise UserError(
                "train.compile", "model", "is not supported with launch.parallel fsdp; use blocks"
            )
        kind = accelerator.device.type
        if not dist.is_initialized():
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(
                "nccl" if kind == "cuda" else "gloo", store=store, rank=0, world_size=1
            )
        mesh = init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicas", "shards"))
        for group in mesh.get_all_groups():
            let_wait(group)
        self.mesh = mesh if replicas > 1 else mesh["shards"]
        self.shards = mesh.get_group("shards")
        if replicas > 1:
            self.replicas = mesh.get_group("replicas")
        # for what ranks with a part of their own say in the background
        group = let_wait(dist.new_group([*range(shards)], backend="gloo")) if shards > 1 else None
        self.part = Part(
            self.shards.rank(), shards, not self.replicas or self.replicas.rank() == 0, group
        )

    def prepare(self, model: Any, task: Any) -> tuple[nn.Module, Any]:
        device = self.accelerator.device
        halves = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        dtypes = halves if self.accelerator.mixed_precision == "bf16" else {}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        for module in (*blocks(model), model):
            fully_shard(module, mesh=self.mesh, mp_policy=policy)
        made = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
        model.to_empty(device=device)
        for name, buffer in made.items():
            model.get_buffer(name).copy_(buffer)
        targets = model.state_dict()
        while self.deal(targets, task.initial):
            pass
        prepared = self.accelerator.prepare_model(
            model, device_placement=False, evaluation_mode=True
        )
        return prepared, self.accelerator.prepare_optimizer(
            task.build_optimizer(), device_placement=False
        )

    @contextmanager
    def evaluating(self, model: Any) -> Iterator[nn.Module]:
        try:
            yield model
        finally:
            # weights that wait for a backward pass would stay whole
            for module in (*blocks(model), model):
                module.reshard()

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

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
        is_there = lambda one: (
            len(self.local(one)) if isinstance(one, DTensor) else not self.part.number
        )
        return {name: self.local(one) for name, one in tensors.items() if is_there(one)}

    @torch.no_grad()
    def fill(self, targets: dict[str, Tensor], values: Any) -> None:
        """Fills the targets: each rank with a part of its own reads its rows of the `Tensors`.
        Collective."""

        def read() -> None:
            for name, target in targets.items():
                local = self.local(target)
                if not isinstance(target, DTensor):
                    local.copy_(values[name])
                elif len(local):
                    # of W parts, ceil(rows / W) each
                    first = self.part.number * -(-len(target) // self.part.count)
                    local.copy_(values.rows(name, first, first + len(local)))

        on_every_rank(read if self.part.is_own else lambda: None)
        if self.replicas:
            for target in targets.values():
                dist.broadcast(self.local(target), group=self.replicas, group_src=0)

    @torch.no_grad()
    def deal(self, targets: dict[str, Any], values: Iterator[tuple[str, Any]]) -> str:
        """Has each rank receive its rows of the next of the main process's values, if there is one,
        in the target of that name. Returns the name, or an empty one. Collective."""
        name, value = next(values, ("", None))
        if name := from_main(name):
            target = targets[name]
            whole = torch.empty(target.shape, dtype=target.dtype) if value is None else value
            whole = whole.to(self.accelerator.device)
            if isinstance(target, DTensor):
                whole = distribute_tensor(whole, target.device_mesh, target.placements)
            else:
                dist.broadcast(whole, src=0)
            # a copy of DTensors would first plan for a third of a second
            self.local(target).copy_(self.local(whole))
        return name

    @torch.no_grad()
    def sample(
        self, model: Any, stop: StopRequest, metrics: Metrics, function: Callable[[], Any]
    ) -> Any:
        """All ranks generate the same text, since each pass gathers weights. An exception on any
        ends the run."""

        def forward(block: Any, *inputs: Any) -> Tensor:
            # its first call allocates the memory that training uses, too
            with torch.inference_mode(False):
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
