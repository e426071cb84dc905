"""The text of `--help`, and the hint for a configuration file of another command."""

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import Command, kinds_of, leaves, sections
from gpt2_ddp.config.own_text import CHOSEN
from gpt2_ddp.config.tools import PrepareConfig


def other_file(content: Mapping[str, Any]) -> str:
    """The hint for a file of which no key is a field of the command: it was written for another
    one."""
    if "distributed_type" in content:
        command = "accelerate launch --config_file FILE SCRIPT"
        return f"is a configuration of Accelerate; write `{command}`"
    if content.keys() <= PrepareConfig.model_fields.keys():
        return "is a configuration of prepare_data.py, not of this command"
    if {"run_name", "train", "optim"} & content.keys():
        return "is a configuration of a training, not of this command"
    keys = ", ".join(map(str, [*content][:4]))
    return f"has no field of this command; its first keys are {keys}; --help lists the fields"


def help_text(
    command: type[Command],
    files: Sequence[str],
    defaults: Mapping[str, Any],
    only: Sequence[str] = (),
) -> str:
    """The text of `--help`: all flags of a command, or those in `only`. `defaults`: values in
    `files`, the preset or those of `--config`, by dotted names."""
    fields = leaves(command)
    words = f"[{command.positional.upper()}] " if command.positional else ""
    preset_text = f" (default: {' '.join(files)})" if files else ""
    chosen = CHOSEN if defaults.get("own_text") is True else ()
    parts = [
        f"usage: {Path(sys.argv[0]).name} {words}[--config FILE ...] [--FIELD VALUE ...]",
        "",
        str(command.__doc__),
        "",
        _flag_help("config FILE", f"YAML file; repeatable, later files win{preset_text}"),
        _flag_help("print_config", "print the configuration and exit"),
    ]
    before = ""
    for name, field in fields:
        if only and name not in only:
            continue
        section = name.rpartition(".")[0]
        if section != before:
            parts += ["", _heading(command, section)]
            before = section
        default = _as_text(defaults.get(name, field.default)) or "none"
        if name in chosen and name not in defaults:
            default = "by the rule of own_text"
        text = f"{field.description or ''} (default: {default})"
        parts.append(_flag_help(f"{name} {_metavar(field)}", text))
    if only:
        parts += ["", f"--help all lists all {len(fields)} flags"]
    return "\n".join(parts)


def _heading(command: type[Command], section: str) -> str:
    """The line above the flags of a section; empty: those without one, after the others."""
    if not section:
        return "fields outside of the sections:"
    return f"{section}: {sections(command)[section].__doc__ or 'settings of the class'}"


def _as_text(value: object) -> str:
    """A default value, as in a command."""
    if isinstance(value, tuple | list):
        return " ".join(map(str, cast(Sequence[object], value)))
    return json.dumps(value).strip('"')


def _flag_help(flag: str, text: str) -> str:
    indent = " " * 8
    return f"  --{flag}\n" + textwrap.fill(
        text, 110, initial_indent=indent, subsequent_indent=indent
    )


def _metavar(field: FieldInfo) -> str:
    """The kinds of values that a flag takes, like `INT` or `{auto,true,false}`."""
    words = {str: "TEXT", bool: "true,false", type(None): "null"}
    names: list[str] = []
    for kind in kinds_of(field.annotation):
        if isinstance(kind, str):
            names.append(kind)
        elif isinstance(kind, type):
            names.append(words.get(kind) or kind.__name__.upper())
    text = ",".join(dict.fromkeys(names))
    return f"{{{text}}}" if "," in text else text
