"""The optimizer, its parameter groups and its schedule."""

import math

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import AdamW, Optimizer

from gpt2_ddp.config.training import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> AdamW:
    """Fused AdamW over the plain model: matrices and embeddings decay, biases and LayerNorms do not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def lr_at(step: int, config: OptimConfig) -> float:
    """Learning rate of optimizer step `step`; the first is 1. A pure function: nothing has to be restored.

    Linear warm-up to `lr` at `warmup_steps`, then one of
        cosine: half a cosine to `min_lr` at `decay_steps` (Loshchilov and Hutter, 2017);
        wsd: `lr` until the last `decay_fraction` of `decay_steps`, then linear to `min_lr` (Hu et al., 2024);
        constant: `lr`.
    After `decay_steps` it stays at `min_lr`.
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


def skip_if_not_finite(optimizer: Optimizer, grad_norm: Tensor, scaler: GradScaler | None = None) -> Tensor:
    """Makes the next `optimizer.step` change nothing where the gradient norm is inf or NaN.

    The norm is that of the all-reduced gradient, so all ranks skip together; the fused kernel reads the flag on the
    device, so that nobody waits for it. An fp16 loss scaler does the same by itself, from the same gradients.

    Returns:
        The flag, fp32 scalar on the device: 1 where the step is skipped.
    """
    flag = (~torch.isfinite(grad_norm)).float()
    if scaler is None:
        optimizer.found_inf = flag  # pyright: ignore[reportAttributeAccessIssue]  # the fused optimizers' own protocol
    return flag


def broadcast_optimizer_state(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
    """Gives every rank the main process's optimizer state, over the wire: nodes need not share a disk."""
    if accelerator.num_processes == 1:
        return
    parameters = dict(model.named_parameters())
    layout = [
        (name, kind, value.shape, value.dtype)
        for name, parameter in parameters.items()
        for kind, value in optimizer.state.get(parameter, {}).items()
    ]
    shared = [layout]
    broadcast_object_list(shared)
    for name, kind, shape, dtype in shared[0]:
        parameter = parameters[name]
        if not accelerator.is_main_process:
            optimizer.state[parameter][kind] = torch.empty(shape, dtype=dtype, device=parameter.device)
        dist.broadcast(optimizer.state[parameter][kind], src=0)
