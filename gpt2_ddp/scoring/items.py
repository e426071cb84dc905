"""Items of a task, read from a jsonl file. A line is of one of four forms, which its keys tell:

- `context`, `choices`, `label`: which of the choices follows? `label` is the index of the right one.
- `context`, `continuation`: would the model write this?
- `text`: the same of its last word, as in LAMBADA.
- `activity_label`, `ctx_a`, `ctx_b`, `endings`, `label`: HellaSwag's own.

Between a context and what follows it stands a blank, or what an item of the first two forms gives as its `delimiter`.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small

LONGEST = 2**30
"""Bytes of a file of items."""

Row = dict[str, Any]


class Item(NamedTuple):
    """A context, which may be empty, and what may follow it.

    Args:
        choices: of which one is right; in a cloze item, that one alone.
        right: its index.
        delimiter: what stands between the context and each choice; no part of a choice's length.
        place: where the item is from, for messages.
    """

    context: str
    choices: tuple[str, ...]
    right: int = 0
    delimiter: str = " "
    place: str = ""


class Request(NamedTuple):
    """What goes through the model: the tokens of a context and a choice, of which the last `scored` count."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class ItemSet:
    """A task's items, all with choices or all cloze.

    Args:
        requests: one for each choice of each item, in their order.
        sha256: of the items.
        cut: requests whose contexts are longer than the model's.
    """

    name: str
    items: list[Item]
    requests: list[Request]
    sha256: str
    cut: int

    @property
    def is_cloze(self) -> bool:
        """Whether there is nothing to choose from."""
        return len(self.items[0].choices) == 1

    @property
    def chance(self) -> float | None:
        """The accuracy of guessing; None where there is nothing to choose from."""
        return None if self.is_cloze else sum(1 / len(item.choices) for item in self.items) / len(self.items)


def read_items(path: Path) -> list[Item]:
    """The items of a file.

    Raises:
        UserError: naming the line that is none.
    """
    try:
        text = read_small(path, LONGEST).decode("utf-8-sig")
    except OSError as error:
        hint = f"cannot be read ({error.strerror}); name a jsonl file, hellaswag, lambada or cloze"
        raise UserError("tasks", path, hint) from error
    except UnicodeDecodeError as error:
        raise UserError("tasks", path, "is not UTF-8; save it as UTF-8") from error
    return check_items(str(path), _rows(path, text))


def check_items(name: str, rows: Iterator[tuple[str, Row]]) -> list[Item]:
    """Items of rows, each with its place; UserError where there is none, or they are of two kinds."""
    items = [_item(row, place) for place, row in rows]
    if not items:
        raise UserError("tasks", name, "has no items; write one JSON object a line")
    for item in items:
        if (len(item.choices) == 1) != (len(items[0].choices) == 1):
            what = "nothing" if len(item.choices) == 1 else "something"
            hint = f"has {what} to choose from, unlike {items[0].place}; make two files of them"
            raise UserError("tasks", item.place, hint)
    return items


def digest(items: list[Item]) -> str:
    """SHA-256 of the items, wherever they are from."""
    hashed = hashlib.sha256()
    for item in items:
        hashed.update(json.dumps(item[:4]).encode() + b"\n")
    return hashed.hexdigest()


def _rows(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(text.split("\n"), start=1):
        place = f"{path}, line {number}"
        if not line or line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError("tasks", place, f"is not JSON ({error}); write one object a line") from error
        if not isinstance(row, dict):
            raise UserError("tasks", place, "is not an object; write one object a line")
        yield place, row


def _item(row: Row, place: str) -> Item:
    for keys, make in FORMS.items():
        if row.keys() >= set(keys):
            item = make(row, place)
            for number, choice in enumerate(item.choices):
                if not choice:
                    raise UserError("tasks", place, f"choice {number} is empty; there is nothing to score")
            return item
    wanted = "; or ".join(", ".join(keys) for keys in FORMS)
    raise UserError("tasks", place, f"has {', '.join(row) or 'no keys'}; an item has {wanted}")


def _choice(row: Row, place: str) -> Item:
    choices = _texts(row, "choices", place)
    return Item(_text(row, "context", place), choices, _label(row, len(choices), place), _delimiter(row, place), place)


def _cloze(row: Row, place: str) -> Item:
    choices = (_text(row, "continuation", place),)
    return Item(_text(row, "context", place), choices, delimiter=_delimiter(row, place), place=place)


def _lambada(row: Row, place: str) -> Item:
    context, _, word = _text(row, "text", place).rpartition(" ")
    return Item(context, (word,), place=place)


def _hellaswag(row: Row, place: str) -> Item:
    label, first, second = (_text(row, name, place) for name in ("activity_label", "ctx_a", "ctx_b"))
    endings = tuple(map(_without_brackets, _texts(row, "endings", place)))
    right = _label(row, len(endings), place)
    return Item(_without_brackets(f"{label}: {first} {second.capitalize()}"), endings, right, place=place)


FORMS: dict[tuple[str, ...], Callable[[Row, str], Item]] = {
    ("context", "choices", "label"): _choice,
    ("context", "continuation"): _cloze,
    ("activity_label", "ctx_a", "ctx_b", "endings", "label"): _hellaswag,
    ("text",): _lambada,
}


def _without_brackets(text: str) -> str:
    """HellaSwag's text as lm-eval has it: the marks of WikiHow are taken out."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _text(row: Row, name: str, place: str) -> str:
    if not isinstance(row[name], str):
        raise UserError("tasks", place, f"its {name} is not a text")
    return row[name]


def _delimiter(row: Row, place: str) -> str:
    return _text({"delimiter": " ", **row}, "delimiter", place)


def _texts(row: Row, name: str, place: str) -> tuple[str, ...]:
    texts = row[name]
    if not isinstance(texts, list) or len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise UserError("tasks", place, f"its {name} are not a list of two or more texts")
    return tuple(texts)


def _label(row: Row, choices: int, place: str) -> int:
    """An index, or, as in HellaSwag's files, its digits."""
    label = row["label"]
    if type(label) is not int and not (isinstance(label, str) and re.fullmatch("[0-9]{1,9}", label)):
        raise UserError("tasks", place, f"its label is {json.dumps(label)}, not the index of a choice")
    if not 0 <= int(label) < choices:
        raise UserError("tasks", place, f"its label is {label}, and its {choices} choices are 0 to {choices - 1}")
    return int(label)
