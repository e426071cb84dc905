"""What every configuration is made of: frozen, typed sections that report all of their mistakes."""

import os
from collections.abc import Iterator
from typing import ClassVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from gpt2_ddp.errors import UserError


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

    @model_validator(mode="after")
    def _report_mistakes(self) -> "Command":
        found = [UserError(*mistake).mistakes[0] for mistake in self.mistakes()]
        if found:
            raise UserError.join(found)
        return self
