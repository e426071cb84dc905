"""The text of a row: the value of its column, and why a row or a whole table has none."""

import csv
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import cast

Row = Mapping[str, object]
"""The values of a row by the names of their columns."""
NumberedRows = Iterable[tuple[int, Row]]
"""Rows, each with its number in the part of a file that they are read from."""

UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    NotImplementedError,
    csv.Error,
)
"""Errors of readers at damaged or unsuitable tables."""
CHECKED = 1000  # rows of a table that the check reads


def text_of(row: Row, column: str) -> object:
    """The value in a key of the column's name, or below keys joined by dots; None if there is none.
    Raises: ValueError for a value that has nothing below it."""
    outer, _, inner = column.partition(".")
    if not inner or column in row:
        return row.get(column)
    below = row.get(outer)
    if below is None:
        return None
    if not isinstance(below, dict):
        raise ValueError(f"column {outer} has {kind_of_value(below)}, so there is no {column}")
    return text_of(cast(Row, below), inner)


def fault_of(rows: NumberedRows, column: str) -> str:
    """Why a table cannot be used, as far as its first rows show; empty if it can be."""
    columns: Row = {}  # of the first row that has any
    other: object = None  # the first value of the column
    has_text = False
    try:
        for _, row in islice(rows, CHECKED):
            value = text_of(row, column)
            has_text = has_text or isinstance(value, str)
            other = value if other is None else other
            columns = columns or row
    except UNREADABLE as error:
        return f"cannot be read ({error})"
    if has_text or not columns:
        return ""
    names = ", ".join(map(str, columns))
    if any(map(is_chat, columns.values())):
        return f"has chats, not text, in {names}; write each chat as one text first (docs/data.md)"
    if other is not None:
        return f"has {kind_of_value(other)} in column {column}, not text"
    return f"has no text in column {column}, only in {names}; choose another --column"


KINDS_OF_VALUES: tuple[tuple[type, str], ...] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (bytes, "bytes"),
    (dict, "an object"),
    (type(None), "null"),
)


def kind_of_value(value: object) -> str:
    """What a value is that should be text or an object, in words."""
    if is_chat(value):
        return "a chat (a list of turns)"
    for kind, words in KINDS_OF_VALUES:
        if isinstance(value, kind):  # bool before int, whose subclass it is
            return words
    return "no text"


def is_chat(value: object) -> bool:
    """Whether a value is a list of turns, as chat models are trained on: `{"role": ..., "content":
    ...}`."""
    if not isinstance(value, list):
        return False
    turns = cast(list[object], value)
    return bool(turns) and all(map(_is_turn, turns))


def _is_turn(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    names = cast(Row, value).keys()
    return "content" in names or "value" in names
