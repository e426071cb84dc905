"""Experiments on which rank sees which samples."""

import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from gpt2_ddp.lab.experiment import brief_group, experiment, largest, make_model, make_rows, mse, union

SAMPLES = TensorDataset(torch.arange(1000))


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
        orders["told"].append(union(told))
        orders["forgotten"].append(union(forgotten))
        orders["prepared"].append(union(int(index) for (batch,) in loader for index in batch))
    return {way: sum(map(int.__eq__, *epochs)) / len(SAMPLES) for way, epochs in orders.items()}


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
    return {"own": len(set(union(own))), "common": len(set(union(common)))}


def _rare_accuracy(labels: Tensor, right: Tensor) -> float:
    return right[labels == 1].float().mean().item()


@experiment(
    claim="A distributed loader repeats samples until all ranks have whole batches; a metric must not count them",
    wrong="accelerator.gather",
    right="accelerator.gather_for_metrics, which drops the repeated ones",
    measured="37 test samples, 4 of a rare class: {padded:.0f} counted, its accuracy {padded_accuracy:.1%}; "
    "dropped: {dropped:.0f}, {dropped_accuracy:.1%}; on one process {true_accuracy:.1%}",
    holds=lambda m: (
        m.dropped == 37
        and m.dropped_accuracy == m.true_accuracy
        and m.padded > 37
        and abs(m.padded_accuracy - m.true_accuracy) > 0.1
    ),
)
def padded_test_set(accelerator: Accelerator, seed: int):
    labels, right = torch.zeros(37, dtype=torch.long), torch.ones(37, dtype=torch.bool)
    labels[[0, 1, 20, 30]] = 1
    right[[0, 1]] = False  # the model fails on two of the four; they stand where samples are repeated from
    even = Accelerator(cpu=True)  # Accelerate's own defaults
    loader = even.prepare_data_loader(DataLoader(TensorDataset(labels, right), batch_size=8))
    gathered = [(even.gather(tuple(batch)), even.gather_for_metrics(tuple(batch))) for batch in loader]
    found = {"true_accuracy": _rare_accuracy(labels, right)}
    for way, batches in zip(("padded", "dropped"), zip(*gathered, strict=True), strict=True):
        seen_labels, seen_right = (torch.cat(parts) for parts in zip(*batches, strict=True))
        found |= {way: len(seen_labels), f"{way}_accuracy": _rare_accuracy(seen_labels, seen_right)}
    return found


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
    found = {"true_accuracy": right.float().mean().item()}
    for way, sampler in samplers.items():
        scored = union(int(index) for batch, _ in DataLoader(test, batch_size=8, sampler=sampler) for index in batch)
        found |= {way: len(set(scored)), f"{way}_accuracy": right[scored].float().mean().item()}
    return found


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
    found = {"timeout": 2.0}
    for way in ("alone", "joined"):
        model, done, waited = DDP(make_model(seed), process_group=brief_group(found["timeout"])), 0, 0.0
        with Join([model]) if way == "joined" else nullcontext():
            for _ in range(3 + accelerator.process_index):
                start = time.perf_counter()
                try:
                    mse(model, *rows).backward()
                except RuntimeError:
                    waited = time.perf_counter() - start
                    break
                done += 1
        dist.barrier()
        found |= {way: largest(done), f"{way}_waited": largest(waited)}
    return found
