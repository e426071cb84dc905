"""The mean loss over several steps, summed on the device."""

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.distributed.ranks import sum_over_ranks


class LossSum:
    """Sum of losses, and the number of units (tokens, samples) that they are of. Adding does not wait for the device.

    The sum is in fp64. A sum of fp32 losses is exact there while it stays below 2^29 times the smallest of them, so a
    resumed run gets the same bits.
    """

    def __init__(self, accelerator: Accelerator):
        self._accelerator, device = accelerator, accelerator.device
        exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
        self._loss = torch.zeros((), dtype=exact, device=device)
        self._valid = torch.zeros_like(self._loss)
        self._units = 0

    def add(self, loss: Tensor, units: int, skipped: Tensor | None = None) -> None:
        """Adds this rank's part of a step.

        Args:
            loss: sum over its units, scalar.
            skipped: 1 where the step must not count, fp32 scalar on the device; None: only finite losses count.
        """
        valid = loss.isfinite() if skipped is None else skipped == 0
        self._loss += torch.where(valid, loss, 0)
        self._valid += valid * units
        self._units += units

    def pop_mean(self) -> tuple[float, int]:
        """Mean loss of the valid units, NaN for none, and the number of other units; resets the sum. Collective; waits
        for the device."""
        loss, valid, units = self.state_dict()
        self.load_state_dict((0, 0, 0))
        return loss / valid if valid else math.nan, units - valid

    def state_dict(self) -> tuple[float, int, int]:
        """Sum, valid units and all units, over all ranks. Collective; waits for the device."""
        own = torch.stack([self._loss, self._valid, torch.full_like(self._loss, self._units)])
        loss, valid, units = sum_over_ranks(self._accelerator, own).tolist()
        return loss, round(valid), round(units)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Loads what `state_dict` returned, on the main process; the other ranks start at 0."""
        loss, valid, units = state if self._accelerator.is_main_process else (0, 0, 0)
        self._loss.fill_(loss)
        self._valid.fill_(valid)
        self._units = int(units)
