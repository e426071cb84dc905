"""Checks of the numbers that a task of somebody else adds to rows: by `evaluate` or by `row_fields`."""

import math
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn

from gpt2_ddp.checkpoint.run_files import finite, is_own
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.state import Scores
from gpt2_ddp.training.task import Poll

Evaluate = Callable[[nn.Module, Poll], Scores]


def checked(evaluate: Evaluate, taken: Container[str]) -> Evaluate:
    """The evaluation by a model in evaluation mode, without gradients, followed by `check_numbers`."""

    def evaluate_and_check(model: nn.Module, poll: Poll) -> Scores:
        model.eval()
        try:
            with torch.no_grad():
                scores = evaluate(model, poll)
        finally:
            model.train()
        loss = scores.get("val_loss") if isinstance(scores, dict) else 0.0
        return check_numbers("evaluate", scores, taken, loss if isinstance(loss, float) else 0.0)

    return evaluate_and_check


def check_numbers(method: str, numbers: Any, taken: Container[str], loss: float) -> Scores:
    """The numbers that a method returned, checked. Collective. Raises: UserError, on every rank, for the first rank and
    the first number that is wrong or differs. `taken`: names of other fields. `loss`: of the step or evaluation; if it
    is not finite, the numbers need not be."""
    error = next(_problems(method, numbers, taken, not math.isfinite(loss)), None)
    found, errors = zip(*gather_object([({} if error else finite(numbers), error)]), strict=True)
    error = next((error for error in errors if error), None) or _difference(method, found)
    if error:
        error.on_every_rank = True
        raise error
    return numbers


def _problems(method: str, numbers: Any, taken: Container[str], is_bad: bool) -> Iterator[UserError]:
    if not isinstance(numbers, dict):
        yield UserError(f"{method}()", numbers, "should return a dict of numbers by name")
        return
    for name, value in numbers.items():
        field = f'{method}()["{name}"]'
        is_free = is_own(name) or (method == "evaluate" and name.startswith("val_"))
        if name in taken or not is_free:
            yield UserError(field, value, "rows have another field of this name; choose another name")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            yield UserError(field, value, f"should be a Python number, not {type(value).__name__}; use float(...)")
        elif is_own(name) and not (is_bad or math.isfinite(value)):
            yield UserError(field, value, "should be finite; leave it out where it is not")


def _difference(method: str, found: tuple[dict[str, Any], ...]) -> UserError | None:
    for name in dict.fromkeys(name for numbers in found for name in numbers):
        first, *others = (numbers.get(name, "absent") for numbers in found)
        differing = [f"rank {rank} has {truncate(other)}" for rank, other in enumerate(others, 1) if other != first]
        if differing:
            hint = f"{', '.join(differing)}; return the same on every rank"
            return UserError(f'{method}()["{name}"]', first, hint)
    return None
