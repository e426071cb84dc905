"""The optimizer of a training step: loss scale, clipping, learning rates, and skipped steps."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.errors import UserError
from gpt2_ddp.model.optim import reads_found_inf
from gpt2_ddp.state import OptimizerState, Sums
from gpt2_ddp.training.strategy import Replicated

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


class GuardedOptimizer:
    """An optimizer whose step changes nothing where the gradient is bad. No method waits for the device.

    A gradient is bad where its norm is inf or NaN, or exceeds the running mean of norms by `norm_sigmas`. The norm is
    that of the all-reduced gradient, so all ranks skip the same steps. A fused kernel reads `found_inf` on the device.
    Under an fp16 loss scaler, which sets `found_inf` from the gradients, a bad norm is added. For other optimizers
    parameters and state are copied before the step and restored after it.

    Attributes:
        plain: the optimizer inside Accelerate's. norms: statistics of the norms of good gradients.
        bad: whether the last gradient was bad, fp32 scalar on the device. The search for a loss scale does not count.
    """

    def __init__(
        self,
        optimizer: AcceleratedOptimizer,
        strategy: Replicated,
        norm_sigmas: float | None = None,
    ):
        self.plain: Optimizer = optimizer.optimizer
        accelerator = strategy.accelerator
        self.norms = RunningStatistics(accelerator.device)
        self._prepared, self._strategy, self._scaler = optimizer, strategy, accelerator.scaler
        self._fused = reads_found_inf(self.plain)
        self._norm_sigmas = norm_sigmas
        self._before: dict[Tensor, Tensor] = {}
        self._flag = self.bad = torch.zeros(())
        self.plain.register_step_pre_hook(self._before_step)
        self.plain.register_step_post_hook(self._after_step)

    def state_dict(self) -> OptimizerState:
        """Statistics of the norms, and the loss scaler. Waits for the device."""
        scaler = self._scaler.state_dict() if self._scaler else None
        return OptimizerState(norms=self.norms.state_dict(), scaler=scaler)

    def load_state_dict(self, state: OptimizerState) -> None:
        """Loads what `state_dict` returned."""
        self.norms.load_state_dict(state.norms)
        if state.scaler and self._scaler:
            self._scaler.load_state_dict(state.scaler)

    # Accelerate's backward, clip_grad_norm_, step and zero_grad compute the same. In every step they also divide by 1,
    # and search for DTensors, an optional package and signatures.
    def backward(self, loss: Tensor) -> None:
        """Runs the backward pass of a scalar loss, scaled under fp16."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()

    def unscale(self) -> None:
        """Removes the loss scale of fp16 from the gradients, once a step."""
        if self._scaler:
            self._strategy.accelerator.unscale_gradients(self._prepared)

    def clip(self, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
        """Clips the unscaled gradients; returns their global norm before, fp32 scalar. `max_norm` 0: no clipping."""
        return self._strategy.clip(parameters, max_norm or math.inf)

    def step(self, settings: Mapping[str, float], grad_norm: Tensor) -> Tensor:
        """Takes a step and zeroes the gradients; returns 1 if the step was skipped, else 0. `settings`: for
        `set_values`. `grad_norm`: of `clip`."""
        set_values(self.plain.param_groups, settings)
        self._judge(grad_norm)
        (self._prepared if self._scaler else self.plain).step()
        # DDP's gradients are views of its buckets, which None would drop; one process saves a pass over the memory
        self.plain.zero_grad(set_to_none=not self._strategy.keeps_gradients)
        return self._flag

    def _judge(self, grad_norm: Tensor) -> None:
        good = finite = grad_norm < math.inf  # false for NaN
        if self._norm_sigmas is not None:
            good = finite & (grad_norm <= self.norms.limit(self._norm_sigmas))
            self.norms.add(grad_norm, good)
        scale = getattr(self._scaler, "_scale", None)
        self._flag = bad = (~good).float()
        self.bad = bad if scale is None else bad * (finite | (scale <= 1))

    def _before_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if self._fused:
            scaled = "grad_scale" in vars(optimizer)  # a scaler sets it during its step, with its own found_inf
            optimizer.found_inf = torch.maximum(optimizer.found_inf, self._flag) if scaled else self._flag
        else:
            self._before = {tensor: tensor.detach().clone() for tensor in _tensors(optimizer)}

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if not self._fused:
            for tensor in _tensors(optimizer):  # state that this step created was 0 before
                tensor.copy_(torch.where(self._flag.bool(), self._before.get(tensor, torch.zeros_like(tensor)), tensor))
            self._before = {}


def set_values(groups: list[dict[str, Any]], settings: Mapping[str, float]) -> None:
    """Sets the settings of a step: `lr` in all groups, times the `relative_lr` of each, and likewise others such as
    `weight_decay`; then `muon_lr` in the group with the name `muon`. Raises: UserError for one that no group has."""
    for name in sorted(settings, key=len):  # `muon_lr` after `lr`
        is_known = False
        for group in groups:
            setting = name.removeprefix(f"{group.get('name')}_")
            if setting in group:
                factor = group.get(f"relative_{name}", 1.0) if setting == name else 1.0
                group[setting] = settings[name] * factor
                is_known = True
        if not is_known:
            raise UserError("schedule()", name, "the optimizer has no such setting")


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))
