"""What follows from a run's configuration and data, recomputed: the order's digest, positions and learning rates.

The items of each step follow from seed, step size and number of items, so a feed that reads no data repeats the steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

from gpt2_ddp.checkpoint.run_files import METRICS
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import job_schedule

Record = dict[str, Any]
MOST_STEPS = 2_000_000
"""Most recomputed steps between two rows (a minute of work): a file may claim any number."""


class Recomputed:
    """The data after each step of a run.

    Args:
        config, start: of the run's newest start. Each process of a run writes one, with its configuration.
        kind, sources: the class of a GPT's task, and the windows of each folder's training split.
        returns: steps that rollbacks return to.
    """

    def __init__(
        self, config: RunConfig, start: Record, kind: type[Pretraining], sources: Sequence[Sized], returns: set[int]
    ):
        self.config, self.kind, self.returns = config, kind, returns
        self.rates: Callable[[int], dict[str, float]] = lambda step: {}
        if isinstance(config, TrainingConfig):
            self.unit, self.per_item = "tokens", config.model.block_size
            if not all(map(len, sources)):
                raise UserError("model.block_size", self.per_item, f"in {METRICS}: longer than the training split")
            order = kind(config).make_order(sources)
            batch = GlobalBatch(config.global_batch_windows, lambda size: [])
        else:
            self.unit, self.per_item = "samples", 1
            order = Permutation(config.seed, start["epoch_size"])
            batch = GlobalBatch(start["global_batch_size"], lambda size: [], by_epoch=True)
        self.feed = Feed(order, batch)
        self._begin(0, self.feed.state)

    def first_defects(self, rows: Iterable[Record]) -> list[str]:
        """Defects of the first row that does not follow from the data and the rows before. Raises: UserError for an
        unusable configuration."""
        for number, row in enumerate(rows, 1):
            if defects := [f"{METRICS}, line {number}: {defect}" for defect in self._check(row)]:
                return defects
        return []

    def _check(self, row: Record) -> Iterator[str]:
        event, step = row.get("event"), row["step"]
        if event is None:
            self._advance(step)
            state = self.feed.state
            right: Record = self.rates(step) if step else {}
            right |= {
                self.unit: state.consumed * self.per_item,
                "epoch": round(state.position / len(self.feed.order), 4),
                "order_digest": state.order_digest,
            }
            for name, value in right.items():
                found = row.get(name, value)
                if found != value and not (isinstance(found, float) and math.isclose(found, value, rel_tol=1e-12)):
                    yield f"{name} of step {step} is {found}, not {value}"
        elif event == "branch" and not self.step:  # where the parent run was; its own rows confirm that
            self._begin(step, FeedState.model_validate(row))
        elif event == "rollback":
            self._advance(row.get("from", step))
            if not self._goes_back(row):
                yield f"the rollback to step {step} does not match the skipped positions {row.get('skipped_range')}"
        elif "config" in row:
            self._set_rates(row)

    def _begin(self, step: int, state: FeedState) -> None:
        self.feed.seek(state)
        self.step = step  # that the feed has reached
        self.stood = {step: [state]}  # states that rollbacks to a step may begin from

    def _advance(self, step: int) -> None:
        for _ in range(min(step - self.step, MOST_STEPS)):
            self.feed.next_step()
            self.step += 1
            if self.step in self.returns:
                self.stood[self.step] = [self.feed.state]

    def _goes_back(self, row: Record) -> bool:
        """Goes back to the step of a rollback, and skips the data that were read since its checkpoint. Returns whether
        these are those of the row."""
        self.step, reached = row["step"], self.feed.state.position
        known = self.stood.get(self.step, [])
        for state in known:  # the checkpoint lacks an earlier rollback's range, unless it was saved again since
            self.feed.seek(state)
            begin = self.feed.next_position
            if begin < reached and row.get("skipped_range") == [begin, reached]:
                self.feed.skip_range(begin, reached)
                known.append(self.feed.state)
                return row.get("order_digest") == self.feed.state.order_digest
        return False

    def _set_rates(self, row: Record) -> None:
        """Takes the schedule of a start, or of the steps of `train.minutes`."""
        config = read_config(self.config.kind, row["config"], METRICS)
        if isinstance(config, TrainingConfig):
            optim, schedule = config.optim, self.kind(config).schedule
            is_known = optim.decay_steps is not None or optim.schedule == "constant"
            self.rates = lambda step: schedule(step) if is_known or step < optim.warmup_steps else {}
        else:
            assert isinstance(config, JobConfig), "the other kinds"
            rate = job_schedule(config, math.ceil(len(self.feed.order) / self.feed.step_size))
            self.rates = lambda step: {"lr": rate(step)}
