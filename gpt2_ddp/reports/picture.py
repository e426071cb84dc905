"""The figure of a report: the curves of one or several runs, overlaid, in a panel for each metric.

Runs that differ only in their seed have the same colour. Nothing is smoothed.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from gpt2_ddp.records.rows import FIELDS, field_of
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import RunRecord, share_tokens

STYLE = matplotlib.rc_params_from_file(
    str(Path(__file__).with_suffix(".mplstyle")), use_default_template=False
)
PANELS = {name: field.panel for name, field in FIELDS.items() if field.panel}
"""Titles of the panels beside the loss, by metric."""
COLORS: list[str] = STYLE["axes.prop_cycle"].by_key()["color"]
"""Colours of the groups; after the last one, the first comes again."""
LABEL = 72
"""Most characters of a group in the legend."""
EVALUATIONS: dict[str, Any] = {
    "linewidth": 1.6,
    "marker": "o",
    "markersize": 4,
    "markeredgecolor": "black",
}
"""How evaluations are drawn."""

Along = Callable[[RunRecord, np.ndarray], np.ndarray]
"""Positions of a run's steps [n] on the x axis [n]."""
Colors = Mapping[RunRecord, str]


def draw(runs: Sequence[RunRecord]) -> Figure:
    """The figure of runs, along steps, or tokens if they differ in tokens per step and
    all are known."""
    groups = group_runs(runs)
    colors = {run: f"C{number}" for number, group in enumerate(groups) for run in group.runs}
    along, axis = axis_of(runs)
    unit = " or ".join(dict.fromkeys(run.unit for run in runs))
    metrics = [metric for metric in PANELS if any(len(run.series(metric)[0]) for run in runs)]
    with matplotlib.rc_context(STYLE):
        rows = len(metrics) // 2 + 1
        figure = Figure(figsize=(11, 3.4 * rows), layout="constrained")
        numbers = range(1, len(metrics) + 2)
        loss, *others = (figure.add_subplot(rows, 2, number) for number in numbers)
        _draw_loss(loss, colors, along, unit)
        for panel, metric in zip(others, metrics, strict=True):
            panel.set_title(PANELS[metric].format(unit=unit))
            _plot(panel, colors, metric, along, alpha=0.8)
            if metric == "grad_norm":
                _make_logarithmic(panel)
            else:
                panel.set_ylim(0, 1.05 * panel.dataLim.y1 if panel.dataLim.y1 > 0 else None)
        for panel in figure.axes:
            panel.set_xlabel(axis)
        if len(groups) > 1:
            names = [group.label(LABEL) for group in groups]
            handles = [
                Line2D([], [], linewidth=3, color=f"C{number}") for number in range(len(groups))
            ]
            figure.legend(handles, names, loc="outside upper center", ncols=2)
    return figure


def axis_of(runs: Sequence[RunRecord]) -> tuple[Along, str]:
    """What runs are drawn along, and its name: steps, or tokens if they differ in tokens per step
    and all are known."""
    rates = {round(run.tokens_per_step) for run in runs}
    if len(rates) > 1 and 0 not in rates:
        return RunRecord.tokens_at, " or ".join(dict.fromkeys(run.unit for run in runs))
    return _steps_at, "step"


def _steps_at(_run: RunRecord, steps: np.ndarray) -> np.ndarray:
    return steps


def _draw_loss(panel: Axes, colors: Colors, along: Along, unit: str) -> None:
    if share_tokens(colors):
        nats = "nats per token, " if unit == "tokens" else ""
        panel.set_title(f"Loss ({nats}log scale)")
        panel.plot([], [], color="gray", alpha=0.6, label="train")
        _plot(panel, colors, "loss_mean", along, alpha=0.6)
        _plot(panel, colors, "val_loss", along, **EVALUATIONS)
    else:
        panel.set_title("Validation loss (bits per byte, log scale; the tokenizers differ)")
        _plot(panel, colors, "val_bits_per_byte", along, **EVALUATIONS)
    panel.plot([], [], color="gray", label="validation", **EVALUATIONS)
    _make_logarithmic(panel)
    panel.legend()


def _plot(
    panel: Axes,
    colors: Colors,
    metric: str,
    along: Along,
    **style: Any,  # noqa: ANN401  of matplotlib
) -> None:
    """Draws a metric of each run, with gaps at values that are not finite."""
    for run, color in colors.items():
        steps, values = run.series(metric)
        with_gaps = np.where(np.isfinite(values), values, np.nan) / field_of(metric).scale
        panel.plot(along(run, steps), with_gaps, color=color, **style)


def _make_logarithmic(panel: Axes) -> None:
    """A logarithmic y axis with plainly written numbers, if all values are positive."""
    if panel.dataLim.y0 > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}" if panel.dataLim.y1 < 30 * panel.dataLim.y0 else "")


def as_png(figure: Figure) -> bytes:
    """A figure on white."""
    file = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(file, format="png", facecolor="white", dpi=110)
    return file.getvalue()
