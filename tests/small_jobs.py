"""Configurations of small jobs that take seconds, and functions that run them on ranks."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig

KINDS: dict[str, tuple[type[JobConfig], dict[str, Any]]] = {
    "regression": (
        RegressionConfig,
        {"data.points": 101, "data.test_points": 31, "optim.momentum": 0.9, "train.global_batch_size": 12},
    ),
    "mlp": (
        ClassifierConfig,
        {
            "data.points": 101,
            "data.test_points": 31,
            "model.hidden": (30, 20),
            "optim.name": "adam",
            "train.global_batch_size": 24,
            "train.micro_batch_size": 4,
            "train.mixed_precision": "bf16",
        },
    ),
    "lenet": (
        ClassifierConfig,
        {
            "data.name": "cifar100",
            "data.augment": True,
            "model.name": "lenet",
            "optim.name": "adam",
            "optim.lr": 1e-3,
            "train.global_batch_size": 48,
            "train.micro_batch_size": 16,
        },
    ),
    "resnet18": (
        ClassifierConfig,
        {"data.name": "cifar100", "model.name": "resnet18", "train.global_batch_size": 12, "train.micro_batch_size": 4},
    ),
    "transformer": (TransformerConfig, {"model.dropout": 0.1, "train.global_batch_size": 6, "data.sequences": 19}),
}


def job_config(kind: str, output_dir: Path, changes: dict[str, Any] | None = None) -> JobConfig:
    """A tiny job of this kind on the CPU; dotted names in `changes` differ from it."""
    command, own = KINDS[kind]
    values: dict[str, Any] = {"output_dir": str(output_dir), "run_name": "run", "train": {"epochs": 4, "device": "cpu"}}
    values |= {"tracking": {"log_every": 1}, "eval": {"batch_size": 8}}
    values["checkpoint"] = {"background": False}  # or rows and kills would come in any order
    for name, value in (own | (changes or {})).items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return command.model_validate(values)


def run_small_job(config: JobConfig):
    from gpt2_ddp.tasks.jobs import run_job

    return run_job(config)


def signalled_job(config: JobConfig, step: int, number: int) -> str:
    """Trains, and has the last rank's own process signalled in the middle of step `step`."""
    from gpt2_ddp.run import loop

    train_step = loop.train_step

    def signalling(run):
        accelerator = run.accelerator
        if run.step + 1 == step and accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), number)
        return train_step(run)

    loop.train_step = signalling
    return run_small_job(config).outcome


def killed_job(config: JobConfig, step: int) -> str:
    return signalled_job(config, step, signal.SIGKILL)


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict]:
    """What a resumed run's rows have in common with those of one that was left alone, but for their timings: its steps
    and rollbacks."""
    found = [json.loads(line) for line in (run / file).read_text().splitlines()]
    found = [row for row in found if row.get("event", "rollback") == "rollback"]
    return [{name: value for name, value in row.items() if name != "chain"} for row in found]


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest_checkpoint(run) / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
