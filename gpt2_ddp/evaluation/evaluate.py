"""Loss of a model over a split. Each target is scored once, for any number of ranks and any batch
size."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.errors import UserError, is_main_process

IGNORED = -100
BATCH = 16
"""Windows per forward pass and process in the evaluations of a training."""


@dataclass(frozen=True)
class Evaluation:
    """Sums over the scored targets.

    Attributes:
        nll: negative log-likelihood in nats, fp64.
        tokens: number of the targets.
        bytes: of their text, in UTF-8.
    """

    nll: float
    tokens: int
    bytes: float

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
        """nll / ln 2 / bytes, comparable between tokenizers; NaN if the bytes are unknown."""
        return self.nll / math.log(2) / self.bytes if self.bytes else math.nan


def mixed(parts: Iterable[tuple[float, Evaluation]]) -> Evaluation:
    """Weighted mean of evaluations. Weights sum up to 1; a part of weight 0 is left out, with its
    tokens."""
    parts = [(weight, part) for weight, part in parts if weight]
    tokens = sum(part.tokens for _, part in parts)
    # each part, as if it had its share of the tokens
    scaled = [(weight * tokens / part.tokens, part) for weight, part in parts]
    nll = sum(factor * part.nll for factor, part in scaled)
    n_bytes = sum(factor * part.bytes for factor, part in scaled)
    return Evaluation(nll, tokens, n_bytes)


class EvalSet(NamedTuple):
    """The L - 1 targets of a stream of L tokens, in windows of block_size; the last may be shorter.

    Attributes:
        tokens: targets that are scored, in whole windows, evenly spread; None: all.
        token_bytes: UTF-8 bytes of each token, int [vocab_size].
        stride: tokens between the beginnings of two windows, at most block_size. Only the last
            `stride` targets of a window are scored, and all of the first one. So each target is
            scored once, most of them after block_size - stride tokens or more. None: block_size.
    """

    stream: TokenStream
    block_size: int
    tokens: int | None
    token_bytes: np.ndarray
    stride: int | None = None

    @property
    def distance(self) -> int:
        """Tokens between the beginnings of two windows."""
        return self.stride or self.block_size


def check_stride(stride: int | None, block_size: int) -> None:
    """Raises: UserError if windows of block_size that begin `stride` tokens apart leave tokens
    out."""
    if stride and stride > block_size:
        hint = f"should be at most the model's block_size ({block_size}); else tokens are left out"
        raise UserError("stride", stride, hint)


def rounds(
    accelerator: Accelerator, count: int, batch_size: int, poll: Callable[[], None], name: str
) -> Iterator[int]:
    """The first item of this rank's batch, in each round of batches over `count` items. Batch j
    belongs to rank j mod W, so at the end it may be behind the last item. Each rank has equally
    many, as sharded weights need. `poll`: called before each batch. After two seconds, a terminal
    shows a progress bar of this name."""
    hidden = None if is_main_process() else True  # None hides the bar only without a terminal
    starts = range(0, count, batch_size * accelerator.num_processes)
    for first in tqdm(starts, name, unit="batch", leave=False, delay=2, disable=hidden):
        poll()
        yield first + batch_size * accelerator.process_index


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    data: EvalSet,
    batch_size: int,
    poll: Callable[[], None] = lambda: None,
) -> Evaluation:
    """The summed loss of a model over the targets of `data`. Collective.

    Short batches are padded with targets that are not scored: every forward pass has one shape.
    Ranks synchronize once, at the end.

    Args:
        model: prepared or plain, in evaluation mode, on the accelerator's device; `model(x, y,
            reduction="none")` -> nll [B, T].
        batch_size: windows per forward pass and rank.
        poll: called before each batch, equally often on each rank; its exceptions end the
            evaluation.
    """
    device = accelerator.device
    windows = _chosen_windows(data)
    exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
    totals = torch.zeros(3, dtype=exact, device=device)  # nll, tokens, bytes
    lengths = torch.from_numpy(data.token_bytes.astype(np.int64)).to(device)
    for first in rounds(accelerator, len(windows), batch_size, poll, "evaluating"):
        rows = windows[first : first + batch_size]
        x, y = (part.to(device, non_blocking=True) for part in _batch(data, rows, batch_size))
        scored = y != IGNORED
        totals[0] += model(x, y, reduction="none").to(exact).sum()
        totals[1] += scored.sum()
        totals[2] += (lengths[y.clamp(min=0)] * scored).sum()
    if accelerator.num_processes > 1:
        dist.all_reduce(totals)
    nll, n_tokens, n_bytes = totals.tolist()
    return Evaluation(nll, round(n_tokens), round(n_bytes))


def _chosen_windows(data: EvalSet) -> np.ndarray:
    """Indices int64 of the windows to score; the last may be the stream's short one."""
    targets = len(data.stream) - 1
    behind_first = max(targets - data.block_size, 0)
    if data.tokens is None or data.tokens >= targets:
        return np.arange(1 + math.ceil(behind_first / data.distance))
    full = 1 + behind_first // data.distance
    wanted = 1 + math.ceil(max(data.tokens - data.block_size, 0) / data.distance)
    chosen = min(wanted, full)
    return np.arange(chosen) * full // chosen


def _batch(data: EvalSet, windows: np.ndarray, batch_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [batch_size, block_size]. Targets of the padding, and those that the
    window before scores, are IGNORED."""
    stream = data.stream
    block_size = data.block_size
    x = torch.zeros(batch_size, block_size, dtype=torch.int64)
    y = torch.full((batch_size, block_size), IGNORED)
    for row, start in enumerate((windows * data.distance).tolist()):
        length = min(block_size, len(stream) - start - 1)
        tokens = torch.from_numpy(stream.read(np.array([start]), length + 1)[0].astype(np.int64))
        context = block_size - data.distance if start else 0  # its targets are scored already
        x[row, :length] = tokens[:-1]
        y[row, context:length] = tokens[context + 1 :]
    return x, y
