"""What every configuration is made of: frozen, typed sections that report all of their mistakes."""

import copy
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from gpt2_ddp.errors import FIELD, UserError, truncate

MOST = 20
"""Mistakes that are told at once; an unquoted `*.txt` on the command line makes as many as there are files."""


def join_errors(mistakes: Sequence[str]) -> UserError:
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


def from_pydantic(command: type[BaseModel], error: ValidationError) -> UserError:
    """pydantic's errors as the user's mistakes."""
    return join_errors(list(dict.fromkeys(_mistake(command, details) for details in error.errors()[: MOST + 1])))


def _mistake(command: type[BaseModel], details: Any) -> str:
    """Words one of pydantic's errors as `field = value: what is wrong; hint`."""
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    known = dict(leaves(command))
    field = known.get(name)
    if details["type"] == "invalid_key":  # a number, null or a date
        name = ".".join(map(str, [*details["loc"][:-1], details["input"]]))
        return f"{truncate(name, FIELD)}: there is no such key; --help lists all"
    if details["type"] == "model_type":
        hint = f"should be a section of keys, like `{name}: {{key: value}}`"
    elif details["type"] == "extra_forbidden" and name in known:  # `optim.lr: 1` in a file
        hint = "there is no such key; write `{}: {{{}: ...}}`".format(*name.split("."))
    elif details["type"] == "extra_forbidden":
        hint = f"there is no such key{nearest(name, [*known, *sections(command)])}"
    else:
        hint = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field is not None and details["type"] == "missing":
            hint = f"should be {len(get_args(field.annotation))} values"
        if field is not None and field.default not in (None, ()):
            hint += f"; the default is {field.default}"
    return UserError(name, details["input"], hint).mistakes[0]


def _words(value: object) -> object:
    """One word or several, some of them with commas between."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or {*map(type, words)} - {str}:
        return value
    return [part.strip() for part in ",".join(words).split(",") if part.strip()]


Tasks = Annotated[tuple[str, ...], BeforeValidator(_words)]
"""Names of tasks, or files."""


class Section(BaseModel):
    """A frozen group of settings; unknown keys, NaN, booleans in place of numbers and NULs in text are mistakes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers_and_no_nul(cls, value: object, info: ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        items = value if isinstance(value, list | tuple) else [value]
        if {int, float} & {annotation, *get_args(annotation)} and any(isinstance(item, bool) for item in items):
            raise ValueError("should be a number, not true or false")
        texts = [item for item in items if isinstance(item, str)]
        if any(b"\0" in os.fsencode(text) for text in texts):  # half of a surrogate pair raises, too
            raise ValueError("should hold no NUL, which no name of a file can")
        return value


class Command(Section):
    """The whole configuration of one script."""

    positional: ClassVar[str] = ""
    """the field that the command line also takes without its flag, if any"""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """Mistakes that concern several fields at once, as (field, value, hint)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            raise from_pydantic(cls, error) from error
        found = [UserError(*mistake).mistakes[0] for mistake in config.mistakes()]
        if found:
            raise UserError.join(found)
        return config


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections, by their dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def complete(command: type[Command], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A saved configuration, by any release, in today's fields; nothing is validated.

    Args:
        command: the class of the configuration.
        saved: what `dump` wrote, read back.

    Returns:
        Every field as `dump` writes it, those that have come since with their defaults; and the dotted names of what
        is there no more, which is left out. A section that is gone counts as one.
    """
    values = command.model_construct().model_dump(mode="json")
    return values, _fill(values, saved)


def _fill(values: dict[str, Any], saved: Mapping[str, Any], prefix: str = "") -> list[str]:
    gone = []
    for name, value in saved.items():
        if name not in values or isinstance(values[name], dict) != isinstance(value, Mapping):
            gone.append(f"{prefix}{name}")
        elif isinstance(value, Mapping):
            gone += _fill(values[name], value, f"{prefix}{name}.")
        else:
            values[name] = value
    return gone
