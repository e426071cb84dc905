"""Measurements in rows: units per second, MFU and memory; and what a run records of its machine."""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import os
import platform
import re
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, cast

import accelerate
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.project import VERSION
from gpt2_ddp.state import Setup
from gpt2_ddp.training.gpus import peak_flops
from gpt2_ddp.training.task import Task


class Mark(NamedTuple):
    """A moment of the training.

    Attributes:
        time: of `time.perf_counter`.
        consumed: items of the steps until then.
        waited: seconds that these steps waited for data.
    """

    time: float
    consumed: int
    waited: float


MARKS = 3
"""Steps whose marks are kept: more than a late row needs."""


class Throughput:
    """Units (tokens, samples) per second of training, without pauses. All ranks must create it
    together."""

    def __init__(self, task: Task[RunConfig], device: torch.device):
        self.task = task
        self.device = device
        self.peak = peak_of_ranks(device)
        self.restart()

    def restart(self) -> None:
        """Starts a new measurement."""
        self._begin = self._now()
        self._queued: Mark | None = None  # of the newest step, which may wait for the device
        self._completed: dict[int, Mark] = {}  # by step

    def _now(self) -> Mark:
        feed = self.task.feed
        return Mark(time.perf_counter(), feed.state.consumed, feed.waited)

    def follow(self, step: int) -> None:
        """Notes, for a late row, that a step is in the device's queue, and the one before is
        complete."""
        now = self._now()
        if self._queued:
            self._completed[step - 1] = self._queued._replace(time=now.time)
        self._completed.pop(step - 1 - MARKS, None)
        self._queued = now

    def read(self, step: int | None = None) -> dict[str, float | None]:
        """A row's speed since the row before: units per second, MFU (None if a device's peak is
        unknown), and the share of time spent waiting for data. Also this process's memory in bytes.
        Up to now, when the device must be idle; or up to the end of a step that was followed by
        others."""
        end = self._now() if step is None else self._completed.get(step) or self._now()
        begin = self._begin
        seconds = end.time - begin.time
        waited = end.waited - begin.waited
        speed = (end.consumed - begin.consumed) * self.task.units_per_item / seconds
        self._begin = end
        fields: dict[str, float | None] = {f"{self.task.unit}_per_second": round(speed, 1)}
        if self.task.flops_per_unit:
            fields["mfu"] = speed * self.task.flops_per_unit / self.peak if self.peak else None
        fields["data_share"] = round(waited / seconds, 4)
        if self.device.type == "cuda":
            fields["memory"] = torch.cuda.memory_reserved(self.device)
        else:
            fields["memory"] = psutil.Process().memory_info().rss
        return fields

    @contextmanager
    def paused(self) -> Generator[None]:
        """Excludes the time of the `with` block."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps still in the queue belong to the training
        start = time.perf_counter()
        begin = self._begin
        yield
        if self._begin is not begin:  # a rollback starts a new measurement
            return
        pause = time.perf_counter() - start
        self._begin = begin._replace(time=begin.time + pause)
        for step, mark in self._completed.items():
            self._completed[step] = mark._replace(time=mark.time + pause)


def device_name(device: torch.device) -> str:
    """The GPU's exact name, or cpu or mps, as runs record it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def has_same_devices(before: Setup, accelerator: Accelerator) -> bool:
    """Whether these are as many devices of the same kind as a saved run had."""
    is_same_kind = before.device == device_name(accelerator.device)
    return is_same_kind and before.processes == accelerator.num_processes


def describe_hardware() -> str:
    """Processor, cores and memory of this machine."""
    cores = f"{os.cpu_count()} cores"
    with suppress(OSError):
        processors = Path("/proc/cpuinfo").read_text()
        name = re.search(r"^model name\s*: (.*)", processors, re.MULTILINE)
        if name:
            memory = psutil.virtual_memory().total / 2**30
            return f"{name[1]}, {cores}, {memory:.0f} GiB"
    return f"{platform.machine()}, {cores}"


def versions() -> dict[str, str]:
    """Versions of the software; torch's names its build, too."""
    return {
        "gpt2_ddp": VERSION,
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "python": platform.python_version(),
    }


def peak_of_ranks(device: torch.device) -> float | None:
    """FLOP/s of all ranks' devices together; None if one is unknown. Collective."""
    peak = None
    if device.type == "cuda":
        peak = peak_flops(device_name(device))
    peaks = cast(list[float | None], gather_object([peak]))
    known = [peak for peak in peaks if peak is not None]
    return sum(known) if len(known) == len(peaks) else None
