"""What a step does: a trace of some steps by torch's profiler, and snapshots of the GPU's memory.

    training.trace.around(step)   records the steps of tracking.profile_steps; writes after the last
    training.trace.write          what is recorded so far, if the training ends before
    save_memory                   after too little memory

Recording reads clocks and shapes. It draws no random numbers and changes no tensor.
"""

# torch's functions for the history of memory have an underscore, and are documented all the same
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile, record_function

from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, Watchdog
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import text_table
from gpt2_ddp.records.metrics import Metrics
from gpt2_ddp.training.throughput import Throughput

MOST_LISTED = 10  # operations in the table
MOST_ALLOCATIONS = 100_000
"""Allocations and frees that a snapshot of the memory has a history of, each with its stack: some
hundred megabytes of host memory at most (estimate)."""


class Trace:
    """The trace of `tracking.profile_steps`, once in a process. The main process records: all ranks
    have the same work, and its collectives show how long it waits for the others. On GPUs, each
    rank records the history of its memory meanwhile. All ranks call the methods at the same places.

    Args:
        steps: first and last step to record; none: all methods do nothing.
        folder: of the run, for the files.
    """

    def __init__(
        self, steps: Sequence[int], folder: Path, watchdog: Watchdog, metrics: Metrics
    ) -> None:
        self._range = range(steps[0], steps[1] + 1) if steps else range(0)
        self._folder = folder
        self._watchdog = watchdog
        self._metrics = metrics
        self._recorded: list[int] = []  # steps, of a recording that is not written
        self._profiler: profile | None = None

    def announce(self, next_step: int, last_step: int | None) -> None:
        """Prints a note if the training that begins has no step of the range, or not all of
        them."""
        if not self._range:
            return
        first = max(self._range[0], next_step)
        last = min(self._range[-1], last_step or self._range[-1])
        if (first, last) == (self._range[0], self._range[-1]):
            return
        here = f"steps {first} to {last} are recorded" if first <= last else "none is recorded"
        trained = f"from step {next_step} to {last_step or '?'}"
        named = f"tracking.profile_steps = {self._range[0]} {self._range[-1]}"
        self._metrics.print(f"note: {named}, and this training goes {trained}: {here}")

    @contextmanager
    def around(self, step: int, last_step: int | None, throughput: Throughput) -> Generator[None]:
        """Records a step if it is in the range, with the name that viewers of traces know. Writes
        the trace after the range or the run's last step, and after a rollback that leaves the
        range."""
        if step not in self._range:
            self.write(throughput)
            yield
            return
        if not self._recorded:
            self._begin(throughput)
        self._recorded.append(step)
        with record_function(f"ProfilerStep#{step}"):
            yield
        if step in (self._range[-1], last_step):
            self.write(throughput)

    def _begin(self, throughput: Throughput) -> None:
        device = throughput.device
        with throughput.paused():
            if device.type == "cuda":
                torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)
            if is_main_process():
                activities = [ProfilerActivity.CPU]
                if device.type == "cuda":
                    activities.append(ProfilerActivity.CUDA)
                self._profiler = profile(activities=activities, record_shapes=True)
                self._profiler.start()

    def write(self, throughput: Throughput) -> None:
        """Writes the recorded steps, if there are any, and ends the recording. The main process
        writes; the others wait for it. A failure is a warning."""
        if not self._recorded:
            return
        self._watchdog.heartbeat("trace", timeout=FIRST_TIMEOUT)
        is_cuda = throughput.device.type == "cuda"
        with throughput.paused():  # waits for the GPU
            on_main(lambda: self._metrics.attempt("trace", lambda: self._write(is_cuda)))
        self.discard()
        self._range = range(0)  # not again, after a rollback

    def _write(self, is_cuda: bool) -> None:
        assert self._profiler, "the main process records"
        self._profiler.stop()
        first = self._recorded[0]
        last = self._recorded[-1]
        file = self._folder / f"trace-{first}-{last}.json.gz"
        part = self._folder / f".{file.name}"  # the suffix has torch compress it
        try:
            self._profiler.export_chrome_trace(str(part))
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)
        table = file.with_name(f"trace-{first}-{last}.txt")
        kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
        operations = most_expensive(self._profiler.key_averages(), kind, len(self._recorded))
        write_atomically(table, f"{operations}\n")
        self._metrics.print(f"trace of steps {first} to {last}: {file} (open it in Perfetto)")
        self._metrics.print(f"their most expensive operations: {table}\n{operations}")
        if is_cuda:
            snapshot = file.with_name(f"memory-{first}-{last}.pickle")
            torch.cuda.memory._dump_snapshot(str(snapshot))
            self._metrics.print(f"memory of these steps: {snapshot} (open it in memory_viz)")

    def discard(self) -> None:
        """Ends the recording, if there is one; writes nothing. Not collective."""
        if self._recorded and torch.cuda.is_initialized():
            torch.cuda.memory._record_memory_history(None)
        if self._profiler:
            with suppress(AssertionError, RuntimeError):  # it has ended already
                self._profiler.stop()
        self._profiler = None
        self._recorded = []


class Average(Protocol):
    """Calls of an operation together, as of `torch.profiler.profile.key_averages`."""

    key: str
    count: int
    device_type: DeviceType
    is_user_annotation: bool
    self_cpu_time_total: float
    self_device_time_total: float


def most_expensive(averages: Iterable[Average], kind: DeviceType, steps: int) -> str:
    """The ten operations of a device that take most time in themselves, as a table: of CPUs torch's
    operators, of GPUs kernels and copies. Ranges that a program names are left out."""

    def microseconds(average: Average) -> float:
        is_cpu = kind == DeviceType.CPU
        return average.self_cpu_time_total if is_cpu else average.self_device_time_total

    operations = [
        average
        for average in averages
        if average.device_type == kind
        and not average.is_user_annotation
        and not average.key.startswith("ProfilerStep")
    ]
    operations.sort(key=microseconds, reverse=True)
    total = sum(map(microseconds, operations)) or 1.0
    rows = [
        (
            f"{microseconds(average) / total:.1%}",
            f"{microseconds(average) / 1000 / steps:,.3f}",
            f"{average.count / steps:,.1f}",
            average.key,
        )
        for average in operations[:MOST_LISTED]
    ]
    others = sum(map(microseconds, operations[MOST_LISTED:]))
    if others:
        names = f"{len(operations) - MOST_LISTED} others"
        rows.append((f"{others / total:.1%}", f"{others / 1000 / steps:,.3f}", "", names))
    return text_table([("share", "ms a step", "calls a step", "operation"), *rows])


def save_memory(folder: Path, rank: int) -> Path | None:
    """Writes a snapshot of this process's GPU memory to a run folder; with its history, if the
    failed step is recorded. Returns the file; None without a GPU, if this machine has no such
    folder, or if it cannot be written."""
    file = folder / f"out-of-memory-rank{rank}.pickle"
    if not torch.cuda.is_initialized() or not folder.is_dir():
        return None
    try:
        torch.cuda.memory._dump_snapshot(str(file))
    except (OSError, RuntimeError):  # a full disk, or memory again: the error itself matters more
        return None
    return file
