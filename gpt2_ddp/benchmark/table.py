"""What a benchmark found: each case's figures of ours and of its peers, taken in turn, and the ratios of each turn."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from shutil import which
from statistics import median
from typing import Any, TypeVar

import psutil
import torch

from gpt2_ddp.project import INSTALLED, PROJECT

T = TypeVar("T")

OURS = "ours"
HEADER = ("what", "unit", "side", "figure", "ours is better by")


@dataclass(frozen=True)
class Case:
    """One thing that was measured, on every side.

    Args:
        what: names it.
        unit: of the figures.
        figures: of each side, one per turn, those of one turn taken one after the other; ours are `OURS`.
        more_is_better: as with rates; not with seconds or bytes.
        about: other facts, for the JSON.
    """

    what: str
    unit: str
    figures: dict[str, list[float]]
    more_is_better: bool = True
    about: dict[str, Any] = field(default_factory=dict)

    def ratios(self, peer: str) -> list[float]:
        """How many times better ours was than the peer, in each turn; nothing where ours was not measured."""
        pairs = zip(self.figures.get(OURS, []), self.figures[peer], strict=False)
        return [ours / theirs if self.more_is_better else theirs / ours for ours, theirs in pairs if ours and theirs]

    def lines(self) -> list[list[str]]:
        """Rows of the table, below `HEADER`: one per side."""
        rows = []
        for side, figures in self.figures.items():
            ratios = self.ratios(side) if side != OURS else []
            spread = f"{median(ratios):.3f} ({min(ratios):.3f}–{max(ratios):.3f})" if ratios else ""
            rows.append([self.what, self.unit, side, f"{median(figures):,.4g}", spread])
        return rows


@dataclass(frozen=True)
class Table:
    """All cases of a benchmark.

    Args:
        name: the benchmark's, like `step`.
        settings: what it was measured with.
        notes: sentences below the table.
    """

    name: str
    cases: Sequence[Case]
    settings: dict[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def as_markdown(self) -> str:
        """The table, which is readable unrendered too."""
        lines = [list(HEADER), *[line for case in self.cases for line in case.lines()]]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        lines.insert(1, ["-" * width for width in widths])
        rows = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
        return "\n".join([*rows, *([""] if self.notes else []), *[f"- {note}" for note in self.notes]])

    def as_json(self) -> str:
        """Everything, with the machine, the versions and the commit."""
        cases = [
            {**vars(case), "ratios": {side: case.ratios(side) for side in case.figures if side != OURS}}
            for case in self.cases
        ]
        found = {"benchmark": self.name, **environment_info(), "settings": self.settings, "notes": list(self.notes)}
        return json.dumps({**found, "cases": cases}, indent=1) + "\n"


def interleave(sides: dict[str, Callable[[], T]], repeats: int, warm_up: int = 1) -> dict[str, list[T]]:
    """The figures of each side, `repeats` turns in which each has its own, after `warm_up` that do not count."""
    figures: dict[str, list[T]] = {side: [] for side in sides}
    for turn in range(-warm_up, repeats):
        for side, measure in sides.items():
            figure = measure()
            if turn >= 0:
                figures[side].append(figure)
    return figures


def environment_info() -> dict[str, Any]:
    """The machine, the versions, the commit, if git is here and says it, and the command."""
    git = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty"]
    told = not INSTALLED and which("git")  # an installed one lies in some other project
    commit = subprocess.run(git, capture_output=True, text=True).stdout if told else ""
    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "machine": {
            "processor": _processor(),
            "cores": psutil.cpu_count(logical=False),
            "memory": psutil.virtual_memory().total,
            "gpus": cards,
        },
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("torch", "accelerate")}},
        "commit": commit.strip(),
        "command": sys.argv,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
