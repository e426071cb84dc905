"""Checkpoints: how long training stands still for one, until it is on disk, what that costs, and how long a resume
takes.

Ours, which hash what they write, against `torch.save` with fsync and `accelerator.save_state`, over the same model with
its moments, in a training whose steps go on after the save.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from gpt2_ddp.benchmark.step import GPT2_IDS, PRESET, preset
from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.checkpoint.checkpoint import (
    Snapshot,
    fit_weights,
    load_optimizer_state,
    model_state,
    optimizer_state,
    verify,
)
from gpt2_ddp.checkpoint.checkpointer import Background, Checkpointer
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.files import fsync_file, fsync_folder
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer

BEHIND, TORCH, ACCELERATE = "ours, in the background", "torch.save + fsync", "accelerator.save_state + fsync"
FIGURES = ("training stands still", "until on disk", "training time lost", "resume: read, verify, put")


class Took(NamedTuple):
    """Seconds of one save, as `FIGURES` names them."""

    still: float
    durable: float
    lost: float
    resume: float


def measure(config: BenchmarkConfig) -> Table:
    """The benchmark: all figures of all sides."""
    training = Training(config)
    sides = {
        OURS: (training.save_ours, training.resume_ours),
        BEHIND: (training.save_behind, training.resume_ours),
        TORCH: (training.save_torch, training.resume_torch),
        ACCELERATE: (training.save_accelerate, training.resume_accelerate),
    }
    took: dict[str, list[Took]] = {side: [] for side in sides}

    def turn(side: str) -> float:
        took[side].append(training.turn(*sides[side]))
        return took[side][-1].still

    Path(config.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=config.output) as folder:
        training.place = Path(folder) / "save"
        training.step()
        interleave({side: partial(turn, side) for side in sides}, config.repeats)
    cases = [
        Case(what, "s", {side: [figures[n] for figures in all[1:]] for side, all in took.items()}, more_is_better=False)
        for n, what in enumerate(FIGURES)
    ]
    device, size = training.accelerator.device, training.snapshot().bytes
    settings = {
        "preset": config.preset or PRESET,
        "bytes": size,
        "threads": torch.get_num_threads(),
        "device": str(device),
        "load": os.getloadavg(),
    }
    threads = f"{torch.get_num_threads()} threads" if device.type == "cpu" else device.type
    note = f"{size / 1e9:.2f} GB, {threads}; ours are hashed on the way and verified in a resume, the others are not."
    return Table("checkpoint", cases, settings, (note,))


class Training:
    """A model with its moments, and the ways to save it in `place` and to take it from there again. A step is of 64
    tokens."""

    place: Path
    background: Background

    def __init__(self, config: BenchmarkConfig):
        training = preset(config)
        self.accelerator = build_accelerator(config.device)
        torch.manual_seed(0)
        self.model = GPT(training.model, GPT2_IDS).to(self.accelerator.device)
        self.optimizer = build_optimizer(self.model, training.optim)
        self.prepared = self.accelerator.prepare(self.model, self.optimizer)  # which is what `save_state` saves
        self.tokens = torch.randint(GPT2_IDS, (1, 65), device=self.accelerator.device)
        self.memory = {}

    def step(self) -> float:
        """Seconds."""
        begun = time.perf_counter()
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._since(begun)

    def turn(self, save: Callable[[], None], resume: Callable[[], None]) -> Took:
        """Saves while training goes on, and resumes. Time that is lost is standing still, and what the steps until the
        checkpoint is on disk take longer than the median of those before it."""
        shutil.rmtree(self.place, ignore_errors=True)
        os.sync()
        self.background = Background()  # whose seconds are of this turn
        usual = median(self.step() for _ in range(3))
        begun = time.perf_counter()
        save()
        still = lost = time.perf_counter() - begun
        while self.background.is_working:
            lost += self.step() - usual
        self.background.wait()
        durable, begun = still + self.background.seconds, time.perf_counter()
        resume()
        return Took(still, durable, lost, self._since(begun))

    def snapshot(self) -> Snapshot:
        """Of the model and its moments, as a run takes it."""
        return Snapshot({"step": 1}, "seed: 1\n", model_state(self.model), optimizer_state(self.model, self.optimizer))

    def save_ours(self) -> None:
        """Standing still, as `checkpoint.background no` does."""
        Checkpointer(self.place).save(self.snapshot())

    def save_behind(self) -> None:
        """A copy, which is written while training goes on."""
        copy = self.snapshot().copied(self.memory)
        self.background.start(lambda: Checkpointer(self.place).save(copy), timeout=3600)

    def resume_ours(self) -> None:
        """Verifies what it reads."""
        read = verify(self.place / "step-00000001").read()
        fit_weights(read.model, self.model, self.place)
        load_optimizer_state(self.accelerator, read.optimizer, self.model, self.optimizer)

    def save_torch(self) -> None:
        """One pickle of both state dicts, on disk."""
        self.place.mkdir(parents=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.place / "all.pt")
        _fsync(self.place)

    def resume_torch(self) -> None:
        """Reads that."""
        read = torch.load(self.place / "all.pt", map_location=self.accelerator.device)
        self.model.load_state_dict(read["model"])
        self.optimizer.load_state_dict(read["optimizer"])

    def save_accelerate(self) -> None:
        """What Accelerate's documentation has, on disk."""
        self.accelerator.save_state(str(self.place))
        _fsync(self.place)

    def resume_accelerate(self) -> None:
        """Reads that."""
        self.accelerator.load_state(str(self.place))

    def _since(self, begun: float) -> float:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun


def _fsync(folder: Path) -> None:
    for file in folder.iterdir():
        fsync_file(file)
    fsync_folder(folder)
