"""report.html and report.png of one or several runs.

    read_runs (runs.py) ─┬─▶ headline, history, settings ─▶ texts
                         ├─▶ curves ─▶ chart.py ─▶ SVG
                         ├─▶ group_runs (groups.py) ─▶ tables
                         └─▶ draw (picture.py) ─▶ report.png

The page is one HTML document that links to nothing and fetches nothing. It runs one script, its
own: a browser refuses all others. Every text of a run is escaped, as it may be a stranger's.
"""

import json
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from html import escape
from itertools import groupby
from pathlib import Path

from gpt2_ddp.config.base import shown
from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.errors import truncate
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder
from gpt2_ddp.project import command_for
from gpt2_ddp.records.rows import Row
from gpt2_ddp.remote.copies import with_local_runs
from gpt2_ddp.reports import curves
from gpt2_ddp.reports.groups import content, differing, group_runs
from gpt2_ddp.reports.headline import ALIVE, Fact, facts, next_step, shown_path
from gpt2_ddp.reports.picture import as_png, draw
from gpt2_ddp.reports.runs import RunRecord, is_finite, read_runs
from gpt2_ddp.reports.settings import changed_settings
from gpt2_ddp.reports.several import groups_of, overview, runs_of
from gpt2_ddp.reports.values import UNKNOWN, number_text, plain_text, value_text

ORIGIN = ("command", "commit", "hardware", "processes", "device", "versions")  # of the newest start
EXPLAIN = f"Why do two of these runs differ? {command_for('explain')} A B"
SAMPLED_STEPS = 12
"""Newest steps of a run whose samples are shown."""
SAMPLES = 8
"""Samples shown of each step."""
SAMPLE_LENGTH = 3000
"""Characters of all runs' samples of a step."""
SAMPLES_SIZE = 60_000
"""Bytes of all samples on a page."""
RELOADED = 30
"""Seconds after which the page of a running run reloads itself."""


def report(config: ReportConfig) -> int:
    """The command: writes the report and prints its path; with `every`, again and again until the
    runs have ended."""
    path = None
    while True:
        # again each time: a run at a URL has new rows
        runs = [Path(run) for run in with_local_runs(config).runs]
        # a run keeps its own report
        name = "comparison" if len(runs) > 1 and not config.output else "report"
        loaded = read_runs(runs)
        written = write_records(loaded, Path(config.output or runs[0]), name, config.every)
        if path is None:
            print(written, flush=True)
        path = written
        if config.every is None or not any(run.state in ALIVE for run in loaded):
            return 0
        time.sleep(config.every)


def write_report(runs: list[Path], output: Path, name: str = "report") -> Path:
    """Writes NAME.html and NAME.png of run folders into the folder `output`, each complete or not
    at all. If `output` is FOLDER/NAME.json, writes that file, too, with the groups of runs. Returns
    the path of NAME.html. Missing and torn rows and files are omitted, with a note on the page.

    Raises: UserError if a folder has no metrics to show, or `output` cannot be written.
    """
    return write_records(read_runs(runs), output, name)


def write_records(
    runs: Sequence[RunRecord], output: Path, name: str, reload_seconds: float | None = None
) -> Path:
    """`write_report` of runs that were read. The page of a running one reloads itself after
    `reload_seconds`."""
    png = as_png(draw(runs))
    html = page(runs, reload_seconds or RELOADED)
    files = {"png": png, "html": html.encode(errors="replace")}
    if output.suffix == ".json" and not output.is_dir():
        groups = {"groups": content(group_runs(runs))}
        text = json.dumps(groups, ensure_ascii=False, default=str, indent=2)
        files["json"] = f"{text}\n".encode(errors="replace")  # a text may hold half a character
        name = output.stem
        output = output.parent
    make_output_folder(output)
    for kind, data in files.items():
        write_atomically(output / f"{name}.{kind}", [data])
    return output / f"{name}.html"


def page(runs: Sequence[RunRecord], reload_seconds: float = RELOADED) -> str:
    """The document, from page.html: the content of the runs' files, escaped."""
    is_alive = any(run.state in ALIVE for run in runs)
    body = [*_beginning(runs, is_alive, reload_seconds), *curves.Curves(runs).html()]
    groups = group_runs(runs)
    settings = differing(runs)
    if len(groups) < len(runs):
        body += ["<h2>Groups of runs that differ only in their seed</h2>", groups_of(groups)]
    if len(runs) > 1:
        body += ["<h2>Runs</h2>", runs_of(runs, settings), f"<p>{escape(EXPLAIN)}</p>"]
    newest = {run.name: _newest(run, settings) for run in runs}
    body += [_folded("All newest values", _by_run(newest))]
    body += _all_samples(runs)
    body += _settings(runs)
    notes = [escape(f"{run.name}: {note}") for run in runs for note in run.notes]
    if notes:
        body += ["<h2>Not in this report</h2>", *(f"<p>{note}</p>" for note in notes)]
    reload = f'<meta http-equiv="refresh" content="{reload_seconds:g}">' if is_alive else ""
    return document(f"Training report: {', '.join(run.name for run in runs)}", body, reload)


def document(title: str, body: Iterable[str], reload: str = "") -> str:
    """A document from page.html, which links to nothing. `body`: HTML, of which all texts are
    escaped. `reload`: a tag of the head."""
    script = _file("page.js")
    texts = {
        "title": escape(truncate(title)),
        "reload": reload,
        "hash": b64encode(sha256(script.encode()).digest()).decode(),
        "style": _file("page.css"),
        "script": script,
        "body": "\n".join(body),
    }
    return _filled(_file("page.html"), texts)


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _filled(frame: str, texts: Mapping[str, str]) -> str:
    """The frame with a text in place of each `{{NAME}}`; a text may have such words, too."""
    first, *parts = frame.split("{{")
    pairs = [part.partition("}}") for part in parts]
    return first + "".join(texts[name] + rest for name, _, rest in pairs)


def _beginning(runs: Sequence[RunRecord], is_alive: bool, reload_seconds: float) -> Iterable[str]:
    """Name and state, facts, the next step; of a running run, the age of its newest row."""
    if len(runs) > 1:
        yield f"<header><h1>{len(runs)} runs</h1></header>"
        yield _facts(overview(group_runs(runs)))
    else:
        (run,) = runs
        reason = run.status.get("reason")
        state = f'<span class="state {_state_class(run)}">{escape(run.state)}</span>'
        yield f"<header><h1>{escape(truncate(run.name))}</h1>{state}</header>"
        if reason:
            label = "Now" if is_alive else "Reason"
            yield f'<p class="reason">{label}: {escape(plain_text(reason))}</p>'
        yield _facts(facts(run))
        text, command = next_step(run)
        code = f" <code>{escape(plain_text(command))}</code>" if command else ""
        yield f'<p class="next">{escape(text)}{code}</p>'
    if is_alive:
        newest = datetime.fromtimestamp(max(run.changed for run in runs), UTC)
        written = f"{newest:%Y-%m-%d %H:%M:%S} UTC"
        stamp = f'<time datetime="{newest:%Y-%m-%dT%H:%M:%SZ}">{written}</time>'
        yield (
            f'<p class="age">Last row: {stamp}. This page reloads itself every'
            f" {reload_seconds:g} s.</p>"
        )


def _state_class(run: RunRecord) -> str:
    return {"completed": "good", "running": "good", "starting": "good", "stopped": "soft"}.get(
        run.state, "bad"
    )


def _facts(found: Iterable[Fact]) -> str:
    """Facts as a list, escaped."""
    items = [f"<li><b>{escape(value)}</b> {escape(label)}</li>" for value, label in found]
    return f'<ul class="facts">{"".join(items)}</ul>'


def _folded(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _newest(run: RunRecord, settings: Iterable[str]) -> dict[str, str]:
    """A run's state, the `settings`, and the newest value of each field of the rows."""
    reason = run.status.get("reason")
    end = run.rows[-1]["step"]
    best = run.best()
    cells = {"state": f"{run.state}: {reason}" if reason else run.state}
    cells |= {name: plain_text(run.config[name]) for name in settings if name in run.config}
    for name in run.fields:
        row = run.last(name)
        if row:
            cells[name] = value_text(name, row[name])
            if row["step"] != end:
                cells[name] += f" at step {row['step']:,}"
    if best:
        cells["best val_loss"] = f"{number_text(best['val_loss'])} at step {best['step']:,}"
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


def _all_samples(runs: Sequence[RunRecord]) -> Iterable[str]:
    """The samples of the runs that have some; of several runs folded."""
    size = SAMPLES_SIZE // len(runs)
    length = SAMPLE_LENGTH // len(runs)
    samples = {run.name: "\n".join(_samples(run, length, size)) for run in runs if run.samples}
    if len(runs) > 1 and samples:
        yield _folded("Samples", "\n".join(_folded(name, text) for name, text in samples.items()))
    elif samples:
        yield f"<h2>Samples of {escape(runs[0].name)}</h2>"
        yield samples[runs[0].name]


def _samples(run: RunRecord, length: int, size: int) -> list[str]:
    """A run's samples, step by step, those of the last step open; of at most `size` bytes."""
    steps = [(step, [*rows]) for step, rows in groupby(run.samples, key=lambda row: row["step"])]
    parts: list[str] = []
    newest_first = steps[: -SAMPLED_STEPS - 1 : -1]
    for number, (step, rows) in enumerate(newest_first):
        tag = "details" if number else "details open"
        texts = [f"<{tag}><summary>step {step:,}</summary>"]
        for row in rows[:SAMPLES]:
            prompt = plain_text(row.get("prompt", ""))
            text = escape(row["text"][:length])
            texts.append(f"<b>{escape(prompt)}</b><pre>{text}</pre>")
        texts.append("</details>")
        size -= sum(len(text.encode(errors="replace")) for text in texts)
        if size < 0:
            parts.append("<p>Older samples are in metrics.jsonl.</p>")
            break
        parts += texts
    return parts


def _settings(runs: Sequence[RunRecord]) -> Iterable[str]:
    """What differs from presets and defaults, and then all of each run, folded."""
    if len(runs) == 1:
        files, changes = changed_settings(runs[0])
        preset = f"{', '.join(files)} and the defaults" if files else "the defaults"
        if changes:
            yield f"<h2>Settings that differ from {escape(preset)}</h2>"
            yield '<div class="scroll"><table class="across settings"><thead><tr><th>setting</th>'
            yield "<th>value</th><th>preset</th><th>default</th></tr></thead><tbody>"
            for change in changes:
                values = (change.value, change.preset, change.default)
                cells = "".join(f"<td>{escape(plain_text(shown(value)))}</td>" for value in values)
                weight = "" if change.is_presets else ' class="own"'
                yield f"<tr{weight}><td>{escape(change.name)}</td>{cells}</tr>"
            yield "</tbody></table></div>"
    origins = {run.name: _origin(run) for run in runs}
    yield _folded("Start and all settings", _by_run(origins))


def _origin(run: RunRecord) -> dict[str, str]:
    """A run's newest start, and all settings."""
    values = {name: run.start.get(name) for name in ORIGIN} | run.config
    folder = {"folder": shown_path(run.folder)}
    return folder | {name: plain_text(value) for name, value in values.items()}


def _by_run(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A table of a column for each run, of values by label; every cell is escaped. A value that all
    runs have is there once."""
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    lines = [f"<tr><th></th>{''.join(f'<th>{escape(name)}</th>' for name in columns)}</tr>"]
    for label in labels:
        values = [column.get(label, UNKNOWN) for column in columns.values()]
        if len(values) > 1 and len({*values}) == 1:
            cells = f'<td colspan="{len(values)}">{escape(values[0])}</td>'
        else:
            cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f"<tr><th>{escape(label)}</th>{cells}</tr>")
    return "\n".join(['<div class="scroll"><table>', *lines, "</table></div>"])
