"""The lessons of the DDP lab, in the order of docs/ddp-lab.md."""

from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpt2_ddp.lab.experiment import (
    distance,
    experiment,
    gradient,
    largest,
    make_model,
    make_rows,
    mse,
    share,
    train,
)


@experiment(
    claim="DDP's gradient, the mean of the ranks' gradients, is that of the big batch",
    wrong="the bare model on each rank",
    right="the model in DDP",
    measured="off the big batch's gradient: {alone:.1%} alone, {ddp:.0e} with DDP",
    holds=lambda m: m.ddp < 1e-5 and m.alone > 0.01,
)
def mean_of_gradients(accelerator: Accelerator):
    rows = make_rows(32)
    big = gradient(make_model(), rows)
    for way, model in (("alone", make_model()), ("ddp", DDP(make_model()))):
        yield {way: largest(distance(gradient(model, share(rows, accelerator)), big))}


def record_bytes(sizes: list[int], bucket) -> torch.futures.Future[Tensor]:
    """All-reduces a bucket of gradients, and adds its bytes to `sizes`."""
    sizes.append(bucket.buffer().nbytes)
    return allreduce_hook(None, bucket)  # pyright: ignore[reportArgumentType]


@experiment(
    claim="Accumulating over 4 micro-batches, gradients need to travel once, not 4 times",
    wrong="DDP as it is: every backward all-reduces",
    right="no_sync() for all but the last micro-batch",
    measured=(
        "bytes all-reduced per step: {every:.0f} without, {last:.0f} with no_sync; gradients"
        " {apart:.0e} apart"
    ),
    holds=lambda m: m.last == m.parameter_bytes and m.every == 4 * m.last and m.apart < 1e-5,
)
def no_sync(accelerator: Accelerator):
    micro_batches = [part.chunk(4) for part in share(make_rows(32), accelerator)]
    found = {}
    for way, saves in (("every", False), ("last", True)):
        model = DDP(make_model())
        sizes = []
        model.register_comm_hook(sizes, record_bytes)
        for i, rows in enumerate(zip(*micro_batches, strict=True)):
            with model.no_sync() if saves and i < 3 else nullcontext():
                found[way] = gradient(model, rows, 1 / 4)
        yield {way: sum(sizes)}
    yield {
        "parameter_bytes": found["last"].nbytes,
        "apart": distance(found["last"], found["every"]),
    }


@experiment(
    claim=(
        "DDP waits for every parameter's gradient; one that takes no part in the loss stops"
        " training"
    ),
    wrong="DDP as it is",
    right="find_unused_parameters=True (or remove the parameter)",
    measured="steps done of 5: {default} (`{error}`), {found} with find_unused_parameters",
    holds=lambda m: m.default == 1 and m.found == 5,
)
def unused_parameters(accelerator: Accelerator):
    rows = share(make_rows(32), accelerator)
    for way, finds in (("default", False), ("found", True)):
        model = make_model()
        done = 0
        # like the other head of a multi-task model
        model.register_parameter("unused", nn.Parameter(torch.zeros(1)))
        model = DDP(model, find_unused_parameters=finds)
        try:
            while done < 5:
                mse(model, *rows).backward()
                done += 1
        except RuntimeError as error:
            yield {"error": str(error).partition(".")[0]}
        yield {way: done}


@experiment(
    claim="BatchNorm normalises by each rank's own rows, so that DDP is not the big batch any more",
    wrong="nn.BatchNorm1d in DDP",
    right="SyncBatchNorm on GPUs, or GroupNorm, which needs no other rows",
    measured="off the big batch: {plain:.0%} BatchNorm, {group:.0e} GroupNorm",
    holds=lambda m: m.plain > 0.05 and m.group < 1e-5,
)
def batch_norm(accelerator: Accelerator):
    rows = make_rows(32)
    for way, norm in (("plain", nn.BatchNorm1d), ("group", partial(nn.GroupNorm, 4))):
        model = DDP(make_model().insert(1, norm(16)))
        big = make_model().insert(1, norm(16))
        mine = gradient(model, share(rows, accelerator))
        yield {way: largest(distance(mine, gradient(big, rows)))}


def gap(model: nn.Module) -> float:
    """The largest difference between ranks of one of the model's weights, from rank 0's."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    rank_0s = weights.clone()
    dist.broadcast(rank_0s, src=0)
    return largest((weights - rank_0s).abs().max().item())


@experiment(
    claim="DDP averages gradients only of what was called through it",
    wrong="loss = f(model.module(inputs))",
    right="loss = f(model(inputs)); model.module is for saving and evaluation",
    measured=(
        "largest difference of a weight between ranks after 10 steps: {module:.2f} by"
        " model.module, {model:g} by model"
    ),
    holds=lambda m: m.model == 0 and m.module > 0.01,
)
def called_module(accelerator: Accelerator):
    for way in ("module", "model"):
        model = DDP(make_model())
        train(
            model.module if way == "module" else model,
            share(make_rows(32), accelerator),
            steps=10,
            lr=0.01,
        )
        yield {way: gap(model)}


@experiment(
    claim="DDP broadcasts weights once, in its constructor; what rank 0 loads later stays rank 0's",
    wrong="model = DDP(model); if rank == 0: model.module.load_state_dict(saved)",
    right="load before wrapping (or on all ranks)",
    measured=(
        "largest difference of a weight between ranks after 10 steps: {after:.2f} loaded after"
        " wrapping, {before:g} before"
    ),
    holds=lambda m: m.before == 0 and m.after > 0.01,
)
def loaded_after_wrapping(accelerator: Accelerator):
    for way in ("after", "before"):
        bare = make_model()
        model = DDP(bare) if way == "after" else bare
        if accelerator.is_main_process:
            bare.load_state_dict(make_model(1).state_dict())
        model = model if way == "after" else DDP(bare)
        train(model, share(make_rows(32), accelerator), steps=10, lr=0.01)
        yield {way: gap(model)}


@experiment(
    claim="DDP's state_dict has names that the model itself does not know",
    wrong="torch.save(model.state_dict(), path)",
    right="accelerator.unwrap_model(model).state_dict()",
    measured=(
        "loaded into the bare model: `{error}`; with strict=False {forced:.0f} of 4 tensors and"
        " no error; unwrapped {unwrapped:.0f}"
    ),
    holds=lambda m: m.forced == 0 and m.unwrapped == 4,
)
def module_prefix(accelerator: Accelerator):
    trained = DDP(make_model())
    try:
        make_model(1).load_state_dict(trained.state_dict())
    except RuntimeError as error:
        yield {"error": " ".join(str(error).split())}
    for way, model in (("forced", trained), ("unwrapped", accelerator.unwrap_model(trained))):
        bare = make_model(1)
        bare.load_state_dict(model.state_dict(), strict=False)
        yield {way: sum(map(torch.equal, bare.parameters(), trained.parameters()))}


@experiment(
    claim="A DistributedSampler that is not told the epoch shuffles every epoch alike",
    wrong="forget set_epoch",
    right=(
        "sampler.set_epoch(epoch) before each epoch, or a shuffling loader prepared by Accelerate"
    ),
    measured=(
        "places in epoch 2 with the same sample as in epoch 1: {forgotten:.1%} forgotten,"
        " {told:.1%} told"
    ),
    holds=lambda m: m.forgotten == 1 and m.told < 0.05,
)
def set_epoch(accelerator: Accelerator):
    samples = TensorDataset(torch.arange(1000))
    for way in ("forgotten", "told"):
        sampler = DistributedSampler(samples)
        orders = []
        for epoch in range(2):
            if way == "told":
                sampler.set_epoch(epoch)
            orders.append(gather_object([*sampler]))
        yield {way: sum(map(int.__eq__, *orders)) / len(samples)}


@experiment(
    claim=(
        "A distributed loader repeats samples until all ranks have whole batches; a metric must"
        " not count them"
    ),
    wrong="accelerator.gather",
    right="accelerator.gather_for_metrics, which drops the repeated ones",
    measured=(
        "of 37 test samples: {padded:.0f} counted, accuracy {padded_accuracy:.1%}; dropped:"
        " {dropped:.0f}, {dropped_accuracy:.1%}; on one process {true_accuracy:.1%}"
    ),
    holds=lambda m: (
        m.dropped == 37 < m.padded
        and m.dropped_accuracy == m.true_accuracy > m.padded_accuracy + 0.02
    ),
)
def padded_test_set(accelerator: Accelerator):
    right = torch.ones(37)
    right[:2] = 0  # the model fails on two samples; they are among the repeated ones
    yield {"true_accuracy": right.mean().item()}
    even = Accelerator(cpu=True)  # Accelerate's own defaults
    loader = even.prepare_data_loader(DataLoader(TensorDataset(right), batch_size=8))
    for way, gather in (("padded", even.gather), ("dropped", even.gather_for_metrics)):
        parts: list[Any] = [gather(part) for (part,) in loader]
        counted = torch.cat(parts)
        yield {way: len(counted), f"{way}_accuracy": counted.mean().item()}


def brief_group(seconds: float) -> object:
    """All ranks, with a timeout of so many seconds in place of the default's 30 minutes."""
    dist.barrier()  # its ranks are to come at about the same time from here on
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


@experiment(
    claim="A rank with one batch more waits for an all-reduce that nobody joins",
    wrong="loop over what each rank has",
    right=(
        "with Join([model]) (or as many batches on all ranks); Accelerate's join_uneven_inputs"
        " needs GPUs"
    ),
    measured=(
        "batches done by the rank that has 4, the other having 3: {alone:.0f}, and then it waits"
        " for the timeout; {joined:.0f} joined"
    ),
    holds=lambda m: m.alone == 3 and m.joined == 4,
)
def unequal_batches(accelerator: Accelerator):
    for way in ("alone", "joined"):
        model = DDP(make_model(), process_group=brief_group(2.0))
        done = 0
        with Join([model]) if way == "joined" else nullcontext():
            for _ in range(3 + accelerator.process_index):
                with suppress(RuntimeError):  # the timeout
                    mse(model, *make_rows(8)).backward()
                    done += 1
        dist.barrier()
        yield {way: largest(done)}


def sum_over_ranks(value: float, group: object) -> float:
    """The sum of the ranks' values, on all of them. Collective; RuntimeError after the group's
    timeout."""
    total = torch.tensor(value)
    dist.all_reduce(total, group=group)
    return total.item()


@experiment(
    claim=(
        "A collective inside `if is_main_process` meets the other ranks' next collective, and at"
        " last none"
    ),
    wrong="if accelerator.is_main_process: print(accelerator.reduce(loss, 'mean'))",
    right="mean = accelerator.reduce(loss, 'mean') on all ranks, print it on one",
    measured=(
        "3 steps; reduced by rank 0 alone: mean loss {alone_mean:.3f}, and step {alone:.0f} is"
        " the last before the timeout; by all: {all_mean:.3f}, {all:.0f} steps"
    ),
    holds=lambda m: (
        (m.alone, m.all) == (1, 3)
        and m.alone_mean != m.all_mean
        and abs(m.all_mean / m.true_mean - 1) < 1e-5
    ),
)
def collective_on_one_rank(accelerator: Accelerator):
    rows = make_rows(32)
    model = make_model()
    loss = mse(model, *share(rows, accelerator)).item()
    yield {"true_mean": mse(model, *rows).item()}
    for way, logs in (("alone", accelerator.is_main_process), ("all", True)):
        group = brief_group(1.0)
        logged = []
        with suppress(RuntimeError):  # the timeout
            for _ in range(3):
                # the rows of the step
                sum_over_ranks(len(rows[0]) / accelerator.num_processes, group)
                if logs:
                    logged.append(sum_over_ranks(loss, group) / accelerator.num_processes)
        yield {way: len(logged), f"{way}_mean": logged[0] if logged else 0.0}


@experiment(
    claim=(
        "Where every rank saves to the same file, one truncates what another has finished and"
        " goes on to read"
    ),
    wrong="torch.save(state, path) on every rank",
    right="if accelerator.is_main_process: save; then accelerator.wait_for_everyone()",
    measured=(
        "tensors of 4 that rank 0 reads while rank 1 still writes: {every:.0f}; where rank 0"
        " alone saves: {one:.0f}"
    ),
    holds=lambda m: (m.every, m.one) == (0, 4),
)
def every_rank_saves(accelerator: Accelerator):
    is_first = accelerator.process_index == 0
    with TemporaryDirectory(prefix="ddp_lab") as own:
        folder = Path(gather_object([own])[0])
        for way, saves in (("every", True), ("one", accelerator.is_main_process)):
            path = folder / way
            read = 0
            if saves and is_first:
                torch.save(make_model().state_dict(), path)
            accelerator.wait_for_everyone()
            if saves and not is_first:
                path.write_bytes(path.read_bytes()[:1000])  # the beginning of its save
            accelerator.wait_for_everyone()
            with suppress(RuntimeError):
                read = len(torch.load(path)) if is_first else 0
            yield {way: read}


@experiment(
    claim="DDP's mean over ranks gives each rank the same weight, however few rows it has",
    wrong="each rank's mean over its own rows",
    right="each rank's sum, times the number of ranks, over the rows of all",
    measured=(
        "3 rows on rank 0 and 1 on rank 1; off the gradient of the 4: {means:.0%} by means,"
        " {sums:.0e} by sums"
    ),
    holds=lambda m: m.sums < 1e-5 and m.means > 0.1,
)
def unequal_shares(accelerator: Accelerator):
    rows = make_rows(4)
    mine = [part[:3] if accelerator.is_main_process else part[3:] for part in rows]
    count = torch.as_tensor(accelerator.reduce(torch.tensor(len(mine[0])), reduction="sum"))
    for way, weight in (("means", 1), ("sums", len(mine[0]) * accelerator.num_processes / count)):
        yield {
            way: distance(gradient(DDP(make_model()), mine, weight), gradient(make_model(), rows))
        }


@experiment(
    claim="A scheduler prepared by Accelerate advances once per process and step",
    wrong="accelerator.prepare(scheduler), made for 20 optimizer steps",
    right="step a scheduler of your own once per optimizer step",
    measured=(
        "learning rate after 10 of 20 steps of a linear decay from 1 to 0: {prepared:.2f}"
        " prepared, {own:.2f} own"
    ),
    holds=lambda m: abs(m.own - 0.5) < 1e-6 and abs(m.prepared) < 1e-6,
)
def scheduler_steps(accelerator: Accelerator):
    preparing = Accelerator(cpu=True)  # Accelerate's own defaults
    for way in ("prepared", "own"):
        plain = SGD(make_model().parameters(), lr=1.0)
        scheduler = LinearLR(plain, start_factor=1.0, end_factor=0.0, total_iters=20)
        optimizer = preparing.prepare_optimizer(plain)
        stepped = preparing.prepare_scheduler(scheduler) if way == "prepared" else scheduler
        for _ in range(10):
            optimizer.step()
            stepped.step()
        yield {way: plain.param_groups[0]["lr"]}


@experiment(
    claim=(
        "Spreading a batch over ranks changes nothing that the learning rate has to follow:"
        " gradients are averaged"
    ),
    wrong="multiply the learning rate by the number of processes, the global batch being the same",
    right="the same learning rate (a larger global batch is another question)",
    measured=(
        "loss after 30 steps: {one:.3f} on one process, {same:.3f} on two, {multiplied:.2e} with"
        " twice the rate"
    ),
    holds=lambda m: abs(m.same / m.one - 1) < 1e-3 and m.multiplied > 10 * m.one,
)
def multiplied_learning_rate(accelerator: Accelerator):
    rows = make_rows(32)
    # 1.2 / curvature: gradient descent on a quadratic converges below 2 / curvature and diverges
    # above (1.2 x 2)
    curvature = torch.linalg.eigvalsh(2 * rows[0].T @ rows[0] / len(rows[0]))[-1].item()
    for way, times in (("one", 1), ("same", 1), ("multiplied", accelerator.num_processes)):
        torch.manual_seed(0)
        model = nn.Linear(8, 1, bias=False)
        own = rows if way == "one" else share(rows, accelerator)
        train(model if way == "one" else DDP(model), own, steps=30, lr=1.2 * times / curvature)
        yield {way: mse(model, *rows).item()}
