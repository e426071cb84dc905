"""What few commands need, imported on demand: `--help`, user errors, fields that differ from a saved run's."""

import difflib
import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gpt2_ddp.config.base import MOST, Command, NoValue, flat, kinds_of, leaves, nested, sections
from gpt2_ddp.errors import UserError

if TYPE_CHECKING:
    from gpt2_ddp.config.run import RunConfig

MOST_SOURCES = 32
"""Most sources of a mixture: with more, the largest source could get less than its share of a block."""


def describe(command: type[Command], error: ValidationError) -> list[str]:
    """The first of pydantic's errors of each field, as `field = value: problem; hint`."""
    known = dict(leaves(command))
    found: dict[str, str] = {}
    for details in error.errors():
        parts = [str(part) for part in details["loc"]]
        name = parts[0] if parts[0] in known else ".".join(parts[:2])  # without items, kinds of a value
        is_unknown = details["type"] == "extra_forbidden" and name not in known
        if is_unknown:
            hint = _unknown(command, name, details["input"])
        elif name not in known:
            name, keys = parts[0], [key.partition(".")[2] for key in known if key.startswith(f"{parts[0]}.")]
            hint = f"is a section; set its keys, like {name}.{keys[0]}"
        else:
            hint = _problem(command, name, known[name], details)
        found.setdefault(name, UserError(name, shown(details["input"]), hint).mistakes[0])
    return [*found.values()][:MOST]


def _unknown(command: type[Command], name: str, value: object) -> str:
    """The hint for an unknown key."""
    fields, above = dict(leaves(command)), name.rpartition(".")[0]
    if above in fields:
        return f"unknown key; {above} takes a value and has no keys"
    if name.startswith("-") or (isinstance(value, NoValue) and not re.fullmatch(r"[\w.]+", name)):
        return "unknown key; flags begin with --, and a value that begins with - is given as --FLAG=VALUE"
    return f"unknown key{nearest(name, [*fields, *sections(command)])}"


def other_file(content: Mapping[str, Any]) -> str:
    """The hint for a file of which no key is a field of the command: it was written for another one."""
    from gpt2_ddp.config.tools import PrepareConfig

    if "distributed_type" in content:
        return "is a configuration of Accelerate; write `accelerate launch --config_file FILE SCRIPT`"
    if content.keys() <= PrepareConfig.model_fields.keys():
        return "is a configuration of prepare_data.py, not of this command"
    if {"run_name", "train", "optim"} & content.keys():
        return "is a configuration of a training, not of this command"
    return f"has no field of this command; its first keys are {', '.join([*content][:4])}; --help lists the fields"


def _problem(command: type[Command], name: str, field: FieldInfo, details: Any) -> str:
    """The problem of a field's value, and what it should be."""
    kind, value = details["type"], details["input"]
    takes_list = get_origin(field.annotation) is tuple
    wanted = f"should be {expected(field)}"
    if isinstance(value, list | tuple) and not takes_list:
        several = [other for other, of in leaves(command) if get_origin(of.annotation) is tuple]
        flag = f", such as --{several[0]}" if several else ""
        return f"takes one value; others have their own flags{flag}" if name == command.positional else wanted
    if isinstance(value, NoValue):
        wanted = "needs a value"
        if str in kinds_of(field.annotation):
            wanted += f"; write one that begins with - as --{name}=VALUE"
    elif kind == "value_error":
        wanted = details["msg"].removeprefix("Value error, ")
    elif kind == "extra_forbidden":
        wanted = f"has the unknown key {details['loc'][-1]}; {wanted}"
    elif kind.endswith("_parsing") and re.match(r"[-+]?\d", str(value)) and bool not in kinds_of(field.annotation):
        wanted += ", in digits, like 1000000" if int in kinds_of(field.annotation) else ", like 1000 or 1e-3"
    elif kind == "finite_number":
        wanted = wanted.replace("a number", "a finite number")
    elif kind == "int_parsing_size":
        wanted = "has an integer of more than 64 bits"
    return wanted if field.default in (None, ()) else f"{wanted}; the default is {shown(field.default)}"


def shown(value: object) -> str:
    """A value as it is written in a command or a file."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return shlex.join(map(str, value)) if value else "[]"
    return str(value) if str(value).strip() else repr(value)


BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
LENGTHS = {"min_length": "at least", "max_length": "at most"}  # in characters
WORDS = {int: "a whole number", float: "a number", str: "a text"}


def expected(field: FieldInfo) -> str:
    """The values that a field takes, in words: `a whole number (above 0), auto or null`."""
    return any_of(_expected(field.annotation, field.metadata, field.title))


def any_of(choices: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))


def _expected(annotation: Any, metadata: Sequence[Any], title: str | None = None) -> list[str]:
    """The kinds of values of a type with these constraints."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, *details = inside
        fields = [detail for detail in details if isinstance(detail, FieldInfo)]
        limits = [limit for field in fields for limit in field.metadata]
        return _expected(kind, [*metadata, *details, *limits], next((field.title for field in fields), title))
    if annotation is NoneType:
        return ["null"]
    if title:
        return [title]
    if origin is Literal:
        return [*inside]
    if origin in (Union, UnionType):
        return [*chain.from_iterable(_expected(kind, metadata) for kind in inside)]
    if origin is tuple:
        count = "one or several values" if Ellipsis in inside else f"{len(inside)} values"
        return [f"{count}; each is {any_of(_expected(inside[0], ()))}"]
    if annotation is bool:
        return ["true", "false"]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [" and ".join(annotation.model_fields)]
    bounds = " and ".join(_bounds(metadata, BOUNDS) or [f"{bound} characters" for bound in _bounds(metadata, LENGTHS)])
    return [WORDS[annotation] + f" ({bounds})" * bool(bounds)]


def _bounds(metadata: Sequence[Any], words: Mapping[str, str]) -> list[str]:
    values = [(word, getattr(constraint, key, None)) for constraint in metadata for key, word in words.items()]
    return [f"{word} {value:,}" for word, value in values if value is not None]


def nearest(name: str, known: Sequence[str]) -> str:
    """The hint for an unknown name: the nearest of the `known`, or --help."""
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    near = difflib.get_close_matches(name.rpartition(".")[2], tails, n=1)  # `lr` finds optim.lr
    return f"; did you mean {tails[near[0]]}?" if near else "; --help lists all names"


def no_such_folder(path: str | os.PathLike[str]) -> str:
    """The hint for a path where nothing is, with the nearest name beside it; empty if something is there."""
    if os.path.lexists(path):
        return ""
    folder, name = os.path.split(os.path.normpath(path))
    near: list[str] = []
    with suppress(OSError, ValueError):
        near = difflib.get_close_matches(name, os.listdir(folder or "."), n=1)
    return "there is no such folder" + "".join(f"; did you mean {os.path.join(folder, other)}?" for other in near)


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
    fields have defaults, and so have empty texts, which older releases took for null. Fields that no longer exist are
    left out. `saved` is parsed output of `dump`."""
    values, given = flat(command.model_construct().model_dump(mode="json")), flat(saved)
    kept = {name: default if given.get(name, "") == "" else given[name] for name, default in values.items()}
    return nested(kept)


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
        text = " ".join(map(str, value)) if isinstance(value, tuple | list) else json.dumps(value).strip('"')
        parts.append(_flag_help(f"{name} {_metavar(field)}", f"{field.description or ''} (default: {text or 'none'})"))
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
