"""The picture of a report: loss, learning rate, gradient norm and throughput of one or several runs, overlaid.

Completed runs that differ only in their seed are drawn as their mean, in a band of ± one standard deviation.

Nothing is smoothed. Long runs are thinned, but every minimum, maximum and non-finite stretch stays visible.
"""

import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.path import Path as Outline
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import RunRecord, Series, share_tokens, short_names

INK = "#1b1f24"
"""Text, axes and grid; in the SVG, the colour of the text around it."""
COLORS = ("#3f7fe8", "#e8702a", "#1fa37a", "#b25fd6", "#d9a514", "#e0527a", "#27a5c4", "#8a8f98")
"""One per run or group, used again after eight; readable on white and on black."""
NAME_LENGTH = 64  # most characters of a name in the legend
MAX_POINTS = 1800  # points per panel, over all runs; a page stays below 1 MB
STRETCHES = 63  # of a panel's width; coinciding lines alternate in them
FOOT = 0.03  # height in a panel of the marks for events and values that are not finite
BEGINNING = 0.02
"""Fraction of the steps whose losses may lie above the panel, since they would flatten the rest of the curve."""
NOT_FINITE = "not a finite number"
EVENTS = {"rollback": ("rollback to this step", "<"), "start": ("resumed", "|"), "not_finite": (NOT_FINITE, "x")}
"""Marks below the loss, by event; `not_finite`: losses since the last row that are excluded from the mean."""
MORE = {"memory": "Memory of the main process (bytes)", "data_share": "Waiting for data (share of the time)"}
"""Quantities of the last row of panels, in runs that log them."""
LEFT, RIGHT, ABOVE, BELOW = 50, 8, 24, 42
"""Margins of a panel for its title and axes, in points."""
STYLE = matplotlib.rc_params_from_file(str(Path(__file__).with_suffix(".mplstyle")), use_default_template=False)


@dataclass(frozen=True)
class Trace:
    """The line of a curve, by number, in a panel: `steps` and `values` [n], without values that are not finite.
    `label`: name of the quantity, in a panel of several quantities."""

    curve: int
    panel: Axes
    label: str
    line: Line2D
    steps: np.ndarray
    values: np.ndarray

    def places(self) -> np.ndarray:
        """x and y [n, 2] as fractions of the panel; values above it, or not finite, are at its edge."""
        values = np.where(np.isfinite(self.values), self.values, self.panel.get_ylim()[0])
        points = self.panel.transData.transform(np.column_stack([self.line.get_xdata(), values]))
        return np.clip(self.panel.transAxes.inverted().transform(points), (0, FOOT), 1)


@dataclass(frozen=True)
class Curve:
    """A run, or the mean of several completed runs of a group."""

    name: str
    color: str
    runs: Sequence[RunRecord]
    style: Literal["-", ":"] = "-"

    def series(self, metric: str) -> tuple[Series, np.ndarray]:
        """Mean of a metric at the steps that all runs have, and its standard deviation (n − 1) [n]; 0 for one run."""
        found = [run.series(metric) for run in self.runs]
        if len(found) == 1:
            return found[0], np.zeros(len(found[0][0]))
        by_step = [dict(zip(steps.tolist(), values.tolist(), strict=True)) for steps, values in found]
        steps = sorted(set(by_step[0]).intersection(*by_step[1:]))
        values = np.array([[one[step] for step in steps] for one in by_step])
        with np.errstate(invalid="ignore"):  # infinite values
            return (np.array(steps), values.mean(0)), values.std(0, ddof=1)


class Picture:
    """Runs along one of AXES, which all of them have, and what has been drawn of them in `figure`, with STYLE."""

    def __init__(self, runs: Sequence[RunRecord], axis: str):
        self.runs, self.axis, self.groups = runs, axis, group_runs(runs)
        self.curves = list(self._curves())
        self.names = short_names([curve.name for curve in self.curves], NAME_LENGTH)
        self.units = " or ".join(dict.fromkeys(run.unit for run in runs))
        self.traces: list[Trace] = []
        self.legend: list[tuple[str, str]] = []  # colour and name of each of several runs
        self.figure = Figure()
        self._size = 1.0
        ends = np.array([self.x(run, np.array([run.rows[0]["step"], run.rows[-1]["step"]])) for run in runs])
        self.label = "step" if axis == "steps" else self.units
        if axis == "time":
            unit, self._size = ("h", 3600.0) if ends.max() > 7200 else ("min", 60.0) if ends.max() > 120 else ("s", 1.0)
            self.label = f"time in training steps ({unit})"
        begin, end = ends.min() / self._size, ends.max() / self._size
        self.range = (begin if end / 4 < begin < end else 0.0, end or 1.0)

    def _curves(self) -> Iterator[Curve]:
        """One per run; if any group has several completed runs, one for those of each group and one per other run."""
        if all(len(group.completed) < 2 for group in self.groups):
            for number, run in enumerate(self.runs):
                yield Curve(run.name, COLORS[number % len(COLORS)], [run])
            return
        for number, group in enumerate(self.groups):
            color, completed = COLORS[number % len(COLORS)], group.completed
            if completed:
                yield Curve(group.heading, color, completed)
            for run in (run for run in group.runs if run not in completed):
                yield Curve(f"{run.name} ({run.status.get('state', 'unknown state')})", color, [run], ":")

    def x(self, run: RunRecord, steps: np.ndarray) -> np.ndarray:
        """Positions of steps [n] of a run on the axis."""
        places = run.along(self.axis, steps)
        assert places is not None, f"{run.name} has no {self.axis}"
        return places / self._size

    def plot(self, panel: Axes, metric: str, label: str = "", **style: Any) -> list[Line2D]:
        """Draws one line per curve, the longest at the bottom. Returns crosses for values that are not finite."""
        crosses = []
        longest = sorted(enumerate(self.curves), key=lambda item: -item[1].runs[0].rows[-1]["step"])
        for number, curve in longest:
            whole, deviation = curve.series(metric)
            steps, values = thin(whole, max(MAX_POINTS // (3 * len(self.curves)), 10))
            if not len(values):
                continue
            finite, x = np.isfinite(values), np.mean([self.x(run, steps) for run in curve.runs], axis=0)
            look = {"color": curve.color, "linewidth": 1, "marker": "." if len(values) < 40 else None} | style
            look["linestyle"] = curve.style
            if len(values) > 200:
                look |= {"marker": None, "linewidth": 0.7 * look["linewidth"]}
            (line,) = panel.plot(x, np.where(finite, values, np.nan), **look)
            if len(curve.runs) > 1:
                band = deviation[np.isin(whole[0], steps)]
                panel.fill_between(x, values - band, values + band, where=finite, color=curve.color, alpha=0.2, lw=0)
            self.traces.append(Trace(number, panel, label, line, steps, values))
            if not finite.all():
                crosses += self.mark(panel, x[~finite], color=curve.color, marker="x", label=NOT_FINITE)
        return crosses

    def mark(self, panel: Axes, x: np.ndarray, **style: Any) -> list[Line2D]:
        """Marks at the foot of a panel."""
        return panel.plot(x, np.full(len(x), FOOT), transform=panel.get_xaxis_transform(), linewidth=0, **style)

    def take_turns(self) -> None:
        """Cuts lines that would hide each other: coinciding lines alternate along the panel's width. Call it when all
        scales are set."""
        edges = np.arange(STRETCHES) / STRETCHES
        at = np.linspace(0, 1, 2 * STRETCHES + 1)
        kinds: dict[tuple[int, str], list[Trace]] = {}
        for trace in self.traces:
            kinds.setdefault((id(trace.panel), trace.label), []).append(trace)
        for traces in kinds.values():
            heights = [np.interp(at, *trace.places().T, left=np.nan, right=np.nan) for trace in traces]
            parts = np.stack([np.stack([h[:-2:2], h[1::2], h[2::2]]) for h in heights])  # [lines, 3, stretches]
            near = abs(parts[:, None] - parts) < 0.004  # a pixel [lines, lines, 3, stretches]
            absent = np.isnan(parts[:, None]) & np.isnan(parts)
            same = np.asarray((near | absent).all(2) & near.any(2))  # [lines, lines, stretches]
            for number, trace in enumerate(traces):
                turn = np.arange(STRETCHES) % np.maximum(same[number].sum(0), 1) == same[number, :number].sum(0)
                if not turn.all():
                    ends = [(x, x + 1 / STRETCHES) for x in edges[turn]]
                    boxes = [Outline([(a, 0), (b, 0), (b, 1), (a, 1), (a, 0)], closed=True) for a, b in ends]
                    trace.line.set_clip_path(Outline.make_compound_path(*boxes), trace.panel.transAxes)

    def svg(self) -> str:
        """An invisible `<svg>` element with everything, and one for each panel that shows its part, for pages of any
        width. Transparent, in the colour of the text around it."""
        file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        element = re.sub(r'<g id="[^"<>]*">', "<g>", file.getvalue())
        element = re.sub(r' d="[^"<>]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), element)
        content = element[element.index("<svg") :].partition(">")[2].rpartition("</svg>")[0]
        panels = ""
        for left, top, right, bottom in self.panels().values():
            size = f"{right - left + LEFT + RIGHT:g} {bottom - top + ABOVE + BELOW:g}"
            panels += f'<svg viewBox="{left - LEFT:g} {top - ABOVE:g} {size}"><use href="#drawing"/></svg>'
        return f'<svg class="drawing"><g id="drawing">{content.replace(INK, "currentColor")}</g></svg>{panels}'

    def panels(self) -> dict[Axes, list[float]]:
        """Left, top, right and bottom of each panel, in the coordinates of the SVG."""
        size = np.tile(72 * self.figure.get_size_inches(), 2)
        boxes = {panel: panel.get_position() for panel in self.figure.axes}
        return {p: (np.array([b.x0, 1 - b.y1, b.x1, 1 - b.y0]) * size).round(1).tolist() for p, b in boxes.items()}


def draw(runs: Sequence[RunRecord], axis: str) -> Picture:
    """Draws the panels along one of AXES, which all runs have."""
    picture = Picture(runs, axis)
    with matplotlib.rc_context(STYLE):
        handles, columns = _legend(picture)
        above = 0.4 + 0.25 * -(-len(handles) // columns)  # inches
        figure = picture.figure
        rows = 3 if any("memory" in row for run in runs for row in run.rows) else 2
        height = 3.6 * rows
        figure.set_size_inches(10, height + above)
        inches = {"left": 0.075, "right": 0.98, "bottom": 0.6 / (height + above), "top": height / (height + above)}
        grid = figure.subplots(rows, 2, gridspec_kw={**inches, "wspace": 0.2, "hspace": 0.32})
        (loss, rate), (norm, speed) = grid[:2]
        _loss(loss, picture)
        rate.set_title("Learning rate")
        picture.plot(rate, "lr", linewidth=1.6)
        norm.set_title("Gradient norm (before clipping, log scale)")
        if crosses := picture.plot(norm, "grad_norm", alpha=0.75):
            norm.legend(handles=crosses[:1], loc="upper right")
        _log_scale(norm, picture, "grad_norm")
        speed.set_title(f"Throughput ({picture.units} per second)")
        picture.plot(speed, "tokens_per_second", alpha=0.75)
        if len(picture.curves) == 1 and (speeds := _speed(picture.curves[0])):
            speed.legend(handles=[Line2D([], [], color=COLORS[0], label=f"median {speeds[2:]}")], loc="lower right")
        more = [*grid[2:].flat]
        for panel, (metric, title) in zip(more, MORE.items(), strict=False):
            panel.set_title(title)
            picture.plot(panel, metric, alpha=0.75)
        for panel, write in ((rate, "{:.3g}".format), (speed, short), *((panel, short) for panel in more)):
            panel.set_ylim(0, 1.05 * panel.dataLim.y1 if 0 < panel.dataLim.y1 < math.inf else None)
            panel.yaxis.set_major_formatter(lambda value, _, write=write: write(value))
        _x_axes([loss, rate, norm, speed, *more], picture)
        picture.take_turns()
        if handles:
            figure.legend(handles=handles, loc="upper center", ncols=columns, fontsize=10.5)
    return picture


def share_batch(runs: Sequence[RunRecord]) -> bool:
    """Whether a step has equally many tokens in all runs."""
    return len({round(run.tokens_per_step) for run in runs}) == 1


def _legend(picture: Picture) -> tuple[list[Line2D], int]:
    """Legend entries of several runs, and how many fit into a row."""
    handles = []
    for name, curve in zip(picture.names, picture.curves, strict=True):
        run = curve.runs[0]
        batch = "" if share_batch(picture.runs) else f", {short(run.tokens_per_step)} {run.unit} a step"
        label = f"{name}{batch}{_speed(curve)}"
        handles.append(Line2D([], [], color=curve.color, lw=3, linestyle=curve.style, label=label))
        picture.legend.append((curve.color, f"{curve.name}{batch}{_speed(curve)}"))
    if len(handles) == 1:
        picture.legend.clear()
        return [], 1
    return handles, max(1, min(len(handles), 4, 135 // max(len(str(handle.get_label())) + 9 for handle in handles)))


def _speed(curve: Curve) -> str:
    speed, mfu = (
        [found for run in curve.runs if (found := run.median(metric))] for metric in ("tokens_per_second", "mfu")
    )
    return (f", {short(median(speed))}/s" if speed else "") + (f", MFU {median(mfu):.1%}" if mfu else "")


def _loss(panel: Axes, picture: Picture) -> None:
    runs, look = picture.runs, {"linewidth": 1.6, "marker": "o", "markersize": 4.5}
    ink = COLORS[0] if len(picture.curves) == 1 else INK
    key: list[Artist] = [Line2D([], [], color=ink, markeredgecolor=INK, label="validation", **look)]
    if any(len(curve.runs) > 1 for curve in picture.curves):
        key.append(Patch(color=ink, alpha=0.2, lw=0, label="mean of the seeds ± one standard deviation"))
    metrics = ["loss_mean", "val_loss"] if share_tokens(runs) else ["val_bits_per_byte"]
    if "loss_mean" in metrics:
        panel.set_title("Loss (nats per token, log scale)" if picture.units == "tokens" else "Loss (log scale)")
        means = any("loss_mean" in row and row["loss_mean"] != row.get("loss") for run in runs for row in run.rows)
        label = "train, mean between rows" if means else "train, as logged"
        key.insert(0, Line2D([], [], color=ink, alpha=0.6, linewidth=1, label=label))
        key += picture.plot(panel, "loss_mean", "train", alpha=0.6)
    else:
        panel.set_title("Validation loss (bits per byte, log scale)")
        remarks = ["training losses not drawn: they are per", "token, and the runs' tokenizers differ"]
        named = zip(picture.curves, picture.names, strict=True)
        remarks += [f"not evaluated: {name}" for curve, name in named if not len(curve.series(metrics[0])[0][1])]
        key += [Line2D([], [], linewidth=0, label=remark) for remark in remarks]
    key += picture.plot(panel, metrics[-1], "validation", markeredgecolor=INK, **look)
    _log_scale(panel, picture, *metrics)
    series = [run.series(metric) for run in runs for metric in metrics]
    first = BEGINNING * max(run.rows[-1]["step"] for run in runs)
    later = np.concatenate([values[(steps >= first) & np.isfinite(values)] for steps, values in series])
    begin = max((values[0] for _, values in series if len(values) and np.isfinite(values[0])), default=0.0)
    if len(later) >= 20 and later.max() > 0 and begin > 1.05 * later.max():
        panel.set_ylim(top=1.05 * later.max())
        key.append(Line2D([], [], color=INK, linewidth=0, marker="^", label=f"begins at {begin:.4g}, above the frame"))
    for run, color in [(run, curve.color) for curve in picture.curves for run in curve.runs]:
        happened = [row for row in run.events if row["step"] > run.rows[0]["step"]]
        happened += [{"event": "not_finite", "step": row["step"]} for row in run.rows if row.get("not_finite")]
        for event, (label, marker) in EVENTS.items():
            steps = np.array([row["step"] for row in happened if row["event"] == event])
            if len(steps):
                key += picture.mark(panel, picture.x(run, steps), color=color, marker=marker, label=label)
    panel.legend(handles=list({line.get_label(): line for line in key}.values()), loc="best")


def _log_scale(panel: Axes, picture: Picture, *metrics: str) -> None:
    """A logarithmic y axis with round, plainly written ticks, if all values are positive."""
    values = np.concatenate([run.series(metric)[1] for run in picture.runs for metric in metrics])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0:
        low, high = values.min(), values.max()
        panel.set_yscale("log")
        panel.set_ylim(low * (low / high) ** 0.05 / 1.01, high * (high / low) ** 0.05 * 1.01)
        subs = (1, 2, 5) if high > 50 * low else (1, 1.5, 2, 3, 5, 7)
        wide = high > 10 * low
        panel.yaxis.set_major_locator(LogLocator(subs=subs) if wide else MaxNLocator(6, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        panel.yaxis.set_minor_locator(NullLocator())


def _x_axes(panels: Sequence[Axes], picture: Picture) -> None:
    """The same range below every panel."""
    begin, end = picture.range
    write = {"steps": "{:,.0f}".format, "tokens": short, "time": "{:g}".format}[picture.axis]
    for panel in panels:
        panel.set_xlim(begin - 0.02 * (end - begin), end + 0.02 * (end - begin))
        panel.xaxis.set_major_locator(MaxNLocator(7, integer=picture.axis != "time"))
        panel.xaxis.set_major_formatter(lambda value, _: write(value))
        panel.set_xlabel(picture.label)
        if not panel.lines:
            panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", alpha=0.6)
            panel.set_yticks([])


def as_png(figure: Figure) -> bytes:
    """A figure on white."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", facecolor="white", dpi=130)
    return file.getvalue()


def thin(series: Series, buckets: int) -> Series:
    """At most three points of each of `buckets` stretches of a series: its minimum, its maximum, a non-finite one."""
    steps, values = series
    if len(values) <= 3 * buckets:
        return series
    finite = np.isfinite(values)
    low, high = np.where(finite, values, np.inf), np.where(finite, values, -np.inf)
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), buckets):
        kept |= {part[low[part].argmin()], part[high[part].argmax()], part[finite[part].argmin()]}
    keep = sorted(kept)
    return steps[keep], values[keep]


def short(value: float) -> str:
    """12300 -> 12.3k; also M, B and T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
