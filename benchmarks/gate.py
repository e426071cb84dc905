"""Whether a run computes what another does: `python -m benchmarks.gate near PLAIN OTHER`, or `equal
STRAIGHT RESUMED`.

near: 60 losses within 0.3 %, norms of gradients within 1 %. equal: all losses and weights bitwise.
"""

import json
import sys
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.format import list_checkpoints
from gpt2_ddp.records.rows import is_event

LIMITS = {"loss": 0.003, "grad_norm": 0.01}


def rows_of(run: Path) -> dict[int, dict[str, Any]]:
    """The rows of steps."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if not is_event(row) and "loss" in row}


def near(one: Path, other: Path) -> dict[str, Any]:
    """How far losses and norms are apart at most, relative to the first run's."""
    ours = rows_of(one)
    theirs = rows_of(other)
    steps = [step for step in ours if step in theirs]
    far = {
        name: [abs(theirs[step][name] / ours[step][name] - 1) for step in steps] for name in LIMITS
    }
    found = {
        name: {"most": max(apart), "mean": sum(apart) / len(apart)}
        for name, apart in far.items()
        if apart
    }
    passed = bool(steps) and all(found[name]["most"] <= limit for name, limit in LIMITS.items())
    return {"passed": passed, "steps": len(steps), **found}


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
    compared = {"near": near, "equal": equal}[sys.argv[1]](*map(Path, sys.argv[2:4]))
    print(json.dumps({"gate": sys.argv[1:4], **compared}))
