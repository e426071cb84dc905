"""A training's work up to its first step, without its result: its user errors, and the memory of a process."""

import gc
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from gpt2_ddp.checkpoint.checkpoint import Checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.feed import split_batch
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.preparation.sources import scan
from gpt2_ddp.tasks.pretraining import Pretraining, missing_data
from gpt2_ddp.training.run import Run


@dataclass
class Seen:
    """Results of a dry run."""

    mistakes: list[str] = field(default_factory=list)  # user errors, as the lines printed after `error:`
    record: dict[str, Any] = field(default_factory=dict)  # of the checkpoint's state; empty for a fresh run
    task: Pretraining | None = None  # with its data open; None where they could not be opened
    step: int = 0  # of the checkpoint
    base: float | None = None  # bytes of a process without its model (`base_memory`)


def preflight(config: TrainingConfig, processes: int) -> Seen:
    """Does the work of a training up to its first step (`training.loop.train`, `Run.build`), with the same user errors.
    `processes` are the planned training's; this one is alone, or has as many."""
    seen, launch = Seen(), config.launch
    config = config.model_copy(update={"launch": launch.model_copy(update={"replicas": 1})})  # for this process alone

    def make_task(config: TrainingConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Pretraining:
        seen.record = saved.state.record if saved else {}
        if config.parallel == "fsdp":
            from gpt2_ddp.training.sharded import count_shards

            count_shards(processes, launch.replicas)
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
