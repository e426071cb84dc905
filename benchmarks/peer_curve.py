"""Train nanoGPT's model as a run of ours was trained, so that a curve stands beside a curve.

    python -m benchmarks.peer_curve runs/real --nanogpt ../nanoGPT --seconds 60

The same shards, windows in the same order, steps, batches, learning rates and clipping; the model
and the optimizer are those of a checkout of nanoGPT. The rows go to `--output`, and the last line
compares the two runs after the same number of steps.
"""

import json
import math
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from pydantic import Field
from torch import Tensor, nn

from benchmarks.gate import rows_of
from gpt2_ddp.config.base import Command
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.corpus import Corpus, open_corpus
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.errors import UserError
from gpt2_ddp.evaluation.evaluate import BATCH, EvalSet, evaluate
from gpt2_ddp.records.rows import CONFIG
from gpt2_ddp.script import run_command
from gpt2_ddp.training.optimizer import lr_at

MULTIPLE = 64
"""nanoGPT's vocabulary is padded to a multiple of it."""


class PeerCurveConfig(Command):
    """python -m benchmarks.peer_curve: nanoGPT's curve beside that of a run"""

    positional = "run"

    run: str = ""
    """run folder of ours, complete"""
    nanogpt: str = "../nanoGPT"
    """folder of a nanoGPT checkout"""
    seconds: float = Field(default=3600, gt=0)
    """time of the steps; the curve ends earlier if it is over"""
    output: str = "runs/nanogpt.jsonl"
    """file of the rows"""


class Scored(nn.Module):
    """nanoGPT's model, called as ours in an evaluation."""

    def __init__(self, model: nn.Module, precision: str):
        super().__init__()
        self.model = model
        self.is_half = precision == "bf16"

    def forward(self, tokens: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Losses [B, T] of tokens int64 [B, T]."""
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.is_half):
            # all logits; it would refuse the number of targets that are not scored
            logits = self.model(tokens, targets.clamp(min=0))[0]
        return F.cross_entropy(logits.float().mT, targets, reduction=reduction)


def compare_curves(config: PeerCurveConfig) -> dict[str, Any]:
    """The command. Raises: UserError for a run or a checkout that is missing, and for a run whose
    windows are not those of one folder in its plain order."""
    run = Path(config.run)
    ours = read_config("gpt2", read_yaml(str(run / CONFIG), "run"), run / CONFIG)
    assert isinstance(ours, TrainingConfig), "of this kind"
    mine = rows_of(run)
    if not mine or not ours.train.steps:
        raise UserError("run", run, "has no row of a step; name a run that is complete")
    if len(ours.data.paths) > 1 or ours.task:
        hint = "mixes folders, or has a class of one's own; name a plain run of one folder"
        raise UserError("run", run, hint)
    if not Path(config.nanogpt, "model.py").is_file():
        raise UserError("nanogpt", config.nanogpt, "has no model.py; name a checkout of nanoGPT")
    Path(config.output).parent.mkdir(parents=True, exist_ok=True)
    corpus = open_corpus(ours)
    accelerator = build_accelerator(ours.train.device, "no")
    if accelerator.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    sys.path.insert(0, config.nanogpt)
    model = nanogpt_model(ours, corpus).to(accelerator.device)
    rows: list[dict[str, float]] = []
    with open(config.output, "w") as file:
        for row in train(ours, corpus, model, config.seconds):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    last = rows[-1]
    step = max((step for step in mine if step <= last["step"]), default=0)
    found: dict[str, Any] = {"step": step, "ours": mine.get(step, {}).get("loss")}
    found["nanogpt"] = next((row["loss"] for row in rows if row["step"] == step), None)
    found["nanogpt_tokens_per_second"] = last["tokens_per_second"]
    if last["step"] == ours.train.steps == step:
        found |= {"val_loss": mine[step].get("val_loss")}
        found["nanogpt_val_loss"] = val_loss(accelerator, ours, corpus, model)
    print(json.dumps(found), flush=True)
    return found


def nanogpt_model(config: TrainingConfig, corpus: Corpus) -> nn.Module:
    """nanoGPT's model of the run's shape, with weights from the run's seed."""
    theirs = import_module("model")
    names = {*theirs.GPTConfig.__dataclass_fields__} & {*ModelConfig.model_fields}
    shape = {name: getattr(config.model, name) for name in names}
    padded = -(-corpus.tokenizer.vocab_size // MULTIPLE) * MULTIPLE
    torch.manual_seed(config.seed)
    return theirs.GPT(theirs.GPTConfig(**shape, vocab_size=padded))


def train(
    config: TrainingConfig, corpus: Corpus, model: nn.Module, seconds: float
) -> Iterator[dict[str, float]]:
    """The rows of the run's steps, until the time is over. A step is of the windows of ours."""
    device = next(model.parameters()).device
    optim = config.optim
    configure: Any = model.configure_optimizers
    optimizer = configure(optim.weight_decay, optim.lr, optim.betas, device.type)
    is_compiled = device.type == "cuda" and config.train.compile != "off"
    run = torch.compile(model, dynamic=False) if is_compiled else model
    windows = corpus.sources[0]
    order = Permutation(config.seed, len(windows), shifts=config.shifts)
    size = config.global_batch_windows
    batch = min(int(config.train.micro_batch_size), size)
    steps = config.train.steps
    assert steps, "of a complete run"
    is_half = config.train.mixed_precision in ("auto", "bf16") and device.type == "cuda"
    is_half = is_half or config.train.mixed_precision == "bf16"
    begun = since = time.monotonic()
    tokens = 0
    for step in range(1, steps + 1):
        items = order.items_at(np.arange((step - 1) * size, step * size)).astype(np.int64)
        total = torch.zeros((), device=device)
        for part in np.split(items, range(batch, size, batch)):
            rows = windows.read(part)[0]
            if device.type == "cuda":
                rows = rows.pin_memory().to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_half):
                loss: Tensor = run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())[1]
            share = loss * (len(part) / size)
            share.backward()
            total += share.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), optim.grad_clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, optim)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += size * config.model.block_size
        is_over = time.monotonic() - begun > seconds
        if step % config.tracking.log_every == 0 or step == steps or is_over:
            row = {"step": step, "loss": total.item(), "grad_norm": float(norm)}
            now = time.monotonic()
            yield row | {"tokens_per_second": tokens / (now - since), "seconds": now - begun}
            since = now
            tokens = 0
        if is_over:
            return


def val_loss(
    accelerator: Accelerator, config: TrainingConfig, corpus: Corpus, model: nn.Module
) -> float | None:
    """The loss of the run's validation tokens, in nats; None without a validation split."""
    tokens = config.eval.tokens
    assert tokens != "auto", "resolved by the run"
    lengths = corpus.tokenizer.token_bytes()
    for _, stream in corpus.validation.values():
        data = EvalSet(stream, config.model.block_size, tokens, lengths)
        scored = Scored(model.eval(), "bf16" if accelerator.device.type == "cuda" else "no")
        return evaluate(accelerator, scored, data, BATCH).loss
    return None


if __name__ == "__main__":
    sys.argv[0] = "python -m benchmarks.peer_curve"
    run_command(PeerCurveConfig, "benchmarks.peer_curve:compare_curves")
