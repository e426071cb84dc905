"""The global order of the training windows, and each rank's share of it.

The tokens of a split are one stream; window i is its tokens [i·T, i·T + T], T inputs and T targets. Position p of the
endless training order is window `permutation(seed, p // N)[p % N]`, so that every epoch of N windows uses each once.
A step consumes positions [p, p + G). In its micro-batch m of b windows, rank r of W takes positions
p + (m·W + r)·b and the b - 1 after it. The windows of a step thus depend on the seed, G and p alone.
"""

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.errors import UserError

FIRST_DIGEST = "0" * 64
"""The order digest before the first step."""

ROUNDS = 8


class Order:
    """The endless order of N windows: a keyed bijection per epoch, in O(1) memory and with O(1) seek.

    A Feistel network (Luby and Rackoff, 1988) over pairs (left, right) of digits below a = ceil(sqrt(N)) permutes
    [0, a²); what falls outside [0, N), at most 2·sqrt(N) of the values, is sent through it again until it falls inside
    (cycle walking; Black and Rogaway, 2002).
    """

    def __init__(self, seed: int, n_windows: int):
        self.seed = seed
        self.n_windows = n_windows
        self.base = np.uint64(math.isqrt(n_windows - 1) + 1)

    def windows(self, start: int, stop: int) -> np.ndarray:
        """Windows at the positions start, ..., stop - 1 of the order: uint64 [stop - start]."""
        parts = []
        while start < stop:
            epoch, offset = divmod(start, self.n_windows)
            count = min(stop - start, self.n_windows - offset)
            parts.append(self._permute(epoch, np.arange(offset, offset + count, dtype=np.uint64)))
            start += count
        return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.uint64)

    def _permute(self, epoch: int, index: np.ndarray) -> np.ndarray:
        key = hashlib.shake_256(f"{self.seed}/{epoch}".encode()).digest(8 * ROUNDS)
        keys = np.frombuffer(key, "<u8")
        values = self._feistel(index, keys)
        outside = values >= self.n_windows
        while outside.any():
            values[outside] = self._feistel(values[outside], keys)
            outside = values >= self.n_windows
        return values

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self.base)
        for key in keys:
            mixed = (right + key) * np.uint64(0xBF58476D1CE4E5B9)  # two rounds of splitmix64's finaliser
            mixed ^= mixed >> np.uint64(31)
            mixed *= np.uint64(0x94D049BB133111EB)
            mixed >>= np.uint64(33)
            mixed += left
            mixed %= self.base
            left, right = right, mixed
        return left * self.base + right


def next_digest(digest: str, windows: np.ndarray) -> str:
    """The order digest after a step: SHA-256 over the digest before it and the step's windows (uint64, little endian,
    in order of position), so that equal digests mean equal windows in every step so far."""
    return hashlib.sha256(bytes.fromhex(digest) + windows.astype("<u8").tobytes()).hexdigest()


def count_windows(n_tokens: int, block_size: int) -> int:
    """N: full windows of block_size inputs, each with its targets, in a stream of n_tokens."""
    return max(n_tokens - 1, 0) // block_size


class WindowDataset(Dataset):
    """Map-style: a range of positions in the order -> (tokens int64 [b, T + 1], their windows uint64 [b])."""

    def __init__(self, stream: TokenStream, order: Order, block_size: int):
        self.stream = stream
        self.order = order
        self.block_size = block_size

    def __len__(self) -> int:
        return self.order.n_windows

    def __getitems__(self, positions: range) -> tuple[Tensor, np.ndarray]:
        windows = self.order.windows(positions.start, positions.stop)
        tokens = self.stream.read(windows.astype(np.int64) * self.block_size, self.block_size + 1)
        return torch.from_numpy(tokens.astype(np.int64)), windows


class PositionSampler:
    """Endless batches of b successive positions. Accelerate gives batch k to rank k mod W, the contract's order."""

    def __init__(self, start: int, batch_size: int):
        self.start = start
        self.batch_size = batch_size
        self.drop_last = True

    def __iter__(self) -> Iterator[range]:
        position = self.start
        while True:
            yield range(position, position + self.batch_size)
            position += self.batch_size


def train_batches(
    accelerator: Accelerator, dataset: WindowDataset, position: int, batch_size: int, workers: int
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """This rank's endless micro-batches from global `position` on, on its device, one fetched ahead.

    Args:
        dataset: the same on every rank; a rank reads only its own windows.
        position: a step's first position; nothing before it is visited.
        batch_size: b, windows per micro-batch and rank.
        workers: loader processes; 0 reads in this one.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=PositionSampler(position, batch_size),  # pyright: ignore[reportArgumentType]
        collate_fn=_as_read,  # pyright: ignore[reportArgumentType]
        num_workers=workers,
        pin_memory=accelerator.device.type == "cuda",
        prefetch_factor=4 if workers else None,
        generator=torch.Generator(),  # or starting it would draw from the generator that dropout uses
    )
    return iter(accelerator.prepare_data_loader(loader))


def _as_read(batch: tuple[Tensor, np.ndarray]) -> tuple[Tensor, np.ndarray]:
    return batch  # __getitems__ returns whole batches


def split_batch(global_windows: int, processes: int, micro_batch_size: int) -> tuple[int, int]:
    """Micro-batch b and accumulation count for G windows a step: b is the largest divisor of the rank's share G / W
    that is at most `micro_batch_size`.

    Raises:
        UserError: when W does not divide G.
    """
    if global_windows % processes:
        cure = f"does not divide the global batch of {global_windows} windows (train.global_batch_tokens / "
        raise UserError("processes", processes, cure + f"model.block_size); use {_divisors(global_windows)} processes")
    share = global_windows // processes
    batch = next(b for b in range(min(micro_batch_size, share), 0, -1) if share % b == 0)
    return batch, share // batch


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
