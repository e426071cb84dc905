"""Base classes of all configurations: frozen, typed sections that report all user errors at once."""

import copy
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self, get_args

import pydantic
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from gpt2_ddp.errors import FIELD, UserError, truncate

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


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """The hint for an unknown name: the nearest of the `known`, or --help; torchrun for the small jobs' `launch`."""
    if name.partition(".")[0] == "launch" and not any(key.startswith("launch.") for key in known):
        return "; torchrun starts its processes: `torchrun --nproc_per_node N SCRIPT`"
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}  # `lr` finds optim.lr
    tail = name.rpartition(".")[2]
    near = [tails[tail]] if tail in tails else difflib.get_close_matches(name, known, n=1)
    near = near or [tails[tail] for tail in difflib.get_close_matches(tail, tails, n=1)]
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists all names"


def _describe(command: type[BaseModel], details: Any) -> str:
    """One of pydantic's errors as `field = value: problem; hint`."""
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    known = dict(leaves(command))
    field = known.get(name)
    if details["type"] == "invalid_key":  # a number, null or a date
        name = ".".join(map(str, [*details["loc"][:-1], details["input"]]))
        return f"{truncate(name, FIELD)}: unknown key; --help lists all names"
    if details["type"] == "model_type":
        hint = f"should be a section with keys, like `{name}: {{key: value}}`"
    elif details["type"] == "extra_forbidden" and name in known:  # `optim.lr: 1` in a file
        hint = "unknown key; write `{}: {{{}: ...}}`".format(*name.split("."))
    elif details["type"] == "extra_forbidden":
        hint = f"unknown key{nearest(name, [*known, *sections(command)])}"
    else:
        hint = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field is not None and details["type"] == "missing":
            hint = f"should be {len(get_args(field.annotation))} values"
        if field is not None and field.default not in (None, ()):
            hint += f"; the default is {field.default}"
    return UserError(name, details["input"], hint).mistakes[0]


def _split_words(value: object) -> object:
    """Splits words at commas."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or {*map(type, words)} - {str}:
        return value
    return [part.strip() for part in ",".join(words).split(",") if part.strip()]


Tasks = Annotated[tuple[str, ...], BeforeValidator(_split_words)]
"""Names of tasks, or files of items."""


class Section(BaseModel):
    """A frozen group of fields. Unknown keys, NaN, booleans as numbers, and NUL in text are user errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object, info: pydantic.ValidationInfo) -> object:
        annotation = cls.model_fields[info.field_name or ""].annotation
        items = value if isinstance(value, list | tuple) else [value]
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

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors between several fields, as (field, value, hint)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            mistakes = dict.fromkeys(_describe(cls, details) for details in error.errors()[: MOST + 1])
            raise join_errors([*mistakes]) from error
        found = [UserError(*mistake).mistakes[0] for mistake in config.mistakes()]
        if found:
            raise UserError.join(found)
        return config


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if isinstance(value, Mapping) else {key: value}
    return found


def complete(command: type[Command], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a saved configuration of any release, without validation. `saved` is parsed output of `dump`.

    Returns:
        All fields of `command`, as `dump` writes them: newer fields have defaults. Then the dotted names of saved
        fields and sections that no longer exist.
    """
    values, gone = command.model_construct().model_dump(mode="json"), []

    def fill(values: dict[str, Any], saved: Mapping[str, Any], prefix: str) -> None:
        for name, value in saved.items():
            if name not in values or isinstance(values[name], dict) != isinstance(value, Mapping):
                gone.append(f"{prefix}{name}")
            elif isinstance(value, Mapping):
                fill(values[name], value, f"{prefix}{name}.")
            else:
                values[name] = value

    fill(values, saved, "")
    return values, gone


def differences(config: Command, saved: Mapping[str, Any], parts: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """(field, value, saved value) of the fields in `parts` (sections and fields) that differ."""
    before, now = flat(complete(type(config), saved)[0]), flat(config.model_dump(mode="json"))
    names = [name for name in now if any(name == part or name.startswith(f"{part}.") for part in parts)]
    return [(name, now[name], before[name]) for name in names if now[name] != before[name] and name != "data.path"]
