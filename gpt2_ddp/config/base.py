"""What every configuration is made of: frozen, typed sections that report all of their mistakes."""

import os
from collections.abc import Iterator, Mapping
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

from gpt2_ddp.config.mistakes import worded
from gpt2_ddp.errors import UserError


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
        """Mistakes that concern several fields at once, as (field, value, cure)."""
        yield from ()

    @model_validator(mode="wrap")
    @classmethod
    def _report_mistakes(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            config = handler(values)
        except ValidationError as error:
            raise worded(cls, error) from error
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
