"""Several sources as one order: the source and the window of each position.

The order is cut into blocks of M = 1,000 positions. In a block each source has a whole number of
windows, by the weights of the block's phase; a keyed permutation shuffles the block. The k-th
position of a source, over all blocks, takes item k of the source's own endless order. So the order
is a pure function of seed and position. It is the `Permutation` of source 0 while all weight is on
that. docs/verify.md specifies it.
"""
# pyright: reportUnknownMemberType=false
# (torch.from_numpy has no types)

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2_ddp.config.training import WINDOWS_PER_BLOCK as BLOCK
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.order import Order, Permutation, Uses
from gpt2_ddp.data.shards import Windows, count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState, Mixture, State

SOURCE_BITS = 48
"""An item of a mixture is source · 2^48 + the source's own item, so those of source 0 are its
own."""
CACHED = 8
"""Cached blocks; most steps need one or two."""


class Phase(NamedTuple):
    """Weights from position `begins` on, a multiple of M. They sum up to 1."""

    begins: int
    weights: tuple[Fraction, ...]


class MixedOrder(Order):
    """The endless order of the windows of several sources, with O(1) seek.

    Its length is an epoch: all windows of the first phase's sources. Sources that come later do not
    change it.

    Args:
        windows: number of windows of each source.
        names: name of each source in rows.
        shifts: of each source's epochs, as of `Permutation`.
    """

    def __init__(
        self,
        seed: int,
        windows: Sequence[int],
        phases: Sequence[Phase],
        names: Sequence[str],
        shifts: int = 1,
    ):
        self.phases = phases
        self.names = names
        # source 0 has the order of a run without a mixture, so that a run may add sources
        streams = ["", *(f"{number}/" for number in range(1, len(windows)))]
        self._orders = [
            Permutation(seed, n, stream, shifts) for n, stream in zip(windows, streams, strict=True)
        ]
        self._slots = Permutation(seed, BLOCK, "block/")
        self._length = sum(
            n for n, weight in zip(windows, phases[0].weights, strict=True) if weight
        )
        self._block = lru_cache(CACHED)(self._compute_block)

    def __len__(self) -> int:
        return self._length

    def items_at(self, positions: np.ndarray) -> np.ndarray:
        numbers, offsets = np.divmod(positions, BLOCK)
        sources = np.empty(len(positions), np.int64)
        uses = np.empty(len(positions), np.int64)
        for number in _distinct(numbers):
            in_block = numbers == number
            block_sources, block_uses = self._block(number)
            sources[in_block] = block_sources[offsets[in_block]]
            uses[in_block] = block_uses[offsets[in_block]]
        items = np.empty(len(positions), np.uint64)
        for source in _distinct(sources):
            of_source = sources == source
            own_items = self._orders[source].items_at(uses[of_source])
            items[of_source] = own_items | (source << SOURCE_BITS)
        return items

    def uses(self, position: int) -> np.ndarray:
        """Positions of each source before `position`: int64 [sources]."""
        number, offset = divmod(position, BLOCK)
        before = self._uses_before(number)
        return before + np.bincount(self._block(number)[0][:offset], minlength=len(before))

    def uses_of(self, items: np.ndarray, end: int) -> Uses:
        """As of `Order`, by the inverse of each source's order. The block of a use is found by
        halving, as the uses before a block never fall."""
        sources, own_items = np.divmod(items.astype(np.uint64), np.uint64(2**SOURCE_BITS))
        reached = self.uses(end).tolist()
        parts: list[Uses] = []
        for source in sorted(_distinct(sources)):
            own = self._orders[source].uses_of(own_items[sources == source], reached[source])
            positions = [self._position_of(source, use, end) for use in own.positions.tolist()]
            own_source = np.uint64(source << SOURCE_BITS)
            parts.append(Uses(np.array(positions, np.int64), own.items | own_source, own.epochs))
        return Uses.joined(parts)

    def _position_of(self, source: int, use: int, end: int) -> int:
        """The position, below `end`, of a source's use."""
        blocks = range(end // BLOCK + 1)
        after = bisect_right(blocks, use, key=lambda block: self._uses_before(block)[source])
        number = after - 1
        sources, uses = self._block(number)
        (offset,) = np.flatnonzero((sources == source) & (uses == use))
        return number * BLOCK + int(offset)

    def by_source(self, state: FeedState, unit: str, per_item: int) -> dict[str, float]:
        """Row fields at a state: `tokens/NAME`, trained on without skipped ranges; `epoch/NAME`, of
        the source."""
        end = state.position
        reached = self.uses(end)
        skipped = np.zeros_like(reached)
        for start, stop in state.skipped_ranges:
            if start < end:
                skipped += self.uses(min(stop, end)) - self.uses(start)
        row: dict[str, float] = {}
        for source, name in enumerate(self.names):
            row[f"{unit}/{name}"] = int(reached[source] - skipped[source]) * per_item
            row[f"epoch/{name}"] = round(int(reached[source]) / len(self._orders[source]), 4)
        return row

    def phase_at(self, position: int) -> int:
        return sum(phase.begins < position for phase in self.phases[1:])

    def _uses_before(self, block: int) -> np.ndarray:
        ends = [min(phase.begins // BLOCK, block) for phase in self.phases[1:]] + [block]
        blocks = np.diff(ends, prepend=0).tolist()
        uses = [_uses(phase.weights, n) for phase, n in zip(self.phases, blocks, strict=True)]
        return np.sum(uses, axis=0)

    def _compute_block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Source of each position in a block, and number of that source's positions before it:
        int64 [M] both."""
        before = self._uses_before(number)
        counts = self._uses_before(number + 1) - before
        ends = np.cumsum(counts)
        slots = self._slots.items_at(np.arange(number * BLOCK, (number + 1) * BLOCK))
        sources = np.searchsorted(ends, slots.astype(np.int64), side="right")
        # the uses of a source ascend in the order of the block, so that an epoch's items come first
        by_source = np.argsort(sources, kind="stable")
        uses = np.empty(BLOCK, np.int64)
        uses[by_source] = np.arange(BLOCK) + np.repeat(before - ends + counts, counts)
        return sources, uses


def _distinct(numbers: np.ndarray) -> set[int]:
    return set(numbers.tolist())


def _uses(weights: Sequence[Fraction], blocks: int) -> np.ndarray:
    """Positions of each source in the first blocks of a phase: floor(weight · M · blocks); the
    (first) heaviest source gets the rest. Counts never fall with more blocks, and no share
    drifts."""
    counts = [weight.numerator * BLOCK * blocks // weight.denominator for weight in weights]
    heaviest = weights.index(max(weights))
    counts[heaviest] += BLOCK * blocks - sum(counts)
    return np.array(counts, np.int64)


def phases_of(config: TrainingConfig, windows: Sequence[int]) -> list[Phase]:
    """The phases of a run over sources of these numbers of windows. Weights are exact decimals: 0.1
    is one tenth."""
    weights = [config.data.weights or windows, *(phase.weights for phase in config.data.phases)]
    begins = [0, *config.phase_begins]
    return [Phase(begin, normalized(values)) for begin, values in zip(begins, weights, strict=True)]


def normalized(weights: Sequence[float]) -> tuple[Fraction, ...]:
    """Weights divided by their sum."""
    exact = [Fraction(repr(weight)) for weight in weights]
    return tuple(weight / sum(exact) for weight in exact)


def check_distinct(paths: Sequence[str], manifests: Sequence[Manifest]) -> None:
    """Raises: UserError if two folders share a shard, unless it is of both validation splits."""
    first_seen: dict[str, tuple[str, str]] = {}  # folder and split of each shard, by its hash
    for path, manifest in zip(paths, manifests, strict=True):
        for split, shards in manifest.splits.items():
            for shard in shards:
                folder, other_split = first_seen.setdefault(shard.sha256, (path, split))
                if folder != path and (split, other_split) != ("val", "val"):
                    hint = (
                        f"its {shard.file}, of the {split} split, is in the {other_split} split of "
                        f"{folder}, too; name each text once, and set its weight in data.weights"
                    )
                    raise UserError("data.path", path, hint)


def recorded_mixture(record: Mapping[str, Any]) -> Mixture | None:
    """Identity in a start, or a state's `record`, for a single source too; None without one.
    Raises: ValueError for bad fields."""
    mixture = record.get("mixture")
    if mixture:
        return Mixture.model_validate(mixture)
    return single_folder(record["data_manifest"]) if "data_manifest" in record else None


def single_folder(manifest: str) -> Mixture:
    """Identity of a single folder, whose manifest has this hash."""
    return Mixture(manifests=[manifest], phases=[(0, ["1"])])


def phases_until(mixture: Mixture, position: int, sources: int, block_size: int) -> str:
    """Phases before `position`, in words, with weight 0 for sources that came later."""
    begun = [phase for phase in mixture.phases if phase[0] < max(position, 1)]
    zeros = ["0"] * (sources - len(mixture.manifests))
    return ", ".join(
        f"{' '.join(weights + zeros)} from token {begins * block_size} on"
        for begins, weights in begun
    )


def check_resumed_data(config: TrainingConfig, saved: State, now: Mixture) -> None:
    """Checks the data of a resumed run. The saved sources must come first; new ones may follow.
    Weights must be equal for all positions that the run has reached. Raises: UserError if they
    differ."""
    before = recorded_mixture(saved.record)
    assert before, "a GPT's state has the hash of its data"
    paths = config.data.paths
    if len(paths) < len(before.manifests):
        started = f"the run was started with {len(before.manifests)} folders"
        hint = f"{started}; restore them, or start a new run"
        raise UserError("data.path", " ".join(paths), hint)
    for path, ours, theirs in zip(paths, now.manifests, before.manifests, strict=False):
        if ours != theirs:
            differ = "its tokens differ from those that the run was started with"
            raise UserError("data.path", path, f"{differ}; restore them, or start a new run")
    block_size = config.model.block_size
    # a skipped range may reach beyond the position: the run has decided about it, too
    position = max([saved.feed.position, *(stop for _, stop in saved.feed.skipped_ranges)])
    ours = phases_until(now, position, len(paths), block_size)
    theirs = phases_until(before, position, len(paths), block_size)
    if ours != theirs:
        next_block = -(-position // BLOCK) * BLOCK * block_size
        hint = (
            f"the run had {theirs}; restore data.weights and data.phases, with 0 for new folders, "
            "or start a new run. New weights may begin after the data that the run has read: "
            f"data.phases, from {next_block} tokens on"
        )
        raise UserError("data.weights", ours, hint)


def source_weights(
    config: TrainingConfig, manifests: Sequence[Manifest], split: str = "val"
) -> dict[int, float]:
    """Weight of each source with this split in the loss of the mixture, by number; they sum up to 1
    in every phase. Empty if no source of positive weight has the split."""
    windows = [
        count_windows(manifest.tokens("train"), config.model.block_size, config.shifts)
        for manifest in manifests
    ]
    weights = config.data.weights or windows
    present = {
        number: weights[number]
        for number, manifest in enumerate(manifests)
        if manifest.tokens(split) > 1
    }
    total = sum(present.values())
    if not total:
        return {}
    return {number: weight / total for number, weight in present.items()}


class MixedWindows:
    """The windows of several streams: item source · 2^48 + the source's own item."""

    def __init__(self, sources: Sequence[Windows]):
        self.sources = sources

    def read(self, items: np.ndarray) -> tuple[Tensor]:
        """Tokens int64 [b, T + 1] of the items int64 [b]."""
        sources, own_items = np.divmod(items, 2**SOURCE_BITS)
        rows = torch.empty(len(items), self.sources[0].block_size + 1, dtype=torch.int64)
        for source in _distinct(sources):
            of_source = sources == source
            (tokens,) = self.sources[source].read(own_items[of_source])
            rows[torch.from_numpy(of_source)] = tokens
        return (rows,)


def mix(
    config: TrainingConfig, manifests: Sequence[Manifest], sources: Sequence[Windows]
) -> tuple[MixedWindows, dict[int, float], Mixture]:
    """Windows, validation weights (`source_weights`) and identity of a mixture. Raises: UserError,
    as `check_distinct`."""
    check_distinct(config.data.paths, manifests)
    phases = phases_of(config, [*map(len, sources)])
    weights = [(phase.begins, [str(weight) for weight in phase.weights]) for phase in phases]
    mixture = Mixture(manifests=[manifest.hash for manifest in manifests], phases=weights)
    return MixedWindows(sources), source_weights(config, manifests), mixture
