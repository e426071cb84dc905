"""The state of each checkpoint, compared field by field with the rows before it.

Whoever forges a run can compute all hashes again. So a state is compared with what the rows say in
other words: scores, rollbacks, the newest start and configuration, and the row of the checkpoint's
own step. `recompute` compares the feed.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from gpt2_ddp.checkpoint.format import CONFIG, STATE, Checkpoint
from gpt2_ddp.checkpoint.verify import Recorded, recorded_checkpoint
from gpt2_ddp.config.base import flat
from gpt2_ddp.records.rows import METRICS, STATUS, Outcome, Row, is_rollback
from gpt2_ddp.state import Best, Parent, TaskState
from gpt2_ddp.training.guard import LATE

ABSENT = "absent"
SIGMAS = ("sigmas", "norm_sigmas", "loss_sigmas")
"""Fields of the section guard that need statistics; the last two of older releases."""
NEARLY = 1e-6
"""Relative difference of two sums of losses."""


class Epoch(NamedTuple):
    """The losses since the last epoch ended."""

    loss: float  # sum
    units: float


class AfterRow(NamedTuple):
    """What the rows of steps say after one of them.

    Attributes:
        row: the row.
        previous: the row before.
        scores: the newest of each name.
        epoch: None if a step was skipped since it began, or if another run began it.
    """

    step: int
    row: Row
    previous: Row
    scores: Row
    scored_at: int | None
    best: Best
    epoch: Epoch | None


FIRST = AfterRow(0, {}, {}, {}, None, Best(), Epoch(0.0, 0))
"""Before the first row."""


class Comparison(NamedTuple):
    """A field of a state, and what it should be by the rows."""

    name: str
    found: object
    right: object


class Expected:
    """The state that a run should have, by its rows so far.

    Args:
        names: of scores, in any checkpoint.
        returns: steps that rollbacks return to.
    """

    def __init__(self, names: Iterable[str], returns: Iterable[int]):
        self._names = {*names, "val_loss"}
        self._returns = sorted(returns)
        self._start: Row = {}
        self._branch: Row = {}
        self._config: Row = {}
        self._rollbacks = 0
        self._recorded: set[int] = set()  # steps of all checkpoints so far
        self._newest: Recorded | None = None
        self._has_ended = False
        self._now = FIRST
        self._before: dict[int, AfterRow] = {}  # of each step that rollbacks return to

    def add(self, row: Row) -> Iterator[str]:
        """Takes the next row. Yields what contradicts the events before."""
        event = row.get("event")
        yield from self._event_defects(row)
        self._config = row.get("config", self._config)
        if event == "start":
            self._start = row
        elif event == "branch":
            self._branch = row
            self._now = self._now._replace(epoch=None)
        elif is_rollback(row):
            self._rollbacks += 1
            if self._now.step > row["step"]:
                self._now = self._before.get(row["step"], FIRST)
            self._now = self._now._replace(epoch=None)
        elif event is None:
            yield from self._add_step(row)

    def _event_defects(self, row: Row) -> Iterator[str]:
        """Events that list checkpoints which no row recorded; ends of other steps than
        the newest checkpoint's."""
        event = row.get("event")
        step = row["step"]
        saved = recorded_checkpoint(row) if event else None
        if self._has_ended:  # a resumed run drops the end before it
            yield "follows the end of the run"
        self._has_ended = event == "end"
        if event == "checkpoint" and not saved:
            yield f"the checkpoint of step {step} has no sha256"
        names_one = event == "start" and row.get("checkpoint") is not None
        if names_one and (not saved or saved.step != step):
            yield f"a start at step {step} has the checkpoint {row['checkpoint']}"
        if event == "checkpoint" and saved == self._newest:
            yield f"the checkpoint of step {step} is recorded twice"
        if saved:
            self._newest = saved
            self._recorded.add(saved.step)
        if event not in ("start", "checkpoint", "end"):
            return
        kept = row.get("kept")
        if (
            kept is None
            or not self._recorded.issuperset(kept)
            or (saved and saved.step not in kept)
        ):
            recorded = f"recorded are {sorted(self._recorded)}"
            yield f"the {event} at step {step} keeps the checkpoints {kept}, {recorded}"
        if event == "end" and row.get("outcome") not in get_args(Outcome):
            yield f"the outcome is {row.get('outcome')}"
        newest = self._newest.step if self._newest else None
        if event == "end" and row.get("outcome") != "diverged" and step != newest:
            yield f"the end is at step {step}, the newest checkpoint at {newest}"

    def _add_step(self, row: Row) -> Iterator[str]:
        step = row["step"]
        before = self._now
        skipped = row.get("skipped")
        skipped_before = before.row.get("skipped")
        if isinstance(skipped, int) and isinstance(skipped_before, int):
            more = skipped - skipped_before
            if not 0 <= more <= step - before.step:
                problem = f"of step {before.step} {skipped_before}"
                yield f"skipped of step {step} is {skipped}, {problem}"
        begin = bisect_left(self._returns, before.step)
        end = bisect_left(self._returns, step)
        for passed in self._returns[begin:end]:
            self._before[passed] = before
        scores = before.scores | {name: row[name] for name in self._names if name in row}
        scored_at = before.scored_at
        best = before.best
        if "val_loss" in row:
            scored_at = step
            judged = {name: _number(row.get(name)) for name in ("val_loss", "val_tokens")}
            best = best.after(step, judged)
        epoch = _epoch_after(before, row)
        self._now = AfterRow(step, row, before.row, scores, scored_at, best, epoch)

    def defects(self, place: str, checkpoint: Checkpoint) -> Iterator[str]:
        """Fields of a checkpoint, after the last of these rows, that the rows contradict."""
        comparisons = (
            *self._progress(checkpoint),
            *self._sums(checkpoint),
            *self._identity(checkpoint),
        )
        for name, found, right in {each.name: each for each in comparisons}.values():
            if found != right:
                yield f"{place}/{STATE}: {name} is {found}, in {METRICS} {right}"
        yield from config_differences(f"{place}/{CONFIG}", checkpoint.config, self._config)

    def _progress(self, checkpoint: Checkpoint) -> Iterator[Comparison]:
        progress = checkpoint.state.progress
        now = self._now
        parent = progress.branched_from
        branch = None
        if self._branch:
            branch = {name: self._branch.get(name) for name in Parent.model_fields}
        yield Comparison("progress.rollbacks", progress.rollbacks, self._rollbacks)
        yield Comparison("progress.branched_from", parent and parent.model_dump(), branch)
        for name in sorted(now.scores.keys() | progress.scores.keys()):
            found = progress.scores.get(name, ABSENT)
            right = now.scores.get(name, ABSENT)
            yield Comparison(f"progress.scores.{name}", found, right)
        if now.scored_at is not None:
            yield Comparison("progress.scored_at", progress.scored_at, now.scored_at)
            best = progress.best.model_dump()
            yield Comparison("progress.best", best, now.best.model_dump())
        if pending := progress.pending.row:
            step = pending.get("step")
            yield Comparison("progress.pending.row.step", step, checkpoint.step)

    def _sums(self, checkpoint: Checkpoint) -> Iterator[Comparison]:
        """Of the row of the checkpoint's own step, if there is one."""
        state = checkpoint.state
        now = self._now
        pending = state.progress.pending
        losses = state.losses
        row = pending.row
        if not row and now.step == checkpoint.step:
            row = now.row
        if "order_digest" in row:
            digest = state.feed.order_digest
            yield Comparison("feed.order_digest", digest, row["order_digest"])
        if pending.evaluate:
            yield Comparison("progress.pending.row", bool(pending.row), True)
        if "loss_mean" in row:
            yield Comparison("losses.skipped", losses.skipped, row.get("skipped", ABSENT))
            yield Comparison("losses.since_row", [*losses.since_row], [0, 0, 0])
        if "loss_mean" in row and not pending.row and now.epoch:
            total, units = now.epoch
            # the rows have means, so their sum is rounded
            is_near = math.isclose(losses.epoch.loss, total, rel_tol=NEARLY, abs_tol=NEARLY)
            right = [losses.epoch.loss if is_near else total, units, units]
            yield Comparison("losses.epoch", [*losses.epoch], right)
        yield from self._guard(checkpoint, row)

    def _guard(self, checkpoint: Checkpoint, row: Row) -> Iterator[Comparison]:
        state = checkpoint.state
        step = checkpoint.step
        guard = state.guard
        settings = self._config.get("guard")
        if isinstance(settings, dict) and all(settings.get(name) is None for name in SIGMAS):
            yield Comparison("guard.losses", [*guard.losses], [0, 0, 0])
            yield Comparison("optimizer.norms", [*state.optimizer.norms], [0, 0, 0])
            if not state.losses.skipped:
                yield Comparison("guard.first_bad", guard.first_bad, None)
        if "unjudged" not in guard.model_fields_set:  # older releases kept other numbers
            return
        # a resumed run may have been of such a release: then it has steps of its own alone
        since_start = min(LATE, step - self._start.get("step", step))
        count = max(len(guard.unjudged), since_start)
        steps = [unjudged.step for unjudged in guard.unjudged[:9]]
        right = [*range(step - min(count, LATE) + 1, step + 1)]
        yield Comparison("guard.unjudged", steps, right)
        if count >= LATE:
            yield Comparison("guard.judged", guard.judged, step - LATE)
        newest_rows = (self._now.previous, self._now.row, row)
        losses = {newest.get("step"): _number(newest.get("loss")) for newest in newest_rows}
        for unjudged in guard.unjudged[-LATE:]:
            name = f"guard.unjudged of step {unjudged.step}"
            loss = losses.get(unjudged.step)
            if loss is not None:
                yield Comparison(name, unjudged.loss, loss)
            if not state.losses.skipped:
                yield Comparison(f"{name} is bad", unjudged.bad, False)

    def _identity(self, checkpoint: Checkpoint) -> Iterator[Comparison]:
        """The run, what it trains on and with, as the start before recorded it. A class may add
        numbers of its own to the task's state, which change."""
        state = checkpoint.state
        task = checkpoint.state.task
        changing = {*(task.model_extra or ()), "step"}
        if type(task) is TaskState:
            return
        identity = {name: value for name, value in state.identity.items() if name not in changing}
        for name, value in identity.items():
            yield Comparison(name, value, self._start.get(name, ABSENT))
        for name in type(task).model_fields.keys() & self._start.keys() - identity.keys():
            yield Comparison(name, ABSENT, self._start[name])


def config_differences(file: str, found: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The fields of a configuration that are not those in the rows."""
    in_file = flat(found)
    in_rows = flat(right)
    return [
        f"{file}: {name} is {in_file.get(name)}, in {METRICS} {in_rows.get(name)}"
        for name in in_rows | in_file
        if in_file.get(name, ...) != in_rows.get(name, ...)
    ]


def end_defect(status: Row, events: Sequence[Row], last: Row) -> str:
    """Why the rows lack the end that status.json has; empty if they do not.

    Args:
        status: `ended_status`, the same before the rows were read and after.
        events: the rows of events.
        last: the last row. A start may be it: a kill may come before its status.
    """
    if not status or last.get("event") == "start":
        return ""
    newest = next((row for row in reversed(events) if row["event"] in ("start", "end")), {})
    recorded = (newest.get("outcome"), newest.get("step"))
    if recorded == (status["state"], status.get("step")):
        return ""
    ended = f"{status['state']} at step {status.get('step')}"
    return f"{METRICS}: {STATUS} says that the run {ended}, but the row of that end is missing"


def _epoch_after(before: AfterRow, row: Row) -> Epoch | None:
    """`AfterRow.epoch` after the next row of a step."""
    if "train_loss" in row:  # the epoch ended
        return Epoch(0.0, 0)
    if "loss_mean" not in row:  # nothing was trained
        return before.epoch
    unit = "samples" if "samples" in row else "tokens"
    loss = _number(row["loss_mean"])
    first = _number(before.row.get(unit, 0))
    last = _number(row.get(unit))
    is_whole = row.get("skipped") == before.row.get("skipped", 0) and "not_finite" not in row
    if before.epoch is None or loss is None or first is None or last is None or not is_whole:
        return None
    return Epoch(before.epoch.loss + loss * (last - first), before.epoch.units + last - first)


def _number(value: object) -> float | None:
    """A finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None
