"""Base classes of all configurations: frozen, typed sections that report all user errors at once.

    Command       a script's configuration, such as TrainingConfig
      Section     a group of fields, such as `optim`
        field     `optim.lr`: a YAML key, a flag, a line of `--help`

The second half makes pydantic's errors into one line each: `optim.lr = x: should be a number`.
"""

import difflib
import json
import os
import re
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, cast, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gpt2_ddp.errors import CREDENTIALS, QUERY, UserError
from gpt2_ddp.files import check_limits, local_copy

MOST = 20
"""Most user errors that one command prints."""


class MayBeEmpty:
    """Marks a type of texts that may be empty, or consist of blanks."""


class OnlyFlag:
    """Marks a switch that only its flag turns on: a YAML file may be somebody else's."""


class NoValue:
    """Stands for the value of a flag without a word. It is no field's value."""

    def __str__(self) -> str:
        return "(no value)"


Text = Annotated[str, MayBeEmpty()]
"""Any text, such as a prompt. The other texts of a configuration are paths, URLs and names."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Size = Annotated[int, Field(ge=1, le=10_000)]


class Section(BaseModel):
    """A frozen group of fields. Unknown keys, NaN, booleans as numbers, NUL in text, and an empty
    path, URL or name are user errors.

    A text has the meaning that it has on the command line. Where texts are expected, it is a list
    of one. Where other lists are expected, commas separate the items. `none` and `null` are null,
    or the empty list.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(
        cls, value: object, handler: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        if isinstance(value, NoValue):
            raise ValueError("needs a value")
        field = cls.model_fields[info.field_name or ""]
        kinds = [*kinds_of(field.annotation), *field.metadata]
        if str(value).lower() in ("none", "null") and (is_list(field) or NoneType in kinds):
            value = () if is_list(field) else None
        if is_list(field) and isinstance(value, str):
            value = [value] if str in kinds else re.findall(r"[^\s,]+", value.strip("[]()"))
        items = cast(Sequence[object], value) if isinstance(value, list | tuple) else [value]
        if (int in kinds or float in kinds) and any(isinstance(item, bool) for item in items):
            raise ValueError("should be a number, not true or false")
        # half a surrogate raises, too
        if any(b"\0" in os.fsencode(item) for item in items if isinstance(item, str)):
            raise ValueError("should not contain a NUL character")
        if str in kinds and not any(isinstance(kind, MayBeEmpty) for kind in kinds):
            for item in items:
                check_name(item)
        return check_limits(handler(value))

    def may_change(self, name: str, before: object, step: int) -> bool:
        """Whether a field that a resume keeps may differ from `before`, its recorded value in
        JSON's types: True if no step up to `step` depends on it."""
        return False


class Command(Section):
    """The whole configuration of one script."""

    positional: ClassVar[str] = ""
    """Field that needs no flag on the command line, if any."""
    first: ClassVar[tuple[str, ...]] = ()
    """Fields that `--help` lists; `--help all` lists the others too. Empty: all of them."""
    alternatives: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Groups of fields that belong together. One in a later file or a flag replaces the whole group
    of earlier files."""
    in_one_process: ClassVar[bool] = False
    """Whether the command needs no other ranks. Those that a launcher starts on this machine end at
    once."""
    reads: ClassVar[Literal["records", "code", "checkpoints"]] = "records"
    """What the command reads of runs: `records`: rows, configuration and status; `code`: also the
    newest checkpoint of a run that has a class of one's own; `checkpoints`: all of them."""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors between several fields, as (field, value, hint)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            raise UserError.join(describe(cls, error)) from error
        mistakes = [UserError(*mistake).mistakes[0] for mistake in config.mistakes()]
        if mistakes:
            raise UserError.join(mistakes)
        return config


# Fields and values


def sections(model: type[BaseModel]) -> dict[str, type[Section]]:
    """The classes of the sections of `model`, by name."""
    defaults = {name: field.default for name, field in model.model_fields.items()}
    return {
        name: type(default) for name, default in defaults.items() if isinstance(default, Section)
    }


def leaves(model: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    """All fields below `model`, by dotted names."""
    fields: list[tuple[str, FieldInfo]] = []
    inner = sections(model)
    for name, field in model.model_fields.items():
        if name in inner:
            fields += leaves(inner[name], f"{prefix}{name}.")
        else:
            fields.append((prefix + name, field))
    return fields


def open_sections(command: type[Command]) -> tuple[str, ...]:
    """What the names of fields begin with in sections that take any name, like `own.`."""
    return tuple(
        f"{name}."
        for name, section in sections(command).items()
        if section.model_config.get("extra") == "allow"
    )


def is_list(field: FieldInfo) -> bool:
    """Whether the field takes a list."""
    return get_origin(field.annotation) is tuple


def kinds_of(annotation: object) -> list[object]:
    """The types in an annotation, and the words and conditions in them."""
    return [annotation, *chain.from_iterable(map(kinds_of, get_args(annotation)))]


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections by dotted names; empty mappings are values."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"  # a name in a file may be a number
        if value and isinstance(value, Mapping):
            fields |= flat(cast(Mapping[str, Any], value), f"{key}.")
        else:
            fields[key] = value
    return fields


def nested(values: Mapping[str, Any], single: Container[str] = ()) -> dict[str, Any]:
    """The values of all sections, from dotted names: `{"optim": {"lr": ...}}` from `optim.lr`. For
    errors, names below a field in `single`, which has no keys, stay as they are, and so does a
    value of a section that is no mapping."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, field = name.partition(".")
        if not dot or section in single:
            tree[name] = value
        elif isinstance(inner := tree.setdefault(section, {}), dict):
            inner[field] = value
    return tree


def check_name(value: object) -> None:
    """Checks a path, a URL or a name that anybody may have written; other types are checked later.
    Raises: ValueError if it is empty, or a URL of more than one storage.

    fsspec chains storages by `::`. Its `reference` executes templates of the file that it is given,
    as releases before 2026 do without a sandbox."""
    if not isinstance(value, str):
        return
    if not value.strip():
        hint = "is empty, like a variable that is not set; give a value, or leave this out"
        raise ValueError(hint)
    if "://" not in value:
        return
    is_plain = re.match(r"[A-Za-z][\w+.-]*://.*[^/]", value) and "::" not in value
    if not is_plain or value.startswith("reference:"):
        raise ValueError("should be a folder, or the URL of one storage, like s3://BUCKET/FOLDER")


def check_url(path: str) -> str:
    """A path or a URL to read from. Raises: ValueError for a URL with credentials, and for one
    whose copy would not be in the cache."""
    if CREDENTIALS.search(path) or QUERY.search(path):
        hint = "should be a URL without credentials and parameters"
        raise ValueError(f"{hint}; credentials come from the environment")
    if "://" in path:
        local_copy(path)
    return path


# User errors as text

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
"""Words for pydantic's bounds of numbers."""
LENGTHS = {"min_length": "at least", "max_length": "at most"}
"""Words for its bounds of texts, in characters."""
WRITTEN = {"value_error": "Value error, ", "assertion_error": "Assertion failed, "}
"""Kinds of errors with a text of their own, and what pydantic writes before it."""
WORDS: dict[object, str] = {int: "a whole number", float: "a number", str: "a text"}


def describe(command: type[Command], error: ValidationError) -> list[str]:
    """The first of pydantic's errors of each field, as `field = value: problem; hint`."""
    fields = dict(leaves(command))
    messages: dict[str, str] = {}
    for details in error.errors():
        parts = [str(part) for part in details["loc"]]
        # without items, kinds of a value
        name = parts[0] if parts[0] in fields else ".".join(parts[:2])
        if name in fields:
            hint = _hint_for_value(command, name, fields[name], details)
        elif details["type"] == "extra_forbidden":
            hint = _hint_for_unknown(command, name, details["input"])
        elif details["type"] in WRITTEN:  # by a rule for a whole section
            hint = _written(details)
        else:
            name = parts[0]
            keys = [key.partition(".")[2] for key in fields if key.startswith(f"{name}.")]
            hint = f"is a section; set its keys, like {name}.{(*keys, 'NAME')[0]}"
        messages.setdefault(name, UserError(name, shown(details["input"]), hint).mistakes[0])
    return [*messages.values()][:MOST]


def _hint_for_unknown(command: type[Command], name: str, value: object) -> str:
    """The hint for an unknown key."""
    fields = dict(leaves(command))
    above = name.rpartition(".")[0]
    if above in fields:
        return f"unknown key; {above} takes a value and has no keys"
    if name.startswith("-") or (isinstance(value, NoValue) and not re.fullmatch(r"[\w.]+", name)):
        hint = "unknown key; flags begin with --, and a value that begins with -"
        return f"{hint} is given as --FLAG=VALUE"
    return f"unknown key{nearest(name, [*fields, *sections(command)])}"


def _hint_for_value(
    command: type[Command], name: str, field: FieldInfo, details: ErrorDetails
) -> str:
    """The problem of a field's value, and what it should be."""
    if isinstance(details["input"], list | tuple) and not is_list(field):
        if name != command.positional:
            return f"should be {expected(field)}"
        lists = [other for other, of_other in leaves(command) if is_list(of_other)]
        flag = f", such as --{lists[0]}" if lists else ""
        return f"takes one value; others have their own flags{flag}"
    hint = _problem(name, field, details)
    if field.default in (None, ()):
        return hint
    return f"{hint}; the default is {shown(field.default)}"


def _problem(name: str, field: FieldInfo, details: ErrorDetails) -> str:
    kind = details["type"]
    kinds = kinds_of(field.annotation)
    wanted = f"should be {expected(field)}"
    if isinstance(details["input"], NoValue):
        if str in kinds:
            return f"needs a value; write one that begins with - as --{name}=VALUE"
        return "needs a value"
    if kind in WRITTEN:
        return _written(details)
    if kind == "extra_forbidden":
        return f"has the unknown key {details['loc'][-1]}; {wanted}"
    if kind == "finite_number":
        return wanted.replace("a number", "a finite number")
    if kind == "int_parsing_size":
        return "has an integer of more than 64 bits"
    # a number with words, such as 1k
    begins_as_number = re.match(r"[-+]?\d", str(details["input"]))
    if kind.endswith("_parsing") and begins_as_number and bool not in kinds:
        return f"{wanted}, {'in digits, like 1000000' if int in kinds else 'like 1000 or 1e-3'}"
    return wanted


def _written(details: ErrorDetails) -> str:
    """The problem in the words of the validator that found it."""
    return details["msg"].removeprefix(WRITTEN[details["type"]])


def shown(value: object) -> str:
    """A value as it is written in a command or a file."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    if isinstance(value, list | tuple):
        items = cast(Sequence[object], value)
        if all(isinstance(item, str | int | float) for item in items):
            return shlex.join(map(str, items)) or "[]"
    return text if text.strip() else repr(text)


def expected(field: FieldInfo) -> str:
    """The values that a field takes, in words: `a whole number (above 0), auto or null`."""
    return any_of(_expected(field.annotation, field.metadata, field.title))


def any_of(choices: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))


def _expected(
    annotation: object, constraints: Sequence[object], title: str | None = None
) -> list[str]:
    """The kinds of values of a type with these constraints."""
    origin = get_origin(annotation)
    inside = get_args(annotation)
    if origin is Annotated:
        kind, *details = inside
        fields = [detail for detail in details if isinstance(detail, FieldInfo)]
        limits = [limit for field in fields for limit in field.metadata]
        title = next((field.title for field in fields), title)
        return _expected(kind, [*constraints, *details, *limits], title)
    if annotation is NoneType:
        return ["null"]
    if title:
        return [title]
    if origin is Literal:
        return [*inside]
    if origin in (Union, UnionType):
        return [*chain.from_iterable(_expected(kind, constraints) for kind in inside)]
    if origin is tuple:
        count = "one or several values" if Ellipsis in inside else f"{len(inside)} values"
        return [f"{count}; each is {any_of(_expected(inside[0], ()))}"]
    if annotation is bool:
        return ["true", "false"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [" and ".join(annotation.model_fields)]
    bounds = _bounds(constraints, BOUNDS)
    bounds = bounds or [f"{bound} characters" for bound in _bounds(constraints, LENGTHS)]
    if not bounds:
        return [WORDS[annotation]]
    return [f"{WORDS[annotation]} ({' and '.join(bounds)})"]


def _bounds(constraints: Sequence[object], words: Mapping[str, str]) -> list[str]:
    values = [
        (word, getattr(constraint, key, None))
        for constraint in constraints
        for key, word in words.items()
    ]
    return [f"{word} {value:,}" for word, value in values if value is not None]


def nearest(name: str, names: Sequence[str]) -> str:
    """The hint for an unknown name: the nearest of `names`, or --help."""
    tails = {key.rpartition(".")[2]: key for key in reversed(names)}
    near = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1)  # `lr` finds optim.lr
    return f"; did you mean {tails[near[0]]}?" if near else "; --help lists all names"
