"""Experiments on what DistributedDataParallel does to gradients and weights."""

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt2_ddp.lab.experiment import (
    distance,
    experiment,
    gap,
    gradient,
    largest,
    make_model,
    make_rows,
    mse,
    share,
    weights,
)


@experiment(
    claim="DDP's gradient, the mean of the ranks' gradients, is that of the big batch",
    wrong="the bare model on each rank",
    right="the model in DDP",
    measured="off the big batch's gradient: {alone:.1%} alone, {ddp:.0e} with DDP",
    holds=lambda m: m.ddp < 1e-5 and m.alone > 0.01,
)
def mean_of_gradients(accelerator: Accelerator, seed: int):
    inputs, targets = make_rows(seed, 32)
    big = make_model(seed)
    mse(big, inputs, targets).backward()
    found = {}
    for way, model in (("alone", make_model(seed)), ("ddp", DDP(make_model(seed)))):
        mse(model, share(inputs, accelerator), share(targets, accelerator)).backward()
        found[way] = largest(distance(gradient(model), gradient(big)))
    return found


@experiment(
    claim="Replicas that start differently stay different, since only gradients are averaged",
    wrong="each rank keeps the weights it drew (init_sync=False)",
    right="DDP broadcasts rank 0's weights when it wraps the model",
    measured="largest difference of a weight between ranks after 10 steps: {kept:.2f} kept, {broadcast:g} broadcast",
    holds=lambda m: m.broadcast == 0 and m.kept > 0.01,
)
def different_replicas(accelerator: Accelerator, seed: int):
    inputs, targets = (share(rows, accelerator) for rows in make_rows(seed, 32))
    ways: dict[str, dict[str, Any]] = {"kept": {"init_sync": False}, "broadcast": {}}
    found = {}
    for way, options in ways.items():
        model = DDP(make_model(seed + accelerator.process_index), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(10):
            optimizer.zero_grad()
            mse(model, inputs, targets).backward()
            optimizer.step()
        found[way] = gap(model)
    return found


class Traffic:
    """Counts what DDP all-reduces, as its communication hook."""

    def __init__(self, model: DDP):
        self.bytes = self.calls = 0
        model.register_comm_hook(self, Traffic._hook)

    def _hook(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        self.bytes += bucket.buffer().nbytes
        self.calls += 1
        return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]


@experiment(
    claim="Accumulating over 4 micro-batches, gradients need to travel once, not 4 times",
    wrong="DDP as it is: every backward all-reduces",
    right="no_sync() for all but the last micro-batch",
    measured="bytes all-reduced per step: {every:.0f} without, {last:.0f} with no_sync; gradients {apart:.0e} apart",
    holds=lambda m: m.last == m.parameter_bytes and m.every == 4 * m.last and m.apart < 1e-5,
)
def no_sync(accelerator: Accelerator, seed: int):
    inputs, targets = (share(rows, accelerator).chunk(4) for rows in make_rows(seed, 32))
    gradients, traffic = [], []
    for saves in (False, True):
        model = DDP(make_model(seed))
        traffic.append(Traffic(model))
        for i in range(4):
            with model.no_sync() if saves and i < 3 else nullcontext():
                (mse(model, inputs[i], targets[i]) / 4).backward()
        gradients.append(gradient(model))
    size = 4 * weights(make_model(seed)).numel()
    apart = distance(gradients[1], gradients[0])
    return {"every": traffic[0].bytes, "last": traffic[1].bytes, "parameter_bytes": size, "apart": apart}


@experiment(
    claim="Small buckets send the same bytes in many more messages",
    wrong="bucket_cap_mb=0.1",
    right="bucket_cap_mb=25, the default",
    measured="{small:.0f} all-reduces a step against {default:.0f}, {small_bytes:.0f} and {default_bytes:.0f} bytes; "
    "{small_ms:.1f} and {default_ms:.1f} ms here",
    holds=lambda m: m.small >= 10 * m.default and m.small_bytes == m.default_bytes,
)
def bucket_size(accelerator: Accelerator, seed: int):
    found = {}
    rows = torch.ones(4, 128)
    for way, megabytes in (("small", 0.1), ("default", 25)):
        torch.manual_seed(seed)
        model = DDP(nn.Sequential(*[nn.Linear(128, 128) for _ in range(24)]), bucket_cap_mb=megabytes)
        model(rows).sum().backward()  # after the first backward DDP makes its buckets anew, in the order of use
        traffic = Traffic(model)
        start = time.perf_counter()
        for _ in range(10):
            model(rows).sum().backward()
        milliseconds = (time.perf_counter() - start) * 100
        found |= {way: traffic.calls / 10, f"{way}_bytes": traffic.bytes / 10, f"{way}_ms": milliseconds}
    return found


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
    inputs, targets = (share(rows, accelerator) for rows in make_rows(seed, 32))
    ways: dict[str, dict[str, Any]] = {"default": {}, "found": {"find_unused_parameters": True}}
    done, message = dict.fromkeys(ways, 0), "no error"
    for way, options in ways.items():
        model = DDP(TwoHeads(seed), **options)
        for _ in range(5):
            try:
                mse(model, inputs, targets).backward()
            except RuntimeError as error:
                message = str(error).partition(".")[0]
                break
            done[way] += 1
    return {**done, "error": message}


class SumOverRanks(torch.autograd.Function):
    """An all-reduce that the backward pass goes through: every rank's loss depends on every rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        total = grad_outputs[0].clone()
        dist.all_reduce(total)
        return total


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
    inputs, targets = make_rows(seed, 32)

    def build(norm: nn.Module) -> nn.Sequential:
        first, activation, last = make_model(seed)
        return nn.Sequential(first, norm, activation, last)

    def off(norm: nn.Module, big_norm: nn.Module) -> float:
        model, big = DDP(build(norm)), build(big_norm)
        mse(big, inputs, targets).backward()
        mse(model, share(inputs, accelerator), share(targets, accelerator)).backward()
        return largest(distance(gradient(model), gradient(big)))

    try:
        build(nn.SyncBatchNorm(16))(inputs)
        sync = "works"
    except ValueError as error:
        sync = str(error)
    return {
        "plain": off(nn.BatchNorm1d(16), nn.BatchNorm1d(16)),
        "reduced": off(AllReducedBatchNorm(16), nn.BatchNorm1d(16)),
        "group": off(nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)),
        "sync": sync,
    }
