"""The numbers of each step over all ranks: sums of losses for rows, and the verdict of the guard
against divergence.

    step s      Guard.add        the device's scalars (`StepTensors`) are copied to the host
    step s + 1  Guard._advance   the copy is read, and the sum over ranks starts (`StepSums`)
    step s + 2  Guard._advance   the sum is read (`StepNumbers`)
                Guard.judge      the verdict on step s

A copy and a sum have a whole step of time each. So no step waits for its device or for another
rank, and the verdict on a step comes two steps late (`LATE`) on every machine.
"""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from operator import add
from typing import NamedTuple, cast

import torch
from torch import Tensor

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.distributed.ranks import LateSum
from gpt2_ddp.state import Best, ClimbState, GuardState, Losses, LossSum, Sums, Unjudged

WINDOW = 100  # values that running statistics average over
# fewest values for a limit: the first steps of a training have other norms than those after them
WARM_UP = WINDOW


class RunningStatistics:
    """Mean and variance of the last values, exponentially weighted; equally weighted below `WINDOW`
    values. The arithmetic is in fp64, of scalars on `device`. Only `state_dict` waits."""

    def __init__(self, device: torch.device | str = "cpu"):
        # mps has no fp64
        exact = torch.float32 if torch.device(device).type == "mps" else torch.float64
        self._scalar = partial(torch.as_tensor, dtype=exact, device=device)
        self.load_state_dict((0, 0, 0))

    def load_state_dict(self, state: Sums) -> None:
        """Loads what `state_dict` returned."""
        count, mean, variance = map(self._scalar, state)
        self._values = count, mean, variance

    def add(self, value: Tensor | float, valid: Tensor | bool = True) -> None:
        """Adds a scalar where the bool scalar `valid` is true."""
        count, mean, variance = self._values
        counts = self._scalar(valid)
        rate = counts / (count + 1).clamp(max=WINDOW)
        change = torch.where(counts > 0, self._scalar(value), mean) - mean
        part = rate * change
        self._values = count + counts, mean + part, (1 - rate) * (variance + part * change)

    def limit(self, sigmas: float) -> Tensor:
        """The largest ordinary value: `sigmas` standard deviations above the mean; infinite below
        `WARM_UP` values."""
        count, mean, variance = self._values
        limit = mean + sigmas * torch.maximum(variance.sqrt(), mean.abs() / 1000)
        return torch.where(count < WARM_UP, math.inf, limit)

    def state_dict(self) -> Sums:
        """Count, mean and variance. Waits for the device."""
        count, mean, variance = map(float, self._values)
        return count, mean, variance


# steps of the blocks whose mean losses are compared
FIRST_BLOCK = 5
BLOCK = 20
LONG = 100  # losses above the limit in a row that are a divergence


class Climb:
    """Compares each loss with the lowest mean loss of a block of steps so far. A limit that
    followed the losses would never notice a slow climb. Plain floats, equal on every rank."""

    def __init__(self, share: float | None):
        self.share, self.state = share, ClimbState()

    def margin(self, best: float) -> float:
        """How far losses may be above their best. It is `share` of the larger of two: the absolute
        best, and what the training loss has gained since the start. It is at least three standard
        deviations of the losses."""
        state = self.state
        if self.share is None or math.isinf(state.best):
            return math.inf
        return max(self.share * max(state.start - state.best, abs(best)), 3 * state.noise)

    @property
    def limit(self) -> float:
        """The largest ordinary training loss; infinite before the first block has ended."""
        return self.state.best + self.margin(self.state.best)

    def add(self, step: int, loss: float, phase: int) -> bool:
        """Takes the loss of a step. Returns whether `LONG` losses in a row were above the limit."""
        if phase != self.state.phase:  # other data have other losses
            self.state = ClimbState(phase=phase, start=self.state.start)
        state = self.state
        limit = self.limit
        if loss > limit:
            state.above = state.above or step
        else:
            state.above = None
        if math.isinf(limit) or loss <= state.best + self.margin(state.best) / 4:
            state.low = step
        self._add_to_block(loss)
        return state.above is not None and step - state.above + 1 >= LONG

    def _add_to_block(self, loss: float) -> None:
        state = self.state
        is_first = math.isinf(state.best)
        count, total, squares = (
            before + now for before, now in zip(state.block, (1, loss, loss * loss), strict=True)
        )
        state.block = count, total, squares
        if count < (FIRST_BLOCK if is_first else BLOCK):
            return
        mean = total / count
        state.block = 0, 0, 0
        if mean < state.best:
            state.best, state.noise = mean, math.sqrt(max(squares / count - mean * mean, 0))
        if is_first:
            state.start = max(mean, state.start)


LATE = 2
"""Steps between a step and its verdict: as late as its numbers, so the verdict comes at the same
step for any number of ranks, and none waits for it."""

Verdict = Enum("Verdict", ["OK", "BAD", "DIVERGED"])
"""The verdict on a step. `DIVERGED`: the last of `guard.patience` bad steps in a row, or of a long
climb."""


class StepTensors(NamedTuple):
    """This rank's numbers of a step, fp32 scalars on its device."""

    bad: Tensor  # 1 if the gradient is bad, else 0
    skipped: Tensor  # 1 if the step changed nothing, else 0
    grad_norm: Tensor  # of all ranks' gradient, before clipping
    losses: dict[str, Tensor]  # sums over this rank's units, by name; `loss` first


class StepSums(NamedTuple):
    """Sums of a step: of one rank, then over all. The sums of its further losses follow these."""

    ranks: float  # 1 of each rank
    step: float  # its number, of each rank
    bad: float
    skipped: float
    grad_norm: float
    loss: float  # of the ranks whose loss is finite
    valid: float  # units of those ranks
    units: float  # units of all


class StepNumbers(NamedTuple):
    """Numbers of a step, over all ranks."""

    step: int
    grad_norm: float  # before clipping
    loss: float  # mean; NaN if a rank's part is not finite
    others: dict[str, float]  # sums of further losses, by name


class RowNumbers(NamedTuple):
    """What a row has of the steps since the row before."""

    newest: StepNumbers  # of the row's step
    losses: LossSum  # of all of them
    skipped: int  # steps that changed nothing, of the whole run


class _Kept(NamedTuple):
    """What is known of a step whose numbers are on their way."""

    names: list[str]  # of further losses
    has_row: bool


class _Copied(NamedTuple):
    """Numbers of a step of this rank, on their way to the host."""

    step: int
    units: int
    kept: _Kept
    read: Callable[[], list[float]]  # waits for the copy


class Guard:
    """The numbers of each step, summed over all ranks two steps late, and a verdict on it. All are
    equal on every rank. Bad is a gradient whose norm, or a loss, is not finite or far too large.

    Args:
        first_step: the step that the run began after.
        device: of the model; the norms' statistics are kept there.

    Attributes:
        losses: sums of the losses.
        rows: numbers of steps that have a row, in their order; who writes a row takes its numbers.
        newest: numbers of the newest step that has them.
        judged: the last step with a verdict.
        first_bad: first of the bad steps in a row; None after a good one.
        problem: reason of the last bad verdict.
        bad_steps: number of bad verdicts in this process.
        divergence: why the run has diverged, as a text.
        climb: the lowest training loss, and the losses above it.
        norms: statistics of the norms of good gradients; None without `sigmas`.
        ordinary: statistics of the good steps' losses; None without `sigmas`.
    """

    def __init__(
        self, config: GuardConfig, first_step: int = 0, device: torch.device | str = "cpu"
    ):
        self.config = config
        self._first_step = first_step
        self.norms = RunningStatistics(device) if config.sigmas else None
        self.ordinary = RunningStatistics() if config.sigmas else None
        self.losses = Losses()
        self.rows = deque[RowNumbers]()
        self.newest: StepNumbers | None = None
        self.problem = ""
        self.divergence = ""
        self.bad_steps = 0
        self.climb = Climb(config.climb)
        self._copied: _Copied | None = None
        self._summed: _Kept | None = None  # of the started sum
        self._sum = LateSum()
        self.load_state_dict(GuardState())

    @property
    def last_good(self) -> int:
        """The last step known to be good, or the run's first; rollbacks return to a checkpoint up
        to here."""
        good = self.judged if self.first_bad is None else self.first_bad - 1
        climb = self.climb.state
        return max(self._first_step, good if climb.above is None else min(good, climb.low))

    @property
    def is_suspicious(self) -> bool:
        """Whether the last step with a verdict was bad, or its loss above the limit of a climb."""
        return self.first_bad is not None or self.climb.state.above is not None

    def judge_gradient(self, norm: Tensor) -> Tensor:
        """1 if the gradient with this norm, of all ranks, is bad, else 0: fp32 scalar on the
        device. Bad is a norm that is inf or NaN, or above the running mean of norms by `sigmas`.
        Does not wait for the device."""
        good = norm < math.inf  # false for NaN
        if self.norms and self.config.sigmas:
            good = good & (norm <= self.norms.limit(self.config.sigmas))
            self.norms.add(norm, good)
        return (~good).float()

    def add(self, step: int, units: int, numbers: StepTensors, has_row: bool = False) -> None:
        """Takes this rank's numbers of a step; its losses are of `units`."""
        self._advance()
        *flags_and_norm, losses = numbers
        values = torch.stack([*flags_and_norm, *losses.values()])  # one copy for all
        self._copied = _Copied(step, units, _Kept([*losses][1:], has_row), copy_to_host(values))

    def flush(self) -> StepNumbers | None:
        """`newest`, once the numbers of all steps are known. Collective; waits for the device."""
        self._advance()
        self._advance()
        return self.newest

    def _advance(self) -> None:
        """Starts the sum of the numbers that were copied, and counts those whose sum was started
        before."""
        summed = self._summed
        self._summed = None
        if self._copied:
            self._start_sum(self._copied)
            self._summed = self._copied.kept
            self._copied = None
        if summed is not None:
            values = self._sum.result()
            known = len(StepSums._fields)
            others = zip(summed.names, values[known:], strict=True)
            numbers = self._count(StepSums(*values[:known]), dict(others))
            if summed.has_row:
                self._end_row(numbers)

    def _start_sum(self, copied: _Copied) -> None:
        bad, skipped, grad_norm, loss, *others = copied.read()
        is_finite = math.isfinite(loss)
        sums = StepSums(
            ranks=1,
            step=copied.step,
            bad=bad,
            skipped=skipped,
            grad_norm=grad_norm,
            loss=loss if is_finite else 0,
            valid=copied.units if is_finite else 0,
            units=copied.units,
        )
        self._sum.start([*sums, *others])

    def _count(self, sums: StepSums, others: dict[str, float]) -> StepNumbers:
        """Takes the sums of a step over all ranks."""
        mean = sums.loss / sums.units if sums.valid == sums.units else math.nan
        # what is equal on all ranks is divided without rounding
        step = round(sums.step / sums.ranks)
        numbers = StepNumbers(step, sums.grad_norm / sums.ranks, mean, others)
        self.newest = numbers
        self._unjudged.append(Unjudged(step, mean, sums.bad > 0))
        trained = LossSum(sums.loss, round(sums.valid), round(sums.units))
        losses = self.losses
        losses.since_row = _added(losses.since_row, trained)
        # a skipped step trained on nothing, but its units belong to the epoch
        is_skipped = sums.skipped > 0
        unchanged = LossSum(units=trained.units)
        losses.epoch = _added(losses.epoch, unchanged if is_skipped else trained)
        losses.skipped += is_skipped
        return numbers

    def _end_row(self, newest: StepNumbers) -> None:
        """Keeps the numbers of a row, before those of a later step are added."""
        self.rows.append(RowNumbers(newest, self.losses.since_row, self.losses.skipped))
        self.losses.since_row = LossSum()

    def end_epoch(self) -> float:
        """The mean loss of the epoch, which ends. Collective."""
        self.flush()
        mean = self.losses.epoch.mean
        self.losses.epoch = LossSum()
        return mean

    def judge(self, step: int, phase: int = 0) -> Verdict:
        """The verdict on step `step - LATE`, after step `step`, which ended in this phase of the
        data."""
        if not self._unjudged or self._unjudged[0].step > step - LATE:
            return Verdict.OK
        self.judged, loss, bad_gradient = self._unjudged.popleft()
        limit = math.inf
        if self.ordinary and self.config.sigmas:
            limit = float(self.ordinary.limit(self.config.sigmas))
        if bad_gradient:
            self.problem = "its gradient norm is not finite or above the limit"
        elif not math.isfinite(loss):
            self.problem = "its loss is not finite"
        elif loss > limit:
            self.problem = f"its loss, {loss:.4f}, is above the limit, {limit:.4f}"
        else:
            if self.ordinary:
                self.ordinary.add(loss)
            self.first_bad = None
            return self._judge_climb(loss, phase)
        self.bad_steps += 1
        self.first_bad = self.first_bad or self.judged
        if self.judged - self.first_bad + 1 < self.config.patience:
            return Verdict.BAD
        self.divergence = (
            f"{self.config.patience} bad steps in a row up to step {self.judged}: {self.problem}"
        )
        return Verdict.DIVERGED

    def _judge_climb(self, loss: float, phase: int) -> Verdict:
        if not self.climb.add(self.judged, loss, phase):
            return Verdict.OK
        limit = self.climb.limit
        best = self.climb.state.best
        climbed = f"the loss has been above {limit:.4f} for {LONG} steps"
        now = f"up to step {self.judged}: {loss:.4f}"
        self.divergence = f"{climbed}, {now}; its lowest mean was {best:.4f} (guard.climb)"
        return Verdict.DIVERGED

    def judge_evaluation(self, val_loss: float | None, best: Best) -> Verdict:
        """The verdict on an evaluation: whether it and the newest step's loss are far above the
        best so far. (The training loss of a model that overfits is low.) Collective where there is
        a `val_loss`."""
        if val_loss is None:
            return Verdict.OK
        self.flush()
        if not self._unjudged:
            return Verdict.OK
        step, loss, _ = self._unjudged[-1]
        limit = best.val_loss + self.climb.margin(best.val_loss)
        if not (val_loss > limit and loss > self.climb.limit):
            return Verdict.OK
        climbed = f"the validation loss of step {step}, {val_loss:.4f}, is above {limit:.4f}"
        losses = f"and the training loss, {loss:.4f}, above {self.climb.limit:.4f}"
        lowest = f"the lowest validation loss was {best.val_loss:.4f}"
        self.divergence = f"{climbed}, {losses}; {lowest} (guard.climb)"
        return Verdict.DIVERGED

    def state_dict(self) -> GuardState:
        """State for checkpoints, so that a resumed run gives the same verdicts."""
        return GuardState(
            judged=self.judged,
            first_bad=self.first_bad,
            losses=self.ordinary.state_dict() if self.ordinary else (0, 0, 0),
            climb=self.climb.state.model_copy(),
            unjudged=[*self._unjudged],
        )

    def load_state_dict(self, state: GuardState) -> None:
        """Loads what `state_dict` returned."""
        self.rows.clear()
        self.judged = state.judged
        self.first_bad = state.first_bad
        self._unjudged = deque(state.unjudged)
        self.climb.state.load_state_dict(state.climb)
        if self.ordinary:
            self.ordinary.load_state_dict(state.losses)


def _added(sums: LossSum, more: LossSum) -> LossSum:
    return LossSum(*map(add, sums, more))


def copy_to_host(values: Tensor) -> Callable[[], list[float]]:
    """Starts a copy of a vector from its device. Returns a function that waits for it and returns
    the numbers."""
    if values.device.type != "cuda":
        return cast(Callable[[], list[float]], values.tolist)
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return cast(list[float], copy.tolist())

    return wait
