"""Groups of runs that differ only in their seed: means, standard deviations, and differences to the first group."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from gpt2_ddp.errors import truncate
from gpt2_ddp.output import text_table
from gpt2_ddp.reports.runs import Row, RunRecord, is_finite, share_tokens

OWN = ("seed", "run_name", "output_dir")
"""Fields in which the runs of a group may differ."""
SCORES = {
    "last_val_loss": "last val_loss",
    "best_val_loss": "best val_loss",
    "last_val_bits_per_byte": "last bits/byte",
    "best_val_bits_per_byte": "best bits/byte",
}
"""Scores of a run, and their columns in the table."""
COMPARED = ("last_val_loss", "last_val_bits_per_byte")
VALUE, LINE = 60, 130
"""Most characters of a field's value in a heading, and of a line in a terminal."""


class Difference(NamedTuple):
    """Mean of a group's last evaluations minus that of the first group. None: undefined, for the reason in `text`."""

    text: str
    difference: float | None = None
    standard_error: float | None = None
    paired: bool | None = None
    n: int | None = None  # pairs
    differs: bool | None = None  # by more than twice the standard error


@dataclass(frozen=True, eq=False)
class Group:
    """Runs whose configurations differ in OWN only. `fields`: those in which the groups differ, if a run has them."""

    heading: str
    fields: Row
    runs: list[RunRecord]

    @property
    def completed(self) -> list[RunRecord]:
        """The completed runs."""
        return [run for run in self.runs if run.status.get("state") == "completed"]

    @property
    def scored(self) -> list[RunRecord]:
        """The runs that the means include: completed ones with a finite last val_loss."""
        return [run for run in self.completed if _score(run, "last_val_loss") is not None]

    def values(self, score: str) -> dict[str, float]:
        """One of SCORES by seed. Runs with equal seeds count as one, with their mean."""
        found: dict[str, list[float]] = {}
        for run in self.scored:
            if (value := _score(run, score)) is not None:
                found.setdefault(_seed(run), []).append(value)
        return {seed: float(np.mean(values)) for seed, values in found.items()}

    def mean(self, score: str) -> tuple[float | None, float | None]:
        """Mean and standard deviation (n − 1) over the seeds; None if undefined, or if the evaluations differ."""
        values = [*self.values(score).values()]
        if not values or _unlike(self.scored, score):
            return None, None
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None

    def remarks(self) -> list[str]:
        """What limits the means, and the runs that they leave out."""
        seeds, reason = Counter(map(_seed, self.scored)), _unlike(self.scored, "last_val_loss")
        found = ["one run: no spread"] if len(seeds) == 1 else []
        found += [reason] if reason else []
        found += [f"seed {seed}: {count} runs count as one" for seed, count in seeds.items() if count > 1]
        for run in (run for run in self.runs if run not in self.scored):
            why = "no finite val_loss" if run in self.completed else _state(run)
            found.append(f"{run.name}: {why}, not in the means")
        return found


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Groups in the order of their first runs. A run without a readable configuration is a group of its own. Headings
    list the fields in which the groups differ."""
    members: dict[str, list[RunRecord]] = {}
    for run in runs:
        key = repr(sorted((name, run.config[name]) for name in run.config.keys() - OWN))
        members.setdefault(key if run.config else run.name, []).append(run)
    known = [first.config for first, *_ in members.values() if first.config]
    names = [name for name in dict.fromkeys(name for config in known for name in config) if name not in OWN]
    names = [name for name in names if len({repr(config.get(name, ...)) for config in known}) > 1]
    groups = []
    for group in members.values():
        config = group[0].config
        fields = {name: config[name] for name in names if name in config}
        shown = {name: "null" if value is None else truncate(value, VALUE) for name, value in fields.items()}
        parts = [f"{name}={shown[name]}" if name in shown else f"{name} missing" for name in names if config]
        groups.append(Group(", ".join(parts) or _without_seed(group[0]), fields, group))
    return groups


def compare(first: Group, other: Group, score: str) -> Difference:
    """The difference in one of SCORES: of equal seeds, if both groups have two; if not, of the means (Welch)."""
    one, two = first.values(score), other.values(score)
    if not one or not two:
        return Difference(f"no completed run with this score in {'this' if one else 'the first'} group")
    if reason := _unlike([*first.scored, *other.scored], score):
        return Difference(reason)
    a, b = np.array([*one.values()]), np.array([*two.values()])
    pairs = np.array([two[seed] - one[seed] for seed in one if seed in two])
    n = len(pairs) if len(pairs) > 1 else None
    difference = float(pairs.mean() if n else b.mean() - a.mean())
    if not n and min(len(a), len(b)) == 1:
        which = "one run" if len(b) == 1 else "first group: one run"
        return Difference(f"{difference:+.3g} ({which}: no spread)", difference)
    error = math.sqrt(pairs.var(ddof=1) / n if n else a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    differs = abs(difference) > 2 * error
    how, verb = f"paired, {n} seeds" if n else "unpaired", "differs" if differs else "does not differ"
    text = f"{difference:+.3g}, standard error {error:.2g} ({how}): {verb} by more than twice the standard error"
    return Difference(text, difference, error, n is not None, n, differs)


def content(groups: Sequence[Group]) -> list[Row]:
    """The groups for JSON: None for what is undefined."""
    found: list[Row] = []
    for group in groups:
        means = {score: group.mean(score) for score in SCORES}
        runs = [
            {"name": run.name, "seed": _plain(run.config.get("seed")), "state": _state(run)}
            | {score: _score(run, score) for score in SCORES}
            for run in group.runs
        ]
        found.append({
            "heading": group.heading,
            "fields": {name: _plain(value) for name, value in group.fields.items()},
            "runs": runs,
            "completed": len(group.completed),
            "n": len(group.values("last_val_loss")),
            "mean": {score: mean for score, (mean, _) in means.items()},
            "sd": {score: deviation for score, (_, deviation) in means.items()},
            "differences": {score: compare(groups[0], group, score)._asdict() for score in COMPARED if found},
            "remarks": group.remarks(),
        })  # fmt: skip
    return found


def table(groups: Sequence[Group]) -> list[tuple[dict[str, str], dict[str, str], list[str]]]:
    """For each group: cells by their column, differences to the first group by their column, and remarks."""
    columns = {score: label for score, label in SCORES.items() if any(group.values(score) for group in groups)}
    rows = []
    for found in content(groups):
        row = {"group": found["heading"], "completed": f"{found['completed']} of {len(found['runs'])}"}
        row["n"] = str(found["n"])
        for score, label in columns.items():
            mean, deviation = found["mean"][score], found["sd"][score]
            row[label] = "–" if mean is None else f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.2g}")
        differences = {columns[score]: each["text"] for score, each in found["differences"].items() if score in columns}
        rows.append((row, differences, found["remarks"]))
    return rows


def describe(groups: Sequence[Group]) -> list[str]:
    """The table as lines for a terminal. Below the numbered rows are headings, differences and remarks."""
    if not groups:
        return []
    rows = table(groups)
    cells = [[str(number), *[*row.values()][1:]] for number, (row, _, _) in enumerate(rows, 1)]
    first, *means = text_table([[*rows[0][0]], *cells]).split("\n")
    lines = [first]
    for line, (row, differences, remarks) in zip(means, rows, strict=True):
        below = [row["group"], *(f"{label} {text}" for label, text in differences.items()), *remarks]
        lines += [line, *(f"  {truncate(text, LINE - 2)}" for text in below)]
    return lines


@cache
def _score(run: RunRecord, score: str) -> float | None:
    kind, _, metric = score.partition("_")
    value = (run.best(metric) if kind == "best" else run.last(metric)).get(metric)
    return value if is_finite(value) else None


def _unlike(runs: Sequence[RunRecord], score: str) -> str:
    """Why a score of these runs does not compare; empty if it does."""
    counts = sorted({str(run.last("val_loss").get(f"val_{run.unit}", "unknown")) for run in runs})
    if len(counts) > 1:
        return f"not compared: evaluations of {' and '.join(counts)} {runs[0].unit}"
    return "not compared: the tokenizers differ" if score.endswith("val_loss") and not share_tokens(runs) else ""


def _state(run: RunRecord) -> str:
    return truncate(run.status.get("state", "unknown state"), VALUE)


def _seed(run: RunRecord) -> str:
    return str(run.config["seed"]) if run.config.get("seed") is not None else run.name


def _without_seed(run: RunRecord) -> str:
    """muon-seed3 -> muon"""
    return re.sub(rf"[-_., /]*(seed)?[-_=]*(?<!\d){re.escape(_seed(run))}$", "", run.name) or run.name


def _plain(value: object) -> object:
    """A value for JSON; as text if JSON lacks it."""
    return value if isinstance(value, str | int | None) or is_finite(value) else str(value)
