"""The global order of the training items (windows of tokens, or samples), and its digest.

Position p of the endless order of N items is item `permutation(seed, p // N)[p % N]`. So an epoch
of N positions has each item once. With `data.shift_windows`, the windows of an epoch are shifted by
a number of tokens, which is in its items. docs/verify.md specifies permutation, shift and digest,
so that other code can check them.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gpt2_ddp.state import FeedState

ROUNDS = 8
FEW = 256
AHEAD = 2048
"""Requests for fewer than FEW positions compute and cache AHEAD items. 4 items take as long as 400
(estimate)."""
AT_ONCE = 2**20
"""Positions whose items are computed at once where all of them are looked at."""


class Uses(NamedTuple):
    """Where an order has some items.

    Attributes:
        positions: int64 [n], ascending.
        items: uint64 [n], at these positions.
        epochs: int64 [n], of the items' own source: 0 is the first pass over it.
    """

    positions: np.ndarray
    items: np.ndarray
    epochs: np.ndarray

    @classmethod
    def joined(cls, parts: "list[Uses]") -> "Uses":
        """All uses of the parts, in order of position."""
        empty = cls(np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.int64))
        columns = [np.concatenate(column) for column in zip(empty, *parts, strict=True)]
        by_position = np.argsort(columns[0], kind="stable")
        return cls(*(column[by_position] for column in columns))


class Order(ABC):
    """The items at all positions of a training: a pure function of the position. Each epoch has as
    many positions."""

    @abstractmethod
    def __len__(self) -> int:
        """Positions of an epoch."""

    @abstractmethod
    def items_at(self, positions: np.ndarray) -> np.ndarray:
        """Items uint64 [n] at the ascending positions int [n]."""

    def by_source(self, state: FeedState, unit: str, per_item: int) -> dict[str, float]:
        """Row fields of each source at a feed's state; none, unless there are several sources."""
        return {}

    def phase_at(self, position: int) -> int:
        """Number of the data's phase at a position; 0 without phases."""
        return 0

    def uses_of(self, items: np.ndarray, end: int) -> Uses:
        """The positions below `end` that have one of the distinct items uint64 [n]. Looks at all
        positions; an order that can be inverted has a faster way."""
        parts: list[Uses] = []
        for first in range(0, end, AT_ONCE):
            positions = np.arange(first, min(first + AT_ONCE, end))
            taken = self.items_at(positions)
            chosen = np.isin(taken, items)
            found = positions[chosen]
            parts.append(Uses(found, taken[chosen], found // len(self)))
        return Uses.joined(parts)


Rounds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Values uint64 [n] and keys uint64 [8] -> values below a²."""


class Permutation(Order):
    """The endless order of N items: a keyed bijection per epoch, in O(1) memory and with O(1) seek.
    In epoch e, item i is shift(e) · N + i; without shifts it is i.

    A Feistel network (Luby and Rackoff, 1988) over pairs (left, right) of digits below a =
    ceil(sqrt(N)) permutes [0, a²). Values outside [0, N), at most 2·sqrt(N), pass through it again
    until they are inside (cycle walking; Black and Rogaway, 2002). `stream` is a prefix of the
    epoch in the key: each gives another order of the same seed (`data.mixture`).

    Args:
        shifts: number of the shifts, from 0 on; each epoch has one of them (`data.shards.Windows`).
    """

    def __init__(self, seed: int, n_items: int, stream: str = "", shifts: int = 1):
        self.seed = seed
        self.n_items = n_items
        self.stream = stream
        self.shifts = shifts
        self.base = math.isqrt(n_items - 1) + 1
        self._first = 0
        self._cached = np.empty(0, np.uint64)  # items at the positions from _first on

    def __len__(self) -> int:
        return self.n_items

    def items_at(self, positions: np.ndarray) -> np.ndarray:
        if not len(positions) or positions[-1] - positions[0] >= FEW:
            return self._compute(positions)
        first = int(positions[0])
        if first < self._first or positions[-1] >= self._first + len(self._cached):
            self._first = first
            self._cached = self._compute(np.arange(first, first + AHEAD))
        return self._cached[positions - self._first]

    def uses_of(self, items: np.ndarray, end: int) -> Uses:
        """As of `Order`, by the inverse permutation: each epoch has an item once, or, with shifts,
        in the epochs of its shift."""
        shifts, windows = np.divmod(items.astype(np.uint64), np.uint64(self.n_items))
        parts: list[Uses] = []
        for epoch in range(-(-end // self.n_items)):
            chosen = shifts == self.shift(epoch)
            index = self._index_of(epoch, windows[chosen])
            positions = index.astype(np.int64) + epoch * self.n_items
            uses = Uses(positions, items[chosen], np.full(len(positions), epoch))
            is_before = positions < end
            parts.append(Uses(*(column[is_before] for column in uses)))
        return Uses.joined(parts)

    def _compute(self, positions: np.ndarray) -> np.ndarray:
        epochs, index = np.divmod(positions, self.n_items)
        items = index.astype(np.uint64)
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            shifted = self.shift(epoch) * self.n_items
            items[in_epoch] = self._permute(epoch, items[in_epoch]) + shifted
        return items

    def shift(self, epoch: int) -> int:
        """The shift of an epoch, below `shifts`."""
        key = hashlib.shake_256(f"{self.seed}/shift/{self.stream}{epoch}".encode()).digest(8)
        return int.from_bytes(key, "little") % self.shifts

    def _permute(self, epoch: int, index: np.ndarray) -> np.ndarray:
        return self._walk(self._feistel, index, self._keys(epoch))

    def _index_of(self, epoch: int, values: np.ndarray) -> np.ndarray:
        """The inverse of `_permute`: walks each cycle backwards."""
        return self._walk(self._inverse_feistel, values, self._keys(epoch))

    def _keys(self, epoch: int) -> np.ndarray:
        key = hashlib.shake_256(f"{self.seed}/{self.stream}{epoch}".encode()).digest(8 * ROUNDS)
        return np.frombuffer(key, "<u8")

    def _walk(self, rounds: Rounds, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        values = rounds(values, keys)
        outside = values >= self.n_items
        while outside.any():
            values[outside] = rounds(values[outside], keys)
            outside = values >= self.n_items
        return values

    def _feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self.base)
        for key in keys:
            mixed = _mix(right, key)
            mixed += left
            mixed %= self.base
            left = right
            right = mixed
        return left * self.base + right

    def _inverse_feistel(self, values: np.ndarray, keys: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self.base)
        for key in keys[::-1]:
            mixed = _mix(left, key) % self.base
            right_before = left
            left = (right + self.base - mixed) % self.base
            right = right_before
        return left * self.base + right


def _mix(half: np.ndarray, key: np.uint64) -> np.ndarray:
    """Two rounds of splitmix64's finaliser, below 2^31."""
    mixed = (half + key) * 0xBF58476D1CE4E5B9
    mixed ^= mixed >> 31
    mixed *= 0x94D049BB133111EB
    mixed >>= 33
    return mixed


def next_digest(digest: str, items: np.ndarray) -> str:
    """The order digest after a step: SHA-256 of the digest before and the step's items (uint64,
    little endian, in order of position). Equal digests mean equal items in every step so far."""
    return hashlib.sha256(bytes.fromhex(digest) + items.astype("<u8").tobytes()).hexdigest()


def skipped_digest(digest: str, start: int, stop: int) -> str:
    """The order digest after positions [start, stop) are skipped: SHA-256 of the digest before, the
    four bytes `pass`, start and stop (uint64, little endian)."""
    ends = np.array([start, stop], "<u8").tobytes()
    return hashlib.sha256(bytes.fromhex(digest) + b"pass" + ends).hexdigest()
