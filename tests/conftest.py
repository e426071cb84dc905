"""Fixtures shared by the tests: a small real corpus, and the configuration of a run that takes seconds."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import numpy as np
import pytest

from gpt2_ddp.config.training import TrainingConfig


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The tests' models are so small that a second thread mostly waits, and waits long when a core is busy."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of some of the standard library's source, with a BPE of 512 tokens: about 60,000 tokens, three shards."""
    from gpt2_ddp.data.manifest import Manifest, write_manifest
    from gpt2_ddp.data.shards import ShardWriter
    from gpt2_ddp.data.tokenizer import load_tokenizer
    from gpt2_ddp.data.vocabulary import train_bpe

    folder = tmp_path_factory.mktemp("corpus")
    names = ("abc", "bisect", "heapq", "keyword", "queue", "sched", "shlex", "stat", "string", "textwrap", "token")
    texts = [(Path(os.__file__).parent / f"{name}.py").read_text(encoding="utf-8") for name in names]
    train_bpe(texts, 512, folder / "tokenizer.json")
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    splits = {}
    for split, part in (("train", texts[:-2]), ("val", texts[-2:])):
        writer = ShardWriter(folder, split, 20_000, 512)
        for text in part:
            writer.add(np.concatenate([[tokenizer.eot], tokenizer.encode(text)]))
        splits[split] = writer.close()
    write_manifest(folder, Manifest(2, tokenizer.name, tokenizer.sha256, 512, tokenizer.eot, "stdlib", splits))
    return folder


@pytest.fixture
def tiny_config(corpus: Path, tmp_path: Path) -> Callable[..., TrainingConfig]:
    """Makes a configuration of a tiny training over `corpus`; dotted names in `changes` differ from it."""

    def make(changes: dict[str, Any] | None = None) -> TrainingConfig:
        return training_config(corpus, tmp_path / "runs", changes)

    return make


def edit_manifest(folder: Path, **changes: object) -> None:
    """Changes values of a manifest.json, and its own hash with them, so that only what they mean is wrong."""
    file = folder / "manifest.json"
    values = {**json.loads(file.read_text()), **changes}
    values.pop("sha256")
    values["sha256"] = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps(values))


def training_config(corpus: Path, output_dir: Path, changes: dict[str, Any] | None = None) -> TrainingConfig:
    values: dict[str, Any] = {
        "output_dir": str(output_dir),
        "run_name": "run",
        "data": {"path": str(corpus)},
        "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32},
        "optim": {"lr": 3e-3, "min_lr": 3e-4, "warmup_steps": 5},
        "train": {"steps": 20, "global_batch_tokens": 24 * 32, "micro_batch_size": 4, "device": "cpu"},
        "eval": {"every": 10, "tokens": 2000},
        "checkpoint": {"every": 5, "background": False},  # or rows and kills would come in any order
        "tracking": {"log_every": 1},
    }
    for name, value in (changes or {}).items():
        section, _, key = name.rpartition(".")
        (values.setdefault(section, {}) if section else values)[key] = value
    return TrainingConfig.model_validate(values)
