"""Experiments on the training loop around DDP: weighting, logging, accumulation, schedules and scaling."""

from math import ceil
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD
from torch.optim.lr_scheduler import LinearLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from gpt2_ddp.lab.experiment import distance, experiment, gradient, make_model, make_rows, mse, share, train


@experiment(
    claim="DDP's mean over ranks gives each rank the same weight, however few rows it has",
    wrong="each rank's mean over its own rows",
    right="each rank's sum, times the number of ranks, over the rows of all",
    measured="3 rows on rank 0 and 1 on rank 1; off the gradient of the 4: {means:.0%} by means, {sums:.0e} by sums",
    holds=lambda m: m.sums < 1e-5 and m.means > 0.1,
)
def unequal_shares(accelerator: Accelerator, seed: int):
    rows, big = make_rows(seed, 4), make_model(seed)
    mse(big, *rows).backward()
    mine = [part[:3] if accelerator.is_main_process else part[3:] for part in rows]
    count = torch.as_tensor(accelerator.reduce(torch.tensor(len(mine[0])), reduction="sum"))
    for way in ("means", "sums"):
        model = DDP(make_model(seed))
        loss = mse(model, *mine)
        if way == "sums":
            loss = loss * len(mine[0]) * accelerator.num_processes / count
        loss.backward()
        yield {way: distance(gradient(model), gradient(big))}


@experiment(
    claim="Rank 0's loss is the loss of rank 0's rows alone",
    wrong="log loss.item() on rank 0",
    right="log the mean over ranks: accelerator.reduce(loss, 'mean')",
    measured="logged {logged:.3f} by rank 0, {reduced:.3f} reduced; the batch's loss is {true:.3f}",
    holds=lambda m: abs(m.reduced / m.true - 1) < 1e-5 and abs(m.logged / m.true - 1) > 0.01,
)
def rank_0s_loss(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)
    loss = mse(DDP(make_model(seed)), *share(rows, accelerator)).detach()
    reduced = torch.as_tensor(accelerator.reduce(loss, reduction="mean"))
    yield {"logged": loss.item(), "reduced": reduced.item(), "true": mse(make_model(seed), *rows).item()}


LOG_EVERY = 10


class Waits(TorchDispatchMode):
    """Counts what makes a GPU's program wait: collectives, and numbers that are read from a tensor, like by item()."""

    collectives = reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collectives += func.namespace == "c10d"
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@experiment(
    claim="A loss that is reduced and read at each step costs a collective and a wait each time",
    wrong="accelerator.reduce(loss).item() at each step",
    right="add detached losses up where they are, reduce and read the sum every 10 steps",
    measured="in 20 steps {each:.0f} collectives and {each_reads:.0f} item() at each step, {summed:.0f} and "
    "{summed_reads:.0f} summed; mean loss {each_mean:.4f} and {summed_mean:.4f}",
    holds=lambda m: m.each == m.each_reads == 20 and m.summed == m.summed_reads == 2 and m.apart < 1e-5,
)
def logging_each_step(accelerator: Accelerator, seed: int):
    rows, means = share(make_rows(seed, 32), accelerator), []
    for way, every in (("each", 1), ("summed", LOG_EVERY)):
        model, waits = DDP(make_model(seed)), Waits()
        optimizer, total, logged = SGD(model.parameters(), lr=0.01), torch.zeros(()), []
        for step in range(1, 21):
            optimizer.zero_grad()
            loss = mse(model, *rows)
            loss.backward()
            optimizer.step()
            with waits:
                total += loss.detach()
                if step % every == 0:
                    logged.append(torch.as_tensor(accelerator.reduce(total / every, reduction="mean")).item())
                    total.zero_()
        means.append(sum(logged) / len(logged))
        yield {way: waits.collectives, f"{way}_reads": waits.reads, f"{way}_mean": means[-1]}
    yield {"apart": abs(means[0] / means[1] - 1)}


def window_length(index: int, batches: int, window: int) -> int:
    """Micro-batches in the accumulation window of micro-batch `index`; the last may be short."""
    return min(window, batches - index // window * window)


@experiment(
    claim="`accumulate` divides by its window's length even where an epoch's last window is shorter",
    wrong="accumulate(4) over 10 batches: windows of 4, 4 and 2",
    right="scale the losses of the short window by 4/2",
    measured="last gradient over the mean of its micro-batches': {plain:.2f} as it is, {scaled:.2f} scaled",
    holds=lambda m: abs(m.plain - 0.5) < 1e-4 and abs(m.scaled - 1) < 1e-4,
)
def short_last_window(accelerator: Accelerator, seed: int):
    rows = TensorDataset(*make_rows(seed, 10 * 4 * accelerator.num_processes))
    window = 4
    for way in ("plain", "scaled"):
        accumulating = Accelerator(cpu=True, gradient_accumulation_steps=window)
        loader = accumulating.prepare_data_loader(DataLoader(rows, batch_size=4))
        model, by_hand = accumulating.prepare_model(make_model(seed)), make_model(seed)
        for i, (inputs, targets) in enumerate(loader):
            if i % window == 0:
                model.zero_grad()
                by_hand.zero_grad()
            length = window_length(i, len(loader), window)
            with accumulating.accumulate(model):
                accumulating.backward(mse(model, inputs, targets) * (window / length if way == "scaled" else 1))
            mse(by_hand, inputs, targets).backward()
        expected = torch.as_tensor(accumulating.reduce(gradient(by_hand), reduction="mean"))
        yield {way: (gradient(model).norm() / (expected / 2).norm()).item()}  # of the last two micro-batches


@experiment(
    claim="`accumulate` takes a step at the end of the loader, whole window or not",
    wrong="reckon with epochs * batches // 4 steps",
    right="epochs * ceil(batches / 4), or sync_with_dataloader=False, which lets a window go on in the next epoch",
    measured="2 epochs of 10 batches, accumulate(4): {steps:.0f} optimizer steps where {reckoned:.0f} were reckoned; "
    "{rounded:.0f} rounded up per epoch, {carried:.0f} with windows that go on",
    holds=lambda m: m.steps == m.rounded > m.reckoned == m.carried,
)
def end_of_loader(accelerator: Accelerator, seed: int):
    epochs, batches, window = 2, 10, 4  # 20 batches are whole windows, so that nothing is left over at the end
    rows = TensorDataset(*make_rows(seed, batches * 4 * accelerator.num_processes))
    yield {"reckoned": epochs * batches // window, "rounded": epochs * ceil(batches / window)}
    for way, sync_at_end in (("steps", True), ("carried", False)):
        plugin = GradientAccumulationPlugin(num_steps=window, sync_with_dataloader=sync_at_end)
        accumulating = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        loader = accumulating.prepare_data_loader(DataLoader(rows, batch_size=4))
        model, steps = accumulating.prepare_model(make_model(seed)), 0
        for _ in range(epochs):
            for inputs, targets in loader:
                with accumulating.accumulate(model):
                    accumulating.backward(mse(model, inputs, targets))
                steps += accumulating.sync_gradients
        yield {way: steps}


@experiment(
    claim="A scheduler prepared by Accelerate advances once per process and step",
    wrong="accelerator.prepare(scheduler), made for 20 optimizer steps",
    right="step a scheduler of your own once per optimizer step",
    measured="learning rate after 10 of 20 steps of a linear decay from 1 to 0: {prepared:.2f} prepared, {own:.2f} own",
    holds=lambda m: abs(m.own - 0.5) < 1e-6 and abs(m.prepared) < 1e-6,
)
def scheduler_steps(accelerator: Accelerator, seed: int):
    preparing = Accelerator(cpu=True)  # Accelerate's own defaults
    for way in ("prepared", "own"):
        plain = SGD(make_model(seed).parameters(), lr=1.0)
        scheduler = LinearLR(plain, start_factor=1.0, end_factor=0.0, total_iters=20)
        optimizer = preparing.prepare_optimizer(plain)
        stepped = preparing.prepare_scheduler(scheduler) if way == "prepared" else scheduler
        for _ in range(10):
            optimizer.step()
            stepped.step()
        yield {way: plain.param_groups[0]["lr"]}


@experiment(
    claim="Spreading a batch over ranks changes nothing that the learning rate has to follow: gradients are averaged",
    wrong="multiply the learning rate by the number of processes, the global batch being the same",
    right="the same learning rate (a larger global batch is another question)",
    measured="loss after 30 steps: {one:.3f} on one process, {same:.3f} on two, {multiplied:.2e} with twice the rate",
    holds=lambda m: abs(m.same / m.one - 1) < 1e-3 and m.multiplied > 10 * m.one,
)
def multiplied_learning_rate(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)
    # 1.2 / curvature: gradient descent on a quadratic converges below 2 / curvature and diverges above (1.2 x 2)
    curvature = torch.linalg.eigvalsh(2 * rows[0].T @ rows[0] / len(rows[0]))[-1].item()
    for way, times in (("one", 1), ("same", 1), ("multiplied", accelerator.num_processes)):
        torch.manual_seed(seed)
        model = nn.Linear(8, 1, bias=False)
        if way == "one":
            train(model, rows, steps=30, lr=1.2 / curvature)
        else:
            train(DDP(model), share(rows, accelerator), steps=30, lr=1.2 * times / curvature)
        yield {way: mse(model, *rows).item()}
