"""Configuration from YAML files and the command line: defaults < files, left to right < dotted flags.

pydantic validates; argparse splits the command line and prints `--help`.
"""

import json
import os
import re
import select
import signal
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from yaml.constructor import ConstructorError

from gpt2_ddp.config.base import Command, flat, join_errors, leaves, sections
from gpt2_ddp.distributed.environment import (
    is_main_process,
    record_exit,
    under_launcher,
    unset_unfilled_variables,
)
from gpt2_ddp.distributed.process import CHILD, end_with_parent
from gpt2_ddp.distributed.signals import exit_on_signal
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_limits, read_small
from gpt2_ddp.project import PROJECT

LARGEST = 2**16
"""Largest YAML file, in bytes; shipped files have 2,000. The parser takes about 10 s per megabyte (estimate)."""

C = TypeVar("C", bound=Command)
Default = str | Callable[[Mapping[str, Any]], tuple[str, str]] | None
"""The preset without `--config`: a YAML file relative to the project's folder, or a function that returns the file and
a note (or "") for the given flags."""


def run_command(command: type[C], main: Callable[[C], object] | str, default: Default = None) -> NoReturn:
    """The body of every script: parses `sys.argv`, calls `main` and exits.

    The exit code is that of `main`, or 0 if it returns no integer. It is 2 after a user error, 75 if a signal stopped
    it, and 141, as after SIGPIPE, if standard output is closed, as by `| head`.

    Args:
        command: class of the script's configuration.
        main: the work, or its name, `module:function`. It is imported after `--help`, which stays fast.
        default: preset without `--config`.
    """
    unset_unfilled_variables()
    with exit_on_signal(_print_line):
        if under_launcher() or CHILD in os.environ:  # the parent may end without passing the signal on
            end_with_parent(signal.SIGTERM)
        try:
            config = load(command, sys.argv[1:], default)
            if isinstance(main, str) and "checkpoint" in command.model_fields:
                _print_line("loading PyTorch")  # for seconds
            code = (resolve_name(main) if isinstance(main, str) else main)(config)
            print(end="", flush=True)
        except BrokenPipeError:
            stdout, poll = sys.stdout.fileno(), select.poll()
            poll.register(stdout, 0)
            if not poll.poll(0):  # another pipe is broken
                raise
            code = 128 + signal.SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)  # for buffered output
        except UserError as error:
            for mistake in error.mistakes:
                _print_line(f"error: {mistake}")
            code = record_exit(2)
        sys.exit(code if isinstance(code, int) else 0)


def _print_line(line: str) -> None:
    if is_main_process():
        print(line, file=sys.stderr, flush=True)


def load(command: type[C], argv: Sequence[str], default: Default = None) -> C:
    """The validated configuration of a command line.

    Raises:
        UserError: all user errors, up to `config.base.MOST`; each names field, value and hint.
        SystemExit: after `--help` or `--print_config`.
    """
    if place := next((at for at, word in enumerate(argv, 1) if word.startswith(("-h", "--help"))), 0):
        preset = default if isinstance(default, str | None) else default({})[0]
        make_parser(command, preset, () if "all" in argv[place : place + 1] else command.first).print_help()
        sys.exit(0)
    arguments, unknown = make_parser(command).parse_known_args(argv)
    flags = vars(arguments)
    files = [str(file) for file in flags.pop("config") or ()]  # argparse makes an empty list of a lone `--`
    prints = flags.pop("print_config", False)
    known = dict(leaves(command))
    if positional := flags.pop("positional", None):
        flags.setdefault(command.positional, positional)
    pairs = zip(["", *unknown], unknown, strict=False)
    words = [word for before, word in pairs if word[:1] == "-" or before[:1] != "-"]  # no values of unknown flags
    mistakes: list[str] = []
    if words:
        from gpt2_ddp.config.hints import unknown_words

        mistakes = unknown_words(words, list(known))
    changes = {name: _flag_value(known[name], text) for name, text in flags.items()}
    config = resolve(command, files, changes, default, mistakes)
    if prints:
        print(dump(config), end="")
        sys.exit(0)
    return config


def resolve(
    command: type[C],
    files: Sequence[str],
    changes: Mapping[str, Any],
    default: Default = None,
    mistakes: Sequence[str] = (),
) -> C:
    """The validated configuration of YAML files (later files win) and `changes`, by dotted names, which override them.
    `mistakes`: user errors of the command line, to report with those found here. Raises: UserError, as `load`."""
    note, from_preset = "", not files and bool(default)
    if not files and default:
        file, note = (default, "") if isinstance(default, str) else default(changes)
        files = [file]
    values = {name: section.model_dump(exclude_unset=True) for name, section in sections(command).items()}
    contents = [read_yaml(file) for file in files]
    for content in contents:
        _merge(values, content)
    for name, value in changes.items():
        section, _, field = name.rpartition(".")
        target = values.setdefault(section, {}) if section else values
        if isinstance(target, dict):  # otherwise a file has one value for the section, which validation reports
            target[field] = value
    try:
        config = command.model_validate(values)
    except UserError as error:
        from gpt2_ddp.config.hints import other_script

        others = [mistake for pair in zip(files, contents, strict=True) for mistake in other_script(command, *pair)]
        follows = mistakes and not error.__cause__  # an error between fields, one of which has an unknown name
        raise join_errors([*mistakes, *(others or ([] if follows else error.mistakes))]) from error
    if mistakes:
        raise join_errors(mistakes)
    own = Path(*config.model_dump(include={"output_dir", "run_name"}).values(), "config.yaml")
    if from_preset and "run_name" in changes and own.is_file():
        from gpt2_ddp.config.hints import check_flags_of_run

        check_flags_of_run(config, changes, own, read_yaml(str(own)))
    if note:
        _print_line(note)
    return config


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


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message}; --help lists all flags")


def make_parser(command: type[Command], preset: str | None = None, only: tuple[str, ...] = ()) -> _Parser:
    """A parser of all flags of a command or, for `--help`, of those in `only`. Its help shows values of the file
    `preset`."""
    defaults, fields = flat(read_yaml(preset)) if preset else {}, leaves(command)
    more = f"--help all lists all {len(fields)} flags" if only else None
    parser = _Parser(
        description=command.__doc__, epilog=more, argument_default=SUPPRESS, add_help=False, allow_abbrev=False
    )
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is a value, as from Python 3.14 on
    parser.add_argument("-h", "--help", nargs="?", metavar="all", help="list the flags that people type first, or all")
    files = "YAML file; repeatable, later files win" + f" (default: {preset})" * bool(preset)
    parser.add_argument("--config", metavar="FILE", action="append", default=None, help=files)
    parser.add_argument("--print_config", action="store_true", help="print the configuration and exit")
    if command.positional:
        many = get_origin(command.model_fields[command.positional].annotation) is tuple
        text = f"the same as --{command.positional}"
        parser.add_argument("positional", nargs="*" if many else "?", metavar=command.positional.upper(), help=text)
    groups: dict[str, Any] = {"": parser}
    for name, field in fields:
        if only and name not in only:
            continue
        section = name.rpartition(".")[0]
        if section not in groups:
            model = command.model_fields[section].annotation
            groups[section] = parser.add_argument_group(f"{section}: {model.__doc__}")
        shown = defaults.get(name, field.default)
        several = isinstance(shown, tuple | list)
        shown = " ".join(map(str, shown)) or "none" if several else json.dumps(shown).strip('"')
        text = f"{' '.join((field.description or '').split())} (default: {shown})".replace("%", "%%")
        groups[section].add_argument(f"--{name}", help=text, metavar=_metavar(field), dest=name, **_flag_options(field))
    return parser


def _metavar(field: FieldInfo) -> str:
    """The kinds of values that a flag takes, like `INT` or `{auto,true,false}`."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not Ellipsis]
    inner = [part for kind in kinds for part in get_args(kind) or (kind,) if part is not Ellipsis]
    words = (part if isinstance(part, str) else getattr(part, "__name__", "VALUE").upper() for part in inner)
    kinds = {"STR": "TEXT", "BOOL": "true,false", "NONETYPE": "null"}
    text = ",".join(dict.fromkeys(kinds.get(word, word) for word in words))
    return f"{{{text}}}" if "," in text else text


def _flag_options(field: FieldInfo) -> dict[str, Any]:
    """How many values argparse lets the field's flag take."""
    extra = field.json_schema_extra
    if alone := "true" if field.annotation is bool else extra.get("alone") if isinstance(extra, dict) else None:
        return {"nargs": "?", "const": alone}
    return {"nargs": "+"} if _takes_several(field) else {}


def _takes_several(field: FieldInfo) -> bool:
    return tuple in map(get_origin, (field.annotation, *get_args(field.annotation)))


def _flag_value(field: FieldInfo, text: str | list[str]) -> Any:
    if isinstance(text, list):
        if len(text) != 1 or not _takes_several(field) or get_args(field.annotation)[0] is str:
            return text  # empty after a lone `--`
        inside = text[0].strip("[] ")
        return [item.strip() for item in inside.split(",")] if inside else []
    if text.lower() in ("null", "none") and type(None) in get_args(field.annotation):
        return None
    return text


def _merge(into: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif value is not None or not isinstance(into.get(key), dict):
            into[key] = value
