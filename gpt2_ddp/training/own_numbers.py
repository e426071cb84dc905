"""Checks of the numbers that a task adds to rows: by `evaluate` or by `row_fields`."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from accelerate.utils import gather_object

from gpt2_ddp.checkpoint.run_files import finite, is_own
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import Scores


def check_scores(scores: Scores, taken: Container[str]) -> Scores:
    """The scores that `evaluate` returned, checked as by `check_numbers`."""
    loss = scores.get("val_loss")
    return check_numbers("evaluate", scores, taken, loss if isinstance(loss, float) else 0.0)


def check_numbers(method: str, numbers: Mapping[str, Any], taken: Container[str], loss: float) -> Scores:
    """The numbers that a method returned on the main process, checked. Collective. Raises: UserError, on every rank,
    for the first rank and the first number that is wrong or differs. `taken`: names of other fields. `loss`: of the
    step or evaluation; if it is not finite, the numbers need not be."""
    error = next(_problems(method, numbers, taken, not math.isfinite(loss)), None)
    found, errors = zip(*gather_object([({} if error else numbers, error)]), strict=True)
    error = next(filter(None, (*errors, *_differences(method, [*map(finite, found)]))), None)
    if error:
        error.on_every_rank = True
        raise error
    return found[0]


def _problems(method: str, numbers: Mapping[str, Any], taken: Container[str], is_bad: bool) -> Iterator[UserError]:
    for name, value in numbers.items():
        field = f'{method}()["{name}"]'
        if type(value) not in (int, float):
            yield UserError(field, value, f"should be a Python number, not {type(value).__name__}; use float(...)")
        elif name in taken or not (is_own(name) or (method == "evaluate" and name.startswith("val_"))):
            yield UserError(field, value, "rows have another field of this name; choose another name")
        elif is_own(name) and not (is_bad or math.isfinite(value)):
            yield UserError(field, value, "should be finite; leave it out where it is not")


def _differences(method: str, found: Sequence[Scores]) -> Iterator[UserError]:
    """Numbers that differ between ranks by more than the rounding of different processors."""
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        first, *others = (numbers.get(name) for numbers in found)
        for rank, other in enumerate(others, 1):
            is_close = isinstance(first, float) and isinstance(other, float) and math.isclose(first, other)
            if first != other and not is_close:
                hint = f"rank {rank} has {other}; return the same on every rank"
                yield UserError(f'{method}()["{name}"]', first, hint)
