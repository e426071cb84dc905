"""What a comparison found, as bars."""

import io
from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gpt2_ddp.compare.run import Share
from gpt2_ddp.compare.table import Row
from gpt2_ddp.reports.figure import STYLE
from gpt2_ddp.reports.lines import COLORS


def draw(rows: Sequence[Row]) -> bytes:
    """Bars by job and way, as a PNG. Dots are the single repeats; lines go from the least of them to the
    most, or over the noise of a communication. What is missing has no bar."""
    measured = [row for row in rows if not row.why_missing]
    ways = list(dict.fromkeys(row.way.name for row in measured))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(12, 3 * len({row.job for row in measured})), 4.6), layout="constrained")
        speed, communication, memory = figure.subplots(1, 3)
        _bars(
            speed,
            measured,
            ways,
            lambda row: row.speed_up,
            lambda row: row.speed_ups,
            lambda row: (min(row.speed_ups), max(row.speed_ups)),
            lambda row: f"{row.speed_up:.2f}",
        )
        speed.set_title("Speed-up over one process, measured")
        _bars(
            communication,
            [row for row in measured if row.communication is not None],
            ways,
            lambda row: 100 * _share(row).share if _share(row).measured else 0.0,
            lambda row: [100 * run.communication.share for run in row.runs if run.communication is not None],
            lambda row: (100 * (_share(row).share - _share(row).noise), 100 * (_share(row).share + _share(row).noise)),
            lambda row: f"{_share(row).share:.0%}" if _share(row).measured else f"< {_share(row).noise:.0%}",
        )
        communication.set_title("Share of a step in communication (%)")
        communication.set_ylim(0, 100)
        _bars(
            memory,
            measured,
            ways,
            lambda row: row.peak_memory / 1e6,
            lambda row: [],
            lambda row: None,
            lambda row: f"{row.peak_memory / 1e6:.0f}",
        )
        memory.set_title("Peak memory per process (MB)")
        handles, labels = speed.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(ways))
        png = io.BytesIO()
        figure.savefig(png, format="png", facecolor="white", dpi=130)
    return png.getvalue()


def _share(row: Row) -> Share:
    assert row.communication is not None, "rows without one are left out"
    return row.communication


def _bars(
    panel: Axes,
    rows: Sequence[Row],
    ways: Sequence[str],
    height: Callable[[Row], float],
    dots: Callable[[Row], list[float]],
    spread: Callable[[Row], tuple[float, float] | None],
    words: Callable[[Row], str],
) -> None:
    """One group of bars per job, one colour per way; a line over the spread, and `words` above each bar."""
    jobs = list(dict.fromkeys(row.job for row in rows))
    shown = [way for way in ways if any(row.way.name == way for row in rows)]
    width = 0.8 / len(ways)
    for place, way in enumerate(shown):
        own = [row for row in rows if row.way.name == way]
        x = np.array([jobs.index(row.job) for row in own]) + (place - (len(shown) - 1) / 2) * width
        heights = [height(row) for row in own]
        panel.bar(x, heights, 0.9 * width, label=way, color=COLORS[ways.index(way) % len(COLORS)])
        for middle, row, value in zip(x, own, heights, strict=True):
            points, ends = dots(row), spread(row) or (value, value)
            panel.plot([middle] * len(points), points, ".", color="black", alpha=0.5, markersize=5)
            if ends[0] < ends[1]:
                panel.vlines(middle, *ends, color="black", linewidth=1.2)
            top = max([value, *points, ends[1]])
            panel.annotate(words(row), (middle, top), (0, 4), textcoords="offset points", ha="center")
    panel.set_xticks(range(len(jobs)), jobs)
    panel.grid(axis="x", visible=False)
    panel.margins(y=0.12)
