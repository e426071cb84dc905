"""The optimizer, its parameter groups and its schedule."""

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpt2_ddp.config.training import OptimConfig
from gpt2_ddp.model.muon import Muon


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """The optimizer over the plain model: matrices and embeddings decay, biases and LayerNorms do not.

    Fused AdamW; with `muon`, the matrices of the blocks (`h.*`) are a group of Muon's, whose `relative_lr` says how
    many times the step's learning rate is theirs.
    """
    matrices = muon_matrices(model, config)
    known = set(matrices)
    others = [p for p in model.parameters() if p.requires_grad and p not in known]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    if matrices:
        own = {"momentum": config.muon_momentum, "relative_lr": config.muon_lr / config.lr}
        groups.append({"params": matrices, "weight_decay": config.weight_decay, **own})
    return without_dynamo(Muon if matrices else AdamW)(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )


def without_dynamo(kind: Any) -> Any:
    """A class of optimizers that computes the same, and imports no compiler.

    Torch keeps Dynamo out of an optimizer by wrappers that import it at the first call: 1.1 s of CPU time, sympy and
    all, also where nothing is compiled. What they wrap is never compiled here.
    """
    names = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    bare = {name: inspect.unwrap(getattr(kind, name)) for name in names}
    return type(kind.__name__, (kind,), {**bare, "step": torch.no_grad()(inspect.unwrap(kind.step))})


def muon_matrices(model: nn.Module, config: OptimConfig) -> list[nn.Parameter]:
    """The parameters that Muon steps, none without it; the largest first, which shares them out evenly among ranks."""
    if config.name != "muon":
        return []
    matrices = [p for name, p in model.named_parameters() if name.startswith("h.") and p.dim() == 2 and p.requires_grad]
    return sorted(matrices, key=Tensor.numel, reverse=True)


def state_numbers(model: nn.Module, config: OptimConfig) -> int:
    """What the optimizer keeps of a model: two moments of each parameter, and one of Muon's matrices."""
    muon = sum(matrix.numel() for matrix in muon_matrices(model, config))
    return 2 * sum(parameter.numel() for parameter in model.parameters()) - muon


def lr_at(step: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step`; the first is 1. A pure function: nothing has to be restored.

    Linear warm-up to `lr` at `warmup_steps`, then one of
        cosine: half a cosine to `min_lr` at `decay_steps` (Loshchilov and Hutter, 2017);
        wsd: `lr` until the last `decay_fraction` of `decay_steps`, then linear to `min_lr` (Hu et al., 2024);
        constant: `lr`, for ever.
    After `decay_steps`, cosine and wsd stay at `min_lr`.
    """
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    assert config.decay_steps is not None, "decay_steps is resolved when a run starts"
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, round(config.decay_steps * (1 - config.decay_fraction)))
    progress = min(max(step - start, 0) / max(config.decay_steps - start, 1), 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + share * (config.lr - config.min_lr)


def schedule_note(step: int, steps: int, config: OptimConfig) -> str:
    """What may surprise about the rates of a run of so many steps, of which `step` are taken; empty for nothing."""
    end, low, last = config.decay_steps or steps, config.min_lr, lr_at(steps, config)
    branch = "train.branch_from starts a new run from one of its checkpoints with another schedule"
    hint = f"--optim.decay_steps {steps} moves that end" if config.may_end_at(steps, step) else branch
    if steps <= config.warmup_steps:
        up = f"the run ends at step {steps:,}, and its warm-up at step {config.warmup_steps:,}"
        up += f": the last rate is {last:.3g}, and optim.lr {config.lr:.3g}"
        return f"{up}; raise train.steps, or lower optim.warmup_steps in a new run"
    if config.schedule == "constant" or low == config.lr:
        return ""
    if steps > end:
        flat = steps - max(step, end)
        reached = f"the rate reaches min_lr ({low:.3g}) at step {end:,}, and the run ends at step {steps:,}"
        return f"{reached}: {flat:,} steps train at min_lr; {hint}"
    if last - low > (config.lr - low) / 20:
        ends = f"the run ends at step {steps:,}, and the schedule at step {end:,} (optim.decay_steps)"
        return f"{ends}: the last rate is {last:.3g}, and min_lr {low:.3g}; {hint}"
    return ""


WINDOW, WARM_UP = 100, 20
"""Values that running statistics reach back over; how many they need before they know what is out of the ordinary."""


class RunningStatistics:
    """Mean and variance of the last values: exponentially weighted, all alike as long as they are fewer than `WINDOW`.

    Args:
        values: count, mean and variance to go on from.
    """

    def __init__(self, values: Sequence[float] | None = None):
        self.values = tuple(values or (0.0, 0.0, 0.0))

    def add(self, value: float) -> None:
        """Takes one."""
        count, mean, variance = self.values
        rate, change = 1 / min(count + 1, WINDOW), value - mean
        part = rate * change
        self.values = count + 1, mean + part, (1 - rate) * (variance + part * change)

    def limit(self, sigmas: float) -> float:
        """What a value may be: so many standard deviations above the mean, and these at least a thousandth of it.
        Infinite while too few values are known."""
        count, mean, variance = self.values
        return math.inf if count < WARM_UP else mean + sigmas * max(math.sqrt(variance), abs(mean) / 1000)


class NormStatistics:
    """The same of norms, in the same arithmetic on their device; no call waits for it."""

    def __init__(self, device: torch.device, values: Sequence[float] | None = None):
        exact = torch.float64 if device.type != "mps" else torch.float32  # mps has no fp64
        self._values = torch.tensor(values or (0.0, 0.0, 0.0), dtype=exact, device=device).unbind()

    def add(self, norm: Tensor, counts: Tensor) -> None:
        """Takes a scalar, where the bool scalar `counts` says so."""
        count, mean, variance = self._values
        rate, change = counts / (count + 1).clamp_(max=WINDOW), torch.where(counts, norm, mean) - mean
        part = rate * change
        self._values = count + counts, mean + part, (1 - rate) * (variance + part * change)

    def limit(self, sigmas: float) -> Tensor:
        """What a norm may be, as above."""
        count, mean, variance = self._values
        return torch.where(count < WARM_UP, math.inf, mean + sigmas * torch.maximum(variance.sqrt(), mean / 1000))

    def read(self) -> list[float]:
        """Count, mean and variance. Waits for the device."""
        return torch.stack(self._values).tolist()


class UpdateSkipper:
    """Makes `optimizer.step` change nothing where the gradient norm is inf or NaN, or out of the ordinary, without
    waiting for the device.

    The norm is that of the all-reduced gradient, so all ranks skip together. A fused kernel is told by `found_inf`,
    which it reads on the device; under an fp16 loss scaler, which sets that from the gradients, a norm that overflowed
    is added. Any other optimizer steps, and is put back: that takes a copy of parameters and state.

    Args:
        skip: whether to.
        norm_sigmas: what is out of the ordinary, in standard deviations above the running mean; None: nothing finite.

    Attributes:
        bad: whether the last norm was, fp32 scalar on the device; the search for a scale does not count.
    """

    def __init__(self, optimizer: Optimizer, skip: bool = True, norm_sigmas: float | None = None):
        self._fused = all(group.get("fused") for group in optimizer.param_groups)
        self._skip, self._norm_sigmas = skip, norm_sigmas
        self._before: dict[Tensor, Tensor] = {}
        self._flag = self.bad = torch.zeros(())
        optimizer.register_step_pre_hook(self._ahead_of_step)
        optimizer.register_step_post_hook(self._after_step)

    def judge(self, grad_norm: Tensor, norms: NormStatistics | None = None, scale: Tensor | None = None) -> Tensor:
        """Decides about the step to come; fp32 scalar on the device: 1 where it is skipped.

        Args:
            norms: of the good steps before it, which it joins if it is one.
            scale: the fp16 loss scaler's, which is lowered until no gradient overflows.
        """
        good = finite = grad_norm < math.inf  # not where it is NaN; and a norm is never below 0
        if norms is not None and self._norm_sigmas is not None:
            good = finite & (grad_norm <= norms.limit(self._norm_sigmas))
            norms.add(grad_norm, good)
        bad = (~good).float()
        self._flag = bad if self._skip else torch.zeros_like(bad)
        self.bad = bad if scale is None else bad * (finite | (scale <= 1))
        return self._flag

    def _ahead_of_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if self._fused:
            scaled = "grad_scale" in vars(optimizer)  # set by a scaler for the time of its step, with its own found_inf
            optimizer.found_inf = torch.maximum(optimizer.found_inf, self._flag) if scaled else self._flag
        else:
            self._before = {tensor: tensor.detach().clone() for tensor in _tensors(optimizer)}

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: object, kwargs: object) -> None:
        if not self._fused:
            for tensor in _tensors(optimizer):  # state that this step created was 0 before
                tensor.copy_(torch.where(self._flag.bool(), self._before.get(tensor, torch.zeros_like(tensor)), tensor))
            self._before = {}


def _tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter
            yield from (value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor))
