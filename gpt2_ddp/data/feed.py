"""The feed: the items of each step, and this rank's micro-batches of them.

    FeedState ── plan_step ─▶ StepItems       positions and items of one step, of all ranks
        ▲                        │
        │ next_step takes it:    │ Feed._read_ahead calls plan_step, too, and reads this rank's
        │ the next position      │ share of the items, a micro-batch at a time
        │ and digest             ▼
        └───── Step ◀────── prepare_loader    moves the rows to the device, one micro-batch ahead

A step takes the next positions of the order (`data.order`), without those in `skipped_ranges`. Its
items depend on the seed, the step's size, `position` and `skipped_ranges` alone: not on ranks,
micro-batches or restarts. `Feed.state` alone says where the data stand: reading ahead does not
change it, and the items count when their step is taken.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# (accelerate has no types)

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class _Batches(IterableDataset[T]):
    """Batches, in their order, for a DataLoader."""

    def __init__(self, batches: Iterable[T]):
        self._batches = batches

    def __iter__(self) -> Iterator[T]:
        return iter(self._batches)


class Loader(Protocol[T_co]):
    """A DataLoader that Accelerate prepared."""

    def __iter__(self) -> Iterator[T_co]:
        """The batches, on the device."""
        ...

    def end(self) -> None:
        """Removes the loader from Accelerate's list of those that are being read."""
        ...


def _unchanged(batch: T) -> T:
    return batch


def prepare_loader(accelerator: Accelerator, batches: Iterable[T]) -> Loader[T]:
    """A loader of this rank's batches, prepared by Accelerate, which moves them to the device one
    batch ahead."""
    loader = DataLoader(
        _Batches(batches),
        batch_size=None,
        collate_fn=_unchanged,
        pin_memory=accelerator.device.type == "cuda",
        generator=Generator(),  # the default would draw from dropout's generator
    )
    # Accelerator.prepare would keep a reference to every loader, and take the batches for those of
    # all ranks
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1,
        process_index=0,
        put_on_device=True,
        rng_types=[],
        dispatch_batches=False,
        non_blocking=True,
    )
    return cast(Loader[T], prepared)


class Source(Protocol):
    """A training set: items that are read by number."""

    def read(self, items: np.ndarray) -> tuple[Tensor, ...]:
        """Rows [b, ...], on the CPU, of the items int64 [b]."""
        ...


Shares = Callable[[int], list[list[range]]]
"""Partition of a step's n items: [m][r] is the part of range(n) in micro-batch m of rank r."""


class GlobalBatch(NamedTuple):
    """Items of a step, over all ranks: their number and their partition.

    Args:
        by_epoch: a step ends with its epoch, so an epoch's last step may be short; otherwise a step
            straddles two.
        rows: least rows of a micro-batch; a smaller share is padded.
    """

    size: int
    share: Shares
    by_epoch: bool = False
    rows: int = 1


class MicroBatch(NamedTuple):
    """Rows of one forward pass of a rank, on its device; whether it is the step's `last`.

    Args:
        n_valid: leading rows that count; the others are padding. 0 for an empty share, as
            all-reduce needs every rank.
        positions: int64 [rows], in the endless order; each row has its own, also in another epoch.
    """

    rows: tuple[Tensor, ...]
    n_valid: int
    last: bool
    positions: np.ndarray


class StepItems(NamedTuple):
    """All ranks' items of a step.

    Attributes:
        positions: int64 [n], ascending, in the endless order.
        items: uint64 [n], at these positions.
    """

    positions: np.ndarray
    items: np.ndarray

    @property
    def end(self) -> int:
        """The position after the step's last one."""
        return int(self.positions[-1]) + 1


class Step(NamedTuple):
    """All ranks' items of a step, uint64 [n] in order of position, and this rank's
    micro-batches."""

    items: np.ndarray
    micro_batches: Iterator[MicroBatch]


NO_END = 2**63
"""A position that no training reaches."""


def plan_step(order: Order, batch: GlobalBatch, state: FeedState) -> StepItems:
    """The step that follows a state: the next positions that are not skipped, up to `batch.size`,
    and with `by_epoch` up to the end of an epoch. Depends on the arguments alone."""
    skipped = state.skipped_ranges
    position = next_free(state.position, skipped)
    end = NO_END
    if batch.by_epoch:
        end = (position // len(order) + 1) * len(order)
    wanted = batch.size
    parts: list[np.ndarray] = []
    while wanted and position < end:
        stop = min(position + wanted, end, *(start for start, _ in skipped if start > position))
        parts.append(np.arange(position, stop))
        wanted -= stop - position
        position = next_free(stop, skipped)
    positions = np.concatenate(parts)
    return StepItems(positions, order.items_at(positions))


def next_free(position: int, skipped_ranges: Iterable[tuple[int, int]]) -> int:
    """The first position from this one on that is in none of the ranges."""
    for start, stop in sorted(skipped_ranges):
        if start <= position < stop:
            position = stop
    return position


class Feed:
    """Endless steps over the items of an order.

    Args:
        source, accelerator: the training set and the rank that reads it; None for a replay, without
            micro-batches.

    Attributes:
        state: what a checkpoint has of the feed; each step makes another. `position`: the first
            that no step has taken.
            `skipped_ranges`: [start, stop) of positions that no step takes.
            `order_digest`: of all items so far.
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
        self.order = order
        self.batch = batch
        self.source = source
        self._accelerator = accelerator
        self.ended_epoch = False
        self.skipped_end = False
        self.waited = 0.0
        self._loader: Loader[MicroBatch] | None = None
        self.seek(FeedState())

    @property
    def step_size(self) -> int:
        """Items of a step over all ranks; an epoch's last step may have fewer."""
        return self.batch.size

    @property
    def micro_batches(self) -> tuple[int, int]:
        """Each rank's number of micro-batches in a step, and the rows of the largest."""
        shares = self.batch.share(self.batch.size)
        return len(shares), max(self.batch.rows, *(len(part) for ranks in shares for part in ranks))

    def seek(self, state: FeedState) -> None:
        """Moves to a state in O(1). Reads no items yet."""
        self.state = state
        self._is_taken = True  # the last step has no micro-batch left
        self._peeked: MicroBatch | None = None
        if self._loader is not None:
            self._loader.end()
        if self.source is not None:
            assert self._accelerator is not None
            ahead = self._read_ahead(self.source, self._accelerator.process_index, state)
            self._loader = prepare_loader(self._accelerator, ahead)
            self._loaded = iter(self._loader)

    def skip_range(self, start: int, stop: int) -> None:
        """Excludes the positions [start, stop), which no step has taken, from all later steps."""
        ranges = self.state.skipped_ranges
        assert self.state.position <= start < stop, "positions that a step took cannot be skipped"
        assert not any(a < stop and start < b for a, b in ranges), (
            "positions cannot be skipped twice"
        )
        skipped = {
            "skipped_ranges": [*ranges, (start, stop)],
            "order_digest": skipped_digest(self.state.order_digest, start, stop),
        }
        self.seek(self.state.model_copy(update=skipped))

    def next_step(self) -> Step:
        """Advances by a step. Its micro-batches are read lazily, one ahead; all are to be taken
        before the next step. They raise UserError if the source cannot be read."""
        assert self._is_taken, "the step before has a micro-batch that was not taken"
        step = plan_step(self.order, self.batch, self.state)
        epoch_size = len(self.order)
        epoch = int(step.positions[0]) // epoch_size
        self.skipped_end = epoch > self.state.position // epoch_size
        taken = {
            "position": step.end,
            "order_digest": next_digest(self.state.order_digest, step.items),
        }
        self.state = self.state.model_copy(update=taken)
        self.ended_epoch = self.epochs > epoch
        self._is_taken = self.source is None
        return Step(step.items, self._take_step())

    def first_micro_batch(self) -> MicroBatch:
        """The first micro-batch of the next step, without advancing."""
        if self._peeked is None:
            self._peeked = next(self._loaded)
        return self._peeked

    def _take_step(self) -> Iterator[MicroBatch]:
        """The micro-batches of one step, from the loader."""
        while not self._is_taken:
            started = time.perf_counter()
            batch = self.first_micro_batch()
            self.waited += time.perf_counter() - started
            self._peeked = None
            self._is_taken = batch.last
            yield batch

    def _read_ahead(self, source: Source, rank: int, state: FeedState) -> Iterator[MicroBatch]:
        """Reads a rank's micro-batches of all steps from a state on. Padding repeats the last item,
        or the step's first one."""
        while True:
            step = plan_step(self.order, self.batch, state)
            shares = self.batch.share(len(step.items))
            for number, ranks in enumerate(shares, 1):
                share = ranks[rank] or range(1)
                size = max(self.batch.rows, len(share))
                index = np.minimum(np.arange(share.start, share.start + size), share.stop - 1)
                rows = source.read(step.items[index].astype(np.int64))
                is_last = number == len(shares)
                yield MicroBatch(rows, len(ranks[rank]), is_last, step.positions[index])
            state = state.model_copy(update={"position": step.end})

    @property
    def next_position(self) -> int:
        """The first position of the next step: after those that steps took, and after the skipped
        ranges there."""
        return next_free(self.state.position, self.state.skipped_ranges)

    @property
    def epochs(self) -> int:
        """Number of completed epochs, whose positions are all taken or skipped."""
        return self.next_position // len(self.order)


@cache  # computing the parts takes 0.1 ms for 1,024 ranks
def interleaved(processes: int, batch: int, n: int) -> list[list[range]]:
    """Shares of b of the n items: micro-batch m of rank r has those from (m·W + r)·b on. The last
    shares are smaller, or empty, where b·W does not divide n. (A `Shares`, once `partial` has the
    first two.)"""
    parts = [
        range(min(start, n), min(start + batch, n))
        for start in range(0, n + -n % (batch * processes), batch)
    ]
    return [parts[first : first + processes] for first in range(0, len(parts), processes)]


def split_batch(windows: int, processes: int, largest: int) -> int:
    """Micro-batch b for G windows per step on W processes, with b up to `largest`.

    Where W divides G, b is the largest divisor of G / W. Otherwise rows of a step hold no window,
    and b is the size with the fewest of these. Candidates make M to 2·M micro-batches per rank,
    where M is the least possible number. On a tie the largest is taken. Raises: UserError if there
    are more processes than windows.
    """
    if processes > windows:
        hint = (
            f"more than the {windows} windows of a step "
            "(train.global_batch_tokens / model.block_size); start fewer"
        )
        raise UserError("processes", processes, hint)
    share = -(-windows // processes)  # ceil
    if windows % processes == 0:
        return next(size for size in range(min(share, largest), 0, -1) if share % size == 0)
    least = -(-share // largest)
    sizes = [-(-share // count) for count in range(least, 2 * least + 1)]
    return min(sizes, key=lambda size: (-windows % (processes * size), -size))
