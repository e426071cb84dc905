"""Command lines: defaults < YAML files, left to right < dotted flags. pydantic validates, argparse writes `--help`."""

import argparse
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import MOST, Command, flat, join_errors, leaves, nearest, sections
from gpt2_ddp.config.yaml_file import read_yaml
from gpt2_ddp.distributed.environment import is_main_process, under_launcher
from gpt2_ddp.distributed.process import CHILD, end_with_parent
from gpt2_ddp.distributed.signals import exit_on_signal
from gpt2_ddp.errors import UserError, truncate

C = TypeVar("C", bound=Command)
Default = str | Callable[[Mapping[str, Any]], tuple[str, str]] | None
"""The YAML file, relative to the project's folder, that stands in where no `--config` is given; or what chooses it by
the flags that are given, and says so in a line, or an empty one."""


def run_command(command: type[C], main: Callable[[C], int | None], default: Default = None) -> NoReturn:
    """The body of every script: read `sys.argv`, call `main`, exit with its code, or with 2 on a user's mistake, or
    with 75 when a signal asks for it, or like one that SIGPIPE ends when nobody reads on, as in `| head`.

    Args:
        command: the class of the script's configuration.
        main: imports what it needs inside, so that `--help` stays fast; returns an exit code, None for 0.
        default: the file that stands in when no `--config` is given.
    """
    with exit_on_signal(_say):
        if under_launcher() or CHILD in os.environ:  # it may die without passing the signal on
            end_with_parent(signal.SIGTERM)
        try:
            code = main(load(command, sys.argv[1:], default))
            print(end="", flush=True)
        except BrokenPipeError:
            if not _is_unread(sys.stdout.fileno()):
                raise
            code = 128 + signal.SIGPIPE
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still to be written
        except UserError as error:
            for mistake in error.mistakes:
                _say(f"error: {mistake}")
            code = 2
            _leave_process_group()
    sys.exit(code)


def _say(line: str) -> None:
    if is_main_process():
        print(line, file=sys.stderr, flush=True)


def _is_unread(descriptor: int) -> bool:
    """Whether it is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _leave_process_group() -> None:
    """Ranks that end while others are still connected are aborted by gloo's threads."""
    distributed = sys.modules.get("torch.distributed")  # imported only if the command got that far
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()


def load(command: type[C], argv: Sequence[str], default: Default = None) -> C:
    """Builds and validates a configuration from command-line arguments.

    Raises:
        UserError: with the mistakes found, the first MOST of them, each naming the field, its value and the hint.
        SystemExit: after `--help` or `--print_config`.
    """
    parser = _parser(command, default)
    arguments, unknown = parser.parse_known_args(argv)
    flags = {name: value for name, value in vars(arguments).items() if name not in ("config", "print_config")}
    known = dict(leaves(command))
    if positional := flags.pop("positional", None):
        flags.setdefault(command.positional, positional)
    words = _without_values(unknown)
    mistakes = [_unknown_word(word, list(known)) for word in words[: MOST + 1]]

    files = [str(file) for file in arguments.config or ()]  # argparse makes an empty list of a lone `--`
    changes = {name: _flag_value(known[name], text) for name, text in flags.items()}
    config = resolve(command, files, changes, default, mistakes)
    if arguments.print_config:
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
    """The configuration of `files`, of which later ones win, and of `changes`, by dotted names, which win over all.

    Args:
        default: the file that stands in where there are none.
        mistakes: those that were found already.

    Raises:
        UserError: as `load` does.
    """
    note = ""
    if not files and default:
        file, note = (default, "") if isinstance(default, str) else default(changes)
        files = [file]
    values = {name: section.model_dump(exclude_unset=True) for name, section in sections(command).items()}
    for file in files:
        _merge(values, read_yaml(file))
    for name, value in changes.items():
        _set(values, name.split("."), value)
    try:
        config = command.model_validate(values)
    except UserError as error:
        raise join_errors([*mistakes, *(_of_other_kinds(command, files) or error.mistakes)]) from error
    if mistakes:
        raise join_errors(mistakes)
    if note:
        _say(note)
    return config


def _of_other_kinds(command: type[Command], files: Sequence[str]) -> list[str]:
    """A mistake for each file that has keys which `command` lacks, and all of them are those of a training."""
    from gpt2_ddp.config.kinds import CONFIGS

    found = []
    for file in files:
        keys = {*flat(read_yaml(file))}
        scripts = [str(kind.__doc__).partition(":")[0] for kind in CONFIGS.values() if keys <= {*dict(leaves(kind))}]
        if scripts and not keys <= {*dict(leaves(command))}:
            found += UserError("--config", file, f"is for {' or '.join(scripts)}: name one for this script").mistakes
    return found


def dump(config: Command) -> str:
    """The configuration as YAML that `--config` takes back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


class _Parser(argparse.ArgumentParser):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # -1e-3 is a value, as from Python 3.14 on

    def error(self, message: str) -> NoReturn:
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message}; --help lists every flag")


def _parser(command: type[Command], default: Default) -> _Parser:
    default = default if default is None or isinstance(default, str) else default({})[0]
    parser = _Parser(description=command.__doc__, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    files = f"YAML file; repeatable, later files win (default: {default})" if default else "YAML file; repeatable"
    parser.add_argument("--config", action="append", metavar="FILE", default=None, help=files)
    parser.add_argument("--print_config", action="store_true", default=False, help="print the configuration and exit")
    if command.positional:
        many = get_origin(command.model_fields[command.positional].annotation) is tuple
        text = f"the same as --{command.positional}"
        parser.add_argument("positional", nargs="*" if many else "?", metavar=command.positional.upper(), help=text)
    groups: dict[str, Any] = {"": parser}
    for name, field in leaves(command):
        section = name.rpartition(".")[0]
        if section not in groups:
            model = command.model_fields[section].annotation
            groups[section] = parser.add_argument_group(f"{section}: {model.__doc__}")
        options: dict[str, Any] = {"metavar": _metavar(field), "dest": name}
        extra = field.json_schema_extra
        if alone := "true" if field.annotation is bool else extra.get("alone") if isinstance(extra, dict) else None:
            options |= {"nargs": "?", "const": alone}
        elif _takes_several(field):
            options |= {"nargs": "+"}
        shown = "null" if field.default is None else field.default
        shown = "none" if shown == () else shown
        shown = " ".join(map(str, shown)) if isinstance(shown, tuple) else shown
        text = f"{' '.join((field.description or '').split())} (default: {shown})"
        groups[section].add_argument(f"--{name}", help=text.replace("%", "%%"), **options)
    return parser


def _metavar(field: FieldInfo) -> str:
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind not in (type(None), Ellipsis)]
    kinds = list(get_args(kinds[0])) or kinds  # several of a Literal's choices
    if all(isinstance(kind, str) for kind in kinds):  # a Literal's choices
        return "{" + ",".join(map(str, kinds)) + "}"
    return getattr(kinds[0], "__name__", "VALUE").upper().replace("STR", "TEXT")


def _takes_several(field: FieldInfo) -> bool:
    return tuple in map(get_origin, (field.annotation, *get_args(field.annotation)))


def _flag_value(field: FieldInfo, text: str | list[str]) -> Any:
    if isinstance(text, list):
        if len(text) != 1 or not _takes_several(field) or get_args(field.annotation)[0] is str:
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
    return f"{truncate(word)}: there is no such flag{nearest(name, [*known, 'config', 'print_config'], '--')}"
