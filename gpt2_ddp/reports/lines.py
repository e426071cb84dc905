"""A picture of several runs along one axis: thinned lines, every run visible, and where their points are.

Nothing is smoothed. Long runs are thinned, but every minimum, maximum and non-finite stretch stays visible.
"""

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path as Outline

from gpt2_ddp.reports.runs import RunRecord, Series

INK = "#1b1f24"
"""Text, axes and grid; in the SVG, the colour of the text around it."""
COLORS = ("#3f7fe8", "#e8702a", "#1fa37a", "#b25fd6", "#d9a514", "#e0527a", "#27a5c4", "#8a8f98")
"""One per run, used again after eight; readable on white and on black."""
MAX_POINTS = 1800
"""Points per panel, over all runs: what a page holds of them is less than 1 MB."""
STRETCHES = 63
"""Of a panel's width, which lines that coincide share among them in turns."""
FOOT = 0.03
"""Height in a panel of the marks where a value is not finite, or something happened."""
NAME_LENGTH = 32
NOT_FINITE = "not a finite number"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same metrics give the same bytes
    "font.sans-serif": ["DejaVu Sans"],  # matplotlib's own; the others would be named with every text of the SVG
    "text.parse_math": False,  # a run's name is not a formula
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "grid.alpha": 0.12,
    "legend.frameon": False,
} | dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK)


@dataclass(frozen=True)
class Trace:
    """What was drawn of one run in one panel.

    Args:
        run: its number.
        label: what it is, where a panel shows several things.
        line: through `steps` and `values` [n], but for values that are not finite.
    """

    run: int
    panel: Axes
    label: str
    line: Line2D
    steps: np.ndarray
    values: np.ndarray

    def places(self) -> np.ndarray:
        """x and y [n, 2] as parts of the panel; what lies above it or is not finite stands at its edge."""
        values = np.where(np.isfinite(self.values), self.values, self.panel.get_ylim()[0])
        points = self.panel.transData.transform(np.column_stack([self.line.get_xdata(), values]))
        return np.clip(self.panel.transAxes.inverted().transform(points), (0, FOOT), 1)


class Picture:
    """Runs along one of AXES, which all of them have, and what has been drawn of them in `figure`, with STYLE."""

    def __init__(self, runs: Sequence[RunRecord], axis: str):
        self.runs, self.axis = runs, axis
        self.names = short_names([run.name for run in runs])
        self.traces: list[Trace] = []
        self.figure = Figure()
        self._size = 1.0
        ends = np.array([self.x(run, np.array([run.rows[0]["step"], run.rows[-1]["step"]])) for run in runs])
        label = "step" if axis == "steps" else self.units
        if axis == "time":
            unit, self._size = ("h", 3600.0) if ends.max() > 7200 else ("min", 60.0) if ends.max() > 120 else ("s", 1.0)
            label = f"time in training steps ({unit})"
        self.label = label
        begin, end = ends.min() / self._size, ends.max() / self._size
        self.range = (begin if end / 4 < begin < end else 0.0, end or 1.0)

    @property
    def units(self) -> str:
        """What the runs count."""
        return " or ".join(dict.fromkeys(run.unit for run in self.runs))

    def x(self, run: RunRecord, steps: np.ndarray) -> np.ndarray:
        """Where steps [n] of a run are on the axis."""
        places = run.along(self.axis, steps)
        assert places is not None, f"{run.name} has no {self.axis}"
        return places / self._size

    def colored(self) -> Iterator[tuple[RunRecord, str]]:
        """The runs, and their colours."""
        return zip(self.runs, cycle(COLORS), strict=False)

    def plot(self, panel: Axes, metric: str, label: str = "", **style: Any) -> list[Line2D]:
        """One line per run, the longest at the bottom; crosses at the foot of the panel, which it returns, stand where
        a value is not finite."""
        crosses = []
        longest = sorted(enumerate(self.colored()), key=lambda item: -item[1][0].rows[-1]["step"])
        for number, (run, color) in longest:
            steps, values = thin(run.series(metric), max(MAX_POINTS // (3 * len(self.runs)), 10))
            if not len(values):
                continue
            finite, x = np.isfinite(values), self.x(run, steps)
            look = {"color": color, "linewidth": 1, "marker": "." if len(values) < 40 else None} | style
            if len(values) > 200:
                look |= {"marker": None, "linewidth": 0.7 * look["linewidth"]}
            (line,) = panel.plot(x, np.where(finite, values, np.nan), **look)
            self.traces.append(Trace(number, panel, label, line, steps, values))
            if not finite.all():
                crosses += self.mark(panel, x[~finite], color=color, marker="x", label=NOT_FINITE)
        return crosses

    def mark(self, panel: Axes, x: np.ndarray, **style: Any) -> list[Line2D]:
        """Marks at the foot of a panel."""
        return panel.plot(x, np.full(len(x), FOOT), transform=panel.get_xaxis_transform(), linewidth=0, **style)

    def take_turns(self) -> None:
        """Cuts lines that would hide each other: where some coincide, each shows in its share of the stretches of the
        panel's width. To be called when all scales are set."""
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
        """As an `<svg>` element, transparent and in the colour of the text around it."""
        file, nothing = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
        with matplotlib.rc_context(STYLE):
            self.figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        element = re.sub(r'<g id="[^"<>]*">', "<g>", file.getvalue())
        element = re.sub(r' d="[^"<>]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), element)
        return element[element.index("<svg") :].replace(INK, "currentColor")

    def panels(self) -> dict[Axes, list[float]]:
        """Left, top, right and bottom of each panel, in the coordinates of the SVG."""
        size = np.tile(72 * self.figure.get_size_inches(), 2)
        boxes = {panel: panel.get_position() for panel in self.figure.axes}
        return {p: (np.array([b.x0, 1 - b.y1, b.x1, 1 - b.y0]) * size).round(1).tolist() for p, b in boxes.items()}

    def png(self) -> bytes:
        """On white."""
        return as_png(self.figure)


def as_png(figure: Figure) -> bytes:
    """On white."""
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


def short_names(names: Sequence[str]) -> list[str]:
    """Names that fit into a legend, cut in their middle; those that become equal get their number."""
    head, tail = NAME_LENGTH // 2 - 1, NAME_LENGTH // 2
    short = [name if len(name) <= NAME_LENGTH else f"{name[:head]}…{name[-tail:]}" for name in names]
    return [f"{name} ({number})" if short.count(name) > 1 else name for number, name in enumerate(short, 1)]
