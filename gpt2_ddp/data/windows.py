"""The windows of a token stream, which a GPT trains on: window i is tokens [i·T, i·T + T], T inputs and T targets."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpt2_ddp.data.order import SOURCE_BITS
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.errors import UserError


def count_windows(n_tokens: int, block_size: int) -> int:
    """N: full windows of block_size inputs, each with its targets, in a stream of n_tokens."""
    return max(n_tokens - 1, 0) // block_size


class Windows:
    """The windows of `stream`, read by their numbers."""

    def __init__(self, stream: TokenStream, block_size: int):
        self.stream = stream
        self.block_size = block_size

    def __len__(self) -> int:
        return count_windows(len(self.stream), self.block_size)

    def read(self, items: np.ndarray) -> tuple[Tensor]:
        """Tokens int64 [b, T + 1] of the windows int64 [b]."""
        tokens = self.stream.read(items * self.block_size, self.block_size + 1)
        return (torch.from_numpy(tokens.astype(np.int64)),)


class MixedWindows:
    """The windows of several streams: item source · 2^48 + window (`data.mixture`)."""

    def __init__(self, sources: Sequence[Windows]):
        self.sources = sources

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def read(self, items: np.ndarray) -> tuple[Tensor]:
        """Tokens int64 [b, T + 1] of the items int64 [b]."""
        of, windows = np.divmod(items, 2**SOURCE_BITS)
        rows = torch.empty(len(items), self.sources[0].block_size + 1, dtype=torch.int64)
        for source in set(of.tolist()):
            (rows[torch.from_numpy(of == source)],) = self.sources[source].read(windows[of == source])
        return (rows,)


def split_batch(global_windows: int, processes: int, micro_batch_size: int) -> int:
    """Micro-batch b for G windows a step: the largest divisor of the rank's share G / W that is at most
    `micro_batch_size`, so that every forward pass has one shape.

    Raises:
        UserError: when W does not divide G.
    """
    if global_windows % processes:
        cure = f"does not divide the global batch of {global_windows} windows (train.global_batch_tokens / "
        raise UserError("processes", processes, cure + f"model.block_size); use {_divisors(global_windows)} processes")
    share = global_windows // processes
    return next(b for b in divisors(share) if b <= micro_batch_size)


def divisors(share: int) -> list[int]:
    """The largest first."""
    return [size for size in range(share, 0, -1) if share % size == 0]


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
