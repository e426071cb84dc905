"""Fixtures shared by the tests: a small real corpus, and the configuration of a run that takes seconds."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runs import training_config

from gpt2_ddp.config.cli import dump

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


@pytest.fixture
def place(corpus, tmp_path) -> Path:
    """A folder with shards of its own in `data`, and a configuration that trains on them into `runs/run`."""
    shutil.copytree(corpus, tmp_path / "data")
    (tmp_path / "config.yaml").write_text(dump(training_config(tmp_path / "data", tmp_path / "runs")))
    return tmp_path
