"""The feed: the items of each step, and this rank's micro-batches of them.

A step takes the next positions of the order (`data.order`), without those in `skipped_ranges`. Its items depend on the
seed, the step's size, `position` and `skipped_ranges` alone: not on ranks, micro-batches, loader workers or restarts.
The feed compares each delivered batch with the order.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FIRST_DIGEST, FeedState

if TYPE_CHECKING:
    from gpt2_ddp.data.mixture import MixedOrder

T = TypeVar("T")


def prepare_loader(
    accelerator: Accelerator, batches: "Batches", batch_sampler: Any, even_batches: bool, workers: int
) -> Any:
    """A loader of what `batches` reads for each batch of indices: batch k goes to rank k mod W, on its device.

    Args:
        batch_sampler: indices of the batches of all ranks.
        even_batches: pads the last ones with earlier items, which `gather_for_metrics` drops.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    if world > 1:
        batch_sampler = BatchSamplerShard(batch_sampler, world, rank, even_batches=even_batches)
    loader = make_loader(batches, batch_sampler, workers, pin_memory=accelerator.device.type == "cuda")
    # Accelerator.prepare would keep a reference to every loader. For several processes, prepare_data_loader
    # imports `datasets` and pandas, 1 s on each rank; here the batches are sharded already.
    return prepare_data_loader(loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], non_blocking=True)


def make_loader(batches: "Batches", batch_sampler: Any, workers: int, pin_memory: bool = False) -> DataLoader:
    """A loader in this process, whose batches have to pass through `unwrap`. `workers`: processes that read; 0: this
    one reads."""
    options: dict[str, Any] = {}
    if workers:
        from gpt2_ddp.distributed.workers import worker_context

        context = worker_context(__name__)
        options = {"num_workers": workers, "prefetch_factor": 4, "multiprocessing_context": context}
    no_draw = torch.Generator()  # the default would draw from dropout's generator
    return DataLoader(
        batches, batch_sampler=batch_sampler, collate_fn=_same, pin_memory=pin_memory, generator=no_draw, **options
    )


class Batches(Dataset):
    """A data set that reads whole batches: `read` of a batch of indices. A UserError is returned as a batch, since a
    worker's exception would keep only its text. `length`: number of indices; 0: endless."""

    def __init__(self, read: Callable[[Any], Any], length: int = 0):
        self.read, self.length = read, length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: Any) -> Any:
        try:
            return self.read(indices)
        except UserError as error:
            return error


def _same(batch: Any) -> Any:
    return batch


def unwrap(batch: T | UserError) -> T:
    """The batch. Raises: UserError where it is one."""
    if isinstance(batch, UserError):
        raise batch
    return batch


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


class Feed:
    """Endless steps over the items of an order.

    Args:
        source, accelerator: the training set and the rank that reads it; None for a replay, without micro-batches.
        workers: loader processes; 0 reads in this process.

    Attributes:
        position: first that no step has taken. skipped_ranges: [start, stop) of positions that no step takes.
        order_digest: digest of all items so far (`next_digest`).
        ended_epoch: whether the last step took the last position of the epoch that it began in.
        skipped_end: whether the end of an epoch was skipped before the last step.
        waited: seconds that steps waited for the loader.
    """

    def __init__(
        self,
        order: "Order | MixedOrder",
        batch: GlobalBatch,
        source: Source | None = None,
        accelerator: Accelerator | None = None,
        workers: int = 0,
    ):
        self.order, self.source, self._accelerator, self.workers = order, source, accelerator, workers
        self.step_size, self.share, self.by_epoch, self.rows = batch
        self.position, self.order_digest = 0, FIRST_DIGEST
        self.skipped_ranges: list[tuple[int, int]] = []
        self.ended_epoch, self.skipped_end, self.waited = False, False, 0.0
        self._batches: Iterator[tuple[tuple[Tensor, ...], np.ndarray]] | None = None
        self._end_loading: Callable[[], None] = lambda: None
        self._first: MicroBatch | None = None
        self._ahead: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by position, the steps that the loader has begun

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
        delivers items other than the order's, and UserError if the source cannot be read."""
        positions, items = self._ahead.pop(self.position, None) or self._step_from(self.position)
        self.skipped_end = int(positions[0]) // len(self.order) > self.position // len(self.order)
        self.position = int(positions[-1]) + 1
        self.order_digest = next_digest(self.order_digest, items)
        self.ended_epoch = self.epochs > int(positions[0]) // len(self.order)
        return Step(items, self._deliver(positions, items))

    def first_micro_batch(self) -> MicroBatch:
        """The first micro-batch of the next step, without advancing."""
        if self._first is None:
            self._first = next(self._deliver(*self._step_from(self.position)))
        return self._first

    def _step_from(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        positions = self.positions_from(position)
        return positions, self.order.items_at(positions)

    def positions_from(self, position: int) -> np.ndarray:
        """Positions int64 [n] of the step that begins at `position`, or after the skipped range there."""
        position = self._next_free(position)
        end = (position // len(self.order) + 1) * len(self.order) if self.by_epoch else 2**63
        parts, wanted = [], self.step_size
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
        """Row fields of each source (`MixedOrder.by_source`); empty for a single source."""
        if isinstance(self.order, Order):
            return {}
        return self.order.by_source(self.position, self.skipped_ranges, unit, per_item)

    def padded_part(self, values: np.ndarray, part: range) -> np.ndarray:
        """The part of a step's values in a micro-batch, ascending as they are. Padding repeats the last one, or the
        step's first for an empty part."""
        own = values[part.start : part.stop] if part else values[:1]
        missing = self.rows - len(own)
        return np.append(own, np.repeat(own[-1:], missing)) if missing > 0 else own

    def _next_free(self, position: int) -> int:
        for start, stop in sorted(self.skipped_ranges):
            position = stop if start <= position < stop else position
        return position

    def _deliver(self, positions: np.ndarray, items: np.ndarray) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the step that takes `positions`."""
        assert self._accelerator is not None, "a replay reads nothing"
        shares = self.share(len(items))
        for number, ranks in enumerate(shares, 1):
            if self._first is not None:
                first, self._first = self._first, None
                yield first
                continue
            part = ranks[self._accelerator.process_index]
            self._batches = self._batches or self._load(self._accelerator, int(positions[0]))
            started = time.perf_counter()
            rows, delivered = unwrap(next(self._batches))
            self.waited += time.perf_counter() - started
            if not np.array_equal(delivered, expected := self.padded_part(items, part)):
                raise RuntimeError(f"micro-batch {number} holds items {delivered}, not the order's {expected}")
            yield MicroBatch(rows, len(part), number == len(shares), self.padded_part(positions, part))

    def _load(self, accelerator: Accelerator, position: int) -> Iterator[tuple[tuple[Tensor, ...], np.ndarray]]:
        assert self.source is not None, "a replay reads nothing"
        batches, sampler = Batches(partial(_read_items, self.source)), _BatchSampler(self, position)
        prepared = prepare_loader(accelerator, batches, sampler, even_batches=False, workers=self.workers)
        self._end_loading = prepared.end
        return iter(prepared)

    def _stop_loading(self) -> None:
        self._ahead.clear()
        self._batches = self._first = None  # drops the last reference, which ends the loader's workers
        self._end_loading()


def _read_items(source: Source, items: np.ndarray) -> tuple[tuple[Tensor, ...], np.ndarray]:
    """Rows of the items uint64 [b], and the items."""
    return source.read(items.astype(np.int64)), items


class _BatchSampler:
    """The items of all ranks' micro-batches in turn, endlessly, from `position` on, as Accelerate shards them. The
    loader runs ahead of the steps, so these take their positions and items from here."""

    drop_last = True

    def __init__(self, feed: Feed, position: int):
        self.feed, self.position = feed, position

    def __iter__(self) -> Iterator[np.ndarray]:
        feed, position = self.feed, self.position
        while True:
            positions, items = feed._ahead[position] = feed._step_from(position)
            for ranks in feed.share(len(items)):
                yield from (feed.padded_part(items, part) for part in ranks)
            position = int(positions[-1]) + 1


def interleaved(processes: int, batch: int) -> Shares:
    """Shares of b items: micro-batch m of rank r has those from (m·W + r)·b on. The last shares are smaller, or empty,
    where b·W does not divide n."""

    @cache  # computing the parts takes 0.1 ms for 1,024 ranks, twice a step
    def share(n: int) -> list[list[range]]:
        parts = [range(min(start, n), min(start + batch, n)) for start in range(0, n + -n % (batch * processes), batch)]
        return [parts[first : first + processes] for first in range(0, len(parts), processes)]

    return share


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
