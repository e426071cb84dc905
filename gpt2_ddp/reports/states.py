"""What the rows before a checkpoint know of its state, compared with it field by field.

A patient forger computes all hashes again. So a state is compared with what the rows say in other words: scores,
rollbacks, the newest start and configuration, and the row of the checkpoint's own step. `recompute` compares the feed.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.checkpoint import CONFIG, STATE, Checkpoint
from gpt2_ddp.checkpoint.run_files import METRICS, is_rollback
from gpt2_ddp.config.base import flat
from gpt2_ddp.state import Best, Parent, TaskState
from gpt2_ddp.training.guard import LATE

Record = dict[str, Any]
ABSENT = "absent"


class Facts(NamedTuple):
    """What the rows of steps know after one of them: its step, the row, the newest scores, and the best one."""

    step: int = 0
    row: Record = {}
    scores: Record = {}
    scored_at: int | None = None
    best: Best = Best()


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
        self._facts = Facts()
        self._before: dict[int, Facts] = {}  # of each step that rollbacks return to

    def add(self, row: Record) -> None:
        """Takes the next row."""
        event = row.get("event")
        self._config = row.get("config", self._config)
        if event == "start":
            self._start = row
        elif event == "branch":
            self._branch = row
        elif is_rollback(row):
            self._rollbacks += 1
            if self._facts.step > row["step"]:
                self._facts = self._before.get(row["step"], Facts())
        elif event is None:
            self._add_step(row)

    def _add_step(self, row: Record) -> None:
        step, before = row["step"], self._facts
        for passed in self._returns[bisect_left(self._returns, before.step) : bisect_left(self._returns, step)]:
            self._before[passed] = before
        scores = before.scores | {name: row[name] for name in self._names if name in row}
        scored_at, best = before.scored_at, before.best
        if "val_loss" in row:
            scored_at = step
            best = best.after(step, {name: _number(row.get(name)) for name in ("val_loss", "val_tokens")})
        self._facts = Facts(step, row, scores, scored_at, best)

    def defects(self, place: str, checkpoint: Checkpoint) -> Iterator[str]:
        """Fields of a checkpoint, after the last of these rows, that the rows contradict."""
        found, right = {}, {}
        for name, value, other in (*self._progress(checkpoint), *self._sums(checkpoint), *self._identity(checkpoint)):
            found[name], right[name] = value, other
        for name, other in right.items():
            if found[name] != other:
                yield f"{place}/{STATE}: {name} is {found[name]}, in {METRICS} {other}"
        yield from config_differences(f"{place}/{CONFIG}", checkpoint.config, self._config)

    def _progress(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        progress, facts = checkpoint.state.progress, self._facts
        parent = progress.branched_from
        branch = {name: self._branch.get(name) for name in Parent.model_fields} if self._branch else None
        yield "progress.rollbacks", progress.rollbacks, self._rollbacks
        yield "progress.branched_from", parent and parent.model_dump(), branch
        for name in sorted(facts.scores.keys() | progress.scores.keys()):
            yield f"progress.scores.{name}", progress.scores.get(name, ABSENT), facts.scores.get(name, ABSENT)
        if facts.scored_at is not None:
            yield "progress.scored_at", progress.scored_at, facts.scored_at
            yield "progress.best", progress.best.model_dump(), facts.best.model_dump()
        if pending := progress.pending.row:
            yield "progress.pending.row.step", pending.get("step"), checkpoint.step

    def _sums(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        """Of the row of the checkpoint's own step, if there is one."""
        state, step = checkpoint.state, checkpoint.step
        row = state.progress.pending.row or (self._facts.row if self._facts.step == step else {})
        if "order_digest" in row:
            yield "feed.order_digest", state.feed.order_digest, row["order_digest"]
        if "loss_mean" in row:
            yield "losses.skipped", state.losses.skipped, row.get("skipped", ABSENT)
            yield "losses.since_row", [*state.losses.since_row], [0, 0, 0]
        if "unjudged" not in state.guard.model_fields_set:  # older releases kept other numbers
            return
        unjudged = state.guard.unjudged[-LATE - 1 :]
        yield "guard.unjudged", [one.step for one in unjudged], [*range(step - len(unjudged) + 1, step + 1)]
        if len(unjudged) >= LATE:
            yield "guard.judged", state.guard.judged, step - LATE
        if unjudged and unjudged[-1].step == step and _number(row.get("loss")) is not None:
            yield "guard.unjudged.loss", unjudged[-1].loss, row["loss"]

    def _identity(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Any, Any]]:
        """The run, what it trains on and with, as the start before recorded it. A class may add numbers of its own to
        the task's state, which change."""
        state, task = checkpoint.state, checkpoint.state.task
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
    now, before = flat(found), flat(right)
    names = [name for name in before | now if now.get(name, ...) != before.get(name, ...)]
    return [f"{file}: {name} is {now.get(name)}, in {METRICS} {before.get(name)}" for name in names]


def _number(value: object) -> float | None:
    """A finite number; None for any other value."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None
