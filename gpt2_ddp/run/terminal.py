"""Lines of the terminal: a row of metrics.jsonl, and a stage that lasts."""

import math
import sys
import time
from typing import Any

from tqdm import tqdm

SHOWN = {
    "loss_mean": "loss_mean {:.4f}",
    "val_loss": "val_loss {:.4f}",
    "val_bits_per_byte": "bits/byte {:.4f}",
    "val_accuracy": "val_accuracy {:.2%}",
    "lr": "lr {:.3g}",
    "grad_norm": "norm {:.3g}",
    "mfu": "mfu {:.1%}",
}


def describe(row: dict[str, Any]) -> str:
    """What a row says of losses, step and speed; what it lacks is left out."""
    tasks = {name: f"{name} {{:.1%}}" for name in row if name.endswith("_acc")}
    parts = [layout.format(row[name]) for name, layout in (SHOWN | tasks).items() if row.get(name) is not None]
    unit, rate = _speed(row)
    return "  ".join([*parts, f"{rate:,.0f} {unit}/s"] if unit else parts)


def time_left(row: dict[str, Any], steps: int) -> float | None:
    """Seconds to step `steps` at the row's speed, by the units that a step of the run has had on average; evaluations
    and checkpoints, which are not in that speed, not included. None where the row has no speed."""
    unit, rate = _speed(row)
    return (steps - row["step"]) * row[unit] / row["step"] / rate if rate else None


def duration(seconds: float) -> str:
    """In words, like `1 h 05 min`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s"))
    first = next((index for index, (count, _) in enumerate(units) if count), 3)
    (count, unit), *rest = units[first : first + 2]
    return " ".join([f"{count} {unit}", *(f"{count:02} {unit}" for count, unit in rest)])


def _speed(row: dict[str, Any]) -> tuple[str, float]:
    """What the row's speed counts, and how many of them a second; nothing, where it has none."""
    name = next((name for name in row if name.endswith("_per_second")), "")
    return name.removesuffix("_per_second"), row.get(name) or 0.0


class LongStage:
    """Prints a line when a stage of a run takes 5 s and three times longer than ever before: a compilation, a first
    evaluation. Each further line comes after twice the time."""

    def __init__(self) -> None:
        self._stage, self._begun, self._due = ("", 0), time.monotonic(), math.inf
        self._longest: dict[str, float] = {}

    def report(self, facts: dict[str, Any]) -> None:
        """Looks at the stage and step of `Watch.facts`; called every few seconds, from one thread."""
        stage, now = (facts["stage"], facts["step"]), time.monotonic()
        seconds = now - self._begun
        if stage != self._stage:
            self._longest[self._stage[0]] = max(seconds, self._longest.get(self._stage[0], 0.0))
            self._stage, self._begun = stage, now
            self._due = max(5.0, 3 * self._longest.get(stage[0], 0.0))
        elif seconds >= self._due:
            self._due *= 2
            tqdm.write(f"{stage[0]} at step {stage[1]}: {duration(seconds)} so far", file=sys.stderr)
