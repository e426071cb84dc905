"""Command lines: defaults < YAML files, left to right < dotted flags. pydantic validates, argparse writes `--help`."""

import argparse
import copy
import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import Command
from gpt2_ddp.config.yaml_file import read_yaml
from gpt2_ddp.errors import FIELD, UserError, shown
from gpt2_ddp.processes.environment import under_launcher
from gpt2_ddp.processes.parent import end_with_parent
from gpt2_ddp.processes.signals import listening

C = TypeVar("C", bound=Command)
MOST = 20
"""Mistakes that are told at once; an unquoted `*.txt` on the command line makes as many as there are files."""


def run_command(command: type[C], main: Callable[[C], int | None], default: str | None = None) -> NoReturn:
    """The body of every script: read `sys.argv`, call `main`, exit with its code, or with 2 on a user's mistake, or
    with 75 when a signal asks for it.

    Args:
        command: the class of the script's configuration.
        main: imports what it needs inside, so that `--help` stays fast; returns an exit code, None for 0.
        default: YAML file, relative to the project's folder, that stands in when no `--config` is given.
    """
    with listening(_say):
        if under_launcher():  # it may die without passing the signal on
            end_with_parent(signal.SIGTERM)
        try:
            code = main(load(command, sys.argv[1:], default))
        except UserError as error:
            for mistake in error.mistakes:
                _say(f"error: {mistake}")
            code = 2
            _leave_process_group()
    sys.exit(code)


def _say(line: str) -> None:
    if is_main_process():
        print(line, file=sys.stderr, flush=True)


def _leave_process_group() -> None:
    """Ranks that end while others are still connected are aborted by gloo's threads."""
    distributed = sys.modules.get("torch.distributed")  # imported only if the command got that far
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


def is_main_process() -> bool:
    """Whether this is rank 0, or the only process, or one whose RANK is no number; known before torch is imported."""
    rank = os.environ.get("RANK", "")
    return not rank.isdigit() or int(rank) == 0


def load(command: type[C], argv: Sequence[str], default: str | None = None) -> C:
    """Builds and validates a configuration from command-line arguments.

    Raises:
        UserError: with the mistakes found, the first MOST of them, each naming the field, its value and the cure.
        SystemExit: after `--help` or `--print_config`.
    """
    parser = _parser(command, default)
    arguments, unknown = parser.parse_known_args(argv)
    flags = {name: value for name, value in vars(arguments).items() if name not in ("config", "print_config")}
    known = dict(_leaves(command))
    if positional := flags.pop("positional", None):
        flags.setdefault(command.positional, positional)
    words = _without_values(unknown)
    mistakes = [_unknown_word(word, list(known)) for word in words[: MOST + 1]]

    values = {name: default.model_dump(exclude_unset=True) for name, default in _sections(command).items()}
    files = arguments.config or ([default] if default else [])
    for file in files:
        _merge(values, read_yaml(str(file)))  # argparse makes an empty list of a lone `--`
    for name, text in flags.items():
        _set(values, name.split("."), _flag_value(known[name], text))
    config = None
    try:
        config = command.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        mistakes += dict.fromkeys(_mistake(command, details) for details in found[: MOST + 1])
    except UserError as error:
        mistakes += error.mistakes
    if mistakes or config is None:
        raise UserError.join(mistakes[:MOST] + ["and more mistakes like these"] * (len(mistakes) > MOST))
    if arguments.print_config:
        print(dump(config), end="")
        sys.exit(0)
    return config


def dump(config: Command) -> str:
    """The configuration as YAML that `--config` takes back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def complete(command: type[C], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is a value, as from Python 3.14 on

    def error(self, message: str) -> NoReturn:
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message}; --help lists every flag")


def _parser(command: type[Command], default: str | None) -> _Parser:
    parser = _Parser(description=command.__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    files = f"YAML file; repeatable, later files win (default: {default})" if default else "YAML file; repeatable"
    parser.add_argument("--config", action="append", metavar="FILE", default=None, help=files)
    parser.add_argument("--print_config", action="store_true", default=False, help="print the configuration and exit")
    if command.positional:
        many = get_origin(command.model_fields[command.positional].annotation) is tuple
        text = f"the same as --{command.positional}"
        parser.add_argument("positional", nargs="*" if many else "?", metavar=command.positional.upper(), help=text)
    groups: dict[str, Any] = {"": parser}
    for name, field in _leaves(command):
        section = name.rpartition(".")[0]
        if section not in groups:
            model = command.model_fields[section].annotation
            groups[section] = parser.add_argument_group(f"{section}: {model.__doc__}")
        options: dict[str, Any] = {"metavar": _metavar(field), "dest": name}
        if field.annotation is bool:
            options |= {"nargs": "?", "const": "true"}
        elif get_origin(field.annotation) is tuple:
            options |= {"nargs": "+"}
        shown = "null" if field.default is None else field.default
        shown = " ".join(map(str, shown)) if isinstance(shown, tuple) else shown
        text = f"{' '.join((field.description or '').split())} (default: {shown})"
        groups[section].add_argument(f"--{name}", help=text.replace("%", "%%"), **options)
    return parser


def _sections(model: type[BaseModel]) -> dict[str, BaseModel]:
    """The sections of `model` with what it sets in them, which may differ from their own defaults."""
    return {name: field.default for name, field in model.model_fields.items() if isinstance(field.default, BaseModel)}


def _leaves(model: type[BaseModel], prefix: str = "", section: BaseModel | None = None) -> list[tuple[str, FieldInfo]]:
    """Every setting below `model` with its dotted name, and with the default that it has in `section`."""
    found = []
    sections = _sections(model)
    for name, field in model.model_fields.items():
        if name in sections:
            found += _leaves(type(sections[name]), f"{prefix}{name}.", getattr(section, name, sections[name]))
        else:
            leaf = copy.copy(field)
            leaf.default = getattr(section, name, field.default)
            found.append((prefix + name, leaf))
    return found


def _metavar(field: FieldInfo) -> str:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind not in (type(None), Ellipsis)]
    if all(isinstance(kind, str) for kind in kinds):  # a Literal's choices
        return "{" + ",".join(map(str, kinds)) + "}"
    return getattr(kinds[0], "__name__", "VALUE").upper().replace("STR", "TEXT")


def _flag_value(field: FieldInfo, text: str | list[str]) -> Any:
    if isinstance(text, list):
        if len(text) != 1 or get_origin(field.annotation) is not tuple or get_args(field.annotation)[0] is str:
            return text  # of no words, when they are behind a lone `--`
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


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for section in path[:-1]:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # a file gave a single value for the section: validation says so
    values[path[-1]] = value


def _without_values(words: list[str]) -> list[str]:
    """Drops the words that follow an unknown flag: they are its values."""
    return [word for before, word in zip(["", *words], words, strict=False) if word[:1] == "-" or before[:1] != "-"]


def _unknown_word(word: str, known: list[str]) -> str:
    if word[:1] != "-":
        return UserError("command line", word, f"a value without a flag; write --FIELD {word}").mistakes[0]
    name = word.split("=")[0].lstrip("-")
    return f"{shown(word)}: there is no such flag{_nearest(name, [*known, 'config', 'print_config'], '--')}"


def _nearest(name: str, known: list[str], prefix: str = "") -> str:
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}  # `lr` finds optim.lr
    tail = name.rpartition(".")[2]
    near = [tails[tail]] if tail in tails else difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    near = near or [tails[tail] for tail in difflib.get_close_matches(tail, tails, n=1, cutoff=0.6)]
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists all"


def _mistake(command: type[Command], details: Any) -> str:
    """Words one of pydantic's errors as `field = value: what is wrong; cure`."""
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    known = dict(_leaves(command))
    field = known.get(name)
    if details["type"] == "invalid_key":  # a number, null or a date
        name = ".".join(map(str, [*details["loc"][:-1], details["input"]]))
        return f"{shown(name, FIELD)}: there is no such key; --help lists all"
    if details["type"] == "model_type":
        cure = f"should be a section of keys, like `{name}: {{key: value}}`"
    elif details["type"] == "extra_forbidden" and name in known:  # `optim.lr: 1` in a file
        cure = "there is no such key; write `{}: {{{}: ...}}`".format(*name.split("."))
    elif details["type"] == "extra_forbidden":
        cure = f"there is no such key{_nearest(name, [*known, *_sections(command)])}"
    else:
        cure = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field is not None and details["type"] == "missing":
            cure = f"should be {len(get_args(field.annotation))} values"
        if field is not None and field.default is not None:
            cure += f"; the default is {field.default}"
    return UserError(name, details["input"], cure).mistakes[0]
