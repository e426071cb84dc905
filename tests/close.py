"""The one comparison of numbers that differ by rounding, which records how near each test is to its
tolerance; and arithmetic in float64."""

import os
from collections.abc import Mapping
from contextlib import contextmanager

import numpy as np
import torch
from margins import MARGINS
from torch.overrides import TorchFunctionMode


def assert_close(actual, expected, tolerance=1e-9, scale=None, says=""):
    """Numbers, sequences, mappings, arrays or tensors, of equal
    structure, have a `distance` of at most `tolerance`."""
    margin = distance(actual, expected, scale) / tolerance
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    MARGINS[test] = max(MARGINS.get(test, 0.0), margin)
    assert margin <= 1, f"{says} error {margin * tolerance:.3g}, tolerance {tolerance:g}"


def distance(actual, expected, scale=None):
    """The largest difference, divided by the largest magnitude in all of `expected`, or in `scale`.
    NaN if there is one. Used alone for what differs by more than rounding: estimates, and numbers
    that must not be equal."""
    ours, theirs = (np.concatenate(parts) for parts in zip(*_pairs(actual, expected), strict=True))
    whole = theirs if scale is None else np.concatenate([part for _, part in _pairs(scale, scale)])
    errors = np.abs((ours - theirs)[ours != theirs])  # infinities may be equal
    return float(errors.max() / np.abs(whole[np.isfinite(whole)]).max()) if errors.size else 0.0


def _pairs(actual, expected):
    if isinstance(expected, Mapping):
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            yield from _pairs(actual[name], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            yield from _pairs(one, other)
    elif expected is None:
        assert actual is None
    else:
        one, other = (
            v.detach().double().numpy() if isinstance(v, torch.Tensor) else v
            for v in (actual, expected)
        )
        one = np.asarray(one, np.float64)
        other = np.asarray(other, np.float64)
        assert one.shape == other.shape
        yield one.ravel(), other.ravel()


class _InFloat64(TorchFunctionMode):
    def __init__(self, dtypes):
        super().__init__()
        self.dtypes = dtypes
        self.casts = [
            getattr(torch.Tensor, "float" if of == torch.float32 else "bfloat16") for of in dtypes
        ]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        def swap(value):
            return (
                torch.float64 if isinstance(value, torch.dtype) and value in self.dtypes else value
            )

        func = torch.Tensor.double if func in self.casts else func
        # of these, single numbers are in float32: steps, a bad gradient
        if "_fused_" in getattr(func, "__name__", ""):

            def single(value):
                return (
                    value.float() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
                )

            args = [[*map(single, arg)] if isinstance(arg, list) else arg for arg in args]
            kwargs = {name: single(value) for name, value in (kwargs or {}).items()}
        return func(
            *map(swap, args), **{name: swap(value) for name, value in (kwargs or {}).items()}
        )


@contextmanager
def float64(*others):
    """Inside, torch computes in float64, also where a library
    casts to float32 or to `others`. A decorator as well."""
    torch.set_default_dtype(torch.float64)
    try:
        with _InFloat64((torch.float32, *others)):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def in_float64(function, *args):
    """Calls `function(*args)` in float64: for ranks."""
    with float64():
        return function(*args)
