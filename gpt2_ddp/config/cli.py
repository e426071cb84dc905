"""Configuration from YAML files and the command line: defaults < files, left to right < dotted
flags.

A flag is a key of a section, and its value is that of the same key in YAML. pydantic validates
both.
"""

import difflib
import json
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic.fields import FieldInfo
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from gpt2_ddp.config.base import (
    MOST,
    Command,
    NoValue,
    OnlyFlag,
    check_name,
    flat,
    kinds_of,
    leaves,
    nested,
    sections,
)
from gpt2_ddp.config.help import help_text, other_file
from gpt2_ddp.errors import UserError, print_line, truncate
from gpt2_ddp.files import DEEPEST, check_limits, read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Largest YAML file, in bytes; shipped files have 2,000. The parser takes about 10 s per megabyte
(estimate)."""
VALUE = re.compile(r"(null|true|false|-?(0|[1-9][0-9]*)(\.[0-9]+(e[-+][0-9]+)?)?)?")
"""What YAML reads as null, a boolean or a number. It writes numbers in this form; all other words
are text."""

CONFIG = "config"
"""The flag of a YAML file."""
FLAG = re.compile(r"--?[^\W\d]")
"""How a flag begins. So `---`, `- item`, `-1` and `--` are values. Words like `-x` are mistyped
flags."""

C = TypeVar("C", bound=Command)
Default = str | Callable[[Mapping[str, Any]], str] | None
"""The preset without `--config`: a YAML file relative to the project's folder, or a function that
returns the file for the given flags."""


def load(command: type[C], argv: Sequence[str], default: Default = None) -> C:
    """The validated configuration of a command line.

    Raises:
        UserError: all user errors, up to `MOST`; each names field, value and hint.
        SystemExit: after `--help` or `--print_config`.
    """
    if {"-h", "--help"}.intersection(argv):
        preset = _preset(default, {})
        defaults = flat(read_yaml(preset)) if preset else {}
        print(help_text(command, preset, defaults, () if "all" in argv else command.first))
        sys.exit(0)
    files, flags, mistakes = split_flags(
        command, [word for word in argv if word != "--print_config"]
    )
    try:
        config = resolve(command, files, flags, default)
    except UserError as error:
        raise UserError.join([*mistakes, *error.mistakes][:MOST]) from error
    if mistakes:
        raise UserError.join(mistakes[:MOST])
    if "--print_config" in argv:
        print(dump(config), end="")
        sys.exit(0)
    return config


def split_flags(
    command: type[Command], argv: Sequence[str]
) -> tuple[list[str], dict[str, Any], list[str]]:
    """The files of `--config`; the value of each flag by its name, for pydantic: a text, the list
    of several words, or true or a `NoValue` without a word; user errors. A flag of a list takes all
    words up to the next flag, others take one word. `--NAME=WORD` takes that word only. Remaining
    words are values of the field `command.positional`."""
    fields = dict(leaves(command))
    flags: list[tuple[str, list[str]]] = []
    others: list[str] = []
    words = others
    room = 0
    before_others = ""
    for word in argv:
        if FLAG.match(word):
            name, is_whole, value = word.removeprefix("--").partition("=")
            words = [value] if is_whole else []
            room = 0 if is_whole else len(argv) if _is_list(fields.get(name)) else 1
            flags.append((name, words))
        elif room:
            words.append(word)
            room -= 1
        else:
            before_others = before_others or (flags[-1][0] if flags else "")
            others.append(word)
    files = [file for name, words in flags if name == CONFIG for file in words or [""]]
    given = {name: words for name, words in flags if name != CONFIG}
    mistakes = [
        UserError(
            f"--{name}",
            f"given {count} times",
            f"give it once{', with all values' * _is_list(fields.get(name))}",
        )
        for name, count in Counter(name for name, _ in flags).items()
        if count > 1 and name != CONFIG
    ]
    if others and command.positional and command.positional not in given:
        given[command.positional] = others
    elif others:
        mistakes.append(
            UserError(
                "command line",
                shlex.join(others),
                _hint_for_others(others[0], before_others, fields),
            )
        )
    values = {name: _value_of(words, fields.get(name)) for name, words in given.items()}
    return files, values, [line for mistake in mistakes for line in mistake.mistakes]


def _is_list(field: FieldInfo | None) -> bool:
    return field is not None and get_origin(field.annotation) is tuple


def _value_of(words: list[str], field: FieldInfo | None) -> object:
    """The value of a flag with these words; `field` is None for an unknown name."""
    if words:
        return words if len(words) > 1 else words[0]
    return True if field and bool in kinds_of(field.annotation) else NoValue()


def _hint_for_others(word: str, flag: str, fields: Mapping[str, FieldInfo]) -> str:
    """The hint for words that no flag takes, of which the first is `word`, after the value of
    `flag` (empty: none)."""
    if not flag and word.endswith((".yaml", ".yml")):
        return f"a file of settings is given as --config {word}"
    if word.partition("=")[0] in fields:
        return f"flags begin with --, like --{word}"
    if word.startswith(("\N{EN DASH}", "\N{EM DASH}", "\N{MINUS SIGN}")):
        return "flags begin with two hyphens, --; this is a longer dash"
    if flag == CONFIG:
        return "--config takes one file; repeat it for others: --config FIRST --config SECOND"
    if _is_list(fields.get(flag)):
        return f"--{flag}=VALUE takes one value; for several, write --{flag} VALUE VALUE"
    if flag in fields:
        return f"--{flag} takes one value; quote blanks, and a wildcard, which the shell replaces by all names: '*.txt'"
    return "no flag takes it; flags are --NAME VALUE, and --help lists them"


def resolve(
    command: type[C],
    files: Sequence[str],
    changes: Mapping[str, Any],
    default: Default = None,
) -> C:
    """The validated configuration of YAML files (later files win) and `changes`, by dotted names,
    which override them. `model_fields_set` of its sections has the fields of both, without a
    preset's. Raises: UserError, as `load`."""
    parts = sections(command)
    contents = [*map(read_yaml, files)]
    for file, content in zip(files, contents, strict=True):
        _check_file(command, file, content)
    layers = [*map(flat, (*contents, changes))]
    preset = None if files else _preset(default, layers[-1])
    given: dict[str, Any] = {}
    for layer in layers:
        if not layer.keys().isdisjoint(command.alternatives):
            given |= dict.fromkeys(command.alternatives)
        given |= {
            name: value
            for name, value in layer.items()
            if name not in parts or value not in (None, {})
        }
    single = command.model_fields.keys() - parts
    config = command.model_validate(
        nested((flat(read_yaml(preset)) if preset else {}) | given, single)
    )
    own = nested(given)
    for name in parts:
        getattr(config, name).model_fields_set.intersection_update(own.get(name, ()))
    if preset and preset != _preset(default, {}):
        print_line(f"note: no --config; the preset for these data is {preset}")
    return config


def _check_file(command: type[Command], file: str, content: dict[str, Any]) -> None:
    """Raises: UserError for a file of another command, and for a field that only a flag may turn
    on."""
    if len(content) > 1 and {key.partition(".")[0] for key in content}.isdisjoint(
        command.model_fields
    ):
        raise UserError("--config", file, other_file(content))
    values = flat(content)
    for name, field in leaves(command):
        is_only_flag = any(isinstance(mark, OnlyFlag) for mark in field.metadata)
        if is_only_flag and values.get(name) not in (None, False):
            raise UserError(
                name,
                values[name],
                f"is in {file}; a file cannot turn it on: give the flag --{name} true",
            )


def _preset(default: Default, flags: Mapping[str, Any]) -> str | None:
    return default(flags) if callable(default) else default


def dump(config: Command) -> str:
    """The configuration as YAML, for `--config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


YAML_PROBLEMS = {
    "expected <block end>": "the indentation differs from that of the lines above",
    "expected '<document start>'": "this is no YAML",
    "expected ',' or": "a comma or a closing bracket is missing",
    "could not find expected ':'": "a key without a colon",
    "mapping values are not allowed": "a second colon; quote a text that has one",
    "found character": "a tab, @, ` or % begins this; indent by blanks, quote texts",
}
"""PyYAML's problems of common mistakes, by their beginnings, in plain words."""


class _Loader(yaml.BaseLoader):
    """Texts, lists and mappings, and the values of `VALUE`; refuses aliases and repeated keys,
    ignores tags. So a word such as `no`, `010`, `1:30` or `2026-01-02` has its meaning on the
    command line, not that of YAML 1.1."""

    def fetch_alias(self) -> None:
        raise MarkedYAMLError(
            problem="an alias; quote a text that begins with *", problem_mark=self.get_mark()
        )

    def construct_scalar(self, node: Any) -> Any:
        text = super().construct_scalar(node)
        return json.loads(text or "null") if node.style is None and VALUE.fullmatch(text) else text

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise MarkedYAMLError(
                    problem=f"the key {key.value} is there twice", problem_mark=key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """The value of YAML text that anybody may have written. Raises: ValueError, also as
    `check_limits`."""
    try:
        return check_limits(yaml.load(text, _Loader))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        lines = text.splitlines()
        shown = (
            f"; the line is {truncate(lines[mark.line].strip(), 60)}"
            if mark and mark.line < len(lines)
            else ""
        )
        problem = str(error.problem or error.context)
        plain = next(
            (words for beginning, words in YAML_PROBLEMS.items() if problem.startswith(beginning)),
            problem,
        )
        raise ValueError(f"{where}{plain}{shown}") from error
    except ReaderError as error:
        raise ValueError(
            f"has a character that YAML forbids, at position {error.position}"
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    except RecursionError as error:
        raise ValueError(f"is nested more than {DEEPEST} levels deep") from error


def _hint_for_file(file: str, error: OSError) -> str:
    """The hint for a file that cannot be read."""
    if os.path.isdir(file):
        inside = os.path.join(file, "config.yaml")
        return f"is a folder; name a file{f' in it, {inside}' if os.path.isfile(inside) else ''}"
    if isinstance(error, FileNotFoundError):
        shipped = {
            preset.stem: preset.relative_to(PROJECT)
            for preset in (PROJECT / "configs").rglob("*.yaml")
        }
        near = difflib.get_close_matches(Path(file).stem, shipped, n=1)
        return "there is no such file" + "".join(
            f"; did you mean {shipped[name]}?" for name in near
        )
    return f"cannot be read ({error.strerror or error})"


def read_yaml(file: str, field: str = "--config") -> dict[str, Any]:
    """The sections and keys of a YAML file. A missing one is looked up in the project's folder, so
    that configs/gpt2_124m.yaml is found from any folder. Raises: UserError if the file cannot be
    read, or holds no mapping.
    """
    path = Path(file) if os.path.exists(file) else PROJECT / file
    try:
        check_name(file)
    except ValueError as error:
        raise UserError(field, file, str(error)) from error
    try:
        values = parse_yaml(read_small(path, LARGEST).decode())
    except UnicodeDecodeError as error:
        raise UserError(field, file, "is no YAML file: its text is not UTF-8") from error
    except OSError as error:
        raise UserError(field, file, _hint_for_file(file, error)) from error
    except ValueError as error:
        raise UserError(field, file, f"cannot be read as YAML ({error})") from error
    if not isinstance(values, dict | None):
        raise UserError(field, file, "should contain sections and keys, like `train: {steps: 100}`")
    return values or {}
