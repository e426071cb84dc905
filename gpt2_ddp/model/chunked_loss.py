"""Cross-entropy of a linear head over chunks of tokens: only one chunk's logits are in memory.

Shapes: N tokens, C features, V rows of the head. The gradients of a chunk are computed with its loss, so the backward
pass recomputes no logits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_ddp.model.architecture import Head

IGNORED = -100


def chunked_loss(x: Tensor, head: Head, targets: Tensor, chunk: int, reduction: str) -> Tensor:
    """`F.cross_entropy(head.logits(x), targets, reduction=reduction)`, to rounding, in fp32.

    Args:
        x: [N, C]. head: its bias is a constant. targets: int64 [N]; -100 is not scored.
        chunk: tokens per chunk. Reduction `none` keeps all logits if gradients are required.
    """
    if reduction == "none":
        dtype = _matmul_dtype(x)
        half = _in_dtype(head, dtype)
        chunks = zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True)
        losses = [F.cross_entropy(half.logits(rows).float(), goal, reduction="none") for rows, goal in chunks]
        return torch.cat(losses)
    total: Tensor = _Sum.apply(x, head.weight, head, targets, chunk)  # pyright: ignore[reportAssignmentType]
    return total if reduction == "sum" else total / (targets != IGNORED).sum()


def _matmul_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _in_dtype(head: Head, dtype: torch.dtype) -> Head:
    return Head(head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype), head.soft_cap)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, head: Head, targets: Tensor, chunk: int) -> Tensor:
        dtype, cap = _matmul_dtype(x), head.soft_cap
        half = _in_dtype(head, dtype)
        total, of_x, of_weight = x.new_zeros((), dtype=torch.float32), [], torch.zeros_like(weight)
        for rows, goal in zip(x.to(dtype).split(chunk), targets.split(chunk), strict=True):
            scored, index = (goal != IGNORED)[:, None], goal.clamp(min=0)[:, None]
            logits = half.logits(rows).float()  # [n, V]
            log_p = logits.log_softmax(dim=-1)
            total = total - (log_p.gather(1, index) * scored).sum()
            gradient = log_p.exp_().scatter_add_(1, index, log_p.new_full(index.shape, -1.0))  # [n, V]
            if cap is not None:  # of tanh; 0 in the padding, whose logits are -inf
                gradient = gradient * (1 - (logits / cap).square()).clamp_(min=0)
            gradient = gradient.to(dtype)
            of_x.append((gradient @ half.weight) * scored)
            of_weight += gradient.T @ (rows * scored)
        ctx.save_for_backward(torch.cat(of_x), of_weight)
        ctx.dtype = x.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        of_x, of_weight = ctx.saved_tensors
        return of_x.to(ctx.dtype) * scale, of_weight * scale, None, None, None
