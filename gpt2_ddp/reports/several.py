"""What a page says of several runs: the first lines, a table of groups with error bars, and a table
of runs."""

from collections.abc import Iterator, Sequence
from html import escape

from gpt2_ddp.errors import truncate
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.chart import Scale, color_of
from gpt2_ddp.reports.curves import truncated
from gpt2_ddp.reports.groups import Group, content
from gpt2_ddp.reports.headline import Fact, training_seconds
from gpt2_ddp.reports.picture import COLORS
from gpt2_ddp.reports.runs import RunRecord, is_finite
from gpt2_ddp.reports.tables import Table
from gpt2_ddp.reports.values import UNKNOWN, duration_text, number_text, plain_text

NAMES = {"val_loss": "validation loss", "val_bits_per_byte": "bits per byte"}
"""Scores by their fields."""
HEADING = 100
"""Most characters of a group's settings in the first lines."""
CELL = 60
"""Most characters of a setting in a table."""


def overview(groups: Sequence[Group]) -> Iterator[Fact]:
    """What a person wants to know first."""
    runs = [run for group in groups for run in group.runs]
    states: dict[str, int] = {}
    for run in runs:
        states[run.state] = states.get(run.state, 0) + 1
    yield Fact(f"{len(runs)}", f"runs: {', '.join(f'{n} {state}' for state, n in states.items())}")
    if len(groups) < len(runs):
        yield Fact(f"{len(groups)}", "groups that differ in more than their seed")
    scored = [(row, group) for row, group in zip(content(groups), groups, strict=True)]
    scored = [(row, group) for row, group in scored if row["mean"] is not None]
    if scored:
        row, group = min(scored, key=lambda pair: pair[0]["mean"])
        seeds = f", {row['n']} seeds" if row["n"] > 1 else ""
        label = f"lowest last {NAMES[row['score']]} ({truncate(group.heading, HEADING)}{seeds})"
        yield Fact(score_text(row), label)


def score_text(row: Row) -> str:
    """Mean and standard deviation of a group's content."""
    if row["mean"] is None:
        return UNKNOWN
    deviation = f" ± {row['sd']:.2g}" if row["sd"] is not None else ""
    return f"{row['mean']:.4f}{deviation}"


def groups_of(groups: Sequence[Group]) -> str:
    """The table of groups: fields in which they differ, means, and differences to the first one;
    each mean is drawn with its standard deviation and the runs' values."""
    contents = content(groups)
    fields = [*dict.fromkeys(name for group in groups for name in group.fields)]
    score = NAMES[contents[0]["score"]]
    header = [*fields, f"last {score}", "seeds", "difference", "95 % interval"]
    header += ["result", "completed", "runs"]
    rows: list[list[str]] = []
    for row, group in zip(contents, groups, strict=True):
        shown = {name: _setting(value) for name, value in group.fields.items()}
        settings = [shown.get(name, UNKNOWN) for name in fields]
        completed = f"{row['completed']} of {len(row['runs'])}"
        cells = [*settings, score_text(row), str(row["n"]), *_difference(row["difference"])]
        rows.append([*cells, completed, group.names])
    lines = [Table(header, rows).html(_error_bars(groups, contents), len(fields) + 1)]
    comparisons = len(groups) - 1
    if comparisons:
        text = "Differences are to the first group, over the seeds that both have."
        if comparisons > 1:
            text += f" The intervals hold for all {comparisons} comparisons together."
        lines.append(f"<p>{text}</p>")
    remarks = [remark for row in contents for remark in row["remarks"]]
    return "\n".join([*lines, *(f"<p>{escape(remark)}</p>" for remark in remarks)])


def _difference(difference: Row | None) -> tuple[str, str, str]:
    """Cells of a difference: the mean, its interval, and what follows from it."""
    if difference is None:
        return UNKNOWN, UNKNOWN, UNKNOWN
    if difference["difference"] is None:
        return UNKNOWN, UNKNOWN, difference["text"]
    mean = f"{difference['difference']:+.3g}"
    if difference["interval"] is None:
        return mean, UNKNOWN, "one seed: no spread"
    low, high = difference["interval"]
    verb = "differs" if difference["differs"] else "no difference shown"
    return mean, f"{low:+.3g} to {high:+.3g}", f"{verb} ({difference['n']} seeds)"


def _setting(value: object) -> str:
    text = "null" if value is None else plain_text(value)
    return text if len(text) <= CELL else f"{text[:CELL]} …"


def _error_bars(groups: Sequence[Group], contents: Sequence[Row]) -> list[str]:
    """A drawing for each group, all on one scale, after their header; none without values."""
    values = [
        [*group.values(row["score"]).values()] for group, row in zip(groups, contents, strict=True)
    ]
    ends = [value for of_group in values for value in of_group]
    for row in contents:
        if row["sd"] is not None:
            ends += [row["mean"] - row["sd"], row["mean"] + row["sd"]]
    if not ends:
        return []
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    scale = Scale(min(ends) - room, max(ends) + room)
    drawings = [
        _error_bar(row, of_group, scale, color_of(number, COLORS))
        for number, (row, of_group) in enumerate(zip(contents, values, strict=True))
    ]
    return [f"± deviation ({scale.low:.4g} to {scale.high:.4g})", *drawings]


def _error_bar(row: Row, values: Sequence[float], scale: Scale, style: str) -> str:
    """Dots for the seeds, a line for the mean, and a bar of a standard deviation on both sides."""

    def x(value: float) -> str:
        return f"{100 * (value - scale.low) / (scale.high - scale.low):.2f}%"

    parts = [f'<circle cx="{x(value)}" cy="50%" r="3"/>' for value in values]
    mean, deviation = row["mean"], row["sd"]
    if deviation is not None:
        ends = f'x1="{x(mean - deviation)}" x2="{x(mean + deviation)}"'
        parts.insert(0, f'<line class="bar" {ends} y1="50%" y2="50%"/>')
    if mean is not None:
        parts.append(f'<line class="mean" x1="{x(mean)}" x2="{x(mean)}" y1="15%" y2="85%"/>')
    label = f'class="errors" role="img" aria-label="{score_text(row)}"'
    return f'<svg {label} style="{style}">{"".join(parts)}</svg>'


def runs_of(runs: Sequence[RunRecord], settings: Sequence[str]) -> str:
    """The table of runs: settings that differ, and the values that matter most."""
    columns = {run: _values(run, settings) for run in runs}
    header = dict.fromkeys(name for values in columns.values() for name in values)
    rows = [
        [truncated(run.name), *(values.get(name, UNKNOWN) for name in header)]
        for run, values in columns.items()
    ]
    return Table(["run", *header], rows).html()


def _values(run: RunRecord, settings: Sequence[str]) -> dict[str, str]:
    values = {name: _setting(run.config[name]) for name in settings if name in run.config}
    if "seed" in run.config:
        values["seed"] = _setting(run.config["seed"])
    values |= {"state": run.state, "step": f"{run.rows[-1]['step']:,}"}
    loss = run.last("val_loss").get("val_loss")
    best = run.best()
    if is_finite(loss):
        values["last validation loss"] = f"{loss:.4f}"
    if best:
        values |= {"best": f"{best['val_loss']:.4f}", "at step": f"{best['step']:,}"}
    bits = best.get("val_bits_per_byte")
    if is_finite(bits):
        values["bits per byte"] = f"{bits:.3f}"
    train = run.last("loss_mean").get("loss_mean")
    if is_finite(train):
        values["training loss"] = number_text(train)
    seconds = training_seconds(run)
    if seconds:
        values["training time"] = duration_text(seconds)
    speed = run.last("tokens_per_second").get(f"{run.unit}_per_second")
    if is_finite(speed):
        values[f"{run.unit}/s"] = number_text(speed)
    memory = run.last("memory").get("memory")
    if is_finite(memory):
        values["memory"] = f"{memory / 1e9:.3g} GB"
    return values
