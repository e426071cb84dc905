"""Hints for user errors in configurations, imported on demand: unknown names, mixtures, fields that differ from a saved
run's."""

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

from gpt2_ddp.config.base import MOST, Command, flat, leaves, sections
from gpt2_ddp.errors import FIELD, UserError, truncate
from gpt2_ddp.project import command_for

if TYPE_CHECKING:
    from gpt2_ddp.config.run import RunConfig
    from gpt2_ddp.config.training import TrainingConfig

MOST_SOURCES = 32
"""Most sources of a mixture: with more, the largest source could get less than its share of a block."""
SCRIPT_OF_FIELD = {
    "train.steps": "train_gpt2.py",
    "train.global_batch_tokens": "train_gpt2.py",
    "train.global_batch_size": "a small job, like train_classifier.py",
}
"""The training script of a configuration file with this field."""


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """The hint for an unknown name: the nearest of the `known`, or --help; torchrun for the small jobs' processes."""
    if name == "launch.processes":
        return "; torchrun starts its processes: `torchrun --nproc_per_node N SCRIPT`"
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}  # `lr` finds optim.lr
    tail = name.rpartition(".")[2]
    near = [tails[tail]] if tail in tails else difflib.get_close_matches(name, known, n=1)
    near = near or [tails[tail] for tail in difflib.get_close_matches(tail, tails, n=1)]
    return f"; did you mean {prefix}{near[0]}?" if near else "; --help lists all names"


def describe(command: type[BaseModel], details: Any) -> str:
    """One of pydantic's errors as `field = value: problem; hint`."""
    name = ".".join(part for part in details["loc"] if isinstance(part, str))
    known = dict(leaves(command))
    field = known.get(name)
    if details["type"] == "invalid_key":  # a number, null or a date
        name = ".".join(map(str, [*details["loc"][:-1], details["input"]]))
        return f"{truncate(name, FIELD)}: unknown key; --help lists all names"
    if details["type"] == "model_type":
        hint = f"should be a section with keys, like `{name}: {{key: value}}`"
    elif details["type"] == "extra_forbidden" and name in known:  # `optim.lr: 1` in a file
        hint = "unknown key; write `{}: {{{}: ...}}`".format(*name.split("."))
    elif details["type"] == "extra_forbidden":
        hint = f"unknown key{nearest(name, [*known, *sections(command)])}"
    else:
        hint = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if field is not None and details["type"] == "missing":
            hint = f"should be {len(get_args(field.annotation))} values"
        if field is not None and field.default not in (None, ()):
            hint += f"; the default is {field.default}"
    return UserError(name, details["input"], hint).mistakes[0]


def other_script(command: type[Command], file: str, content: dict[str, Any]) -> list[str]:
    """The user error for a file of another training script, known by a field that this one lacks."""
    known, keys = dict(leaves(command)), flat(content)
    scripts = next((scripts for field, scripts in SCRIPT_OF_FIELD.items() if field in keys and field not in known), "")
    return UserError("--config", file, f"is for {scripts}; name one of this script").mistakes if scripts else []


def unknown_words(words: list[str], known: list[str]) -> list[str]:
    """User errors for the words of a command line that are no flags or values of fields, MOST and two more at most."""
    flags, names = [word for word in words if word[:1] == "-"], [*known, "config", "print_config"]
    mistakes = []
    for word in flags[: MOST + 1]:
        hint = nearest(word.split("=")[0].lstrip("-"), names, "--")
        mistakes.append(f"{truncate(word)}: unknown flag{hint}")
    if stray := [word for word in words if word not in flags]:
        hint = "values without a flag; write --FIELD VALUE, and quote patterns, like '*.txt'"
        mistakes += UserError("command line", " ".join(stray), hint).mistakes
    return mistakes


def mixture_mistakes(config: "TrainingConfig") -> Iterator[tuple[str, object, str]]:
    """User errors between the fields of several folders, as `Command.mistakes`."""
    from gpt2_ddp.config.training import WINDOWS_PER_BLOCK

    data, paths = config.data, config.data.paths
    if len({os.path.normpath(path) for path in paths}) < len(paths):
        yield "data.path", " ".join(paths), "contains a folder twice; name it once and set data.weights"
    if len(paths) > MOST_SOURCES:
        yield "data.path", f"{len(paths)} folders", f"should be at most {MOST_SOURCES}; prepare several as one"
    given = {"data.weights": data.weights, "eval.weights": config.eval.weights}
    given = {field: weights for field, weights in given.items() if weights}
    given |= {f"data.phases, number {number}": phase.weights for number, phase in enumerate(data.phases, 1)}
    for field, weights in given.items():
        if len(weights) != len(paths):
            hint = f"should be {len(paths)} numbers, one for each folder of data.path, in their order"
            yield field, " ".join(map(str, weights)), hint
        elif min(weights) < 0 or not 0 < sum(weights) < math.inf:
            yield field, " ".join(map(str, weights)), "each should be at least 0, with a finite sum above 0"
    for before, phase, begins in zip([0, *config.phase_begins], data.phases, config.phase_begins, strict=False):
        if begins <= before:
            tokens = WINDOWS_PER_BLOCK * config.model.block_size
            block = f"{WINDOWS_PER_BLOCK} windows (model.block_size), {tokens} tokens"
            yield "data.phases", phase.at_tokens, f"should begin a block or more after the last phase: {block}"


def describe_missing(manifest: Path) -> str:
    """The hint for a folder of `data.path` without the file `manifest`, with a command that makes one."""
    folder, text = manifest.parent, manifest.parent.absolute()
    if not folder.exists():
        parts = re.split("[:,]", str(folder))
        if len(parts) > 1 and all(map(os.path.isdir, parts)):
            return f"no such folder; separate several by spaces: {' '.join(parts)}"
        near = sorted(str(found.parent) for found in folder.parent.glob(f"*/{manifest.name}"))[:3]
        return "no such folder; " + (f"there is {', '.join(near)}" if near else "create it with prepare_data.py")
    if any(folder.glob("*.bin")):
        indexing = f"index shards from other programs with prepare_data.py --source 'bin:{folder}/*.bin'"
        return f"has shards but no {manifest.name}: run its prepare_data.py command again, or {indexing}"
    output = f"data/{text.stem}"
    output += "-tokens" * (Path(output).absolute() == text)
    command = f"`{command_for('prepare_data')} --source '{folder}' --output {output}`"
    return f"has no {manifest.name}; if it is text, {command} makes token shards"


def complete(command: type[Command], saved: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of a saved configuration of any release, without validation. `saved` is parsed output of `dump`.

    Returns:
        All fields of `command`, as `dump` writes them: newer fields have defaults. Then the dotted names of saved
        fields and sections that no longer exist.
    """
    values, gone = command.model_construct().model_dump(mode="json"), []

    def fill(values: dict[str, Any], saved: Mapping[str, Any], prefix: str) -> None:
        for name, value in saved.items():
            if name not in values or isinstance(values[name], dict) != isinstance(value, Mapping):
                gone.append(f"{prefix}{name}")
            elif isinstance(value, Mapping):
                fill(values[name], value, f"{prefix}{name}.")
            else:
                values[name] = value

    fill(values, saved, "")
    return values, gone


def differences(config: Command, saved: Mapping[str, Any], parts: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """(field, value, saved value) of the fields in `parts` (sections and fields) that differ."""
    before, now = flat(complete(type(config), saved)[0]), flat(config.model_dump(mode="json"))
    names = [name for name in now if any(name == part or name.startswith(f"{part}.") for part in parts)]
    return [(name, now[name], before[name]) for name in names if now[name] != before[name] and name != "data.path"]


def check_resumable(config: "RunConfig", kind: str, saved: dict[str, Any], step: int) -> list[str]:
    """Checks that this configuration can resume a checkpoint with the configuration `saved`: the fields in `kept`
    must be equal, except as `may_change` allows. Fields missing in `saved` have their defaults there. Returns the
    fields of `saved` that are unknown now. Raises: UserError, which names every field that differs."""
    if kind != config.kind:
        hint = f"the run folder holds a run of another kind, {kind}; choose another run_name"
        raise UserError("run_name", config.run_name, hint)
    mistakes = []
    for name, now, before in differences(config, saved, config.kept):
        if not config.may_change(name, before, step):
            own = Path(config.output_dir, config.run_name, "config.yaml")
            hint = f"the run was started with {before}; restore it (--config {own}), or choose another run_name"
            if name.startswith("optim.") and hasattr(config.train, "branch_from"):
                way, what = ("init_from", "weights") if name == "optim.name" else ("branch_from", "training state")
                hint += f" (train.{way} starts a new run from this run's {what})"
            mistakes += UserError(name, now, hint).mistakes
    if mistakes:
        raise UserError.join(mistakes)
    return complete(type(config), saved)[1]


def check_flags_of_run(config: Command, changes: Mapping[str, Any], own: Path, saved: Mapping[str, Any]) -> None:
    """Raises: UserError if the preset differs from the existing run, whose file `own` holds `saved`."""
    found = differences(config, saved, getattr(config, "kept", ()))
    names = [name for name, now, _ in found if now is not None and name not in changes]
    if len(names) > 1:
        others = ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
        hint = f"the command lacks flags of this run: {others}; add --config {own}, or choose another run_name"
        raise UserError("run_name", own.parent.name, hint)
