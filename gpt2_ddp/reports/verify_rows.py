"""Checks the rows of metrics.jsonl: the chain of hashes, the values, the order of the data, and the due records.

A consistent chain does not make a row true. RULES describes each field alone, except a task's own numbers; `Values`,
`OrderReplay` and `Schedule` compare it with other records. The items of each step follow from seed, step size and
number of items.
A feed that reads no data repeats the steps. The newest start row determines the due records: each process of a run
writes one, with its configuration.
"""

import math
import sys
from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from gpt2_ddp.checkpoint.run_files import (
    METRICS,
    Line,
    is_event,
    is_own,
    is_rollback,
    next_chain,
    parse_lines,
    split_chain,
)
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import MOST_ITEMS, RunConfig
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
from gpt2_ddp.state import FIRST_CHAIN, Count, FeedState, Finite, Mixture
from gpt2_ddp.tasks import pretraining, supervised
from gpt2_ddp.training.task import Due

Record = dict[str, Any]
Records = dict[str, Record]
"""Rows of metrics.jsonl, including events, or states of checkpoints, by their place in the run folder."""
NEARLY = 5e-6
"""Relative difference of sums that another order may cause."""
Whole = Annotated[Count, Field(strict=True)]
Amount = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Range = Annotated[list[Whole], Field(min_length=2, max_length=2)]
Event = Literal["start", "branch", "rollback", "checkpoint", "room", "sample", "end"]


class Rule(NamedTuple):
    """What a field of rows has to be.

    Args:
        kind: type and bounds of its value.
        steps: whether rows of steps may have it; the others are of events alone.
        needed: rows that must have it: an event; `step` for those of steps, except the first one, of the weights before
            the first step.
        tolerance: relative difference from its value by other records.
        again: relative difference when its step is trained again with another order of sums; None: not compared.
    """

    kind: TypeAdapter[Any]
    steps: bool = True
    needed: str = ""
    tolerance: float = 0.0
    again: float | None = None


COUNT, AMOUNT, TEXT, RECORD = TypeAdapter(Whole), TypeAdapter(Amount), TypeAdapter(str), TypeAdapter(Record)
MEASURED = TypeAdapter(Amount | None)
OWN = TypeAdapter(Finite | None, config={"strict": True})
"""Null where the number is not finite or unknown. `OWN`: a task's own numbers, which any row may have."""
TABLE: dict[str, Rule] = {
    "step val_tokens val_samples not_finite memory": Rule(COUNT),
    "data_share tokens_per_second samples_per_second val_accuracy val_top5": Rule(AMOUNT),
    "chain samples_sha256": Rule(TEXT),
    "tokens": Rule(COUNT, again=0.0),
    "samples": Rule(COUNT, again=0.0),
    "epoch": Rule(AMOUNT),
    "skipped": Rule(COUNT, needed="step", again=0.0),
    "order_digest": Rule(TEXT, needed="step", again=0.0),
    "lr": Rule(AMOUNT, needed="step", tolerance=1e-12, again=0.0),
    "loss grad_norm": Rule(MEASURED, needed="step", again=NEARLY),
    "loss_mean": Rule(MEASURED, tolerance=1e-5, again=NEARLY),
    "train_loss": Rule(MEASURED, again=NEARLY),
    "mfu": Rule(MEASURED),
    "val_loss": Rule(MEASURED, again=NEARLY),
    "val_bits_per_byte": Rule(MEASURED, tolerance=1e-9),
    "event": Rule(TypeAdapter(Event), steps=False),
    "epoch_size global_batch_size position": Rule(COUNT, steps=False),
    "steps": Rule(COUNT, steps=False, needed="start"),
    "config": Rule(RECORD, steps=False, needed="start"),
    "from": Rule(COUNT, steps=False, needed="rollback"),
    "skipped_range": Rule(TypeAdapter(Range), steps=False, needed="rollback"),
    "skipped_ranges": Rule(TypeAdapter(list[Range]), steps=False),
    "kept": Rule(TypeAdapter(list[Whole]), steps=False),
    "rejected": Rule(TypeAdapter(list[str]), steps=False),
    "tasks": Rule(RECORD, steps=False),
    "data_manifest": Rule(TEXT, steps=False),
    "mixture": Rule(TypeAdapter(Mixture), steps=False),
    "checkpoint": Rule(TypeAdapter(Record | None), steps=False),
}
RULES = {name: rule for names, rule in TABLE.items() for name in names.split()}
UNKNOWN = Rule(TypeAdapter(Any), steps=False)
MOST_STEPS, MOST_MISSING = 2_000_000, 20
"""Most repeated steps without a row (a minute of work), and named gaps: a file may claim any number."""


def rule_of(name: str) -> Rule:
    """The rule of a field of the trainer, or of its part for a source."""
    return UNKNOWN if is_own(name) else RULES.get(name.partition("/")[0], UNKNOWN)


def fits(kind: TypeAdapter[Any], value: Any) -> bool:
    """Whether a value is of this kind."""
    try:
        kind.validate_python(value)
    except ValidationError:
        return False
    return True


def equal(found: Any, right: Any, tolerance: float = 0.0) -> bool:
    """Whether two values are equal, or numbers within a relative tolerance."""
    is_close = tolerance and None not in (found, right) and math.isclose(found, right, rel_tol=tolerance)
    return found == right or bool(is_close)


def unlike(record: Record, right: Record) -> Iterator[str]:
    """Defects of the fields of a row or state whose `right` values are known from other records."""
    for name, value in right.items():
        if not equal(record.get(name), value, rule_of(name).tolerance):
            yield f"{name} of step {record['step']} is {record.get(name)}, not {value}"


def differing(place: str, found: Record, origin: str, right: Record, names: Iterable[str]) -> list[str]:
    """Defects of the fields `names` at `place`, whose values differ from those at `origin`."""
    wrong = [name for name in names if found.get(name) != right.get(name)]
    return [f"{place}: {name} is {found.get(name)}, in {origin} {right.get(name)}" for name in wrong]


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
        self._invalid: set[int] = set()  # numbers of lines
        self.chain, self.defects, before = FIRST_CHAIN, [], -1
        for line in self._read(sys.maxsize):
            self._lines, place, row = line.number, f"{METRICS}, line {line.number}", line.row or {}
            if problem := _problem(row):
                self.defects.append(f"{place}: {problem}")
                self._invalid.add(line.number)
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
            if line.row and line.number not in self._invalid:
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
    """Why the content of a line is no row, by RULES; empty if it is one."""
    if "step" not in row or not fits(COUNT, row["step"]):
        return "is not a row with a step"
    needed = [name for name, rule in RULES.items() if rule.needed == row["event"]] if is_event(row) else []
    wrong = next((name for name in (*row, *needed) if not fits(rule_of(name).kind, row.get(name))), "")
    return wrong and f"is no row: {wrong} is {row.get(wrong)}"


class Values:
    """Checks the fields of the rows of steps, in their order: by RULES, and against each other and earlier rows."""

    def __init__(self) -> None:
        self._first, self._ended, self._tasks = 0, False, set()
        self._steps, self._skips = array("q", [0]), array("q", [0])  # of the rows that no rollback undid
        self._constants: dict[tuple[str, Any], float] = {}  # numbers that no step changes

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
            self._tasks = {f"{name}_{metric}" for name in row.get("tasks") or () for metric in SCORES}
            self._constants = {} if "mixture" in row else self._constants  # its weights may have changed
        elif event is None:
            yield from self._check_fields(row)
            yield from self._check_numbers(row)

    def _check_fields(self, row: Record) -> Iterator[str]:
        step = row["step"]
        needed = [name for name, rule in RULES.items() if rule.needed == "step" and step > self._first]
        yield from (f"{name} of step {step} is missing" for name in needed if name not in row)
        for name, value in row.items():
            if not is_own(name) and not rule_of(name).steps:
                yield f"has the unknown field {name}"
            elif is_own(name) and not fits(MEASURED if name in self._tasks else OWN, value):
                yield f"{name} of step {step} is {value}"
            elif value is None and name in ("loss", "loss_mean") and not row.get("not_finite"):
                yield f"{name} of step {step} is None"

    def _check_numbers(self, row: Record) -> Iterator[str]:
        """Defects between numbers of the row, and between those and earlier rows."""
        right, step, now, n_scored = {}, row["step"], row.get("skipped"), row.get("val_samples")
        for before, skipped in zip(self._steps[-1:], self._skips[-1:], strict=True):
            if now is not None and not 0 <= now - skipped <= step - before:
                yield f"skipped is {now}, {skipped} at step {before}"
            if step == before + 1 and None not in (row.get("loss"), row.get("loss_mean")) and "not_finite" not in row:
                right["loss_mean"] = row["loss"]  # the mean of one step
        self._steps.append(step)
        self._skips.append(now or 0)
        if n_scored is not None:
            right["val_samples"] = self._constants.setdefault(("val_samples", None), n_scored)
        for name in (name for name in row if name.startswith("val_bits_per_byte")):
            bits, loss = row[name], row.get(name.replace("val_bits_per_byte", "val_loss"))
            if isinstance(bits, float) and isinstance(loss, float) and loss > 0:  # bits in a nat, tokens per byte
                right[name] = loss * self._constants.setdefault((name, row.get("val_tokens")), bits / loss)
        yield from unlike(row, right)


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
        self._steps, self._stood = {*steps}, {0: self.feed.state_dict()}
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
                self._stood[self.step] = self.feed.state_dict()
        return self._stood.get(step) or self.feed.state_dict()

    def _inherit(self) -> None:  # the ranges that the parent run skipped here
        while self.inherited and int(self.feed.positions_from(self.feed.position)[0]) == self.inherited[0][0]:
            self.feed.skip_range(*self.inherited.pop(0))

    def _check(self, record: Record) -> Iterator[str]:
        step, count, position, order = record["step"], record.get(self.unit), record.get("position"), self.feed.order
        items = consumed_after(self.feed, step)
        gaps = sum(stop - start for start, stop in self.feed.skipped_ranges + self.inherited)
        is_right = count == items * self.per_item if position is None else position == items + gaps
        if not is_right or (stood := self.at(step)) is None:
            yield f"step {step} does not match {self.unit} {count}, position {position}"
            return
        right: Record = {"order_digest": stood.order_digest}
        if "skipped_ranges" in record:
            right["skipped_ranges"] = [[*one] for one in stood.skipped_ranges]
        if "chain" in record:
            right["epoch"] = round(stood.position / len(order), 4)
        if "chain" in record and isinstance(order, MixedOrder):  # compared in their order: folders may have moved
            known = order.by_source(stood.position, stood.skipped_ranges, self.unit, self.per_item)
            names = [name for name in record if name.startswith((f"{self.unit}/", "epoch/"))]
            right |= dict(zip(names, known.values(), strict=False))
            if len(names) > len(known) or any([*known.values()][max(len(names), 2) :]):  # later sources have none
                yield f"the sources of step {step} are {', '.join(names)}, not {', '.join(known)}"
        yield from unlike(record, right)

    def _go_back(self, record: Record) -> Iterator[str]:
        feed, step = self.feed, record["step"]
        begun, skipped = record["from"], record["skipped_range"]
        is_possible = step < begun and consumed_after(feed, begun) <= skipped[1]
        reached, stood = (self.at(begun), self.at(step)) if is_possible else (None, None)
        if reached is None or stood is None:
            yield f"from step {begun} to {step} does not match the skipped positions {skipped}"
            return
        for one in (self._left.get(step, stood), stood):  # the checkpoint may be the same again, or a newer one
            feed.load_state_dict(one)
            start = int(feed.positions_from(one.position)[0])
            if [start, reached.position] == skipped:
                break
        feed.skip_range(start, reached.position)
        self._left = {number: left for number, left in self._left.items() if number < step} | {step: one}
        self._stood = {number: kept for number, kept in self._stood.items() if number < step}
        self.ends = {number: epochs for number, epochs in self.ends.items() if number <= step}
        self.step, self._stood[step] = step, feed.state_dict()
        yield from unlike(record, {"skipped_range": [start, reached.position], "order_digest": feed.order_digest})

    def _begin(self, record: Record) -> Iterator[str]:
        """A branch continues the order of its parent run, which is replayed from the beginning."""
        step, position, skipped = record["step"], record.get("position"), record.get("skipped_ranges", [])
        gaps = sum(stop - start for start, stop in skipped)
        is_right = step >= self.step and position == consumed_after(self.feed, step) + gaps
        is_right = is_right and all(start < stop for start, stop in skipped)
        self.inherited = [(start, stop) for start, stop in skipped] if is_right else []
        if not is_right or self.at(step) is None:
            yield f"branched off at step {step}, which does not match position {position}"
            return
        self._inherit()
        self.step, self._stood[step] = step, self.feed.state_dict()
        if self.inherited:
            yield f"branched off after the skipped positions {self.inherited}, which its parent run did not reach"
        yield from unlike(record, {"order_digest": self.feed.order_digest})


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
        return OrderReplay(Feed(order_of(config, windows), GlobalBatch(batch, share)), "tokens", size, steps)
    if not items or not (batch := newest.get("global_batch_size")):
        return None
    if not 1 <= batch <= MOST_ITEMS:
        hint = f"should be from 1 to {MOST_ITEMS}; restore config.yaml"
        raise UserError("train.global_batch_size", f"{batch} per step", hint)
    feed = Feed(Order(config.seed, items), GlobalBatch(batch, share, by_epoch=True))
    return OrderReplay(feed, "samples", 1, steps)


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
    first start may be at a later step. `manifests`: of a GPT's data."""

    def __init__(self, config: RunConfig, history: OrderReplay, is_branch: bool, manifests: Sequence[Manifest] = ()):
        self.config, self.history, self.is_branch, self.manifests = config, history, is_branch, manifests
        self.validates = not isinstance(config, TrainingConfig) or bool(source_weights(config, manifests))
        self.steps: int | None = None  # of the whole run, by the start in force; None before the first one
        self.peak: float | None = None  # rate of a small job
        self.val_tokens: int | None = None  # that an evaluation scores; None: unknown
        self.started = -1  # the newest start's step, where a pending sample may follow
        self.reached, self.saved_to = -1, 0  # steps of which rows and checkpoints have been looked for
        self.saved: set[int] = set()
        self.pending: tuple[int, Due | None] = (-1, None)  # a step whose row the next session writes; None: it may

    def check(self, row: Record) -> Iterator[str]:
        """Defects of the next row, and what is missing before it."""
        step, event = row["step"], row.get("event")
        if event == "start":
            yield from self._start(row)
        elif event == "branch" or self.steps is None:  # before the first start, `Log` reports the rows
            self.reached = self.saved_to = step
        elif step > self.steps:
            yield f"step {step} in a run of {self.steps} steps"
        elif event is None:
            yield from self._check_row(row)
        elif event == "checkpoint":
            self.saved.add(step)
        elif event == "sample":
            due = step > self.started and not self.config.eval_patience and self._due(step)
            if due and not due.sample:
                yield f"no sample was due at step {step}"
        elif event == "rollback":
            yield from self._missing(min(row["from"], self.steps))
            self.reached = self.saved_to = step
            self.saved = {saved for saved in self.saved if saved <= step}
        elif event == "end":  # a stop or a divergence may leave its own step unfinished
            yield from self._missing(step + (row.get("outcome") == "completed"))

    def _check_row(self, row: Record) -> Iterator[str]:
        step = row["step"]
        yield from self._missing(step, one_in_flight=True)
        due = self._due(step)
        if due and not due.log:
            yield f"no row was due at step {step}"
        elif due and due.evaluate != ("val_loss" in row):
            yield f"step {step} has {'no' if due.evaluate else 'a'} val_loss, unlike eval.every"
        right = {"lr": self._rate(step), "val_tokens": self.val_tokens}
        yield from unlike(row, {name: value for name, value in right.items() if name in row and value is not None})
        self.reached = step

    def _rate(self, step: int) -> float | None:
        """The learning rate of a step; None if its peak or its end is unknown."""
        if isinstance(self.config, TrainingConfig):
            is_known = self.config.optim.decay_steps or self.config.optim.schedule == "constant"
            return lr_at(step, self.config.optim) if is_known else None
        assert isinstance(self.config, JobConfig), "the other kinds"
        epoch_steps = math.ceil(len(self.history.feed.order) / self.history.feed.step_size)
        return supervised.job_schedule(self.config, self.peak, epoch_steps)(step) if self.peak else None

    def _start(self, row: Record) -> Iterator[str]:
        step = row["step"]
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
        self.val_tokens = self._count_scored(self.config) if isinstance(self.config, TrainingConfig) else None

    def _count_scored(self, config: TrainingConfig) -> int | None:
        """The validation splits of positive weight share `eval.tokens` equally."""
        if (tokens := config.eval.tokens) == "auto":  # which is resolved when the run starts
            return None
        manifests = self.manifests[: len(config.data.paths)]
        scored = [manifests[number] for number, weight in source_weights(config, manifests).items() if weight]
        share = tokens and -(-tokens // max(len(scored), 1))
        return sum(count_scored(one.tokens("val"), config.model.block_size, share) for one in scored)

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
