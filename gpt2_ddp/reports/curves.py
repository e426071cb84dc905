"""The charts of a page: which curves of which runs are in them.

Runs that differ only in their seed have the same colour. Nothing is smoothed.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from gpt2_ddp.records.rows import field_of, is_own
from gpt2_ddp.reports.chart import Band, Chart, Curve, Mark, Style, color_of, dashes_of, symbol_icon
from gpt2_ddp.reports.expected import band
from gpt2_ddp.reports.groups import Group, group_runs
from gpt2_ddp.reports.history import happenings
from gpt2_ddp.reports.picture import COLORS, PANELS, Along, axis_of
from gpt2_ddp.reports.runs import RunRecord, Series, series_of, share_tokens

POINTS = 7000
"""About as many points are on a page, of all curves: some 25 bytes each."""
MOST_CHARTS = 16
"""Most charts beside the loss; a class of one's own may have any number of numbers."""
NAME = 72
"""Most characters of a run's name."""
LABEL = 120
"""Most characters of a group in the legend."""
EXPECTED = "validation, by the ladder on this text (90 %)"
"""Name of a band."""
MOST_TEXTS = 8
"""Most happenings of a kind that the page lists."""


class Curves:
    """The charts of runs, along steps or tokens.

    Attributes:
        groups: the runs that share a colour.
        numbers: of the colour of each run.
    """

    def __init__(self, runs: Sequence[RunRecord], groups: Sequence[Group] | None = None):
        self.runs = runs
        self.groups = groups or group_runs(runs)
        self.numbers = {
            run: number for number, group in enumerate(self.groups) for run in group.runs
        }
        self.along: Along
        self.along, self.axis = axis_of(runs)

    def html(self) -> Iterator[str]:
        """The loss, what happened to the runs, a legend, and the smaller charts."""
        loss = self.loss()
        others = self.others()
        # the curves of the loss have twice as many points as the others
        shares = 2 * len(loss.curves) + sum(len(chart.curves) for chart in others)
        columns = max(POINTS // max(shares, 1) // 4, 1)
        yield loss.html(COLORS, 2 * columns, large=True)
        yield from self._legend(loss)
        yield from self._happened()
        if others:
            yield '<div class="charts">'
            yield from (chart.html(COLORS, columns) for chart in others)
            yield "</div>"

    def loss(self) -> Chart:
        """The loss while training and in evaluations; of runs whose tokenizers differ, bits per
        byte of the evaluations."""
        unit = " or ".join(dict.fromkeys(run.unit for run in self.runs))
        marks = [mark for run in self.runs for mark in self._marks(run)]
        if not share_tokens(self.runs):
            bits = self._curves("val_bits_per_byte", "points")
            note = "bits per byte, log scale; the tokenizers differ"
            return Chart("Validation loss", bits, self.axis, note, is_log=True, marks=marks)
        curves = [
            Curve(self._label(run, f"undone by rollback {number}"), points, color, "undone")
            for run, color in self.numbers.items()
            for number, points in enumerate(self._undone(run), 1)
        ]
        curves += self._curves("loss_mean", "faint", "train")
        curves += self._curves("val_loss", "points", "validation")
        note = "nats per token, log scale" if unit == "tokens" else "log scale"
        return Chart(
            "Loss", curves, self.axis, note, is_log=True, marks=marks, bands=[*self._bands()]
        )

    def others(self) -> list[Chart]:
        """A chart for each other metric of which a run has numbers."""
        unit = " or ".join(dict.fromkeys(run.unit for run in self.runs))
        titles = {name: title.format(unit=unit) for name, title in PANELS.items()}
        names = dict.fromkeys(name for run in self.runs for name in run.fields)
        scores = [name for name in names if is_own(name) or field_of(name).kind == "counted"]
        titles |= {name: truncated(name) for name in scores}
        charts: list[Chart] = []
        for name, title in titles.items():
            curves = self._curves(name, "line")
            if curves and len(charts) < MOST_CHARTS:
                label, _, note = title.partition(" (")
                is_log = name == "grad_norm"
                chart = Chart(
                    label, curves, self.axis, note.removesuffix(")"), is_log, from_zero=not is_log
                )
                charts.append(chart)
        return charts

    def _curves(self, metric: str, style: Style, what: str = "") -> list[Curve]:
        """A metric of each run that has it."""
        found: list[Curve] = []
        for run, number in self.numbers.items():
            steps, values = run.series(metric)
            if len(steps):
                points = self.along(run, steps), values / field_of(metric).scale
                found.append(Curve(self._label(run, what), points, number, style))
        return found

    def _bands(self) -> Iterator[Band]:
        """What was expected of a run that is alone on the page."""
        for run, number in self.numbers.items():
            expected = band(run) if len(self.runs) == 1 else None
            if expected:
                x = self.along(run, expected.steps)
                yield Band(EXPECTED, x, expected.low, expected.high, number)

    def _undone(self, run: RunRecord) -> Iterator[Series]:
        """The loss in rows that each rollback has undone."""
        for rows in run.undone:
            steps, values = series_of(rows, "loss_mean")
            if len(steps):
                yield self.along(run, steps), values

    def _label(self, run: RunRecord, what: str) -> str:
        if len(self.runs) == 1:
            return what
        return f"{truncated(run.name)}, {what}" if what else truncated(run.name)

    def _marks(self, run: RunRecord) -> Iterator[Mark]:
        for happening in happenings(run):
            (x,) = self.along(run, np.array([float(happening.step)]))
            text = self._named(run, f"{happening.kind} {happening.text}")
            yield Mark(happening.kind, float(x), text, self.numbers[run])

    def _named(self, run: RunRecord, text: str) -> str:
        return text if len(self.runs) == 1 else f"{truncated(run.name)}: {text}"

    def _happened(self) -> Iterator[str]:
        """A line for each kind of marks."""
        texts: dict[str, list[str]] = {}
        for run in self.runs:
            for happening in happenings(run):
                texts.setdefault(happening.kind, []).append(self._named(run, happening.text))
        if texts:
            yield '<ul class="happened">'
        for kind, of_kind in texts.items():
            shown = of_kind[:MOST_TEXTS]
            if len(of_kind) > len(shown):
                shown.append(f"{len(of_kind) - len(shown)} more")
            count = f" {len(of_kind)} times" if len(of_kind) > 1 else ""
            line = f"<b>{kind}{count}</b>: {escape('; '.join(shown))}"
            yield f"<li>{symbol_icon(kind)}<span>{line}</span></li>"
        if texts:
            yield "</ul>"

    def _legend(self, loss: Chart) -> Iterator[str]:
        """What the colours are, and the styles of lines."""
        items: list[str] = []
        if len(self.groups) > 1:
            for number, group in enumerate(self.groups):
                dashes = dashes_of(number, COLORS)
                line = f'<line x2="26" y1="6" y2="6"{dashes}/>'
                items.append(_item(line, group.label(LABEL), color_of(number, COLORS)))
        styles: Mapping[Style, tuple[str, str]] = {
            "faint": ("train", '<line class="faint" x2="26" y1="6" y2="6"/>'),
            "points": (
                "validation",
                '<line x2="26" y1="6" y2="6"/><circle cx="13" cy="6" r="4"/>',
            ),
            "undone": ("undone by a rollback", '<line class="undone" x2="26" y1="6" y2="6"/>'),
        }
        color = color_of(0, COLORS) if len(self.groups) == 1 else "--c:var(--soft)"
        drawn = {curve.style for curve in loss.curves}
        items += [_item(line, name, color) for key, (name, line) in styles.items() if key in drawn]
        if loss.bands:
            items.append(_item('<rect class="band" width="26" height="12"/>', EXPECTED, color))
        yield f'<ul class="legend">{"".join(items)}</ul>'


def _item(line: str, name: str, style: str) -> str:
    """An item of the legend."""
    icon = f'<svg width="26" height="12" style="{style}" aria-hidden="true">{line}</svg>'
    return f"<li>{icon}{escape(name)}</li>"


def truncated(name: str) -> str:
    """A name on one line."""
    return name if len(name) <= NAME else f"{name[: NAME // 2]} … {name[-NAME // 2 :]}"
