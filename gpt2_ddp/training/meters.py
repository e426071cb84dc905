"""Measurements in rows (losses, units per second, MFU), and a profiler trace."""

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import accelerate
import psutil
import torch
from accelerate.utils import gather_object
from torch import Tensor

from gpt2_ddp.distributed.ranks import start_sum
from gpt2_ddp.project import VERSION
from gpt2_ddp.state import LossSum
from gpt2_ddp.training.task import Task

Later = Callable[[], list[float]]
"""Waits for numbers, and returns them."""


class StepNumbers(NamedTuple):
    """Numbers of a step, over all ranks."""

    step: int
    bad: bool  # the gradient
    skipped: bool  # it changed nothing
    grad_norm: float  # before clipping
    losses: LossSum
    loss: float  # mean; NaN if a rank's part is not finite
    others: list[float]  # sums of further losses


class StepSums:
    """Numbers of each step, summed over all ranks two steps late. No step waits for its device or another rank: a
    step's numbers are read from the device after the next step, and their sum after the one behind it."""

    def __init__(self):
        self._copied: tuple[int, int, Later] | None = None  # step, units, numbers
        self._summed: Later | None = None

    def add(self, step: int, units: int, numbers: Sequence[Tensor]) -> list[StepNumbers]:
        """Takes this rank's fp32 scalars: whether the gradient is bad, 1 or 0; the same of a skipped step; the norm of
        the gradient; sums of losses over `units`. Returns those of a step before, if known."""
        known = self._advance()
        self._copied = step, units, copy_to_host(torch.stack([*numbers]))
        return known

    def flush(self) -> list[StepNumbers]:
        """Those of all steps that were not returned yet. Collective; waits for the device."""
        return self._advance() + self._advance()

    def _advance(self) -> list[StepNumbers]:
        known, before, self._summed = [], self._summed, None
        if self._copied:
            step, units, copied = self._copied
            bad, skipped, norm, loss, *others = copied()
            part = [loss, units] if math.isfinite(loss) else [0, 0]
            self._summed, self._copied = start_sum([1, step, bad, skipped, norm, *part, units, *others]), None
        if before:
            ranks, step, bad, skipped, norm, loss, valid, units, *others = before()
            mean = loss / units if valid == units else math.nan
            sums = LossSum(loss, round(valid), round(units))
            # what is equal on all ranks is divided without rounding
            known = [StepNumbers(round(step / ranks), bad > 0, skipped > 0, norm / ranks, sums, mean, others)]
        return known


def copy_to_host(values: Tensor) -> Later:
    """Starts a copy of a vector from its device. Returns a function that waits for it and returns the numbers."""
    if values.device.type != "cuda":
        return values.tolist
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return wait


class Throughput:
    """Units (tokens, samples) per second of training, without pauses. All ranks must create it together."""

    def __init__(self, task: Task, device: torch.device):
        self.task, self.device = task, device
        self.peak = peak_of_ranks(device)
        self.restart()

    def restart(self) -> None:
        """Starts a new measurement."""
        self._start, self._units, self._waited = time.perf_counter(), 0, self.task.feed.waited

    def add(self, units: int) -> None:
        """Counts the units of a step."""
        self._units += units

    def read(self) -> dict[str, float | None]:
        """A row's speed since the last call: units per second, MFU (None if a device's peak is unknown), and the share
        of time spent waiting for data. Also this process's memory in bytes. The device must be idle."""
        seconds, waited = time.perf_counter() - self._start, self.task.feed.waited - self._waited
        speed = self._units / seconds
        self.restart()
        gpu, mfu = self.device.type == "cuda", speed * self.task.flops_per_unit / self.peak if self.peak else None
        return {
            f"{self.task.unit}_per_second": round(speed, 1),
            **({"mfu": mfu} if self.task.flops_per_unit else {}),
            "data_share": round(waited / seconds, 4),
            "memory": torch.cuda.memory_reserved(self.device) if gpu else psutil.Process().memory_info().rss,
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the `with` block."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps still in the queue belong to the training
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start


def device_name(device: torch.device) -> str:
    """The GPU's exact name, or cpu or mps, as runs record it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_hardware() -> str:
    """Processor, cores and memory of this machine."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return f"{found[1]}, {os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    return f"{platform.machine()}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    """Versions of the software; torch's names its build, too."""
    found = {"gpt2_ddp": VERSION, "torch": torch.__version__, "accelerate": accelerate.__version__}
    return found | {"python": platform.python_version()}


def peak_of_ranks(device: torch.device) -> float | None:
    """FLOP/s of all ranks' devices together; None if one is unknown. Collective."""
    peak = None
    if device.type == "cuda":
        from gpt2_ddp.training.peaks import peak_flops

        peak = peak_flops(device_name(device))
    found = gather_object([peak])
    return None if None in found else sum(found)
