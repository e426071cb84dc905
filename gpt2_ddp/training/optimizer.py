"""The optimizer of a training step: loss scale, clipping, learning rates, and skipped steps."""

# accelerate has no type stubs, and torch is typed in part
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor
from torch.optim import Optimizer

from gpt2_ddp.config.training import OptimConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.task import Loss


class GuardedOptimizer:
    """An optimizer whose step changes nothing where it is to be skipped.

    All ranks skip the same steps, since `Guard.judge_gradient` judges the all-reduced gradient. A
    fused kernel reads `found_inf` on the device, so no method waits for the device. With another
    optimizer the host waits, and leaves the step out.

    Attributes:
        plain: the optimizer inside Accelerate's.
    """

    def __init__(self, optimizer: AcceleratedOptimizer, strategy: Replicated):
        self.plain: Optimizer = optimizer.optimizer
        accelerator = strategy.accelerator
        self._prepared = optimizer
        self._accelerator = accelerator
        self._scaler: torch.amp.GradScaler | None = accelerator.scaler
        self._keeps_gradients = strategy.keeps_gradients
        self._waits = not all(group.get("fused") for group in self.plain.param_groups)
        self._skip = torch.zeros(())
        if not self._waits:
            self.plain.register_step_pre_hook(self._set_found_inf)

    # Accelerate's backward, clip_grad_norm_, step and zero_grad compute the same. In every step
    # they also divide by 1, and search for DTensors, an optional package and signatures.
    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Runs the backward pass of a scalar loss. Under fp16 it scales the loss. After the `last`
        pass of a step, the gradients lose that scale."""
        (self._scaler.scale(loss) if self._scaler else loss).backward()
        if last and self._scaler:
            self._accelerator.unscale_gradients(self._prepared)

    def step(self, settings: Mapping[str, float], grad_norm: Tensor, skip: Tensor) -> Tensor:
        """Takes a step, which changes nothing where `skip` is 1 and not 0, and zeroes the
        gradients. Returns whether it is bad, likewise: skipped, and not by the search for a loss
        scale. `settings`: for `set_values`."""
        set_values(self.plain.param_groups, settings)
        scale = getattr(self._scaler, "_scale", None)
        bad = skip if scale is None else skip * (grad_norm.isfinite() | (scale <= 1))
        self._skip = skip
        if not (self._waits and skip):
            (self._prepared if self._scaler else self.plain).step()
        elif self._scaler:
            self._scaler.update()
        # DDP's gradients are views of its buckets, which None would drop; one process saves a pass
        # over the memory
        self.plain.zero_grad(set_to_none=not self._keeps_gradients)
        return bad

    def _set_found_inf(self, optimizer: Optimizer, *_: object) -> None:
        # Fused kernels read this attribute, which torch's class does not declare. Where a scaler
        # has set it, the norm is not finite either.
        vars(optimizer)["found_inf"] = self._skip


def named_losses(loss: Loss) -> dict[str, Tensor]:
    """What a task's `loss` returned, by name: `loss` first."""
    value, others = loss if isinstance(loss, tuple) else (loss, {})
    return {"loss": value, **others}


def lr_at(step: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step`; the first step is 1.

    Linear warm-up to `lr` at `warmup_steps`, then one of three. cosine: half a cosine to `min_lr`
        at `decay_steps` (Loshchilov and Hutter, 2017). wsd: `lr` until the last `decay_fraction` of
        `decay_steps`, then linear to `min_lr` (Hu et al., 2024). constant: `lr`.
    After `decay_steps`, cosine and wsd stay at `min_lr`. `OptimConfig.decayed` is their clock.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = config.decayed(step)
    share = (
        0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    )
    return config.min_lr + share * (config.lr - config.min_lr)


def set_values(groups: list[dict[str, Any]], settings: Mapping[str, float]) -> None:
    """Sets the settings of a step in the optimizer's parameter groups, in place.

    A setting such as `lr` or `weight_decay` is for all groups that have it, times the group's
    `relative_lr` or alike. One that begins with a group's `name`, such as `muon_lr`, is for that
    group alone, and takes precedence there. Raises: UserError for a setting that no group has.
    """
    unknown = {*settings}
    for group in groups:
        for name in settings:
            if name in group:
                group[name] = settings[name] * group.get(f"relative_{name}", 1.0)
                unknown.discard(name)
        for name, own_name in _own_settings(group, settings):
            group[own_name] = settings[name]
            unknown.discard(name)
    for name in settings:
        if name in unknown:
            raise UserError("schedule()", name, "the optimizer has no such setting")


def _own_settings(
    group: Mapping[str, Any], settings: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """The settings of this group alone: (`muon_lr`, `lr`) in the group with the name `muon`."""
    if "name" not in group:
        return
    prefix = f"{group['name']}_"
    for name in settings:
        if name.startswith(prefix) and name[len(prefix) :] in group:
            yield name, name[len(prefix) :]
