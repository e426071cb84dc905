"""Checks the rows of metrics.jsonl: the chain of hashes, the values, the order of the data, and the due records.

A consistent chain does not make a row true: `Values` finds contradictions that need neither the data nor the
model. The items of each step follow from seed, step size and number of items. A feed that reads no data repeats the
steps, and its digest is compared with rows and checkpoints. The newest start row determines the due records: each
process of a run writes one, with its configuration.
"""

import json
import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.run_files import (
    HASH,
    METRICS,
    Line,
    is_event,
    is_rollback,
    next_chain,
    parse_lines,
    split_chain,
)
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
from gpt2_ddp.scoring import METRICS as SCORES
from gpt2_ddp.state import FIRST_CHAIN, FeedState
from gpt2_ddp.tasks import pretraining, supervised
from gpt2_ddp.training.task import Due

Record = dict[str, Any]
Records = dict[str, Record]
"""Rows of metrics.jsonl, including events, or states of checkpoints, by their place in the run folder."""

MEASURED = {"loss", "loss_mean", "train_loss", "grad_norm", "mfu", "val_loss", "val_bits_per_byte"}
"""Fields that are null where the number is not finite or unknown."""
KINDS: dict[tuple[type, ...], str] = {
    (int,): "step steps epoch_size global_batch_size position skipped not_finite tokens samples val_tokens val_samples "
    + "memory",
    (int, float): "epoch lr data_share tokens_per_second samples_per_second val_accuracy val_top5 "
    + " ".join(MEASURED),
    (str,): f"order_digest chain {HASH}",
    (list,): "kept",
    (dict,): "config checkpoint tasks mixture",
}
TYPES = {name: types for types, names in KINDS.items() for name in names.split()}
"""Types of the fields of rows. Rows of steps have no others, apart from scores of tasks; numbers are at least 0."""
EVENTS = {"start", "branch", "rollback", "checkpoint", "room", "sample", "end"}
OF_STEP = {"loss", "lr", "grad_norm", "skipped", "order_digest"}
"""Fields of every row except the first one, of the weights before the first step."""
OF_SOURCES = {"tokens", "epoch", "val_loss", "val_bits_per_byte"}
"""Fields with one more for each folder of a mixture."""
MOST_STEPS, MOST_ITEMS, MOST_MISSING = 2_000_000, 2**22, 20
"""Most repeated steps without a row (a minute of work), items of a step and named gaps: a file may claim any number."""


class Log:
    """The rows of metrics.jsonl. Each loop over `items` reads those of steps anew, so the memory holds events alone.

    Args:
        steps: of checkpoints. chains: of the last rows before them.

    Attributes:
        events: by place. last: the last row. count: number of rows of steps. end: the last step of a row.
        by_step: rows of `steps` and of evaluations that no rollback undid.
        seen: of each of `chains`, the number of events up to its row. loose: number of steps' rows after all of them.
        chained: number of lines with a chain; `chain` is the last one.
        defects: of the steps and the chain; a torn last line after a kill is allowed.
    """

    def __init__(self, file: Path, steps: Container[int] = (), chains: Container[str] = ()):
        self._stream = file.open("rb") if file.is_file() else BytesIO()  # the same file, if a resume replaces it
        self._lines = self.count = self.loose = self.chained = self.end = 0
        self.events: Records = {}
        self.by_step: dict[int, Record] = {}
        self.seen: dict[str, int] = {}
        self.last: Record = {}
        self.chain, self.defects, before = FIRST_CHAIN, [], -1
        for line in self._read(sys.maxsize):
            self._lines, place, row = line.number, f"{METRICS}, line {line.number}", line.row or {}
            if problem := _problem(row):
                self.defects.append(f"{place}: {problem}")
                continue
            if not is_event(row) and row["step"] <= before:
                self.defects.append(f"{place}: step {row['step']} after step {before}")
            if not is_event(row) or is_rollback(row):
                before = row["step"]
            self._check_chain(place, line.text, row)
            self.last, self.end = row, max(self.end, row["step"])
            self._keep(place, row, steps)
            if (own := row.get("chain", "")) in chains:
                self.seen[own], self.loose = len(self.events), 0
        if not self.last and not self.defects:
            self.defects.append(f"{METRICS}: has no rows")

    def items(self) -> Iterator[tuple[str, Record]]:
        """The place and content of each row; events included."""
        for line in self._read(self._lines):
            if line.row and not _problem(line.row):
                yield f"{METRICS}, line {line.number}", line.row

    def _read(self, most: int) -> Iterator[Line]:
        self._stream.seek(0)
        return (line for line in islice(parse_lines(self._stream), most) if not line.torn)

    def _check_chain(self, place: str, line: str, row: Record) -> None:
        text, own = split_chain(line)
        if own is None:
            self.defects.append(f"{place}: has no chain")
        elif own != row.get("chain") or own != next_chain(self.chain, text):
            self.defects.append(f"{place}: its chain is wrong: this row was changed, or a row before it is missing")
        elif not self.last and row.get("event") != "start":
            self.defects.append(f"{place}: the chain of rows does not begin with a start")
        self.chain, self.chained = own or self.chain, self.chained + (own is not None)

    def _keep(self, place: str, row: Record, steps: Container[int]) -> None:
        step = row["step"]
        if is_event(row):
            self.events[place] = row
            if is_rollback(row):
                self.by_step = {other: kept for other, kept in self.by_step.items() if other <= step}
            return
        self.count, self.loose = self.count + 1, self.loose + 1
        if step in steps or "val_loss" in row:
            self.by_step[step] = row


def _problem(row: Record) -> str:
    """Why the content of a line is no row; empty if it is one."""
    if type(row.get("step")) is not int:
        return "is not a row with a step"
    wrong = [name for name, value in row.items() if not (value is None or isinstance(value, TYPES.get(name, object)))]
    wrong += ["event"] * (is_event(row) and row["event"] not in [*EVENTS])
    return f"is no row: {wrong[0]} is {row[wrong[0]]}" if wrong else ""


class Values:
    """Checks the numbers of rows in their order: unknown fields, missing or negative numbers, contradictions with other
    numbers. `config` and `manifests` of a GPT give the number of validation tokens."""

    def __init__(self, config: RunConfig | None = None, manifests: Sequence[Manifest] = ()):
        self._config, self._manifests = config, manifests
        self._first, self._ended, self._tasks = 0, False, set()
        self._steps, self._skips = array("q", [0]), array("q", [0])  # of the rows that no rollback undid
        self._constants: dict[tuple[str, Any], float] = {}  # numbers that no step changes
        self._val_tokens: int | None = None

    def check(self, row: Record) -> Iterator[str]:
        """Defects of the next row."""
        event, step = row.get("event"), row["step"]
        if self._ended and event != "start":
            yield "follows the end of a session"
        self._ended = event == "end"
        if event == "branch":
            self._first, self._steps, self._skips = step, array("q"), array("q")
        elif event == "rollback":
            stop = bisect_right(self._steps, step)
            del self._steps[stop:], self._skips[stop:]
        elif event == "start":
            self._start(row)
        elif event is None:
            yield from self._check_fields(row)
            yield from self._compare(row)
            yield from self._check_constants(row)
            self._steps.append(step)
            self._skips.append(row.get("skipped") or 0)

    def _start(self, row: Record) -> None:
        """The validation splits of positive weight share `eval.tokens` of each start equally."""
        self._tasks = {f"{name}_{metric}" for name in row.get("tasks") or () for metric in SCORES}
        self._constants = {} if "mixture" in row else self._constants  # its weights may have changed
        if not isinstance(self._config, TrainingConfig) or not row.get("config"):
            return
        with suppress(UserError):  # `Schedule` reports it
            settings, manifests = read_config(self._config.kind, row["config"], METRICS), self._manifests
            assert isinstance(settings, TrainingConfig), "of the same kind"
            scored = [manifests[number] for number, weight in source_weights(settings, manifests).items() if weight]
            if (tokens := settings.eval.tokens) != "auto":  # which is resolved when the run starts
                size, share = settings.model.block_size, tokens and -(-tokens // max(len(scored), 1))
                self._val_tokens = sum(count_scored(one.tokens("val"), size, share) for one in scored)

    def _check_fields(self, row: Record) -> Iterator[str]:
        step = row["step"]
        for name in sorted(OF_STEP - row.keys()) if step > self._first else ():
            yield f"{name} of step {step} is missing"
        for name, value in row.items():
            kind, _, source = name.partition("/")
            known = kind in OF_SOURCES if source else name in TYPES or name in self._tasks
            sound = TYPES.get(name) == (str,) or (type(value) in (int, float) and 0 <= value < math.inf)
            missing = name in ("loss", "loss_mean") and not row.get("not_finite")
            if not known:
                yield f"has the unknown field {name}"
            elif not sound and (value is not None or missing or not (kind in MEASURED or name in self._tasks)):
                yield f"{name} of step {step} is {value}"

    def _compare(self, row: Record) -> Iterator[str]:
        """Defects between a row and the valid row before it."""
        loss, mean, step, now = row.get("loss"), row.get("loss_mean"), row["step"], row.get("skipped")
        for before, skipped in zip(self._steps[-1:], self._skips[-1:], strict=True):
            if now is not None and not 0 <= now - skipped <= step - before:
                yield f"skipped is {now}, {skipped} at step {before}"
            if step != before + 1 or not isinstance(loss, float) or not isinstance(mean, float) or "not_finite" in row:
                continue
            if not math.isclose(loss, mean, rel_tol=1e-5):
                yield f"loss_mean of step {step} alone is {mean}, its loss {loss}"

    def _check_constants(self, row: Record) -> Iterator[str]:
        """Defects of scored tokens and samples, and of tokens per byte of the scored text."""
        if self._val_tokens is not None and row.get("val_tokens", self._val_tokens) != self._val_tokens:
            yield f"val_tokens of step {row['step']} is {row['val_tokens']}, not {self._val_tokens}"
        for name, value in row.items():
            loss = row.get(name.replace("val_bits_per_byte", "val_loss"))
            is_bits = name.startswith("val_bits_per_byte") and isinstance(value, float)
            if is_bits and isinstance(loss, float) and loss > 0:
                what, key, now = f"tokens per byte by {name}", row.get("val_tokens"), value * math.log(2) / loss
            elif name == "val_samples" and type(value) is int:
                what, key, now = name, None, value
            else:
                continue
            if not math.isclose(now, right := self._constants.setdefault((what, key), now), rel_tol=1e-9):
                yield f"{what} is {now}, in earlier rows {right}"


class OrderReplay:
    """The state of the data after each step, replayed by `feed`. Rows count in `unit`; an item has `per_item` units.

    Args:
        steps: steps of rollbacks and checkpoints, which records return to.

    Attributes:
        step: the last one that was replayed. ends: steps that ended an epoch, and how many were complete then.
    """

    def __init__(self, feed: Feed, unit: str, per_item: int, steps: Iterable[int] = ()):
        self.feed, self.unit, self.per_item, self.step = feed, unit, per_item, 0
        self.ends: dict[int, int] = {}
        self.inherited: list[tuple[int, int]] = []  # positions that the parent run skipped
        self._steps, self._stood = {*steps}, {0: self._now()}
        self._left: dict[int, FeedState] = {}  # after a step that a later rollback returned to, as in its checkpoint

    def check(self, record: Record) -> Iterator[str]:
        """Defects of the next row or state. After a rollback, other data are expected."""
        if is_rollback(record):
            yield from self._go_back(record)
        elif record.get("event") == "branch":
            yield from self._begin(record)
        elif not is_event(record) and record["step"] > 0:
            yield from self._check(record)

    def at(self, step: int) -> FeedState | None:
        """The state after `step`, in the part of the run that was checked last; None if it is unknown."""
        if not self.step <= step <= self.step + MOST_STEPS:
            return self._stood.get(step)
        while self.step < step:
            self._inherit()
            self.feed.next_step()
            self.step += 1
            if self.feed.ended_epoch:
                self.ends[self.step] = self.feed.epochs
            if self.step in self._steps:
                self._stood[self.step] = self._now()
        return self._stood.get(step) or self._now()

    def _inherit(self) -> None:  # the ranges that the parent run skipped here
        while self.inherited and int(self.feed.positions_from(self.feed.position)[0]) == self.inherited[0][0]:
            self.feed.skip_range(*self.inherited.pop(0))

    def _check(self, record: Record) -> Iterator[str]:
        step, digest, position = record["step"], record.get("order_digest"), record.get("position")
        items, count = consumed_after(self.feed, step), record.get(self.unit)
        gaps = sum(stop - start for start, stop in self.feed.skipped_ranges + self.inherited)
        is_right = count == items * self.per_item if position is None else position == items + gaps
        if not is_right or (stood := self.at(step)) is None:
            yield f"step {step} does not match {self.unit} {count}, position {position}"
            return
        if digest != stood.order_digest:
            yield f"order_digest of step {step} is {str(digest)[:12]}, not {stood.order_digest[:12]}"
        elif "skipped_ranges" in record and json.dumps(record["skipped_ranges"]) != json.dumps(stood.skipped_ranges):
            yield f"skipped {record['skipped_ranges']}, not {stood.skipped_ranges}"
        elif "chain" in record and record.get("epoch") != (epoch := round(stood.position / len(self.feed.order), 4)):
            yield f"epoch of step {step} is {record.get('epoch')}, not {epoch}"
        elif "chain" in record and isinstance(self.feed.order, MixedOrder):
            right = self.feed.order.by_source(stood.position, stood.skipped_ranges, self.unit, self.per_item)
            yield from self._check_sources(record, right)

    def _check_sources(self, record: Record, right: Mapping[str, float]) -> Iterator[str]:
        """Defects of a row's fields of each source. Sources that came later have none."""
        found = {name: value for name, value in record.items() if name.startswith((f"{self.unit}/", "epoch/"))}
        values = list(right.values())  # and not by their names: folders may have moved
        if [*found.values()] != values[: len(found)] or any(values[max(len(found), 2) :]):
            yield f"the sources of step {record['step']} are {found}, not {right}"

    def _go_back(self, record: Record) -> Iterator[str]:
        feed, step, digest = self.feed, record["step"], record.get("order_digest")
        begun, skipped = record.get("from", -1), record.get("skipped_range", [])
        fits = type(begun) is int and 0 <= step < begun and are_ranges([skipped])
        fits = fits and consumed_after(feed, begun) <= skipped[1]
        reached, stood = (self.at(begun), self.at(step)) if fits else (None, None)
        if reached is None or stood is None:
            yield f"from step {begun} to {step} does not match the skipped positions {skipped}"
            return
        for one in (self._left.get(step, stood), stood):  # the checkpoint may be the same again, or a newer one
            feed.load_state_dict(one)
            start = int(feed.positions_from(one.position)[0])
            if [start, reached.position] == skipped:
                break
        self._left = {number: left for number, left in self._left.items() if number < step} | {step: one}
        feed.skip_range(start, reached.position)
        self._stood = {number: kept for number, kept in self._stood.items() if number < step}
        self.ends = {number: epochs for number, epochs in self.ends.items() if number <= step}
        self._stand(step)
        if (skipped, digest) != ([start, reached.position], feed.order_digest):
            right = f"{[start, reached.position]}, order_digest {feed.order_digest[:12]}"
            yield f"skipped {skipped}, order_digest {str(digest)[:12]}, not {right}"

    def _begin(self, record: Record) -> Iterator[str]:
        """A branch continues the order of its parent run, which is replayed from the beginning."""
        step, position, skipped = record["step"], record.get("position"), record.get("skipped_ranges") or []
        gaps = sum(stop - start for start, stop in skipped) if are_ranges(skipped) else -1
        is_right = step >= self.step and position == consumed_after(self.feed, step) + gaps
        self.inherited = [(start, stop) for start, stop in skipped] if is_right else []
        if not is_right or self.at(step) is None:
            yield f"branched off at step {step}, which does not match position {position}"
            return
        self._inherit()
        self._stand(step)
        digest, right = record.get("order_digest"), self.feed.order_digest
        if self.inherited or digest != right:
            yield f"branched off with order_digest {str(digest)[:12]}, not {right[:12]}"

    def _stand(self, step: int) -> None:
        self.step, self._stood[step] = step, self._now()

    def _now(self) -> FeedState:
        return self.feed.state_dict()


def are_ranges(value: Any) -> bool:
    """Whether the value is a list of positions [start, stop], as rollbacks and branches record them."""
    return isinstance(value, list) and all(
        isinstance(one, list) and [*map(type, one)] == [int, int] and 0 <= one[0] < one[1] < 2**62 for one in value
    )


def replay_order(
    config: RunConfig, manifests: Sequence[Manifest], events: Records, states: Records
) -> OrderReplay | None:
    """The order of a run, of a GPT's `manifests`; None if nothing holds a job's samples and global batch yet.
    Raises: UserError for a configuration that no training accepts."""
    records = [*events.values(), *states.values()]
    newest = {name: value for record in records for name, value in record.items()}
    steps = [record["step"] for record in records if is_rollback(record) or not is_event(record)]
    items, share = newest.get("epoch_size"), supervised.contiguous(1, 1)
    if isinstance(config, TrainingConfig):
        size, batch = config.model.block_size, config.global_batch_windows
        windows = [count_windows(manifest.tokens("train"), size) for manifest in manifests]
        if not all(windows):
            raise UserError("model.block_size", size, "is longer than the training split; restore config.yaml")
        _check_step("train.global_batch_tokens", batch)
        return OrderReplay(Feed(order_of(config, windows), GlobalBatch(batch, share)), "tokens", size, steps)
    if not items or not (batch := newest.get("global_batch_size")):
        return None
    _check_step("train.global_batch_size", batch)
    feed = Feed(Order(config.seed, items), GlobalBatch(batch, share, by_epoch=True))
    return OrderReplay(feed, "samples", 1, steps)


def _check_step(field: str, items: int) -> None:
    if not 1 <= items <= MOST_ITEMS:
        raise UserError(field, f"{items} per step", f"should be from 1 to {MOST_ITEMS}; restore config.yaml")


def in_parts(rows: Iterable[tuple[str, Record]], states: Records) -> Iterator[tuple[str, Record]]:
    """Rows and states by part of the run, states after the rows; each rollback begins a part."""
    count = 0
    for place, row in rows:
        if is_rollback(row):
            yield from (item for item in states.items() if item[1].get("rollbacks") == count)
            count += 1
        yield place, row
    yield from (item for item in states.items() if item[1].get("rollbacks", count) == count)


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
        if self.history.at(end - 1) is None and end > self.history.step:
            yield f"the rows after step {self.history.step} are missing"
            return
        missing = [step for step in range(self.reached + 1, end) if (due := self._due(step)) and due.log]
        yield from (f"the row of step {step} is missing" for step in missing[:MOST_MISSING])
        saves = [step for step in range(self.saved_to + 1, end) if (due := self._due(step)) and due.save]
        unsaved = [step for step in saves if step not in self.saved]
        newest = unsaved.pop() if unsaved and one_in_flight else end
        yield from (f"the checkpoint of step {step} was not recorded" for step in unsaved[:MOST_MISSING])
        self.reached, self.saved_to = max(self.reached, end - 1), max(self.saved_to, newest - 1)

    def _due(self, step: int) -> Due | None:
        """The work that was due at a step; None if unknown."""
        if step == self.pending[0]:
            return self.pending[1]
        if step == 0:
            return Due(log=self.validates, evaluate=self.validates)
        self.history.at(step)
        ended, last = step in self.history.ends, step == self.steps
        if isinstance(self.config, TrainingConfig):
            return pretraining.due(self.config, step, last, ended, self.validates)
        assert isinstance(self.config, JobConfig), "the other kinds"
        return supervised.due(self.config, step, last, ended, self.history.ends.get(step, 0))
