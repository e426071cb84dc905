"""Measurements in rows (mean loss, units per second, MFU), and a profiler trace."""

import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import accelerate
import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from gpt2_ddp.checkpoint.run_folder import RunLog
from gpt2_ddp.distributed.ranks import is_main, sum_over_ranks
from gpt2_ddp.project import VERSION
from gpt2_ddp.state import Losses, Sums
from gpt2_ddp.training.task import Task


class LossSum:
    """Sum of losses, and the number of their units (tokens, samples). Adding does not wait for the device. In fp64 the
    sum is exact below 2^29 times the smallest loss, so a resumed run gets the same bits."""

    def __init__(self, accelerator: Accelerator):
        self._accelerator, device = accelerator, accelerator.device
        exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
        self._loss = torch.zeros((), dtype=exact, device=device)
        self._valid = torch.zeros_like(self._loss)
        self._units = 0
        self._waiting: list[tuple[int, Tensor, Tensor | None]] = []

    def add(self, loss: Tensor, units: int, skipped: Tensor | None = None) -> None:
        """Adds a step's sum over this rank's units. It counts if it is finite and the scalar `skipped` is not 1."""
        self._waiting.append((units, loss, skipped))
        self._units += units
        if len(self._waiting) == 64:  # summed at once, they take as long as one
            self._sum_up()

    def _sum_up(self) -> None:
        for units in {units for units, _, _ in self._waiting}:  # a tensor of them would have to be sent to the device
            _, losses, skipped = zip(*(one for one in self._waiting if one[0] == units), strict=True)
            losses = torch.stack(losses)
            valid = losses.isfinite() & (True if skipped[0] is None else torch.stack(skipped) == 0)
            self._loss += torch.where(valid, losses, 0).sum(dtype=self._loss.dtype)
            self._valid += units * valid.sum()
        self._waiting.clear()

    def pop_mean(self) -> tuple[float, int]:
        """Mean loss of the valid units, NaN for none, and the number of other units; resets the sum. Collective."""
        loss, valid, units = self.state_dict()
        self.load_state_dict((0, 0, 0))
        return loss / valid if valid else math.nan, round(units - valid)

    def state_dict(self) -> Sums:
        """Sum, valid units and all units, over all ranks. Collective; waits for the device."""
        self._sum_up()
        own = torch.stack([self._loss, self._valid, torch.full_like(self._loss, self._units)])
        loss, valid, units = sum_over_ranks(self._accelerator, own).tolist()
        return loss, round(valid), round(units)

    def load_state_dict(self, state: Sums) -> None:
        """Loads what `state_dict` returned, on the main process; the other ranks start at 0."""
        loss, valid, units = state if is_main() else (0, 0, 0)
        self._loss.fill_(loss)
        self._valid.fill_(valid)
        self._units = int(units)
        self._waiting.clear()


class StepLosses:
    """Losses since the last `epoch` ended, without skipped steps, and `since_row`; number of `skipped` steps, fp32
    scalar on the device."""

    def __init__(self, accelerator: Accelerator):
        self.epoch, self.since_row = LossSum(accelerator), LossSum(accelerator)
        self.skipped = torch.zeros((), device=accelerator.device)

    def add(self, loss_sum: Tensor, units: int, skipped: Tensor) -> None:
        """Adds a step's sum over this rank's units. `skipped`: scalar, 1 if the step changed nothing, else 0."""
        self.skipped += skipped
        self.epoch.add(loss_sum, units, skipped)
        self.since_row.add(loss_sum, units)

    def state_dict(self) -> Losses:
        """The sums over all ranks. Collective; waits for the device."""
        epoch, since_row = self.epoch.state_dict(), self.since_row.state_dict()
        return Losses(epoch=epoch, since_row=since_row, skipped=round(self.skipped.item()))

    def load_state_dict(self, state: Losses) -> None:
        """Loads what `state_dict` returned."""
        self.epoch.load_state_dict(state.epoch)
        self.since_row.load_state_dict(state.since_row)
        self.skipped.fill_(state.skipped)


class Throughput:
    """Units (tokens, samples) per second of training, without pauses. All ranks must create it together.
    `peak_flops` is of one device (`tracking.peak_flops`); None: the value of its data sheet."""

    def __init__(self, task: Task, device: torch.device, peak_flops: float | None = None):
        self.task, self.device = task, device
        self.peak = peak_of_ranks(device, peak_flops)
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


def peak_of_ranks(device: torch.device, own: float | None = None) -> float | None:
    """FLOP/s of all ranks' devices together; None if one is unknown. Collective."""
    peak = own
    if device.type == "cuda" and not own:
        from gpt2_ddp.training.peaks import peak_flops

        peak = peak_flops(device_name(device))
    found = gather_object([peak])
    return None if None in found else sum(found)


@contextmanager
def profile(steps: int, log: RunLog) -> Iterator[Callable[[], None]]:
    """Records `steps` steps, after three of warm-up, into the run folder's trace.json (chrome://tracing, Perfetto), on
    the main process. Yields a function to call after each step."""
    if not (steps and log.is_main):
        yield lambda: None
        return
    schedule = torch.profiler.schedule(wait=0, warmup=3, active=steps, repeat=1)
    save = lambda profiler: profiler.export_chrome_trace(str(log.path / "trace.json"))  # noqa: E731
    with torch.profiler.profile(schedule=schedule, on_trace_ready=save) as profiler:
        yield profiler.step
