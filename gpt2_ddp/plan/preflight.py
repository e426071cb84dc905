"""A training's work up to its first step, without its result: its user errors."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.sources import scan
from gpt2_ddp.tasks.pretraining import Pretraining, make_pretraining, missing_data
from gpt2_ddp.training.run import Opened, open_run


@dataclass
class Seen:
    """Results of a dry run."""

    mistakes: list[str] = field(default_factory=list)  # user errors, as the lines printed after `error:`
    task: Pretraining | None = None  # with its data open; None for missing data, and after most user errors
    model: ModelConfig | None = None  # settled; None after most user errors
    step: int = 0  # of the checkpoint


def preflight(config: TrainingConfig, processes: int) -> Seen:
    """Does the work of a training up to its first step (`training.loop.train`, `run.build`), with the same user errors.
    `processes` are the planned training's; this one is alone, or has as many."""
    seen, launch = Seen(), config.launch
    config = config.model_copy(update={"launch": launch.model_copy(update={"replicas": 1})})  # for this process alone

    def make_task(config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Pretraining:
        if config.parallel == "fsdp":
            from gpt2_ddp.training.sharded import count_shards

            count_shards(processes, launch.replicas)
        split_batch(config.global_batch_windows, processes, 1)
        return make_pretraining(config, accelerator, saved)

    with redirect_stdout(sys.stderr):
        try:
            with open_run(config, make_task, lock=False) as run:
                seen.model, seen.step = run.config.model, run.step
                if not (file := missing_data(config)):
                    _look_at(run, seen)
                elif not (recipe := load(PrepareConfig, ["--config", file])).source.startswith(("bin:", "hub:")):
                    scan(recipe)
        except UserError as error:
            seen.mistakes = error.mistakes
    return seen


def _look_at(run: Opened, seen: Seen) -> None:
    task = run.task
    assert isinstance(task, Pretraining)
    task.open_data()
    seen.task = task
    if not run.is_complete:
        task.load_tasks()
        with torch.device("cpu" if task.config.train.init_from else "meta"):  # a real training checks the weights
            task.build_model()
        task.check_hashes(record=False)
