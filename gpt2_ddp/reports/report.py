"""report.html and report.png of one or several runs.

The page is one HTML document that links to nothing and fetches nothing.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from gpt2_ddp.checkpoint.metrics import duration
from gpt2_ddp.checkpoint.run_files import is_own
from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder
from gpt2_ddp.reports.groups import Group, content, table
from gpt2_ddp.reports.picture import Picture, as_png, draw, share_batch
from gpt2_ddp.reports.runs import AXES, Row, RunRecord, read_runs

UNKNOWN = "–"
NAMES = ("run_name", "output_dir")  # settings that differ between any two runs, without meaning
SAMPLED_STEPS, SAMPLES, SAMPLE_LENGTH, ALL_SAMPLES = 12, 8, 3000, 300_000
"""Steps of a run whose samples are shown, samples shown of each, characters of each, and of all of them."""
MATRIX = 20  # most classes for a whole confusion matrix
LISTED = 1000  # most classes in the table: those with the lowest accuracy
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")


def report(config: ReportConfig) -> int:
    """The command: writes the report and prints its path."""
    if not config.runs:
        raise UserError("runs", "[]", "name at least one run folder, like runs/stdlib")
    runs = [Path(run) for run in config.runs]
    name = "comparison" if len(runs) > 1 and not config.output else "report"  # a run keeps its own report
    print(write_report(runs, Path(config.output or runs[0]), config.axis, name))
    return 0


def write_report(runs: list[Path], output: Path, axis: str = "auto", name: str = "report") -> Path:
    """Writes NAME.html and NAME.png of run folders into the folder `output`, each complete or not at all. If `output`
    is FOLDER/NAME.json, writes that file, too, with the groups of runs. Returns the path of NAME.html. Missing and torn
    rows and files are omitted, with a note on the page. Raises: UserError if a folder has no metrics to show, or none
    along `axis`, or `output` cannot be written."""
    loaded = read_runs(runs)
    picture = draw(loaded, choose_axis(loaded, axis))
    html, png = page(loaded, picture), as_png(picture.figure)
    if is_json := output.suffix == ".json" and not output.is_dir():
        output, name = output.parent, output.stem
    make_output_folder(output)
    write_atomically(output / f"{name}.png", png)
    write_atomically(output / f"{name}.html", html.encode(errors="replace"))  # a sample may hold half a character
    if is_json:
        statistics = json.dumps({"groups": content(picture.groups)}, ensure_ascii=False, allow_nan=False, indent=2)
        write_atomically(output / f"{name}.json", f"{statistics}\n".encode(errors="replace"))
    return output / f"{name}.html"


def choose_axis(runs: list[RunRecord], axis: str) -> str:
    """The axis that `ReportConfig.axis` selects. Raises: UserError if a run lacks it."""
    lacking = {each: [run.name for run in runs if run.along(each, np.zeros(1)) is None] for each in AXES}
    if axis == "auto":
        axis = "tokens" if not lacking["tokens"] and not share_batch(runs) else "steps"
    if lacking[axis]:
        hint = f"the rows of {', '.join(lacking[axis])} lack it; choose another axis, or omit that run"
        raise UserError("axis", axis, hint)
    return axis


def page(runs: Sequence[RunRecord], picture: Picture) -> str:
    """The document, from page.html, page.css and page.js: the picture and the content of the runs' files, escaped. Only
    page.js runs in it."""
    names = [run.name for run in runs]
    legend = [f'<li style="--color: {color}">{escape(name)}</li>' for color, name in picture.legend]
    body = ["<h2>Summary</h2>", _by_run({run.name: _summary(run) for run in runs})]
    if any(len(group.runs) > 1 for group in picture.groups):
        body += ["<h2>Groups of runs that differ only in their seed</h2>", _groups(picture.groups)]
    body.append("<h2>Curves</h2>")
    body += ['<ul class="legend">', *legend, "</ul>"] if legend else []
    body += ['<section class="beside">', f"<figure>{picture.svg()}</figure>", *_samples(runs), "</section>"]
    if len(runs) > 1:
        settings = {run.name: run.config for run in runs if run.config}
        body += ["<h2>What differs in the configurations</h2>", _differences(settings)]
    if evaluated := {run.name: _evaluation(run) for run in runs if run.last("val_loss")}:
        body += ["<h2>Last evaluation</h2>", _by_run(evaluated)]
    for run in runs:
        body += _classes(run)
    body += ["<h2>Started with</h2>", _by_run({run.name: _origin(run) for run in runs})]
    configurations = {run.name: {name: _text(value) for name, value in run.config.items()} for run in runs}
    body += ["<details><summary>Configuration</summary>", _by_run(configurations), "</details>"]
    if notes := [f"<li>{escape(f'{run.name}: {note}')}</li>" for run in runs for note in run.notes]:
        body += ["<h2>Not in this report</h2>", "<ul>", *notes, "</ul>"]
    title = escape(f"Training report: {', '.join(names) if len(runs) <= 3 else f'{len(runs)} runs'}")
    files = [Path(__file__).with_name(f"page.{kind}") for kind in ("html", "css", "js")]
    frame, style, script = (file.read_text(encoding="utf-8") for file in files)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    points = _points(picture).replace("<", "\\u003c")  # the element cannot end inside
    return frame.format(title=title, style=style, body="\n".join(body), points=points, script=script, digest=digest)


def _points(picture: Picture) -> str:
    """JSON for page.js, which shows the values under the pointer: the panels' boxes; for each line, x and y in the
    SVG's coordinates, steps and values. Values that are not finite are null."""
    boxes, lines = picture.panels(), []
    for trace in picture.traces:
        left, top, right, bottom = boxes[trace.panel]
        x, y = (trace.places() * (right - left, top - bottom) + (left, bottom)).round(1).T.tolist()
        values = [float(f"{value:.5g}") if np.isfinite(value) else None for value in trace.values.tolist()]
        place = {"run": trace.curve, "panel": list(boxes).index(trace.panel), "label": trace.label, "x": x, "y": y}
        lines.append({**place, "step": trace.steps.astype(int).tolist(), "value": values})
    named = zip(picture.names, picture.curves, strict=True)
    runs = [{"name": name, "color": curve.color} for name, curve in named]
    return json.dumps({"panels": list(boxes.values()), "runs": runs, "lines": lines}, separators=(",", ":"))


def _summary(run: RunRecord) -> dict[str, str]:
    state, reason, setting = run.status.get("state"), run.status.get("reason"), run.config.get
    digests = (row["order_digest"] for row in reversed(run.rows) if row.get("order_digest"))
    gpt = {
        "MFU (median)": _number(run.median("mfu"), ".1%"),
        "architecture": _text(setting("model.architecture", "gpt2")),
        " / ".join(SHAPE): " / ".join(_text(setting(f"model.{name}")) for name in SHAPE),
        "global batch (tokens)": _number(setting("train.global_batch_tokens")),
    }
    job = {"model": _text(setting("model.name")), "global batch (samples)": _number(setting("train.global_batch_size"))}
    return {
        "state": f"{state}: {reason}" if reason else _text(state),
        "steps": _number(run.rows[-1]["step"]),
        run.unit: _number(run.last("tokens").get("tokens")),
        "skipped steps": _number(run.last("skipped").get("skipped")),
        "last train loss (loss_mean)": _at_step(run.last("loss_mean"), "loss_mean"),
        "last validation loss": _validation(run, run.last("val_loss")),
        "best validation loss": _validation(run, run.best("val_loss")),
        f"{run.unit} per second (median)": _number(run.median("tokens_per_second"), ",.0f"),
        "time in training steps": duration(run.clock[1][-1]) if run.clock[1][-1] else UNKNOWN,
        "parameters": _number(run.parameters),
        **(gpt if run.unit == "tokens" else job),
        "learning rate": _text(setting("optim.lr")),
        "seed": _text(setting("seed")),
        "order digest": str(next(digests, UNKNOWN)),
    }


def _origin(run: RunRecord) -> dict[str, str]:
    """Command, code, hardware and versions of the newest start."""
    start, versions = run.start, run.start.get("versions")
    known = ", ".join(f"{name} {one}" for name, one in versions.items()) if isinstance(versions, dict) else None
    devices = f"{_text(start.get('processes'))} x {_text(start.get('device'))}"
    facts = {name: _text(start.get(name)) for name in ("command", "commit", "hardware")}
    return {**facts, "processes and device": devices, "versions": _text(known)}


def _evaluation(run: RunRecord) -> dict[str, str]:
    row, others = run.last("val_loss"), {name for row in run.rows if "val_loss" not in row for name in row}
    loss, begin = row["val_loss"], {"step": _number(row["step"]), f"{run.unit} seen": _number(row.get("tokens"))}
    own = {name: row[name] for name in row if is_own(name) and name not in {*others, run.unit}}
    if run.unit != "tokens":
        own |= {name.replace("val_", "validation "): row[name] for name in row if "val_" in name}
    scores = {name: _number(value, ".4f" if isinstance(value, float) else ",") for name, value in own.items()}
    if run.unit != "tokens":
        return begin | scores
    return begin | {
        "validation loss (nats per token)": _number(loss, ".4f"),
        "bits per token": _number(loss / math.log(2), ".4f"),
        "perplexity": _perplexity(loss),
        "bits per byte": _number(row.get("val_bits_per_byte"), ".4f"),
        "tokens scored": _number(row.get("val_tokens")),
        **{f"validation loss of {name[9:]}": _number(row[name], ".4f") for name in row if name.startswith("val_loss/")},
        **{f"tokens seen of {name[7:]}": _number(row[name]) for name in row if name.startswith("tokens/")},
        **scores,
    }


def _classes(run: RunRecord) -> list[str]:
    """The confusion of a classifier's classes, if evaluate.py has counted it."""
    if not run.classes:
        return []
    names, counts = run.classes.classes, run.classes.confusion
    shares = {k: row.get(k, 0) / sum(row.values()) if any(row.values()) else 1.0 for k, row in enumerate(counts)}
    listed = sorted(sorted(shares, key=lambda k: shares[k])[:LISTED])
    rows = []
    for number in listed:
        total = sum(counts[number].values())
        right = f"{shares[number]:.2%}" if total else UNKNOWN
        others = {other: count for other, count in counts[number].items() if other != number and count}
        most = max(others, key=others.__getitem__, default=None)  # the first of equals, as evaluate.py has it
        taken = UNKNOWN if most is None else f"{names[most]} ({others[most]:,})"
        rows.append([names[number], _number(total), right, taken])
    head = ["class", "test images", "right", "mostly taken for"]
    parts = [f"<h2>{escape(run.name)}: classes at step {_number(run.classes.step)}</h2>", _table(head, rows)]
    if len(names) <= MATRIX:
        parts.append(_matrix(names, counts))
    if len(names) > LISTED:
        parts.append(f"<p>The {LISTED:,} with the lowest accuracy, of {len(names):,}.</p>")
    if run.wrong:
        source = f"data:image/png;base64,{base64.b64encode(run.wrong).decode()}"
        parts.append(f'<img alt="misclassified test images" src="{source}">')
    return parts


def _matrix(names: Sequence[str], counts: Sequence[Mapping[int, int]]) -> str:
    """The confusion matrix: a row for each class, a column for each prediction. Shades are shares of the row."""
    heads = "".join(f"<th><span>{escape(name)}</span></th>" for name in names)
    lines = [f"<thead><tr><th>class \\ taken for</th>{heads}</tr></thead>"]
    for k, row in enumerate(counts):
        lines.append(f"<tr><th>{escape(names[k])}</th>")
        for other in range(len(names)):
            count, kind = row.get(other, 0), "right" if other == k else "wrong"
            share = count / max(sum(row.values()), 1)
            lines[-1] += f'<td class="{kind}" style="--share: {share:.0%}">{_number(count)}</td>'
        lines[-1] += "</tr>"
    return "\n".join(['<div><table class="matrix">', *lines, "</table></div>"])


def _differences(settings: Mapping[str, Row]) -> str:
    known = dict.fromkeys(name for config in settings.values() for name in config if name not in NAMES)
    rows = [[name, *(_text(config.get(name)) for config in settings.values())] for name in known]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return _table(["", *settings], rows) if rows else "<p>Nothing.</p>"


def _groups(groups: Sequence[Group]) -> str:
    """A table of the groups' means, and one of their differences to the first group and of remarks."""
    rows = table(groups)
    columns = [*rows[-1][1]]  # the first group has no differences
    below = [
        [row["group"], *(differences.get(column, UNKNOWN) for column in columns), "; ".join(remarks)]
        for row, differences, remarks in rows
    ]
    means = _table(rows[0][0], [[*row.values()] for row, _, _ in rows])
    others = _table(["difference to the first group", *columns, "remarks"], below)
    return f'<section class="groups">{means}\n{others}</section>'


def _samples(runs: Sequence[RunRecord]) -> list[str]:
    """The runs' samples, step by step, the last of each run open."""
    sampled = [run for run in runs if run.samples]
    length = min(SAMPLE_LENGTH, ALL_SAMPLES // (max(len(sampled), 1) * SAMPLED_STEPS * SAMPLES))
    parts = []
    for run in sampled:
        parts += [f"<h3>{escape(run.name)}</h3>"] if len(runs) > 1 else []
        steps = [(step, list(rows)) for step, rows in groupby(run.samples, key=lambda row: row["step"])]
        kept = sorted(set(np.linspace(len(steps) - 1, 0, SAMPLED_STEPS).round().astype(int)), reverse=True)
        for number in kept:
            step, rows = steps[number]
            parts.append(f"<details{' open' if number == kept[0] else ''}><summary>step {_number(step)}</summary>")
            for row in rows[:SAMPLES]:
                text = row["text"] if len(row["text"]) <= length else row["text"][:length] + " […]"
                prompt = f"<b>{escape(json.dumps(row['prompt'], ensure_ascii=False))}</b>" if row.get("prompt") else ""
                parts.append(f"{prompt}<pre>{escape(text)}</pre>")
            parts.append("</details>")
    return ["<aside><h2>Samples</h2>", *parts, "</aside>"] if parts else []


def _by_run(columns: Mapping[str, Mapping[str, str]]) -> str:
    """A table of a column for each run, of values by label."""
    labels = dict.fromkeys(label for column in columns.values() for label in column)
    rows = [[label, *(column.get(label, UNKNOWN) for column in columns.values())] for label in labels]
    return _table(["", *columns], rows)


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first row and first column are headings; every cell is escaped."""
    lines = ["<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr></thead>", "<tbody>"]
    for label, *cells in rows:
        lines.append(f"<tr><th>{escape(label)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join(["<div><table>", *lines, "</tbody></table></div>"])


def _validation(run: RunRecord, row: Row) -> str:
    text = _at_step(row, "val_loss")
    if not row or run.unit != "tokens":
        return text
    bits = f", {_number(bits, '.4f')} bits per byte" if (bits := row.get("val_bits_per_byte")) else ""
    return f"{text} (perplexity {_perplexity(row['val_loss'])}{bits})"


def _at_step(row: Row, metric: str) -> str:
    return f"{_number(row[metric], '.4f')} at step {_number(row['step'])}" if row else UNKNOWN


def _perplexity(loss: float) -> str:
    return _number(math.exp(min(loss, 700)), ",.2f" if loss < 20 else ".2e") if math.isfinite(loss) else UNKNOWN


def _number(value: object, form: str = ",") -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return format(value, form) if isinstance(value, int | float) else _text(value)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
