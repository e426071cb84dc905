"""The section `own`: settings of a class of one's own, which its inner class `Settings` declares.

    flags, YAML, config.yaml ──▶ OwnConfig    any names and values: no class is loaded yet
    Mine.Settings ──▶ settle ──▶ Settings     the class's types and defaults: `task.settings`
                         └─────▶ OwnConfig    all values, which the run records: `config.own`

So a command that may not execute the class still reads, shows and groups what the run recorded.
"""

from collections.abc import Container, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_origin

from pydantic import ConfigDict, create_model, model_validator
from pydantic_core import PydanticUndefined

from gpt2_ddp.config.base import MOST, Command, NoValue, Section, kinds_of, shown
from gpt2_ddp.errors import UserError

CommandT = TypeVar("CommandT", bound=Command)
SettingsT = TypeVar("SettingsT", bound=Section)
OWN = "own"
"""The section's name."""
NO_CLASS = "Pretraining"
"""The class of a run without one of one's own."""
PLAIN = (int, float, str, bool, NoneType)
COMBINED = (None, Annotated, Literal, tuple, Union, UnionType)
"""Types of settings, and how they may be combined."""
TYPES = "int, float, str, bool, Literal of words, tuple of these, or one of them | None"


class OwnConfig(Section):
    """Settings of a class of one's own, under the names that it declares"""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _turn_on(cls, values: object) -> object:
        """A flag without a word turns a switch on. The class is not there to say which are
        switches."""
        if not isinstance(values, Mapping):
            return values
        given = cast(Mapping[str, object], values)
        return {name: isinstance(value, NoValue) or value for name, value in given.items()}

    @property
    def given(self) -> dict[str, object]:
        """The values by name, in JSON's types, or as texts of the command line."""
        return self.model_dump(mode="json")


def with_settings(command: type[CommandT], settings: type[Section]) -> type[CommandT]:
    """The command whose section `own` has the fields of `settings`."""
    return create_model(
        command.__name__,
        __base__=command,
        __doc__=command.__doc__,
        own=(settings, settings.model_construct()),
    )


def settle(
    own: OwnConfig, settings: type[SettingsT], class_name: str, dropped: Container[str] = ()
) -> SettingsT:
    """The settings of a class, from what was given or recorded. Names in `dropped` that the class
    does not have are left out. Raises: UserError for other unknown names and wrong values, and for
    a `Settings` whose fields are no settings."""
    check_declared(settings, class_name)
    fields = settings.model_fields
    known: dict[str, object] = {}
    mistakes: list[str] = []
    for name, value in own.given.items():
        if name in fields:
            known[name] = value
        elif name not in dropped:
            hint = _hint_for_unknown(fields, class_name)
            mistakes += UserError(f"{OWN}.{name}", shown(value), hint).mistakes
    try:
        command = with_settings(Command, settings).model_validate({OWN: known})
    except UserError as error:
        raise UserError.join([*mistakes, *error.mistakes][:MOST]) from error
    if mistakes:
        raise UserError.join(mistakes[:MOST])
    return cast(SettingsT, getattr(command, OWN))


def as_recorded(settings: Section) -> OwnConfig:
    """The section `own` with all values of the settings."""
    return OwnConfig.model_validate(settings.model_dump(mode="json"))


def recorded_settings(saved: Mapping[str, Any]) -> dict[str, object]:
    """The settings in a saved configuration; none in that of a run before there were any."""
    own: object = saved.get(OWN)
    return cast(dict[str, object], own) if isinstance(own, dict) else {}


def changed(
    settings: Section, recorded: Mapping[str, object], step: int
) -> list[tuple[str, object, object]]:
    """(name, value, recorded value) of the settings that differ from those of a run at `step`,
    without those that the class allows to change. Those that it did not record had their
    defaults."""
    before = {**settings.model_construct().model_dump(mode="json"), **recorded}
    now = settings.model_dump(mode="json")
    return [
        (name, now[name], before[name])
        for name in now
        if now[name] != before[name] and not settings.may_change(name, before[name], step)
    ]


def check_declared(settings: object, class_name: str) -> None:
    """Raises: UserError if `settings` is no section, or if a field has no default, or a type that
    no flag can have."""
    if not (isinstance(settings, type) and issubclass(settings, Section)):
        raise UserError("task", class_name, "its Settings should extend gpt2_ddp.Section")
    for name, field in settings.model_fields.items():
        if field.default is PydanticUndefined:
            hint = f"its setting {name} needs a default, like {name}: int = 4"
            raise UserError("task", class_name, hint)
        if not all(map(_is_type_of_setting, kinds_of(field.annotation))):
            hint = f"its setting {name} has another type than {TYPES}"
            raise UserError("task", class_name, hint)
    defaults = {name: field.default for name, field in settings.model_fields.items()}
    with_settings(Command, settings).model_validate({OWN: defaults})


def _is_type_of_setting(kind: object) -> bool:
    """Whether a type, a word of a Literal or a condition may be part of a setting's type."""
    if get_origin(kind) is Literal:
        return all(isinstance(word, str) for word in kinds_of(kind)[1:])
    if isinstance(kind, type):
        return kind in PLAIN
    return get_origin(kind) in COMBINED


def _hint_for_unknown(fields: Iterable[str], class_name: str) -> str:
    """The hint for a setting that the class does not have."""
    if class_name == NO_CLASS:
        advice = "name yours by --task FILE.py:CLASS (docs/extend.md)"
        return f"unknown key; only a class of your own has settings; {advice}"
    names = ", ".join(f"{OWN}.{field}" for field in fields) or "no settings"
    return f"unknown key; {class_name} has {names}"
