"""What is measured here: the memory of a process without its model, and steps of the real loop."""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpt2_ddp.checkpoint.run_files import METRICS, read_lines
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.distributed.environment import is_main_process
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.plan.cost import Rate
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_loop
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.task import Due

STEPS, READING = 25, 5
"""Steps that are trained; steps of which each row gives the rate, and the first row's are warm-up."""
REPEATED = {"evaluate": 2, "save": 2, "sample": 1}
"""How often each is done in the steps that are measured."""


def base_memory(config: TrainingConfig) -> float:
    """Bytes of this process with all that a step loads, but without the model. Collective.

    A step of a tiny model is trained first, since the first step loads libraries and makes kernels.
    """
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


@dataclass(frozen=True)
class Measured:
    """The rate of the steps, None on other ranks than the main process; and this process's peak memory in bytes."""

    rate: Rate | None
    memory: float


class _Timed(Run):
    """A run that records the seconds of its last evaluation, save and sample."""

    def __init__(self, *args: Any):
        self.seconds = dict.fromkeys(REPEATED, 0.0)
        super().__init__(*args)
        for name in REPEATED:
            setattr(self, name, self._timed(name, getattr(self, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begun = time.perf_counter()
            result = function(*args, **options)
            self.seconds[name] = time.perf_counter() - begun
            return result

        return timed


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


def measure(config: TrainingConfig, loaded: float) -> Measured:
    """Trains some steps as the training would, in a temporary folder; the rate is the median of its rows. Collective.

    Args:
        loaded: seconds from this process's beginning until its libraries were loaded.

    Raises:
        UserError: as training does.
    """
    values: dict[str, Any] = config.model_dump(mode="json")
    values["train"] |= {"init_from": None, "branch_from": None, "max_minutes": None, "profile_steps": 0}
    values["tracking"] |= {"log_with": []}
    values["eval"] |= {"patience": None}
    with TemporaryDirectory(prefix="plan-") as folder, redirect_stdout(sys.stderr):
        if is_main_process():
            print(f"{STEPS} steps are trained for the time that they take", file=sys.stderr)
        begun = time.perf_counter()
        own = TrainingConfig.model_validate(values | {"output_dir": folder, "run_name": "measured"})
        run = _Timed(own, _Short)
        with run:
            run.build()
            start = loaded + time.perf_counter() - begun
            run.start()
            first = time.perf_counter()
            train_loop(run)
            whole = time.perf_counter() - first
            run.finish("completed")
            from gpt2_ddp.compare.run import peak_memory  # here, as a training does not load it

            device = run.accelerator.device
            memory = float(torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory(device))
        if run.folder is None:
            return Measured(None, memory)
        from gpt2_ddp.reports.report import write_report  # matplotlib and all: after the peak was taken

        rows = [line.row or {} for line in read_lines(run.folder.path / METRICS)]
        rate = median([row["tokens_per_second"] for row in rows if row.get("tokens_per_second")][1:])
        begun = time.perf_counter()  # train_gpt2.py ends with a report
        write_report([run.folder.path], run.folder.path)
        end = time.perf_counter() - begun
    # what the first steps, the first evaluation and the first save take longer than others belongs to the start
    usual = STEPS * config.train.global_batch_tokens / rate
    usual += sum(seconds * REPEATED[what] for what, seconds in run.seconds.items())
    start += max(whole - usual, 0.0)
    return Measured(Rate(rate, "measured here", *run.seconds.values(), start=start, end=end), memory)
