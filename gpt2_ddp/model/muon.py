"""Muon (Jordan et al., 2024) for matrices and AdamW for everything else, as one optimizer."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from gpt2_ddp.distributed.launch import multiplies_bf16

STEPS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
"""Newton-Schulz iteration by Jordan: singular values end between about 0.7 and 1.2."""
TOGETHER = 2**22
"""Most elements of matrices that are orthogonalized together."""


class Muon(AdamW):
    """`torch.optim.Muon` for groups with a `momentum`, and fused AdamW for the others.

    The update of an [A, B] matrix is Nesterov's momentum, orthogonalized and scaled by √max(1, A/B) (the "original"
    adjustment): its spectral norm is about the learning rate at any width. Each rank computes some updates and
    broadcasts them. So ranks share the work, and stay replicas although processors round differently. A group with
    `bf16` iterates in bf16, on devices with instructions for it, and sends bf16; otherwise all is fp32.
    Unlike torch's, it reads `found_inf` on the device, so a skipped step changes nothing and needs no synchronization.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Collects a group's tensors for AdamW's kernel. Steps Muon's groups at once, and leaves them out."""
        if "momentum" not in group:
            return super()._init_group(group, *lists)
        assert getattr(self, "grad_scale", None) is None, "gradients are unscaled before they are clipped"
        lr, momentum, parameters = group["lr"], group["momentum"], [p for p in group["params"] if p.grad is not None]
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sent_dtype = torch.bfloat16 if group.get("bf16") else torch.float32
        dtype = sent_dtype if multiplies_bf16(group["params"][0].device) else torch.float32
        bad = getattr(self, "found_inf", torch.zeros((), device=group["params"][0].device)).bool()
        buffers: list[Tensor] = []
        sent: list[Any] = []
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            buffers.append(self.state[parameter]["momentum_buffer"])
            grad = torch.where(bad, buffers[-1], parameter.grad)  # lerp to itself keeps the moment
            buffers[-1].lerp_(grad, 1 - momentum)
        updates = [torch.empty_like(parameter, dtype=sent_dtype) for parameter in parameters]
        for numbers in batches(parameters, range(rank, len(parameters), world), dtype):
            matrices = torch.stack([parameters[n].grad.lerp(buffers[n], momentum) for n in numbers])
            for number, update in zip(numbers, orthogonal(matrices, dtype), strict=True):
                updates[number].copy_(update)
        if world > 1:
            sent = [dist.broadcast(update, n % world, async_op=True) for n, update in enumerate(updates)]
        for work in sent:
            work.wait()
        for parameter, update in zip(parameters, updates, strict=True):
            stepped = parameter * (1 - lr * group["weight_decay"])
            stepped.add_(update, alpha=-lr * math.sqrt(max(1, parameter.size(0) / parameter.size(1))))
            parameter.copy_(torch.where(bad, parameter, stepped))
        return False


def batches(matrices: Sequence[Tensor], numbers: Sequence[int], dtype: torch.dtype) -> Iterator[list[int]]:
    """The numbers of matrices to orthogonalize together: of one shape and, in bf16, `TOGETHER` elements at most. Small
    products fill a processor better in a batch. In fp32 each matrix is alone: its bits are the same on any rank."""
    for shape in dict.fromkeys(matrices[number].shape for number in numbers):
        same = [number for number in numbers if matrices[number].shape == shape]
        size = 1 if dtype == torch.float32 else max(1, TOGETHER // shape.numel())
        yield from (same[first : first + size] for first in range(0, len(same), size))


def orthogonal(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """About U·Vᵀ of each matrix U·S·Vᵀ, by the Newton-Schulz iteration in this dtype: [N, A, B] -> [N, A, B].

    Each step multiplies X by a polynomial of X·Xᵀ. For an oblong X in fp32, the polynomials' product is computed first
    and multiplies X once: half of the arithmetic. bf16 is too coarse for that, as singular values are squared first.
    """
    a, b, c = COEFFICIENTS
    x = (matrices.mT if matrices.size(1) > matrices.size(2) else matrices).to(dtype)
    x = x / torch.stack([one.norm() for one in x])[:, None, None].clamp(min=1e-7)
    if dtype == torch.float32 and x.size(2) > 1.5 * x.size(1):  # nearer to a square, it takes more arithmetic
        x = torch.stack([_product_of_polynomials(one @ one.T) @ one for one in x])
    else:
        for _ in range(STEPS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if matrices.size(1) > matrices.size(2) else x


def _product_of_polynomials(gram: Tensor) -> Tensor:
    """Product of the iteration's polynomials of G = X·Xᵀ. A step by P = a + b·G + c·G² turns G into P·G·P."""
    a, b, c = COEFFICIENTS
    polynomial = product = gram
    for step in range(STEPS):
        gram = polynomial @ gram @ polynomial if step else gram
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        product = polynomial @ product if step else polynomial
    return product
