"""What a run knows of its losses: their sums over several steps, and its best evaluation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.training.task import Scores

WAITING = 64
"""Steps whose losses wait to be summed up at once, which takes as long as a single one."""


class LossSum:
    """Losses of several steps, summed on the device, and the units that they are of; adding waits for nothing.

    The sum is in fp64, where one of fp32 losses is exact as long as it stays below 2^29 times the smallest of them, and
    so the same in any order: a run that was stopped in between comes to the same bits.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator, device = accelerator, accelerator.device
        exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
        self._loss = torch.zeros((), dtype=exact, device=device)
        self._counted = torch.zeros_like(self._loss)
        self._units = 0
        self._waiting: list[tuple[int, Tensor, Tensor | None]] = []

    def add(self, loss: Tensor, units: int, left_out: Tensor | None = None) -> None:
        """Takes this rank's part of a step.

        Args:
            loss: sum over its units, scalar.
            left_out: whether it does not count, fp32 scalar on the device; None: only what is finite counts.
        """
        self._waiting.append((units, loss, left_out))
        self._units += units
        if len(self._waiting) == WAITING:
            self._sum_up()

    def _sum_up(self) -> None:
        for units in {units for units, _, _ in self._waiting}:  # a tensor of them would have to be sent to the device
            _, losses, left_out = zip(*(one for one in self._waiting if one[0] == units), strict=True)
            losses = torch.stack(losses)
            counts = losses.isfinite() if left_out[0] is None else torch.stack(left_out) == 0
            self._loss += torch.where(counts, losses, 0).sum(dtype=self._loss.dtype)
            self._counted += units * counts.sum()
        self._waiting.clear()

    def pop_mean(self) -> tuple[float, int]:
        """The mean loss of the units that count, NaN for none, and how many did not; begins anew. Collective; waits for
        the device."""
        loss, counted, units = self.state_dict()
        self.load_state_dict((0, 0, 0))
        return loss / counted if counted else math.nan, units - counted

    def state_dict(self) -> tuple[float, int, int]:
        """Of all ranks: the sum, the units that count, and all units. Collective; waits for the device."""
        self._sum_up()
        own = torch.stack([self._loss, self._counted, torch.full_like(self._loss, self._units)])
        loss, counted, units = sum_over_ranks(self._accelerator, own).tolist()
        return loss, round(counted), round(units)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Goes on from what all ranks had; once, so that the main process alone holds it."""
        loss, counted, units = state if self._accelerator.is_main_process else (0, 0, 0)
        self._loss.fill_(loss)
        self._counted.fill_(counted)
        self._units = int(units)
        self._waiting.clear()


class Best(NamedTuple):
    """The evaluation with the lowest val_loss, and how many have come since in a row that had none.

    Args:
        tokens: that it scored. Another number begins anew: losses over other tokens do not compare.
    """

    step: int = 0
    val_loss: float = math.inf
    tokens: float | None = None
    since: int = 0

    def after(self, step: int, scores: Scores) -> "Best":
        """With the next evaluation; one without a val_loss changes nothing."""
        loss, tokens = scores.get("val_loss", math.nan), scores.get("val_tokens")
        if math.isfinite(loss) and (loss < self.val_loss or tokens != self.tokens):
            return Best(step, loss, tokens)
        return self._replace(since=self.since + 1) if "val_loss" in scores and math.isfinite(self.val_loss) else self
