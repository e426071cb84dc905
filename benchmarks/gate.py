"""Whether a run computes what another does: `python -m benchmarks.gate near PLAIN OTHER`, `equal
ONE OTHER`, or `resumed STRAIGHT RESUMED`.

near: losses within 0.3 %; norms of gradients within 1 %, or on average no farther apart than twice
two runs that differ by rounding alone, `near PLAIN OTHER PLAIN CONTROL`. equal: all numbers of
rows but for measurements, and the weights, bitwise. resumed: the same, and the second run began
twice. In all of them, both runs have to have the same steps. Without arguments, stdin has a
comparison a line.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.records.rows import field_of, is_event

LIMITS = {"loss": 0.003, "grad_norm": 0.01}
"""Largest distance of any step."""
ROUNDINGS = 2.0
"""How much farther norms may be apart on average than by rounding."""


def lines_of(run: Path) -> list[dict[str, Any]]:
    """All rows."""
    return [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]


def rows_of(run: Path) -> dict[int, dict[str, Any]]:
    """The rows of steps."""
    return {row["step"]: row for row in lines_of(run) if not is_event(row) and "loss" in row}


class Apart(NamedTuple):
    """How far a number of two runs is apart, as a share of it."""

    most: float
    mean: float


def distances(one: Path, other: Path) -> dict[str, Apart]:
    """How far losses and norms of the common steps are apart, relative to the first run's; infinite
    where one is not finite."""
    ours = rows_of(one)
    theirs = rows_of(other)
    steps = [step for step in ours if step in theirs]
    found: dict[str, Apart] = {}
    for name in LIMITS if steps else ():
        pairs = [(ours[step][name], theirs[step][name]) for step in steps]
        apart = [abs(b / a - 1) if a and b is not None else math.inf for a, b in pairs]
        found[name] = Apart(max(apart), sum(apart) / len(apart))
    return found


def near(one: Path, other: Path, *alike: Path) -> dict[str, Any]:
    """Whether losses and norms are near. `alike`: two runs that differ by rounding alone; after
    some steps their norms are apart, too."""
    found = distances(one, other)
    rounded = distances(*alike) if alike else {}
    steps = [[*rows_of(run)] for run in (one, other)]
    passed = steps[0] == steps[1] != []
    for name, apart in found.items():
        is_near = apart.most <= LIMITS[name]
        if name == "grad_norm" and name in rounded:
            is_near = is_near or apart.mean <= ROUNDINGS * rounded[name].mean
        passed = passed and is_near
    figures = {name: apart._asdict() for name, apart in found.items()}
    by_rounding = {f"{name}_by_rounding": apart._asdict() for name, apart in rounded.items()}
    return {"passed": passed, "steps": [*map(len, steps)], **figures, **by_rounding}


def equal(one: Path, other: Path) -> dict[str, Any]:
    """Whether all numbers that rows of both runs have, but for measurements, and the newest weights
    have equal bits."""
    ours = rows_of(one)
    theirs = rows_of(other)
    checkpoints = [list_checkpoints(run / "checkpoints") for run in (one, other)]
    newest = [(found[-1] / "model.safetensors").read_bytes() for found in checkpoints]
    differ = {step: differences(row, theirs.get(step, {})) for step, row in ours.items()}
    differ = {step: names for step, names in differ.items() if names}
    has_steps = [*ours] == [*theirs] != []
    return {
        "passed": has_steps and not differ and newest[0] == newest[1],
        "steps": [len(ours), len(theirs)],
        "differ": differ,
        "weights": newest[0] == newest[1],
    }


def differences(row: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The fields that two rows of a step have, and that would be equal if it were trained again.
    (A run that ends at a step evaluates there; one that goes on does not.)"""
    names = [name for name in row if name in other and field_of(name).kind != "measured"]
    return [name for name in names if row[name] != other[name]]


def resumed(straight: Path, other: Path) -> dict[str, Any]:
    """`equal`, of a run that was resumed and one that was not."""
    starts = sum(row.get("event") == "start" for row in lines_of(other))
    found = equal(straight, other)
    return found | {"passed": found["passed"] and starts > 1, "starts": starts}


def judge(kind: str, *runs: str) -> dict[str, Any]:
    """The verdict of one of the three functions; not passed, with the reason, if a run has no rows
    or no weights."""
    try:
        return {"near": near, "equal": equal, "resumed": resumed}[kind](*map(Path, runs))
    except (OSError, IndexError) as error:
        return {"passed": False, "reason": f"{type(error).__name__}: {error}"}


def main(words: list[str]) -> None:
    """Prints a line of JSON for a comparison; without words, for that of each line of stdin."""
    comparisons = [words] if words else map(str.split, sys.stdin)
    for comparison in comparisons:
        print(json.dumps({"gate": comparison, **judge(*comparison)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
