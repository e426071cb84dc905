"""The feed: which items each step trains on, and this rank's micro-batches of them.

It alone knows where the data stand. A step takes the next positions of the order (`data.order`) from `position` on that
no range in `skipped_ranges` holds. They depend on the seed, the step's size and these two alone: not on ranks,
micro-batches, loader workers or restarts. What the loader delivers is compared with what the order asks for.
"""

import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gpt2_ddp.data.order import FIRST_DIGEST, Order, next_digest, skipped_digest
from gpt2_ddp.distributed.workers import worker_context
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from gpt2_ddp.data.mixture import MixedOrder

T = TypeVar("T")


def prepare_loader(
    accelerator: Accelerator, dataset: Dataset, batch_sampler: Any, even_batches: bool, **options: Any
) -> Any:
    """The batches that `dataset.__getitems__` reads whole, number k for rank k mod W, on its device; or what `unwrap`
    raises, which each goes through.

    Args:
        batch_sampler: all ranks' batches.
        even_batches: fills up the last ones with items seen before, which `gather_for_metrics` drops.
        options: DataLoader's.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    if world > 1:
        batch_sampler = BatchSamplerShard(batch_sampler, world, rank, even_batches=even_batches)
    loader = DataLoader(
        ErrorsAsItems(dataset),
        batch_sampler=batch_sampler,
        collate_fn=as_read,
        pin_memory=accelerator.device.type == "cuda",
        generator=torch.Generator(),  # or starting it would draw from the generator that dropout uses
        **options,
    )
    # not the accelerator's own method, which would hold every loader that a seek has left; and as if for one process,
    # since it imports `datasets` and pandas for several, to find out that these are not theirs: a second on each rank
    return prepare_data_loader(loader, accelerator.device, 1, 0, put_on_device=True, rng_types=[], non_blocking=True)


class ErrorsAsItems(Dataset):
    """The same, but that a user's mistake is read like a batch: a loader's worker could raise its text alone."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, items: Any) -> Any:
        try:
            return self.dataset.__getitems__(items)
        except UserError as error:
            return error


def unwrap(read: T | UserError) -> T:
    """What was read. Raises: UserError where that was one."""
    if isinstance(read, UserError):
        raise read
    return read


def as_read(batch: Any) -> Any:
    """For a loader whose data set reads whole batches."""
    return batch


class Source(Protocol):
    """What can be trained on: items, read by their numbers. A replay of the order reads nothing, and needs a range."""

    def __len__(self) -> int: ...

    def read(self, items: np.ndarray) -> tuple[Tensor, ...]:
        """Rows [b, ...], on the CPU, of the items int64 [b]."""
        ...


Shares = Callable[[int], list[list[range]]]
"""How the n items of a step are shared out: [m][r] is the part of range(n) that rank r computes in micro-batch m."""


class MicroBatch(NamedTuple):
    """What one rank computes at a time: rows of the source, on its device.

    Args:
        own: the first so many count. A rank whose share is empty gets a row all the same, as all-reduce waits for
            everybody, and this is 0.
        last: the step has no more of them.
    """

    rows: tuple[Tensor, ...]
    n_valid: int
    last: bool


class Step(NamedTuple):
    """The items uint64 [n] of a step, of all ranks, in order of position; and this rank's micro-batches of them."""

    items: np.ndarray
    micro_batches: Iterator[MicroBatch]


class Feed:
    """Endless steps over the items of a source.

    Args:
        source: the same on every rank; a rank reads only its own items.
        seed: of the order.
        step_size: items per step, over all ranks.
        share: who computes which of them.
        accelerator: whose rank reads; None for a replay of the order, which has no micro-batches.
        by_epoch: a step ends with its epoch, so that an epoch's last one may be short; otherwise it straddles two.
        workers: loader processes; 0 reads in this one.
        order: of a mixture's items; None: the one of a single source.
    """

    def __init__(
        self,
        source: Source | range,
        seed: int,
        step_size: int,
        share: Shares,
        accelerator: Accelerator | None = None,
        by_epoch: bool = False,
        workers: int = 0,
        order: "Order | MixedOrder | None" = None,
    ):
        self.source, self.step_size, self.share = source, step_size, share
        self.order = order or Order(seed, len(source))
        self.position, self.order_digest = 0, FIRST_DIGEST
        self.ended_epoch = False  # by the last step: of the epoch that it began in, no position is left
        self.skipped_ranges: list[tuple[int, int]] = []
        self.waited = 0.0  # seconds, for the loader
        self._accelerator, self._by_epoch, self._workers = accelerator, by_epoch, workers
        self._batches: Iterator[tuple[tuple[Tensor, ...], np.ndarray]] | None = None
        self._end_loading: Callable[[], None] = lambda: None
        self._first: MicroBatch | None = None

    def seek(self, position: int, order_digest: str, passed: list[tuple[int, int]]) -> None:
        """Goes on from `position`, whatever was before; nothing in between is visited."""
        self._stop_loading()
        self.position, self.order_digest, self.skipped_ranges = position, order_digest, [(a, b) for a, b in passed]

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, for checkpoints: `position`, `passed` (the skipped ranges) and `order_digest`."""
        return {"position": self.position, "passed": list(self.skipped_ranges), "order_digest": self.order_digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Seeks to what `state_dict` returned. A missing field takes its default."""
        self.seek(state.get("position", 0), state.get("order_digest", FIRST_DIGEST), state.get("passed", []))

    def skip_range(self, start: int, stop: int) -> None:
        """Leaves the positions [start, stop), which no step has taken, out of all steps to come."""
        assert self.position <= start < stop, "what was trained on cannot be passed over"
        assert not any(a < stop and start < b for a, b in self.skipped_ranges), "nor can the same twice"
        self._stop_loading()
        self.skipped_ranges.append((start, stop))
        self.order_digest = skipped_digest(self.order_digest, start, stop)

    def next_step(self) -> Step:
        """Takes the next step's items. Its micro-batches are read as they are asked for, one fetched ahead.

        Raises:
            RuntimeError: from the micro-batches, when the loader delivers other items than the order's.
            UserError: from them too, when the source cannot be read any more.
        """
        begun, positions = self.position, self.positions_from(self.position)
        items = self.order.items_at(positions)
        self.position = int(positions[-1]) + 1
        self.order_digest = next_digest(self.order_digest, items)
        self.ended_epoch = self.epochs > int(positions[0]) // len(self.order)
        return Step(items, self._deliver(items, begun))

    def first_micro_batch(self) -> MicroBatch:
        """The micro-batch that the next step begins with; the step gets it all the same."""
        if self._first is None:
            self._first = next(self._deliver(self.order.items_at(self.positions_from(self.position)), self.position))
        return self._first

    def positions_from(self, position: int) -> np.ndarray:
        """Positions int64 [n] of the step that begins at `position`, or behind what is passed over there."""
        position = self._free(position)
        end = (position // len(self.order) + 1) * len(self.order) if self._by_epoch else 2**63
        parts, wanted = [], self.step_size
        while wanted and position < end:
            stop = min(position + wanted, end, *(start for start, _ in self.skipped_ranges if start > position))
            parts.append(np.arange(position, stop))
            wanted -= stop - position
            position = self._free(stop)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @property
    def epochs(self) -> int:
        """Whole epochs of which no position is left."""
        return self._free(self.position) // len(self.order)

    @property
    def consumed(self) -> int:
        """Items trained on so far, over all ranks."""
        return self.position - sum(max(min(stop, self.position) - start, 0) for start, stop in self.skipped_ranges)

    def by_source(self, unit: str, per_item: int) -> dict[str, float]:
        """What a row says of a mixture's sources (`MixedOrder.by_source`); nothing, where there is one."""
        if isinstance(self.order, Order):
            return {}
        return self.order.by_source(self.position, self.skipped_ranges, unit, per_item)

    def consumed_after(self, steps: int) -> int:
        """Items that so many steps train on, with nothing passed over."""
        if not self._by_epoch:
            return steps * self.step_size
        epochs, rest = divmod(steps, ceil(len(self.order) / self.step_size))
        return epochs * len(self.order) + rest * self.step_size

    @property
    def smallest_micro_batch(self) -> int:
        """Rows of the smallest one of an epoch, of all ranks'."""
        n, size = len(self.order), self.step_size
        steps = {min(size, n), (n - 1) % size + 1} if self._by_epoch else {size}
        return min(len(own) or 1 for step in steps for ranks in self.share(step) for own in ranks)

    def _free(self, position: int) -> int:
        for start, stop in sorted(self.skipped_ranges):
            position = stop if start <= position < stop else position
        return position

    def _deliver(self, items: np.ndarray, position: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of the step that begins at `position`."""
        assert self._accelerator is not None, "a replay reads nothing"
        shares = self.share(len(items))
        for number, ranks in enumerate(shares, 1):
            if self._first is not None:
                first, self._first = self._first, None
                yield first
                continue
            own = ranks[self._accelerator.process_index]
            self._batches = self._batches or self._load(self._accelerator, position)
            asked = time.perf_counter()
            rows, delivered = unwrap(next(self._batches))
            self.waited += time.perf_counter() - asked
            if not np.array_equal(delivered, _part(items, own)):
                raise RuntimeError(f"micro-batch {number} holds items {delivered}, not the order's {_part(items, own)}")
            yield MicroBatch(rows, len(own), last=number == len(shares))

    def _load(self, accelerator: Accelerator, position: int) -> Iterator[tuple[tuple[Tensor, ...], np.ndarray]]:
        prepared = prepare_loader(
            accelerator,
            _Positions(self.source, self.order),
            _Ahead(self, position),
            even_batches=False,
            num_workers=self._workers,
            prefetch_factor=4 if self._workers else None,
            multiprocessing_context=worker_context() if self._workers else None,
        )
        self._end_loading = prepared.end
        return iter(prepared)

    def _stop_loading(self) -> None:
        self._batches = self._first = None  # the last reference: the loader's workers end
        self._end_loading()


class _Positions(Dataset):
    """Map-style: positions int64 [b] -> (rows of their items, the items uint64 [b])."""

    def __init__(self, source: Source | range, order: "Order | MixedOrder"):
        self.source = source
        self.order = order

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, positions: np.ndarray) -> tuple[tuple[Tensor, ...], np.ndarray]:
        assert not isinstance(self.source, range), "a replay reads nothing"
        items = self.order.items_at(positions)
        return self.source.read(items.astype(np.int64)), items


class _Ahead:
    """Batch sampler: endless positions of micro-batches from `position` on, all ranks' in turn.
    Accelerate gives number k to rank k mod W. It runs ahead of the steps, by what the loader fetches in advance."""

    drop_last = True

    def __init__(self, feed: Feed, position: int):
        self.feed = feed
        self.position = position

    def __iter__(self) -> Iterator[np.ndarray]:
        position = self.position
        while True:
            positions = self.feed.positions_from(position)
            for ranks in self.feed.share(len(positions)):
                yield from (_part(positions, own) for own in ranks)
            position = int(positions[-1]) + 1


def _part(of_step: np.ndarray, own: range) -> np.ndarray:
    """A rank's part of a step; the first of the step stands in where it is empty."""
    return of_step[own.start : own.stop] if own else of_step[:1]


def interleaved(processes: int, batch: int) -> Shares:
    """Micro-batch m of rank r is items (m·W + r)·b and the b - 1 after it, of a step of which b·W is a divisor: every
    micro-batch has the same shape."""

    @cache  # of all ranks' parts, twice a step: 0.1 ms each time with 1,024 of them
    def share(n: int) -> list[list[range]]:
        starts = range(0, n, batch)
        parts = [range(start, start + batch) for start in starts]
        return [parts[first : first + processes] for first in range(0, len(parts), processes)]

    return share


def contiguous(processes: int, largest: int) -> Shares:
    """Rank r takes one stretch of the step, in micro-batches of at most `largest` items. Stretches differ by at most
    one item, and so do a rank's micro-batches; in a short step they may be empty."""

    def share(n: int) -> list[list[range]]:
        parts = ceil(ceil(n / processes) / largest)
        ranks = [_split(range(n * r // processes, n * (r + 1) // processes), parts) for r in range(processes)]
        return [list(micro_batch) for micro_batch in zip(*ranks, strict=True)]

    return share


def _split(whole: range, parts: int) -> list[range]:
    ends = [len(whole) * part // parts for part in range(parts + 1)]
    return [whole[start:stop] for start, stop in pairwise(ends)]


def split_batch(global_windows: int, processes: int, micro_batch_size: int) -> int:
    """Micro-batch b for G windows a step: the largest divisor of the rank's share G / W that is at most
    `micro_batch_size`, so that every forward pass has one shape.

    Raises:
        UserError: when W does not divide G.
    """
    if global_windows % processes:
        hint = f"does not divide the global batch of {global_windows} windows (train.global_batch_tokens / "
        raise UserError("processes", processes, hint + f"model.block_size); use {_divisors(global_windows)} processes")
    share = global_windows // processes
    return next(b for b in divisors(share) if b <= micro_batch_size)


def divisors(share: int) -> list[int]:
    """The largest first."""
    return [size for size in range(share, 0, -1) if share % size == 0]


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 64) + 1) if n % d == 0)
