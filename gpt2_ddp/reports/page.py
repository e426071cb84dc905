"""The page of a report: one HTML document without scripts, links or anything to fetch."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeGuard

from gpt2_ddp.reports.runs import Row, RunRecord

UNKNOWN = "–"
NAMES = ("run_name", "output_dir")
"""Settings that differ between any two runs and say nothing."""
SAMPLES, SAMPLE_LENGTH = 4, 3000
"""Samples shown of the last step that has any, and characters shown of each."""
SHAPE = ("n_layer", "n_head", "n_embd", "block_size")
STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5b6470; --paper: #fff; --line: #d9dee5; --tint: #f5f7fa }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #98a2b0; --paper: #14171c; --line: #303741; --tint: #1c2128 }
}
body { margin: 2.5rem auto; padding: 0 1.25rem; max-width: 72rem; color: var(--ink); background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.6rem; margin: 0 0 1.25rem; overflow-wrap: anywhere }
h2 { font-size: 1.1rem; margin: 2.25rem 0 .6rem }
svg { display: block; width: 100%; height: auto }
div { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem 1.6rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line) }
td { min-width: 8rem }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap }
pre { padding: .9rem 1.1rem; border-radius: 8px; background: var(--tint); font: 13px/1.5 ui-monospace, monospace;
  white-space: pre-wrap; overflow-wrap: anywhere }
"""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def page(runs: Sequence[RunRecord], svg: str) -> str:
    """The document: `svg` (an `<svg>` element, taken as it is), then what the runs' files say, escaped."""
    names = [run.name for run in runs]
    body = [svg, "<h2>Summary</h2>", _table(["", *names], _columns([_summary(run) for run in runs]))]
    if len(runs) > 1:
        body += ["<h2>What differs in the configurations</h2>", _differences(runs)]
    evaluated = [run for run in runs if run.last("val_loss")]
    if evaluated:
        table = _table(["", *(run.name for run in evaluated)], _columns([_evaluation(run) for run in evaluated]))
        body += ["<h2>Last evaluation</h2>", table]
    body += [part for run in runs for part in _samples(run)]
    notes = [f"<li>{escape(f'{run.name}: {note}')}</li>" for run in runs for note in run.notes]
    if notes:
        body += ["<h2>Not in this report</h2>", "<ul>", *notes, "</ul>"]
    return PAGE.format(title=escape("Training report: " + ", ".join(names)), style=STYLE, body="\n".join(body))


def _summary(run: RunRecord) -> dict[str, str]:
    state, reason, setting = run.status.get("state"), run.status.get("reason"), run.config.get
    finite = [row for row in run.rows if _is_finite(row.get("val_loss"))]
    best = min(finite, key=lambda row: row["val_loss"], default={})
    digests = [row["order_digest"] for row in run.rows if row.get("order_digest")]
    return {
        "state": f"{state}: {reason}" if reason else _text(state),
        "steps": _number(run.rows[-1]["step"]),
        run.unit: _number(run.last("tokens").get("tokens")),
        "skipped steps": _number(run.last("skipped").get("skipped")),
        "last train loss": _at_step(run.last("loss"), "loss"),
        "last validation loss": _validation(run, run.last("val_loss")),
        "best validation loss": _validation(run, best),
        f"{run.unit} per second (median)": _number(run.median("tokens_per_second"), ",.0f"),
        "MFU (median)": _number(run.median("mfu"), ".1%"),
        "time in training steps": _training_time(run),
        "parameters (without positions)": _number(run.parameters),
        " / ".join(SHAPE): " / ".join(_text(setting(f"model.{name}")) for name in SHAPE),
        "global batch (tokens)": _number(setting("train.global_batch_tokens")),
        "learning rate": _text(setting("optim.lr")),
        "seed": _text(setting("seed")),
        "order digest": str(digests[-1])[:12] if digests else UNKNOWN,
    }


def _evaluation(run: RunRecord) -> dict[str, str]:
    row = run.last("val_loss")
    loss = row["val_loss"]
    if run.unit != "tokens":
        scores = {name.replace("val_", "validation "): _text(value) for name, value in row.items() if "val_" in name}
        return {"step": _number(row["step"]), f"{run.unit} seen": _number(row.get("tokens")), **scores}
    return {
        "step": _number(row["step"]),
        "tokens seen": _number(row.get("tokens")),
        "validation loss (nats per token)": _number(loss, ".4f"),
        "bits per token": _number(loss / math.log(2), ".4f"),
        "perplexity": _perplexity(loss),
        "bits per byte": _number(row.get("val_bits_per_byte"), ".4f"),
        "tokens scored": _number(row.get("val_tokens")),
    }


def _differences(runs: Sequence[RunRecord]) -> str:
    configured = [run for run in runs if run.config]
    keys = dict.fromkeys(key for run in configured for key in run.config if key not in NAMES)
    rows = [[key, *(_text(run.config.get(key)) for run in configured)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    return _table(["", *(run.name for run in configured)], rows) if rows else "<p>Nothing.</p>"


def _samples(run: RunRecord) -> list[str]:
    last = [row["text"] for row in run.samples if row.get("step") == run.samples[-1].get("step")][-SAMPLES:]
    if not last:
        return []
    shown = [text if len(text) <= SAMPLE_LENGTH else text[:SAMPLE_LENGTH] + " […]" for text in last]
    title = f"Sample of {run.name} at step {_number(run.samples[-1].get('step'))}"
    return [f"<h2>{escape(title)}</h2>", *(f"<pre>{escape(text)}</pre>" for text in shown)]


def _columns(summaries: Sequence[dict[str, str]]) -> list[list[str]]:
    labels = dict.fromkeys(label for summary in summaries for label in summary)
    return [[label, *(summary.get(label, UNKNOWN) for summary in summaries)] for label in labels]


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first row and first column are headings; every cell is escaped."""
    lines = ["<thead><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr></thead>", "<tbody>"]
    for label, *cells in rows:
        lines.append(f"<tr><th>{escape(label)}</th>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return "\n".join(["<div><table>", *lines, "</tbody></table></div>"])


def _validation(run: RunRecord, row: Row) -> str:
    perplexity = f" (perplexity {_perplexity(row['val_loss'])})" if row and run.unit == "tokens" else ""
    return _at_step(row, "val_loss") + perplexity


def _at_step(row: Row, metric: str) -> str:
    return f"{_number(row[metric], '.4f')} at step {_number(row['step'])}" if row else UNKNOWN


def _perplexity(loss: float) -> str:
    return _number(math.exp(min(loss, 700)), ",.2f" if loss < 20 else ".2e") if math.isfinite(loss) else UNKNOWN


def _training_time(run: RunRecord) -> str:
    """Tokens of the logged intervals over their tokens per second, so without evaluations, saves and pauses."""
    seconds, before = 0.0, 0.0
    for row in run.rows:
        speed, tokens = row.get("tokens_per_second"), row.get("tokens")
        if _is_finite(speed) and _is_finite(tokens) and speed > 0:
            seconds, before = seconds + (tokens - before) / speed, tokens
    if not seconds:
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {rest} s"


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: object, form: str = ",") -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return format(value, form) if isinstance(value, int | float) else _text(value)


def _text(value: object) -> str:
    return UNKNOWN if value is None else str(value)
