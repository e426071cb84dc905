"""Configuration from YAML files and the command line. Later ones override earlier ones:

    defaults < preset < --config FILE, from left to right < --optim.lr 3e-4

A flag is a key of a section. Its value is that of the same key in YAML. pydantic validates both.
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
from typing import Any, NamedTuple, TypeVar, cast

import yaml
from pydantic.fields import FieldInfo
from yaml.error import Mark, MarkedYAMLError
from yaml.reader import ReaderError

from gpt2_ddp.config.base import (
    MOST,
    Command,
    NoValue,
    OnlyFlag,
    Section,
    check_name,
    flat,
    is_list,
    kinds_of,
    leaves,
    nested,
    open_sections,
    sections,
)
from gpt2_ddp.config.help import help_text, other_file
from gpt2_ddp.config.own_settings import NO_CLASS, OWN, OwnConfig, settle, with_settings
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


SettingsOf = Callable[[str, bool], type[Section]]
"""Returns the settings of a class, from its name, and whether a flag --task gives that name."""


def load(
    command: type[C],
    argv: Sequence[str],
    default: Default = None,
    settings_of: SettingsOf | None = None,
) -> C:
    """The validated configuration of a command line. `settings_of`: for the help of a class, and
    for `--print_config`, which refuses what a training refuses.

    Raises:
        UserError: all user errors, up to `MOST`; each names field, value and hint.
        SystemExit: after `--help` or `--print_config`.
    """
    if {"-h", "--help"}.intersection(argv):
        _print_help(command, argv, default, settings_of)
        sys.exit(0)
    words = [word for word in argv if word != "--print_config"]
    files, flags, mistakes = split_flags(command, words)
    try:
        config = resolve(command, files, flags, default)
    except UserError as error:
        raise UserError.join([*mistakes, *error.mistakes][:MOST]) from error
    if mistakes:
        raise UserError.join(mistakes[:MOST])
    if "--print_config" in argv:
        if settings_of:
            _check_own_settings(config, flags, settings_of)
        print(dump(config), end="")
        sys.exit(0)
    return config


def _print_help(
    command: type[Command], argv: Sequence[str], default: Default, settings_of: SettingsOf | None
) -> None:
    """Prints the help, with the defaults that hold beside the other flags. Raises: UserError for a
    class that cannot be loaded."""
    given = split_flags(command, [word for word in argv if word not in ("-h", "--help", "all")])
    preset = None if given.files else _preset(default, given.values)
    files = [preset] if preset else given.files
    defaults: dict[str, Any] = {}
    for file in files:
        defaults |= flat(read_yaml(file))
    only = () if "all" in argv else command.first
    task = given.values.get("task")
    if settings_of and isinstance(task, str):
        settings = settings_of(task, True)
        command = with_settings(command, settings)
        only = only and (*only, *(f"{OWN}.{name}" for name in settings.model_fields))
    print(help_text(command, files, defaults, only))


def _check_own_settings(
    config: Command, flags: Mapping[str, object], settings_of: SettingsOf
) -> None:
    """Raises: UserError for a class that a training would not load, and for settings that the class
    does not have. A run that is resumed or branched has its own class, which the training checks.
    """
    fields = dict(config)
    own = fields.get(OWN)
    task = fields.get("task")
    if not isinstance(own, OwnConfig):
        return
    if isinstance(task, str):
        settle(own, settings_of(task, flags.get("task") == task), task.rpartition(":")[2])
        return
    run = os.path.join(str(fields.get("output_dir")), str(fields.get("run_name")))
    branches = flat(config.model_dump()).get("train.branch_from")
    if not branches and not os.path.exists(run):
        settle(own, Section, NO_CLASS)


class Flags(NamedTuple):
    """What a command line gives."""

    files: list[str]
    """Those of `--config`, in order."""
    values: dict[str, object]
    """Of each flag by its name, for pydantic: a text; the list of several words; without a word
    true or a `NoValue`."""
    mistakes: list[str]
    """User errors."""


def split_flags(command: type[Command], argv: Sequence[str]) -> Flags:
    """The flags of a command line. A flag of a list takes all words up to the next flag, others
    take one word. `--NAME=WORD` takes that word only. Remaining words are values of the field
    `command.positional`."""
    fields = dict(leaves(command))
    lists = {name for name, field in fields.items() if is_list(field)}
    # a class says later what its settings are
    any_names = open_sections(command)
    flags: list[tuple[str, list[str]]] = []
    others: list[str] = []  # words that no flag takes
    before_others = ""  # the flag in front of the first of them
    words: list[str] = []  # of the last flag
    room = 0  # words that it may still take
    for word in argv:
        if FLAG.match(word):
            name, equals, value = word.removeprefix("--").partition("=")
            words = [value] if equals else []
            flags.append((name, words))
            room = len(argv) if name in lists or name.startswith(any_names) else 1
            if equals:
                room = 0
        elif room:
            words.append(word)
            room -= 1
        else:
            before_others = before_others or (flags[-1][0] if flags else "")
            others.append(word)
    files = [file for name, words in flags if name == CONFIG for file in words or [""]]
    given = {name: words for name, words in flags if name != CONFIG}
    mistakes: list[str] = []
    for name, count in Counter(name for name, _ in flags).items():
        if count > 1 and name != CONFIG:
            hint = "give it once, with all values" if name in lists else "give it once"
            mistakes += UserError(f"--{name}", f"given {count} times", hint).mistakes
    if others and command.positional and command.positional not in given:
        given[command.positional] = others
    elif others:
        hint = _hint_for_others(others[0], before_others, fields)
        mistakes += UserError("command line", shlex.join(others), hint).mistakes
    values = {name: _value_of(words, fields.get(name)) for name, words in given.items()}
    return Flags(files, values, mistakes)


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
    if flag not in fields:
        return "no flag takes it; flags are --NAME VALUE, and --help lists them"
    if is_list(fields[flag]):
        return f"--{flag}=VALUE takes one value; for several, write --{flag} VALUE VALUE"
    hint = "quote blanks, and a wildcard, which the shell replaces by all names: '*.txt'"
    return f"--{flag} takes one value; {hint}"


def resolve(
    command: type[C],
    files: Sequence[str],
    changes: Mapping[str, Any],
    default: Default = None,
) -> C:
    """The validated configuration of YAML files (later files win) and `changes`, by dotted names,
    which override them. `model_fields_set` of its sections has the fields of both, without a
    preset's. Raises: UserError, as `load`."""
    section_names = sections(command).keys()
    contents = [*map(read_yaml, files)]
    for file, content in zip(files, contents, strict=True):
        _check_file(command, file, content)
    layers = [*map(flat, (*contents, changes))]
    preset = None if files else _preset(default, layers[-1])
    defaults = flat(command.model_construct().model_dump()) if command.alternatives else {}
    given: dict[str, Any] = {}
    for layer in layers:
        for alternatives in command.alternatives:
            if not layer.keys().isdisjoint(alternatives):
                given |= {name: defaults[name] for name in alternatives}
        given |= {
            name: value
            for name, value in layer.items()
            if name not in section_names or value not in (None, {})
        }
    values = flat(read_yaml(preset)) | given if preset else given
    config = command.model_validate(nested(values, command.model_fields.keys() - section_names))
    given_fields = nested(given)
    for name in section_names:
        getattr(config, name).model_fields_set.intersection_update(given_fields.get(name, ()))
    if preset and preset != _preset(default, {}):
        print_line(f"note: no --config; the preset for these data is {preset}")
    return config


def _check_file(command: type[Command], file: str, content: dict[str, Any]) -> None:
    """Raises: UserError for a file of another command, and for a field that only a flag may turn
    on."""
    values = flat(content)
    keys = {name.partition(".")[0] for name in values}
    if len(content) > 1 and keys.isdisjoint(command.model_fields):
        raise UserError("--config", file, other_file(content))
    for name, field in leaves(command):
        is_only_flag = any(isinstance(mark, OnlyFlag) for mark in field.metadata)
        if is_only_flag and values.get(name) not in (None, False):
            hint = f"is in {file}; a file cannot turn it on: give the flag --{name} true"
            raise UserError(name, values[name], hint)


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
        problem = "an alias; quote a text that begins with *"
        # types-PyYAML leaves `get_mark` untyped
        mark = cast(Mark, self.get_mark())  # pyright: ignore[reportUnknownMemberType]
        raise MarkedYAMLError(problem=problem, problem_mark=mark)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:  # noqa: ANN401  as in PyYAML
        text = super().construct_scalar(node)
        is_quoted = node.style is not None
        return text if is_quoted or not VALUE.fullmatch(text) else json.loads(text or "null")

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                problem = f"the key {key.value} is there twice"
                raise MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> object:
    """The value of YAML text that anybody may have written. Raises: ValueError, also as
    `check_limits`."""
    try:
        return check_limits(yaml.load(text, _Loader))
    except MarkedYAMLError as error:
        raise ValueError(_explain(error, text.splitlines())) from error
    except ReaderError as error:
        hint = f"has a character that YAML forbids, at position {error.position}"
        raise ValueError(hint) from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error
    except RecursionError as error:
        raise ValueError(f"is nested more than {DEEPEST} levels deep") from error


def _explain(error: MarkedYAMLError, lines: Sequence[str]) -> str:
    """A problem of the YAML text with these lines, in plain words, with its place."""
    problem = str(error.problem or error.context)
    for beginning, words in YAML_PROBLEMS.items():
        if problem.startswith(beginning):
            problem = words
            break
    mark = error.problem_mark or error.context_mark
    if not mark:
        return problem
    problem = f"line {mark.line + 1}, column {mark.column + 1}: {problem}"
    if mark.line >= len(lines):
        return problem
    return f"{problem}; the line is {truncate(lines[mark.line].strip(), 60)}"


def _hint_for_file(file: str, error: OSError) -> str:
    """The hint for a file that cannot be read."""
    if os.path.isdir(file):
        inside = os.path.join(file, "config.yaml")
        if os.path.isfile(inside):
            return f"is a folder; name a file in it, {inside}"
        return "is a folder; name a file"
    if not isinstance(error, FileNotFoundError):
        return f"cannot be read ({error.strerror or error})"
    shipped = {preset.stem: preset for preset in (PROJECT / "configs").rglob("*.yaml")}
    near = difflib.get_close_matches(Path(file).stem, shipped, n=1)
    if not near:
        return "there is no such file"
    return f"there is no such file; did you mean {shipped[near[0]].relative_to(PROJECT)}?"


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
    return cast(dict[str, Any], values or {})
