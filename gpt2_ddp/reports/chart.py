"""Charts of a page as SVG: sharp at any width, with the values for the mouse as JSON.

Positions are percentages, so that a chart has the width of its page while its text keeps its size.
The curves are in a box of BOX x BOX units, which is stretched over the frame.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal, NamedTuple

import numpy as np
from matplotlib.ticker import LogLocator, MaxNLocator

from gpt2_ddp.reports.runs import Series

BOX = 1000
"""Units of the frame, along both axes."""
DASHES = ("", "7 4", "2 4")
"""Dashes of the curves whose colours come again."""
SYMBOLS = {
    "resumed": "M-4,1 4,6 -4,11z",
    "rolled back": "M4,1 -4,6 4,11z",
    "branched": "M0,0 5,6 0,12 -5,6z",
    "bad steps": "M-4,2 4,10M4,2 -4,10",
}
"""Paths of the marks, in pixels below the upper edge of the frame."""
MERGED = 0.012
"""Marks of a kind that are nearer to each other, as a fraction of the width, are one."""

UNITS = ((1e12, 1e12, "T"), (1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k"))
"""From which number on an axis has which unit, and its name."""

MOST_DOTS = 150
"""Most evaluations that are drawn as dots, too: more would cover their line."""
SPREAD = 5
"""A logarithmic axis whose end is so many times its beginning has the numbers 1, 2, 5, 10, 20 ...,
if they are few: equal distances would be at its end alone."""
FEW = 40
"""A curve of at most so many rows shows each of them."""

Style = Literal["line", "faint", "points", "dots", "undone"]


class Curve(NamedTuple):
    """A curve: its name under the mouse, values, and how it is drawn.

    Attributes:
        points: along x, by rising x; a value that is not finite is a gap.
        number: of its colour and dashes.
    """

    label: str
    points: Series
    number: int
    style: Style = "line"


class Band(NamedTuple):
    """An area between two curves: its name under the mouse, positions along x [n] by rising x, and
    its edges [n]."""

    label: str
    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    number: int  # of its colour


class Mark(NamedTuple):
    """What happened to a run, at a position of the x axis."""

    kind: str  # of SYMBOLS
    x: float
    text: str
    number: int  # of its run's colour


@dataclass(frozen=True)
class Scale:
    """An axis from `low` to `high`."""

    low: float
    high: float
    is_log: bool = False

    def fractions(self, values: np.ndarray) -> np.ndarray:
        """Positions of values [n] along the axis [n]; 0 is its beginning, 1 its end."""
        if self.is_log:
            begin = math.log(self.low)
            return (np.log(values) - begin) / (math.log(self.high) - begin)
        return (values - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """About `most` round values as positions, with their texts."""
        values = self._round_values(most)
        return [*zip(self.fractions(values).tolist(), map(short, values.tolist()), strict=True)]

    def _round_values(self, most: int) -> np.ndarray:
        """About `most` round values on the axis [n]."""
        if self.is_log and self.high > SPREAD * self.low:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)))
            values = np.array([first * 10.0**power for power in powers for first in (1, 2, 5)])
            values = values[(values >= self.low) & (values <= self.high)]
            if 2 < len(values) <= most:
                return values
        steps = MaxNLocator(most, steps=[1, 2, 2.5, 5, 10])
        locator = LogLocator(numticks=most) if self.high > 30 * self.low > 0 else steps
        if not self.is_log:
            locator = steps
        values = np.asarray(locator.tick_values(self.low, self.high))
        return values[(values >= self.low) & (values <= self.high)]


@dataclass(frozen=True)
class Chart:
    """A chart of curves.

    Attributes:
        title: of its one line.
        note: of the title, such as the unit.
        axis: name of the x axis.
        is_log: whether y is logarithmic, if all values are above 0.
        from_zero: whether y begins at 0, if no value is below.
        bands: areas behind the curves.
        is_log_x: whether x is logarithmic, if all positions are above 0.
    """

    title: str
    curves: Sequence[Curve]
    axis: str
    note: str = ""
    is_log: bool = False
    from_zero: bool = False
    marks: Sequence[Mark] = ()
    bands: Sequence[Band] = ()
    is_log_x: bool = False

    def scales(self) -> tuple[Scale, Scale]:
        """The axes, of all finite values but those of undone rows."""
        lasting = [curve.points[1] for curve in self.curves if curve.style != "undone"]
        lasting += [edge for band in self.bands for edge in (band.low, band.high)]
        positions = [curve.points[0] for curve in self.curves] + [band.x for band in self.bands]
        x = np.concatenate([np.zeros(0), *positions])
        x = x if len(x) else np.zeros(1)
        y = np.concatenate([np.zeros(0), *lasting])
        y = y[np.isfinite(y)]
        low, high = (float(y.min()), float(y.max())) if len(y) else (0.0, 1.0)
        is_log = self.is_log and low > 0
        if self.from_zero and low >= 0:
            low = 0.0
        begin = float(x.min())
        end = float(x.max())
        if self.is_log_x and 0 < begin < end:
            return Scale(begin, end, True), _padded(low, high, is_log)
        return _wider(begin, end), _padded(low, high, is_log)

    def html(self, colors: Sequence[str], columns: int, large: bool = False) -> str:
        """The chart as a figure; every text is escaped.

        Args:
            columns: in how many parts the width is divided to thin the curves.
        """
        along, up = self.scales()
        thinned = [curve._replace(points=thin(curve.points, columns)) for curve in self.curves]
        frame = [_grid(along, up, large)]
        paths = [_area(band, along, up, colors) for band in self.bands]
        paths += [_path(curve, along, up, colors) for curve in thinned]
        box = f'viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none"'
        frame.append(f'<svg class="curves" {box} width="100%" height="100%">{"".join(paths)}</svg>')
        marks = merged(self.marks, along)
        runs = len({mark.number for mark in marks})
        frame += [_symbol(mark, along, colors, runs) for mark in marks]
        title = f"{self.title} {self.note}".strip()
        height = "large" if large else "small"
        note = f" <small>{escape(self.note)}</small>" if self.note else ""
        data = _data(self, thinned, along, up, colors)
        return "\n".join(
            [
                f'<figure class="chart {height}">',
                f"<figcaption>{escape(self.title)}{note}</figcaption>",
                f'<div class="plot"><svg role="img" aria-label="{escape(title)}">',
                *frame,
                "</svg></div>",
                f'<script type="application/json">{data}</script>',
                "</figure>",
            ]
        )


def color_of(number: int, colors: Sequence[str]) -> str:
    """The colour of a curve, as a style."""
    return f"--c:{colors[number % len(colors)]}"


def dashes_of(number: int, colors: Sequence[str]) -> str:
    """The dashes of a curve, as an attribute; empty for a whole line."""
    dashes = DASHES[number // len(colors) % len(DASHES)]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def short(value: float) -> str:
    """A number of an axis: 20k, 1.5M, 0.001, 2.5e-4."""
    for least, unit, name in UNITS:
        if least <= abs(value) < 1e15:
            return f"{value / unit:g}{name}"
    if 0 < abs(value) < 0.001:
        mantissa, _, exponent = f"{value:e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def thin(points: Series, columns: int) -> Series:
    """The points that a picture of `columns` columns shows: of each column the first and last one,
    the lowest and highest value, and a gap. So the lines look the same (M4: Jugel et al. 2014)."""
    x, y = points
    if len(x) <= 4 * columns:
        return points
    column = ((x - x[0]) / (x[-1] - x[0]) * columns).astype(int)
    kept: set[int] = set()
    for part in np.split(np.arange(len(x)), np.flatnonzero(np.diff(column)) + 1):
        finite = part[np.isfinite(y[part])]
        kept |= {int(part[0]), int(part[-1])}
        if len(finite):
            kept |= {int(finite[y[finite].argmin()]), int(finite[y[finite].argmax()])}
        if len(finite) < len(part):
            kept.add(int(part[~np.isfinite(y[part])][0]))
    numbers = sorted(kept)
    return x[numbers], y[numbers]


def merged(marks: Iterable[Mark], along: Scale) -> list[Mark]:
    """The marks on the axis. Those of a kind and a run that would cover each other are one, with
    the number of all."""
    groups: list[list[Mark]] = []
    newest: dict[tuple[str, int], list[Mark]] = {}
    width = along.high - along.low
    for mark in sorted(marks, key=lambda mark: mark.x):
        if not along.low <= mark.x <= along.high:
            continue
        group = newest.get((mark.kind, mark.number))
        if group and mark.x - group[0].x < MERGED * width:
            group.append(mark)
        else:
            newest[mark.kind, mark.number] = [mark]
            groups.append(newest[mark.kind, mark.number])
    return [
        first._replace(text=f"{first.text}, and {len(others)} more up to {short(others[-1].x)}")
        if others
        else first
        for first, *others in groups
    ]


def _wider(low: float, high: float) -> Scale:
    """The x axis: from 0 if the first value is near it, and wider than one value."""
    if 0 <= low < 0.1 * high:
        low = 0.0
    return Scale(low, high) if high > low else Scale(low - 1, high + 1)


def _padded(low: float, high: float, is_log: bool) -> Scale:
    """The y axis of values from `low` to `high`, with some room at its ends."""
    if is_log:
        room = math.exp(max(math.log(high) - math.log(low), 0.01) * 0.04)
        return Scale(low / room, high * room, True)
    room = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    return Scale(low if low == 0 else low - room, high + room)


def _grid(along: Scale, up: Scale, large: bool) -> str:
    """Lines and numbers of both axes."""
    parts: list[str] = []
    for fraction, text in up.ticks(7 if large else 4):
        y = f"{100 - 100 * fraction:.2f}%"
        parts.append(f'<line class="grid" x2="100%" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="y" x="-7" y="{y}" dy=".33em">{text}</text>')
    for fraction, text in along.ticks(6 if large else 4):
        x = f"{100 * fraction:.2f}%"
        parts.append(f'<text class="x" x="{x}" y="100%" dy="1.35em">{text}</text>')
    return "".join([*parts, '<line class="axis" x2="100%" y1="100%" y2="100%"/>'])


def _path(curve: Curve, along: Scale, up: Scale, colors: Sequence[str]) -> str:
    """The path of a curve, with a gap at each value that is not finite. As points, dots are on it;
    as dots, they are alone."""
    x, y = curve.points
    is_finite = np.isfinite(y) & ((y > 0) | (not up.is_log))
    positions = BOX * along.fractions(x)
    heights = BOX - BOX * up.fractions(np.where(is_finite, y, up.high))
    if curve.style == "undone":
        heights = heights.clip(0, BOX)
    words: list[str] = []
    command = "M"
    for position, height, drawn in zip(positions, heights, is_finite, strict=True):
        if not drawn:
            command = "M"
            continue
        # a point between gaps is a line of no length, which round ends show
        words.append(f"{command}{position:.1f},{height:.1f}" + ("h0" if command == "M" else ""))
        command = "L"
    style = color_of(curve.number, colors)
    line = "".join(words)
    dashes = dashes_of(curve.number, colors)
    path = f'<path class="{curve.style}" style="{style}"{dashes} d="{line}"/>'
    dots = "".join(f"M{word[1:].removesuffix('h0')}h0" for word in words)
    if curve.style == "dots":
        path = ""
    if curve.style == "dots" or (curve.style == "points" and len(words) <= MOST_DOTS):
        path += f'<path class="rims" d="{dots}"/><path class="dots" style="{style}" d="{dots}"/>'
    elif curve.style != "undone" and len(words) <= FEW:
        path += f'<path class="rows" style="{style}" d="{dots}"/>'
    return path


def _area(band: Band, along: Scale, up: Scale, colors: Sequence[str]) -> str:
    """The path around a band."""
    positions = BOX * along.fractions(band.x)
    edges = [BOX - BOX * up.fractions(edge) for edge in (band.low, band.high)]
    around = [*zip(positions, edges[0], strict=True)]
    around += reversed([*zip(positions, edges[1], strict=True)])
    line = "L".join(f"{x:.1f},{y:.1f}" for x, y in around)
    style = color_of(band.number, colors)
    title = f"<title>{escape(band.label)}</title>"
    return f'<path class="band" style="{style}" d="M{line}z">{title}</path>'


def _symbol(mark: Mark, along: Scale, colors: Sequence[str], runs: int) -> str:
    """A mark at the upper edge of the frame, with a line down, except for bad steps, which may be
    many; of several runs in their colours."""
    x = f"{100 * along.fractions(np.array(mark.x)):.2f}%"
    style = f' style="{color_of(mark.number, colors)}"' if runs > 1 else ""
    kind = mark.kind.replace(" ", "-")
    line = "" if mark.kind == "bad steps" else f'<line x1="{x}" x2="{x}" y2="100%"/>'
    return (
        f'<g class="mark {kind}"{style}><title>{escape(mark.text)}</title>{line}'
        f'<svg x="{x}" y="-6"><path d="{SYMBOLS[mark.kind]}"/></svg></g>'
    )


def symbol_icon(kind: str) -> str:
    """The symbol of a kind of marks, for a legend."""
    name = kind.replace(" ", "-")
    box = 'viewBox="-6 -1 12 14" width="12" height="14"'
    return f'<svg class="mark {name}" {box} aria-hidden="true"><path d="{SYMBOLS[kind]}"/></svg>'


def _data(
    chart: Chart, curves: Sequence[Curve], along: Scale, up: Scale, colors: Sequence[str]
) -> str:
    """The points of a chart for the page's script, as JSON in which no tag begins."""
    content = {
        "axis": chart.axis,
        "x": [along.low, along.high],
        "y": [up.low, up.high],
        "log": up.is_log,
        "log_x": along.is_log,
        "curves": [
            {
                "label": curve.label,
                "color": colors[curve.number % len(colors)],
                "x": [*map(_whole, curve.points[0].tolist())],
                "y": [_rounded(value) for value in curve.points[1].tolist()],
            }
            for curve in curves
        ],
    }
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _whole(value: float) -> float:
    """The number without a decimal point if it has no decimals."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def _rounded(value: float) -> float | None:
    """Six digits of a number; None if it is not finite."""
    return _whole(float(f"{value:.6g}")) if math.isfinite(value) else None
