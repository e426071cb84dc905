"""How mistakes in a configuration are told: `field = value: what is wrong; cure`, and the nearest name there is."""

import copy
import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gpt2_ddp.errors import FIELD, UserError, shown

MOST = 20
"""Mistakes that are told at once; an unquoted `*.txt` on the command line makes as many as there are files."""


def told(mistakes: Sequence[str]) -> UserError:
    """One error of many mistakes, the first MOST of them in words."""
    return UserError.join([*mistakes[:MOST], *["and more mistakes like these"] * (len(mistakes) > MOST)])


def sections(model: type[BaseModel]) -> dict[str, BaseModel]:
    """The sections of `model` with what it sets in them, which may differ from their own defaults."""
    return {name: field.default for name, field in model.model_fields.items() if isinstance(field.default, BaseModel)}


def leaves(model: type[BaseModel], prefix: str = "", section: BaseModel | None = None) -> list[tuple[str, FieldInfo]]:
    """Every setting below `model` with its dotted name, and with the default that it has in `section`."""
    found = []
    below = sections(model)
    for name, field in model.model_fields.items():
        if name in below:
            found += leaves(type(below[name]), f"{prefix}{name}.", getattr(section, name, below[name]))
        else:
            leaf = copy.copy(field)
            leaf.default = getattr(section, name, field.default)
            found.append((prefix + name, leaf))
    return found


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """The end of a sentence about a name that is not known: which one is meant, or where all are listed."""
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}  # `lr` finds optim.lr
    tail = name.rpartition(".")[2]
    near = [tails[tail]] if tail in tails else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [tails[tail] for tail in difflib.get_close_matches(tail, tails, n=1, cutoff=0.6)]
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists all"


def worded(command: type[BaseModel], error: ValidationError) -> UserError:
    """pydantic's errors as the user's mistakes."""
    return told(list(dict.fromkeys(_mistake(command, details) for details in error.errors()[: MOST + 1])))


def _mistake(command: type[BaseModel], details: Any) -> str:
    """Words one of pydantic's errors as `field = value: what is wrong; cure`."""
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    known = dict(leaves(command))
    field = known.get(name)
    if details["type"] == "invalid_key":  # a number, null or a date
        name = ".".join(map(str, [*details["loc"][:-1], details["input"]]))
        return f"{shown(name, FIELD)}: there is no such key; --help lists all"
    if details["type"] == "model_type":
        cure = f"should be a section of keys, like `{name}: {{key: value}}`"
    elif details["type"] == "extra_forbidden" and name in known:  # `optim.lr: 1` in a file
        cure = "there is no such key; write `{}: {{{}: ...}}`".format(*name.split("."))
    elif details["type"] == "extra_forbidden":
        cure = f"there is no such key{nearest(name, [*known, *sections(command)])}"
    else:
        cure = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field is not None and details["type"] == "missing":
            cure = f"should be {len(get_args(field.annotation))} values"
        if field is not None and field.default not in (None, ()):
            cure += f"; the default is {field.default}"
    return UserError(name, details["input"], cure).mistakes[0]
