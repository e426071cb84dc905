"""Scores of a task: log-likelihoods of its continuations, lm-eval's metrics with standard errors, and files."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.files import write_atomically
from gpt2_ddp.model.evaluate import IGNORED
from gpt2_ddp.scoring.items import ItemSet, Request

METRICS = ("acc", "acc_norm", "perplexity")


class Answers(NamedTuple):
    """Of each request: its log-likelihood in nats, fp64 [n]; whether greedy decoding would write it, bool [n]."""

    log_likelihoods: np.ndarray
    greedy: np.ndarray


@torch.no_grad()
def answer(
    accelerator: Accelerator,
    model: nn.Module,
    requests: Sequence[Request],
    batch_size: int,
    length: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Answers:
    """Scores all requests, the longest first.

    Batches do not depend on the number of ranks: batch j is rank j mod W's. Short ones are padded with rows that are
    not scored. The softmax is in fp32 over the tokenizer's ids alone, sums are in fp64. Results are gathered once.

    Args:
        model: prepared or plain, on the accelerator's device; `model(x)` -> logits [B, T, vocab_size].
        batch_size: requests per forward pass and rank.
        length: of every row, for a compiled model; None: that of the longest in its batch.
        poll: called before each batch, by all ranks equally often; what it raises ends the scoring.
    """
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    found = np.zeros((3, len(requests)))  # log-likelihood, whether greedy, how often scored
    was_training = model.training
    model.eval()
    hidden = None if accelerator.is_main_process else True  # None: where there is no terminal
    of_ranks = range(0, len(batches), accelerator.num_processes)
    try:
        for first in tqdm(of_ranks, "scoring", unit="batch", leave=False, delay=2, disable=hidden):
            poll()
            if first + accelerator.process_index < len(batches):
                batch = batches[first + accelerator.process_index]
                chosen = [requests[index] for index in batch]
                x, y = _rows(chosen, batch_size, length)
                x, y = x.to(accelerator.device), y.to(accelerator.device)
                scored = y != IGNORED
                log_probabilities = torch.log_softmax(model(x)[scored].float(), dim=-1)  # [scored, V]
                best, targets = log_probabilities.argmax(-1), y[scored]
                nats = log_probabilities.gather(-1, targets[:, None])[:, 0].cpu().double().numpy()
                ends = np.cumsum([request.scored for request in chosen])
                begins = np.concatenate([[0], ends[:-1]])
                found[0, batch] = np.add.reduceat(nats, begins)
                found[1, batch] = np.logical_and.reduceat((best == targets).cpu().numpy(), begins)
                found[2, batch] += 1
    finally:
        model.train(was_training)
    if accelerator.num_processes > 1:
        found = sum_over_ranks(accelerator, torch.from_numpy(found).to(accelerator.device)).cpu().numpy()
    assert (found[2] == 1).all(), "each request is scored once"
    return Answers(found[0], found[1] == 1)


def _rows(requests: Sequence[Request], rows: int, length: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [rows, length]; IGNORED where there is nothing to score."""
    width = length or max(len(request.tokens) for request in requests) - 1
    x, y = torch.zeros(rows, width, dtype=torch.int64), torch.full((rows, width), IGNORED)
    for row, (tokens, scored) in enumerate(requests):
        end = len(tokens) - 1
        x[row, :end] = torch.tensor(tokens[:-1])
        y[row, end - scored : end] = torch.tensor(tokens[-scored:])
    return x, y


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
    `facts`: what was scored, and how."""
    told = {"task": items.name, "items": len(items.items), "items_sha256": items.sha256, "chance": items.chance}
    for name, (value, error) in result.metrics.items():
        told |= {name: _json(value), f"{name}_stderr": _json(error)}
    told |= {"contexts_cut": items.cut, **facts}
    write_atomically(folder / f"{items.name}.jsonl", "".join(f"{json.dumps(row)}\n" for row in result.rows))
    write_atomically(folder / f"{items.name}.json", json.dumps(told, indent=1) + "\n")


def as_row(items: ItemSet, answers: Answers) -> dict[str, float]:
    """The metrics by the names that they have in a row of metrics.jsonl, such as `cloze_acc`."""
    return {f"{items.name}_{name}": mean.value for name, mean in judge(items, answers).metrics.items()}
