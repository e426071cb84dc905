"""Cross-entropy of a linear head over chunks of tokens: only one chunk's logits are in memory.

Shapes: N tokens, C features, V rows of the head. The gradients of a chunk are computed with its loss, so the backward
pass recomputes no logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100


def chunked_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, reduction: str) -> Tensor:
    """`F.cross_entropy(F.linear(x, weight, bias), targets, reduction=reduction)`, to rounding, in fp32.

    Args:
        x: [N, C]. weight: [V, C]. bias: [V], a constant. targets: int64 [N]; -100 is not scored.
        chunk: tokens per chunk. Reduction `none` keeps all logits if gradients are required.
    """
    if reduction == "none":
        dtype = _matmul_dtype(x)
        half, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        chunks = zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True)
        losses = [F.cross_entropy(F.linear(rows, half, bias).float(), goal, reduction="none") for rows, goal in chunks]
        return torch.cat(losses)
    total: Tensor = _Sum.apply(x, weight, bias, targets, chunk)  # pyright: ignore[reportAssignmentType]
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


def _matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int) -> Tensor:
        dtype = _matmul_dtype(x)
        half, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        total, of_x, of_weight = x.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        for rows, goal in zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True):
            scored, index = (goal != IGNORED)[:, None], goal.clamp(min=0)[:, None]
            log_p = F.linear(rows, half, bias).float().log_softmax(dim=-1)  # [n, V]
            total = total - (log_p.gather(1, index) * scored).sum()
            gradient = log_p.exp_().scatter_add_(1, index, log_p.new_full(index.shape, -1.0)).to(dtype)  # [n, V]
            of_x.append((gradient @ half) * scored)
            of_weight += gradient.T @ (rows * scored)
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        ctx.dtype = x.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        of_x, of_weight = ctx.saved_tensors
        return of_x.to(ctx.dtype) * scale, of_weight * scale, None, None, None
