"""What few commands need, imported on demand: `--help`, user errors, fields that differ from a saved run's."""

import difflib
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import Command, flat, kinds_of, leaves, nested, sections
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from gpt2_ddp.config.run import RunConfig

MOST = 20
"""Most user errors that one command prints."""
MOST_SOURCES = 32
"""Most sources of a mixture: with more, the largest source could get less than its share of a block."""


def describe(command: type[BaseModel], error: ValidationError) -> list[str]:
    """The first of pydantic's errors of each field, as `field = value: problem; hint`."""
    known = dict(leaves(command))
    found: dict[str, str] = {}
    for details in error.errors():
        name = ".".join(part for part in details["loc"][:2] if isinstance(part, str))  # without items, kinds of a value
        hint = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if details["type"] == "extra_forbidden":
            hint = f"unknown key{nearest(name, [*known, *sections(command)])}"
        elif name in known and known[name].default not in (None, ()):
            hint += f"; the default is {known[name].default}"
        found.setdefault(name, UserError(name, details["input"], hint).mistakes[0])
    return [*found.values()][:MOST]


def nearest(name: str, known: Sequence[str]) -> str:
    """The hint for an unknown name: the nearest of the `known`, or --help."""
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1)  # `lr` finds optim.lr
    return f"; did you mean {tails[near[0]]}?" if near else "; --help lists all names"


def mixture_mistakes(config: Any) -> Iterator[tuple[str, object, str]]:
    """User errors between the fields of several folders in a `TrainingConfig`, as `Command.mistakes`."""
    data, paths = config.data, config.data.paths
    if len({os.path.normpath(path) for path in paths}) < len(paths):
        yield "data.path", " ".join(paths), "contains a folder twice; name it once and set data.weights"
    if len(paths) > MOST_SOURCES:
        yield "data.path", f"{len(paths)} folders", f"should be at most {MOST_SOURCES}; prepare several as one"
    given = {"data.weights": data.weights} if data.weights else {}
    given |= {f"data.phases, number {number}": phase.weights for number, phase in enumerate(data.phases, 1)}
    for field, weights in given.items():
        if len(weights) != len(paths) or min(weights) < 0 or not 0 < sum(weights) < math.inf:
            hint = f"should be {len(paths)} numbers, one for each folder of data.path, each at least 0, not all 0"
            yield field, " ".join(map(str, weights)), hint
    for before, phase, begins in zip([0, *config.phase_begins], data.phases, config.phase_begins, strict=False):
        if begins <= before:
            hint = f"should begin a block of {config.block_tokens} tokens or more after the last phase"
            yield "data.phases", phase.at_tokens, hint


def complete(command: type[Command], saved: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of `command` in a saved configuration of any release, as `dump` writes them, without validation: newer
    fields have defaults, and those that no longer exist are left out. `saved` is parsed output of `dump`."""
    values, given = flat(command.model_construct().model_dump(mode="json")), flat(saved)
    return nested({name: given.get(name, default) for name, default in values.items()})


def differences(config: Command, saved: Mapping[str, Any], parts: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """(field, value, saved value) of the fields in `parts` (sections and fields) that differ."""
    before, now = flat(complete(type(config), saved)), flat(config.model_dump(mode="json"))
    inside = tuple(f"{part}." for part in parts)
    names = [name for name in now if f"{name}.".startswith(inside) and name != "data.path"]
    return [(name, now[name], before[name]) for name in names if now[name] != before[name]]


def check_resumable(config: "RunConfig", kind: str, saved: dict[str, Any], step: int) -> None:
    """Checks that this configuration can resume a checkpoint with the configuration `saved`: the fields in `kept`
    must be equal, except as `may_change` allows. Fields missing in `saved` have their defaults there. Unknown
    ones are ignored. Raises: UserError, which names every field that differs."""
    if kind != config.kind:
        hint = f"the run folder holds a run of another kind, {kind}; choose another run_name"
        raise UserError("run_name", config.run_name, hint)
    mistakes = []
    for name, now, before in differences(config, saved, config.kept):
        if not config.may_change(name, before, step):
            file = Path(config.output_dir, config.run_name, "config.yaml")
            hint = f"the run was started with {before}; restore it (--config {file}), or choose another run_name"
            mistakes += UserError(name, now, hint).mistakes
    if mistakes:
        raise UserError.join(mistakes)


def help_text(command: type[Command], preset: str | None, defaults: Mapping[str, Any], only: Sequence[str] = ()) -> str:
    """The text of `--help`: all flags of a command, or those in `only`. `defaults`: values in the file `preset`, by
    dotted names."""
    fields = leaves(command)
    words = f"[{command.positional.upper()}] " if command.positional else ""
    preset_text = f" (default: {preset})" if preset else ""
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
            parts += ["", f"{section}: {sections(command)[section].__doc__}"]
            before = section
        value = defaults.get(name, field.default)
        shown = " ".join(map(str, value)) if isinstance(value, tuple | list) else json.dumps(value).strip('"')
        parts.append(_flag_help(f"{name} {_metavar(field)}", f"{field.description or ''} (default: {shown or 'none'})"))
    if only:
        parts += ["", f"--help all lists all {len(fields)} flags"]
    return "\n".join(parts)


def _flag_help(flag: str, text: str) -> str:
    return f"  --{flag}\n" + textwrap.fill(text, 110, initial_indent=" " * 8, subsequent_indent=" " * 8)


def _metavar(field: FieldInfo) -> str:
    """The kinds of values that a flag takes, like `INT` or `{auto,true,false}`."""
    words = {str: "TEXT", bool: "true,false", type(None): "null"}
    names = [
        kind if isinstance(kind, str) else words.get(kind) or kind.__name__.upper()
        for kind in kinds_of(field.annotation)
        if isinstance(kind, type | str)
    ]
    text = ",".join(dict.fromkeys(names))
    return f"{{{text}}}" if "," in text else text
