"""What follows from a run's configuration and data, recomputed: the order's digest, positions and
learning rates.

The items of each step follow from seed, step size and number of items. So a feed that reads no data
repeats the steps.

A file may claim any step. Two rules bound the work by the size of the rows and of the data:

- Rows come every `tracking.log_every` steps, and at the end of each epoch. So a step far from the
  row before is a defect by itself.
- Nothing is recomputed after the first row that differs.
"""

import math
from collections.abc import Callable, Iterator, Sequence, Sized

from gpt2_ddp.checkpoint.format import STATE, Checkpoint
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.rows import METRICS, Row
from gpt2_ddp.state import FeedState
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import job_schedule

Rates = Callable[[int], dict[str, float]]
"""Step -> learning rates, by their names in rows."""
MOST_STEPS = 500_000
"""Most recomputed steps between two rows (a quarter of a minute of work): a file may
claim any number."""


class Recomputed:
    """The data after each step of a run.

    Args:
        config: of the run's newest start. Each process of a run writes one.
        start: that row.
        kind: the class of a GPT's task.
        sources: the windows of each folder's training split.
        returns: steps that rollbacks return to.
    """

    def __init__(
        self,
        config: RunConfig,
        start: Row,
        kind: type[Pretraining],
        sources: Sequence[Sized],
        returns: set[int],
    ):
        self.config = config
        self.kind = kind
        self.returns = returns
        self.rates: Rates = lambda step: {}
        if isinstance(config, TrainingConfig):
            self.unit = "tokens"
            self.per_item = config.model.block_size
            if not all(map(len, sources)):
                hint = f"in {METRICS}: longer than the training split"
                raise UserError("model.block_size", self.per_item, hint)
            order = kind(config).make_order(sources)
            batch = GlobalBatch(config.global_batch_windows, lambda size: [])
        else:
            self.unit = "samples"
            self.per_item = 1
            order = Permutation(config.seed, start["epoch_size"])
            batch = GlobalBatch(start["global_batch_size"], lambda size: [], by_epoch=True)
        self.feed = Feed(order, batch)
        # of the newest configuration; None for a class with rows of its own, and of a job
        self.log_every: int | None = None
        self.eval_every: int | None = None
        self.recorded: RunConfig | None = None  # by the newest start or length
        self.lasts: set[int] = set()  # last steps, by the starts so far
        self.validates = False
        self._begin(0, self.feed.state)

    def row_defects(self, row: Row) -> Iterator[str]:
        """Why the next row does not follow from the data and the rows before. No row may follow one
        with defects.
        Raises: UserError for an unusable configuration."""
        event = row.get("event")
        step = row["step"]
        if "config" in row:
            if defect := self._set_config(row):
                yield defect
                return
            # the row of an earlier last step may be pending
            self.lasts = {last for last in self.lasts if last <= step}
            self.lasts.add(row.get("steps") or self.first_step)
        if event is None:
            yield from self._check_step(row)
        elif event == "start":
            # the row of its checkpoint's step may be pending
            self.row_step = max(self.row_step, step - 1)
        elif event == "branch" and not self.step:
            # where the parent run was; its own rows confirm that
            self._begin(step, FeedState.model_validate(row))
        elif event == "rollback":
            diverged_at = row.get("from", step)
            if defect := self._too_far(diverged_at):
                yield f"the rollback to step {step}: {defect}"
                return
            self._advance(diverged_at)
            if not self._goes_back(row):
                positions = f"the skipped positions {row.get('skipped_range')}"
                yield f"the rollback to step {step} does not match {positions}"

    def _check_step(self, row: Row) -> Iterator[str]:
        step = row["step"]
        if defect := self._too_far(step):
            yield defect
            return
        if step <= self.row_step:
            yield f"step {step} follows step {self.row_step}"
            return
        self._advance(step)
        self.row_step = step
        state = self.feed.state
        order = self.feed.order
        right: Row = {
            self.unit: state.consumed * self.per_item,
            "epoch": round(state.position / len(order), 4),
        }
        if step > self.first_step:
            right |= {**self.rates(step), "order_digest": state.order_digest}
        for name, value in right.items():
            if not is_equal(row.get(name), value):
                yield f"{name} of step {step} is {row.get(name)}, not {value}"
        has_loss = "val_loss" in row
        if self.eval_every and has_loss != self._is_evaluated(step, has_loss):
            article = "a" if has_loss else "no"
            yield f"step {step} has {article} val_loss (eval.every = {self.eval_every})"
        for name, value in order.by_source(state, self.unit, self.per_item).items():
            # an older row may have fewer folders, or other names
            if name in row and not is_equal(row[name], value):
                yield f"{name} of step {step} is {row[name]}, not {value}"

    def _is_evaluated(self, step: int, has_loss: bool) -> bool:
        """Whether the weights of a step are evaluated. Those of the first one are, if the data have
        a validation split."""
        if step == self.first_step:
            self.validates = has_loss
        is_due = step % (self.eval_every or 1) == 0 or step in {self.first_step, *self.lasts}
        return self.validates and is_due

    def state_defects(self, place: str, checkpoint: Checkpoint) -> list[str]:
        """Why a checkpoint, after the last of the rows so far, has not the state of its step."""
        step = checkpoint.step
        pending = checkpoint.state.progress.pending.row
        step_before = self.step
        row_step_before = self.row_step
        feed_before = self.feed.state
        defects: list[str] = []
        if step < self.step:
            defects = [f"step {step} follows step {self.step}"]
        elif defect := self._too_far(step, bool(pending)):
            defects = [defect]
        else:
            if pending and pending.get("step") == step:
                in_row = self._check_step(pending)
                defects = [f"progress.pending.row: {defect}" for defect in in_row]
            self._advance(step)
            right = self.feed.state
            for name, value in checkpoint.state.feed:
                if value != getattr(right, name):
                    defects.append(f"feed.{name} is {value}, not {getattr(right, name)}")
        # the rows that follow begin where the rows before ended
        if self.step > step_before:
            self.feed.seek(feed_before)
        self.step = step_before
        self.row_step = row_step_before
        return [f"{place}/{STATE}: {defect}" for defect in defects]

    def _begin(self, step: int, state: FeedState) -> None:
        self.feed.seek(state)
        self.first_step = step  # that the run begins after
        self.step = step  # that the feed has reached
        self.row_step = step - 1  # of the last row of a step
        self.states_at = {step: [state]}  # that rollbacks to a step may begin from
        self.rollbacks = 0

    def _too_far(self, step: int, is_pending: bool = False) -> str:
        """Why no step can be the next one with a row, or a checkpoint: a row is missing before it.
        Empty if it can.
        `is_pending`: the step's own row comes later."""
        every = self.log_every
        newest = max(self.row_step, self.first_step)
        due = step if every is None else (newest // every + 1) * every
        if step - is_pending > due:
            hint = f"there is one every {every} steps (tracking.log_every)"
            return f"step {due} has no row, and {hint}"
        epoch_steps = math.ceil(len(self.feed.order) / self.feed.step_size)
        # a step may straddle two epochs
        if every and step - newest > epoch_steps + 1:
            return f"step {step} follows more than an epoch of {epoch_steps} steps without a row"
        if step - self.step > MOST_STEPS:
            return f"step {step} is more than {MOST_STEPS:,} steps after the row before"
        return ""

    def _advance(self, step: int) -> None:
        for _ in range(step - self.step):
            self.feed.next_step()
            self.step += 1
            if self.step in self.returns:
                self.states_at[self.step] = [self.feed.state]

    def _goes_back(self, row: Row) -> bool:
        """Goes back to the step of a rollback, and skips the data that were read since its
        checkpoint. Returns whether these are those of the row."""
        self.step = row["step"]
        self.row_step = row["step"]
        self.rollbacks += 1
        reached = self.feed.state.position
        states = self.states_at.get(self.step, [])
        # the checkpoint lacks an earlier rollback's range, unless it was saved again since
        for state in states:
            self.feed.seek(state)
            begin = self.feed.next_position
            overlaps = any(start < reached and begin < stop for start, stop in state.skipped_ranges)
            is_free = begin < reached and not overlaps
            if is_free and row.get("skipped_range") == [begin, reached]:
                self.feed.skip_range(begin, reached)
                states.append(self.feed.state)
                is_right = row.get("order_digest") == self.feed.state.order_digest
                return is_right and self.rollbacks <= self.config.rollbacks
        return False

    def _set_config(self, row: Row) -> str:
        """Takes the configuration of a start or of a new length. Returns why it is none that
        `train.minutes` settles; else an empty text."""
        config = read_config(self.config.kind, row["config"], METRICS)
        before = self.recorded
        self.recorded = config
        if row.get("event") == "length" and isinstance(before, TrainingConfig):
            assert isinstance(config, TrainingConfig), "of the same kind"
            step = row["step"]
            steps = config.train.steps or step
            if row.get("steps") != steps or config != before.with_steps(steps, step):
                return f"the length {row.get('steps')} of step {step} does not fit its config"
        has_own_rows = self.kind.due is not Pretraining.due
        self.log_every = None if has_own_rows else config.tracking.log_every
        if isinstance(config, TrainingConfig):
            self.eval_every = None if has_own_rows else config.eval.every
            self.rates = _gpt_rates(config, self.kind(config).schedule)
        else:
            assert isinstance(config, JobConfig), "the other kinds"
            rate = job_schedule(config, math.ceil(len(self.feed.order) / self.feed.step_size))
            self.rates = lambda step: {"lr": rate(step)}
        return ""


def _gpt_rates(config: TrainingConfig, schedule: Rates) -> Rates:
    """The learning rates of each step. None where they follow from the length of the run, which
    `train.minutes` has not settled yet."""
    optim = config.optim
    is_settled = optim.decay_steps is not None or optim.schedule == "constant"

    def rates(step: int) -> dict[str, float]:
        if is_settled or step < optim.warmup_steps:
            return schedule(step)
        return {}

    return rates


def is_equal(found: object, right: object) -> bool:
    """Whether a value in a row is the recomputed one; floats up to rounding."""
    if isinstance(found, float) and isinstance(right, float):
        return math.isclose(found, right, rel_tol=1e-12)
    return found == right
