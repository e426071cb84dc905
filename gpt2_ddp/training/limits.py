"""Running statistics of gradient norms and losses, for the limits of `guard.sigmas`."""

import math
from functools import partial

import torch
from torch import Tensor

from gpt2_ddp.state import Sums

WINDOW, WARM_UP = 100, 20  # values that running statistics average over; fewest values for a limit


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
