"""The feed: the items of each step, and this rank's micro-batches of them.

A step takes the next positions of the order (`data.order`), without those in `skipped_ranges`. Its
items depend on the seed, the step's size, `position` and `skipped_ranges` alone: not on ranks,
micro-batches or restarts. The items are counted as they are delivered.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from itertools import chain, tee
from typing import Any, NamedTuple, Protocol

import numpy as np
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Generator, Tensor
from torch.utils.data import DataLoader, IterableDataset

from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState


class _Batches(IterableDataset):
    """Batches, in their order, for a DataLoader."""

    def __init__(self, batches: Iterable[Any]):
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def prepare_loader(accelerator: Accelerator, batches: Iterable[Any]) -> Any:
    """A loader of this rank's batches, prepared by Accelerate, which moves them to the device one
    batch ahead."""
    loader = DataLoader(
        _Batches(batches),
        batch_size=None,
        collate_fn=lambda batch: batch,
        pin_memory=accelerator.device.type == "cuda",
        generator=Generator(),  # the default would draw from dropout's generator
    )
    # Accelerator.prepare would keep a reference to every loader, and take the batches for those of
    # all ranks
    return prepare_data_loader(
        loader,
        accelerator.device,
        1,
        0,
        put_on_device=True,
        rng_types=[],
        dispatch_batches=False,
        non_blocking=True,
    )


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


class Step(NamedTuple):
    """All ranks' items of a step, uint64 [n] in order of position, and this rank's
    micro-batches."""

    items: np.ndarray
    micro_batches: Iterator[MicroBatch]


Plan = Iterator[tuple[np.ndarray, np.ndarray]]
"""Positions int64 [n] and items uint64 [n] of each step."""


class Feed:
    """Endless steps over the items of an order.

    Args:
        source, accelerator: the training set and the rank that reads it; None for a replay, without
            micro-batches.

    Attributes:
        state: what a checkpoint has of the feed; each step makes another. `position`: the first
            that no step has taken.
            `skipped_ranges`: [start, stop) of positions that no step takes. `order_digest`: of all
                items so far.
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
        self._accelerator, self._epoch_size = accelerator, len(order)
        self.ended_epoch = False
        self.skipped_end = False
        self.waited = 0.0
        self._loader: Any = None
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
        """Moves to a state in O(1): plans the steps from there on. Reads none of them yet."""
        self.state = state
        if self._loader is not None:
            self._loader.end()
        self._plan, self._micro_batches = self._steps(), iter(())
        if self.source is not None:
            assert self._accelerator is not None
            self._plan, ahead = tee(self._plan)  # steps are read before they are taken
            self._loader = prepare_loader(
                self._accelerator, self._read(ahead, self._accelerator.process_index)
            )
            self._loaded = iter(self._loader)

    def skip_range(self, start: int, stop: int) -> None:
        """Excludes the positions [start, stop), which no step has taken, from all later steps."""
        ranges = self.state.skipped_ranges
        assert self.state.position <= start < stop, "positions that a step took cannot be skipped"
        assert not any(a < stop and start < b for a, b in ranges), (
            "positions cannot be skipped twice"
        )
        digest = skipped_digest(self.state.order_digest, start, stop)
        self.seek(
            self.state.model_copy(
                update={"skipped_ranges": [*ranges, (start, stop)], "order_digest": digest}
            )
        )

    def next_step(self) -> Step:
        """Advances by a step. Its micro-batches are read lazily, one ahead; all are to be taken
        before the next step. They raise UserError if the source cannot be read."""
        assert next(self._micro_batches, None) is None, (
            "the step before has a micro-batch that was not taken"
        )
        positions, items = next(self._plan)
        epoch = int(positions[0]) // self._epoch_size
        digest = next_digest(self.state.order_digest, items)
        self.skipped_end = epoch > self.state.position // self._epoch_size
        self.state = self.state.model_copy(
            update={"position": int(positions[-1]) + 1, "order_digest": digest}
        )
        self.ended_epoch = self.next_position // self._epoch_size > epoch
        self._micro_batches = iter(()) if self.source is None else self._take_step()
        return Step(items, self._micro_batches)

    def first_micro_batch(self) -> MicroBatch:
        """The first micro-batch of the next step, without advancing."""
        first = next(self._loaded)
        self._loaded = chain([first], self._loaded)
        return first

    def _steps(self) -> Plan:
        """The steps from the state on, endlessly."""
        position = self.next_position
        skipped = self.state.skipped_ranges
        while True:
            end = (
                (position // self._epoch_size + 1) * self._epoch_size
                if self.batch.by_epoch
                else 2**63
            )
            parts = []
            wanted = self.batch.size
            while wanted and position < end:
                stop = min(
                    position + wanted, end, *(start for start, _ in skipped if start > position)
                )
                parts.append(np.arange(position, stop))
                wanted -= stop - position
                position = self._next_free(stop)
            positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
            yield positions, self.order.items_at(positions)

    def _read(self, steps: Plan, rank: int) -> Iterator[MicroBatch]:
        """Reads a rank's micro-batches of the steps. Padding repeats the last item, or the step's
        first one."""
        assert self.source is not None
        for positions, items in steps:
            shares = self.batch.share(len(items))
            for number, ranks in enumerate(shares, 1):
                own = ranks[rank] or range(1)
                size = max(self.batch.rows, len(own))
                index = np.minimum(np.arange(own.start, own.start + size), own.stop - 1)
                rows = self.source.read(items[index].astype(np.int64))
                yield MicroBatch(rows, len(ranks[rank]), number == len(shares), positions[index])

    def _take_step(self) -> Iterator[MicroBatch]:
        """The micro-batches of one step, from the loader."""
        is_last = False
        while not is_last:
            started = time.perf_counter()
            batch = next(self._loaded)
            self.waited += time.perf_counter() - started
            is_last = batch.last
            yield batch

    @property
    def next_position(self) -> int:
        """The first position of the next step: after those that steps took, and after the skipped
        ranges there."""
        return self._next_free(self.state.position)

    @property
    def epochs(self) -> int:
        """Number of completed epochs, whose positions are all taken or skipped."""
        return self.next_position // self._epoch_size

    def _next_free(self, position: int) -> int:
        for start, stop in sorted(self.state.skipped_ranges):
            position = stop if start <= position < stop else position
        return position


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
        hint = f"more than the {windows} windows of a step (train.global_batch_tokens / model.block_size); start fewer"
        raise UserError("processes", processes, hint)
    share = -(-windows // processes)  # ceil
    if windows % processes == 0:
        return next(size for size in range(min(share, largest), 0, -1) if share % size == 0)
    least = -(-share // largest)
    sizes = [-(-share // count) for count in range(least, 2 * least + 1)]
    return min(sizes, key=lambda size: (-windows % (processes * size), -size))
