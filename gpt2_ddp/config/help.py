"""The text of `--help` and `--help all`, imported on demand."""

import json
from argparse import SUPPRESS, ArgumentParser
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import Command, flat, leaves
from gpt2_ddp.config.cli import flag_options, read_yaml


def help_parser(command: type[Command], preset: str | None, every: bool = True) -> ArgumentParser:
    """A parser whose help lists the flags of a command with their values in the file `preset`: `every` one, or those
    that people type first."""
    defaults = flat(read_yaml(preset)) if preset else {}
    first = () if every else command.first
    more = f"--help all lists all {len(leaves(command))} flags" if first else None
    parser = ArgumentParser(description=command.__doc__, epilog=more, argument_default=SUPPRESS, add_help=False)
    files = f"YAML file; repeatable, later files win (default: {preset})" if preset else "YAML file; repeatable"
    parser.add_argument("-h", "--help", nargs="?", metavar="all", help="list the flags that people type first, or all")
    parser.add_argument("--config", metavar="FILE", help=files)
    parser.add_argument("--print_config", action="store_true", help="print the configuration and exit")
    if command.positional:
        many = get_origin(command.model_fields[command.positional].annotation) is tuple
        text = f"the same as --{command.positional}"
        parser.add_argument("positional", nargs="*" if many else "?", metavar=command.positional.upper(), help=text)
    groups: dict[str, Any] = {"": parser}
    for name, field in leaves(command):
        section = name.rpartition(".")[0]
        if first and name not in first:
            continue
        if section not in groups:
            model = command.model_fields[section].annotation
            groups[section] = parser.add_argument_group(f"{section}: {model.__doc__}")
        shown = defaults.get(name, field.default)
        several = isinstance(shown, tuple | list)
        shown = " ".join(map(str, shown)) or "none" if several else json.dumps(shown).strip('"')
        text = f"{' '.join((field.description or '').split())} (default: {shown})".replace("%", "%%")
        groups[section].add_argument(f"--{name}", help=text, metavar=_metavar(field), dest=name, **flag_options(field))
    return parser


def _metavar(field: FieldInfo) -> str:
    """The kinds of values that a flag takes, like `INT` or `{auto,true,false}`."""
    kinds = [kind for kind in get_args(field.annotation) or (field.annotation,) if kind is not Ellipsis]
    inner = [part for kind in kinds for part in get_args(kind) or (kind,) if part is not Ellipsis]
    words = (part if isinstance(part, str) else getattr(part, "__name__", "VALUE").upper() for part in inner)
    kinds = {"STR": "TEXT", "BOOL": "true,false", "NONETYPE": "null"}
    text = ",".join(dict.fromkeys(kinds.get(word, word) for word in words))
    return f"{{{text}}}" if "," in text else text
