"""The figure of a report: loss, learning rate, gradient norm and throughput of one or several runs, overlaid."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from gpt2_ddp.reports.lines import COLORS, INK, NOT_FINITE, STYLE, Picture, as_png
from gpt2_ddp.reports.runs import RunRecord

SAME_TEXT = 1.05
"""Bytes per token differ by less than this between runs of one tokenizer."""
BEGINNING = 0.02
"""Part of the steps whose losses may stick out above the panel: they would press the rest of the curve flat."""
EVENTS = {"rollback": ("rolled back to here", "<"), "start": ("resumed", "|"), "not_finite": (NOT_FINITE, "x")}
"""What is marked below the loss, and how; `not_finite`: of losses since the row before, which a mean leaves out."""


def draw(runs: Sequence[RunRecord], axis: str) -> Picture:
    """Draws the four panels along one of AXES, which all runs have."""
    picture = Picture(runs, axis)
    with matplotlib.rc_context(STYLE):
        names, columns = _legend(picture)
        above = 0.4 + 0.25 * -(-len(names) // columns)  # inches
        figure = picture.figure
        figure.set_size_inches(12, 7.8 + above)
        inches = {"left": 0.75 / 12, "right": 1 - 0.2 / 12, "bottom": 0.6 / (7.8 + above), "top": 7.8 / (7.8 + above)}
        (loss, rate), (norm, speed) = figure.subplots(2, 2, gridspec_kw={**inches, "wspace": 0.15, "hspace": 0.28})
        _loss(loss, picture)
        _learning_rate(rate, picture)
        _gradient_norm(norm, picture)
        _throughput(speed, picture)
        _x_axes([loss, rate, norm, speed], picture)
        picture.take_turns()
        if names:
            figure.legend(handles=names, loc="upper center", ncols=columns, fontsize=10.5)
    return picture


def share_tokens(runs: Sequence[RunRecord]) -> bool:
    """Whether losses per token can be compared: the tokenizer is the same, or seems to be where one is unknown."""
    known = {run.tokenizer for run in runs}
    if None not in known or len(known) > 2:
        return len(known) == 1
    lengths = [length for run in runs if (length := run.bytes_per_token)]
    return not lengths or max(lengths) < SAME_TEXT * min(lengths)


def share_batch(runs: Sequence[RunRecord]) -> bool:
    """Whether a step is as many tokens in all runs."""
    return len({round(run.tokens_per_step) for run in runs}) == 1


def _legend(picture: Picture) -> tuple[list[Line2D], int]:
    """The runs by name, if there are several, and how many fit into a row."""
    runs = picture.runs
    if len(runs) == 1:
        return [], 1
    labels = []
    for run, name in zip(runs, picture.names, strict=True):
        batch = "" if share_batch(runs) else f", {short(run.tokens_per_step)} {run.unit} a step"
        labels.append(f"{name}{batch}{_speed(run)}")
    handles = [Line2D([], [], color=color, lw=3, label=label)
               for (_, color), label in zip(picture.colored(), labels, strict=True)]  # fmt: skip
    return handles, max(1, min(len(runs), 4, 130 // max(map(len, labels))))


def _speed(run: RunRecord) -> str:
    speed, mfu = run.median("tokens_per_second"), run.median("mfu")
    return (f", {short(speed)}/s" if speed else "") + (f", MFU {mfu:.1%}" if mfu else "")


def _loss(panel: Axes, picture: Picture) -> None:
    runs, look = picture.runs, {"linewidth": 1.6, "marker": "o", "markersize": 4.5}
    key = [Line2D([], [], color=INK, label="validation", **look)]
    metrics = ["loss_mean", "val_loss"] if share_tokens(runs) else ["val_bits_per_byte"]
    if "loss_mean" in metrics:
        panel.set_title("Loss (nats per token, log scale)" if picture.units == "tokens" else "Loss (log scale)")
        means = any("loss_mean" in row and row["loss_mean"] != row["loss"] for run in runs for row in run.rows)
        label = "train, mean between rows" if means else "train, as logged"
        key.insert(0, Line2D([], [], color=INK, alpha=0.6, linewidth=1, label=label))
        key += picture.plot(panel, "loss_mean", "train", alpha=0.6)
    else:
        panel.set_title("Validation loss (bits per byte, log scale)")
        remarks = ["without the training losses: they are per", "token, and the runs' tokenizers differ"]
        remarks += [f"not evaluated: {name}" for run, name in zip(runs, picture.names, strict=True)
                    if not len(run.series(metrics[0])[1])]  # fmt: skip
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
    for run, color in picture.colored():
        happened = [row for row in run.events if row["step"] > run.rows[0]["step"]]
        happened += [{"event": "not_finite", "step": row["step"]} for row in run.rows if row.get("not_finite")]
        for event, (label, marker) in EVENTS.items():
            steps = np.array([row["step"] for row in happened if row["event"] == event])
            if len(steps):
                key += picture.mark(panel, picture.x(run, steps), color=color, marker=marker, label=label)
    panel.legend(handles=list({line.get_label(): line for line in key}.values()), loc="best")


def _learning_rate(panel: Axes, picture: Picture) -> None:
    panel.set_title("Learning rate")
    picture.plot(panel, "lr", linewidth=1.6)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))


def _gradient_norm(panel: Axes, picture: Picture) -> None:
    panel.set_title("Gradient norm (before clipping, log scale)")
    crosses = picture.plot(panel, "grad_norm", alpha=0.75)
    _log_scale(panel, picture, "grad_norm")
    if crosses:
        panel.legend(handles=crosses[:1], loc="upper right")


def _throughput(panel: Axes, picture: Picture) -> None:
    panel.set_title(f"Throughput ({picture.units} per second)")
    picture.plot(panel, "tokens_per_second", alpha=0.75)
    panel.set_ylim(bottom=0)
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    if len(picture.runs) == 1 and (speed := _speed(picture.runs[0])):
        panel.legend(handles=[Line2D([], [], color=COLORS[0], label=f"median {speed[2:]}")], loc="lower right")


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
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
        panel.yaxis.set_minor_locator(NullLocator())


def _x_axes(panels: Sequence[Axes], picture: Picture) -> None:
    """The same range below every panel."""
    begin, end = picture.range
    write = {"steps": "{:,.0f}".format, "tokens": short, "time": "{:g}".format}[picture.axis]
    for panel in panels:
        panel.set_xlim(begin - 0.02 * (end - begin), end + 0.02 * (end - begin))
        panel.xaxis.set_major_locator(MaxNLocator(7, integer=picture.axis != "time"))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
        panel.set_xlabel(picture.label)
        if not panel.lines:
            panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", alpha=0.6)
            panel.set_yticks([])


def short(value: float) -> str:
    """12300 -> 12.3k; also M, B and T."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


class Bar(NamedTuple):
    """A bar of a `group` and a `series`: height, label above it, and readings, drawn as dots. A line over it has two
    ends, which may coincide."""

    group: str
    series: str
    value: float
    label: str
    readings: Sequence[float]
    ends: tuple[float, float]


def draw_bars(panels: Mapping[str, Sequence[Bar]], series: Sequence[str]) -> bytes:
    """A PNG of one panel per title, side by side: groups of bars, each series in its colour. A panel of a title with
    (%) spans 0 to 100."""
    n_groups = max(len({bar.group for bar in bars}) for bars in panels.values())
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(12, 3 * n_groups), 4.6), layout="constrained")
        for panel, (title, bars) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
            panel.set_title(title)
            _bars(panel, bars, series)
            if "(%)" in title:
                panel.set_ylim(0, 100)
        handles = [Patch(color=color, label=name) for name, color in zip(series, cycle(COLORS), strict=False)]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(series))
    return as_png(figure)


def _bars(panel: Axes, bars: Sequence[Bar], series: Sequence[str]) -> None:
    groups = list(dict.fromkeys(bar.group for bar in bars))
    shown = [name for name in series if any(bar.series == name for bar in bars)]
    width = 0.8 / len(series)
    for bar in bars:
        x = groups.index(bar.group) + (shown.index(bar.series) - (len(shown) - 1) / 2) * width
        panel.bar(x, bar.value, 0.9 * width, color=COLORS[series.index(bar.series) % len(COLORS)])
        panel.plot([x] * len(bar.readings), bar.readings, ".", color="black", alpha=0.5, markersize=5)
        panel.vlines(x, *bar.ends, color="black", linewidth=1.2)
        top = max(bar.value, *bar.readings, *bar.ends)
        panel.annotate(bar.label, (x, top), (0, 4), textcoords="offset points", ha="center")
    panel.set_xticks(range(len(groups)), groups)
    panel.grid(axis="x", visible=False)
    panel.margins(y=0.12)
