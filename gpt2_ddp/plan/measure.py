"""Measurements with the training's own code: its user errors, a process's memory, and the time of its steps."""

import gc
import sys
import time
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.checkpoint.run_files import METRICS, read_lines
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.distributed.environment import is_main_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.preparation.sources import scan
from gpt2_ddp.tasks.pretraining import Pretraining, missing_data
from gpt2_ddp.training.loop import train_loop
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.task import Due

STEPS, READING = 25, 5  # trained steps; steps per row, of which each row has the rate. The first row is warm-up
REPEATED = {"evaluate": 2, "save": 2, "sample": 1}  # number of each kind of work in the measured steps
START = 60.0  # seconds assumed from the command to the first step


@dataclass(frozen=True)
class Rate:
    """Speed of a training, and seconds of an evaluation, a save and a sample."""

    tokens_per_second: float  # of the steps, over all processes
    source: str  # given, measured, or by the MFU
    evaluation: float
    save: float
    sample: float = 0.0
    start: float = START  # seconds before the first step
    end: float = 0.0  # seconds after the last step


@dataclass
class Seen:
    """Results of a dry run."""

    mistakes: list[str] = field(default_factory=list)  # user errors, as the lines printed after `error:`
    state: dict[str, Any] = field(default_factory=dict)  # of the checkpoint to resume from; empty for a fresh run
    task: Pretraining | None = None  # with its data open; None where they could not be opened
    step: int = 0  # of the checkpoint
    base: float | None = None  # bytes of a process without its model (`base_memory`)
    rate: Rate | None = None  # measured by its steps (`measure`)
    memory: float | None = None  # the same: bytes of a process


def preflight(config: TrainingConfig, processes: int) -> Seen:
    """Does the work of a training up to its first step (`training.loop.train`, `Run.build`), with the same user errors.
    `processes` are the planned training's; this one is alone, or has as many."""
    seen = Seen()

    def make_task(config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Pretraining:
        seen.state = saved.state if saved else {}
        split_batch(config.global_batch_windows, processes, 1)
        return Pretraining(config, accelerator, saved)

    with redirect_stdout(sys.stderr):
        try:
            with Run(config, make_task, lock=False) as run:
                seen.step = run.step
                if not (file := missing_data(config)):
                    _look_at(run, seen)
                elif not (recipe := load(PrepareConfig, ["--config", file])).source.startswith("bin:"):
                    scan(recipe)
        except UserError as error:
            seen.mistakes = error.mistakes
            if seen.task is None:
                with suppress(UserError):  # otherwise the error is in the data
                    task = Pretraining(config, Accelerator(cpu=not torch.cuda.is_available()), None)
                    task.open_data()
                    seen.task = task  # for the figures of its data
    return seen


def _look_at(run: Run, seen: Seen) -> None:
    task = run.task
    assert isinstance(task, Pretraining)
    task.open_data()
    seen.task = task
    if not run.is_complete:
        task.load_tasks()
        with torch.device("cpu" if task.config.train.init_from else "meta"):  # a real training checks the weights
            task.build_model()
        task.check_hashes(record=False)
        run.newest()


def base_memory(config: TrainingConfig) -> float:
    """Bytes of this process with all that a step loads, but without the model. Collective. A step of a tiny model is
    trained first, since the first step loads libraries and makes kernels."""
    model = GPT(ModelConfig(n_layer=1, n_head=4, n_embd=128, block_size=128, dropout=config.model.dropout), 1024)
    optimizer = build_optimizer(model, config.optim)
    tokens = torch.zeros(4, 128, dtype=torch.int64)
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    wrapped(tokens, tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    del wrapped, model, optimizer
    gc.collect()
    return float(psutil.Process().memory_info().rss)


def _record_seconds(run: Run, name: str, seconds: dict[str, float]) -> None:
    """Records in `seconds` the duration of the last call of the run's method of this name."""
    work = getattr(run, name)

    def timed(*args: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = work(*args, **options)
        seconds[name] = time.perf_counter() - begun
        return result

    setattr(run, name, timed)


class _Short(Pretraining):
    """The training's first steps, under its own schedule; the run ends with them."""

    is_open = False

    def open_data(self) -> None:
        super().open_data()
        self.is_open = True

    def total_steps(self, epoch_size: int | None) -> int | None:
        return STEPS if self.is_open else super().total_steps(epoch_size)

    def due(self, step: int, last: bool) -> Due:
        """A row every READING steps; a checkpoint at the first of them and at the end, and there all else."""
        samples = self.config.tracking.sample_every > 0
        return Due(step % READING == 0, last and self.validates, last or step == READING, last and samples)


def measure(config: TrainingConfig, loaded: float) -> tuple[Rate | None, float]:
    """Trains some steps as the training would, in a temporary folder; the rate is the median of its rows. Collective.
    `loaded`: seconds from this process's beginning until its libraries were loaded. Returns the rate, on the main
    process, and this process's peak memory in bytes. Raises: UserError as training does."""
    seconds, values = dict.fromkeys(REPEATED, 0.0), config.model_dump(mode="json")
    values["train"] |= {"init_from": None, "branch_from": None, "max_minutes": None, "profile_steps": 0}
    values["tracking"] |= {"log_with": []}
    values["eval"] |= {"patience": None}
    with TemporaryDirectory(prefix="plan-") as folder, redirect_stdout(sys.stderr):
        if is_main_process():
            print(f"training {STEPS} steps to time them", file=sys.stderr)
        begun = time.perf_counter()
        own = TrainingConfig.model_validate(values | {"output_dir": folder, "run_name": "measured"})
        with Run(own, _Short) as run:
            for name in REPEATED:
                _record_seconds(run, name, seconds)
            run.build()
            start = loaded + time.perf_counter() - begun
            run.start()
            with suppress(OSError):  # proc(5): the peak is of these steps; elsewhere, of the process
                Path("/proc/self/clear_refs").write_text("5")
            first = time.perf_counter()
            train_loop(run)
            whole = time.perf_counter() - first
            run.finish("completed")
            from gpt2_ddp.compare.run import peak_memory  # here, as a training does not load it

            device = run.accelerator.device
            memory = float(torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device))
        if run.folder is None:
            return None, memory
        from gpt2_ddp.reports.report import write_report  # matplotlib and all: after the peak was taken

        rows = [line.row or {} for line in read_lines(run.folder.path / METRICS)]
        rate = median([row["tokens_per_second"] for row in rows if row.get("tokens_per_second")][1:])
        begun = time.perf_counter()  # train_gpt2.py ends with a report
        write_report([run.folder.path], run.folder.path)
        end = time.perf_counter() - begun
    # the extra time of the first steps, evaluation and save counts as start
    usual = STEPS * config.train.global_batch_tokens / rate
    usual += sum(seconds[name] * times for name, times in REPEATED.items())
    start += max(whole - usual, 0.0)
    return Rate(rate, "measured here", *seconds.values(), start=start, end=end), memory
