"""What follows from a run's configuration and data, recomputed: the order's digests, tokens, learning rates and steps.

The items of each step follow from seed, step size and number of items, so a feed that reads no data repeats the steps.
The newest start row determines the rates and the due rows: each process of a run writes one, with its configuration.
"""

import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.run_files import METRICS, sets_config
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.mixture import source_weights
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import FeedState, State
from gpt2_ddp.tasks import pretraining, supervised
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.task import Due

Record = dict[str, Any]
MOST_STEPS = 2_000_000
"""Most recomputed steps without a row (a minute of work): a file may claim any number."""


class Data(NamedTuple):
    """The data of a GPT, and the class of its task; a small job has none."""

    manifests: Sequence[Manifest]
    sources: Sequence[Sized]  # the windows of the training split of each folder
    kind: type[Pretraining]


def recompute(
    config: RunConfig,
    data: Data,
    start: Record,
    rows: Iterable[tuple[str, Record]],
    states: dict[str, State],
    returns: set[int],
) -> list[str]:
    """Defects of the first of the `rows` that does not follow from the data and the rows before. If all do, those of
    the `states` of checkpoints. Raises: UserError for an unusable configuration.

    Args:
        config, start: of the run's newest start. returns: steps that rollbacks return to.
    """
    returns = returns | {state.step for state in states.values()}
    again = Recomputed(config, data, start, returns)
    rollbacks = 0
    for place, row in rows:
        rollbacks += row.get("event") == "rollback"
        if defects := [f"{place}: {defect}" for defect in again.check(row)]:
            return defects
    # the checkpoints that a rollback undid are deleted after its row
    newest = {place: state for place, state in states.items() if state.progress.rollbacks >= rollbacks}
    return [f"{place}: has another order of the data" for place, state in newest.items() if not again.includes(state)]


class Recomputed:
    """The data and the due rows after each step of a run."""

    def __init__(self, config: RunConfig, data: Data, start: Record, returns: set[int]):
        self.config = config
        self.kind = data.kind
        self.returns = returns
        self.step = 0  # that the feed has reached
        self.row = -1  # step of the last row
        self.steps: float = 0  # of the whole run; infinity while unknown, 0 before the first start
        self.peak = None  # learning rate of a small job
        self.due: Due | None = None  # work after `step`; None where another process, or the way to it, did a part
        self.validates = True
        share = supervised.contiguous(1, 1)
        if isinstance(config, TrainingConfig):
            self.unit = "tokens"
            self.per_item = config.model.block_size
            if not all(map(len, data.sources)):
                raise UserError("model.block_size", self.per_item, f"in {METRICS}: longer than the training split")
            self.validates = bool(source_weights(config, data.manifests))
            self.feed = Feed(
                data.kind(config).make_order(data.sources), GlobalBatch(config.global_batch_windows, share)
            )
        else:
            self.unit = "samples"
            self.per_item = 1
            batch = GlobalBatch(start["global_batch_size"], share, by_epoch=True)
            self.feed = Feed(Permutation(config.seed, start["epoch_size"]), batch)
        self.stood: dict[int, list[FeedState]] = {0: [self.feed.state]}

    def check(self, row: Record) -> Iterator[str]:
        """Defects of the next row."""
        event = row.get("event")
        step = row["step"]
        if event is None:
            yield from self._check_row(row)
        elif sets_config(row):
            if event == "start":
                if self.steps:
                    yield from self._advance(step)
                self.peak = row.get("lr")
                self.due = None
            self.config = read_config(self.config.kind, row["config"], METRICS)
            self.steps = math.inf if row["steps"] is None else row["steps"]
        elif event == "branch" and self.row < 0:  # where the parent run was; its own rows confirm that
            self.feed.seek(FeedState.model_validate(row))
            self.step = step
            self.stood = {step: [self.feed.state]}
        elif event == "rollback":
            yield from self._go_back(row)
        elif event == "end":
            yield from self._advance(step)

    def includes(self, state: State) -> bool:
        """Whether a checkpoint's state has the data up to its step."""
        return not [*self._advance(state.step)] and state.feed in self.stood.get(state.step, [])

    def _advance(self, step: int) -> Iterator[str]:
        """Takes the steps up to `step`. Defects: rows of earlier ones that were due and are missing."""
        if step > min(self.steps, self.step + MOST_STEPS):
            yield f"step {step} follows step {self.step}, in a run of {self.steps} steps"
            return
        missing = []
        while self.step < step:
            if self.due and self.due.log and self.row < self.step:
                missing.append(self.step)
            self.feed.next_step()
            self.step += 1
            self.due = self._due()
            if self.step in self.returns:
                self.stood[self.step] = [self.feed.state]
        if missing:
            yield f"{len(missing)} rows before step {step} are missing, the first of step {missing[0]}"

    def _due(self) -> Due | None:
        last = self.step == self.steps
        if isinstance(self.config, TrainingConfig):
            if self.kind.due is not Pretraining.due:
                return None  # it may depend on anything
            return pretraining.due(self.config, self.step, last, self.feed.ended_epoch, self.validates)
        assert isinstance(self.config, JobConfig), "the other kinds"
        return supervised.due(self.config, self.step, last, self.feed.ended_epoch, self.feed.epochs)

    def _check_row(self, row: Record) -> Iterator[str]:
        step = row["step"]
        if step <= self.row:
            yield f"step {step} follows step {self.row}"
            return
        defects = [*self._advance(step)]
        yield from defects
        if defects:
            return
        self.row = step
        if self.due and not self.due.log:
            yield f"no row was due at step {step}"
        elif self.due and self.due.evaluate != ("val_loss" in row):
            yield f"step {step} has {'no' if self.due.evaluate else 'a'} val_loss, unlike eval.every"
        feed = self.feed
        right = {
            self.unit: feed.state.consumed * self.per_item,
            "epoch": round(feed.state.position / len(feed.order), 4),
            "order_digest": feed.state.order_digest,
        }
        settings = self._settings(step)
        for name, value in (right | settings).items():
            found = row.get(name, value)
            is_close = name in settings and found is not None and math.isclose(found, value, rel_tol=1e-12)
            if found != value and not is_close:
                yield f"{name} of step {step} is {found}, not {value}"
        known = [*feed.by_source(self.unit, self.per_item).values()]  # in their order: folders may have moved
        found = [row[name] for name in row if name.startswith((f"{self.unit}/", "epoch/"))]
        if found != known[: len(found)]:
            yield f"step {step} has the source numbers {found}, not {known}"

    def _settings(self, step: int) -> dict[str, float]:
        """The optimizer's settings in a step, as far as they are known."""
        if not step:
            return {}
        if isinstance(self.config, TrainingConfig):
            optim = self.config.optim
            is_known = optim.decay_steps is not None or optim.schedule == "constant" or step < optim.warmup_steps
            return self.kind(self.config).schedule(step) if is_known else {}
        assert isinstance(self.config, JobConfig), "the other kinds"
        epoch_steps = math.ceil(len(self.feed.order) / self.feed.step_size)
        return {"lr": supervised.job_schedule(self.config, self.peak or self.config.optim.lr, epoch_steps)(step)}

    def _go_back(self, row: Record) -> Iterator[str]:
        """After a rollback, other data are expected: those that were read since its checkpoint are skipped."""
        step = row["step"]
        yield from self._advance(row.get("from", step))
        reached = self.feed.state.position
        known = self.stood.get(step, [])
        for state in known:  # the checkpoint lacks an earlier rollback's range, unless it was saved again since
            self.feed.seek(state)
            begin = self.feed.next_position
            if [begin, reached] == row.get("skipped_range") and begin < reached:
                break
        else:
            yield f"the rollback to step {step} does not match the skipped positions {row.get('skipped_range')}"
            return
        self.feed.skip_range(begin, reached)
        self.stood = {number: kept for number, kept in self.stood.items() if number < step}
        self.stood[step] = [*known, self.feed.state]
        self.step = step
        self.row = step
        self.due = None
        if row.get("order_digest") != self.feed.state.order_digest:
            yield f"order_digest of step {step} is {row.get('order_digest')}, not {self.feed.state.order_digest}"
