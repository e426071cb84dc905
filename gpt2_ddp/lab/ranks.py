"""Experiments on what one rank does alone, and what all of them do alike."""

import io
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gpt2_ddp.lab.experiment import brief_group, experiment, gradient, largest, make_model, make_rows, mse, share, union

TIMEOUT = 1.0
"""Seconds, in place of the 30 minutes after which gloo gives up by default."""


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
        m.all == 3
        and abs(m.all_mean / m.true_mean - 1) < 1e-5
        and m.all_rows == 32
        and m.alone == 1
        and m.alone_mean != m.all_mean
        and m.alone_rows != 32
        and m.waited > 0.8 * m.timeout
    ),
)
def collective_on_one_rank(accelerator: Accelerator, seed: int):
    rows = make_rows(seed, 32)
    model = make_model(seed)
    loss = mse(model, *(share(part, accelerator) for part in rows)).item()
    found = {"timeout": TIMEOUT, "true_mean": mse(model, *rows).item(), "waited": 0.0, "error": "no error"}
    for way, logs in (("alone", accelerator.is_main_process), ("all", True)):
        group, logged, counted, start = brief_group(TIMEOUT), [], [], time.perf_counter()
        try:
            for _ in range(3):
                counted.append(sum_over_ranks(len(rows[0]) / accelerator.num_processes, group))
                if logs:
                    logged.append(sum_over_ranks(loss, group) / accelerator.num_processes)
        except RuntimeError as error:
            found |= {"waited": time.perf_counter() - start, "error": str(error).partition("] ")[2]}
        rank_1s = union(counted[1:2])[-1]
        found |= {way: len(logged), f"{way}_mean": logged[0] if logged else 0.0, f"{way}_rows": rank_1s}
    return found


@experiment(
    claim="The ranks' validation losses differ, so each would stop early at an epoch of its own",
    wrong="if loss > best: break, by each rank's own loss",
    right="decide by the mean over ranks, which is the same on all",
    measured="by its own loss rank {own} stops, after {own_epochs:.0f} epochs, and the other waits {own_waited:.1f} s "
    "until the timeout of {timeout:.0f} s; by the mean {mean} stop, after {mean_epochs:.0f}",
    holds=lambda m: (
        m.own in ("0", "1")
        and m.own_waited > 0.8 * m.timeout
        and m.mean == "0 and 1"
        and m.mean_waited == 0
        and m.mean_epochs < 50
    ),
)
def early_stopping(accelerator: Accelerator, seed: int):
    training = [share(rows, accelerator) for rows in make_rows(seed, 16)]
    validation = [share(rows, accelerator) for rows in make_rows(seed + 1, 32)]
    found: dict[str, float | str] = {"timeout": TIMEOUT}
    for way in ("own", "mean"):
        group = brief_group(TIMEOUT)
        model = DDP(make_model(seed), process_group=group)
        best, epochs, stopped, waited = float("inf"), 0, [], 0.0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(50):
            optimizer.zero_grad()
            start = time.perf_counter()
            try:
                mse(model, *training).backward()
            except RuntimeError:
                waited = time.perf_counter() - start
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
        found |= {way: " and ".join(union(stopped)), f"{way}_epochs": largest(epochs), f"{way}_waited": largest(waited)}
    return found


@experiment(
    claim="With one seed on all ranks, dropout drops the same places on each, and less of its noise averages out",
    wrong="set_seed(seed)",
    right="set_seed(seed, device_specific=True), which adds the rank (augmentation alike; not the sampler's shuffle)",
    measured="places where both ranks' masks agree: {same_masks:.0%} with one seed, {own_masks:.0%} with their own; "
    "variance of the averaged gradient {same:.3f} and {own:.3f}, {ratio:.2f} times as much",
    holds=lambda m: m.same_masks == 1 and m.own_masks < 0.6 and m.ratio > 1.1,
)
def dropout_seed(accelerator: Accelerator, seed: int):
    inputs, targets = (share(rows, accelerator) for rows in make_rows(seed, 32))
    found = {}
    for way, device_specific in (("same", False), ("own", True)):
        first, activation, last = make_model(seed)
        model = DDP(nn.Sequential(first, activation, nn.Dropout(), last))
        set_seed(seed, device_specific=device_specific)
        mask = union(nn.functional.dropout(torch.ones(1000)).bool().tolist())
        gradients = []
        for _ in range(200):
            model.zero_grad()
            mse(model, inputs, targets).backward()
            gradients.append(gradient(model))
        agreeing = sum(map(bool.__eq__, mask[:1000], mask[1000:])) / 1000
        found |= {way: torch.stack(gradients).var(0).sum().item(), f"{way}_masks": agreeing}
    return {**found, "ratio": found["same"] / found["own"]}


@contextmanager
def half_saved(path: Path, data: bytes) -> Generator[None, None, None]:
    """A save, inside of which half of the file is written."""
    with path.open("wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        yield
        file.write(data[len(data) // 2 :])


@experiment(
    claim="Where every rank saves to the same file, one truncates what another has finished and goes on to read",
    wrong="torch.save(state, path) on every rank",
    right="if accelerator.is_main_process: save; then accelerator.wait_for_everyone()",
    measured="saved by {every:.0f} ranks, and read by rank 0 while rank 1 still writes: {every_read:.0f} of 4 tensors, "
    "`{error}`; saved by {one:.0f}: {one_read:.0f} of 4",
    holds=lambda m: m.every == 2 and m.every_read == 0 and m.one == 1 and m.one_read == 4,
)
def every_rank_saves(accelerator: Accelerator, seed: int):
    state = io.BytesIO()
    torch.save(make_model(seed).state_dict(), state)
    data, found = state.getvalue(), {"error": "no error"}
    with TemporaryDirectory(prefix="ddp_lab") as own:
        folder = Path(union([own])[0])
        for way, saves in (("every", True), ("one", accelerator.is_main_process)):
            path, read = folder / way, 0
            if saves and accelerator.process_index == 0:
                path.write_bytes(data)
            accelerator.wait_for_everyone()
            with half_saved(path, data) if saves and accelerator.process_index == 1 else nullcontext():
                accelerator.wait_for_everyone()
                if accelerator.process_index == 0:
                    try:
                        read = len(torch.load(path))
                    except RuntimeError as error:
                        found["error"] = str(error).partition(". ")[0]
                accelerator.wait_for_everyone()
            found |= {way: sum(union([saves])), f"{way}_read": read}
    return found


@experiment(
    claim="Ranks that start together all find a cache empty, and each fills it",
    wrong="if not path.exists(): download(path)",
    right="the same, inside `with accelerator.main_process_first():`",
    measured="downloads of one file: {together:.0f} by ranks that look at once, {main_first:.0f} main process first",
    holds=lambda m: m.together == 2 and m.main_first == 1,
)
def every_rank_downloads(accelerator: Accelerator, seed: int):
    found = {}
    with TemporaryDirectory(prefix="ddp_lab") as own:
        folder = Path(union([own])[0])
        for way, turns in (("together", nullcontext()), ("main_first", accelerator.main_process_first())):
            path = folder / way
            with turns:
                downloads = not path.exists()
                if way == "together":
                    accelerator.wait_for_everyone()  # a download takes longer than the other rank takes to look
                if downloads:
                    path.touch()
            found[way] = sum(union([downloads]))
    return found
