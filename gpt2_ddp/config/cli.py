"""Configuration from YAML files and the command line: defaults < files, left to right < dotted flags.

A flag is a key of a section, and its value is that of the same key in YAML. pydantic validates both.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml

from gpt2_ddp.config.base import Command, flat, leaves, nested, sections
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.files import check_limits, read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Largest YAML file, in bytes; shipped files have 2,000. The parser takes about 10 s per megabyte (estimate)."""
VALUE = re.compile(r"(null|true|false|-?(0|[1-9][0-9]*)(\.[0-9]+(e[-+][0-9]+)?)?)?")
"""What YAML reads as null, a boolean or a number. It writes numbers in this form; all other words are text."""

C = TypeVar("C", bound=Command)
Default = str | Callable[[Mapping[str, Any]], str] | None
"""The preset without `--config`: a YAML file relative to the project's folder, or a function that returns the file for
the given flags."""


def load(command: type[C], argv: Sequence[str], default: Default = None) -> C:
    """The validated configuration of a command line.

    Raises:
        UserError: all user errors, up to `config.hints.MOST`; each names field, value and hint.
        SystemExit: after `--help` or `--print_config`.
    """
    if {"-h", "--help"}.intersection(argv):
        from gpt2_ddp.config.hints import help_text

        preset = _preset(default, {})
        defaults = flat(read_yaml(preset)) if preset else {}
        print(help_text(command, preset, defaults, () if "all" in argv else command.first))
        sys.exit(0)
    files, flags = split_flags(command, [word for word in argv if word != "--print_config"])
    config = resolve(command, files, flags, default)
    if "--print_config" in argv:
        print(dump(config), end="")
        sys.exit(0)
    return config


def split_flags(command: type[Command], argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The files of `--config`, and the value of each flag by its name, for pydantic: a text, the list of several words,
    or true without a word. A flag of a list takes all words up to the next flag, others take one word. `--NAME=WORD`
    takes that word only. Remaining words are values of the field `command.positional`."""
    fields = dict(leaves(command))
    files: list[str] = []
    others: list[str] = []
    given: dict[str, list[str]] = {}
    words, room = others, len(argv)
    for word in argv:
        if re.match(r"-(?!\.?\d|$)", word):  # neither a number nor a lone -
            name, is_whole, value = word.removeprefix("--").partition("=")
            words = files
            if name != "config":
                words = given[name] = []
            is_list = name in fields and get_origin(fields[name].annotation) is tuple
            room = len(argv) if is_list else 1
            if is_whole:
                words.append(value)
                room = 0
        elif room:
            words.append(word)
            room -= 1
        else:
            others.append(word)
    if others:
        free = command.positional and command.positional not in given
        given[command.positional if free else "command line"] = others
    values = {name: words if len(words) > 1 else words[0] if words else True for name, words in given.items()}
    return files, values


def resolve(
    command: type[C],
    files: Sequence[str],
    changes: Mapping[str, Any],
    default: Default = None,
) -> C:
    """The validated configuration of YAML files (later files win) and `changes`, by dotted names, which override them.
    `model_fields_set` of its sections has the fields of both, without a preset's. Raises: UserError, as `load`."""
    parts = sections(command)
    layers = [*map(flat, (*map(read_yaml, files), changes))]
    preset = None if files else _preset(default, layers[-1])
    given: dict[str, Any] = {}
    for layer in layers:
        if not layer.keys().isdisjoint(command.alternatives):
            given |= dict.fromkeys(command.alternatives)
        given |= {name: value for name, value in layer.items() if name not in parts or value not in (None, {})}
    config = command.model_validate(nested((flat(read_yaml(preset)) if preset else {}) | given))
    own = nested(given)
    for name in parts:
        getattr(config, name).model_fields_set.intersection_update(own.get(name, ()))
    if preset and preset != _preset(default, {}):
        print_line(f"note: no --config; the preset for these data is {preset}")
    return config


def _preset(default: Default, flags: Mapping[str, Any]) -> str | None:
    return default(flags) if callable(default) else default


def dump(config: Command) -> str:
    """The configuration as YAML, for `--config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.BaseLoader):
    """Texts, lists and mappings, and the values of `VALUE`; refuses aliases and repeated keys, ignores tags. So a word
    such as `no`, `010`, `1:30` or `2026-01-02` has its meaning on the command line, not that of YAML 1.1."""

    def fetch_alias(self) -> None:
        raise yaml.YAMLError(f"aliases (*) are not supported, {self.get_mark()}")

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        return json.loads(text or "null") if node.style is None and VALUE.fullmatch(text) else text

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.YAMLError(f"duplicate key {key.value}, {key.start_mark}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of YAML text that anybody may have written. Raises: ValueError, also as `check_limits`."""
    try:
        return check_limits(yaml.load(text, _Loader))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(error) from error


def read_yaml(file: str, field: str = "--config") -> dict[str, Any]:
    """The sections and keys of a YAML file. A missing one is looked up in the project's folder, so that
    configs/gpt2_124m.yaml is found from any folder. Raises: UserError if the file cannot be read, or holds no mapping.
    """
    path = Path(file) if os.path.exists(file) else PROJECT / file
    try:
        values = parse_yaml(read_small(path, LARGEST).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(field, file, f"cannot be read as YAML ({reason})") from error
    if not isinstance(values, dict | None):
        raise UserError(field, file, "should contain sections and keys, like `train: {steps: 100}`")
    return values or {}
