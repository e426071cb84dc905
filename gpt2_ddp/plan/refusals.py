"""What train_gpt2.py would refuse before its first step, found by its own code: here it changes nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
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
from gpt2_ddp.tasks.corpus import missing_data
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.run import Run


@dataclass
class Seen:
    """What a look at a training has shown.

    Args:
        mistakes: what would be refused, as the lines that are printed behind `error:`.
        state: of the checkpoint that the run goes on from; empty for a fresh one.
        task: with its data open, where they could be; None where nothing could.
        step: where the run stands. complete: whether nothing is left to do.
        unprepared: the data are not there yet, and would be prepared first.
    """

    mistakes: list[str] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    task: Pretraining | None = None
    step: int = 0
    complete: bool = False
    unprepared: bool = False


def preflight(config: TrainingConfig, processes: int) -> Seen:
    """Goes the way of a training up to its first step (`training.loop.train`, `Run.build`): what is refused on the
    way ends it, as it would there.

    Args:
        processes: of the planned training; this one is alone, or has as many.
    """
    seen = Seen()

    def make_task(config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Pretraining:
        seen.state = saved.state if saved else {}
        split_batch(config.global_batch_windows, processes, 1)
        return Pretraining(config, accelerator, saved)

    with redirect_stdout(sys.stderr), _noting(seen), Run(config, make_task, lock=False) as run:
        assert isinstance(run.task, Pretraining)
        seen.step, seen.complete = run.step, run.is_complete
        seen.unprepared = (file := missing_data(config)) is not None
        if file:
            recipe = load(PrepareConfig, ["--config", file])
            if not recipe.source.startswith("bin:"):
                scan(recipe)
        else:
            run.task.open_data()
            seen.task = run.task
            if not seen.complete:
                run.task.load_tasks()
                with torch.device("cpu" if config.train.init_from else "meta"):  # weights are looked at in a real one
                    run.task.build_model()
                run.task.check_hashes(record=False)
                run.newest()
    if seen.task is None and not seen.unprepared:
        seen.task = _data_alone(config)
    return seen


@contextmanager
def _noting(seen: Seen) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        seen.mistakes = error.mistakes


def _data_alone(config: TrainingConfig) -> Pretraining | None:
    """The data's figures of a run that was refused for something else; None where they are to blame."""
    open_: Callable[[Pretraining], None] = Pretraining.open_data
    with suppress(UserError), redirect_stdout(sys.stderr):
        task = Pretraining(config, Accelerator(cpu=not torch.cuda.is_available()), None)
        open_(task)
        return task
    return None
