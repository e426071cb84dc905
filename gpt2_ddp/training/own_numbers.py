"""Checks of the numbers that a task adds to rows: by `evaluate` or by `row_fields`."""

import math
from collections.abc import Container, Iterator, Sequence
from typing import Any

from accelerate.utils import gather_object

from gpt2_ddp.checkpoint.run_files import finite, is_own
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.state import Scores


def check_scores(scores: Any, taken: Container[str]) -> Scores:
    """The scores that `evaluate` returned, checked as by `check_numbers`."""
    loss = scores.get("val_loss") if isinstance(scores, dict) else None
    return check_numbers("evaluate", scores, taken, loss if isinstance(loss, float) else 0.0)


def check_numbers(method: str, numbers: Any, taken: Container[str], loss: float) -> Scores:
    """The numbers that a method returned on the main process, checked. Collective. Raises: UserError, on every rank,
    for the first rank and the first number that is wrong or differs. `taken`: names of other fields. `loss`: of the
    step or evaluation; if it is not finite, the numbers need not be."""
    error = next(_problems(method, numbers, taken, not math.isfinite(loss)), None)
    found, errors = zip(*gather_object([({} if error else numbers, error)]), strict=True)
    error = next((error for error in errors if error), None) or _difference(method, found)
    if error:
        error.on_every_rank = True
        raise error
    return found[0]


def _problems(method: str, numbers: Any, taken: Container[str], is_bad: bool) -> Iterator[UserError]:
    if not isinstance(numbers, dict):
        yield UserError(f"{method}()", numbers, "should return a dict of numbers by name")
        return
    for name, value in numbers.items():
        field = f'{method}()["{name}"]'
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            yield UserError(field, type(value).__name__, "the name should be a text of printable characters")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield UserError(field, value, f"should be a Python number, not {type(value).__name__}; use float(...)")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield UserError(field, f"{value.bit_length()} bits", "an integer should have at most 64 bits")
        elif name in taken or not (is_own(name) or (method == "evaluate" and name.startswith("val_"))):
            yield UserError(field, value, "rows have another field of this name; choose another name")
        elif is_own(name) and not (is_bad or math.isfinite(value)):
            yield UserError(field, value, "should be finite; leave it out where it is not")


def _difference(method: str, found: Sequence[dict[str, Any]]) -> UserError | None:
    found = [finite(numbers) for numbers in found]
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        first, *others = (numbers.get(name, "absent") for numbers in found)
        differing = [f"rank {rank} has {truncate(one)}" for rank, one in enumerate(others, 1) if _differ(first, one)]
        if differing:
            hint = f"{', '.join(differing)}; return the same on every rank"
            return UserError(f'{method}()["{name}"]', first, hint)
    return None


def _differ(one: Any, other: Any) -> bool:
    """Whether two numbers differ by more than the rounding of different processors."""
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=1e-9)
    return one != other
