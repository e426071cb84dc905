"""Training steps to hold ours against, each written as its users write it: the sides of `step`."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from gpt2_ddp.benchmark.sides import StepTimer, Unavailable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, token_dtype
from gpt2_ddp.model.compiled import compiled
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.model.transformers_layout import transformers_config

GRAD_CLIP = 1.0


def bare(turns: StepTimer, config: TrainingConfig, vocab_size: int, device: torch.device) -> None:
    """Our model and optimizer, in a loop without Accelerate and without all that ours keeps account of."""
    model = GPT(config.model, vocab_size).to(device)
    loop(turns, config, vocab_size, device, model, build_optimizer(model, config.optim), lambda loss: loss)


def nanogpt(turns: StepTimer, config: TrainingConfig, vocab_size: int, device: torch.device, file: Path) -> None:
    """The model and the optimizer that a file of nanoGPT's kind defines, in the loop of its train.py."""
    shape, optim = config.model, config.optim
    theirs = definitions(file)
    sizes = {name: getattr(shape, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "bias", "dropout")}
    known = theirs.GPTConfig.__dataclass_fields__
    padded = -(-vocab_size // 64) * 64
    own = {name: value for name, value in sizes.items() if name in known}
    model = theirs.GPT(theirs.GPTConfig(vocab_size=padded, **own)).to(device)
    betas = {"betas": optim.betas} if "bias" in known else {}  # build-nanogpt's are fixed
    optimizer = model.configure_optimizers(
        weight_decay=optim.weight_decay, learning_rate=optim.lr, device_type=device.type, **betas
    )
    loop(turns, config, vocab_size, device, model, optimizer, lambda found: found[1])


def loop(
    turns: StepTimer,
    config: TrainingConfig,
    vocab_size: int,
    device: torch.device,
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[Any], Tensor],
) -> None:
    """Steps of plain PyTorch for ever, on windows from random places of the shard."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as both nanoGPTs do, and we
    run = compiled(model, config.train.compile if isinstance(model, GPT) else whole(config))
    batch, size = int(config.train.micro_batch_size), config.model.block_size
    stream = np.memmap(shard(config), token_dtype(vocab_size), "r", HEADER_BYTES)
    rng, autocast = np.random.default_rng(0), config.train.mixed_precision == "bf16"
    while True:
        rows = [stream[at : at + size + 1].astype(np.int64) for at in rng.integers(0, len(stream) - size, batch)]
        tokens = torch.from_numpy(np.stack(rows))
        tokens = tokens.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tokens
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            loss = loss_of(run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.done()


def transformers(turns: StepTimer, config: TrainingConfig, vocab_size: int, device: torch.device) -> None:
    """GPT2LMHeadModel in the loop that Accelerate's documentation teaches."""
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError as error:
        raise Unavailable("needs transformers, which is not installed") from error
    train, size = config.train, config.model.block_size
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=train.mixed_precision)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    model = GPT2LMHeadModel(GPT2Config(**transformers_config(config.model, vocab_size, vocab_size - 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay)
    stream = np.memmap(shard(config), token_dtype(vocab_size), "r", HEADER_BYTES)
    windows = torch.from_numpy(stream[: len(stream) // size * size].astype(np.int64)).view(-1, size)
    loader = DataLoader(TensorDataset(windows), int(train.micro_batch_size), shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = compiled(model, whole(config))
    model.train()
    while True:
        for (tokens,) in loader:
            loss = run(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            turns.done()


def whole(config: TrainingConfig) -> str:
    """How a model is compiled that has no blocks as ours has."""
    return "off" if config.train.compile == "off" else "model"


def shard(config: TrainingConfig) -> Path:
    """The one that all sides read."""
    return next(Path(config.data.paths[0]).glob("train_*.bin"))


def definitions(file: Path) -> ModuleType:
    """The classes of a Python file, with its imports, without running the rest of it, which may be a training."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    beside = {other.stem for other in file.parent.glob("*.py")}
    kept = []
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ClassDef) or (names and not beside.intersection(names)):
            kept.append(node)
    module = ModuleType(f"_{file.stem}_of_a_checkout")
    sys.modules[module.__name__] = module  # where dataclasses look
    module.master_process = False  # pyright: ignore[reportAttributeAccessIssue] a global of build-nanogpt's, which then prints less
    exec(compile(ast.Module(kept, []), str(file), "exec"), vars(module))
    return module
