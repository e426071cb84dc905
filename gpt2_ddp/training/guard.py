"""A guard against divergence: it judges each step from sums over all ranks, a fixed number of steps late."""

import math
from collections import deque
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.model.optim import NormStatistics, RunningStatistics
from gpt2_ddp.training.stop import CARRIED, StopRequest

LATE = 2
"""Steps after which a step is judged: its numbers are read from the device one step late, and summed up over the ranks
one step later. So nothing waits, and any number of ranks decides at the same step."""

FIXED, LARGEST = 2**32, 2**20
"""What 1 is as a fixed-point number, and the largest loss. Losses are summed up as integers, which have the same sum in
any order: on every rank, and nearly for every number of them."""


class Guard:
    """Tells good steps from bad ones, the same on every rank.

    A step is bad if its gradient is not finite, or its norm out of the ordinary (`model.optim.UpdateSkipper` leaves
    such a step out), if its loss is not finite, or exceeds its running mean by `loss_sigmas`. After `patience` bad
    steps in a row the run has diverged, since `first_bad`.

    Attributes:
        norms: of the good steps' gradients, on the device.
        losses: of the good steps.
        judged: the last step that was judged.
        first_bad: first step of the present stretch of bad ones; None where the last one judged was good.
        wrong: what was wrong with the last bad step, in words. bad_steps: how many this process has seen.
        diverged: whether the stretch is as long as `patience`.
    """

    def __init__(self, config: GuardConfig, accelerator: Accelerator):
        self.config, self._accelerator = config, accelerator
        self.problem, self.bad_steps = "", 0
        self.load_state_dict({})

    @property
    def last_good(self) -> int:
        """The last step that is known to be good, or the run's first: what was saved until then can be gone back to."""
        return max(self._begins, self.judged if self.first_bad is None else self.first_bad - 1)

    def record(self, loss: Tensor, bad: Tensor) -> None:
        """Takes a step's numbers, without waiting for the device.

        Args:
            loss: this rank's part of the step's mean loss, scalar.
            bad: whether its gradient was bad, fp32 scalar.
        """
        self._noted.append(_Numbers(torch.stack([loss, bad])))

    def judge(self, step: int, stop: StopRequest) -> bool:
        """Judges; once a step, of which `step` is the last one taken. On the way, all ranks hear of a stop. Collective.

        Returns:
            whether a step was found to be bad.
        """
        if self._unsent is not None:
            stop.agreed(self._unsent.integers())
            self._unsent, stop.carried = None, [0] * CARRIED
        stop.agreed(self._noted[0].integers())
        count, loss, not_finite, bad = stop.carried
        stop.carried = [0] * CARRIED
        if not count:  # the first steps of all
            return False
        return self._classify(step - LATE, math.inf if not_finite else loss / FIXED, bad > 0)

    def _classify(self, step: int, loss: float, bad_gradient: bool) -> bool:
        self.judged = step
        sigmas = self.config.loss_sigmas
        limit = self.losses.limit(sigmas) if sigmas else math.inf
        if bad_gradient:
            self.problem = "its gradient is not finite, or its norm is out of the ordinary"
        elif not math.isfinite(loss):
            self.problem = "its loss is not finite"
        elif loss > limit:
            self.problem = f"its loss, {loss:.4f}, is out of the ordinary, which ends at {limit:.4f}"
        else:
            if sigmas:
                self.losses.add(loss)
            self.first_bad, self.diverged = None, False
            return False
        self.bad_steps += 1
        self.first_bad = self.first_bad or step
        self.diverged = step - self.first_bad + 1 >= self.config.patience
        return True

    def state_dict(self) -> dict[str, Any]:
        """What checkpoints keep, so that a resumed run decides as one that was never stopped. Collective."""
        device = self._accelerator.device
        noted = torch.tensor([numbers.integers() for numbers in self._noted], device=device)
        return {
            "judged": self.judged,
            "first_bad": self.first_bad,
            "norms": self.norms.read(),
            "losses": list(self.losses.values),
            "noted": sum_over_ranks(self._accelerator, noted).tolist(),
        }

    def load_state_dict(self, state: dict[str, Any], begins: int = 0) -> None:
        """Goes on from `state`; where it is empty, from nothing. The run itself began after step `begins`."""
        device, self._begins = self._accelerator.device, begins
        self.judged: int = state.get("judged", 0)
        self.first_bad: int | None = state.get("first_bad")
        self.diverged = False
        self.norms = NormStatistics(device, state.get("norms"))
        self.losses = RunningStatistics(state.get("losses"))
        sums = state.get("noted", []) if self._accelerator.is_main_process else []
        noted = [_Numbers(sums=numbers) for numbers in sums] or [_Numbers() for _ in range(LATE)]
        self._noted = deque(noted, maxlen=LATE)
        self._unsent: _Numbers | None = noted[0]  # what was under way between the ranks when the state was taken


class _Numbers:
    """A step's numbers, on their way from the device; or their sums over all ranks, from a checkpoint."""

    def __init__(self, values: Tensor | None = None, sums: list[int] | None = None):
        self._sums, self._values, self._copied = sums or [0] * CARRIED, values, None
        if values is not None and values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def integers(self) -> list[int]:
        """How many ranks they are of; and, summed over these, the loss in fixed point, whether it is not finite, and
        whether the gradient is bad."""
        if self._values is None:
            return self._sums
        if self._copied is not None:
            self._copied.synchronize()
        loss, bad = self._values.tolist()
        finite = math.isfinite(loss)
        return [1, round(max(min(loss, LARGEST), -LARGEST) * FIXED) if finite else 0, not finite, round(bad)]
