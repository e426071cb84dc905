"""Evaluation tasks: items with choices that a model answers by likelihood, and their scores, by the
rules of lm-eval.

Items are the lines of a jsonl file, or HellaSwag from the Hub; docs/evaluation.md describes both.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import torch
from accelerate import Accelerator
from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.evaluation.evaluate import IGNORED, rounds
from gpt2_ddp.files import parse_json, read_small

METRICS = ("acc", "acc_norm")
LONGEST = 2**30  # bytes of a file of items


class Item(BaseModel, frozen=True):
    """A context, which may be empty, and its possible continuations: a line of a file of items."""

    context: str
    choices: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=2)
    label: int = Field(ge=0)
    """index of the right choice"""

    @model_validator(mode="after")
    def _check_label(self) -> Self:
        if self.label >= len(self.choices):
            raise ValueError(
                f"label {self.label} is not one of {len(self.choices)} choices, from 0"
            )
        return self


class Request(NamedTuple):
    """Input of the model: the tokens of a context and a choice. The last `scored` tokens are
    scored."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class ItemSet:
    """A task's items.

    Attributes:
        requests: one for each choice of each item, in their order.
        sha256: of the items.
    """

    name: str
    items: list[Item]
    requests: list[Request]
    sha256: str

    @property
    def chance(self) -> float:
        """The accuracy of guessing."""
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """The values of each item's requests, from those of all."""
        return np.split(values, np.cumsum([len(item.choices) for item in self.items])[:-1])


class HellaSwag(BaseModel):
    """A row of HellaSwag; its own files have the label in digits."""

    activity_label: str
    ctx_a: str
    ctx_b: str
    endings: list[str]
    label: int

    def item(self) -> dict[str, Any]:
        """The item that lm-eval makes of the row, without WikiHow's markup."""
        texts = [f"{self.activity_label}: {self.ctx_a} {self.ctx_b.capitalize()}", *self.endings]
        texts = [
            re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
            for text in texts
        ]
        return {"context": texts[0], "choices": texts[1:], "label": self.label}


def load_sets(
    field: str, tasks: Sequence[str], most: int | None, tokenizer: Tokenizer, block_size: int
) -> list[ItemSet]:
    """The tasks, `hellaswag` or files, in their order, as requests to a model of this context; of
    each at most `most` items. Raises: UserError of `field` if a task does not exist, has an invalid
    item, or has another task's name."""
    sets: dict[str, ItemSet] = {}
    for task in tasks:
        name = re.sub(r"[^\w.-]", "_", Path(task).stem)
        if name in sets:
            hint = f"two tasks have the name {name}; rename a file, or remove one"
            raise UserError(field, task, hint)
        try:
            items = _hellaswag() if task == "hellaswag" else read_items(Path(task))
            sets[name] = make_set(name, items, most, tokenizer, block_size)
        except (OSError, ValueError) as error:
            kinds = "a task is hellaswag or a jsonl file of items (docs/evaluation.md)"
            hint = f"{_problem(error)}; {kinds}"
            raise UserError(field, task, hint) from error
    return [*sets.values()]


def _problem(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return "is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def _hellaswag() -> list[Item]:
    import datasets  # noqa: PLC0415  heavy: one of the tasks needs it

    return [*map(_item, datasets.load_dataset("Rowan/hellaswag", split="validation"))]


def notes_on(sets: Iterable[ItemSet], saved: Mapping[str, str]) -> Iterator[str]:
    """Notes on tasks whose items have changed; `saved`: hashes of the items before, by task."""
    for items in sets:
        if saved.get(items.name, items.sha256) != items.sha256:
            changed = f"the items of {items.name} have changed"
            yield f"{changed}; scores are not comparable with earlier rows"


def read_items(path: Path) -> list[Item]:
    """The items of a file. Raises: OSError; ValueError, which names the invalid line."""
    items: list[Item] = []
    lines = read_small(path, LONGEST).decode("utf-8-sig").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(_item(parse_json(line)))
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: is no JSON: {truncate(line, 60)}") from error
        except ValidationError as error:
            problem = f"{first_problem(error)}: {truncate(line, 60)}"
            raise ValueError(f"line {number}: {problem}") from error
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from error
    return items


def first_problem(error: ValidationError) -> str:
    """The first problem of an item or a row, in plain words."""
    details = error.errors()[0]
    if not details["loc"]:
        message = details["msg"].removeprefix("Value error, ")
        return message if details["type"] == "value_error" else "is no JSON object"
    field = ".".join(map(str, details["loc"]))
    return f"has no {field}" if details["type"] == "missing" else f"{field} is not as it should be"


def _item(row: object) -> Item:
    """The item of a row of either form. Raises: ValueError."""
    if isinstance(row, dict) and "endings" in row:
        row = HellaSwag.model_validate(row).item()
    return Item.model_validate(row)


def make_set(
    name: str, items: list[Item], most: int | None, tokenizer: Tokenizer, block_size: int
) -> ItemSet:
    """A task of these items, or of `most` of them, evenly spread. Raises: ValueError for no items,
    or for one that cannot be scored."""
    if not items:
        raise ValueError("has no items")
    count = min(most or len(items), len(items))
    items = [items[index * len(items) // count] for index in range(count)]
    requests: list[Request] = []
    for item in items:
        for choice in item.choices:
            before, continuation = encode_pair(item.context, f" {choice}", tokenizer)
            if not 0 < len(continuation) <= block_size:
                length = f"{len(continuation)} tokens, model.block_size {block_size}"
                raise ValueError(f"choice {choice!r} has {length}")
            tokens = before + continuation
            requests.append(Request(tokens[-block_size - 1 :], len(continuation)))
    texts = "\n".join(item.model_dump_json() for item in items)
    return ItemSet(name, items, requests, hashlib.sha256(texts.encode()).hexdigest())


def encode_pair(
    context: str, continuation: str, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Tokens of a context and of its continuation, by lm-eval's rules (`TemplateLM._encode_pair` of
    lm_eval 0.4).

    Blanks at the context's end move to the continuation, which is what the two together have behind
    the context's own tokens. The end-of-text token replaces an empty context, and precedes no
    other."""
    kept = context.rstrip()
    both = tokenizer.encode(context + continuation).tolist()
    if not kept:
        return [tokenizer.eot], both
    before = tokenizer.encode(kept).tolist()
    return before, both[len(before) :]


@torch.no_grad()
def answer(
    accelerator: Accelerator,
    model: nn.Module,
    requests: Sequence[Request],
    batch_size: int,
    length: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """Log-likelihoods of all requests, in nats, fp64 [n], by `model(x)` -> logits [B, T,
    vocab_size].

    The longest come first. Batches do not depend on the number of ranks. Short ones are padded with
    rows that are not scored. The softmax is in fp32 over the tokenizer's ids alone, sums are in
    fp64. Results are gathered once.

    Args:
        model: in evaluation mode.
        batch_size: requests per forward pass and rank.
        length: of every row, for a compiled model; None: that of the longest in its batch.
        poll: called before each batch, equally often on each rank; its exceptions end scoring.
    """
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    likelihoods = torch.zeros(len(requests), dtype=torch.float64)
    for begin in rounds(accelerator, len(order), batch_size, poll, "scoring"):
        batch = order[begin : begin + batch_size]
        chosen = [requests[index] for index in batch]  # none at the end
        x, y = (rows.to(accelerator.device) for rows in _rows(chosen, batch_size, length))
        scored = y != IGNORED
        losses = cross_entropy(model(x)[scored].float(), y[scored], reduction="none")
        nats = torch.zeros(y.shape, dtype=torch.float64)
        nats[scored.cpu()] = -losses.cpu().double()
        likelihoods[batch] = nats.sum(1)[: len(batch)]
    if accelerator.num_processes > 1:
        likelihoods = sum_over_ranks(accelerator, likelihoods.to(accelerator.device)).cpu()
    return likelihoods.numpy()


def _rows(requests: Sequence[Request], rows: int, length: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [rows, length]; IGNORED where there is nothing to score."""
    width = length or max((len(request.tokens) for request in requests), default=2) - 1
    x = torch.zeros(rows, width, dtype=torch.int64)
    y = torch.full((rows, width), IGNORED)
    for row, (tokens, scored) in enumerate(requests):
        end = len(tokens) - 1
        x[row, :end] = torch.tensor(tokens[:-1])
        y[row, end - scored : end] = torch.tensor(tokens[-scored:])
    return x, y


def judge(items: ItemSet, log_likelihoods: np.ndarray) -> dict[str, float]:
    """The `METRICS` of the requests' log-likelihoods, fp64 [n]: the fraction of items whose right
    choice has the highest log-likelihood, and the same per character. NaN if a log-likelihood is
    not finite."""
    hits = []
    for item, nats in zip(items.items, items.split(log_likelihoods), strict=True):
        per_character = nats / [len(choice) for choice in item.choices]
        right = np.argmax([nats, per_character], axis=1) == item.label
        hits.append(np.where(np.isfinite(nats).all(), right, math.nan))
    return dict(zip(METRICS, np.mean(hits, axis=0).tolist(), strict=True))
