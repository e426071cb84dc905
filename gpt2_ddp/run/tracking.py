"""Where the numbers go: metrics.jsonl, a tracker, the terminal. And what they are: tokens per second, MFU."""

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from netrc import NetrcParseError, netrc
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from tqdm import tqdm

from gpt2_ddp.config.training import RunConfig
from gpt2_ddp.run.folder import METRICS, SAMPLES, RunFolder, finite
from gpt2_ddp.run.task import Poll, Task

T = TypeVar("T")

PEAK_FLOPS = {  # dense bf16 FLOP/s, from NVIDIA's data sheets; the first name that the device's contains counts
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A40": 150e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}

SHOWN = {  # in the terminal, besides the step
    "loss": ".4f",
    "val_loss": ".4f",
    "val_accuracy": ".2%",
    "tokens_per_second": ",.0f",
    "samples_per_second": ",.0f",
    "mfu": ".1%",
}


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of one device; None where it is not known (CPUs, other GPUs), and MFU is then not given."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)


class Throughput:
    """Units (tokens, samples) per second of the training alone; evaluations, checkpoints and samples happen while it is
    paused."""

    def __init__(self, task: Task, accelerator: Accelerator):
        self.task = task
        self.device = accelerator.device
        self.peak = (peak_flops(self.device) or 0.0) * accelerator.num_processes
        self.restart()

    def restart(self) -> None:
        """Begins a new reading now."""
        self._start, self._units, self._waited = time.perf_counter(), 0, self.task.feed.waited

    def add(self, units: int) -> None:
        """Counts the units of a step."""
        self._units += units

    def read(self) -> dict[str, float | None]:
        """What a row says of the steps since the last reading: units per second, MFU (None where the device's peak is
        not known), the share of the time spent waiting for data. Call it once the device's work has been awaited."""
        units, waited = self._units, self.task.feed.waited - self._waited
        seconds = time.perf_counter() - self._start
        self.restart()
        mfu = units / seconds * self.task.flops_per_unit / self.peak if self.peak else None
        return {
            f"{self.task.unit}_per_second": round(units / seconds, 1),
            **({"mfu": mfu} if self.task.flops_per_unit else {}),
            "data_share": round(waited / seconds, 4),
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what happens inside."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # steps still in the queue belong to the training
        start = time.perf_counter()
        yield
        self._start += time.perf_counter() - start


class Metrics:
    """On the main process: writes rows to metrics.jsonl and the tracker, and shows them. On the others: nothing.

    A terminal gets a progress bar, a log file a line for each row.
    """

    def __init__(self, accelerator: Accelerator, run: RunFolder | None, step: int, steps: int):
        self.accelerator = accelerator
        self.run = run
        self.step, self.steps = step, steps
        self._tracked = -1  # the last step that the tracker has
        self._failed: set[str] = set()
        self._bar = tqdm(
            total=steps, initial=step, unit="step", dynamic_ncols=True, disable=run is None or not sys.stderr.isatty()
        )

    def log(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null, as JSON has none."""
        if self.run is None:
            return
        row = finite(row)
        self.run.append(METRICS, row)
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
        if row["step"] > self._tracked:  # trackers cannot go back
            self._tracked = row["step"]
            self._attempt("tracker", lambda: self.accelerator.log(numbers, step=row["step"]))
        shown = {name: f"{row[name]:{layout}}" for name, layout in SHOWN.items() if row.get(name) is not None}
        if self._bar.disable or "val_loss" in shown:
            fields = "  ".join(f"{name} {value}" for name, value in shown.items())
            self.say(f"step {row['step']:>6}/{self.steps}  {fields}")
        self._bar.set_postfix(shown, refresh=False)

    def advance(self) -> None:
        """Counts a step on the progress bar."""
        self._bar.update()

    def say(self, text: str) -> None:
        """Prints on the main process, above the bar."""
        if self.run is not None:
            with suppress(OSError):  # a log file on a full disk is not worth the run
                tqdm.write(text, file=sys.stderr)

    def go_back(self, event: dict[str, Any]) -> None:
        """Records that the run goes on behind the step that a rollback names."""
        if self.run is not None:
            for name in (METRICS, SAMPLES):
                if (self.run.path / name).exists():
                    self.run.append(name, event)
        self._bar.update(event["step"] - self._bar.n)

    def sample(self, task: Task, poll: Poll) -> str | None:
        """What the task writes, if it writes; None where it fails at that."""
        return self._attempt("sample", lambda: task.sample(poll))

    def show_sample(self, step: int, text: str | None) -> None:
        """Prints and keeps a sample of this step, if there is one."""
        if self.run is not None and text is not None:
            self.run.append(SAMPLES, {"step": step, "text": text})
            self.say(f"--- sample at step {step} ---\n{text}\n---")

    def start_tracker(self, config: RunConfig, run_id: str) -> None:
        """Starts the tracker that the Accelerator was built with; the same run_id goes on with the same wandb run.

        wandb logs offline, into the run folder, when nobody is logged in and WANDB_MODE does not say otherwise.
        """
        settings: dict[str, Any] = {}
        if config.tracking.log_with == "wandb" and self.run is not None:
            mode = os.environ.get("WANDB_MODE") or ("online" if _wandb_login() else "offline")
            folder = str(self.run.path)
            settings = {"id": run_id, "name": config.run_name, "resume": "allow", "dir": folder, "mode": mode}
        elif config.tracking.log_with == "trackio":
            settings = {"name": config.run_name, "resume": "allow"}
        elif config.tracking.log_with == "tensorboard":  # hides what is trained again, or it would stand there twice
            settings = {"purge_step": self.step + 1 if self.step else 0}
        flat = {
            f"{section}.{name}": value if isinstance(value, int | float | bool | str) else str(value)
            for section, values in config.model_dump(mode="json").items()
            if isinstance(values, dict)
            for name, value in values.items()
        }
        start = partial(self.accelerator.init_trackers, config.tracking.project, flat)
        self._attempt("tracker", lambda: start({config.tracking.log_with: settings}))

    def end_tracker(self) -> None:
        """Has the tracker write what it still holds; Accelerate's own end does not come upon it again."""
        trackers, self.accelerator.trackers = self.accelerator.trackers, []
        for tracker in trackers:
            self._attempt("tracker", tracker.finish)

    def _attempt(self, what: str, action: Callable[[], T]) -> T | None:
        """Calls what a training can do without. If it raises, that is one warning."""
        try:
            return action()
        except Exception as error:  # whatever other people's code may raise: no curve and no sample is worth the run
            if what not in self._failed:
                self._failed.add(what)
                said = " ".join(f"{type(error).__name__}: {error}".split())
                self.say(f"warning: the {what} failed ({said}); the training goes on without it")
            return None

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.close()


@contextmanager
def profile(steps: int, run: RunFolder | None) -> Iterator[Callable[[], None]]:
    """Records `steps` steps, after three of warm-up, into the run folder's trace.json (chrome://tracing, Perfetto).

    Yields a function to call after each step; it does nothing for 0 steps and on ranks other than the main process.
    """
    if not steps or run is None:
        yield lambda: None
        return
    trace = run.path / "trace.json"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=3, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    ) as profiler:
        yield profiler.step


def new_run_id() -> str:
    """An id for a tracker's run."""
    return uuid.uuid4().hex[:8]


def _wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators("api.wandb.ai") is not None
    except (OSError, NetrcParseError):
        return False
