"""The rows of metrics.jsonl: are they all there, in their order, with the hashes that chain them?

What should be there follows from the start that is in force: each process of a run begins with a row of its own, which
holds its configuration.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from gpt2_ddp.checkpoint.run_files import FIRST_CHAIN, is_event, is_rollback, next_chain, read_lines, split_chain
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.optim import lr_at
from gpt2_ddp.reports.verify_order import OrderReplay, Record, Records
from gpt2_ddp.tasks import pretraining, supervised
from gpt2_ddp.training.task import Due

SHAPES: dict[str, type | tuple[type, ...]] = {
    "lr": (int, float),
    "config": dict,
    "steps": int,
    "kept": list,
    "checkpoint": dict,
    "chain": str,
}
"""What a row's fields are, where they are there and not null."""


def read_metrics(file: Path) -> tuple[Records, list[str]]:
    """The rows of metrics.jsonl, events among them, and what is wrong with their steps and their chain. A torn last
    line is what a kill leaves, and no defect."""
    rows: Records = {}
    defects, before, chain = [], -1, FIRST_CHAIN
    for line in read_lines(file):
        place = f"metrics.jsonl, line {line.number}"
        if line.torn:
            continue
        if line.row is None or type(line.row.get("step")) is not int or not _is_sound(line.row):
            defects.append(f"{place}: is not a row with a step")
            continue
        row, (text, own) = line.row, split_chain(line.text)
        if not is_event(row) and row["step"] <= before:
            defects.append(f"{place}: step {row['step']} after step {before}")
        if not is_event(row) or is_rollback(row):
            before = row["step"]
        if own is None:
            defects.append(f"{place}: has no chain")
        elif own != row.get("chain") or own != next_chain(chain, text):
            defects.append(f"{place}: its chain does not follow: this row was altered, or one before it is missing")
        elif not rows and row.get("event") != "start":
            defects.append(f"{place}: the chain of rows does not begin with a start")
        chain = own or chain
        rows[place] = row
    return rows, defects or ([] if rows else ["metrics.jsonl: has no rows"])


def _is_sound(row: Record) -> bool:
    return all(isinstance(row.get(name), shape) for name, shape in SHAPES.items() if row.get(name) is not None)


class Schedule:
    """What the start in force says should be recorded: rows, evaluations, checkpoints and learning rates.

    Args:
        config: the run's config.yaml, for the rows that have no start before them.
        history: where the data stood after each step; at the part of the run that is being checked.
        validates: whether there is something to validate on.
        begun: whether there may be no row before the first start's step: it goes on from another run's checkpoint.
    """

    def __init__(self, config: RunConfig, history: OrderReplay, validates: bool, begun: bool):
        self.config, self.history, self.validates, self.begun = config, history, validates, begun
        self.steps: int | None = None  # of the whole run, by the start in force; None before the first one
        self.peak: float | None = None  # rate of a small job
        self.reached, self.saved_to = -1, 0  # steps of which rows and checkpoints have been looked for
        self.saved: set[int] = set()
        self.pending: tuple[int, Due | None] = (-1, None)  # a step whose row the next session writes; None: it may

    def check(self, row: Record) -> Iterator[str]:
        """What is wrong with the next row; what is missing before it is told with it."""
        step, event = row["step"], row.get("event")
        if event == "start":
            yield from self._start(row)
        elif event == "branch":
            self.reached = self.saved_to = step
        elif self.steps is None and not event:
            yield from self._check_rate(row)
            self.reached = step
        elif self.steps is not None and not 0 <= step <= self.steps:
            yield f"step {step} of a run of {self.steps} steps"
        elif self.steps is not None:
            yield from self._check_part(row, step, event)
        self.begun = True

    def _check_part(self, row: Record, step: int, event: str | None) -> Iterator[str]:
        if event == "checkpoint":
            self.saved.add(step)
        elif event == "rollback" and isinstance(row.get("from"), int):
            yield from self._missing(min(row["from"], self.steps or 0))
            self.reached = self.saved_to = step
            self.saved = {saved for saved in self.saved if saved <= step}
        elif event == "end":  # what a stop or a divergence left undone of its step is not missed
            yield from self._missing(step + (row.get("outcome") == "completed"))
        elif event is None:
            yield from self._missing(step, one_in_flight=True)
            due = self._due(step)
            if due and not due.log:
                yield f"no row was due at step {step}"
            elif due and due.evaluate != ("val_loss" in row):
                yield f"step {step} has {'no' if due.evaluate else 'a'} val_loss, against eval.every"
            yield from self._check_rate(row)
            self.reached = step

    def _start(self, row: Record) -> Iterator[str]:
        step, first = row["step"], self.steps is None
        if not isinstance(row.get("config"), dict) or not isinstance(row.get("steps"), int):
            yield "a start without its configuration"
            return
        if step and not self.begun:
            yield f"the rows before step {step} are missing"
        if first:
            self.reached = step - 1 if step == 0 else step
            self.pending = (step, None) if step else self.pending
        elif step <= (self.steps or 0):
            yield from self._missing(step)
            due = self._due(step)
            if self.reached < step:
                self.pending = (step, due)
                self.reached = step - 1 if due is None or due.log else step
        try:
            self.config = read_config(self.config.kind, row["config"], "metrics.jsonl")
        except UserError as error:
            yield from error.mistakes
        self.steps, self.peak, self.saved_to = row["steps"], row.get("lr"), step
        self.saved.add(step)

    def _missing(self, end: int, one_in_flight: bool = False) -> Iterator[str]:
        """Rows and checkpoints that were due before step `end`.

        Args:
            one_in_flight: the last of the checkpoints may still be written behind the training, and is recorded later.
        """
        for step in range(self.reached + 1, end):
            due = self._due(step)
            if due and due.log:
                yield f"the row of step {step} is missing"
        unsaved = [
            step
            for step in range(self.saved_to + 1, end)
            if (due := self._due(step)) and due.save and step not in self.saved
        ]
        newest = unsaved.pop() if unsaved and one_in_flight else end
        yield from (f"the checkpoint of step {step} was not recorded" for step in unsaved)
        self.reached, self.saved_to = max(self.reached, end - 1), max(self.saved_to, newest - 1)

    def _due(self, step: int) -> Due | None:
        """What was due at a step; None where that is not known."""
        if step == self.pending[0]:
            return self.pending[1]
        if step == 0:
            return Due(log=self.validates, evaluate=self.validates)
        stood, last = self.history.at(step), step == self.steps
        if isinstance(self.config, TrainingConfig):
            return pretraining.due(self.config, step, last, stood.ended_epoch, self.validates)
        assert isinstance(self.config, JobConfig), "the other kinds"
        return supervised.due(self.config, step, last, stood.ended_epoch, stood.epochs)

    def _check_rate(self, row: Record) -> Iterator[str]:
        rate = self._rate(row["step"])
        if rate is not None and "lr" in row and not math.isclose(row["lr"] or 0.0, rate, rel_tol=1e-12):
            yield f"lr of step {row['step']} is {row['lr']}, not {rate}"

    def _rate(self, step: int) -> float | None:
        """The learning rate; None where nothing says its peak or its end."""
        if isinstance(self.config, TrainingConfig):
            optim = self.config.optim
            return lr_at(step, optim) if optim.decay_steps or optim.schedule == "constant" else None
        assert isinstance(self.config, JobConfig), "the other kinds"
        epoch_steps = math.ceil(len(self.history.feed.order) / self.history.feed.step_size)
        return supervised.job_schedule(self.config, self.peak, epoch_steps)(step) if self.peak else None
