"""Checks of the numbers that a task adds to rows: by `evaluate` or by `row_fields`."""

import math
from collections.abc import Container
from typing import Any

from gpt2_ddp.checkpoint.run_files import finite, is_own
from gpt2_ddp.distributed.ranks import check_ranks_agree, from_main, on_every_rank
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import Scores


def check_scores(scores: Scores, taken: Container[str]) -> Scores:
    """The scores that `evaluate` returned, checked as by `check_numbers`."""
    loss = scores.get("val_loss")
    return check_numbers("evaluate", scores, taken, loss if isinstance(loss, float) else 0.0)


def check_numbers(method: str, numbers: dict[str, Any], taken: Container[str], loss: float) -> Scores:
    """The numbers that a method returned on the main process, checked. Collective. Raises: UserError, on every rank,
    for the first number that is wrong, or for all that differ between ranks. `taken`: names of other fields. `loss`: of
    the step or evaluation; if it is not finite, the numbers need not be."""
    fields = {name: f'{method}()["{name}"]' for name in numbers}

    def check() -> None:
        for name, value in numbers.items():
            if type(value) not in (int, float):
                hint = f"should be a Python number, not {type(value).__name__}; use float(...)"
                raise UserError(fields[name], value, hint)
            if name in taken or not (is_own(name) or (method == "evaluate" and name.startswith("val_"))):
                raise UserError(fields[name], value, "rows have another field of this name; choose another name")
            if is_own(name) and math.isfinite(loss) and not math.isfinite(value):
                raise UserError(fields[name], value, "should be finite; leave it out where it is not")

    on_every_rank(check)
    found = finite(numbers)
    check_ranks_agree({fields[name]: value for name, value in found.items()}, _is_close)
    return from_main(found)


def _is_close(one: Any, other: Any) -> bool:
    """Whether two ranks' numbers are equal, up to the rounding of different processors."""
    return one == other or (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other))
