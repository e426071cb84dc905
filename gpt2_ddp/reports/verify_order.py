"""The order of the data, replayed: each step's items follow from the seed, the step's size and their number alone.

A feed that reads nothing takes them again, and its digest is compared with what rows and checkpoints recorded.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.run_files import is_event, is_rollback
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.mixture import MixedOrder, order_of
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import count_windows
from gpt2_ddp.tasks.supervised import contiguous

Record = dict[str, Any]
Records = dict[str, Record]
"""Rows of metrics.jsonl, events among them, or states of checkpoints, by the place where they stand."""


class DataState(NamedTuple):
    """Where the data stood after a step: see `data.feed.Feed`."""

    position: int
    order_digest: str
    passed: list[tuple[int, int]]
    ended_epoch: bool
    epochs: int


class OrderReplay:
    """Where the data stood after each step, as `feed` replays them.

    Args:
        unit: what rows count. per_item: how many of it an item has.
    """

    def __init__(self, feed: Feed, unit: str, per_item: int):
        self.feed, self.unit, self.per_item = feed, unit, per_item
        self.inherited: list[tuple[int, int]] = []  # positions that the run which this one branched off passed over
        self.stood = [self._now()]
        self._left: dict[int, DataState] = {}  # after a step that was gone back to since, as its checkpoint may have it

    def check(self, record: Record) -> Iterator[str]:
        """What is wrong with a row or a state; a rollback changes what is right from there on."""
        if is_rollback(record):
            yield from self._go_back(record)
        elif record.get("event") == "branch":
            yield from self._begin(record)
        elif not is_event(record) and record["step"] > 0:
            yield from self._check(record)

    def at(self, step: int) -> DataState:
        """Where the data stood after `step`, in the part of the run that was checked last."""
        while len(self.stood) <= step:
            self._inherit()
            self.feed.next_step()
            self.stood.append(self._now())
        return self.stood[step]

    def _inherit(self) -> None:
        """Passes over what the other run passed over here."""
        while self.inherited and int(self.feed.positions_from(self.feed.position)[0]) == self.inherited[0][0]:
            self.feed.skip_range(*self.inherited.pop(0))

    def _check(self, record: Record) -> Iterator[str]:
        step, digest, position = record["step"], record.get("order_digest"), record.get("position")
        items, count = consumed_after(self.feed, step), record.get(self.unit)
        gaps = sum(stop - start for start, stop in self.stood[-1].passed + self.inherited)
        if count != items * self.per_item or position not in (None, items + gaps):
            yield f"step {step} does not go with {self.unit} {count}, position {position}"
            return
        stood = self.at(step)
        if digest != stood.order_digest:
            yield f"order_digest of step {step} is {str(digest)[:12]}, not {stood.order_digest[:12]}"
        elif "passed" in record and json.dumps(record["passed"]) != json.dumps(stood.passed):
            yield f"passed over {record['passed']}, not {stood.passed}"
        elif "chain" in record and record.get("epoch") != (epoch := round(stood.position / len(self.feed.order), 4)):
            yield f"epoch of step {step} is {record.get('epoch')}, not {epoch}"
        elif "chain" in record and isinstance(self.feed.order, MixedOrder):
            yield from self._check_sources(
                record, self.feed.order.by_source(stood.position, stood.passed, self.unit, self.per_item)
            )

    def _check_sources(self, record: Record, right: Mapping[str, float]) -> Iterator[str]:
        """What a row says of a mixture's sources; of those that have come since it says nothing."""
        found = {name: value for name, value in record.items() if name.startswith((f"{self.unit}/", "epoch/"))}
        values = list(right.values())  # and not by their names: folders may have moved
        if [*found.values()] != values[: len(found)] or any(values[max(len(found), 2) :]):
            yield f"of the sources of step {record['step']} it says {found}, not {right}"

    def _go_back(self, record: Record) -> Iterator[str]:
        feed, step, digest = self.feed, record["step"], record.get("order_digest")
        begun, passed = record.get("from"), record.get("passed")
        ends = passed if isinstance(passed, list) and len(passed) == 2 else [0, 0]
        # so that nonsense does not have us count to it
        if not isinstance(begun, int) or not 0 <= step < begun or consumed_after(feed, begun) > ends[1]:
            yield f"from step {begun} to {step}, over {passed}, does not go together"
            return
        end, stood = self.at(begun).position, self.at(step)
        del self.stood[step + 1 :]
        for one in (self._left.get(step, stood), stood):  # the checkpoint may be the same again, or a newer one
            feed.seek(one.position, one.order_digest, one.passed)
            start = int(feed.positions_from(one.position)[0])
            if [start, end] == passed:
                break
        self._left = {number: left for number, left in self._left.items() if number < step} | {step: one}
        feed.skip_range(start, end)
        self.stood[step] = stood._replace(order_digest=feed.order_digest, passed=list(feed.skipped_ranges))
        if (passed, digest) != ([start, end], feed.order_digest):
            right = f"{[start, end]}, order_digest {feed.order_digest[:12]}"
            yield f"passed over {passed}, order_digest {str(digest)[:12]}, not {right}"

    def _begin(self, record: Record) -> Iterator[str]:
        """The run goes on from another's checkpoint, whose order is replayed from its beginning."""
        step, position, passed = record["step"], record.get("position"), record.get("passed") or []
        try:
            gaps = sum(stop - start for start, stop in passed)
        except (TypeError, ValueError):
            gaps = -1
        if position != consumed_after(self.feed, step) + gaps:
            yield f"branched off at step {step}, which does not go with position {position}"
            return
        self.inherited = [(start, stop) for start, stop in passed]
        self.at(step)
        self._inherit()
        stood = self.stood[step] = self._now()
        digest = record.get("order_digest")
        if self.inherited or digest != stood.order_digest:
            yield f"branched off with order_digest {str(digest)[:12]}, not {stood.order_digest[:12]}"

    def _now(self) -> DataState:
        feed = self.feed
        return DataState(feed.position, feed.order_digest, list(feed.skipped_ranges), feed.ended_epoch, feed.epochs)


def replay_order(
    config: RunConfig, manifests: Sequence[Manifest], rows: Records, states: Records
) -> OrderReplay | None:
    """The order of a run; None while no start row says how many samples it has, and its global batch.

    Args:
        manifests: of a GPT's data.
    """
    newest = {name: value for record in [*rows.values(), *states.values()] for name, value in record.items()}
    items, share = newest.get("epoch_size"), contiguous(1, 1)
    if isinstance(config, TrainingConfig):
        windows = [count_windows(manifest.tokens("train"), config.model.block_size) for manifest in manifests]
        order = order_of(config, windows if len(windows) > 1 else [items or windows[0]])
        feed = Feed(order, GlobalBatch(config.global_batch_windows, share))
        return OrderReplay(feed, "tokens", config.model.block_size)
    if not items or not (batch := newest.get("global_batch_size")):
        return None
    return OrderReplay(Feed(Order(config.seed, items), GlobalBatch(batch, share, by_epoch=True)), "samples", 1)


def in_parts(rows: Records, states: Records) -> tuple[list[tuple[str, Record]], list[str]]:
    """Rows, and each state behind those of the part of the run, between two rollbacks, that it belongs to; and what is
    wrong with the states that belong to none."""
    parts: list[Records] = [{}]
    for place, row in rows.items():
        if is_rollback(row):
            parts.append({})
        parts[-1][place] = row
    defects, count = [], len(parts) - 1
    for place, state in states.items():
        if (number := state.get("rollbacks", count)) <= count:
            parts[number][place] = state
        else:
            defects.append(f"{place}: has {number} rollbacks behind it, metrics.jsonl {count}")
    return [item for part in parts for item in part.items()], defects


def consumed_after(feed: Feed, steps: int) -> int:
    """Items of the first `steps` steps, without skipped ranges."""
    if not feed.by_epoch:
        return steps * feed.step_size
    epochs, rest = divmod(steps, ceil(len(feed.order) / feed.step_size))
    return epochs * len(feed.order) + rest * feed.step_size
