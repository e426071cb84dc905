"""Whether a run computes what another does: `python -m benchmarks.gate near PLAIN OTHER`, or `equal
STRAIGHT RESUMED`.

near: 60 losses within 0.3 %; norms of gradients within 1 %, or on average no farther apart than
twice two runs that differ by rounding alone, `near PLAIN OTHER PLAIN CONTROL`. equal: all losses
and weights bitwise.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.records.rows import is_event

LIMITS = {"loss": 0.003, "grad_norm": 0.01}
"""Largest distance of any step."""
ROUNDINGS = 2.0
"""How much farther norms may be apart on average than by rounding."""


def rows_of(run: Path) -> dict[int, dict[str, Any]]:
    """The rows of steps."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if not is_event(row) and "loss" in row}


class Apart(NamedTuple):
    """How far a number of two runs is apart, as a share of it."""

    most: float
    mean: float


def distances(one: Path, other: Path) -> tuple[int, dict[str, Apart]]:
    """The number of common steps, and how far their losses and norms are apart, relative to the
    first run's."""
    ours = rows_of(one)
    theirs = rows_of(other)
    steps = [step for step in ours if step in theirs]
    found: dict[str, Apart] = {}
    for name in LIMITS if steps else ():
        apart = [abs(theirs[step][name] / ours[step][name] - 1) for step in steps]
        found[name] = Apart(max(apart), sum(apart) / len(apart))
    return len(steps), found


def near(one: Path, other: Path, *alike: Path) -> dict[str, Any]:
    """Whether losses and norms are near. `alike`: two runs that differ by rounding alone; after
    some steps their norms are apart, too."""
    steps, found = distances(one, other)
    rounded = distances(*alike)[1] if alike else {}
    passed = steps > 0
    for name, apart in found.items():
        is_near = apart.most <= LIMITS[name]
        if name == "grad_norm" and name in rounded:
            is_near = is_near or apart.mean <= ROUNDINGS * rounded[name].mean
        passed = passed and is_near
    figures = {name: apart._asdict() for name, apart in found.items()}
    by_rounding = {f"{name}_by_rounding": apart._asdict() for name, apart in rounded.items()}
    return {"passed": passed, "steps": steps, **figures, **by_rounding}


def equal(one: Path, other: Path) -> dict[str, Any]:
    """Whether the losses of all steps that both logged, and the newest weights, have equal bits."""
    ours = rows_of(one)
    theirs = rows_of(other)
    weights = [list_checkpoints(run / "checkpoints") for run in (one, other)]
    newest = [(found[-1] / "model.safetensors").read_bytes() for found in weights]
    losses = {
        step: (row["loss"], theirs[step]["loss"]) for step, row in ours.items() if step in theirs
    }
    differ = [step for step, (first, second) in losses.items() if first != second]
    passed = bool(losses) and not differ and newest[0] == newest[1]
    return {
        "passed": passed,
        "steps": len(losses),
        "differ": differ,
        "weights": newest[0] == newest[1],
    }


if __name__ == "__main__":
    compared = {"near": near, "equal": equal}[sys.argv[1]](*map(Path, sys.argv[2:]))
    print(json.dumps({"gate": sys.argv[1:], **compared}))
