"""A run beside what was expected of it: by counts of its text, or by a ladder of runs on it.

The start row has the expectation (`evaluation/ladder.py`). So a report needs neither the ladder nor
the data.
"""

from typing import NamedTuple

import numpy as np

from gpt2_ddp.evaluation.ladder import Expectation, describe_interval, expectation_of
from gpt2_ddp.evaluation.scaling import Interval
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.runs import RunRecord, is_finite

WINDOW = 0.03
"""Share of an evaluation by which it may differ, as it scores whole windows."""
POINTS = 33
"""Points of a band."""


class Band(NamedTuple):
    """An interval along a run: steps [n], and its ends [n], float64."""

    steps: np.ndarray
    low: np.ndarray
    high: np.ndarray


def total_steps(run: RunRecord) -> int | None:
    """Steps of the whole run, as its events say; None if they do not."""
    steps = [event.get("steps") for event in run.events]
    return next((number for number in reversed(steps) if type(number) is int and number > 0), None)


def expected_text(run: RunRecord) -> str:
    """What the first start has foretold: `expected about 1.3`, or an interval; empty if it has
    foretold nothing."""
    interval = _at_end(run)
    if interval:
        return f"expected {describe_interval(interval)}"
    forecast = _first_start(run).get("forecast")
    match forecast:
        case {"bits_per_byte": float(bits)} if is_finite(bits):
            return f"expected about {bits:.1f}"
        case _:
            return ""


def standing(run: RunRecord) -> tuple[str, str] | None:
    """How the newest evaluation compares with the interval at this point of the run: a word, and
    what it means. None without an interval."""
    row = run.last("val_bits_per_byte")
    bits = row.get("val_bits_per_byte")
    interval = _during(run, np.array([float(row.get("step", 0))]))[0]
    if interval is None or not is_finite(bits):
        return None
    by = f"{bits:.3f} at step {row['step']:,}, by the ladder {describe_interval(interval)}"
    tokens = row.get("val_tokens")
    expectation = _expectation(run)
    if expectation and _are_others(tokens, expectation.val_tokens):
        by += f"; of {tokens} validation tokens, the ladder's of {expectation.val_tokens}"
    if bits > interval.high:
        return "above", f"its forecast: worth a look ({by})"
    if bits < interval.low:
        return "below", f"its forecast, so better ({by})"
    return "within", f"its forecast ({by})"


def _are_others(tokens: object, of_ladder: int) -> bool:
    """Whether an evaluation is of other tokens than the ladder's: their numbers differ by more than
    the rest of a window."""
    return not is_finite(tokens) or abs(tokens / of_ladder - 1) > WINDOW


def band(run: RunRecord) -> Band | None:
    """The interval of the validation loss along the run, in nats per token; None without one."""
    row = run.last("val_bits_per_byte")
    loss = row.get("val_loss")
    bits = row.get("val_bits_per_byte")
    total = total_steps(run)
    if not total or not is_finite(loss) or not is_finite(bits) or bits <= 0:
        return None
    steps = np.linspace(total / POINTS, total, POINTS)
    known = [
        (step, interval)
        for step, interval in zip(steps, _during(run, steps), strict=True)
        if interval
    ]
    if not known:
        return None
    nats = loss / bits
    return Band(
        np.array([step for step, _ in known]),
        nats * np.array([interval.low for _, interval in known]),
        nats * np.array([interval.high for _, interval in known]),
    )


def _during(run: RunRecord, steps: np.ndarray) -> list[Interval | None]:
    """The interval at each of some steps [n]; of the end for those after it."""
    expectation = _expectation(run)
    total = total_steps(run)
    if expectation is None or not total or not run.tokens_per_step:
        return [None] * len(steps)
    tokens = total * run.tokens_per_step
    return [expectation.during(tokens, float(step) / total) for step in steps]


def _at_end(run: RunRecord) -> Interval | None:
    return _during(run, np.array([float(total_steps(run) or 0)]))[0]


def _expectation(run: RunRecord) -> Expectation | None:
    return expectation_of(_first_start(run))


def _first_start(run: RunRecord) -> Row:
    """The first start with a forecast, or an empty row."""
    starts = (event for event in run.events if event["event"] == "start")
    return next((event for event in starts if "forecast" in event), {})
