"""Checks the rows of metrics.jsonl: the chain of hashes, the values, the order of the data, and the due records.

A consistent chain does not make a row true: `check_values` finds contradictions that need neither the data nor the
model. The items of each step follow from seed, step size and number of items. A feed that reads no data repeats the
steps, and its digest is compared with rows and checkpoints. The newest start row determines the due records: each
process of a run writes one, with its configuration.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.run_files import FIRST_CHAIN, is_event, is_rollback, next_chain, read_lines, split_chain
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.mixture import MixedOrder, order_of, source_weights
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.evaluate import count_scored
from gpt2_ddp.model.optim import lr_at
from gpt2_ddp.scoring import METRICS
from gpt2_ddp.tasks import pretraining, supervised
from gpt2_ddp.training.task import Due

Record = dict[str, Any]
Records = dict[str, Record]
"""Rows of metrics.jsonl, including events, or states of checkpoints, by their place in the run folder."""

SHAPES: dict[str, Any] = {"lr": int | float, "config": dict, "steps": int, "kept": list, "checkpoint": dict}
SHAPES |= {"chain": str, "samples_sha256": str, "skipped": int}
"""Types of a row's fields, unless missing or null."""
EVENTS = {"checkpoint", "room", "sample", "end"}
"""Events besides starts, branches and rollbacks."""
TEXTS = {"order_digest", "chain"}
OF_STEP = {"loss", "lr", "grad_norm", "skipped", "order_digest"}
"""Fields of every row except the first one, of the weights before the first step."""
MEASURED = {"loss", "loss_mean", "train_loss", "grad_norm", "mfu", "val_loss", "val_bits_per_byte"}
"""Fields that are null where the number is not finite or unknown."""
COUNTED = {"step", "epoch", "tokens", "samples", "lr", "skipped", "not_finite", "data_share", "val_tokens"}
COUNTED |= {"tokens_per_second", "samples_per_second", "val_samples", "val_accuracy", "val_top5"}
OF_SOURCES = {"tokens", "epoch", "val_loss", "val_bits_per_byte"}
"""Fields with one more for each folder of a mixture."""


def read_metrics(file: Path) -> tuple[Records, list[str]]:
    """The rows of metrics.jsonl, and defects of their steps and chain; a torn last line after a kill is allowed."""
    rows: Records = {}
    defects, before, chain = [], -1, FIRST_CHAIN
    for line in read_lines(file):
        place, row, (text, own) = f"metrics.jsonl, line {line.number}", line.row or {}, split_chain(line.text)
        if line.torn:
            continue
        known = [(row[name], shape) for name, shape in SHAPES.items() if row.get(name) is not None]
        if type(row.get("step")) is not int or not all(isinstance(value, shape) for value, shape in known):
            defects.append(f"{place}: is not a row with a step")
            continue
        if not is_event(row) and row["step"] <= before:
            defects.append(f"{place}: step {row['step']} after step {before}")
        if not is_event(row) or is_rollback(row):
            before = row["step"]
        if own is None:
            defects.append(f"{place}: has no chain")
        elif own != row.get("chain") or own != next_chain(chain, text):
            defects.append(f"{place}: its chain is wrong: this row was changed, or a row before it is missing")
        elif not rows and row.get("event") != "start":
            defects.append(f"{place}: the chain of rows does not begin with a start")
        chain = own or chain
        rows[place] = row
    return rows, defects or ([] if rows else ["metrics.jsonl: has no rows"])


def check_values(rows: Records) -> Iterator[str]:
    """Defects of the numbers in rows: unknown fields, missing or negative numbers, numbers that contradict others."""
    first, tasks, valid = 0, set(), [{"step": 0, "skipped": 0}]  # `valid`: the rows of steps that no rollback undid
    constants: dict[tuple[str, Any], float] = {}  # numbers that no step changes
    ended = False
    for place, row in rows.items():
        event, defects = row.get("event"), []
        if event == "branch":
            first, valid = row["step"], []
        elif event == "rollback":
            valid = [kept for kept in valid if kept["step"] <= row["step"]]
        elif event == "start":
            tasks = {f"{name}_{metric}" for name in row.get("tasks") or () for metric in METRICS}
            constants = {} if "mixture" in row else constants  # its weights may have changed
        elif event is None:
            defects = [*_check_numbers(row, tasks, first), *_compare(valid[-1:], row)]
            defects += _check_constants(row, constants)
            valid.append(row)
        elif event not in EVENTS:
            defects = [f"has the unknown event {event}"]
        if ended and event != "start":
            defects.append("follows the end of a session")
        ended = event == "end"
        yield from (f"{place}: {defect}" for defect in defects)


def _compare(valid: list[Record], row: Record) -> Iterator[str]:
    """Defects between a row and the valid row before it."""
    loss, mean = row.get("loss"), row.get("loss_mean")
    for before in valid:
        steps, skipped = row["step"] - before["step"], row.get("skipped", 0) - before.get("skipped", 0)
        if "skipped" in row and not 0 <= skipped <= steps:
            yield f"skipped is {row['skipped']}, {before.get('skipped', 0)} at step {before['step']}"
        if steps != 1 or not isinstance(loss, float) or not isinstance(mean, float) or "not_finite" in row:
            continue
        if not math.isclose(loss, mean, rel_tol=1e-5):
            yield f"loss_mean of step {row['step']} alone is {mean}, its loss {loss}"


def _check_numbers(row: Record, tasks: set[str], first: int) -> Iterator[str]:
    for name in sorted(OF_STEP - row.keys()) if row["step"] > first else ():
        yield f"{name} of step {row['step']} is missing"
    for name, value in row.items():
        kind, _, source = name.partition("/")
        known = kind in OF_SOURCES if source else name in TEXTS | MEASURED | COUNTED | tasks
        sound = name in TEXTS or (type(value) in (int, float) and 0 <= value < math.inf)
        missing = name in ("loss", "loss_mean") and not row.get("not_finite")
        if not known:
            yield f"has the unknown field {name}"
        elif not sound and (value is not None or missing or not (kind in MEASURED or name in tasks)):
            yield f"{name} of step {row['step']} is {value}"


def _check_constants(row: Record, known: dict[tuple[str, Any], float]) -> Iterator[str]:
    """Defects of scored samples, and of tokens per byte of the scored text, by the number of its tokens. Adds new ones
    to the `known` ones."""
    for name, value in row.items():
        loss = row.get(name.replace("val_bits_per_byte", "val_loss"))
        if name.startswith("val_bits_per_byte") and isinstance(value, float) and isinstance(loss, float) and loss > 0:
            what, key, now = f"tokens per byte by {name}", row.get("val_tokens"), value * math.log(2) / loss
        elif name == "val_samples" and type(value) is int:
            what, key, now = name, None, value
        else:
            continue
        if not math.isclose(now, right := known.setdefault((what, key), now), rel_tol=1e-9):
            yield f"{what} is {now}, in earlier rows {right}"


def check_scored(rows: Records, config: RunConfig, manifests: Sequence[Manifest]) -> Iterator[str]:
    """Defects of `val_tokens`: the validation splits of positive weight share `eval.tokens` of each start equally."""
    right: int | None = None
    for place, row in rows.items():
        if isinstance(config, TrainingConfig) and isinstance(row.get("config"), dict):
            settings = read_config(config.kind, row["config"], "metrics.jsonl")
            assert isinstance(settings, TrainingConfig), "of the same kind"
            assert settings.eval.tokens != "auto", "eval.tokens is resolved when the run starts"
            scored = [manifests[number] for number, weight in source_weights(settings, manifests).items() if weight]
            tokens = settings.eval.tokens and -(-settings.eval.tokens // max(len(scored), 1))
            right = sum(count_scored(one.tokens("val"), settings.model.block_size, tokens) for one in scored)
        if right is not None and row.get("val_tokens", right) != right:
            yield f"{place}: val_tokens of step {row['step']} is {row['val_tokens']}, not {right}"


class DataState(NamedTuple):
    """State of a `data.feed.Feed` after a step."""

    position: int
    order_digest: str
    passed: list[tuple[int, int]]
    ended_epoch: bool
    epochs: int


class OrderReplay:
    """The state of the data after each step, replayed by `feed`. Rows count in `unit`; an item has `per_item` units."""

    def __init__(self, feed: Feed, unit: str, per_item: int):
        self.feed, self.unit, self.per_item = feed, unit, per_item
        self.inherited: list[tuple[int, int]] = []  # positions that the parent run skipped
        self.stood = [self._now()]
        self._left: dict[int, DataState] = {}  # after a step that a later rollback returned to, as in its checkpoint

    def check(self, record: Record) -> Iterator[str]:
        """Defects of the next row or state. After a rollback, other data are expected."""
        if is_rollback(record):
            yield from self._go_back(record)
        elif record.get("event") == "branch":
            yield from self._begin(record)
        elif not is_event(record) and record["step"] > 0:
            yield from self._check(record)

    def at(self, step: int) -> DataState:
        """The state after `step`, in the part of the run that was checked last."""
        while len(self.stood) <= step:
            self._inherit()
            self.feed.next_step()
            self.stood.append(self._now())
        return self.stood[step]

    def _inherit(self) -> None:  # the ranges that the parent run skipped here
        while self.inherited and int(self.feed.positions_from(self.feed.position)[0]) == self.inherited[0][0]:
            self.feed.skip_range(*self.inherited.pop(0))

    def _check(self, record: Record) -> Iterator[str]:
        step, digest, position = record["step"], record.get("order_digest"), record.get("position")
        items, count = consumed_after(self.feed, step), record.get(self.unit)
        gaps = sum(stop - start for start, stop in self.stood[-1].passed + self.inherited)
        if count != items * self.per_item or position not in (None, items + gaps):
            yield f"step {step} does not match {self.unit} {count}, position {position}"
            return
        stood = self.at(step)
        if digest != stood.order_digest:
            yield f"order_digest of step {step} is {str(digest)[:12]}, not {stood.order_digest[:12]}"
        elif "passed" in record and json.dumps(record["passed"]) != json.dumps(stood.passed):
            yield f"skipped {record['passed']}, not {stood.passed}"
        elif "chain" in record and record.get("epoch") != (epoch := round(stood.position / len(self.feed.order), 4)):
            yield f"epoch of step {step} is {record.get('epoch')}, not {epoch}"
        elif "chain" in record and isinstance(self.feed.order, MixedOrder):
            right = self.feed.order.by_source(stood.position, stood.passed, self.unit, self.per_item)
            yield from self._check_sources(record, right)

    def _check_sources(self, record: Record, right: Mapping[str, float]) -> Iterator[str]:
        """Defects of a row's fields of each source. Sources that came later have none."""
        found = {name: value for name, value in record.items() if name.startswith((f"{self.unit}/", "epoch/"))}
        values = list(right.values())  # and not by their names: folders may have moved
        if [*found.values()] != values[: len(found)] or any(values[max(len(found), 2) :]):
            yield f"the sources of step {record['step']} are {found}, not {right}"

    def _go_back(self, record: Record) -> Iterator[str]:
        feed, step, digest = self.feed, record["step"], record.get("order_digest")
        begun, passed = record.get("from"), record.get("passed", [])
        sound = are_ranges([passed])
        # a wrong step may be huge
        if not isinstance(begun, int) or not 0 <= step < begun or not sound or consumed_after(feed, begun) > passed[1]:
            yield f"from step {begun} to {step} does not match the skipped positions {passed}"
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
            yield f"skipped {passed}, order_digest {str(digest)[:12]}, not {right}"

    def _begin(self, record: Record) -> Iterator[str]:
        """A branch continues the order of its parent run, which is replayed from the beginning."""
        step, position, passed = record["step"], record.get("position"), record.get("passed") or []
        gaps = sum(stop - start for start, stop in passed) if are_ranges(passed) else -1
        if step < len(self.stood) - 1 or position != consumed_after(self.feed, step) + gaps:
            yield f"branched off at step {step}, which does not match position {position}"
            return
        self.inherited = [(start, stop) for start, stop in passed]
        self.at(step)
        self._inherit()
        self.stood[step] = self._now()
        digest, right = record.get("order_digest"), self.feed.order_digest
        if self.inherited or digest != right:
            yield f"branched off with order_digest {str(digest)[:12]}, not {right[:12]}"

    def _now(self) -> DataState:
        feed = self.feed
        return DataState(feed.position, feed.order_digest, list(feed.skipped_ranges), feed.ended_epoch, feed.epochs)


def are_ranges(value: Any) -> bool:
    """Whether the value is a list of positions [start, stop], as rollbacks and branches record them."""
    return isinstance(value, list) and all(
        isinstance(one, list) and [*map(type, one)] == [int, int] and 0 <= one[0] < one[1] < 2**62 for one in value
    )


def replay_order(
    config: RunConfig, manifests: Sequence[Manifest], rows: Records, states: Records
) -> OrderReplay | None:
    """The order of a run, of a GPT's `manifests`; None if nothing holds a job's samples and global batch yet."""
    newest = {name: value for record in [*rows.values(), *states.values()] for name, value in record.items()}
    items, share = newest.get("epoch_size"), supervised.contiguous(1, 1)
    if isinstance(config, TrainingConfig):
        windows = [count_windows(manifest.tokens("train"), config.model.block_size) for manifest in manifests]
        order = order_of(config, windows if len(windows) > 1 else [items or windows[0]])
        feed = Feed(order, GlobalBatch(config.global_batch_windows, share))
        return OrderReplay(feed, "tokens", config.model.block_size)
    if not items or not (batch := newest.get("global_batch_size")):
        return None
    return OrderReplay(Feed(Order(config.seed, items), GlobalBatch(batch, share, by_epoch=True)), "samples", 1)


def in_parts(rows: Records, states: Records) -> tuple[list[tuple[str, Record]], list[str]]:
    """Rows and states by part of the run, states after the rows; each rollback begins a part. And defects of states
    that belong to no part."""
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
            defects.append(f"{place}: comes after {number} rollbacks, in metrics.jsonl {count}")
    return [item for part in parts for item in part.items()], defects


def consumed_after(feed: Feed, steps: int) -> int:
    """Items of the first `steps` steps, without skipped ranges."""
    if not feed.by_epoch:
        return steps * feed.step_size
    epochs, rest = divmod(steps, math.ceil(len(feed.order) / feed.step_size))
    return epochs * len(feed.order) + rest * feed.step_size


class Schedule:
    """Rows, evaluations, checkpoints and learning rates that the newest start row makes due. `is_branch`: whether the
    first start may be at a later step."""

    def __init__(self, config: RunConfig, history: OrderReplay, validates: bool, is_branch: bool):
        self.config, self.history, self.validates, self.is_branch = config, history, validates, is_branch
        self.steps: int | None = None  # of the whole run, by the start in force; None before the first one
        self.peak: float | None = None  # rate of a small job
        self.started = -1  # the newest start's step, where a pending sample may follow
        self.reached, self.saved_to = -1, 0  # steps of which rows and checkpoints have been looked for
        self.saved: set[int] = set()
        self.pending: tuple[int, Due | None] = (-1, None)  # a step whose row the next session writes; None: it may

    def check(self, row: Record) -> Iterator[str]:
        """Defects of the next row, and what is missing before it."""
        step, event = row["step"], row.get("event")
        if event == "start":
            yield from self._start(row)
        elif event == "branch":
            self.reached = self.saved_to = step
        elif self.steps is not None:  # before the first start nothing is due; `read_metrics` reports the rows there
            if not 0 <= step <= self.steps:
                yield f"step {step} in a run of {self.steps} steps"
            else:
                yield from self._check_event(row, self.steps) if event else self._check_row(row)

    def _check_event(self, row: Record, steps: int) -> Iterator[str]:
        step, event = row["step"], row["event"]
        if event == "checkpoint":
            self.saved.add(step)
        elif event == "sample":
            due = step > self.started and not self.config.eval_patience and self._due(step)
            if due and not due.sample:
                yield f"no sample was due at step {step}"
        elif event == "rollback" and isinstance(row.get("from"), int):
            yield from self._missing(min(row["from"], steps))
            self.reached = self.saved_to = step
            self.saved = {saved for saved in self.saved if saved <= step}
        elif event == "end":  # a stop or a divergence may leave its own step unfinished
            yield from self._missing(step + (row.get("outcome") == "completed"))

    def _check_row(self, row: Record) -> Iterator[str]:
        step, rate = row["step"], None  # None: its peak or its end is unknown
        yield from self._missing(step, one_in_flight=True)
        due = self._due(step)
        if due and not due.log:
            yield f"no row was due at step {step}"
        elif due and due.evaluate != ("val_loss" in row):
            yield f"step {step} has {'no' if due.evaluate else 'a'} val_loss, unlike eval.every"
        if isinstance(self.config, TrainingConfig):
            if self.config.optim.decay_steps or self.config.optim.schedule == "constant":
                rate = lr_at(step, self.config.optim)
        elif isinstance(self.config, JobConfig) and self.peak:
            epoch_steps = math.ceil(len(self.history.feed.order) / self.history.feed.step_size)
            rate = supervised.job_schedule(self.config, self.peak, epoch_steps)(step)
        if rate is not None and "lr" in row and not math.isclose(row["lr"] or 0.0, rate, rel_tol=1e-12):
            yield f"lr of step {step} is {row['lr']}, not {rate}"
        self.reached = step

    def _start(self, row: Record) -> Iterator[str]:
        step = row["step"]
        if not isinstance(row.get("config"), dict) or not isinstance(row.get("steps"), int):
            yield "a start without its configuration"
            return
        if self.steps is None:
            if step and not self.is_branch:
                yield f"the rows before step {step} are missing"
            self.reached, self.pending = step or -1, (step or -1, None)
        elif step <= self.steps:
            yield from self._missing(step)
            due = self._due(step)
            if self.reached < step:
                self.pending = (step, due)
                self.reached = step - 1 if due is None or due.log else step
        try:
            self.config = read_config(self.config.kind, row["config"], "metrics.jsonl")
        except UserError as error:
            yield from error.mistakes
        self.steps, self.peak, self.saved_to, self.started = row["steps"], row.get("lr"), step, step
        self.saved.add(step)

    def _missing(self, end: int, one_in_flight: bool = False) -> Iterator[str]:
        """Rows and checkpoints that were due before step `end`. With `one_in_flight`, the last checkpoint may still be
        in the background, and is recorded later."""
        for step in range(self.reached + 1, end):
            if (due := self._due(step)) and due.log:
                yield f"the row of step {step} is missing"
        saves = [step for step in range(self.saved_to + 1, end) if (due := self._due(step)) and due.save]
        unsaved = [step for step in saves if step not in self.saved]
        newest = unsaved.pop() if unsaved and one_in_flight else end
        yield from (f"the checkpoint of step {step} was not recorded" for step in unsaved)
        self.reached, self.saved_to = max(self.reached, end - 1), max(self.saved_to, newest - 1)

    def _due(self, step: int) -> Due | None:
        """The work that was due at a step; None if unknown."""
        if step == self.pending[0]:
            return self.pending[1]
        if step == 0:
            return Due(log=self.validates, evaluate=self.validates)
        stood, last = self.history.at(step), step == self.steps
        if isinstance(self.config, TrainingConfig):
            return pretraining.due(self.config, step, last, stood.ended_epoch, self.validates)
        assert isinstance(self.config, JobConfig), "the other kinds"
        return supervised.due(self.config, step, last, stood.ended_epoch, stood.epochs)
