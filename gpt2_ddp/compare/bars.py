"""What a comparison found, as bars."""

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpt2_ddp.compare.table import Row
from gpt2_ddp.reports.figure import STYLE
from gpt2_ddp.reports.lines import COLORS


class Bar(NamedTuple):
    """One figure of a row: its value and what is written above it, the single readings as dots, and a line over
    `spread` where that is more than a point."""

    value: float
    words: str
    readings: Sequence[float]
    spread: tuple[float, float]


def draw(rows: Sequence[Row]) -> bytes:
    """Bars by job and way, as a PNG. Dots are the single repeats; lines go from the least of them to the
    most, or over the noise of a communication. What is missing has no bar."""
    measured = [row for row in rows if not row.why_missing]
    ways = list(dict.fromkeys(row.way.name for row in measured))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(12, 3 * len({row.job for row in measured})), 4.6), layout="constrained")
        speed, communication, memory = figure.subplots(1, 3)
        _bars(speed, "Speed-up over one process, measured", measured, ways, _speed_up)
        _bars(communication, "Share of a step in communication (%)", measured, ways, _communication)
        communication.set_ylim(0, 100)
        _bars(memory, "Peak memory per process (MB)", measured, ways, _memory)
        handles, labels = speed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ways))
        png = io.BytesIO()
        figure.savefig(png, format="png", facecolor="white", dpi=130)
    return png.getvalue()


def _speed_up(row: Row) -> Bar:
    found = row.speed_ups
    return Bar(row.speed_up, f"{row.speed_up:.2f}", found, (min(found), max(found)))


def _communication(row: Row) -> Bar | None:
    """None where there is none; without height where it is lost in its noise."""
    if row.communication is None:
        return None
    share, noise = 100 * row.communication.share, 100 * row.communication.noise
    readings = [100 * run.communication.share for run in row.runs if run.communication is not None]
    value, words = (share, f"{share:.0f}%") if row.communication.measured else (0.0, f"< {noise:.0f}%")
    return Bar(value, words, readings, (share - noise, share + noise))


def _memory(row: Row) -> Bar:
    value = row.peak_memory / 1e6
    return Bar(value, f"{value:.0f}", [], (value, value))


def _bars(panel: Axes, title: str, rows: Sequence[Row], ways: Sequence[str], bar: Callable[[Row], Bar | None]) -> None:
    """One group of bars per job, one colour per way."""
    found = [(row, own) for row in rows if (own := bar(row))]
    jobs = list(dict.fromkeys(row.job for row, _ in found))
    shown = [way for way in ways if any(row.way.name == way for row, _ in found)]
    width = 0.8 / len(ways)
    for place, way in enumerate(shown):
        bars = {row.job: own for row, own in found if row.way.name == way}
        x = np.array([jobs.index(job) for job in bars]) + (place - (len(shown) - 1) / 2) * width
        color = COLORS[ways.index(way) % len(COLORS)]
        panel.bar(x, [own.value for own in bars.values()], 0.9 * width, label=way, color=color)
        for middle, own in zip(x, bars.values(), strict=True):
            panel.plot([middle] * len(own.readings), own.readings, ".", color="black", alpha=0.5, markersize=5)
            if own.spread[0] < own.spread[1]:
                panel.vlines(middle, *own.spread, color="black", linewidth=1.2)
            top = max(own.value, *own.readings, own.spread[1])
            panel.annotate(own.words, (middle, top), (0, 4), textcoords="offset points", ha="center")
    panel.set_title(title)
    panel.set_xticks(range(len(jobs)), jobs)
    panel.grid(axis="x", visible=False)
    panel.margins(y=0.12)
