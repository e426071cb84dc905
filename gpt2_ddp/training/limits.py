"""The guard's limits: running statistics of gradient norms and losses for `guard.sigmas`, and `guard.climb`."""

import math
from functools import partial

import torch
from torch import Tensor

from gpt2_ddp.state import ClimbState, Sums

WINDOW = 100  # values that running statistics average over
WARM_UP = WINDOW  # fewest values for a limit: the first steps of a training have other norms than those after them


class RunningStatistics:
    """Mean and variance of the last values, exponentially weighted; equally weighted below `WINDOW` values. The
    arithmetic is in fp64, of scalars on `device`. Only `state_dict` waits."""

    def __init__(self, device: torch.device | str = "cpu"):
        exact = torch.float32 if torch.device(device).type == "mps" else torch.float64  # mps has no fp64
        self._scalar = partial(torch.as_tensor, dtype=exact, device=device)
        self.load_state_dict((0, 0, 0))

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


FIRST_BLOCK, BLOCK = 5, 20  # steps of the blocks whose mean losses are compared
LONG = 100  # losses above the limit in a row that are a divergence


class Climb:
    """Compares each loss with the lowest mean loss of a block of steps so far. A limit that followed the losses would
    never notice a slow climb. Plain floats, equal on every rank."""

    def __init__(self, share: float | None):
        self.share, self.state = share, ClimbState()

    def margin(self, best: float) -> float:
        """How far losses may be above their best. It is `share` of the larger of two: the absolute best, and what the
        training loss has gained since the start. It is at least three standard deviations of the losses."""
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
        state, limit = self.state, self.limit
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
        count, total, squares = (before + now for before, now in zip(state.block, (1, loss, loss * loss), strict=True))
        state.block = count, total, squares
        if count < (FIRST_BLOCK if is_first else BLOCK):
            return
        mean = total / count
        state.block = 0, 0, 0
        if mean < state.best:
            state.best, state.noise = mean, math.sqrt(max(squares / count - mean * mean, 0))
        if is_first:
            state.start = max(mean, state.start)
