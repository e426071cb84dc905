"""The figure of a report: loss, learning rate, gradient norm and throughput of one or several runs, overlaid.

Nothing is smoothed. Long runs are thinned, but every minimum, maximum and non-finite stretch stays visible.
"""

import io
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from gpt2_ddp.reports.runs import RunRecord, Series

INK = "#1b1f24"
"""Text, axes and grid; in the SVG, the colour of the text around it."""
COLORS = ("#3f7fe8", "#e8702a", "#1fa37a", "#b25fd6", "#d9a514", "#e0527a", "#27a5c4", "#8a8f98")
"""One per run, used again after eight; readable on white and on black."""
MAX_POINTS = 3600
"""Points per panel, over all runs: at most about 0.5 MB of SVG."""
BEGINNING = 0.02
"""Part of the steps whose losses may stick out above the panel: they would press the rest of the curve flat."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gpt2_ddp",  # the same metrics give the same bytes
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


def draw(runs: Sequence[RunRecord]) -> tuple[str, bytes]:
    """Draws the four panels.

    Returns:
        The figure as an `<svg>` element, transparent and in the colour of the text around it, and as a PNG on white.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 8), layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
        (loss, rate), (norm, speed) = figure.subplots(2, 2)
        _loss(loss, runs)
        _learning_rate(rate, runs)
        _gradient_norm(norm, runs)
        _throughput(speed, runs)
        _step_axes([loss, rate, norm, speed], runs)
        if len(runs) > 1:
            handles = [Line2D([], [], color=color, lw=3, label=_label(run, runs)) for run, color in _colored(runs)]
            figure.legend(handles=handles, loc="outside upper center", ncols=min(len(runs), 3), fontsize=11)
        svg, png = io.StringIO(), io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing, bbox_inches="tight")
        figure.savefig(png, format="png", facecolor="white", dpi=130, bbox_inches="tight", pad_inches=0.2)
    element = svg.getvalue()
    return element[element.index("<svg") :].replace(INK, "currentColor"), png.getvalue()


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


def _loss(panel: Axes, runs: Sequence[RunRecord]) -> None:
    panel.set_title("Loss (nats per token, log scale)" if _units(runs) == "tokens" else "Loss (log scale)")
    key = [
        Line2D([], [], color=INK, alpha=0.6, linewidth=1, label="train, as logged"),
        Line2D([], [], color=INK, linewidth=1.6, marker="o", markersize=4.5, label="validation"),
    ]
    key += _plot(panel, runs, "loss", alpha=0.6)
    key += _plot(panel, runs, "val_loss", linewidth=1.6, marker="o", markersize=4.5, markeredgecolor=INK)
    _log_scale(panel, runs, "loss", "val_loss")
    series = [run.series(metric) for run in runs for metric in ("loss", "val_loss")]
    first = BEGINNING * max(run.rows[-1]["step"] for run in runs)
    later = np.concatenate([values[(steps >= first) & np.isfinite(values)] for steps, values in series])
    begin = max((values[0] for _, values in series if len(values) and np.isfinite(values[0])), default=0.0)
    if len(later) >= 20 and later.max() > 0 and begin > 1.05 * later.max():
        panel.set_ylim(top=1.05 * later.max())
        key.append(Line2D([], [], color=INK, linewidth=0, marker="^", label=f"begins at {begin:.4g}, above the frame"))
    panel.legend(handles=list({line.get_label(): line for line in key}.values()), loc="upper right")


def _learning_rate(panel: Axes, runs: Sequence[RunRecord]) -> None:
    panel.set_title("Learning rate")
    _plot(panel, runs, "lr", linewidth=1.6)
    for above, line in enumerate(panel.lines[1:], 1):
        line.set_linestyle((0, (7, 7 * above)))  # an equal schedule shows through the gaps
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _gradient_norm(panel: Axes, runs: Sequence[RunRecord]) -> None:
    panel.set_title("Gradient norm (before clipping, log scale)")
    crosses = _plot(panel, runs, "grad_norm", alpha=0.75)
    _log_scale(panel, runs, "grad_norm")
    if crosses:
        panel.legend(handles=crosses[:1], loc="upper right")


def _throughput(panel: Axes, runs: Sequence[RunRecord]) -> None:
    panel.set_title(f"Throughput ({_units(runs)} per second)")
    _plot(panel, runs, "tokens_per_second", alpha=0.75)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
    key = []
    for run, color in _colored(runs):
        speed, mfu = run.median("tokens_per_second"), run.median("mfu")
        if speed is not None:
            utilization = "" if mfu is None else f", MFU {mfu:.1%}"
            key.append(Line2D([], [], color=color, label=f"median {_short(speed)}{utilization}"))
    if key:
        panel.legend(handles=key, loc="lower right")


def _plot(panel: Axes, runs: Sequence[RunRecord], metric: str, **style: Any) -> list[Line2D]:
    """One line per run; crosses at the foot of the panel, which it returns, stand where a value is not finite."""
    crosses = []
    for run, color in _colored(runs):
        steps, values = thin(run.series(metric), max(MAX_POINTS // (3 * len(runs)), 10))
        if not len(values):
            continue
        finite = np.isfinite(values)
        marker = "." if len(values) < 40 else None  # a line of one point is invisible
        look = {"color": color, "linewidth": 1, "marker": marker} | style
        panel.plot(steps, np.where(finite, values, np.nan), **look)
        if not finite.all():
            foot = np.full(len(values) - finite.sum(), 0.03)
            look = {"color": color, "transform": panel.get_xaxis_transform(), "label": "not a finite number"}
            crosses += panel.plot(steps[~finite], foot, "x", **look)
    return crosses


def _log_scale(panel: Axes, runs: Sequence[RunRecord], *metrics: str) -> None:
    """A logarithmic y axis with round, plainly written ticks, if all values are positive."""
    values = np.concatenate([run.series(metric)[1] for run in runs for metric in metrics])
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0:
        low, high = values.min(), values.max()
        panel.set_yscale("log")
        panel.set_ylim(low * (low / high) ** 0.05 / 1.01, high * (high / low) ** 0.05 * 1.01)
        wide = high > 10 * low
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if wide else MaxNLocator(6, steps=[1, 2, 5, 10]))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        panel.yaxis.set_minor_locator(NullLocator())


def _step_axes(panels: Sequence[Axes], runs: Sequence[RunRecord]) -> None:
    """The same steps below every panel; tokens above the upper ones, when a step has as many in all runs."""
    end = max(*(run.rows[-1]["step"] for run in runs), 1)
    for panel in panels:
        panel.set_xlim(-0.02 * end, 1.02 * end)
        panel.xaxis.set_major_locator(MaxNLocator(7, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        if not panel.lines:
            panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", alpha=0.6)
            panel.set_yticks([])
    for panel in panels[2:]:
        panel.set_xlabel("step")
    ratio = runs[0].tokens_per_step
    if ratio and _same_tokens_per_step(runs):
        for panel in panels[:2]:
            to_tokens, to_steps = lambda steps: np.multiply(steps, ratio), lambda tokens: np.divide(tokens, ratio)
            tokens = panel.secondary_xaxis("top", functions=(to_tokens, to_steps))
            tokens.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
            tokens.set_xlabel(_units(runs))


def _units(runs: Sequence[RunRecord]) -> str:
    return " or ".join(dict.fromkeys(run.unit for run in runs))


def _same_tokens_per_step(runs: Sequence[RunRecord]) -> bool:
    return len({round(run.tokens_per_step) for run in runs}) == 1


def _label(run: RunRecord, runs: Sequence[RunRecord]) -> str:
    return (
        run.name if _same_tokens_per_step(runs) else f"{run.name} ({_short(run.tokens_per_step)} {run.unit} per step)"
    )


def _colored(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, str]]:
    return zip(runs, cycle(COLORS), strict=False)


def _short(value: float) -> str:
    """12300 -> 12.3k; also M, B and T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"
