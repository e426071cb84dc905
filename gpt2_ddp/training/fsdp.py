"""Sharding (torch's fully_shard, FSDP2): each rank has a part of the weights, gradients and
optimizer state.

A parameter is cut along its first dimension: of W parts, each has ceil(rows / W) rows, the last
ones fewer or none. The forward and the backward pass of a block gather its weights, and free them
afterwards.
"""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gpt2_ddp.checkpoint.format import Part, Tensors
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.ranks import from_main, let_wait, on_every_rank
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.metrics import Metrics
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.memory import keeping_weights, least_memory, run_setting
from gpt2_ddp.training.stop import StopRequest
from gpt2_ddp.training.task import Task

ConfigT = TypeVar("ConfigT", bound=RunConfig)
ModelT = TypeVar("ModelT", bound=nn.Module)
T = TypeVar("T")

ANSWERS = {
    "FSDP_VERSION": ("2", "only version 2 is supported"),
    "FSDP_RESHARD_AFTER_FORWARD": (
        "true",
        "weights that a block has gathered are kept after its forward pass only if all fit",
    ),
    "FSDP_OFFLOAD_PARAMS": ("false", "weights stay on the devices"),
    "FSDP_AUTO_WRAP_POLICY": (
        "TRANSFORMER_BASED_WRAP",
        "transformer blocks are sharded, and the rest as one",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": ("false", "use --train.activation_checkpointing true"),
}
"""What `accelerate config` may say of FSDP: by variable, the supported answer and a hint."""


def follow_accelerate(config: ConfigT) -> ConfigT:
    """The configuration that `accelerate config` selects by its answers on FSDP; Accelerate itself
    sees none of them. Raises: UserError for an answer that is not supported."""
    if not isinstance(config, TrainingConfig):
        hint = "only train_gpt2.py shards; answer no in `accelerate config`"
        raise UserError("ACCELERATE_USE_FSDP", "true", hint)
    for name, (supported, hint) in ANSWERS.items():
        answer = os.environ.get(name, supported)
        if answer.lower() != supported.lower():
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


def blocks(model: nn.Module) -> Sequence[nn.Module]:
    """The modules that are sharded one by one, the model's `h`; the rest is sharded as one."""
    return getattr(model, "h", ())


def _sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of a sharded model that gather their weights together: blocks, then the rest."""
    # fully_shard has changed their classes, which no type checker sees
    return [cast(FSDPModule, module) for module in (*blocks(model), model)]


def make_model(make: Callable[[], ModelT]) -> tuple[ModelT, Iterator[tuple[str, Tensor]]]:
    """The model that `make` returns, on the meta device; and names and values of its weights.
    Another model is made from the same seed once these are asked for. Raises: UserError for a
    buffer whose values would be unknown."""

    def initial() -> Iterator[tuple[str, Tensor]]:
        torch.manual_seed(torch.initial_seed())
        yield from make().state_dict().items()

    with torch.device("meta"):
        model = make()
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            hint = 'no checkpoint has this buffer; make it with device="cpu", or persistent'
            raise UserError("task", name, hint)
    return model, initial()


class Sharded(Replicated):
    """A model whose parameters are cut among the ranks of a group; `launch.replicas` groups have
    the same parts."""

    def __init__(self, accelerator: Accelerator, config: TrainingConfig):
        self.accelerator = accelerator
        self.keeps_gradients = False
        self.keeps_weights = False
        replicas = config.launch.replicas
        shards = count_shards(accelerator.num_processes, replicas)
        if accelerator.mixed_precision == "fp16":
            hint = "is not supported with launch.parallel fsdp; use bf16"
            raise UserError("train.mixed_precision", "fp16", hint)
        if config.train.compile == "model":
            hint = "is not supported with launch.parallel fsdp; use blocks"
            raise UserError("train.compile", "model", hint)
        kind = accelerator.device.type
        if not dist.is_initialized():  # a single process: fully_shard needs a group, too
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            backend = "nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        mesh = init_device_mesh(kind, (replicas, shards), mesh_dim_names=("replicas", "shards"))
        for group in mesh.get_all_groups():
            let_wait(group)
        self.mesh = mesh if replicas > 1 else mesh["shards"]
        self.shards = mesh.get_group("shards")
        self.replicas = mesh.get_group("replicas") if replicas > 1 else None
        # for what ranks with a part of their own say in the background
        group = let_wait(dist.new_group([*range(shards)], backend="gloo")) if shards > 1 else None
        is_own = self.replicas is None or self.replicas.rank() == 0
        self.part = Part(self.shards.rank(), shards, is_own, group)

    def prepare(
        self, model: nn.Module, task: Task[RunConfig]
    ) -> tuple[nn.Module, AcceleratedOptimizer]:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self.accelerator.mixed_precision == "bf16":
            policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        self.keeps_weights = self._fits_whole(task)
        for module in (*blocks(model), model):
            # None: only the last module's stay gathered between forward and backward pass
            reshards = False if self.keeps_weights else None
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=reshards)
        # buffers that no checkpoint has were made on the CPU; to_empty would lose their values
        made = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}
        model.to_empty(device=self.accelerator.device)
        for name, buffer in made.items():
            model.get_buffer(name).copy_(buffer)
        targets = model.state_dict()
        while self.deal(targets, task.initial):
            pass
        accelerator = self.accelerator
        # evaluation_mode: without DDP around it
        prepared = cast(
            nn.Module,
            accelerator.prepare_model(model, device_placement=False, evaluation_mode=True),
        )
        optimizer = accelerator.prepare_optimizer(task.build_optimizer(), device_placement=False)
        return prepared, cast(AcceleratedOptimizer, optimizer)

    def _fits_whole(self, task: Task[RunConfig]) -> bool:
        """Whether gathered weights fit the memory besides the rest. Collective."""
        config = task.config
        assert isinstance(config, TrainingConfig), "others are not sharded"
        setting = run_setting(config, task.model, self.accelerator)
        memory = least_memory(self.accelerator.device)
        if setting is None:
            return False
        _, rows = task.feed.micro_batches
        return keeping_weights(replace(setting, micro_batch=rows), memory).keeps_weights

    @contextmanager
    def evaluating(self, model: nn.Module) -> Generator[nn.Module]:
        try:
            yield model
        finally:
            # weights that wait for a backward pass would stay whole
            for module in _sharded_modules(model):
                module.reshard()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        sharded = cast(FSDPModule, model)
        self._set_last(sharded, False)
        yield
        self._set_last(sharded, True)

    def _set_last(self, model: FSDPModule, is_last: bool) -> None:
        """Says whether the next backward pass is the last one of a step, which adds up the
        gradients of the ranks. Only after it are weights freed that stay gathered."""
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        if self.keeps_weights:
            model.set_reshard_after_backward(is_last)

    @torch.no_grad()
    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        gradients = [self.local(p.grad) for p in parameters if p.grad is not None]
        # of an empty list, torch's norm is on the CPU, which NCCL refuses
        square = torch.zeros((), device=self.accelerator.device)
        if gradients:
            square = nn.utils.get_total_norm(gradients) ** 2
        dist.all_reduce(square, group=self.shards)
        norm = square.sqrt()
        if gradients:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor)  # pyright: ignore  a stub without tensors
        return norm

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def held(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of this rank; and all of the tensors that are not divided, in the first part."""
        held: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = self.local(tensor)
            is_held = self.part.number == 0  # of a tensor that is not divided
            if isinstance(tensor, DTensor):
                is_held = len(local) > 0
            if is_held:
                held[name] = local
        return held

    @torch.no_grad()
    def fill(self, targets: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Fills the targets: each rank with a part of its own reads its rows of the `Tensors`.
        Collective."""

        def read() -> None:
            if not self.part.is_own:
                return
            for name, target in targets.items():
                local = self.local(target)
                if not isinstance(target, DTensor):
                    local.copy_(values[name])
                elif len(local):
                    assert isinstance(values, Tensors), "a checkpoint's"
                    # of W parts, ceil(rows / W) each
                    first = self.part.number * -(-len(target) // self.part.count)
                    local.copy_(values.rows(name, first, first + len(local)))

        on_every_rank(read)
        if self.replicas:
            for target in targets.values():
                dist.broadcast(self.local(target), group=self.replicas, group_src=0)

    @torch.no_grad()
    def deal(self, targets: Mapping[str, Tensor], values: Iterator[tuple[str, Tensor]]) -> str:
        """Has each rank receive its rows of the next of the main process's values, if there is one,
        in the target of that name. Returns the name, or an empty one. Collective."""
        name, value = next(values, ("", None))
        name = from_main(name)
        if name:
            target = targets[name]
            if value is None:  # on the ranks that receive it
                value = torch.empty(target.shape, dtype=target.dtype)
            whole = value.to(self.accelerator.device)
            if isinstance(target, DTensor):
                whole = distribute_tensor(whole, target.device_mesh, target.placements)
            else:
                dist.broadcast(whole, src=0)
            # a copy of DTensors would first plan for a third of a second
            self.local(target).copy_(self.local(whole))
        return name

    @torch.no_grad()
    def sample(
        self, model: nn.Module, stop: StopRequest, metrics: Metrics, function: Callable[[], T]
    ) -> T | None:
        """All ranks generate the same text, since each pass gathers weights. An exception on any
        ends the run."""

        def forward(block: nn.Module, *inputs: object) -> Tensor:
            sharded = cast(FSDPModule, block)
            # its first call allocates the memory that training uses, too
            with torch.inference_mode(False):
                sharded.unshard()
            hidden = type(block).forward(block, *inputs)
            sharded.reshard()
            return hidden

        rest = cast(FSDPModule, model)  # embeddings, final norm and head
        rest.unshard()
        for block in blocks(model):
            block.forward = partial(forward, block)
        try:
            return function()
        finally:
            for block in blocks(model):
                del block.forward
            rest.reshard()
