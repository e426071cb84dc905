"""The loss of the head and its gradient in one pass over the logits: whole for compiled training on
GPUs, in parts that fit a processor's cache on CPUs."""

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

FUSED_ON: tuple[str, ...] = ()
"""Types of devices on which compiled bf16 training computes the loss and its gradient in one
pass."""

IN_PARTS_ON = ("cpu",)
"""Types of devices on which bf16 training that is not compiled computes the loss in parts, if the
logits are more than `MOST_LOGITS`."""
MOST_LOGITS = 3 * 2**21
"""Logits that are still fast in one piece: 25 MB in fp32. With twice as many, a step on two cores
of an AMD EPYC spent a fifth of its time on reading and writing them (2026-11-27)."""
PART = 2**20
"""Logits of a part: 4 MB in fp32."""


def trains_in_bf16(x: Tensor, reduction: str) -> bool:
    """Whether the loss of these hidden states is one of bf16 training. Under fp16, a gradient
    without the loss scale would underflow. An evaluation needs no gradient."""
    kind = x.device.type
    is_training = torch.is_grad_enabled() and reduction != "none"
    is_bf16 = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16
    return is_training and is_bf16


def fuses_loss(x: Tensor, weight: Tensor, reduction: str) -> bool:
    """Whether `one_pass_loss` computes the loss of these hidden states, with the head's weight: in
    bf16 training, compiled on `FUSED_ON`, or of many logits on `IN_PARTS_ON`."""
    kind = x.device.type
    if not trains_in_bf16(x, reduction):
        return False
    if torch.compiler.is_compiling():
        return kind in FUSED_ON
    return kind in IN_PARTS_ON and len(x) * len(weight) > MOST_LOGITS


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
    one_pass = _OnePassLoss if torch.compiler.is_compiling() else _LossInParts
    loss = one_pass.apply(x.to(dtype), weight.to(dtype), targets, vocab_size, soft_cap)
    assert isinstance(loss, Tensor)
    return loss


def loss_of_logits(
    logits: Tensor, targets: Tensor, vocab_size: int, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of logits [N, V], before a soft cap, and its gradient by them
    [N, V]: both fp32 or wider. Arguments as of `one_pass_loss`. One kernel in compiled code."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    share = torch.tanh(logits) if soft_cap else logits
    logits = share * soft_cap if soft_cap else logits
    column = torch.arange(logits.size(1), device=logits.device)
    # a finite number, as maxima of -inf would need care
    logits = torch.where(column < vocab_size, logits, torch.finfo(logits.dtype).min)
    log_share = F.log_softmax(logits, dim=-1)
    is_target = column == targets[:, None]
    is_scored = (targets >= 0)[:, None]
    loss = -torch.where(is_target, log_share, 0.0).sum()  # -100 is no column
    gradient = torch.where(is_scored, log_share.exp() - is_target.to(logits.dtype), 0.0)
    if soft_cap:
        gradient = gradient * (soft_cap * (1 - share * share))
    return loss, gradient


HeadInputs = tuple[Tensor, Tensor, Tensor, int, float | None]
"""x, weight, targets, vocab_size and soft_cap, as of `one_pass_loss`."""


class OnePassFunction(torch.autograd.Function):
    """A loss of `HeadInputs` whose forward pass saves its gradients by x and weight."""

    @staticmethod
    def backward(ctx: BackwardCFunction, *scale: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_x, of_weight = cast(tuple[Tensor, Tensor], ctx.saved_tensors)
        return of_x * scale[0], of_weight * scale[0], None, None, None


class _OnePassLoss(OnePassFunction):
    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: *HeadInputs) -> Tensor:
        x, weight, targets, vocab_size, soft_cap = inputs
        logits = x @ weight.mT  # [N, V]
        loss, gradient = loss_of_logits(logits, targets, vocab_size, soft_cap)
        gradient = gradient.to(x.dtype)
        ctx.save_for_backward(gradient @ weight, gradient.mT @ x)
        return loss


class _LossInParts(OnePassFunction):
    """As `_OnePassLoss`, some rows after the other. What a part computes stays in the processor's
    cache; operations in place need no other memory."""

    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: *HeadInputs) -> Tensor:
        x, weight, targets, vocab_size, soft_cap = inputs
        of_x = torch.empty_like(x)
        of_weight = torch.zeros_like(weight, dtype=torch.promote_types(x.dtype, torch.float32))
        loss = torch.zeros((), dtype=of_weight.dtype, device=x.device)
        n_rows = max(1, PART // len(weight))
        for start in range(0, len(x), n_rows):
            rows = slice(start, start + n_rows)
            logits = (x[rows] @ weight.mT).to(of_weight.dtype)  # [rows, V]
            share = logits.tanh_() if soft_cap else logits
            logits = share * soft_cap if soft_cap else logits
            logits[:, vocab_size:] = -math.inf
            goals = targets[rows, None]
            is_scored = goals >= 0
            column = goals.clamp(min=0)
            log_sums = logits.logsumexp(-1, keepdim=True)
            losses = log_sums - logits.gather(1, column)
            loss += losses[is_scored].sum()
            gradient = logits.sub_(log_sums).exp_()
            gradient.scatter_add_(1, column, torch.full_like(losses, -1.0))
            gradient *= is_scored
            if soft_cap:
                gradient *= soft_cap * (1 - share * share)
            gradient = gradient.to(x.dtype)
            torch.mm(gradient, weight, out=of_x[rows])
            of_weight += gradient.mT @ x[rows]
        ctx.save_for_backward(of_x, of_weight)
        return loss
