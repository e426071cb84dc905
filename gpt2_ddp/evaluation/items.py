"""Evaluation tasks: items that a model answers by likelihood, and their scores, by the rules of
lm-eval. An item has choices, or the one target of a continuation, as in LAMBADA or in questions.

Items are the lines of a jsonl file, or a task of the Hub; docs/evaluation.md describes both.
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

METRICS = ("acc", "acc_norm", "perplexity")
"""Those of all tasks, in the order of tables."""
LONGEST = 2**30  # bytes of a file of items
SHOTS = re.compile(r"(.+):(\d{1,4})")
"""A task with examples before each item, such as `my/questions.jsonl:5`."""
BETWEEN = "\n\n"
"""What separates examples and items."""

Continuation = Annotated[str, Field(min_length=1)]


class Item(BaseModel, frozen=True):
    """A context, which may be empty, and its possible continuations: a line of a file of items."""

    context: str
    choices: tuple[Continuation, ...] = Field(min_length=2)
    label: int = Field(ge=0)
    """index of the right choice"""

    @model_validator(mode="after")
    def _check_label(self) -> Self:
        if self.label >= len(self.choices):
            raise ValueError(
                f"label {self.label} is not one of {len(self.choices)} choices, from 0"
            )
        return self

    @property
    def answer(self) -> str:
        """The right choice."""
        return self.choices[self.label]


class TargetItem(BaseModel, frozen=True):
    """A context, which may be empty, and its one right continuation: a line of such a file, too."""

    context: str
    target: Continuation

    @property
    def choices(self) -> tuple[str, ...]:
        """The target alone."""
        return (self.target,)

    @property
    def answer(self) -> str:
        """The target."""
        return self.target


AnyItem = Item | TargetItem


class Request(NamedTuple):
    """Input of the model: the tokens of a context and a choice. The last `scored` tokens are
    scored."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class ItemSet:
    """A task's items.

    Attributes:
        items: all with choices, or all with a target.
        requests: one for each choice of each item, in their order; of a target one.
        sha256: of the items, and of the examples before them.
        shots: number of examples before each item.
    """

    name: str
    items: Sequence[AnyItem]
    requests: list[Request]
    sha256: str
    shots: int = 0

    @property
    def has_targets(self) -> bool:
        """Whether the items have a target in place of choices."""
        return isinstance(self.items[0], TargetItem)

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing; None for targets, where it is none to speak of."""
        if self.has_targets:
            return None
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """The values of each item's requests, from those of all."""
        return np.split(values, np.cumsum([len(item.choices) for item in self.items])[:-1])


class Answers(NamedTuple):
    """A model's answers to requests."""

    nats: np.ndarray  # log-likelihoods of the scored tokens, fp64 [n]
    greedy: np.ndarray  # whether each scored token is the likeliest one, bool [n]


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


class Lambada(BaseModel):
    """A row of LAMBADA, and of its own files: a text, whose last word is the target."""

    text: str

    def item(self) -> dict[str, Any]:
        """The item that lm-eval makes of the row."""
        context, _, word = self.text.rpartition(" ")
        return {"context": context, "target": word}


HUB = {
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
}
"""Tasks of the Hub: data set, its configuration and its split."""


def load_sets(
    field: str, tasks: Sequence[str], most: int | None, tokenizer: Tokenizer, block_size: int
) -> list[ItemSet]:
    """The tasks, of `HUB` or files, in their order, as requests to a model of this context; of each
    at most `most` items. Raises: UserError of `field` if a task does not exist, has an invalid
    item, or has another task's name."""
    sets: dict[str, ItemSet] = {}
    for task in tasks:
        source, shots = split_task(task)
        name = re.sub(r"[^\w.-]", "_", Path(source).stem)
        if shots:
            name += f"_{shots}shot"
        if name in sets:
            hint = f"two tasks have the name {name}; rename a file, or remove one"
            raise UserError(field, task, hint)
        try:
            items = _from_hub(source) if source in HUB else read_items(Path(source))
            sets[name] = make_set(name, items, most, tokenizer, block_size, shots)
        except (OSError, ValueError) as error:
            kinds = f"a task is {', '.join(HUB)} or a jsonl file of items (docs/evaluation.md)"
            hint = f"{_problem(error)}; {kinds}"
            raise UserError(field, task, hint) from error
    return [*sets.values()]


def _problem(error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or error})"
    return "is no text in UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)


def split_task(task: str) -> tuple[str, int]:
    """The source of a task, and the number of examples before each item. A file whose own name has
    the form of `SHOTS` is that file."""
    match = SHOTS.fullmatch(task)
    if not match or Path(task).exists():
        return task, 0
    return match[1], int(match[2])


def _from_hub(task: str) -> list[AnyItem]:
    import datasets  # noqa: PLC0415  heavy: some of the tasks need it

    name, subset, split = HUB[task]
    words = [name, subset] if subset else [name]
    return [*map(_item, datasets.load_dataset(*words, split=split))]


def notes_on(sets: Iterable[ItemSet], saved: Mapping[str, str]) -> Iterator[str]:
    """Notes on tasks whose items have changed; `saved`: hashes of the items before, by task."""
    for items in sets:
        if saved.get(items.name, items.sha256) != items.sha256:
            changed = f"the items of {items.name} have changed"
            yield f"{changed}; scores are not comparable with earlier rows"


def read_items(path: Path) -> list[AnyItem]:
    """The items of a file. Raises: OSError; ValueError, which names the invalid line."""
    items: list[AnyItem] = []
    lines = read_small(path, LONGEST).decode("utf-8-sig").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(_item(parse_json(line)))
            if type(items[-1]) is not type(items[0]):
                raise ValueError(f"has choices or a target, unlike the first: {truncate(line, 60)}")
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


def _item(row: object) -> AnyItem:
    """The item of a row of any form. Raises: ValueError."""
    if isinstance(row, dict):
        if "endings" in row:
            row = HellaSwag.model_validate(row).item()
        elif row.keys() == {"text"}:
            row = Lambada.model_validate(row).item()
        if "target" in row and "choices" in row:
            raise ValueError("has both choices and a target")
        if "target" in row:
            return TargetItem.model_validate(row)
    return Item.model_validate(row)


def make_set(
    name: str,
    items: Sequence[AnyItem],
    most: int | None,
    tokenizer: Tokenizer,
    block_size: int,
    shots: int = 0,
) -> ItemSet:
    """A task of these items, or of `most` of them, evenly spread, with examples before each.
    Raises: ValueError for no items, too few for the examples, or one that cannot be scored."""
    if not items:
        raise ValueError("has no items")
    if shots >= len(items):
        raise ValueError(f"has {len(items)} items, too few for {shots} examples before each")
    count = min(most or len(items), len(items))
    chosen = [items[index * len(items) // count] for index in range(count)]
    requests: list[Request] = []
    for item in chosen:
        context = examples_before(item, items, shots) + item.context
        for choice in item.choices:
            before, continuation = encode_pair(context, f" {choice}", tokenizer)
            if not 0 < len(continuation) <= block_size:
                length = f"{len(continuation)} tokens, model.block_size {block_size}"
                what = "target" if isinstance(item, TargetItem) else "choice"
                raise ValueError(f"{what} {choice!r} has {length}")
            tokens = before + continuation
            requests.append(Request(tokens[-block_size - 1 :], len(continuation)))
    texts = [item.model_dump_json() for item in chosen]
    if shots:  # those of the first item, or what replaces it
        texts += [f"{shots} shots", *(item.model_dump_json() for item in items[: shots + 1])]
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return ItemSet(name, chosen, requests, digest, shots)


def examples_before(item: AnyItem, items: Sequence[AnyItem], shots: int) -> str:
    """The first other items of a task with their answers, in the form of lm-eval's sampler
    `first_n`."""
    others = [other for other in items[: 2 * shots + 1] if other != item]
    if len(others) < shots:  # copies of the item
        others = [other for other in items if other != item]
    return "".join(f"{other.context} {other.answer}{BETWEEN}" for other in others[:shots])


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
) -> Answers:
    """Log-likelihoods of all requests, in nats, and whether the model would generate them, by
    `model(x)` -> logits [B, T, vocab_size].

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
    found = torch.zeros(2, len(requests), dtype=torch.float64)  # nats; tokens that are unlikelier
    for begin in rounds(accelerator, len(order), batch_size, poll, "scoring"):
        batch = order[begin : begin + batch_size]
        chosen = [requests[index] for index in batch]  # none at the end
        x, y = (rows.to(accelerator.device) for rows in _rows(chosen, batch_size, length))
        scored = y != IGNORED
        logits = model(x)[scored].float()
        losses = cross_entropy(logits, y[scored], reduction="none")
        misses = logits.argmax(-1) != y[scored]
        values = torch.zeros(2, *y.shape, dtype=torch.float64)
        values[:, scored.cpu()] = torch.stack([-losses, misses]).cpu().double()
        found[:, batch] = values.sum(2)[:, : len(batch)]
    if accelerator.num_processes > 1:
        found = sum_over_ranks(accelerator, found.to(accelerator.device)).cpu()
    nats, misses = found.numpy()
    return Answers(nats, misses == 0)


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


def judge(items: ItemSet, answers: Answers) -> dict[str, float]:
    """The metrics of a task, NaN if a log-likelihood is not finite. Of choices `acc`, the fraction
    of items whose right choice has the highest log-likelihood, and `acc_norm`, the same per
    character. Of targets `acc`, the fraction that the model would generate, and `perplexity` of a
    target, exp of the mean negative log-likelihood."""
    if items.has_targets:
        is_finite = np.isfinite(answers.nats).all()
        perplexity = math.exp(min(-answers.nats.mean(), 700.0)) if is_finite else math.nan
        accuracy = float(answers.greedy.mean()) if is_finite else math.nan
        return {"acc": accuracy, "perplexity": perplexity}
    hits: list[np.ndarray] = []
    for item, nats in zip(items.items, items.split(answers.nats), strict=True):
        assert isinstance(item, Item), "all have choices"
        per_character = nats / [len(choice) for choice in item.choices]
        right = np.argmax([nats, per_character], axis=1) == item.label
        hits.append(np.where(np.isfinite(nats).all(), right, math.nan))
    return dict(zip(("acc", "acc_norm"), np.mean(hits, axis=0).tolist(), strict=True))
