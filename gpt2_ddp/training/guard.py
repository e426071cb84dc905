"""The guard against divergence: a verdict on each step, from sums over all ranks, two steps late."""

import math
from collections import deque
from collections.abc import Sequence
from enum import Enum

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.distributed.ranks import AsyncSum, is_main, sum_over_ranks
from gpt2_ddp.state import GuardState
from gpt2_ddp.training.optimizer import RunningStatistics

LATE = 2
"""Steps between a step and its verdict. Its numbers are read from the device one step late, and summed over the ranks
one step later. So no rank waits, and the verdict comes at the same step for any number of ranks."""

FIXED, LARGEST = 2**32, 2**20  # fixed-point value of 1, and the largest loss; sums of integers have no rounding
SUMS = 4  # integers per step: ranks, fixed-point loss, whether it is not finite, whether the gradient is bad

Verdict = Enum("Verdict", ["OK", "BAD", "DIVERGED"])
"""The verdict on a step. `DIVERGED`: the last of `guard.patience` bad steps in a row."""


class Guard:
    """Verdicts on steps, equal on every rank: bad is a bad gradient, and a loss that is not finite or far too large.
    `first_step`: the step that the run began after.

    Attributes:
        judged: the last step with a verdict. first_bad: first of the bad steps in a row; None after a good one.
        problem: reason of the last bad verdict. bad_steps: their number in this process.
    """

    def __init__(self, config: GuardConfig, accelerator: Accelerator, first_step: int = 0):
        self.config, self._accelerator, self._first_step = config, accelerator, first_step
        self.problem, self.bad_steps, self._sums = "", 0, AsyncSum(accelerator, SUMS)
        self.load_state_dict(GuardState())

    @property
    def last_good(self) -> int:
        """The last step known to be good, or the run's first; rollbacks return to a checkpoint up to here."""
        return max(self._first_step, self.judged if self.first_bad is None else self.first_bad - 1)

    def judge(self, step: int, loss: Tensor, bad: Tensor) -> Verdict:
        """The verdict on step `step - LATE`, after step `step`. Collective; does not wait for the device. `loss`: this
        rank's part of the step's mean loss, scalar; `bad`: 1 if its gradient was bad, fp32 scalar."""
        # copies step s, starts the sum of step s - 1, whose copy is there by now, and gets the sum of step s - 2
        self._numbers.append(_Numbers(torch.stack([loss, bad])))
        count, loss_sum, not_finite, bad_gradient = self._sums.exchange(self._numbers[0].integers())
        if not count:  # before the first step
            return Verdict.OK
        return self._classify(step - LATE, math.inf if not_finite else loss_sum / FIXED, bad_gradient > 0)

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
        """State for checkpoints, so that a resumed run gives the same verdicts. Collective."""
        numbers = torch.tensor([one.integers() for one in self._numbers], device=self._accelerator.device)
        first, last = sum_over_ranks(self._accelerator, numbers).tolist()
        losses = self.losses.state_dict()
        return GuardState(judged=self.judged, first_bad=self.first_bad, losses=losses, numbers=(first, last))

    def load_state_dict(self, state: GuardState) -> None:
        """Loads what `state_dict` returned. Collective."""
        self.judged, self.first_bad = state.judged, state.first_bad
        self.losses = RunningStatistics(state=state.losses)
        saved = state if is_main() else GuardState()  # the sums are of all ranks
        self._numbers = deque([_Numbers(sums=sums) for sums in saved.numbers], maxlen=LATE)
        self._sums.exchange(self._numbers[0].integers())  # the sum that was in flight at the checkpoint


class _Numbers:
    """The loss and flag of a step, copied from the device without waiting; or their `SUMS` over all ranks."""

    def __init__(self, values: Tensor | None = None, sums: Sequence[int] = (0,) * SUMS):
        self._sums, self._values, self._copied = list(sums), values, None
        if values is not None and values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def integers(self) -> list[int]:
        """The `SUMS` integers of this rank, once the copy from the device is there; or those of all ranks."""
        if self._values is None:
            return self._sums
        if self._copied is not None:
            self._copied.synchronize()
        loss, bad = self._values.tolist()
        finite = math.isfinite(loss)
        return [1, round(max(min(loss, LARGEST), -LARGEST) * FIXED) if finite else 0, not finite, round(bad)]
