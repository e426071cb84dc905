"""Saving and resuming: our checkpoints, hashed and verified, next to `torch.save`.

All contenders save the same run, which trains on after the save, in steps of 64 tokens.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Case, interleave
from benchmarks.step import quiet_run, random_tokens, short_run
from gpt2_ddp.cluster import read_clock
from gpt2_ddp.files import fsync_path
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_step
from gpt2_ddp.training.start import Training

FIGURES = (
    "training stands still",
    "until on disk",
    "training time lost",
    "resume: read, verify, put",
)
"""Seconds that a turn measures."""
CHANGES = {
    "model.block_size": 64,
    "checkpoint.keep_last": 1,
    "checkpoint.background": True,
    "train.patience_seconds": 3600,  # turns report no progress
}


def measure(config: BenchmarkConfig) -> Iterator[Case]:
    """Seconds of each of `FIGURES`."""
    with TemporaryDirectory(prefix="checkpoint-", dir=config.output) as name:
        folder = Path(name)
        settings = short_run(config, folder, 1, "no", "off", CHANGES)
        random_tokens(Path(settings.data.paths[0]))
        with quiet_run(settings, Pretraining) as training:
            pairs = contenders(training, folder / "all.pt")
            turns = {name: partial(turn, training, *pair) for name, pair in pairs.items()}
            interleave(turns, 1)
            # with the optimizer's state, which the first step makes
            size = training.trainer.snapshot().bytes
            measured = interleave(turns, config.repeats)
    for number, what in enumerate(FIGURES):
        seconds_of = {
            name: [figures[number] for figures in turns] for name, turns in measured.items()
        }
        yield Case(f"{what}, {size / 1e9:.2f} GB", "s", seconds_of, more_is_better=False)


def contenders(
    training: Training, file: Path
) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """How each contender saves and resumes a run: ours in its folder, the other one in `file`."""
    trainer = training.trainer
    model = training.run.task.model
    optimizer = trainer.optimizer.plain
    store = training.run.store

    def save_ours(background: bool) -> None:
        store.wait()
        trainer.check_replicas()
        store.save(trainer.snapshot(), trainer.guard.last_good, wait=not background)

    def resume_ours() -> None:
        newest = store.newest()
        assert newest
        trainer.load(newest)

    def save_torch() -> None:
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        fsync_path(file)

    def resume_torch() -> None:
        weights, state = torch.load(file, map_location=training.run.accelerator.device)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)

    return {
        OURS: (partial(save_ours, False), resume_ours),
        "ours, in the background": (partial(save_ours, True), resume_ours),
        "torch.save + fsync": (save_torch, resume_torch),
    }


def turn(
    training: Training, save: Callable[[], None], resume: Callable[[], None]
) -> tuple[float, ...]:
    """Saves while the training continues, and resumes; returns the seconds of `FIGURES`. The time
    lost is that of the save, and the excess of the steps until the checkpoint is on disk over the
    median of the steps before."""
    os.sync()
    take_step = partial(train_step, training.trainer)
    usual = median(seconds(training, take_step) for _ in range(3))
    still = written = lost = seconds(training, save)
    while training.run.store.background.is_working:
        step = seconds(training, take_step)
        written += step
        lost += step - usual
    training.wait_for_save()
    return still, written, lost, seconds(training, resume)


def seconds(training: Training, work: Callable[[], object]) -> float:
    """Wall seconds until the device has done the work."""
    device = training.run.accelerator.device
    begun = read_clock(device)
    work()
    return read_clock(device) - begun
