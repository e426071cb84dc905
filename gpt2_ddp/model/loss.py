"""The loss of the head and its gradient in one pass over the logits, for compiled training on
GPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FUSED_ON: tuple[str, ...] = ()
"""Types of devices on which compiled bf16 training computes the loss and its gradient in one
pass."""


def fuses_loss(x: Tensor, reduction: str) -> bool:
    """Whether `one_pass_loss` computes the loss of these hidden states: in compiled bf16 training
    on `FUSED_ON`. Under fp16, a gradient without the loss scale would underflow. An evaluation
    needs no gradient."""
    kind = x.device.type
    is_training = torch.compiler.is_compiling() and torch.is_grad_enabled() and reduction != "none"
    is_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return kind in FUSED_ON and is_training and is_bf16


def one_pass_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, soft_cap: float | None
) -> Tensor:
    """The summed cross-entropy of the head, fp32 scalar or wider. N tokens, C features, V padded
    vocabulary.

    The plain loss writes the logits [N, V] in its forward pass, and reads them again in its
    backward pass. Here the forward pass computes the gradients of x and weight too. The backward
    pass multiplies them by a scalar. So compiled code needs one kernel between the matrix products,
    and no [N, V] tensor is kept.

    Args:
        x: hidden states [N, C]. weight: of the head [V, C]. Autocast's dtype applies to both.
        targets: int64 [N]; -100 is not scored.
        vocab_size: the columns above it are padding, of probability 0.
        soft_cap: as in `Architecture`.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x = x / soft_cap if soft_cap else x
    loss = _OnePassLoss.apply(x.to(dtype), weight.to(dtype), targets, vocab_size, soft_cap)
    assert isinstance(loss, Tensor)
    return loss


class _OnePassLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        soft_cap: float | None,
    ) -> Tensor:
        logits = x @ weight.mT  # [N, V]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        share = torch.tanh(logits) if soft_cap else logits
        logits = share * soft_cap if soft_cap else logits
        column = torch.arange(len(weight), device=x.device)
        # a finite number, as maxima of -inf would need care
        logits = torch.where(column < vocab_size, logits, torch.finfo(logits.dtype).min)
        log_share = F.log_softmax(logits, dim=-1)
        is_target = column == targets[:, None]
        is_scored = (targets >= 0)[:, None]
        loss = -torch.where(is_target, log_share, 0.0).sum()  # -100 is no column
        gradient = torch.where(is_scored, log_share.exp() - is_target.to(logits.dtype), 0.0)
        if soft_cap:
            gradient = gradient * (soft_cap * (1 - share * share))
        gradient = gradient.to(x.dtype)
        ctx.save_for_backward(gradient @ weight, gradient.mT @ x)
        return loss

    @staticmethod
    def backward(ctx: Any, *scale: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        return of_x * scale[0], of_weight * scale[0], None, None, None
