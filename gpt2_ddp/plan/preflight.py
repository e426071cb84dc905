"""What train_gpt2.py would refuse before its first step, found by its own code: here it changes nothing."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.sources import scan
from gpt2_ddp.tasks.pretraining import Pretraining, missing_data
from gpt2_ddp.training.run import Run


@dataclass
class Seen:
    """What a look at a training has shown.

    Args:
        mistakes: user errors of the training, as the lines that are printed behind `error:`.
        state: of the checkpoint that the run resumes from; empty for a fresh run.
        task: with its data open; None where they could not be opened.
        step: where the run stands.
        unprepared: the data are not there yet, and would be prepared first.
    """

    mistakes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    task: Pretraining | None = None
    step: int = 0
    unprepared: bool = False


def preflight(config: TrainingConfig, processes: int) -> Seen:
    """Does what a training does up to its first step (`training.loop.train`, `Run.build`), and ends at the same errors.

    Args:
        processes: of the planned training; this one is alone, or has as many.
    """
    seen = Seen()

    def make_task(config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Pretraining:
        seen.state = saved.state if saved else {}
        split_batch(config.global_batch_windows, processes, 1)
        return Pretraining(config, accelerator, saved)

    with redirect_stdout(sys.stderr):
        try:
            with Run(config, make_task, lock=False) as run:
                seen.step = run.step
                if file := missing_data(config):
                    seen.unprepared = True
                    recipe = load(PrepareConfig, ["--config", file])
                    if not recipe.source.startswith("bin:"):
                        scan(recipe)
                else:
                    _look_at(run, seen)
        except UserError as error:
            seen.mistakes = error.mistakes
        if seen.task is None and not seen.unprepared:
            seen.task = _data_alone(config)
    return seen


def _look_at(run: Run, seen: Seen) -> None:
    task = run.task
    assert isinstance(task, Pretraining)
    task.open_data()
    seen.task = task
    if not run.is_complete:
        task.load_tasks()
        with torch.device("cpu" if task.config.train.init_from else "meta"):  # weights are looked at in a real one
            task.build_model()
        task.check_hashes(record=False)
        run.newest()


def _data_alone(config: TrainingConfig) -> Pretraining | None:
    """The task of a run with another error, for the figures of its data; None where the error is in the data."""
    try:
        task = Pretraining(config, Accelerator(cpu=not torch.cuda.is_available()), None)
        task.open_data()
    except UserError:
        return None
    return task
