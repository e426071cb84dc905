"""Base classes of all configurations: frozen, typed sections that report all user errors at once."""

import copy
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, get_args

import pydantic
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from gpt2_ddp.errors import UserError

MOST = 20
"""Most user errors that one command prints. An unquoted `*.txt` on the command line causes one per file."""


def join_errors(mistakes: Sequence[str]) -> UserError:
    """One error that lists the first MOST of several."""
    return UserError.join([*mistakes[:MOST], *["and more errors like these"] * (len(mistakes) > MOST)])


def sections(model: type[BaseModel]) -> dict[str, BaseModel]:
    """The sections of `model` with its defaults, which may differ from the section's own."""
    return {name: field.default for name, field in model.model_fields.items() if isinstance(field.default, BaseModel)}


def leaves(model: type[BaseModel], prefix: str = "", section: BaseModel | None = None) -> list[tuple[str, FieldInfo]]:
    """All fields below `model`: dotted names, and fields with the defaults of `section`."""
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


class Section(BaseModel):
    """A frozen group of fields. Unknown keys, NaN, booleans as numbers, and NUL in text are user errors. A text, where
    texts are expected, is a list of one."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object, info: pydantic.ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        items = value if isinstance(value, list | tuple) else [value]
        if annotation == tuple[str, ...] and isinstance(value, str):
            value = items
        if {int, float} & {annotation, *get_args(annotation)} and any(isinstance(item, bool) for item in items):
            raise ValueError("should be a number, not true or false")
        if any(b"\0" in os.fsencode(item) for item in items if isinstance(item, str)):  # half a surrogate raises, too
            raise ValueError("should not contain a NUL character")
        return value

    @field_validator("*")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if any(type(item) is int and abs(item) >= 2**63 for item in (value if isinstance(value, tuple) else [value])):
            raise ValueError("should have at most 64 bits")
        return value


class Command(Section):
    """The whole configuration of one script."""

    positional: ClassVar[str] = ""
    """Field that needs no flag on the command line, if any."""
    first: ClassVar[tuple[str, ...]] = ()
    """Fields that `--help` lists; `--help all` lists the others too. Empty: all of them."""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors between several fields, as (field, value, hint)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            mistakes = dict.fromkeys(describe(cls, details) for details in error.errors()[: MOST + 1])
            raise join_errors([*mistakes]) from error
        found = [UserError(*mistake).mistakes[0] for mistake in config.mistakes()]
        if found:
            raise UserError.join(found)
        return config


def describe(command: type[BaseModel], details: Any) -> str:
    """One of pydantic's errors as `field = value: problem; hint`."""
    known = dict(leaves(command))
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    field = known.get(name)
    hint = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if details["type"] in ("extra_forbidden", "invalid_key"):
        hint = f"unknown key{nearest(name, [*known, *sections(command)])}"
    elif field is not None and field.default not in (None, ()):
        hint += f"; the default is {field.default}"
    return UserError(name, details["input"], hint).mistakes[0]


def nearest(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The hint for an unknown name: the nearest of the `known`, or --help."""
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    tail = name.rpartition(".")[2]  # `lr` finds optim.lr
    near = [tail] if tail in tails else difflib.get_close_matches(tail, tails, n=1)
    return f"; did you mean {prefix}{tails[near[0]]}?" if near else "; --help lists all names"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found
