"""Groups of runs that differ only in their seed: means, standard deviations, and differences to the
first group.

    read_runs (runs.py)  ->  group_runs  ->  content   for report.py's JSON
                                         '-> describe  for the terminal and the page
"""

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
from gpt2_ddp.reports.runs import Row, RunRecord, share_tokens

OWN = ("seed", "run_name", "output_dir")
"""Fields in which the runs of a group may differ."""
PLACES = ("checkpoint.mirror", "data.prepare")
"""Fields that only describe where files are. The path of the data is one, too, if all runs have the
same data."""
CELLS = 1_000_000
"""Cells of the sum in place of an integral."""
VALUE = 60
"""Most characters of a field's value in a heading."""
LINE = 130
"""Most characters of a line in a terminal."""
NAMED = 3
"""Most runs of a group whose names are shown."""
PREFIX = 4
"""Least characters that stand for longer names."""


@dataclass(frozen=True, eq=False)
class Group:
    """Runs whose configurations differ in OWN only. `fields`: those in which the groups differ, if
    a run has them."""

    heading: str
    fields: Row
    runs: list[RunRecord]

    @property
    def names(self) -> str:
        """The names of its runs: what they begin with, or the first ones and the number
        of the others."""
        names = [run.name for run in self.runs]
        alike = takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))
        prefix = "".join(letters[0] for letters in alike)
        if len(names) > 1 and len(prefix) >= PREFIX:
            return f"{prefix}* ({len(names)} runs)"
        shown = names[:NAMED]
        if len(names) > NAMED:
            shown.append(f"{len(names) - NAMED} more")
        return ", ".join(shown)

    def label(self, most: int) -> str:
        """Its runs, and then as many of its fields as at most `most` characters have room for."""
        room = " …"
        label = truncate(self.names, most - len(room))
        separator = ":"
        for text in _texts(self.fields):
            longer = f"{label}{separator} {text}"
            separator = ","
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
        by_seed: dict[str, list[float]] = {}
        for run in self.scored:
            value = run.scores[score]
            if value is not None:
                seed = str(run.config.get("seed", run.name))
                by_seed.setdefault(seed, []).append(value)
        return {seed: fmean(values) for seed, values in by_seed.items()}


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
    ignored = {*OWN, *PLACES}
    if len(data) == 1:
        ignored.add("data.path")
    return ignored


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The fields in which readable configurations differ, without those that make no difference."""
    configs = [run.config for run in runs if run.config]
    ignored = _ignored(runs)
    names = dict.fromkeys(name for config in configs for name in config if name not in ignored)
    return [name for name in names if len({repr(config.get(name, ...)) for config in configs}) > 1]


def compare(first: dict[str, float], second: dict[str, float], comparisons: int = 1) -> Difference:
    """The difference of scores by seed, of the first group and another, over the seeds that both
    have, with Student's interval of paired differences. Of several `comparisons` in a table, each
    has a wider one (Bonferroni)."""
    differences = [second[seed] - first[seed] for seed in first if seed in second]
    if not differences:
        return Difference("not compared: no seed with this score in both groups")
    n = len(differences)
    difference = fmean(differences)
    if n == 1:
        return Difference(f"{difference:+.3g} (one seed: no spread)", difference, n=n)
    error = stdev(differences) / math.sqrt(n)
    width = critical_value(1 - 0.05 / comparisons, n - 1) * error
    low = difference - width
    high = difference + width
    differs = not low <= 0 <= high
    verb = "differs" if differs else "no difference shown"
    count = f"{n} seeds"
    if comparisons > 1:
        count += f", {comparisons} comparisons"
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
    all_runs = [run for group in groups for run in group.runs]
    score = "val_loss" if share_tokens(all_runs) else "val_bits_per_byte"
    described: list[Row] = []
    for group in groups:
        values = group.values(score)
        alike = [] if _unlike(group.scored) else [*values.values()]
        difference = None
        if group is not groups[0]:
            difference = _difference(groups[0], group, score, len(groups) - 1)
        runs: list[Row] = []
        for run in group.runs:
            row = {"name": run.name, "seed": run.config.get("seed"), "state": run.state}
            runs.append(finite({**row, score: run.scores[score]}))
        described.append(
            {
                "heading": group.heading,
                "fields": finite(group.fields),
                "runs": runs,
                "completed": len(group.completed),
                "n": len(values),
                "score": score,
                "mean": fmean(alike) if alike else None,
                "sd": stdev(alike) if len(alike) > 1 else None,
                "difference": difference and difference._asdict(),
                "remarks": _remarks(group),
            }
        )
    return described


def _difference(first: Group, group: Group, score: str, comparisons: int) -> Difference:
    """The difference of a group's scores to the first group's."""
    reason = _unlike([*first.scored, *group.scored])
    if reason:
        return Difference(reason)
    return compare(first.values(score), group.values(score), comparisons)


def describe(groups: Sequence[Group]) -> list[str]:
    """A table as lines of text. Below the numbered rows are headings, differences to the first
    group, and remarks."""
    contents = content(groups)
    scores = {f"last {values['score']}" for values in contents}  # one, or none without groups
    rows = [["group", "completed", "n", *scores]]
    for number, values in enumerate(contents, 1):
        mean = values["mean"]
        deviation = values["sd"]
        figure = "–" if mean is None else f"{mean:.4f}"
        if deviation is not None:
            figure += f" ± {deviation:.2g}"
        completed = f"{values['completed']} of {len(values['runs'])}"
        rows.append([str(number), completed, str(values["n"]), figure])
    heading, *lines = text_table(rows).split("\n")
    text = [heading]
    for line, group, values in zip(lines, groups, contents, strict=True):
        below = [group.label(LINE - 2)]
        if values["difference"]:
            below.append(values["difference"]["text"])
        below += values["remarks"]
        text += [line, *(f"  {truncate(part, LINE - 2)}" for part in below)]
    return text


def _remarks(group: Group) -> list[str]:
    """What limits the means, and the runs that they leave out."""
    reason = _unlike(group.scored)
    remarks = [reason] if reason else []
    for run in group.runs:
        if run not in group.scored:
            why = "no finite val_loss" if run in group.completed else run.state
            remarks.append(f"{run.name}: {why}, not in the means")
    return remarks


def _unlike(runs: Sequence[RunRecord]) -> str:
    """Why the scores of these runs do not compare; empty if they do."""
    counts = sorted({str(run.last("val_loss").get(f"val_{run.unit}", "unknown")) for run in runs})
    if len(counts) < 2:
        return ""
    return f"not compared: evaluations of {' and '.join(counts)} {runs[0].unit}"
