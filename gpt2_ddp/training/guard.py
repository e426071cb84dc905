"""The guard against divergence: a verdict on each step, from sums over all ranks, two steps late."""

import math
from collections import deque
from enum import Enum

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.state import GuardState, Unjudged
from gpt2_ddp.training.optimizer import RunningStatistics

LATE = 2
"""Steps between a step and its verdict: as late as `StepSums`, so the verdict comes at the same step for any number of
ranks, and none waits for it."""

Verdict = Enum("Verdict", ["OK", "BAD", "DIVERGED"])
"""The verdict on a step. `DIVERGED`: the last of `guard.patience` bad steps in a row."""


class Guard:
    """Verdicts on steps, equal on every rank: bad is a bad gradient, and a loss that is not finite or far too large.
    `first_step`: the step that the run began after.

    Attributes:
        judged: the last step with a verdict. first_bad: first of the bad steps in a row; None after a good one.
        problem: reason of the last bad verdict. bad_steps: their number in this process.
    """

    def __init__(self, config: GuardConfig, first_step: int = 0):
        self.config, self._first_step = config, first_step
        self.problem, self.bad_steps = "", 0
        self.load_state_dict(GuardState())

    @property
    def last_good(self) -> int:
        """The last step known to be good, or the run's first; rollbacks return to a checkpoint up to here."""
        return max(self._first_step, self.judged if self.first_bad is None else self.first_bad - 1)

    def add(self, step: int, loss: float, bad: bool) -> None:
        """Takes a step's mean loss, and whether its gradient was bad, over all ranks."""
        self._unjudged.append(Unjudged(step, loss, bad))

    def judge(self, step: int) -> Verdict:
        """The verdict on step `step - LATE`, after step `step`."""
        if not self._unjudged or self._unjudged[0].step > step - LATE:
            return Verdict.OK
        return self._classify(*self._unjudged.popleft())

    def _classify(self, step: int, loss: float, bad_gradient: bool) -> Verdict:
        self.judged, sigmas = step, self.config.loss_sigmas
        limit = float(self.losses.limit(sigmas)) if sigmas else math.inf
        if bad_gradient:
            self.problem = "its gradient norm is not finite or above the limit"
        elif not math.isfinite(loss):
            self.problem = "its loss is not finite"
        elif loss > limit:
            self.problem = f"its loss, {loss:.4f}, is above the limit, {limit:.4f}"
        else:
            if sigmas:
                self.losses.add(loss)
            self.first_bad = None
            return Verdict.OK
        self.bad_steps += 1
        self.first_bad = self.first_bad or step
        return Verdict.DIVERGED if step - self.first_bad + 1 >= self.config.patience else Verdict.BAD

    def state_dict(self) -> GuardState:
        """State for checkpoints, so that a resumed run gives the same verdicts."""
        return GuardState(
            judged=self.judged,
            first_bad=self.first_bad,
            losses=self.losses.state_dict(),
            unjudged=[*self._unjudged],
        )

    def load_state_dict(self, state: GuardState) -> None:
        """Loads what `state_dict` returned."""
        self.judged, self.first_bad = state.judged, state.first_bad
        self.losses, self._unjudged = RunningStatistics(state=state.losses), deque(state.unjudged)
