"""Progress of a long preparation: a bar in a terminal, elsewhere a line a minute."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")

EVERY = 60.0
"""Seconds between lines, if stderr is no terminal."""
DELAY = 2.0
"""Seconds before a bar appears."""


def progress(
    items: Iterable[T],
    action: str,
    unit: str,
    total: float,
    size: Callable[[T], float] = lambda _: 1,
) -> Iterator[T]:
    """The items, while stderr shows how much is done, and the time left.

    Args:
        action: what is done, such as `encoding`.
        unit: of sizes, such as `bytes`.
        total: size of all items, about; infinite if unknown.
        size: size of an item.
    """
    known = total if 0 < total < math.inf else None
    start = before = time.monotonic()
    done = 0.0
    with tqdm(
        desc=action, total=known, unit=f" {unit}", unit_scale=True, disable=None, delay=DELAY
    ) as bar:
        for item in items:
            yield item
            amount = size(item)
            done += amount
            bar.update(amount)
            now = time.monotonic()
            if bar.disable and now - before >= EVERY:
                before = now
                print(
                    progress_line(action, unit, done, known, now - start),
                    file=sys.stderr,
                    flush=True,
                )


def progress_line(action: str, unit: str, done: float, total: float | None, seconds: float) -> str:
    """One line, such as `encoding: 40,000,000 of 100,000,000 bytes (40 %), 0:03:00 left`."""
    if total is None or done <= 0:
        return f"{action}: {done:,.0f} {unit}, for {_time(seconds)}"
    share = min(done / total, 1)
    left = _time(seconds * (1 - share) / share)
    return f"{action}: {done:,.0f} of {total:,.0f} {unit} ({share:.0%}), {left} left"


def _time(seconds: float) -> timedelta:
    return timedelta(seconds=round(seconds))
