"""The figure of a report: the curves of one or several runs, overlaid, in a panel for each metric.

Completed runs that differ only in their seed are one curve: their mean, in a band of ± one standard deviation.

Nothing is smoothed. Long runs are thinned, but every minimum, maximum and non-finite stretch stays visible.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, Formatter, LogFormatter, StrMethodFormatter

from gpt2_ddp.checkpoint.run_files import FIELDS
from gpt2_ddp.errors import truncate
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import RunRecord, share_tokens

STYLE = matplotlib.rc_params_from_file(str(Path(__file__).with_suffix(".mplstyle")), use_default_template=False)
INK = STYLE["text.color"]
"""Colour of text, axes and grid; in the SVG, that of the text around it."""
POINTS = 600  # of a curve that are drawn; a page stays below 1 MB
MARKED = 40  # most points of a curve with a marker
NOT_FINITE = "not a finite number"
EVENTS = {"rollback": ("rollback to this step", "<"), "start": ("resumed", "|")}
"""Marks below the loss, by event."""
PANELS = {name: field.panel for name, field in FIELDS.items() if field.panel}
"""Titles of the panels beside the loss, by metric."""


Along = Callable[[RunRecord, np.ndarray], np.ndarray]
"""Positions of a run's steps [n] on the x axis [n]."""


class Curve(NamedTuple):
    """A run, or the mean of several completed runs of a group."""

    name: str  # in the legend
    color: str
    runs: Sequence[RunRecord]
    style: Literal["-", ":"] = "-"

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The steps that all runs have, the mean of a metric, and its standard deviation (n − 1; 0 for one run) [n]."""
        found = [run.series(metric) for run in self.runs]
        steps = reduce(np.intersect1d, (steps for steps, _ in found))
        values = np.stack([values[np.isin(at, steps)] for at, values in found])
        with np.errstate(invalid="ignore"):  # infinite values
            return steps, values.mean(0), values.std(0, ddof=len(found) > 1)


def draw(runs: Sequence[RunRecord]) -> Figure:
    """The figure of runs, along steps, or tokens if they differ in tokens per step and all are known."""
    curves = [*_curves(runs)]
    rates = {round(run.tokens_per_step) for run in runs}
    by_tokens = len(rates) > 1 and 0 not in rates
    along = RunRecord.tokens_at if by_tokens else lambda run, steps: steps
    unit = " or ".join(dict.fromkeys(run.unit for run in runs))
    metrics = [metric for metric in PANELS if any(len(run.series(metric)[0]) for run in runs)]
    with matplotlib.rc_context(STYLE):
        rows = len(metrics) // 2 + 1
        figure = Figure(figsize=(11, 3.4 * rows), layout="constrained")
        loss, *others = (figure.add_subplot(rows, 2, number) for number in range(1, len(metrics) + 2))
        _draw_loss(loss, curves, along, unit)
        for panel, metric in zip(others, metrics, strict=True):
            panel.set_title(PANELS[metric].format(unit=unit))
            _plot(panel, curves, metric, along, alpha=0.8)
            if metric == "grad_norm":
                _make_logarithmic(panel)
            else:
                panel.set_ylim(bottom=0)
                panel.yaxis.set_major_formatter(_plain(panel.dataLim.y1))
        for panel in figure.axes:
            panel.set_xlabel(unit if by_tokens else "step")
            panel.xaxis.set_major_formatter(_plain(panel.get_xlim()[1]))
        if len(curves) > 1:
            handles = [
                Line2D([], [], linewidth=3, linestyle=curve.style, color=curve.color, label=truncate(curve.name, 64))
                for curve in curves
            ]
            figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure


def _curves(runs: Sequence[RunRecord]) -> Iterator[Curve]:
    """One per run; if any group has several completed runs, one for those of each group and one per other run."""
    groups = group_runs(runs)
    if all(len(group.completed) < 2 for group in groups):
        yield from (Curve(run.name, f"C{number}", [run]) for number, run in enumerate(runs))
        return
    for number, group in enumerate(groups):
        if group.completed:
            yield Curve(group.heading, f"C{number}", group.completed)
        for run in group.runs:
            if run not in group.completed:
                yield Curve(f"{run.name} ({run.state})", f"C{number}", [run], ":")


def _draw_loss(panel: Axes, curves: Sequence[Curve], along: Along, unit: str) -> None:
    runs = [run for curve in curves for run in curve.runs]
    ink = INK if len(curves) > 1 else "C0"
    look = {"linewidth": 1.6, "marker": "o", "markersize": 4, "markeredgecolor": INK}
    if share_tokens(runs):
        panel.set_title("Loss (nats per token, log scale)" if unit == "tokens" else "Loss (log scale)")
        panel.plot([], [], color=ink, alpha=0.6, label="train")
        _plot(panel, curves, "loss_mean", along, alpha=0.6)
        _plot(panel, curves, "val_loss", along, **look)
    else:
        panel.set_title("Validation loss (bits per byte, log scale; the tokenizers differ)")
        _plot(panel, curves, "val_bits_per_byte", along, **look)
    panel.plot([], [], color=ink, label="validation", **look)
    for curve in curves:
        for run in curve.runs:
            later = [row for row in run.events if row["step"] > run.rows[0]["step"]]
            for event, (label, marker) in EVENTS.items():
                steps = np.array([row["step"] for row in later if row["event"] == event])
                _mark(panel, along(run, steps), label, color=curve.color, marker=marker)
            steps, _ = run.series("not_finite")  # losses that a row's mean leaves out
            _mark(panel, along(run, steps), NOT_FINITE, color=curve.color, marker="x")
    _make_logarithmic(panel)
    handles, labels = panel.get_legend_handles_labels()
    panel.legend(handles=dict(zip(labels, handles, strict=True)).values())


def _plot(panel: Axes, curves: Sequence[Curve], metric: str, along: Along, **look: Any) -> None:
    """Draws a metric of each curve, with crosses for values that are not finite."""
    look = {"marker": "."} | look
    for curve in curves:
        steps, values, deviation = curve.series(metric)
        kept = thin(values, POINTS // 3)
        steps, values, deviation = steps[kept], values[kept], deviation[kept]
        x = np.mean([along(run, steps) for run in curve.runs], axis=0)
        finite = np.isfinite(values)
        every = len(steps) // MARKED + 1
        shown = np.where(finite, values, np.nan)
        panel.plot(x, shown, color=curve.color, linestyle=curve.style, markevery=every, **look)
        if len(curve.runs) > 1:
            low = values - np.where(deviation < values, deviation, 0)  # positive, for a logarithmic axis
            high = values + deviation
            panel.fill_between(x, low, high, where=finite, color=curve.color, alpha=0.2, linewidth=0)
        _mark(panel, x[~finite], NOT_FINITE, color=curve.color, marker="x")


def _mark(panel: Axes, x: np.ndarray, label: str, **look: Any) -> None:
    """Marks at the foot of a panel."""
    if len(x):
        foot = np.full(len(x), 0.03)
        panel.plot(x, foot, transform=panel.get_xaxis_transform(), linestyle="", label=label, **look)


def _plain(largest: float) -> Formatter:
    """Writes 0.0005 and 12.5k."""
    return EngFormatter(sep="") if largest >= 10_000 else StrMethodFormatter("{x:.4g}")


def _make_logarithmic(panel: Axes) -> None:
    """A logarithmic y axis with plainly written numbers, if all values are positive."""
    if panel.dataLim.y0 > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.6)))


def thin(values: np.ndarray, parts: int) -> np.ndarray:
    """Positions [k] of at most three values of each of `parts` stretches of a series [n]: its minimum, its maximum, one
    that is not finite; and of both ends. All of a short series."""
    numbers = np.arange(len(values))
    if len(values) <= 3 * parts:
        return numbers
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for part in np.array_split(numbers, parts):
        kept |= {part[low[part].argmin()], part[high[part].argmax()], part[finite[part].argmin()]}
    return np.array(sorted(kept))


def as_svg(figure: Figure) -> str:
    """A figure as an `<svg>` element, transparent, in the colour of the text around it."""
    file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    element = file.getvalue()
    return element[element.index("<svg") :].replace(INK, "currentColor")


def as_png(figure: Figure) -> bytes:
    """A figure on white."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", facecolor="white", dpi=110)
    return file.getvalue()
