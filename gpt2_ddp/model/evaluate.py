"""Loss of a model over a split: each of its targets scored exactly once, whatever the ranks and the batch."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.data.loader import count_windows
from gpt2_ddp.data.shards import TokenStream, read_manifest
from gpt2_ddp.errors import UserError

IGNORED = -100


@dataclass(frozen=True)
class Evaluation:
    """Sums over the scored targets: nll in nats (fp64), how many they are, and the UTF-8 bytes that they spell."""

    nll: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy per token, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer: nll / ln 2 / bytes; NaN when the bytes are not known."""
        return self.nll / math.log(2) / self.bytes if self.bytes else math.nan


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    stream: TokenStream,
    block_size: int,
    batch_size: int,
    tokens: int | None = None,
    token_bytes: np.ndarray | None = None,
) -> Evaluation:
    """Scores `stream` in windows of block_size, the shorter last one included: its L - 1 targets, each once.

    Batch j belongs to rank j mod W; a short batch is filled up with targets that are not scored, so that every
    forward pass has one shape. Ranks meet once, at the end; a rank without batches just waits there.

    Args:
        model: prepared or plain, on the accelerator's device; `model(x, y, reduction="none")` -> nll [B, T].
        batch_size: windows per forward pass and rank.
        tokens: score about this many, in whole windows evenly spread over the split; None for all.
        token_bytes: int [vocab_size], UTF-8 bytes of each token, for bits per byte.
    """
    windows = _chosen_windows(len(stream), block_size, tokens)
    device = accelerator.device
    exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
    totals = torch.zeros(3, dtype=exact, device=device)  # nll, tokens, bytes
    lengths = torch.from_numpy(token_bytes.astype(np.int64)).to(device) if token_bytes is not None else None
    was_training = model.training
    model.eval()
    stride = batch_size * accelerator.num_processes
    for first in range(batch_size * accelerator.process_index, len(windows), stride):
        x, y = _batch(stream, windows[first : first + batch_size], block_size, batch_size)
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        scored = y != IGNORED
        totals[0] += model(x, y, reduction="none").to(exact).sum()
        totals[1] += scored.sum()
        if lengths is not None:
            totals[2] += (lengths[y.clamp(min=0)] * scored).sum()
    model.train(was_training)
    if accelerator.num_processes > 1:
        dist.all_reduce(totals)
    nll, count, spelled = totals.tolist()
    return Evaluation(nll, round(count), round(spelled))


def _chosen_windows(n_tokens: int, block_size: int, tokens: int | None) -> np.ndarray:
    """Indices of the windows to score, int64; the last may be the short window at the stream's end."""
    count = math.ceil((n_tokens - 1) / block_size)
    if tokens is None or tokens >= n_tokens - 1:
        return np.arange(count)
    full = count_windows(n_tokens, block_size)
    chosen = min(max(math.ceil(tokens / block_size), 1), max(full, 1))
    return np.arange(chosen) * max(full, 1) // chosen


def _batch(stream: TokenStream, windows: np.ndarray, block_size: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [batch_size, block_size]; IGNORED where there is nothing to score."""
    x = torch.zeros(batch_size, block_size, dtype=torch.int64)
    y = torch.full((batch_size, block_size), IGNORED)
    whole = windows[windows < count_windows(len(stream), block_size)]
    if len(whole):
        rows = torch.from_numpy(stream.read(whole * block_size, block_size + 1).astype(np.int64))
        x[: len(whole)], y[: len(whole)] = rows[:, :-1], rows[:, 1:]
    if len(whole) < len(windows):  # the tail
        start = int(windows[-1]) * block_size
        row = torch.from_numpy(stream.read(np.array([start]), len(stream) - start).astype(np.int64))[0]
        x[len(whole), : len(row) - 1], y[len(whole), : len(row) - 1] = row[:-1], row[1:]
    return x, y


def run(config: EvaluateConfig) -> int:
    """evaluate.py: scores a checkpoint and prints loss, perplexity and bits per byte."""
    from gpt2_ddp.processes.launch import build_accelerator
    from gpt2_ddp.processes.ranks import on_every_rank
    from gpt2_ddp.run.checkpoint import find_checkpoint, load_model

    accelerator = build_accelerator(config.device, config.mixed_precision)

    def load():
        checkpoint = find_checkpoint(Path(config.checkpoint))
        model, tokenizer = load_model(checkpoint)
        folder = Path(config.data or _training_data(checkpoint))
        manifest = read_manifest(folder)
        if manifest.tokenizer_sha256 != tokenizer.sha256:
            cure = (
                f"its tokens are of another tokenizer ({manifest.tokenizer}) than the checkpoint's ({tokenizer.name})"
            )
            raise UserError("data", folder, f"{cure}; prepare the text with the checkpoint's tokenizer")
        if config.split not in manifest.splits:
            raise UserError("split", config.split, f"is not in {folder}; it has {', '.join(sorted(manifest.splits))}")
        return checkpoint, model, tokenizer, TokenStream(folder, manifest, config.split)

    checkpoint, model, tokenizer, stream = on_every_rank(accelerator, load)
    block_size = model.config.block_size
    model = accelerator.prepare_model(model, evaluation_mode=True)
    result = evaluate(accelerator, model, stream, block_size, config.batch_size, config.tokens, tokenizer.token_bytes())
    accelerator.print(
        f"{checkpoint}: {config.split} loss {result.loss:.6f}, perplexity {result.perplexity:.4f}, "
        f"{result.bits_per_byte:.6f} bits per byte over {result.tokens:,} tokens ({result.bytes:,} bytes)"
    )
    accelerator.end_training()
    return 0


def _training_data(checkpoint: Path) -> str:
    import yaml

    return yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8"))["data"]["path"]
