"""What every configuration is made of: frozen, typed sections that report all of their mistakes."""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator

from gpt2_ddp.errors import UserError


class Section(BaseModel):
    """A frozen group of settings; unknown keys, NaN and booleans in place of numbers are mistakes."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        field = cls.model_fields[info.field_name or ""]
        if isinstance(value, bool) and field.annotation in (int, float, int | None, float | None):
            raise ValueError("should be a number, not true or false")
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
