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
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from accelerate import Accelerator

from gpt2_ddp.benchmark.step import GPT2_IDS, PRESET, preset
from gpt2_ddp.benchmark.table import OURS, Case, Table, in_turn
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.files import fsync_file, fsync_folder
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.processes.launch import build_accelerator
from gpt2_ddp.run.background import Background
from gpt2_ddp.run.checkpoint import verify
from gpt2_ddp.run.checkpoint_folder import CheckpointFolder
from gpt2_ddp.run.snapshot import Snapshot, fit_weights, moments_of, put_moments, weights_of

BEHIND, TORCH, ACCELERATE = "ours, in the background", "torch.save + fsync", "accelerator.save_state + fsync"
FIGURES = ("training stands still", "until on disk", "training time lost", "resume: read, verify, put")


class Took(NamedTuple):
    """Seconds of one save, as `FIGURES` names them."""

    still: float
    durable: float
    lost: float
    resume: float


def measure(config: BenchmarkConfig) -> Table:
    """The benchmark. Steps are of one window of 64 tokens; time that is lost is standing still, and what the steps
    until the checkpoint is on disk take longer than the median of those before it."""
    training = preset(config)
    accelerator = build_accelerator(config.device)
    torch.manual_seed(0)
    model = GPT(training.model, GPT2_IDS).to(accelerator.device)
    optimizer = build_optimizer(model, training.optim)
    tokens = torch.randint(GPT2_IDS, (1, 65), device=accelerator.device)

    def step() -> float:
        begun = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(accelerator)
        return time.perf_counter() - begun

    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    Path(config.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=config.output) as folder:
        place = Path(folder) / "save"
        background, memory = Background(), {}

        def snapshot() -> Snapshot:
            return Snapshot({"step": 1}, "seed: 1\n", weights_of(model), moments_of(model, optimizer))

        def save_ours() -> None:
            CheckpointFolder(place).save(snapshot())

        def save_behind() -> None:
            copy = snapshot().copied(memory)
            background.start(lambda: CheckpointFolder(place).save(copy), limit=3600)

        def resume_ours() -> None:
            read = verify(place / "step-00000001").read()
            fit_weights(read.model, model, place)
            put_moments(accelerator, read.optimizer, model, optimizer)

        def save_torch() -> None:
            place.mkdir(parents=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, place / "all.pt")
            _fsync(place)

        def resume_torch() -> None:
            read = torch.load(place / "all.pt", map_location=accelerator.device)
            model.load_state_dict(read["model"])
            optimizer.load_state_dict(read["optimizer"])

        def save_accelerate() -> None:
            accelerator.save_state(str(place))
            _fsync(place)

        def resume_accelerate() -> None:
            accelerator.load_state(str(place))

        sides: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            OURS: (save_ours, resume_ours),
            BEHIND: (save_behind, resume_ours),
            TORCH: (save_torch, resume_torch),
            ACCELERATE: (save_accelerate, resume_accelerate),
        }
        took: dict[str, list[Took]] = {side: [] for side in sides}

        def turn(side: str) -> float:
            save, resume = sides[side]
            shutil.rmtree(place, ignore_errors=True)
            os.sync()
            usual = median(step() for _ in range(3))
            begun = time.perf_counter()
            save()
            still = lost = time.perf_counter() - begun
            while background.is_working:
                lost += step() - usual
            background.wait()
            durable = background.seconds + still if side == BEHIND else still
            begun = time.perf_counter()
            resume()
            _synchronize(accelerator)
            took[side].append(Took(still, durable, lost, time.perf_counter() - begun))
            return still

        step()
        in_turn({side: lambda side=side: turn(side) for side in sides}, config.repeats)
        size = snapshot().bytes
        del prepared, prepared_optimizer
    cases = [
        Case(what, "s", {side: [figures[n] for figures in all[1:]] for side, all in took.items()}, more_is_better=False)
        for n, what in enumerate(FIGURES)
    ]
    settings = {
        "preset": config.preset or PRESET,
        "bytes": size,
        "threads": torch.get_num_threads(),
        "device": str(accelerator.device),
        "load": os.getloadavg(),
    }
    return Table("checkpoint", cases, settings, (_note(size, accelerator),))


def _note(size: int, accelerator: Accelerator) -> str:
    threads = f"{torch.get_num_threads()} threads" if accelerator.device.type == "cpu" else accelerator.device.type
    return f"{size / 1e9:.2f} GB, {threads}; ours are hashed on the way and verified in a resume, the others are not."


def _fsync(folder: Path) -> None:
    for file in folder.iterdir():
        fsync_file(file)
    fsync_folder(folder)


def _synchronize(accelerator: Accelerator) -> None:
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
