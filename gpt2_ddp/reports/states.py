"""What the rows before a checkpoint know of its state, compared with it field by field.

A patient forger computes all hashes again. So a state is compared with what the rows say in other
words: scores, rollbacks, the newest start and configuration, and the row of the checkpoint's own
step. `recompute` compares the feed.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, get_args

from gpt2_ddp.checkpoint.format import CONFIG, STATE, Checkpoint
from gpt2_ddp.checkpoint.verify import recorded_checkpoint
from gpt2_ddp.config.base import flat
from gpt2_ddp.records.rows import METRICS, Outcome, is_rollback
from gpt2_ddp.state import Best, Parent, TaskState
from gpt2_ddp.training.guard import LATE

Record = dict[str, Any]
ABSENT = "absent"
SIGMAS = "sigmas", "norm_sigmas", "loss_sigmas"
"""Fields of the section guard that need statistics; the last two of older releases."""
NEARLY = 1e-6
"""Relative difference of two sums of losses."""


class Facts(NamedTuple):
    """What the rows of steps know after one of them.

    Attributes:
        row, previous: the row, and the one before. scores: the newest of each name.
        epoch: sum of the losses and number of their units since the last epoch ended; None if a
            step was skipped since, or if another run began the epoch.
    """

    step: int
    row: Record
    previous: Record
    scores: Record
    scored_at: int | None
    best: Best
    epoch: tuple[float, float] | None


FIRST = Facts(0, {}, {}, {}, None, Best(), (0.0, 0))
"""Before the first row."""


class Known:
    """What the rows so far know of a run.

    Args:
        names: of scores, in any checkpoint. returns: steps that rollbacks return to.
    """

    def __init__(self, names: Iterable[str], returns: Iterable[int]):
        self._names, self._returns = {*names, "val_loss"}, sorted(returns)
        self._start: Record = {}
        self._branch: Record = {}
        self._config: Record = {}
        self._rollbacks = 0
        self._recorded: set[int] = set()  # steps of all checkpoints so far
        self._newest: Any = None  # step and hash of the last of them
        self._has_ended = False
        self._facts = FIRST
        self._before: dict[int, Facts] = {}  # of each step that rollbacks return to

    def add(self, row: Record) -> Iterator[str]:
        """Takes the next row. Yields what contradicts the events before."""
        event = row.get("event")
        yield from self._event_defects(row)
        self._config = row.get("config", self._config)
        if event == "start":
            self._start = row
        elif event == "branch":
            self._branch, self._facts = row, self._facts._replace(epoch=None)
        elif is_rollback(row):
            self._rollbacks += 1
            if self._facts.step > row["step"]:
                self._facts = self._before.get(row["step"], FIRST)
            self._facts = self._facts._replace(epoch=None)
        elif event is None:
            yield from self._add_step(row)

    def _event_defects(self, row: Record) -> Iterator[str]:
        """Events that list checkpoints which no row recorded; ends of other steps than the newest
        checkpoint's."""
        event = row.get("event")
        step = row["step"]
        saved = recorded_checkpoint(row) if event else None
        if self._has_ended:  # a resumed run drops the end before it
            yield "follows the end of the run"
        self._has_ended = event == "end"
        if event == "checkpoint" and not saved:
            yield f"the checkpoint of step {step} has no sha256"
        if (
            event == "start"
            and row.get("checkpoint") is not None
            and (not saved or saved[0] != step)
        ):
            yield f"a start at step {step} has the checkpoint {row['checkpoint']}"
        if event == "checkpoint" and saved == self._newest:
            yield f"the checkpoint of step {step} is recorded twice"
        if saved:
            self._newest = saved
            self._recorded.add(saved[0])
        if event not in ("start", "checkpoint", "end"):
            return
        kept = row.get("kept")
        if kept is None or not self._recorded.issuperset(kept) or (saved and saved[0] not in kept):
            yield f"the {event} at step {step} keeps the checkpoints {kept}, recorded are {sorted(self._recorded)}"
        if event == "end" and row.get("outcome") not in get_args(Outcome):
            yield f"the outcome is {row.get('outcome')}"
        newest = self._newest and self._newest[0]
        if event == "end" and row.get("outcome") != "diverged" and step != newest:
            yield f"the end is at step {step}, the newest checkpoint at {newest}"

    def _add_step(self, row: Record) -> Iterator[str]:
        step = row["step"]
        before = self._facts
        skipped = row.get("skipped")
        first = before.row.get("skipped")
        if (
            isinstance(skipped, int)
            and isinstance(first, int)
            and not 0 <= skipped - first <= step - before.step
        ):
            yield f"skipped of step {step} is {skipped}, of step {before.step} {first}"
        for passed in self._returns[
            bisect_left(self._returns, before.step) : bisect_left(self._returns, step)
        ]:
            self._before[passed] = before
        scores = before.scores | {name: row[name] for name in self._names if name in row}
        scored_at = before.scored_at
        best = before.best
        if "val_loss" in row:
            scored_at = step
            best = best.after(
                step, {name: _number(row.get(name)) for name in ("val_loss", "val_tokens")}
            )
        self._facts = Facts(
            step, row, before.row, scores, scored_at, best, _epoch_after(before, row)
        )

    def defects(self, place: str, checkpoint: Checkpoint) -> Iterator[str]:
        """Fields of a checkpoint, after the last of these rows, that the rows contradict."""
        found = {}
        right = {}
        for name, value, other in (
            *self._progress(checkpoint),
            *self._sums(checkpoint),
            *self._identity(checkpoint),
        ):
            found[name] = value
            right[name] = other
        for name, other in right.items():
            if found[name] != other:
                yield f"{place}/{STATE}: {name} is {found[name]}, in {METRICS} {other}"
        yield from config_differences(f"{place}/{CONFIG}", checkpoint.config, self._config)

    def _progress(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        progress = checkpoint.state.progress
        facts = self._facts
        parent = progress.branched_from
        branch = (
            {name: self._branch.get(name) for name in Parent.model_fields} if self._branch else None
        )
        yield "progress.rollbacks", progress.rollbacks, self._rollbacks
        yield "progress.branched_from", parent and parent.model_dump(), branch
        for name in sorted(facts.scores.keys() | progress.scores.keys()):
            yield (
                f"progress.scores.{name}",
                progress.scores.get(name, ABSENT),
                facts.scores.get(name, ABSENT),
            )
        if facts.scored_at is not None:
            yield "progress.scored_at", progress.scored_at, facts.scored_at
            yield "progress.best", progress.best.model_dump(), facts.best.model_dump()
        if pending := progress.pending.row:
            yield "progress.pending.row.step", pending.get("step"), checkpoint.step

    def _sums(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        """Of the row of the checkpoint's own step, if there is one."""
        state = checkpoint.state
        step = checkpoint.step
        facts = self._facts
        pending = state.progress.pending
        losses = state.losses
        row = pending.row or (facts.row if facts.step == step else {})
        if "order_digest" in row:
            yield "feed.order_digest", state.feed.order_digest, row["order_digest"]
        if pending.evaluate:
            yield "progress.pending.row", bool(pending.row), True
        if "loss_mean" in row:
            yield "losses.skipped", losses.skipped, row.get("skipped", ABSENT)
            yield "losses.since_row", [*losses.since_row], [0, 0, 0]
        if "loss_mean" in row and not pending.row and facts.epoch:
            total, units = facts.epoch
            is_near = math.isclose(losses.epoch.loss, total, rel_tol=NEARLY, abs_tol=NEARLY)
            yield (
                "losses.epoch",
                [*losses.epoch],
                [losses.epoch.loss if is_near else total, units, units],
            )
        yield from self._guard(checkpoint, row)

    def _guard(self, checkpoint: Checkpoint, row: Record) -> Iterator[tuple[str, Any, Any]]:
        state = checkpoint.state
        step = checkpoint.step
        guard = state.guard
        settings = self._config.get("guard")
        if isinstance(settings, dict) and all(settings.get(name) is None for name in SIGMAS):
            yield "guard.losses", [*guard.losses], [0, 0, 0]
            yield "optimizer.norms", [*state.optimizer.norms], [0, 0, 0]
            if not state.losses.skipped:
                yield "guard.first_bad", guard.first_bad, None
        if "unjudged" not in guard.model_fields_set:  # older releases kept other numbers
            return
        # a resumed run may have been of such a release
        known = min(LATE, step - self._start.get("step", step))
        count = max(len(guard.unjudged), known)
        yield (
            "guard.unjudged",
            [one.step for one in guard.unjudged[:9]],
            [*range(step - min(count, LATE) + 1, step + 1)],
        )
        if count >= LATE:
            yield "guard.judged", guard.judged, step - LATE
        losses = {
            known.get("step"): _number(known.get("loss"))
            for known in (self._facts.previous, self._facts.row, row)
        }
        for one in guard.unjudged[-LATE:]:
            if (loss := losses.get(one.step)) is not None:
                yield f"guard.unjudged of step {one.step}", one.loss, loss
            if not state.losses.skipped:
                yield f"guard.unjudged of step {one.step} is bad", one.bad, False

    def _identity(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        """The run, what it trains on and with, as the start before recorded it. A class may add
        numbers of its own to the task's state, which change."""
        state = checkpoint.state
        task = checkpoint.state.task
        changing = {*(task.model_extra or ()), "step"}
        if type(task) is TaskState:
            return
        identity = {name: value for name, value in state.identity.items() if name not in changing}
        for name, value in identity.items():
            yield name, value, self._start.get(name, ABSENT)
        for name in type(task).model_fields.keys() & self._start.keys() - identity.keys():
            yield name, ABSENT, self._start[name]


def config_differences(file: str, found: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    """The fields of a configuration that are not those in the rows."""
    now = flat(found)
    before = flat(right)
    names = [name for name in before | now if now.get(name, ...) != before.get(name, ...)]
    return [f"{file}: {name} is {now.get(name)}, in {METRICS} {before.get(name)}" for name in names]


def _epoch_after(before: Facts, row: Record) -> tuple[float, float] | None:
    """`Facts.epoch` after the next row of a step."""
    if "train_loss" in row or "loss_mean" not in row:  # the epoch ended, or nothing was trained
        return (0.0, 0) if "train_loss" in row else before.epoch
    unit = "samples" if "samples" in row else "tokens"
    loss = _number(row["loss_mean"])
    first = _number(before.row.get(unit, 0))
    last = _number(row.get(unit))
    is_whole = row.get("skipped") == before.row.get("skipped", 0) and "not_finite" not in row
    if before.epoch is None or loss is None or first is None or last is None or not is_whole:
        return None
    return before.epoch[0] + loss * (last - first), before.epoch[1] + last - first


def _number(value: Any) -> float | None:
    """A finite number; None for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
