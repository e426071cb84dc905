"""report.html and report.png of one or several runs: a table with a column for each run, and the
figure.

The page is one HTML document that links to nothing, fetches nothing and runs no script.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.errors import truncate
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder
from gpt2_ddp.records.rows import Row, field_of
from gpt2_ddp.reports.groups import content, describe, differing, group_runs
from gpt2_ddp.reports.picture import as_png, draw
from gpt2_ddp.reports.runs import RunRecord, is_finite, read_runs

UNKNOWN = "–"
ORIGIN = ("command", "commit", "hardware", "processes", "device", "versions")  # of the newest start
SAMPLED_STEPS = 12
"""Newest steps of a run whose samples are shown."""
SAMPLES = 8
"""Samples shown of each step."""
SAMPLE_LENGTH = 3000
"""Characters of all runs' samples of a step."""


def report(config: ReportConfig) -> int:
    """The command: writes the report and prints its path."""
    runs = [Path(run) for run in config.runs]
    # a run keeps its own report
    name = "comparison" if len(runs) > 1 and not config.output else "report"
    print(write_report(runs, Path(config.output or runs[0]), name))
    return 0


def write_report(runs: list[Path], output: Path, name: str = "report") -> Path:
    """Writes NAME.html and NAME.png of run folders into the folder `output`, each complete or not
    at all. If `output` is FOLDER/NAME.json, writes that file, too, with the groups of runs. Returns
    the path of NAME.html. Missing and torn rows and files are omitted, with a note on the page.

    Raises: UserError if a folder has no metrics to show, or `output` cannot be written.
    """
    loaded = read_runs(runs)
    png = as_png(draw(loaded))
    files = {"png": png, "html": page(loaded, png).encode(errors="replace")}
    if output.suffix == ".json" and not output.is_dir():
        groups = {"groups": content(group_runs(loaded))}
        text = json.dumps(groups, ensure_ascii=False, default=str, indent=2)
        files["json"] = f"{text}\n".encode(errors="replace")  # a text may hold half a character
        name = output.stem
        output = output.parent
    make_output_folder(output)
    for kind, data in files.items():
        write_atomically(output / f"{name}.{kind}", [data])
    return output / f"{name}.html"


def page(runs: Sequence[RunRecord], png: bytes) -> str:
    """The document, from page.html: the figure, and the content of the runs' files, escaped."""
    body = [f'<figure><img src="data:image/png;base64,{b64encode(png).decode()}"></figure>']
    groups = group_runs(runs)
    if len(groups) < len(runs):
        text = escape("\n".join(describe(groups)))
        body += ["<h2>Groups of runs that differ only in their seed</h2>", f"<pre>{text}</pre>"]
    settings = differing(runs)
    newest = {run.name: _newest(run, settings) for run in runs}
    body += ["<h2>Newest values</h2>", _by_run(newest)]
    for run in runs:
        body += _samples(run, SAMPLE_LENGTH // len(runs))
    origins = {run.name: _origin(run) for run in runs}
    body += ["<h2>Start and configuration</h2>", _by_run(origins)]
    notes = [escape(f"{run.name}: {note}") for run in runs for note in run.notes]
    if notes:
        body += ["<h2>Not in this report</h2>", *(f"<p>{note}</p>" for note in notes)]
    title = escape(truncate(f"Training report: {', '.join(run.name for run in runs)}"))
    frame = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return frame.replace("{title}", title).replace("{body}", "\n".join(body))


def _newest(run: RunRecord, settings: Iterable[str]) -> dict[str, str]:
    """A run's state, the `settings`, and the newest value of each field of the rows."""
    reason = run.status.get("reason")
    end = run.rows[-1]["step"]
    best = run.best()
    cells = {"state": f"{run.state}: {reason}" if reason else run.state}
    cells |= {name: _text(run.config[name]) for name in settings if name in run.config}
    for name in run.fields:
        row = run.last(name)
        if row:
            cells[name] = _value(name, row[name])
            if row["step"] != end:
                cells[name] += f" at step {row['step']:,}"
    if best:
        cells["best val_loss"] = f"{_number(best['val_loss'])} at step {best['step']:,}"
        cells |= _comparison(run, best)
    return cells


def _comparison(run: RunRecord, best: Row) -> dict[str, str]:
    """The bits per byte of a run's best row, beside those of compressors on the same text."""
    bits = best.get("val_bits_per_byte")
    if not run.compressors or not is_finite(bits):
        return {}
    scores = {"best bits per byte": bits}
    scores |= {f"{name}, bits per byte": score for name, score in run.compressors.items()}
    return {label: f"{score:.3f}" for label, score in scores.items()}


def _origin(run: RunRecord) -> dict[str, str]:
    """A run's newest start, and all settings."""
    values = {name: run.start.get(name) for name in ORIGIN} | run.config
    return {name: _text(value) for name, value in values.items()}


def _samples(run: RunRecord, length: int) -> list[str]:
    """A run's samples, step by step, those of the last step open."""
    steps = [(step, [*rows]) for step, rows in groupby(run.samples, key=lambda row: row["step"])]
    parts = [f"<h2>Samples of {escape(run.name)}</h2>"] if steps else []
    newest_first = steps[: -SAMPLED_STEPS - 1 : -1]
    for number, (step, rows) in enumerate(newest_first):
        tag = "details" if number else "details open"
        parts.append(f"<{tag}><summary>step {step:,}</summary>")
        for row in rows[:SAMPLES]:
            text = row["text"][:length]
            parts.append(f"<b>{escape(str(row.get('prompt', '')))}</b><pre>{escape(text)}</pre>")
        parts.append("</details>")
    return parts


def _by_run(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A table of a column for each run, of values by label; every cell is escaped."""
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    lines = [f"<tr><th></th>{''.join(f'<th>{escape(name)}</th>' for name in columns)}</tr>"]
    for label in labels:
        cells = "".join(
            f"<td>{escape(column.get(label, UNKNOWN))}</td>" for column in columns.values()
        )
        lines.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return "\n".join(["<div><table>", *lines, "</table></div>"])


def _value(name: str, value: object) -> str:
    """The value of a field, in its unit."""
    field = field_of(name)
    if field.unit and is_finite(value):
        return f"{_number(value / field.scale)} {field.unit}"
    return _number(value)


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.5g}"
    if type(value) is int:
        return f"{value:,}"
    return _text(value)


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return UNKNOWN if value is None else str(value)
