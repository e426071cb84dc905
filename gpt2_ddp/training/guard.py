"""The numbers of each step over all ranks: sums of losses for rows, and the verdict of the guard against divergence."""

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import partial
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.distributed.ranks import Later, late_sums
from gpt2_ddp.state import GuardState, Losses, LossSum, Sums, Unjudged

LATE = 2
"""Steps between a step and its verdict: as late as its numbers, so the verdict comes at the same step for any number of
ranks, and none waits for it."""

Verdict = Enum("Verdict", ["OK", "BAD", "DIVERGED"])
"""The verdict on a step. `DIVERGED`: the last of `guard.patience` bad steps in a row."""


class StepNumbers(NamedTuple):
    """Numbers of a step, over all ranks."""

    step: int
    grad_norm: float  # before clipping
    loss: float  # mean; NaN if a rank's part is not finite
    others: list[float]  # sums of further losses


WINDOW, WARM_UP = 100, 20  # values that running statistics average over; fewest values for a limit


class RunningStatistics:
    """Mean and variance of the last values, exponentially weighted; equally weighted below `WINDOW` values. The
    arithmetic is in fp64, of scalars on `device`. Only `state_dict` waits."""

    def __init__(self, device: torch.device | str = "cpu", state: Sums = (0, 0, 0)):
        exact = torch.float32 if torch.device(device).type == "mps" else torch.float64  # mps has no fp64
        self._scalar = partial(torch.as_tensor, dtype=exact, device=device)
        self.load_state_dict(state)

    def load_state_dict(self, state: Sums) -> None:
        """Loads what `state_dict` returned."""
        self._values = tuple(map(self._scalar, state))

    def add(self, value: Tensor | float, valid: Tensor | bool = True) -> None:
        """Adds a scalar where the bool scalar `valid` is true."""
        count, mean, variance = self._values
        counts = self._scalar(valid)
        rate = counts / (count + 1).clamp(max=WINDOW)
        change = torch.where(counts > 0, self._scalar(value), mean) - mean
        part = rate * change
        self._values = count + counts, mean + part, (1 - rate) * (variance + part * change)

    def limit(self, sigmas: float) -> Tensor:
        """The largest ordinary value: `sigmas` standard deviations above the mean; infinite below `WARM_UP` values."""
        count, mean, variance = self._values
        limit = mean + sigmas * torch.maximum(variance.sqrt(), mean.abs() / 1000)
        return torch.where(count < WARM_UP, math.inf, limit)

    def state_dict(self) -> Sums:
        """Count, mean and variance. Waits for the device."""
        count, mean, variance = map(float, self._values)
        return count, mean, variance


class Guard:
    """The numbers of each step, summed over all ranks two steps late, and a verdict on it. All are equal on every rank.
    Bad is a gradient whose norm, or a loss, is not finite or far too large.

    No step waits for its device or another rank: a step's numbers are read from the device after the next step, and
    their sum after the one behind it. `first_step`: the step that the run began after.

    Attributes:
        losses: sums of the losses. newest: numbers of the newest step that has them.
        judged: the last step with a verdict. first_bad: first of the bad steps in a row; None after a good one.
        problem: reason of the last bad verdict. bad_steps: their number in this process.
        norms: statistics of the norms of good gradients, on their device. ordinary: those of the good steps' losses.
    """

    def __init__(self, config: GuardConfig, first_step: int = 0, device: torch.device | str = "cpu"):
        self.config, self._first_step = config, first_step
        self.norms = RunningStatistics(device)
        self.losses = Losses()
        self.newest: StepNumbers | None = None
        self.problem, self.bad_steps = "", 0
        self._copied: tuple[int, int, Later] | None = None  # step, units, numbers of this rank
        self._summed: Later | None = None
        self._start_sum = late_sums()
        self.load_state_dict(GuardState())

    @property
    def last_good(self) -> int:
        """The last step known to be good, or the run's first; rollbacks return to a checkpoint up to here."""
        return max(self._first_step, self.judged if self.first_bad is None else self.first_bad - 1)

    def judge_gradient(self, norm: Tensor) -> Tensor:
        """1 if the gradient with this norm, of all ranks, is bad, else 0: fp32 scalar on the device. Bad is a norm that
        is inf or NaN, or above the running mean of norms by `sigmas`. Does not wait for the device."""
        good = norm < math.inf  # false for NaN
        if (sigmas := self.config.sigmas) is not None:
            good = good & (norm <= self.norms.limit(sigmas))
            self.norms.add(norm, good)
        return (~good).float()

    def add(self, step: int, units: int, numbers: Sequence[Tensor]) -> None:
        """Takes this rank's fp32 scalars of a step: whether the gradient is bad, 1 or 0; whether the step was skipped.
        Then the norm of the gradient, and sums of losses over `units`."""
        self._advance()
        self._copied = step, units, copy_to_host(torch.stack([*numbers]))

    def flush(self) -> StepNumbers | None:
        """`newest`, once the numbers of all steps are known. Collective; waits for the device."""
        self._advance()
        self._advance()
        return self.newest

    def _advance(self) -> None:
        """Starts the sum of the numbers that were copied, and counts those whose sum was started."""
        started, self._summed = self._summed, None
        if self._copied:
            step, units, copied = self._copied
            bad, skipped, norm, loss, *others = copied()
            part = [loss, units] if math.isfinite(loss) else [0, 0]
            self._summed, self._copied = self._start_sum([1, step, bad, skipped, norm, *part, units, *others]), None
        if started:
            ranks, step, bad, skipped, norm, loss, valid, units, *others = started()
            mean = loss / units if valid == units else math.nan
            # what is equal on all ranks is divided without rounding
            self.newest = StepNumbers(round(step / ranks), norm / ranks, mean, others)
            self._unjudged.append(Unjudged(self.newest.step, mean, bad > 0))
            sums, trained = self.losses, LossSum(loss, round(valid), round(units))
            sums.since_row = LossSum(*map(add, sums.since_row, trained))
            sums.epoch = LossSum(*map(add, sums.epoch, (0, 0, trained.units) if skipped else trained))
            sums.skipped += skipped > 0

    def end_row(self) -> LossSum:
        """The losses since the row before, as a row is written."""
        sums, self.losses.since_row = self.losses.since_row, LossSum()
        return sums

    def end_epoch(self) -> float:
        """The mean loss of the epoch, which ends. Collective."""
        self.flush()
        mean, self.losses.epoch = self.losses.epoch.mean, LossSum()
        return mean

    def judge(self, step: int) -> Verdict:
        """The verdict on step `step - LATE`, after step `step`."""
        if not self._unjudged or self._unjudged[0].step > step - LATE:
            return Verdict.OK
        self.judged, loss, bad_gradient = self._unjudged.popleft()
        sigmas = self.config.sigmas
        limit = float(self.ordinary.limit(sigmas)) if sigmas else math.inf
        if bad_gradient:
            self.problem = "its gradient norm is not finite or above the limit"
        elif not math.isfinite(loss):
            self.problem = "its loss is not finite"
        elif loss > limit:
            self.problem = f"its loss, {loss:.4f}, is above the limit, {limit:.4f}"
        else:
            if sigmas:
                self.ordinary.add(loss)
            self.first_bad = None
            return Verdict.OK
        self.bad_steps += 1
        self.first_bad = self.first_bad or self.judged
        return Verdict.DIVERGED if self.judged - self.first_bad + 1 >= self.config.patience else Verdict.BAD

    def state_dict(self) -> GuardState:
        """State for checkpoints, so that a resumed run gives the same verdicts."""
        return GuardState(
            judged=self.judged,
            first_bad=self.first_bad,
            losses=self.ordinary.state_dict(),
            unjudged=[*self._unjudged],
        )

    def load_state_dict(self, state: GuardState) -> None:
        """Loads what `state_dict` returned."""
        self.judged, self.first_bad = state.judged, state.first_bad
        self.ordinary, self._unjudged = RunningStatistics(state=state.losses), deque(state.unjudged)


def copy_to_host(values: Tensor) -> Later:
    """Starts a copy of a vector from its device. Returns a function that waits for it and returns the numbers."""
    if values.device.type != "cuda":
        return values.tolist
    copy = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def wait() -> list[float]:
        copied.synchronize()
        return copy.tolist()

    return wait
