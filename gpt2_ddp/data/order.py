"""The global order of the items to train on (windows of tokens, or samples), and the digest that proves it.

Position p of the endless order of N items is item `permutation(seed, p // N)[p % N]`, so that every epoch of N
positions uses each item once. docs/architecture.md spells permutation and digest out, for who would check them without
this code.
"""

import hashlib
import math

import numpy as np

FIRST_DIGEST = "0" * 64
"""The order digest before the first step."""

ROUNDS = 8
FEW, AHEAD = 256, 2048
"""Positions that are few: arrays of 4 and of 400 take the network as long, so the items of so many are made at once,
and kept for the loader, and for the steps to come."""
SOURCE_BITS = 48
"""An item of a mixture is source · 2^48 + window: a window of source 0 is the item that it is alone."""


class Order:
    """The endless order of N items: a keyed bijection per epoch, in O(1) memory and with O(1) seek.

    A Feistel network (Luby and Rackoff, 1988) over pairs (left, right) of digits below a = ceil(sqrt(N)) permutes
    [0, a²); what falls outside [0, N), at most 2·sqrt(N) of the values, is sent through it again until it falls inside
    (cycle walking; Black and Rogaway, 2002).

    Args:
        stream: makes it another order of the same seed (`data.mixture`); it stands before the epoch in the key.
    """

    def __init__(self, seed: int, n_items: int, stream: str = ""):
        self.seed = seed
        self.n_items = n_items
        self.stream = stream
        self.base = np.uint64(math.isqrt(n_items - 1) + 1)
        self._first, self._kept = 0, np.empty(0, np.uint64)  # the items at so many positions from the first on

    def __len__(self) -> int:
        return self.n_items

    def items_at(self, positions: np.ndarray) -> np.ndarray:
        """The items at ascending positions int [n] of the order: uint64 [n]."""
        if not len(positions) or positions[-1] - positions[0] >= FEW:
            return self._made(positions)
        first, stop = int(positions[0]), int(positions[-1]) + 1
        if first < self._first or stop > self._first + len(self._kept):
            epoch_ends = (first // self.n_items + 1) * self.n_items  # each has a key of its own
            self._first, stop = first, max(stop, min(first + AHEAD, epoch_ends))
            self._kept = self._made(np.arange(first, stop))
        return self._kept[positions - self._first]

    def _made(self, positions: np.ndarray) -> np.ndarray:
        parts = []
        while len(positions):
            epoch = int(positions[0]) // self.n_items
            first = epoch * self.n_items
            count = np.searchsorted(positions, first + self.n_items)
            parts.append(self._permute(epoch, (positions[:count] - first).astype(np.uint64)))
            positions = positions[count:]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint64), *parts])

    def _permute(self, epoch: int, index: np.ndarray) -> np.ndarray:
        key = hashlib.shake_256(f"{self.seed}/{self.stream}{epoch}".encode()).digest(8 * ROUNDS)
        keys = np.frombuffer(key, "<u8")
        values = self._feistel(index, keys)
        outside = values >= self.n_items
        while outside.any():
            values[outside] = self._feistel(values[outside], keys)
            outside = values >= self.n_items
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


def next_digest(digest: str, items: np.ndarray) -> str:
    """The order digest after a step: SHA-256 over the digest before it and the step's items (uint64, little endian,
    in order of position), so that equal digests mean equal items in every step so far."""
    return hashlib.sha256(bytes.fromhex(digest) + items.astype("<u8").tobytes()).hexdigest()


def skipped_digest(digest: str, start: int, stop: int) -> str:
    """The order digest once positions [start, stop) are passed over: SHA-256 over the digest before it, the four bytes
    `pass`, start and stop (uint64, little endian)."""
    ends = np.array([start, stop], "<u8").tobytes()
    return hashlib.sha256(bytes.fromhex(digest) + b"pass" + ends).hexdigest()
