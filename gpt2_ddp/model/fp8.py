"""The head's matrix products in fp8 (`train.fp8_head`), with the loss and its gradients in one pass
over chunks of tokens.

    dtype    bits of the fraction    largest number    holds
    e4m3     3                       448               hidden states, the head's weight
    e5m2     2                       57,344            gradients of the logits

A tensor has one scale, by which it is divided before it is rounded to fp8, and by which the product
is multiplied. Scales are powers of two, so scaling rounds nothing. Gradients of the logits have a
known bound, and thus a fixed scale.

N tokens, C features, V padded vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from gpt2_ddp.errors import UserError
from gpt2_ddp.model.loss import HeadInputs, OnePassFunction, loss_of_logits

CAPABILITY = (8, 9)
"""Least compute capability of GPUs that multiply fp8 numbers: Ada, Hopper, Blackwell."""
CHUNK = 2_048
"""Tokens of a chunk without a compiler, which keeps several fp32 tensors of GPT-2's logits, 0.4 GB
each."""
COMPILED_CHUNK = 16_384
"""Tokens of a chunk in compiled code: 1.7 GB of GPT-2's logits in bf16. Each chunk adds to the
weight's gradient, which takes longer with more chunks."""
EMULATED_ON: tuple[str, ...] = ()
"""Types of devices on which products of fp8 numbers are computed in fp32, for tests and trials."""
LEAST = 2.0**-100
"""Least largest number that a scale is made for: that of a tensor of zeros would be 0."""


def missing_fp8(device: torch.device) -> str:
    """What a device lacks for products in fp8; empty if nothing."""
    if device.type in EMULATED_ON:
        return ""
    needed = f"a GPU of compute capability {CAPABILITY[0]}.{CAPABILITY[1]} or more"
    if device.type != "cuda":
        return f"{needed}, not {device.type}"
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:  # AMD's GPUs have other fp8 numbers
        return f"{needed} by NVIDIA, not {name}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"{needed}; {name} has {capability[0]}.{capability[1]}"
    return ""


def check_fp8(device: torch.device, precision: str) -> None:
    """Raises: UserError if `train.fp8_head` is not possible on a device, or in a precision."""
    missing = missing_fp8(device)
    if missing:
        raise UserError("train.fp8_head", "true", f"needs {missing}; remove it")
    if precision != "bf16":
        hint = f"needs train.mixed_precision bf16, which is {precision}"
        raise UserError("train.fp8_head", "true", hint)


class Fp8(NamedTuple):
    """A tensor in fp8: `values` times `scale`."""

    values: Tensor
    scale: Tensor  # fp32 scalar


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest power of two by which numbers up to `largest`, a scalar, are divided to fit an
    fp8 dtype: fp32 scalar."""
    least = largest.float().clamp(min=LEAST) / torch.finfo(dtype).max
    # rounds up to a power of two by the bits of a positive fp32 number: 8 of the exponent, then 23
    bits = least.view(torch.int32) + 0x007F_FFFF
    return (bits & 0x7F80_0000).view(torch.float32)


def fixed_scale(largest: float, dtype: torch.dtype) -> float:
    """`scale_of` a number that is known beforehand."""
    return 2.0 ** math.ceil(math.log2(largest / torch.finfo(dtype).max))


def to_fp8(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Fp8:
    """A tensor in fp8, with the scale of its largest number."""
    scale = scale_of(x.abs().amax(), dtype)
    return Fp8((x.float() / scale).to(dtype), scale)


def by_columns(x: Fp8) -> Fp8:
    """The same matrix, whose columns are contiguous: the kernel needs that of its second matrix."""
    return Fp8(x.values.mT.contiguous().mT, x.scale)


def product(left: Fp8, right: Fp8, dtype: torch.dtype, is_fast: bool = False) -> Tensor:
    """The product of two matrices in fp8, in `dtype`: [M, K] in rows, [K, L] in columns -> [M, L].
    M, K and L are multiples of 16. `is_fast`: accumulates with fewer bits, which suffices for
    short sums."""
    kind = left.values.device.type
    if kind in EMULATED_ON:
        with torch.autocast(kind, enabled=False):  # which would round the product to bf16
            exact = left.values.float() @ right.values.float()
        return (exact * (left.scale * right.scale)).to(dtype)
    # the public function is not in all torch releases that this code supports
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        left.values,
        right.values,
        scale_a=left.scale,
        scale_b=right.scale,
        out_dtype=dtype,
        use_fast_accum=is_fast,
    )


def fp8_loss(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, soft_cap: float | None
) -> Tensor:
    """The summed cross-entropy of a head that multiplies in fp8, fp32 scalar. Arguments as of
    `loss.one_pass_loss`. The forward pass computes the gradients, too; no [N, V] tensor is kept."""
    x = x / soft_cap if soft_cap else x
    # the weight's gradient is fp32, so the weight is not cast to bf16 before
    loss = _LossInFp8.apply(x.bfloat16(), weight, targets, vocab_size, soft_cap)
    assert isinstance(loss, Tensor)
    return loss


class _LossInFp8(OnePassFunction):
    @staticmethod
    def forward(ctx: FunctionCtx, *inputs: *HeadInputs) -> Tensor:
        x, weight, targets, vocab_size, soft_cap = inputs
        rows = to_fp8(x)
        head = to_fp8(weight)
        head_columns = by_columns(head)  # [V, C]
        transposed_head = Fp8(head.values.mT, head.scale)  # [C, V], in columns
        # a gradient of a loss by a logit is within ±1, with a soft cap within ± the cap
        fixed = fixed_scale(soft_cap or 1.0, torch.float8_e5m2)
        scale = torch.full((), fixed, device=x.device)
        chunk = COMPILED_CHUNK if torch.compiler.is_compiling() else CHUNK
        losses: list[Tensor] = []
        of_rows: list[Tensor] = []
        of_weight: Tensor | None = None
        for start in range(0, len(x), chunk):
            part = Fp8(rows.values[start : start + chunk], rows.scale)
            logits = product(part, transposed_head, torch.bfloat16, is_fast=True)  # [chunk, V]
            goals = targets[start : start + chunk]
            loss, gradient = loss_of_logits(logits, goals, vocab_size, soft_cap)
            losses.append(loss)
            of_logits = Fp8((gradient / fixed).to(torch.float8_e5m2), scale)
            of_rows.append(product(of_logits, head_columns, x.dtype))
            transposed = Fp8(of_logits.values.mT.contiguous(), scale)  # [V, chunk]
            of_chunk = product(transposed, by_columns(part), torch.float32)
            of_weight = of_chunk if of_weight is None else of_weight + of_chunk
        assert of_weight is not None, "there are tokens"
        ctx.save_for_backward(torch.cat(of_rows), of_weight)
        return torch.stack(losses).sum()
