"""What a comparison found, as numbers and as a table. Every figure is measured; ratios are of medians."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, stdev
from typing import Any, NamedTuple

from gpt2_ddp.compare.run import CommFraction, RunResult
from gpt2_ddp.output import markdown_table

WALL = "wall s (min–max)"


class Strategy(NamedTuple):
    """A way of training on `devices` GPUs or shares of the cores; DataParallel uses several from one process."""

    name: str
    processes: int
    devices: int

    @property
    def data_parallel(self) -> bool:
        """Whether it is nn.DataParallel."""
        return self.name == "DataParallel"


class Difference(NamedTuple):
    """Between final parameters: norm of the difference over the norm, and the largest absolute one."""

    norm: float
    largest: float


@dataclass(frozen=True)
class Row:
    """One way of training one job.

    Args:
        why_missing: why it could not be measured; empty where it was.
        runs: its repeats. singles: those of one process, each run right before the same repeat of this way.
        differences: of each repeat's final parameters from those of the first single run.
    """

    job: str
    way: Strategy
    why_missing: str
    runs: Sequence[RunResult]
    singles: Sequence[RunResult]
    differences: Sequence[Difference]

    @property
    def seconds(self) -> float:
        """Median wall time."""
        return median(run.seconds for run in self.runs)

    @property
    def growth(self) -> float:
        """Samples of a run over those of a single run: 1, but for weak scaling."""
        return self.runs[0].samples / self.singles[0].samples

    @property
    def speed_up(self) -> float:
        """Median wall time of one process over this way's, for as many samples."""
        return self.growth * median(run.seconds for run in self.singles) / self.seconds

    @property
    def speed_ups(self) -> list[float]:
        """Of each repeat: its single run's wall time over its own, for as many samples."""
        return [self.growth * single.seconds / run.seconds for single, run in zip(self.singles, self.runs, strict=True)]

    @property
    def communication(self) -> CommFraction | None:
        """Median share of a step; None for one process, where there is none. The noise is the median within a repeat,
        or between the repeats, where that is more."""
        found = [run.communication for run in self.runs if run.communication is not None]
        if not found:
            return None
        shares, noises = zip(*found, strict=True)
        return CommFraction(median(shares), max(median(noises), stdev(shares) if len(shares) > 1 else 0.0))

    @property
    def peak_memory(self) -> int:
        """Of the process that took most, in bytes."""
        return max(max(run.peak_memory) for run in self.runs)

    def numbers(self) -> dict[str, Any]:
        """Everything measured, as plain values."""
        about = {"job": self.job, "way": self.way.name, "processes": self.way.processes, "devices": self.way.devices}
        if self.why_missing:
            return about | {"why_missing": self.why_missing}
        first = self.runs[0]
        return about | {
            **{name: getattr(first, name) for name in ("parameters", "threads", "steps", "samples", "steps_per_epoch")},
            "seconds": self.seconds,
            "seconds_of_each_run": [run.seconds for run in self.runs],
            "samples_per_second": first.samples / self.seconds,
            "speed_up": self.speed_up,
            "speed_up_of_each_repeat": self.speed_ups,
            "efficiency": self.speed_up / self.way.devices,
            "peak_memory_bytes": self.peak_memory,
            "peak_memory_bytes_of_each_process": [list(run.peak_memory) for run in self.runs],
            "communication": self.communication and self.communication.share,
            "communication_noise": self.communication and self.communication.noise,
            "communication_of_each_run": [run.communication and run.communication.share for run in self.runs],
            "metrics": dict(first.metrics),
            "difference_norm": max(difference.norm for difference in self.differences),
            "difference_largest": max(difference.largest for difference in self.differences),
        }

    def cells(self) -> dict[str, str]:
        """The row of the table, by column; a way that is missing has the first three."""
        place = {"job": self.job, "way": self.way.name}
        if self.why_missing:
            return place | {WALL: self.why_missing}
        found, share = self.numbers(), self.communication
        metrics, rate = found["metrics"], found["samples_per_second"]
        metric = next((name for name in ("val_accuracy", "val_loss") if name in metrics), None)
        return place | {
            WALL: _with_extremes(self.seconds, [run.seconds for run in self.runs], "{:.3g}"),
            "samples/s": f"{rate:,.0f}" if rate >= 1000 else f"{rate:.4g}",
            "speed-up (min–max)": _with_extremes(self.speed_up, self.speed_ups, "{:.2f}"),
            "efficiency": f"{found['efficiency']:.0%}",
            "peak MB per process": f"{self.peak_memory / 1e6:,.0f}",
            "communication": "–" if share is None else share_words(share),
            "final metric": f"{metric} {metrics[metric]:.4f}" if metric else "–",
            "Δ parameters / norm": f"{found['difference_norm']:.1e}",
            "largest Δ": f"{found['difference_largest']:.1e}",
        }


def _with_extremes(value: float, readings: Sequence[float], layout: str) -> str:
    """A figure with the least and the most of its readings; alone, where these are equal, as those of one run are."""
    least, most = min(readings), max(readings)
    extremes = f" ({layout.format(least)}–{layout.format(most)})" if least < most else ""
    return layout.format(value) + extremes


def share_words(share: CommFraction) -> str:
    """A share with its noise, or that it is lost in it."""
    return f"{share.share:.1%} ± {share.noise:.1%}" if share.measured else f"below the noise of ± {share.noise:.1%}"


def as_markdown(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The table, and the notes below it. The first row is that of one process, which is never missing."""
    cells = [row.cells() for row in rows]
    lines = [[line.get(column, "–") for column in cells[0]] for line in cells]
    return "\n".join([markdown_table(list(cells[0]), lines), "", *[f"- {note}" for note in notes]])


def draw(rows: Sequence[Row]) -> bytes:
    """Bars by job and way, as a PNG. Dots are the single repeats; lines go from the least of them to the most, or over
    the noise of a communication. What is missing has no bar."""
    from gpt2_ddp.reports.figure import Bar, draw_bars  # matplotlib: not before there is something to draw

    speed, communication, memory = [], [], []
    measured = [row for row in rows if not row.why_missing]
    for row in measured:
        found, place = row.speed_ups, (row.job, row.way.name)
        speed.append(Bar(*place, row.speed_up, f"{row.speed_up:.2f}", found, (min(found), max(found))))
        size = row.peak_memory / 1e6
        memory.append(Bar(*place, size, f"{size:.0f}", [], (size, size)))
        if row.communication:  # without height where it is lost in its noise
            share, noise = 100 * row.communication.share, 100 * row.communication.noise
            value, label = (share, f"{share:.0f}%") if row.communication.measured else (0.0, f"< {noise:.0f}%")
            readings = [100 * run.communication.share for run in row.runs if run.communication]
            communication.append(Bar(*place, value, label, readings, (share - noise, share + noise)))
    panels = {"Speed-up over one process, measured": speed, "Share of a step in communication (%)": communication}
    panels |= {"Peak memory per process (MB)": memory}
    return draw_bars(panels, list(dict.fromkeys(row.way.name for row in measured)))
