"""The feed: the items of each step, and this rank's micro-batches of them.

A step takes the next positions of the order (`data.order`), without those in `skipped_ranges`. Its items depend on the
seed, the step's size, `position` and `skipped_ranges` alone: not on ranks, micro-batches or restarts.
The items are counted as they are delivered.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FIRST_DIGEST, FeedState


class Reading(IterableDataset):
    """What `read` returns for each of the `parts` of a data set, in their order."""

    def __init__(self, read: Callable[[Any], Any], parts: Iterable[Any]):
        self._read = read
        self._parts = parts

    def __iter__(self) -> Iterator[Any]:
        return map(self._read, self._parts)


def prepare_loader(accelerator: Accelerator, reading: Reading) -> Any:
    """A loader whose batches are this rank's parts, prepared by Accelerate, which moves them to the device one part
    ahead."""
    pins, no_draw = accelerator.device.type == "cuda", Generator()  # the default would draw from dropout's generator
    loader = DataLoader(reading, batch_size=None, collate_fn=lambda part: part, pin_memory=pins, generator=no_draw)
    # Accelerator.prepare would keep a reference to every loader, and take the parts for those of all ranks
    return prepare_data_loader(
        loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], dispatch_batches=False, non_blocking=True
    )


class Source(Protocol):
    """A training set: items that are read by number."""

    def __len__(self) -> int: ...

    def read(self, items: np.ndarray) -> tuple[Tensor, ...]:
        """Rows [b, ...], on the CPU, of the items int64 [b]."""
        ...


Shares = Callable[[int], list[list[range]]]
"""Partition of a step's n items: [m][r] is the part of range(n) in micro-batch m of rank r."""


class GlobalBatch(NamedTuple):
    """Items of a step, over all ranks: their number and their partition.

    Args:
        by_epoch: a step ends with its epoch, so an epoch's last step may be short; otherwise a step straddles two.
        rows: least rows of a micro-batch; a smaller share is padded.
    """

    size: int
    share: Shares
    by_epoch: bool = False
    rows: int = 1


class MicroBatch(NamedTuple):
    """Rows of one forward pass of a rank, on its device; whether it is the step's `last`.

    Args:
        n_valid: leading rows that count; the others are padding. 0 for an empty share, as all-reduce needs every rank.
        positions: int64 [rows], in the endless order; each row has its own, also in another epoch.
    """

    rows: tuple[Tensor, ...]
    n_valid: int
    last: bool
    positions: np.ndarray


class Step(NamedTuple):
    """All ranks' items of a step, uint64 [n] in order of position, and this rank's micro-batches."""

    items: np.ndarray
    micro_batches: Iterator[MicroBatch]


class _Part(NamedTuple):
    """A micro-batch to read: its number in the step, the step's positions int64 [n] and items, and this rank's share of
    range(n)."""

    number: int
    last: bool
    positions: np.ndarray
    items: np.ndarray
    share: range


class _Delivery(NamedTuple):
    """A micro-batch, its number in the step, the step's first and last position, and its items."""

    number: int
    first: int
    end: int
    items: np.ndarray
    micro_batch: MicroBatch


class Feed:
    """Endless steps over the items of an order.

    Args:
        source, accelerator: the training set and the rank that reads it; None for a replay, without micro-batches.

    Attributes:
        position: first that no step has taken. skipped_ranges: [start, stop) of positions that no step takes.
        order_digest: digest of all items so far (`next_digest`).
        ended_epoch: whether the last step took the last position of the epoch that it began in.
        skipped_end: whether the end of an epoch was skipped before the last step.
        waited: seconds that steps waited for the loader.
    """

    def __init__(
        self,
        order: Order,
        batch: GlobalBatch,
        source: Source | None = None,
        accelerator: Accelerator | None = None,
    ):
        self.order, self.batch, self.source = order, batch, source
        self._accelerator = accelerator
        self.position, self.order_digest = 0, FIRST_DIGEST
        self.skipped_ranges: list[tuple[int, int]] = []
        self.ended_epoch, self.skipped_end, self.waited = False, False, 0.0
        self._loader: Any = None
        self._deliveries: Iterator[_Delivery] = iter(())
        self._next: _Delivery | None = None  # once somebody looked at it

    @property
    def step_size(self) -> int:
        """Items of a step over all ranks; an epoch's last step may have fewer."""
        return self.batch.size

    def state_dict(self) -> FeedState:
        """Position, skipped ranges and order digest."""
        ranges = list(self.skipped_ranges)
        return FeedState(position=self.position, skipped_ranges=ranges, order_digest=self.order_digest)

    def load_state_dict(self, state: FeedState) -> None:
        """Seeks to what `state_dict` returned."""
        self.seek(state.position, state.order_digest, state.skipped_ranges)

    def seek(self, position: int, order_digest: str, skipped_ranges: list[tuple[int, int]]) -> None:
        """Moves to `position` in O(1)."""
        self._stop_loading()
        self.position, self.order_digest = position, order_digest
        self.skipped_ranges = [(start, stop) for start, stop in skipped_ranges]

    def skip_range(self, start: int, stop: int) -> None:
        """Excludes the positions [start, stop), which no step has taken, from all later steps."""
        assert self.position <= start < stop, "positions that a step took cannot be skipped"
        assert not any(a < stop and start < b for a, b in self.skipped_ranges), "positions cannot be skipped twice"
        self._stop_loading()
        self.skipped_ranges.append((start, stop))
        self.order_digest = skipped_digest(self.order_digest, start, stop)

    def next_step(self) -> Step:
        """Advances by a step. Its micro-batches are read lazily, one ahead. They raise RuntimeError if the loader
        delivers another micro-batch than the next one, and UserError if the source cannot be read."""
        if self.source is None:
            positions, items = self.step_from(self.position)
            first, end, micro_batches = int(positions[0]), int(positions[-1]), iter(())
        else:
            delivery = self._first_delivery()
            _, first, end, items, _ = delivery
            self._next, micro_batches = None, self._micro_batches(delivery)
        epoch = first // len(self.order)
        self.skipped_end = epoch > self.position // len(self.order)
        self.position = end + 1
        self.order_digest = next_digest(self.order_digest, items)
        self.ended_epoch = self.epochs > epoch
        return Step(items, micro_batches)

    def first_micro_batch(self) -> MicroBatch:
        """The first micro-batch of the next step, without advancing."""
        return self._first_delivery().micro_batch

    def step_from(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions int64 [n] and items uint64 [n] of the step that begins at `position`, or after the skipped range
        there."""
        positions = self.positions_from(position)
        return positions, self.order.items_at(positions)

    def positions_from(self, position: int) -> np.ndarray:
        """The positions of `step_from`."""
        position = self._next_free(position)
        end = (position // len(self.order) + 1) * len(self.order) if self.batch.by_epoch else 2**63
        parts, wanted = [], self.batch.size
        while wanted and position < end:
            stop = min(position + wanted, end, *(start for start, _ in self.skipped_ranges if start > position))
            parts.append(np.arange(position, stop))
            wanted -= stop - position
            position = self._next_free(stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def epochs(self) -> int:
        """Number of completed epochs, whose positions are all taken or skipped."""
        return self._next_free(self.position) // len(self.order)

    @property
    def consumed(self) -> int:
        """Items trained on so far, over all ranks."""
        return self.state_dict().consumed

    def by_source(self, unit: str, per_item: int) -> dict[str, float]:
        """Row fields of each source (`Order.by_source`); empty for a single source."""
        return self.order.by_source(self.position, self.skipped_ranges, unit, per_item)

    def _next_free(self, position: int) -> int:
        for start, stop in sorted(self.skipped_ranges):
            position = stop if start <= position < stop else position
        return position

    def _first_delivery(self) -> _Delivery:
        if self._loader is None:
            self._loader, self._deliveries = self._load()
        self._next = self._next or self._receive(self._next_free(self.position), 0)
        return self._next

    def _micro_batches(self, delivery: _Delivery) -> Iterator[MicroBatch]:
        while not delivery.micro_batch.last:
            yield delivery.micro_batch
            delivery = self._receive(delivery.first, delivery.number + 1)
        yield delivery.micro_batch

    def _receive(self, first: int, number: int) -> _Delivery:
        """The loader's next micro-batch, of the step that begins at position `first`."""
        started = time.perf_counter()
        delivery = next(self._deliveries)
        self.waited += time.perf_counter() - started
        if (delivery.first, delivery.number) != (first, number):
            found = f"micro-batch {delivery.number} of the step at position {delivery.first}"
            raise RuntimeError(f"the loader delivered {found}, not number {number} of the step at {first}")
        return delivery

    def _load(self) -> tuple[Any, Iterator[_Delivery]]:
        assert self.source is not None
        assert self._accelerator is not None
        ahead = Feed(self.order, self.batch)
        ahead.load_state_dict(self.state_dict())
        parts = _Parts(ahead, self._accelerator.process_index)
        reading = Reading(partial(_read_part, self.source, self.batch.rows), parts)
        loader = prepare_loader(self._accelerator, reading)
        return loader, iter(loader)

    def _stop_loading(self) -> None:
        self._next, self._deliveries = None, iter(())
        if self._loader is not None:
            self._loader.end()
            self._loader = None


class _Parts:
    """One rank's parts of all steps from a feed's position on, endlessly."""

    def __init__(self, feed: Feed, rank: int):
        self._feed, self._rank = feed, rank

    def __iter__(self) -> Iterator[_Part]:
        position = self._feed.position
        while True:
            positions, items = self._feed.step_from(position)
            shares = self._feed.batch.share(len(items))
            for number, ranks in enumerate(shares):
                yield _Part(number, number == len(shares) - 1, positions, items, ranks[self._rank])
            position = int(positions[-1]) + 1


def _read_part(source: Source, rows: int, part: _Part) -> _Delivery:
    """Reads a micro-batch of at least `rows` rows. Padding repeats its last item, or the step's first one."""
    own = part.share or range(1)
    index = np.minimum(np.arange(own.start, own.start + max(rows, len(own))), own.stop - 1)
    read = source.read(part.items[index].astype(np.int64))
    micro_batch = MicroBatch(read, len(part.share), part.last, part.positions[index])
    return _Delivery(part.number, int(part.positions[0]), int(part.positions[-1]), part.items, micro_batch)


def interleaved(processes: int, batch: int) -> Shares:
    """Shares of b items: micro-batch m of rank r has those from (m·W + r)·b on. The last shares are smaller, or empty,
    where b·W does not divide n."""
    return partial(_interleaved, processes, batch)


@cache  # computing the parts takes 0.1 ms for 1,024 ranks
def _interleaved(processes: int, batch: int, n: int) -> list[list[range]]:
    parts = [range(min(start, n), min(start + batch, n)) for start in range(0, n + -n % (batch * processes), batch)]
    return [parts[first : first + processes] for first in range(0, len(parts), processes)]


def split_batch(windows: int, processes: int, largest: int) -> int:
    """Micro-batch b for G windows per step on W processes, with b up to `largest`.

    Where W divides G, b is the largest divisor of G / W. Otherwise a step has `padding_rows`, and b is the size with
    the fewest of them. Candidates make M to 2·M micro-batches per rank, where M is the least possible number. On a tie
    the largest is taken. Raises: UserError if there are more processes than windows.
    """
    if processes > windows:
        hint = f"more than the {windows} windows of a step (train.global_batch_tokens / model.block_size); start fewer"
        raise UserError("processes", processes, hint)
    if windows % processes == 0:
        return next(size for size in divisors(windows // processes) if size <= largest)
    share = -(-windows // processes)  # ceil
    least = -(-share // largest)
    sizes = [-(-share // count) for count in range(least, 2 * least + 1)]
    return min(sizes, key=lambda size: (padding_rows(windows, processes, size), -size))


def padding_rows(windows: int, processes: int, batch: int) -> int:
    """Rows of a step's micro-batches that hold no window: M·W·b - G, where M is the least number that suffices."""
    return -windows % (processes * batch)


def divisors(number: int) -> list[int]:
    """Divisors, the largest first."""
    return [size for size in range(number, 0, -1) if number % size == 0]
