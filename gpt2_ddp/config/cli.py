"""Configuration from YAML files and the command line: defaults < files, left to right < dotted flags.

A flag is a key of a section, and its value is that of the same key in YAML. pydantic validates both.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_origin

import yaml
from yaml.constructor import ConstructorError

from gpt2_ddp.config.base import Command, flat, kinds_of, leaves, merge, sections
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.files import check_limits, read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Largest YAML file, in bytes; shipped files have 2,000. The parser takes about 10 s per megabyte (estimate)."""

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
    or true without a word. A flag takes all words up to the next one, and a single word if other words may be values
    of the field `command.positional`. `--NAME=WORD` takes that word only."""
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
            is_list = name in fields and any(get_origin(kind) is tuple for kind in kinds_of(fields[name].annotation))
            takes_many = not command.positional or is_list
            room = len(argv) if takes_many and name != "config" else 1
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
    values: dict[str, Any] = {name: {} for name in parts}  # null has no meaning for a section
    preset = None if files else _preset(default, changes)
    if preset:
        merge(values, read_yaml(preset))
    given: dict[str, Any] = {}
    for content in (*map(read_yaml, files), changes):
        layer: dict[str, Any] = {}
        merge(layer, content)
        for name in parts.keys() & layer.keys():
            own, others = layer[name], parts[name].alternatives
            if isinstance(own, dict) and own.keys() & {*others}:
                layer[name] = dict.fromkeys(others) | own
        merge(given, layer)
    merge(values, given)
    config = command.model_validate(values)
    for name in parts:
        getattr(config, name).model_fields_set.intersection_update(given.get(name) or ())
    if preset and preset != _preset(default, {}):
        print_line(f"note: no --config; the preset for these data is {preset}")
    return config


def _preset(default: Default, flags: Mapping[str, Any]) -> str | None:
    return default(flags) if callable(default) else default


def dump(config: Command) -> str:
    """The configuration as YAML, for `--config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """Safe types only; refuses aliases and repeated keys. Unlike YAML 1.1, reads other words than null, true, false and
    decimal numbers as text, which has its meaning on the command line: `no`, `010`, `1:30`, `2026-01-02`."""

    yaml_implicit_resolvers: ClassVar[dict[str | None, Any]] = {
        None: [
            (f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{words})$"))
            for tag, words in {
                "null": r"~|null|Null|NULL|",
                "bool": r"true|True|TRUE|false|False|FALSE",
                "int": r"[-+]?(0|[1-9][0-9]*)",
                "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
            }.items()
        ]
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ConstructorError(None, None, "aliases (*) are not supported", self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise ConstructorError(None, None, f"duplicate key {key.value}", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of YAML text that anybody may have written. Raises: ValueError, also as `check_limits`."""
    try:
        return check_limits(yaml.load(text, _Loader))
    except (yaml.YAMLError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        raise ValueError(error) from error


def read_yaml(file: str, field: str = "--config") -> dict[str, Any]:
    """The sections and keys of a YAML file. A missing one is looked up in the project's folder and its configs. Raises:
    UserError if the file cannot be read, or holds no mapping."""
    shipped = [PROJECT / folder / file for folder in (".", "configs", "configs/jobs")]
    path = next((path for path in (Path(file), *shipped) if os.path.exists(path)), Path(file))
    try:
        values = parse_yaml(read_small(path, LARGEST).decode())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(field, file, f"cannot be read as YAML ({reason})") from error
    if not isinstance(values, dict | None):
        raise UserError(field, file, "should contain sections and keys, like `train: {steps: 100}`")
    return values or {}
