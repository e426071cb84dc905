"""Experiments on DistributedDataParallel: gradients, weights, and calls that bypass the wrapper."""

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from gpt2_ddp.lab.experiment import distance, experiment, gradient, largest, make_model, make_rows, mse, share, train


def steps_done(model: nn.Module, rows: Sequence[Tensor]) -> tuple[int, str]:
    """How many of 5 forward and backward passes succeed, and the first sentence of the error that ended them."""
    for step in range(5):
        try:
            mse(model, *rows).backward()
        except RuntimeError as error:
            return step, str(error).partition(".")[0]
    return 5, "no error"


def gap(model: nn.Module) -> float:
    """The largest difference between ranks of one of the model's weights, from rank 0's."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    rank_0s = weights.clone()
    dist.broadcast(rank_0s, src=0)
    return largest((weights - rank_0s).abs().max().item())


@experiment(
    claim="DDP's gradient, the mean of the ranks' gradients, is that of the big batch",
    wrong="the bare model on each rank",
    right="the model in DDP",
    measured="off the big batch's gradient: {alone:.1%} alone, {ddp:.0e} with DDP",
    holds=lambda m: m.ddp < 1e-5 and m.alone > 0.01,
)
def mean_of_gradients(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)
    big = make_model(seed)
    mse(big, *rows).backward()
    for way, model in (("alone", make_model(seed)), ("ddp", DDP(make_model(seed)))):
        mse(model, *share(rows, accelerator)).backward()
        yield {way: largest(distance(gradient(model), gradient(big)))}


@experiment(
    claim="Replicas that start differently stay different, since only gradients are averaged",
    wrong="each rank keeps the weights it drew (init_sync=False)",
    right="DDP broadcasts rank 0's weights when it wraps the model",
    measured="largest difference of a weight between ranks after 10 steps: {kept:.2f} kept, {broadcast:g} broadcast",
    holds=lambda m: m.broadcast == 0 and m.kept > 0.01,
)
def different_replicas(accelerator: Accelerator, seed: int):
    rows = share(make_rows(seed, 32), accelerator)
    for way, init_sync in (("kept", False), ("broadcast", True)):
        model = DDP(make_model(seed + accelerator.process_index), init_sync=init_sync)
        train(model, rows, steps=10, lr=0.01)
        yield {way: gap(model)}


def record_traffic(model: DDP) -> list[int]:
    """A list that grows by the bytes of each all-reduce of the model's gradients."""

    def hook(sizes: list[int], bucket: GradBucket) -> torch.futures.Future[Tensor]:
        sizes.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]

    sizes: list[int] = []
    model.register_comm_hook(sizes, hook)
    return sizes


@experiment(
    claim="Accumulating over 4 micro-batches, gradients need to travel once, not 4 times",
    wrong="DDP as it is: every backward all-reduces",
    right="no_sync() for all but the last micro-batch",
    measured="bytes all-reduced per step: {every:.0f} without, {last:.0f} with no_sync; gradients {apart:.0e} apart",
    holds=lambda m: m.last == m.parameter_bytes and m.every == 4 * m.last and m.apart < 1e-5,
)
def no_sync(accelerator: Accelerator, seed: int):
    micro_batches = [part.chunk(4) for part in share(make_rows(seed, 32), accelerator)]
    gradients, traffic = [], []
    for saves in (False, True):
        model = DDP(make_model(seed))
        traffic.append(record_traffic(model))
        for i, rows in enumerate(zip(*micro_batches, strict=True)):
            with model.no_sync() if saves and i < 3 else nullcontext():
                (mse(model, *rows) / 4).backward()
        gradients.append(gradient(model))
    size, apart = gradients[0].nbytes, distance(gradients[1], gradients[0])
    yield {"every": sum(traffic[0]), "last": sum(traffic[1]), "parameter_bytes": size, "apart": apart}


@experiment(
    claim="Small buckets send the same bytes in many more messages",
    wrong="bucket_cap_mb=0.1",
    right="bucket_cap_mb=25, the default",
    measured="{small:.0f} all-reduces a step against {default:.0f}, {small_bytes:.0f} and {default_bytes:.0f} bytes; "
    "{small_ms:.1f} and {default_ms:.1f} ms here",
    holds=lambda m: m.small >= 10 * m.default and m.small_bytes == m.default_bytes,
)
def bucket_size(accelerator: Accelerator, seed: int):
    rows = torch.ones(4, 128)
    for way, megabytes in (("small", 0.1), ("default", 25)):
        torch.manual_seed(seed)
        model = DDP(nn.Sequential(*[nn.Linear(128, 128) for _ in range(24)]), bucket_cap_mb=megabytes)
        model(rows).sum().backward()  # after the first backward DDP makes its buckets anew, in the order of use
        traffic = record_traffic(model)
        start = time.perf_counter()
        for _ in range(10):
            model(rows).sum().backward()
        milliseconds = (time.perf_counter() - start) * 100
        yield {way: len(traffic) / 10, f"{way}_bytes": sum(traffic) / 10, f"{way}_ms": milliseconds}


class TwoHeads(nn.Module):
    """Uses one of its heads and leaves the other out, as a multi-task model does."""

    def __init__(self, seed: int):
        super().__init__()
        self.body, self.used, self.unused = make_model(seed), nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(self.body(inputs))


@experiment(
    claim="DDP waits for every parameter's gradient; one that takes no part in the loss stops training",
    wrong="DDP as it is",
    right="find_unused_parameters=True (or remove the parameter)",
    measured="steps done of 5: {default} (`{error}`), {found} with find_unused_parameters",
    holds=lambda m: m.default == 1 and m.found == 5,
)
def unused_parameters(accelerator: Accelerator, seed: int):
    rows = share(make_rows(seed, 32), accelerator)
    default, error = steps_done(DDP(TwoHeads(seed)), rows)
    found, _ = steps_done(DDP(TwoHeads(seed), find_unused_parameters=True), rows)
    yield {"default": default, "found": found, "error": error}


class SumOverRanks(torch.autograd.Function):
    """An all-reduce that the backward pass goes through: every rank's loss depends on every rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return SumOverRanks.apply(grad_outputs[0])  # pyright: ignore[reportReturnType]


class AllReducedBatchNorm(nn.BatchNorm1d):
    """BatchNorm in training, over the rows of all ranks."""

    def forward(self, input: Tensor) -> Tensor:
        moments = torch.stack([input.mean(0), input.square().mean(0)])
        mean, square = SumOverRanks.apply(moments) / dist.get_world_size()  # pyright: ignore[reportOperatorIssue]
        normed = (input - mean) / (square - mean.square() + self.eps).sqrt()
        return normed * self.weight + self.bias


@experiment(
    claim="BatchNorm normalises by each rank's own rows, so that DDP is not the big batch any more",
    wrong="nn.BatchNorm1d in DDP",
    right="all-reduce the moments (GPU: SyncBatchNorm), or GroupNorm, which needs no other rows",
    measured="gradient off the big batch's: {plain:.0%} BatchNorm, {reduced:.0e} moments all-reduced, "
    "{group:.0e} GroupNorm; SyncBatchNorm on CPU: `{sync}`",
    holds=lambda m: m.plain > 0.05 and m.reduced < 1e-3 and m.group < 1e-5,
)
def batch_norm(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)

    def build(norm: nn.Module) -> nn.Sequential:
        first, activation, last = make_model(seed)
        return nn.Sequential(first, norm, activation, last)

    def off(norm: nn.Module, big_norm: nn.Module) -> float:
        model, big = DDP(build(norm)), build(big_norm)
        mse(big, *rows).backward()
        mse(model, *share(rows, accelerator)).backward()
        return largest(distance(gradient(model), gradient(big)))

    try:
        build(nn.SyncBatchNorm(16))(rows[0])
        sync = "works"
    except ValueError as error:
        sync = str(error)
    yield {"plain": off(nn.BatchNorm1d(16), nn.BatchNorm1d(16)), "sync": sync}
    yield {"reduced": off(AllReducedBatchNorm(16), nn.BatchNorm1d(16))}
    yield {"group": off(nn.GroupNorm(4, 16), nn.GroupNorm(4, 16))}


@experiment(
    claim="DDP averages gradients only of what was called through it",
    wrong="loss = f(model.module(inputs))",
    right="loss = f(model(inputs)); model.module is for saving and evaluation",
    measured="largest difference of a weight between ranks after 10 steps: {module:.2f} by model.module, "
    "{model:g} by model",
    holds=lambda m: m.model == 0 and m.module > 0.01,
)
def called_module(accelerator: Accelerator, seed: int):
    rows, past, through = share(make_rows(seed, 32), accelerator), DDP(make_model(seed)), DDP(make_model(seed))
    train(past, rows, steps=10, lr=0.01, called=past.module)
    train(through, rows, steps=10, lr=0.01)
    yield {"module": gap(past), "model": gap(through)}


@experiment(
    claim="DDP broadcasts weights once, in its constructor; what rank 0 loads later stays rank 0's",
    wrong="model = DDP(model); if rank == 0: model.module.load_state_dict(saved)",
    right="load before wrapping (or on all ranks)",
    measured="largest difference of a weight between ranks after 10 steps: {after:.2f} loaded after wrapping, "
    "{before:g} before",
    holds=lambda m: m.before == 0 and m.after > 0.01,
)
def loaded_after_wrapping(accelerator: Accelerator, seed: int):
    saved = make_model(seed + 1).state_dict()
    for way in ("after", "before"):
        bare = make_model(seed)
        model = DDP(bare) if way == "after" else bare
        if accelerator.is_main_process:
            bare.load_state_dict(saved)
        model = model if way == "after" else DDP(bare)
        train(model, share(make_rows(seed, 32), accelerator), steps=10, lr=0.01)
        yield {way: gap(model)}


@experiment(
    claim="DDP's state_dict has names that the model itself does not know",
    wrong="torch.save(model.state_dict(), path)",
    right="accelerator.unwrap_model(model).state_dict()",
    measured="loaded into the bare model: `{error}`; with strict=False {forced:.0f} of 4 tensors and no error; "
    "unwrapped {unwrapped:.0f}",
    holds=lambda m: m.error != "no error" and m.forced == 0 and m.unwrapped == 4,
)
def module_prefix(accelerator: Accelerator, seed: int):
    trained = DDP(make_model(seed))

    def load(state: dict[str, Tensor], strict: bool) -> int:
        bare = make_model(seed + 1)
        bare.load_state_dict(state, strict=strict)
        return sum(map(torch.equal, bare.parameters(), trained.parameters()))

    wrapped, message = trained.state_dict(), "no error"
    try:
        load(wrapped, strict=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())
    unwrapped = accelerator.unwrap_model(trained).state_dict()
    yield {"error": message, "forced": load(wrapped, strict=False), "unwrapped": load(unwrapped, strict=False)}


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass instead of keeping them, and leaves out a head."""

    def __init__(self, seed: int, use_reentrant: bool):
        super().__init__()
        self.body, self.unused, self.use_reentrant = make_model(seed), nn.Linear(1, 1), use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.clone().requires_grad_()
        return checkpoint(self.body, inputs, use_reentrant=self.use_reentrant)  # pyright: ignore[reportReturnType]


@experiment(
    claim="find_unused_parameters and reentrant activation checkpointing count the same parameter twice",
    wrong="DDP(model, find_unused_parameters=True), checkpoint(use_reentrant=True)",
    right="use_reentrant=False (or static_graph=True, where every step is alike)",
    measured="steps done of 5: {reentrant:.0f} (`{error}`), {plain:.0f} with use_reentrant=False, "
    "{static:.0f} with static_graph",
    holds=lambda m: m.reentrant == 0 and m.plain == 5 and m.static == 5,
)
def reentrant_checkpointing(accelerator: Accelerator, seed: int):
    rows = share(make_rows(seed, 32), accelerator)
    reentrant, error = steps_done(DDP(Checkpointed(seed, True), find_unused_parameters=True), rows)
    plain, _ = steps_done(DDP(Checkpointed(seed, False), find_unused_parameters=True), rows)
    static, _ = steps_done(DDP(Checkpointed(seed, True), static_graph=True), rows)
    yield {"reentrant": reentrant, "plain": plain, "static": static, "error": error}
