"""What a model's answers to a task come to: lm-eval's metrics with their standard errors, a table, and files."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt2_ddp.files import write_atomically
from gpt2_ddp.scoring.items import ItemSet
from gpt2_ddp.scoring.score import Answers

METRICS = ("acc", "acc_norm", "perplexity")


class Mean(NamedTuple):
    """A mean over a task's items and its standard error, NaN for a single item."""

    value: float
    error: float


class Result(NamedTuple):
    """What a task came to.

    Args:
        metrics: by their names in METRICS. With choices, `acc` is how often the right one has the highest
            log-likelihood, `acc_norm` how often it has the highest per character. Of cloze items, `acc` is how often
            greedy decoding writes them, `perplexity` is exp of minus their mean log-likelihood.
        rows: the items in the form that they can be read in again, each with what it was scored.
    """

    metrics: dict[str, Mean]
    rows: list[dict[str, Any]]


def judge(items: ItemSet, answers: Answers) -> Result:
    """The metrics of answers to these items; NaN where a log-likelihood is none."""
    metrics, rows = (_cloze if items.is_cloze else _choices)(items, answers)
    told = zip(items.items, rows, strict=True)
    return Result(metrics, [{"context": item.context, "delimiter": item.delimiter, **row} for item, row in told])


def _cloze(items: ItemSet, answers: Answers) -> tuple[dict[str, Mean], list[dict[str, Any]]]:
    mean, error = _mean(answers.log_likelihoods)
    perplexity = math.exp(min(-mean, 700.0))
    rows = [
        {"continuation": item.choices[0], "log_likelihood": _json(nats), "greedy": bool(greedy)}
        for item, nats, greedy in zip(items.items, *answers, strict=True)
    ]
    return {"acc": _mean(answers.greedy), "perplexity": Mean(perplexity, perplexity * error)}, rows


def _choices(items: ItemSet, answers: Answers) -> tuple[dict[str, Mean], list[dict[str, Any]]]:
    ends = np.cumsum([len(item.choices) for item in items.items])
    rows, right = [], {"acc": [], "acc_norm": []}
    for item, nats in zip(items.items, np.split(answers.log_likelihoods, ends[:-1]), strict=True):
        picks = [int(np.argmax(each)) for each in (nats, nats / [len(choice) for choice in item.choices])]
        for hits, pick in zip(right.values(), picks, strict=True):
            hits.append(float(pick == item.right) if np.isfinite(nats).all() else math.nan)
        found = {"log_likelihoods": [*map(_json, nats)], "pick": picks[0], "pick_norm": picks[1]}
        rows.append({"choices": item.choices, "label": item.right, **found})
    return {name: _mean(hits) for name, hits in right.items()}, rows


def _mean(values: Sequence[float] | np.ndarray) -> Mean:
    """The mean, and the standard error of a sample's."""
    many = np.asarray(values, dtype=np.float64)
    return Mean(float(many.mean()), float(many.std(ddof=1) / math.sqrt(len(many))) if len(many) > 1 else math.nan)


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def save(folder: Path, items: ItemSet, result: Result, facts: Mapping[str, Any]) -> None:
    """Writes `TASK.jsonl`, the items and their scores, and then `TASK.json`, what they come to, each by a rename.

    Args:
        facts: what was scored, and how.
    """
    told = {"task": items.name, "items": len(items.items), "items_sha256": items.sha256, "chance": items.chance}
    for name, (value, error) in result.metrics.items():
        told |= {name: _json(value), f"{name}_stderr": _json(error)}
    told |= {"contexts_cut": items.cut, **facts}
    write_atomically(folder / f"{items.name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in result.rows))
    write_atomically(folder / f"{items.name}.json", json.dumps(told, indent=1) + "\n")


def as_row(items: ItemSet, answers: Answers) -> dict[str, float]:
    """The metrics by the names that they have in a row of metrics.jsonl, such as `cloze_acc`."""
    return {f"{items.name}_{name}": mean.value for name, mean in judge(items, answers).metrics.items()}
