"""What the DDP lab has measured: a row per experiment, as markdown, as JSON and as a page."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

import gpt2_ddp.reports
from gpt2_ddp.lab.experiment import Experiment
from gpt2_ddp.lab.lessons import ROOMS, lesson

STYLE = Path(gpt2_ddp.reports.__file__).with_name("page.css")
OWN_STYLE = """
body { max-width: 64rem }
h3 { margin-top: 2rem }
dt { float: left; clear: left; color: var(--soft) }
dd { margin: 0 0 .3rem 6rem; overflow-wrap: anywhere }
p, dl { max-width: 56rem }
.fails { color: #c0392b }
"""
"""What the lab's page has besides a report's."""


@dataclass(frozen=True)
class Row:
    """An experiment's outcome."""

    experiment: Experiment
    numbers: Mapping[str, float | str]
    holds: bool
    measured: str


def as_markdown(rows: list[Row]) -> str:
    """The table that is printed."""
    lines = ["| claim | wrong way | right way | measured |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (row.experiment.claim, row.experiment.wrong, row.experiment.right, row.measured)
        lines.append(
            "| " + " | ".join(" ".join(cell.split()) for cell in cells) + ("" if row.holds else " FAILS") + " |"
        )
    return "\n".join(lines)


def as_json(rows: list[Row]) -> str:
    """Every number measured, by experiment."""
    found = {row.experiment.name: {"holds": row.holds, "measured": row.measured, **row.numbers} for row in rows}
    return json.dumps(found, indent=1)


def as_page(rows: list[Row], seed: int) -> str:
    """One HTML document without a script, that links to nothing and fetches nothing: each lesson with its code."""
    holding = sum(row.holds for row in rows)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
            '<meta name="viewport" content="width=device-width">\n<title>The DDP lab</title>',
            f"<style>{STYLE.read_text(encoding='utf-8')}{OWN_STYLE}</style>\n</head>\n<body>\n<h1>The DDP lab</h1>",
            f"<p>What people get wrong in DDP, measured on two processes with seed {seed}: {holding} of {len(rows)}"
            " claims hold. The text beside them tells of a run with seed 0.</p>",
            *_sections(rows),
            "</body>\n</html>",
        ]
    )


def _sections(rows: list[Row]) -> Iterator[str]:
    for title, experiments in ROOMS.items():
        ours = [row for row in rows if row.experiment in experiments]
        if ours:
            yield f"<h2>{title}</h2>"
        for row in ours:
            experiment = row.experiment
            yield f'<h3 id="{experiment.name}">{_inline(experiment.claim)}</h3>'
            yield f"<p>{_inline(lesson(experiment))}</p>"
            cells = {"wrong": experiment.wrong, "right": experiment.right, "measured": row.measured}
            yield "<dl>"
            yield "".join(f"<dt>{label}</dt><dd>{_inline(cell)}</dd>" for label, cell in cells.items())
            yield f"</dl>{'' if row.holds else '<p class=fails>The claim does not hold here.</p>'}"
            yield f"<details><summary>{experiment.name}: the code</summary>"
            yield f"<pre>{escape(experiment.code)}</pre></details>"


def _inline(text: str) -> str:
    """HTML of a line of markdown: `code` and *emphasis*."""
    return re.sub(r"\*(\S.*?)\*", r"<em>\1</em>", re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))
