"""Evaluation tasks: items that a model answers by likelihood, and their scores, by the rules of lm-eval.

Items are read from a jsonl file or the Hub, or cut from a validation split. A line of a file has one of four forms
(FORMS), which docs/evaluation.md describes.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import parse_json, read_small, write_atomically
from gpt2_ddp.model.evaluate import IGNORED

METRICS = ("acc", "acc_norm", "perplexity")
LONGEST = 2**30  # bytes of a file of items
HUB = {
    "hellaswag": ("Rowan/hellaswag", None, "validation"),
    "lambada": ("EleutherAI/lambada_openai", "default", "test"),
}
"""Dataset, configuration and split of a task, as lm-eval has them (there, `lambada` is lambada_openai)."""
PLACES, CONTEXT, CONTINUATION, CHOICES = 1000, 64, 8, 4
"""Sizes of `cloze`: most items, tokens of a context and of a choice, choices of an item."""
BROKEN = "\ufffd"  # the decoded form of incomplete characters

Row = dict[str, Any]


class Item(NamedTuple):
    """A context, which may be empty, and its possible continuations."""

    context: str
    choices: tuple[str, ...]  # one is right; a cloze item has the right one only
    right: int = 0  # its index
    delimiter: str = " "  # between the context and each choice; no part of a choice's length
    place: str = ""  # where the item is from, for messages

    @property
    def is_cloze(self) -> bool:
        """Whether it has a single choice."""
        return len(self.choices) == 1


class Request(NamedTuple):
    """Input of the model: the tokens of a context and a choice. The last `scored` tokens are scored."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class ItemSet:
    """A task's items, all with choices or all cloze."""

    name: str
    items: list[Item]
    requests: list[Request]  # one for each choice of each item, in their order
    sha256: str  # of the items
    cut: int  # requests whose contexts are longer than the model's

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing; None for single choices."""
        if self.items[0].is_cloze:
            return None
        return sum(1 / len(item.choices) for item in self.items) / len(self.items)


def load_sets(
    tasks: Sequence[str], most: int | None, tokenizer: Tokenizer, block_size: int, validation: Callable[[], TokenStream]
) -> list[ItemSet]:
    """The tasks, names or files, in their order, as requests to a model of this context; of each at most `most` items.
    `validation` opens the split that `cloze` is cut from.
    Raises: UserError if a task does not exist, has an invalid item, or has another task's name."""
    sets: dict[str, ItemSet] = {}
    for task in tasks:
        name = task if task in HUB else re.sub(r"[^\w.-]", "_", Path(task).stem)
        if name in sets:
            raise UserError("tasks", task, f"two tasks have the name {name}; rename a file, or remove one")
        if task == "cloze":
            items = cut_items(validation(), tokenizer)
        else:
            items = _fetch(task) if task in HUB else read_items(Path(task))
        sets[name] = make_set(name, items, most, tokenizer, block_size)
    return [*sets.values()]


def sets_of_run(config: TrainingConfig, tokenizer: Tokenizer, validation: TokenStream | None) -> list[ItemSet]:
    """The sets of `eval.tasks` of a training; `validation`: its first split, if any. Raises: UserError."""
    evals = config.eval
    if validation is None:
        hint = f"need a validation split, and {' '.join(config.data.paths)} has none; remove them"
        raise UserError("eval.tasks", ", ".join(evals.tasks), hint)
    try:
        return load_sets(evals.tasks, evals.task_items, tokenizer, config.model.block_size, lambda: validation)
    except UserError as error:
        raise UserError.join([f"eval.{mistake}" for mistake in error.mistakes]) from error


def notes_on(sets: Iterable[ItemSet], saved: Mapping[str, str]) -> Iterator[str]:
    """Notes of a training on its tasks; `saved`: hashes of the items before, by task."""
    for items in sets:
        chance = "" if items.chance is None else f"; guessing gets {items.chance:.1%} right"
        yield f"{items.name} is scored on {len(items.items):,} items{chance}"
        if saved.get(items.name, items.sha256) != items.sha256:
            yield f"the items of {items.name} have changed; scores are not comparable with earlier rows"


def _fetch(task: str) -> list[Item]:
    """The items of a task on the Hub; without an answer in four seconds, those that `datasets` has kept."""
    import datasets.config
    import huggingface_hub.constants
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    dataset, subset, split = HUB[task]
    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=4)  # load_dataset retries for 40 s
    except (OSError, HTTPError):
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        rows = datasets.load_dataset(dataset, subset, split=split)
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = f"{dataset} cannot be read from the Hub ({reason}); a local jsonl file of its rows works, too"
        raise UserError("tasks", task, hint) from error
    return _check_items(dataset, ((f"{dataset}, row {number}", dict(row)) for number, row in enumerate(rows)))


def read_items(path: Path) -> list[Item]:
    """The items of a file. Raises: UserError, which names the invalid line."""
    try:
        text = read_small(path, LONGEST).decode("utf-8-sig")
    except OSError as error:
        hint = f"cannot be read ({error.strerror}); name a jsonl file, hellaswag, lambada or cloze"
        raise UserError("tasks", path, hint) from error
    except UnicodeDecodeError as error:
        raise UserError("tasks", path, "is not UTF-8; save it as UTF-8") from error
    lines = ((f"{path}, line {number}", line) for number, line in enumerate(text.split("\n"), start=1))
    return _check_items(path, ((place, _parse(line, place)) for place, line in lines if line.strip()))


def _parse(line: str, place: str) -> Row:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError("tasks", place, f"is not JSON ({error}); write one object per line") from error
    if not isinstance(row, dict):
        raise UserError("tasks", place, "is not an object; write one object per line")
    return row


def _check_items(source: object, rows: Iterable[tuple[str, Row]]) -> list[Item]:
    """Items of rows, each with its place. Raises: UserError for no items, or for items of two kinds."""
    items = [_item(row, place) for place, row in rows]
    if not items:
        raise UserError("tasks", source, "has no items; write one JSON object per line")
    for item in items:
        if item.is_cloze != items[0].is_cloze:
            what = "one choice" if item.is_cloze else "several choices"
            raise UserError("tasks", item.place, f"has {what}, unlike {items[0].place}; write them to two files")
    return items


def _item(row: Row, place: str) -> Item:
    keys = next((keys for keys in FORMS if row.keys() >= {*keys}), None)
    if keys is None:
        wanted = "; or ".join(", ".join(keys) for keys in FORMS)
        raise UserError("tasks", place, f"has {', '.join(row) or 'no keys'}; an item has {wanted}")
    delimiter = row.get("delimiter", " ") if keys[0] == "context" else " "
    for key, value in {**{key: row[key] for key in keys}, "delimiter": delimiter}.items():
        if problem := _problem(key, value):
            raise UserError("tasks", place, f"its {key} {problem}")
    context, choices = FORMS[keys](row)
    label = int(row["label"]) if "label" in keys else 0
    if not 0 <= label < len(choices):
        hint = f"its label is {label}, but its {len(choices)} choices are 0 to {len(choices) - 1}"
        raise UserError("tasks", place, hint)
    if "" in choices:
        raise UserError("tasks", place, f"choice {choices.index('')} is empty; every choice needs text")
    return Item(context, tuple(choices), label, delimiter, place)


def _problem(key: str, value: Any) -> str | None:
    """The problem of the value of a row's key; empty if valid. A label may be digits, as in HellaSwag's files."""
    if key == "label":
        is_index = type(value) is int or (isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value))
        return None if is_index else f"is {json.dumps(value)}, not the index of a choice"
    if key in ("choices", "endings"):
        several = isinstance(value, list) and len(value) > 1 and all(isinstance(text, str) for text in value)
        return None if several else "are not a list of two or more texts"
    return None if isinstance(value, str) else "is not a text"


def _hellaswag(row: Row) -> tuple[str, list[str]]:
    """HellaSwag's texts as in lm-eval, without WikiHow's markup."""
    texts = [f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}", *row["endings"]]
    whole = [re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ") for text in texts]
    return whole[0], whole[1:]


FORMS: dict[tuple[str, ...], Callable[[Row], tuple[str, list[str]]]] = {
    ("context", "choices", "label"): lambda row: (row["context"], row["choices"]),
    ("context", "continuation"): lambda row: (row["context"], [row["continuation"]]),
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"): _hellaswag,
    ("text",): lambda row: (row["text"].rpartition(" ")[0], [row["text"].rpartition(" ")[2]]),
}
"""Context and choices of a row, by the keys that it has; the first form that fits counts."""


def cut_items(stream: TokenStream, tokenizer: Tokenizer) -> list[Item]:
    """The built-in task `cloze`: items from places that are spread evenly over the validation split.

    The other choices are the next different continuations of other places; the right choice of item i is number i mod
    4. A place gives no item if a document begins in it, if the cut divides a character, or if 8 blanks follow. Raises:
    UserError if the split has too few places."""
    length = CONTEXT + CONTINUATION
    count = min(PLACES, len(stream) // length)
    rows = stream.read(np.arange(count) * len(stream) // max(count, 1), length)
    cuts = [(row[:CONTEXT], row[CONTEXT:]) for row in rows if tokenizer.eot not in row]
    pairs = [(tokenizer.decode(a).lstrip(BROKEN), tokenizer.decode(b).rstrip(BROKEN)) for a, b in cuts]
    pairs = [(before, after) for before, after in pairs if BROKEN not in before + after and after.strip()]
    items = []
    for number, (before, right) in enumerate(pairs):
        following = chain(pairs[number + 1 :], pairs[:number])
        others = dict.fromkeys(after for _, after in following if after != right)
        choices = [*islice(others, CHOICES - 1)]
        choices.insert(number % CHOICES, right)
        items.append(Item(before, tuple(choices), number % CHOICES, "", f"cloze, item {number}"))
    if not items or any(len(item.choices) < CHOICES for item in items):
        hint = f"needs items of {length} tokens, but the validation split has {len(stream):,}; prepare more text"
        raise UserError("tasks", "cloze", hint)
    return items


def make_set(name: str, items: list[Item], most: int | None, tokenizer: Tokenizer, block_size: int) -> ItemSet:
    """A task of these items, or of `most` of them, evenly spread. Raises: UserError for one that cannot be scored."""
    count = min(most or len(items), len(items))
    items = [items[index * len(items) // count] for index in range(count)]
    requests, cut = [], 0
    for item in items:
        for number, choice in enumerate(item.choices):
            before, continuation = encode_pair(item.context, item.delimiter + choice, tokenizer, item.place)
            if not 0 < len(continuation) <= block_size:
                what = f"choice {number} has {len(continuation)} tokens, which do not fit model.block_size {block_size}"
                raise UserError("tasks", item.place, f"{what}; shorten it to at least 1 token that fits")
            tokens = before + continuation
            cut += len(tokens) > block_size + 1
            requests.append(Request(tokens[-block_size - 1 :], len(continuation)))
    return ItemSet(name, items, requests, digest(items), cut)


def digest(items: list[Item]) -> str:
    """SHA-256 of the items, for any source."""
    return hashlib.sha256(b"".join(json.dumps(item[:4]).encode() + b"\n" for item in items)).hexdigest()


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer, place: str) -> tuple[list[int], list[int]]:
    """Tokens of a context and of its continuation, by lm-eval's rules (`TemplateLM._encode_pair` of lm_eval 0.4).

    Blanks at the context's end move to the continuation, which is what the two together have behind the context's own
    tokens. The end-of-text token replaces an empty context, and precedes no other."""
    kept = context.rstrip()
    before, both = (tokenizer.encode(text, place).tolist() for text in (kept, context + continuation))
    return (before, both[len(before) :]) if kept else ([tokenizer.eot], both)


class Answers(NamedTuple):
    """For each request: its log-likelihood in nats, fp64 [n]; whether greedy decoding gives it, bool [n]."""

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
    """Scores all requests, the longest first, by `model(x)` -> logits [B, T, vocab_size].

    Batches do not depend on the number of ranks: batch j is rank j mod W's. Short ones are padded with rows that are
    not scored. The softmax is in fp32 over the tokenizer's ids alone, sums are in fp64. Results are gathered once.
    `batch_size`: requests per forward pass and rank. `length`: of every row, for a compiled model; None: that of the
    longest in its batch. `poll`: called before each batch, equally often on each rank; its exceptions end scoring."""
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    found = np.zeros((3, len(requests)))  # log-likelihood, whether greedy, how often scored
    was_training = model.training
    model.eval()
    hidden = None if accelerator.is_main_process else True  # None: where there is no terminal
    of_ranks = range(0, len(order), batch_size * accelerator.num_processes)
    try:
        for first in tqdm(of_ranks, "scoring", unit="batch", leave=False, delay=2, disable=hidden):
            poll()
            begin = first + batch_size * accelerator.process_index
            batch = order[begin : begin + batch_size]
            chosen = [requests[index] for index in batch]  # none at the end: sharded weights need a pass of each rank
            x, y = (rows.to(accelerator.device) for rows in _rows(chosen, batch_size, length))
            scored = y != IGNORED
            log_probabilities = torch.log_softmax(model(x)[scored].float(), dim=-1)  # [scored, V]
            if batch:
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
    width = length or max((len(request.tokens) for request in requests), default=2) - 1
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
    """Scores of a task. With choices, `acc` is the fraction of items whose right choice has the highest log-likelihood,
    `acc_norm` the same per character. For cloze items, `acc` is the fraction that greedy decoding gives, `perplexity`
    is exp of minus their mean log-likelihood."""

    metrics: dict[str, Mean]  # by their names in METRICS
    rows: list[dict[str, Any]]  # the items in a form that can be read again, each with its score


def judge(items: ItemSet, answers: Answers) -> Result:
    """The metrics of answers to these items; NaN for a log-likelihood of NaN."""
    ends = np.cumsum([len(item.choices) for item in items.items])
    rows, right = [], {"acc": [], "acc_norm": []}
    for item, nats, greedy in zip(items.items, *(np.split(part, ends[:-1]) for part in answers), strict=True):
        row = {"context": item.context, "delimiter": item.delimiter}
        if item.is_cloze:
            row |= {"continuation": item.choices[0], "log_likelihood": _json(nats[0]), "greedy": bool(greedy[0])}
            right["acc"].append(greedy[0])
        else:
            picks = [int(np.argmax(each)) for each in (nats, nats / [len(choice) for choice in item.choices])]
            for hits, pick in zip(right.values(), picks, strict=True):
                hits.append(pick == item.right if np.isfinite(nats).all() else math.nan)
            row |= {"choices": item.choices, "label": item.right, "log_likelihoods": [*map(_json, nats)]}
            row |= {"pick": picks[0], "pick_norm": picks[1]}
        rows.append(row)
    if not items.items[0].is_cloze:
        return Result({name: _mean(hits) for name, hits in right.items()}, rows)
    mean, error = _mean(answers.log_likelihoods)
    perplexity = math.exp(min(-mean, 700.0))
    return Result({"acc": _mean(right["acc"]), "perplexity": Mean(perplexity, perplexity * error)}, rows)


def _mean(values: Sequence[float] | np.ndarray) -> Mean:
    """The mean, and the standard error of a sample's."""
    many = np.asarray(values, dtype=np.float64)
    return Mean(float(many.mean()), float(many.std(ddof=1) / math.sqrt(len(many))) if len(many) > 1 else math.nan)


def _json(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def save(place: Path, items: ItemSet, result: Result, facts: Mapping[str, Any]) -> None:
    """Writes `PLACE.jsonl`, the items and their scores, then `PLACE.json`, the metrics, each by a rename. `facts`: the
    scored checkpoint and settings."""
    scores = {"task": items.name, "items": len(items.items), "items_sha256": items.sha256, "chance": items.chance}
    for name, (value, error) in result.metrics.items():
        scores |= {name: _json(value), f"{name}_stderr": _json(error)}
    scores |= {"contexts_cut": items.cut, **facts}
    write_atomically(Path(f"{place}.jsonl"), "".join(f"{json.dumps(row)}\n" for row in result.rows))
    write_atomically(Path(f"{place}.json"), json.dumps(scores, indent=1) + "\n")


def as_row(items: ItemSet, answers: Answers) -> dict[str, float]:
    """The metrics by the names that they have in a row of metrics.jsonl, such as `cloze_acc`."""
    return {f"{items.name}_{name}": mean.value for name, mean in judge(items, answers).metrics.items()}
