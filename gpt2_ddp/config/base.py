"""Base classes of all configurations: frozen, typed sections that report all user errors at once."""

import os
import re
from collections.abc import Container, Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Self, get_args, get_origin

import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from gpt2_ddp.errors import CREDENTIALS, QUERY, UserError
from gpt2_ddp.files import check_limits, local_copy

MOST = 20
"""Most user errors that one command prints."""


class MayBeEmpty:
    """Marks a type of texts that may be empty, or consist of blanks."""


class OnlyFlag:
    """Marks a switch that is turned on by its flag alone: a YAML file may be somebody else's."""


class NoValue:
    """Stands for the value of a flag without a word. It is no field's value."""

    def __str__(self) -> str:
        return "(no value)"


Text = Annotated[str, MayBeEmpty()]
"""Any text, such as a prompt. The other texts of a configuration are paths, URLs and names."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Size = Annotated[int, Field(ge=1, le=10_000)]


def sections(model: type[BaseModel]) -> dict[str, type["Section"]]:
    """The classes of the sections of `model`, by name."""
    fields = model.model_fields.items()
    return {name: type(field.default) for name, field in fields if isinstance(field.default, Section)}


def leaves(model: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    """All fields below `model`, by dotted names."""
    found = []
    below = sections(model)
    for name, field in model.model_fields.items():
        found += leaves(below[name], f"{prefix}{name}.") if name in below else [(prefix + name, field)]
    return found


def kinds_of(annotation: Any) -> list[Any]:
    """The types in an annotation, and the words and conditions in them."""
    return [annotation, *chain.from_iterable(map(kinds_of, get_args(annotation)))]


def check_name(value: object) -> None:
    """Checks a path, a URL or a name that anybody may have written; other types are checked later. Raises: ValueError
    if it is empty, or a URL of more than one storage.

    fsspec chains storages by `::`. Its `reference` executes templates of the file that it is given, as releases before
    2026 do without a sandbox."""
    if not isinstance(value, str):
        return
    if not value.strip():
        raise ValueError("is empty, like a variable that is not set; give a value, or leave this out")
    if "://" in value and (
        not re.match(r"[A-Za-z][\w+.-]*://.*[^/]", value) or "::" in value or value.startswith("reference:")
    ):
        raise ValueError("should be a folder, or the URL of one storage, like s3://BUCKET/FOLDER")


class Section(BaseModel):
    """A frozen group of fields. Unknown keys, NaN, booleans as numbers, NUL in text, and an empty path, URL or name are
    user errors.

    A text has the meaning that it has on the command line. Where texts are expected, it is a list of one. Where other
    lists are expected, commas separate the items. `none` and `null` are null, or the empty list.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="wrap")
    @classmethod
    def _check(cls, value: Any, handler: pydantic.ValidatorFunctionWrapHandler, info: pydantic.ValidationInfo) -> Any:
        if isinstance(value, NoValue):
            raise ValueError("needs a value")
        field = cls.model_fields[info.field_name or ""]
        kinds = [*kinds_of(field.annotation), *field.metadata]
        takes_list = get_origin(field.annotation) is tuple
        if str(value).lower() in ("none", "null") and (takes_list or type(None) in kinds):
            value = () if takes_list else None
        if takes_list and isinstance(value, str):
            value = [value] if str in kinds else re.findall(r"[^\s,]+", value.strip("[]()"))
        items = value if isinstance(value, list | tuple) else [value]
        if (int in kinds or float in kinds) and any(isinstance(item, bool) for item in items):
            raise ValueError("should be a number, not true or false")
        if any(b"\0" in os.fsencode(item) for item in items if isinstance(item, str)):  # half a surrogate raises, too
            raise ValueError("should not contain a NUL character")
        if str in kinds and not any(isinstance(kind, MayBeEmpty) for kind in kinds):
            for item in items:
                check_name(item)
        return check_limits(handler(value))


class Command(Section):
    """The whole configuration of one script."""

    positional: ClassVar[str] = ""
    """Field that needs no flag on the command line, if any."""
    first: ClassVar[tuple[str, ...]] = ()
    """Fields that `--help` lists; `--help all` lists the others too. Empty: all of them."""
    alternatives: ClassVar[tuple[str, ...]] = ()
    """Fields of which one is set. One in a later file or a flag replaces those of earlier files."""
    in_one_process: ClassVar[bool] = False
    """Whether the command needs no other ranks. Those that a launcher starts on this machine end at once."""

    def mistakes(self) -> Iterator[tuple[str, object, str]]:
        """User errors between several fields, as (field, value, hint)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: Any, handler: pydantic.ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            from gpt2_ddp.config.help import describe

            raise UserError.join(describe(cls, error)) from error
        found = [UserError(*mistake).mistakes[0] for mistake in config.mistakes()]
        if found:
            raise UserError.join(found)
        return config


def check_url(path: str) -> str:
    """A path or a URL to read from. Raises: ValueError for a URL with credentials, and for one whose copy would not be
    in the cache."""
    if CREDENTIALS.search(path) or QUERY.search(path):
        raise ValueError("should be a URL without credentials and parameters; credentials come from the environment")
    if "://" in path:
        local_copy(path)
    return path


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of all sections by dotted names; empty mappings are values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        found |= flat(value, f"{key}.") if value and isinstance(value, Mapping) else {key: value}
    return found


def nested(values: Mapping[str, Any], single: Container[str] = ()) -> dict[str, Any]:
    """The values of all sections, from dotted names: `{"optim": {"lr": ...}}` from `optim.lr`. For errors, names below
    a field in `single`, which has no keys, stay as they are, and so does a value of a section that is no mapping."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        section, dot, field = name.partition(".")
        if not dot or section in single:
            found[name] = value
        elif isinstance(inner := found.setdefault(section, {}), dict):
            inner[field] = value
    return found
