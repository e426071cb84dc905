"""The settings of a run that differ from its preset and from the defaults."""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.config.base import Command, flat
from gpt2_ddp.config.cli import read_yaml, split_flags
from gpt2_ddp.config.saved import CONFIGS
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.errors import UserError
from gpt2_ddp.project import PROJECT
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.runs import RunRecord

SHIPPED = "configs"
"""The project's folder of presets. No other file is read: a recorded command is a stranger's."""


NAMES = ("output_dir", "run_name")
"""Settings that say where the run is. A page names its folder."""


class Changed(NamedTuple):
    """A setting that is not its default."""

    name: str
    value: object
    default: object
    preset: object  # the default if the preset does not set it

    @property
    def is_default(self) -> bool:
        return same(self.value, self.default)

    @property
    def is_presets(self) -> bool:
        return same(self.value, self.preset)


def changed_settings(run: RunRecord) -> tuple[list[str], list[Changed]]:
    """The preset's files, as far as this project has them, and the settings that are not the
    defaults: those that differ from the preset first."""
    command = CONFIGS.get(str(run.start.get("kind")))
    if command is None:
        return [], []
    defaults = flat(command.model_construct().model_dump(mode="json"))
    files = preset_files(command, run.start.get("command"))
    values = dict(defaults)
    for file in files:
        with suppress(UserError, OSError, ValueError):
            values |= flat(read_yaml(str(PROJECT / file)))
    names = [name for name in run.config if name not in NAMES]
    changes = [
        Changed(name, run.config[name], defaults.get(name), values.get(name)) for name in names
    ]
    changes = [change for change in changes if not (change.is_default and change.is_presets)]
    return files, sorted(changes, key=lambda change: change.is_presets)


def same(value: object, other: object) -> bool:
    """Whether two settings are equal, as a file or the defaults have them: 0 is 0.0, but not false,
    and a text is a list of one."""
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return value == other or value == [other] or [value] == other


def preset_files(command: type[Command], line: object) -> list[str]:
    """The files of a recorded command line that this project has, relative to its folder; the
    preset if the command names no file."""
    if not isinstance(line, str):
        return []
    with suppress(ValueError):  # an open quote
        given = split_flags(command, shlex.split(line)[1:])
        files = given.files or _default(command, given.values)
        return [name for name in map(shipped, files) if name]
    return []


def _default(command: type[Command], values: Mapping[str, object]) -> list[str]:
    if command is not TrainingConfig:
        return []
    path = values.get("data.path")
    given: Row = {} if path is None else {"data.path": _joined(path)}
    return [training_default(given)]


def _joined(words: object) -> str:
    return (
        " ".join(map(str, words))
        if isinstance(words, Sequence) and not isinstance(words, str)
        else str(words)
    )


def shipped(file: str) -> str:
    """The file of this project's presets that a path ends with; empty if there is none."""
    parts = Path(file).parts
    if SHIPPED not in parts or ".." in parts:
        return ""
    begin = len(parts) - parts[::-1].index(SHIPPED)
    name = Path(SHIPPED, *parts[begin:])
    return str(name) if (PROJECT / name).is_file() else ""
