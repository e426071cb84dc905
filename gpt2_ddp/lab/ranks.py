"""Experiments on the samples of each rank, and on work of a single rank."""

import io
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpt2_ddp.lab.experiment import experiment, gradient, largest, make_model, make_rows, mse, share

SAMPLES = TensorDataset(torch.arange(1000))


def brief_group(seconds: float) -> dist.ProcessGroup:
    """All ranks, with a timeout of so many seconds in place of the default's 30 minutes."""
    dist.barrier()  # its ranks are to come at about the same time from here on
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def failed_after(work: Callable[[], object]) -> float:
    """Seconds after which `work` raised a RuntimeError; 0 if it did not."""
    start = time.perf_counter()
    try:
        work()
    except RuntimeError:
        return time.perf_counter() - start
    return 0.0


@experiment(
    claim="A DistributedSampler that is not told the epoch shuffles every epoch alike",
    wrong="forget set_epoch",
    right="sampler.set_epoch(epoch) before each epoch, or a shuffling loader prepared by Accelerate",
    measured="places in epoch 2 with the same sample as in epoch 1: {forgotten:.1%} forgotten, {told:.1%} told, "
    "{prepared:.1%} prepared by Accelerate",
    holds=lambda m: m.forgotten == 1 and m.told < 0.05 and m.prepared < 0.05,
)
def set_epoch(accelerator: Accelerator, seed: int):
    loader = Accelerator(cpu=True).prepare_data_loader(DataLoader(SAMPLES, batch_size=10, shuffle=True))
    orders: dict[str, list[list[int]]] = {"forgotten": [], "told": [], "prepared": []}
    told, forgotten = DistributedSampler(SAMPLES, seed=seed), DistributedSampler(SAMPLES, seed=seed)
    for epoch in range(2):
        told.set_epoch(epoch)
        orders["told"].append(gather_object([*told]))
        orders["forgotten"].append(gather_object([*forgotten]))
        orders["prepared"].append(gather_object([int(index) for (batch,) in loader for index in batch]))
    yield {way: sum(map(int.__eq__, *epochs)) / len(SAMPLES) for way, epochs in orders.items()}


@experiment(
    claim="All ranks must shuffle with the same seed: each takes its share of one common order",
    wrong="DistributedSampler(seed=seed + rank)",
    right="DistributedSampler(seed=seed) on all ranks",
    measured="samples that an epoch over 1000 sees: {own:.0f} with seeds of their own, {common:.0f} with a common one",
    holds=lambda m: m.common == 1000 and m.own < 900,
)
def seed_per_rank(accelerator: Accelerator, seed: int):
    own = DistributedSampler(SAMPLES, seed=seed + accelerator.process_index)
    common = DistributedSampler(SAMPLES, seed=seed)
    yield {"own": len(set(gather_object([*own]))), "common": len(set(gather_object([*common])))}


@experiment(
    claim="A distributed loader repeats samples until all ranks have whole batches; a metric must not count them",
    wrong="accelerator.gather",
    right="accelerator.gather_for_metrics, which drops the repeated ones",
    measured="37 test samples, 4 of a rare class: {padded:.0f} counted, its accuracy {padded_accuracy:.1%}; "
    "dropped: {dropped:.0f}, {dropped_accuracy:.1%}; on one process {true_accuracy:.1%}",
    holds=lambda m: m.dropped == 37 < m.padded and m.dropped_accuracy == m.true_accuracy > m.padded_accuracy + 0.1,
)
def padded_test_set(accelerator: Accelerator, seed: int):
    labels, right = torch.zeros(37, dtype=torch.long), torch.ones(37, dtype=torch.bool)
    labels[[0, 1, 20, 30]] = 1
    right[[0, 1]] = False  # the model fails on two of the four; they stand where samples are repeated from
    even = Accelerator(cpu=True)  # Accelerate's own defaults
    loader = even.prepare_data_loader(DataLoader(TensorDataset(labels, right), batch_size=8))
    yield {"true_accuracy": right[labels == 1].float().mean().item()}
    for way, gather in (("padded", even.gather), ("dropped", even.gather_for_metrics)):
        batches: list[Any] = [gather(tuple(batch)) for batch in loader]
        seen_labels, seen_right = (torch.cat(parts) for parts in zip(*batches, strict=True))
        yield {way: len(seen_labels), f"{way}_accuracy": seen_right[seen_labels == 1].float().mean().item()}


@experiment(
    claim="The training set's sampler draws the training set's indices, whatever loader it is given to",
    wrong="DataLoader(test, sampler=train_sampler)",
    right="a sampler made for the test set, unshuffled, nothing dropped",
    measured="of 100 test samples {borrowed:.0f} are scored, accuracy {borrowed_accuracy:.0%}; "
    "with a sampler of its own {own:.0f}, {own_accuracy:.0%}",
    holds=lambda m: m.own == 100 and m.own_accuracy == m.true_accuracy and m.borrowed < 100,
)
def training_sampler_on_test_set(accelerator: Accelerator, seed: int):
    training = TensorDataset(torch.zeros(64))
    right = torch.arange(100) < 64  # the samples that the model gets right come first
    test = TensorDataset(torch.arange(100), right)
    samplers = {"borrowed": DistributedSampler(training, seed=seed), "own": DistributedSampler(test, shuffle=False)}
    yield {"true_accuracy": right.float().mean().item()}
    for way, sampler in samplers.items():
        loader = DataLoader(test, batch_size=8, sampler=sampler)
        scored = gather_object([int(index) for batch, _ in loader for index in batch])
        yield {way: len(set(scored)), f"{way}_accuracy": right[scored].float().mean().item()}


@experiment(
    claim="A rank with one batch more waits for an all-reduce that nobody joins",
    wrong="loop over what each rank has",
    right="with Join([model]) (or as many batches on all ranks); Accelerate's join_uneven_inputs needs GPUs",
    measured="batches done by the rank that has 4, the other having 3: {alone:.0f} and then {alone_waited:.1f} s until "
    "the timeout of {timeout:.0f} s; {joined:.0f} joined",
    holds=lambda m: m.alone == 3 and m.alone_waited > 0.8 * m.timeout and m.joined == 4,
)
def unequal_batches(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 8)
    timeout = 2.0
    yield {"timeout": timeout}
    for way in ("alone", "joined"):
        model, done, waited = DDP(make_model(seed), process_group=brief_group(timeout)), 0, 0.0
        with Join([model]) if way == "joined" else nullcontext():
            for _ in range(3 + accelerator.process_index):
                if waited := failed_after(mse(model, *rows).backward):
                    break
                done += 1
        dist.barrier()
        yield {way: largest(done), f"{way}_waited": largest(waited)}


TIMEOUT = 1.0  # seconds, in place of the 30 minutes after which gloo gives up by default


def sum_over_ranks(value: float, group: dist.ProcessGroup) -> float:
    """The sum of the ranks' values, on all of them. Collective; RuntimeError after the group's timeout."""
    total = torch.tensor(value)
    dist.all_reduce(total, group=group)
    return total.item()


@experiment(
    claim="A collective inside `if is_main_process` meets the other ranks' next collective, and at last none",
    wrong="if accelerator.is_main_process: print(accelerator.reduce(loss, 'mean'))",
    right="mean = accelerator.reduce(loss, 'mean') on all ranks, print it on one",
    measured="3 steps of 32 rows; reduced by rank 0 alone: mean loss {alone_mean:.3f}, rank 1 counts {alone_rows:.1f} "
    "rows, and after {alone:.0f} step {waited:.1f} s until the timeout of {timeout:.0f} s (`{error}`); by all: "
    "{all_mean:.3f}, {all_rows:.0f} rows, {all:.0f} steps",
    holds=lambda m: (
        ((m.alone, m.all, m.all_rows) == (1, 3, 32) and m.alone_rows != 32 and m.waited > 0.8 * m.timeout)
        and (abs(m.all_mean / m.true_mean - 1) < 1e-5 and m.alone_mean != m.all_mean)
    ),
)
def collective_on_one_rank(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)
    model = make_model(seed)
    loss = mse(model, *share(rows, accelerator)).item()
    yield {"timeout": TIMEOUT, "true_mean": mse(model, *rows).item(), "waited": 0.0, "error": "no error"}
    for way, logs in (("alone", accelerator.is_main_process), ("all", True)):
        group, logged, counted, start = brief_group(TIMEOUT), [], [], time.perf_counter()
        try:
            for _ in range(3):
                counted.append(sum_over_ranks(len(rows[0]) / accelerator.num_processes, group))
                if logs:
                    logged.append(sum_over_ranks(loss, group) / accelerator.num_processes)
        except RuntimeError as error:
            yield {"waited": time.perf_counter() - start, "error": str(error).partition("] ")[2]}
        rank_1s = gather_object(counted[1:2])[-1]
        yield {way: len(logged), f"{way}_mean": logged[0] if logged else 0.0, f"{way}_rows": rank_1s}


@experiment(
    claim="The ranks' validation losses differ, so each would stop early at an epoch of its own",
    wrong="if loss > best: break, by each rank's own loss",
    right="decide by the mean over ranks, which is the same on all",
    measured="by its own loss rank {own} stops, after {own_epochs:.0f} epochs, and the other waits {own_waited:.1f} s "
    "until the timeout of {timeout:.0f} s; by the mean {mean} stop, after {mean_epochs:.0f}",
    holds=lambda m: (
        (m.own in ("0", "1") and m.own_waited > 0.8 * m.timeout)
        and ((m.mean, m.mean_waited) == ("0 and 1", 0) and m.mean_epochs < 50)
    ),
)
def early_stopping(accelerator: Accelerator, seed: int):
    training, validation = (share(make_rows(*made), accelerator) for made in ((seed, 16), (seed + 1, 32)))
    yield {"timeout": TIMEOUT}
    for way in ("own", "mean"):
        group = brief_group(TIMEOUT)
        model = DDP(make_model(seed), process_group=group)
        best, epochs, stopped, waited = float("inf"), 0, [], 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(50):
            optimizer.zero_grad()
            if waited := failed_after(mse(model, *training).backward):
                break
            optimizer.step()
            epochs += 1
            with torch.no_grad():
                loss = mse(model.module, *validation).item()
            if way == "mean":
                loss = sum_over_ranks(loss, group) / accelerator.num_processes
            if loss > best:
                stopped.append(str(accelerator.process_index))
                break
            best = loss
        stopped = " and ".join(gather_object(stopped))
        yield {way: stopped, f"{way}_epochs": largest(epochs), f"{way}_waited": largest(waited)}


@experiment(
    claim="With one seed on all ranks, dropout drops the same places on each, and less of its noise averages out",
    wrong="set_seed(seed)",
    right="set_seed(seed, device_specific=True), which adds the rank (augmentation alike; not the sampler's shuffle)",
    measured="places where both ranks' masks agree: {same_masks:.0%} with one seed, {own_masks:.0%} with their own; "
    "variance of the averaged gradient {same:.3f} and {own:.3f}, {ratio:.2f} times as much",
    holds=lambda m: m.same_masks == 1 and m.own_masks < 0.6 and m.ratio > 1.1,
)
def dropout_seed(accelerator: Accelerator, seed: int):
    rows = share(make_rows(seed, 32), accelerator)
    found = {}
    for way, device_specific in (("same", False), ("own", True)):
        first, activation, last = make_model(seed)
        model = DDP(nn.Sequential(first, activation, nn.Dropout(), last))
        set_seed(seed, device_specific=device_specific)
        mask = gather_object(nn.functional.dropout(torch.ones(1000)).bool().tolist())
        gradients = []
        for _ in range(200):
            model.zero_grad()
            mse(model, *rows).backward()
            gradients.append(gradient(model))
        agreeing = sum(map(bool.__eq__, mask[:1000], mask[1000:])) / 1000
        found |= {way: torch.stack(gradients).var(0).sum().item(), f"{way}_masks": agreeing}
    yield {**found, "ratio": found["same"] / found["own"]}


@experiment(
    claim="Where every rank saves to the same file, one truncates what another has finished and goes on to read",
    wrong="torch.save(state, path) on every rank",
    right="if accelerator.is_main_process: save; then accelerator.wait_for_everyone()",
    measured="saved by {every:.0f} ranks, and read by rank 0 while rank 1 still writes: {every_read:.0f} of 4 tensors, "
    "`{error}`; saved by {one:.0f}: {one_read:.0f} of 4",
    holds=lambda m: (m.every, m.every_read, m.one, m.one_read) == (2, 0, 1, 4),
)
def every_rank_saves(accelerator: Accelerator, seed: int):
    state = io.BytesIO()
    torch.save(make_model(seed).state_dict(), state)
    data = state.getvalue()
    yield {"error": "no error"}
    with TemporaryDirectory(prefix="ddp_lab") as own:
        folder = Path(gather_object([own])[0])
        for way, saves in (("every", True), ("one", accelerator.is_main_process)):
            path, read = folder / way, 0
            if saves and accelerator.process_index == 0:
                path.write_bytes(data)
            accelerator.wait_for_everyone()
            if saves and accelerator.process_index == 1:
                path.write_bytes(data[: len(data) // 2])  # half of its save
            accelerator.wait_for_everyone()
            if accelerator.process_index == 0:
                try:
                    read = len(torch.load(path))
                except RuntimeError as error:
                    yield {"error": str(error).partition(". ")[0]}
            yield {way: sum(gather_object([saves])), f"{way}_read": read}


@experiment(
    claim="Ranks that start together all find a cache empty, and each fills it",
    wrong="if not path.exists(): download(path)",
    right="the same, inside `with accelerator.main_process_first():`",
    measured="downloads of one file: {together:.0f} by ranks that look at once, {main_first:.0f} main process first",
    holds=lambda m: m.together == 2 and m.main_first == 1,
)
def every_rank_downloads(accelerator: Accelerator, seed: int):
    with TemporaryDirectory(prefix="ddp_lab") as own:
        folder = Path(gather_object([own])[0])
        for way, turns in (("together", nullcontext()), ("main_first", accelerator.main_process_first())):
            path = folder / way
            with turns:
                downloads = not path.exists()
                if way == "together":
                    accelerator.wait_for_everyone()  # a download takes longer than the other rank takes to look
                if downloads:
                    path.touch()
            yield {way: sum(gather_object([downloads]))}
