"""The page of a ladder: its answers, the fitted law with its intervals, its runs' curves."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from gpt2_ddp.config.own_text import describe_shape
from gpt2_ddp.evaluation.ladder import Ladder
from gpt2_ddp.evaluation.scaling import BEYOND
from gpt2_ddp.files import write_atomically
from gpt2_ddp.reports.chart import Band, Chart, Curve
from gpt2_ddp.reports.curves import Curves
from gpt2_ddp.reports.groups import Group
from gpt2_ddp.reports.picture import COLORS
from gpt2_ddp.reports.report import document
from gpt2_ddp.reports.runs import RunRecord
from gpt2_ddp.reports.tables import Table
from gpt2_ddp.reports.values import count_text, duration_text

POINTS = 41
"""Points of a curve of the law."""


def write_page(
    file: Path, folder: Path, ladder: Ladder, lines: Sequence[str], runs: Sequence[RunRecord]
) -> Path:
    """Writes the page, complete or not at all, and returns its path. Raises: UserError."""
    text = "\n".join(lines)
    body = [f"<header><h1>Ladder of {escape(str(folder))}</h1></header>"]
    body.append(f'<pre class="copy wrapped">{escape(text)}</pre>')
    body.append(law_chart(ladder).html(COLORS, 1000, large=True))
    body.append(_legend(ladder))
    body += ["<h2>Runs</h2>", runs_table(ladder), "<h2>Their curves</h2>"]
    body += [*Curves(runs, groups_by_size(ladder, runs)).html()]
    html = document(f"Ladder of {folder}", body)
    write_atomically(file, [html.encode(errors="replace")])
    return file


def groups_by_size(ladder: Ladder, runs: Sequence[RunRecord]) -> list[Group]:
    """The runs of each size, in the order of the law's colours."""
    sizes = {run.name: (run.layers, run.width) for run in ladder.rungs}
    groups: list[Group] = []
    for size in _sizes(ladder):
        of_size = [run for run in runs if sizes.get(run.folder.name) == size]
        groups.append(Group(describe_shape(*size), {}, of_size))
    return groups


def law_chart(ladder: Ladder) -> Chart:
    """Bits per byte by tokens: for each size the runs, the law, and where 90 % of runs should end,
    as far as the ladder claims."""
    curves: list[Curve] = []
    bands: list[Band] = []
    begin = min(run.tokens for run in ladder.rungs)
    tokens = np.geomspace(begin, 0.999 * BEYOND * ladder.law.longest, POINTS)
    for number, (layers, width) in enumerate(_sizes(ladder)):
        size = f"{layers}x{width}"
        parameters = ladder.parameters_of(layers, width)
        intervals = [ladder.law.predict(parameters, each, ladder.text_tokens) for each in tokens]
        law = np.array([interval.bits for interval in intervals])
        low = np.array([interval.low for interval in intervals])
        high = np.array([interval.high for interval in intervals])
        bands.append(Band(f"{size}, 90 %", tokens, low, high, number))
        curves.append(Curve(f"{size}, law", (tokens, law), number, "faint"))
        measured = sorted(
            (run.tokens, run.bits)
            for run in ladder.rungs
            if (run.layers, run.width) == (layers, width)
        )
        x, y = np.array(measured, np.float64).T
        curves.append(Curve(f"{size}, measured", (x, y), number, "dots"))
    note = "bits per byte by tokens trained on, log scales"
    return Chart("Loss", curves, "tokens", note, is_log=True, bands=bands, is_log_x=True)


def _sizes(ladder: Ladder) -> list[tuple[int, int]]:
    """Shapes of the runs, small ones first."""
    shapes = {(run.parameters, run.layers, run.width) for run in ladder.rungs}
    return [(layers, width) for _, layers, width in sorted(shapes)]


def _legend(ladder: Ladder) -> str:
    """The colour of each size, and what is drawn in it."""
    items = [
        f'<li><svg width="26" height="12" style="--c:{COLORS[number % len(COLORS)]}"'
        ' aria-hidden="true"><rect class="band" width="26" height="12"/><line x2="26" y1="6"'
        f' y2="6"/></svg>{describe_shape(layers, width)}</li>'
        for number, (layers, width) in enumerate(_sizes(ladder))
    ]
    items.append("<li>dots: runs; line: the law; area: where 90 % of runs should end</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def runs_table(ladder: Ladder) -> str:
    """The runs beside the law."""
    header = [
        "run",
        "size",
        "parameters",
        "tokens",
        "passes",
        "time",
        "bits per byte",
        "law",
        "off",
    ]
    rows: list[list[str]] = []
    for run in ladder.rungs:
        by_law = ladder.law.bits(run.parameters, run.tokens, ladder.text_tokens)
        rows.append(
            [
                run.name,
                f"{run.layers}x{run.width}",
                count_text(run.parameters),
                count_text(run.tokens),
                f"{run.tokens / ladder.text_tokens:.2f}",
                duration_text(run.tokens * run.seconds_per_token),
                f"{run.bits:.4f}",
                f"{by_law:.4f}",
                f"{run.bits / by_law - 1:+.2%}",
            ]
        )
    return Table(header, rows).html()
