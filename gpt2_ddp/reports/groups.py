"""Groups of runs that differ only in their seed: means, standard deviations, and differences to the
first group."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from gpt2_ddp.errors import truncate
from gpt2_ddp.output import text_table
from gpt2_ddp.records.rows import finite
from gpt2_ddp.reports.runs import SCORED, Row, RunRecord, share_tokens

OWN = ("seed", "run_name", "output_dir")
"""Fields in which the runs of a group may differ."""
PLACES = ("checkpoint.mirror", "data.prepare")
"""Fields that only describe where files are. The path of the data is one, too, if all runs have the
same data."""
CELLS = 1_000_000
"""Cells of the sum in place of an integral."""
VALUE = 60
LINE = 130
"""Most characters of a field's value in a heading, and of a line in a terminal."""
NAMED = 3
PREFIX = 4
"""Most runs of a group whose names are shown, and least characters that stand for longer names."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs whose configurations differ in OWN only. `fields`: those in which the groups differ, if
    a run has them."""

    heading: str
    fields: Row
    runs: list[RunRecord]

    @property
    def names(self) -> str:
        """The names of its runs: what they begin with, or the first ones and the number of the
        others."""
        names = [run.name for run in self.runs]
        alike = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
        shared = "".join(first for first, *_ in alike)
        if len(names) > 1 and len(shared) >= PREFIX:
            return f"{shared}* ({len(names)} runs)"
        return ", ".join(
            names if len(names) <= NAMED else [*names[:NAMED], f"{len(names) - NAMED} more"]
        )

    def label(self, most: int) -> str:
        """Its runs, and then as many of its fields as at most `most` characters have room for."""
        room = " …"
        label = truncate(self.names, most - len(room))
        for text in _texts(self.fields):
            longer = f"{label}{',' if ': ' in label else ':'} {text}"
            if len(longer) + len(room) > most:
                return label + room
            label = longer
        return label

    @property
    def completed(self) -> list[RunRecord]:
        """The completed runs."""
        return [run for run in self.runs if run.status.get("state") == "completed"]

    @property
    def scored(self) -> list[RunRecord]:
        """The runs that the means include: completed ones with a finite last val_loss."""
        return [run for run in self.completed if run.scores["val_loss"] is not None]

    def values(self, score: str) -> dict[str, float]:
        """One of SCORED by seed. Runs with equal seeds count as one, with their mean."""
        found: dict[str, list[float]] = {}
        for run in self.scored:
            if (value := run.scores[score]) is not None:
                found.setdefault(str(run.config.get("seed", run.name)), []).append(value)
        return {seed: fmean(values) for seed, values in found.items()}


class Difference(NamedTuple):
    """Mean difference of a group's last evaluations to those of the first group with the same
    seeds. None: undefined, for the reason in `text`."""

    text: str
    difference: float | None = None
    standard_error: float | None = None
    n: int | None = None  # seeds
    # with the true difference in 95 % of tables, for all of its rows
    interval: tuple[float, float] | None = None
    differs: bool | None = None  # whether the interval is without 0


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of their first runs. A run without a readable configuration is a group of
    its own. Headings list the fields in which the groups differ."""
    members: dict[str, list[RunRecord]] = {}
    ignored = _ignored(runs)
    for run in runs:
        key = repr(sorted((name, run.config[name]) for name in run.config.keys() - ignored))
        members.setdefault(key if run.config else run.name, []).append(run)
    names = differing([first for first, *_ in members.values()])
    groups = []
    for first, *others in members.values():
        fields = {name: first.config[name] for name in names if name in first.config}
        groups.append(Group(", ".join(_texts(fields)) or first.name, fields, [first, *others]))
    return groups


def _texts(fields: Row) -> list[str]:
    """Each field with its value."""
    return [
        f"{name}={'null' if value is None else truncate(value, VALUE)}"
        for name, value in fields.items()
    ]


def _ignored(runs: Sequence[RunRecord]) -> set[str]:
    """The fields that make no difference between these runs: OWN, and those that describe where
    files are."""
    data = {str(run.start.get("data_manifest", run.name)) for run in runs}
    return {*OWN, *PLACES, *(["data.path"] if len(data) == 1 else [])}


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The fields in which readable configurations differ, without those that make no difference."""
    known = [run.config for run in runs if run.config]
    ignored = _ignored(runs)
    names = dict.fromkeys(name for config in known for name in config if name not in ignored)
    return [name for name in names if len({repr(config.get(name, ...)) for config in known}) > 1]


def compare(one: dict[str, float], two: dict[str, float], comparisons: int = 1) -> Difference:
    """The difference of scores by seed, of the first group and another, over the seeds that both
    have, with Student's interval of paired differences. Of several `comparisons` in a table, each
    has a wider one (Bonferroni)."""
    pairs = [two[seed] - one[seed] for seed in one if seed in two]
    if not pairs:
        return Difference("not compared: no seed with this score in both groups")
    n = len(pairs)
    difference = fmean(pairs)
    if n == 1:
        return Difference(f"{difference:+.3g} (one seed: no spread)", difference, n=n)
    error = stdev(pairs) / math.sqrt(n)
    width = critical_value(1 - 0.05 / comparisons, n - 1) * error
    low = difference - width
    high = difference + width
    differs = not low <= 0 <= high
    verb = "differs" if differs else "no difference shown"
    count = f"{n} seeds" + f", {comparisons} comparisons" * (comparisons > 1)
    text = f"{difference:+.3g}, 95 % interval {low:+.3g} to {high:+.3g} ({count}): {verb}"
    return Difference(text, difference, error, n, (low, high), differs)


def critical_value(level: float, freedom: int) -> float:
    """The t with this probability between -t and t, of Student's distribution with so many degrees
    of freedom.

    With t = sqrt(freedom) tan(angle), the angle's density is in proportion to cos(angle) **
    (freedom - 1)."""
    ends = np.linspace(0, math.pi / 2, CELLS + 1)
    density = np.cos((ends[1:] + ends[:-1]) / 2) ** (freedom - 1)
    within = np.cumsum(density) / density.sum()
    return math.sqrt(freedom) * math.tan(np.interp(level, within, ends[1:]))


def content(groups: Sequence[Group]) -> list[Row]:
    """The groups for JSON: None for what is undefined. Their score is the last val_loss, or bits
    per byte where the tokenizers differ."""
    score = SCORED[not share_tokens(run for group in groups for run in group.runs)]
    found: list[Row] = []
    for group in groups:
        values = group.values(score)
        alike = [] if _unlike(group.scored) else [*values.values()]
        each = None
        if found:
            reason = _unlike([*groups[0].scored, *group.scored])
            each = (
                Difference(reason)
                if reason
                else compare(groups[0].values(score), values, len(groups) - 1)
            )
        found.append({
            "heading": group.heading,
            "fields": finite(group.fields),
            "runs": [
                finite({"name": run.name, "seed": run.config.get("seed"), "state": run.state, score: run.scores[score]})
                for run in group.runs
            ],
            "completed": len(group.completed),
            "n": len(values),
            "score": score,
            "mean": fmean(alike) if alike else None,
            "sd": stdev(alike) if len(alike) > 1 else None,
            "difference": each and each._asdict(),
            "remarks": _remarks(group),
        })  # fmt: skip
    return found


def describe(groups: Sequence[Group]) -> list[str]:
    """A table as lines of text. Below the numbered rows are headings, differences to the first
    group, and remarks."""
    found = content(groups)
    rows = [["group", "completed", "n", *{f"last {group['score']}" for group in found}]]
    below = []
    for number, (group, runs) in enumerate(zip(found, groups, strict=True), 1):
        mean = group["mean"]
        deviation = group["sd"]
        figure = (
            "–"
            if mean is None
            else f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.2g}")
        )
        rows.append(
            [str(number), f"{group['completed']} of {len(group['runs'])}", str(group["n"]), figure]
        )
        difference = [group["difference"]["text"]] if group["difference"] else []
        texts = [runs.label(LINE - 2), *difference, *group["remarks"]]
        below.append([f"  {truncate(text, LINE - 2)}" for text in texts])
    first, *lines = text_table(rows).split("\n")
    return [
        first,
        *(text for line, texts in zip(lines, below, strict=True) for text in (line, *texts)),
    ]


def _remarks(group: Group) -> list[str]:
    """What limits the means, and the runs that they leave out."""
    reason = _unlike(group.scored)
    found = [reason] if reason else []
    for run in group.runs:
        if run not in group.scored:
            why = "no finite val_loss" if run in group.completed else run.state
            found.append(f"{run.name}: {why}, not in the means")
    return found


def _unlike(runs: Sequence[RunRecord]) -> str:
    """Why the scores of these runs do not compare; empty if they do."""
    counts = sorted({str(run.last("val_loss").get(f"val_{run.unit}", "unknown")) for run in runs})
    return (
        f"not compared: evaluations of {' and '.join(counts)} {runs[0].unit}"
        if len(counts) > 1
        else ""
    )
