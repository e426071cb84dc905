"""Weights in half precision that are cast once a step, and not in each forward pass.

Autocast casts the weights of matrix products in every forward pass, so in each micro-batch of a
step, though they change once a step. `StepCasts.in_use` casts all of them together. Inside, the
layers take these copies. Values, gradients and their roundings are those of autocast.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

CASTS_ONCE_ON: tuple[str, ...] = ()
"""Types of devices on which the weights are cast once a step."""


class _Cast(torch.autograd.Function):
    """A cast that was computed before."""

    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, half: Tensor) -> Tensor:
        return half.view_as(half)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradient: Tensor) -> tuple[Tensor, None]:
        return gradient[0].float(), None


def dtype_of_casts(kind: str, precision: str) -> torch.dtype | None:
    """The dtype of the copies on a type of devices, in a precision of autocast; None: no copies."""
    if kind not in CASTS_ONCE_ON or precision == "no":
        return None
    return torch.bfloat16 if precision == "bf16" else torch.float16


def in_half(weight: Tensor, half: Tensor | None) -> Tensor:
    """The weight's copy in half precision, with its gradient; the weight itself if there is no
    copy."""
    if half is None:
        return weight
    copy = _Cast.apply(weight, half)
    assert isinstance(copy, Tensor)
    return copy


class Linear(nn.Linear):
    """A linear layer whose weights may have copies in half precision."""

    half_weight: Tensor | None = None
    half_bias: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        if self.half_weight is None:
            return F.linear(input, self.weight, self.bias)
        bias = None if self.half_bias is None else in_half(self.bias, self.half_bias)
        return F.linear(input, in_half(self.weight, self.half_weight), bias)


class HasHead(Protocol):
    """A model whose head's weight may have a copy in half precision."""

    half_head: Tensor | None

    @property
    def head_weight(self) -> Tensor:
        """The head's weight, fp32."""
        ...


class Slot(NamedTuple):
    """The place of a copy: an attribute of a module, and the weight that is copied."""

    module: nn.Module
    attribute: str
    weight: Tensor


def slots_of(model: nn.Module) -> Iterator[Slot]:
    """The places of the copies of a model's weights: of its layers, and of its head."""
    for layer in model.modules():
        if isinstance(layer, Linear):
            yield Slot(layer, "half_weight", layer.weight)
            if layer.bias is not None:  # torch's class does not declare that it may be None
                yield Slot(layer, "half_bias", layer.bias)
    if hasattr(model, "half_head") and not getattr(model, "fp8_head", False):
        yield Slot(model, "half_head", cast("HasHead", model).head_weight)


class StepCasts:
    """The copies of a model's weights that autocast would cast.

    Args:
        dtype: of autocast; None: there are no copies, and autocast casts.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None):
        self._slots = [*slots_of(model)] if dtype else []
        self._weights = [slot.weight for slot in self._slots]
        self._copies = [torch.empty_like(weight, dtype=dtype) for weight in self._weights]
        # a compiled evaluation before the first step would be compiled again after it, as modules
        # would then have attributes of their own, and not their class's
        self._set([None] * len(self._slots))

    def _set(self, copies: Sequence[Tensor | None]) -> None:
        for slot, copy in zip(self._slots, copies, strict=True):
            setattr(slot.module, slot.attribute, copy)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Context of the micro-batches of a step, in which the layers take copies of the present
        weights."""
        if not self._slots:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(self._copies, self._weights)  # pyright: ignore  its stub
        self._set(self._copies)
        try:
            yield
        finally:
            self._set([None] * len(self._slots))
