"""Under which conditions a recorded run took each of its steps, and which of them may change what.

    read_record   rows of metrics.jsonl  ->  Record: a `Stretch` of steps for each start, change of
                  length, branch and rollback; each has all conditions by their names
    differences   the conditions that differ between two records, each from its first step on
    effects_of    what such a difference may change: the data, their order, the model, ...

A condition is a field of the configuration, by its dotted name, or what a start recorded beside it:
data, class, processes, device, versions. A step has the conditions of the last stretch that begins
before it. So resumes, rollbacks and branches need no rules of their own.
"""

import os
import shlex
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

from pydantic import ValidationError

from gpt2_ddp.checkpoint.format import MANIFEST, list_checkpoints, step_of
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, verify
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import read_yaml, split_flags
from gpt2_ddp.config.own_settings import OWN
from gpt2_ddp.config.own_text import CHOSEN
from gpt2_ddp.config.saved import CONFIGS, complete
from gpt2_ddp.config.training import OWN_TEXT, TrainingConfig
from gpt2_ddp.data.mixture import recorded_mixture
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import no_such_folder, url_of_copy
from gpt2_ddp.records.rows import (
    CONFIG,
    METRICS,
    Row,
    ended_status,
    is_event,
    is_rollback,
    read_lines,
    split_chain,
)
from gpt2_ddp.reports.settings import preset_files
from gpt2_ddp.reports.states import config_differences, end_defect
from gpt2_ddp.reports.verify import CheckedRow
from gpt2_ddp.state import FIRST_CHAIN, next_chain

Effect = Literal[
    "data", "order", "model", "rate", "updates", "rounding", "scores", "length", "none"
]
"""What a difference may change, the strongest first:

- data: the text or the samples.
- order: which of them a step takes.
- model: the initial weights, or the function that they make; dropout's masks, too.
- rate: the learning rate.
- updates: what else a step does to the weights.
- rounding: the last digits of the same arithmetic.
- scores: what an evaluation scores, or the average of the weights; not the training.
- length: where the run ends.
- none: no number.
"""
STRENGTH = {effect: rank for rank, effect in enumerate(get_args(Effect))}
CODE: tuple[Effect, ...] = ("order", "model", "rate", "updates")
"""What a class of one's own may change."""

EFFECTS: dict[str, tuple[Effect, ...]] = {
    # fields of every kind of run
    "output_dir": ("none",),
    "run_name": ("none",),
    "seed": ("order", "model", "updates"),
    "model": ("model",),
    "optim": ("updates",),
    "optim.lr": ("rate",),
    "optim.min_lr": ("rate",),
    "optim.schedule": ("rate",),
    "optim.warmup_steps": ("rate",),
    "optim.warmup_epochs": ("rate",),
    "optim.decay_steps": ("rate",),
    "optim.decay_fraction": ("rate",),
    "optim.earlier_ends": ("rate",),
    "optim.average": ("scores",),
    "train.mixed_precision": ("rounding",),
    "train.compile": ("none",),  # the choice is recorded
    "train.device": ("none",),  # likewise
    "train.deterministic": ("rounding",),
    "train.max_minutes": ("none",),
    "train.patience_seconds": ("none",),
    "train.epochs": ("length",),
    "train.micro_batch_size": ("rounding",),
    "eval": ("scores",),
    "guard": ("none",),  # unless a step was skipped
    "checkpoint": ("none",),
    "tracking": ("none",),
    "launch": ("none",),  # processes and threads are recorded
    "launch.backend": ("rounding",),
    "launch.parallel": ("rounding",),
    "launch.replicas": ("rounding",),
    # of a GPT
    "own_text": ("none",),  # the values that follow are recorded
    "task": ("none",),  # the class is recorded
    "data": ("data",),
    "data.path": ("none",),  # the data are recorded
    "data.prepare": ("none",),
    "data.weights": ("order",),
    "data.phases": ("order",),
    "data.shift_windows": ("order",),
    "model.block_size": ("order", "model"),
    "train.steps": ("length",),
    "train.minutes": ("length",),
    "train.global_batch_tokens": ("order", "updates"),
    "train.activation_checkpointing": ("rounding",),
    "train.fp8_head": ("updates",),  # coarser than the rounding that `evidence` knows
    "train.init_from": ("model",),
    "train.branch_from": ("none",),  # the parent's checkpoint is recorded
    "eval.patience": ("length",),
    # of small jobs
    "data.test_points": ("scores",),
    "train.global_batch_size": ("order", "updates"),
    # what a start records
    "branch": ("order", "model", "updates"),
    "skipped positions": ("order", "model", "updates"),
    "mixture": ("order",),
    "epoch_size": ("order",),
    "tokenizer": ("data", "model"),
    "tasks": ("scores",),
    "code": CODE,
    "own": CODE,  # settings of a class, which may use them for anything
    "commit": CODE,
    "versions.gpt2_ddp": CODE,
    "versions": ("rounding",),
    "processes": ("rounding",),
    "micro_batch": ("rounding",),
    "device": ("rounding",),
    "hardware": ("rounding",),
    "threads": ("rounding",),
    "compile": ("rounding",),
    "global_batch_size": ("order", "updates"),
    "lr": ("rate",),
    "data_hash": ("data",),
    "classes": ("data",),
    "image_shape": ("data",),
}
"""Effects of each condition by its name, or the beginning of it: the longest holds."""
POSSIBLE = ("code", "commit", "versions.gpt2_ddp")
"""Conditions that may have any effect, and may have none: code may differ in a comment."""
FOLLOWS = {
    "train.steps": ("train.minutes",),
    "optim.decay_steps": ("train.steps", "train.epochs", "train.minutes"),
    "optim.earlier_ends": ("train.steps", "train.minutes"),
    "epoch_size": ("tokenizer", "data", "data.", "data_hash", "model.block_size"),
    "mixture": ("data.weights", "data.phases", "tokenizer", "data"),
    "data": ("tokenizer",),
    "data.path": ("tokenizer", "data", "data_hash"),
    "data_hash": ("data.",),
    "micro_batch": ("train.micro_batch_size", "train.global_batch_tokens", "model.block_size"),
    "global_batch_size": ("train.global_batch_size",),
    "lr": ("optim.lr",),
    "classes": ("data.", "data_hash"),
    "image_shape": ("data.", "data_hash"),
    "versions.gpt2_ddp": ("commit",),
}
"""Conditions that follow from others, by their names or beginnings. One that follows from another
difference is no difference of its own; its effects are that one's."""
SETTLED = ("train.steps", "optim.decay_steps", "optim.earlier_ends")
"""Fields that `train.minutes` sets."""
DRAWS = ("device", "micro_batch", "train.micro_batch_size")
"""Conditions that change dropout's masks."""
GROUPS = ("device", "micro_batch", "train.micro_batch_size", "processes")
"""Conditions that change the samples of which BatchNorm takes the statistics."""


class Stretch(NamedTuple):
    """The steps after `begin`, up to the next stretch, and their conditions."""

    begin: int
    conditions: Row


class Cause(NamedTuple):
    """A condition that differs between two runs.

    Attributes:
        name: of the condition, such as `optim.lr` or `processes`.
        step: the first step under the two values.
        values: in the first run and in the second; None for no such condition.
        effects: what it may change, the strongest first.
        details: lines that say more, such as changed lines of a class.
        origins: what has set each of the values, if it was not the user, such as `train.minutes`.
    """

    name: str
    step: int
    values: tuple[object, object]
    effects: tuple[Effect, ...]
    details: tuple[str, ...] = ()
    origins: tuple[str, str] = ("", "")

    @property
    def is_possible(self) -> bool:
        """Whether its effects are only possible."""
        return self.name in POSSIBLE


@dataclass(frozen=True)
class Record:
    """What a run folder says of a run.

    Attributes:
        name: the folder, or the URL of which it is the copy.
        stretches: in the order of their steps; at least one.
        rows: the rows of steps that no rollback undid, by step.
        checkpoints: folders by step.
        defect: line, and step or event, of the first row that is no row, or has a wrong chain. Or
            what of the folder is newer than the last row; empty if there is nothing.
        notes: what else of the folder is not as the rows have it.
        origins: what has set fields of the configuration in place of the user: `train.minutes` or
            `own_text`, by the fields' names.
    """

    name: str
    kind: str
    run_id: str
    stretches: list[Stretch]
    rows: dict[int, Row]
    checkpoints: dict[int, Path]
    defect: str
    origins: Mapping[str, str]
    notes: list[str]

    @property
    def last(self) -> int:
        """The last step that a row or a stretch knows."""
        return max([*self.rows, self.stretches[-1].begin])

    def at(self, step: int) -> Row:
        """The conditions of a step; of the untrained model those of the first stretch."""
        return self.stretches[self.stretch_at(step)].conditions

    def stretch_at(self, step: int) -> int:
        """The number of the stretch of a step."""
        return max(bisect_left(self.stretches, step, key=lambda each: each.begin) - 1, 0)


def read_record(folder: Path) -> Record:
    """Reads a run folder. Nothing in it is executed. Raises: UserError for a folder without a row
    of a start, and for a kind that this release lacks."""
    file = folder / METRICS
    name = url_of_copy(folder)
    if not os.path.isfile(file):
        hint = f"is no run folder, as it has no {METRICS}; name one, like runs/stdlib"
        if os.path.isfile(folder / MANIFEST):
            hint = "is a checkpoint or a folder of data; name a run folder, like runs/stdlib"
        raise UserError("runs", name, no_such_folder(folder) or hint)
    # before the rows: what a running training writes next is newer
    status = ended_status(folder)
    checkpoints = {step_of(path): path for path in list_checkpoints(folder / "checkpoints")}
    chains = _chains_of(checkpoints)
    read = _read_rows(file)
    rows = read.rows
    start = next((row for row in rows if row.get("event") == "start"), None)
    if start is None:
        raise UserError("runs", name, f"has no row of a start in {METRICS}")
    kind = str(start.get("kind"))
    if kind not in CONFIGS:
        hint = f"is of an unknown kind of run, {kind}; this release supports {', '.join(CONFIGS)}"
        raise UserError("runs", name, hint)
    stretches: list[Stretch] = []
    valid: dict[int, Row] = {}
    for row in rows:
        step = row["step"]
        if "event" not in row:
            valid[step] = row
            continue
        if is_rollback(row):
            valid = {known: row for known, row in valid.items() if known <= step}
        changes = _changes(kind, row, stretches, folder)
        if changes is not None and row["event"] == "length":
            stretches = _with_length(stretches, changes)
        if changes is not None:
            stretches = [stretch for stretch in stretches if stretch.begin < step]
            stretches.append(Stretch(step, changes))
    run_id = str(start.get("run_id"))
    origins = _origins_of_fields(kind, start, rows)
    defect = read.defect or _cut_off(folder, read, chains, status)
    notes = [*_missing_checkpoints(rows, checkpoints), *_edited_config(folder, rows)]
    return Record(name, kind, run_id, stretches, valid, checkpoints, defect, origins, notes)


def _edited_config(folder: Path, rows: Sequence[Row]) -> list[str]:
    """A note of config.yaml, if it is not what the newest row with a configuration has. A kill may
    have come between the two."""
    newest = next((row for row in reversed(rows) if row.get("config")), None)
    if newest is None or newest is rows[-1] or not os.path.isfile(folder / CONFIG):
        return []
    try:
        settings = read_yaml(str(folder / CONFIG), "runs")
    except UserError:
        return [f"{CONFIG} cannot be read; the rows have the configuration"]
    different = config_differences(CONFIG, settings, newest["config"])
    if not different:
        return []
    more = f" (and {len(different) - 1} more)" if different[1:] else ""
    return [f"{different[0]}{more}, whose value is compared"]


class ReadRows(NamedTuple):
    """The rows that can be read, the first defect, as verify_run.py would name it, and the chains
    of all rows and of the empty file."""

    rows: list[Row]
    defect: str
    chains: set[str]


def _chains_of(checkpoints: Mapping[int, Path]) -> dict[int, str]:
    """The chain of the row before each readable checkpoint, by its step. Large files are not
    hashed: `partings` does that."""
    chains: dict[int, str] = {}
    for step, path in checkpoints.items():
        with suppress(CorruptCheckpoint, UserError):
            chains[step] = verify(path, weights=False).state.log.chain
    return chains


def _cut_off(folder: Path, read: ReadRows, chains: Mapping[int, str], status: Row) -> str:
    """What shows that the last rows are missing; empty if nothing does. `chains`, `status`: of the
    folder before the rows were read."""
    lost = [step for step, chain in chains.items() if chain not in read.chains]
    if lost:
        names = ", ".join(f"{step:,}" for step in lost)
        of = f"the checkpoint of step {names}" if len(lost) == 1 else f"checkpoints {names}"
        return f"{METRICS}: {of} followed rows that are missing here"
    if status != ended_status(folder):  # a training has begun meanwhile
        return ""
    return end_defect(status, [*filter(is_event, read.rows)], read.rows[-1])


def _missing_checkpoints(rows: Sequence[Row], checkpoints: Mapping[int, Path]) -> list[str]:
    """A note of the checkpoints that the rows keep, and the folder lacks."""
    kept: list[int] = []
    for row in rows:
        if is_rollback(row):
            kept = [step for step in kept if step <= row["step"]]
        kept = row.get("kept", kept)
    missing = [step for step in dict.fromkeys(kept) if step not in checkpoints]
    if not missing:
        return []
    steps = ", ".join(f"{step:,}" for step in missing)
    return [f"the rows keep checkpoints that are missing, of steps {steps}"]


def _origins_of_fields(kind: str, start: Row, rows: Sequence[Row]) -> dict[str, str]:
    """What has set fields of the configuration in place of the user."""
    origins: dict[str, str] = {}
    command = start.get("command")
    if kind == TrainingConfig.kind and OWN_TEXT in preset_files(TrainingConfig, command):
        given = split_flags(TrainingConfig, shlex.split(str(command))[1:]).values
        origins |= dict.fromkeys(CHOSEN - given.keys(), "own_text")
    if any(row.get("event") == "length" for row in rows):
        origins |= dict.fromkeys(SETTLED, "train.minutes")
    return origins


def _read_rows(file: Path) -> ReadRows:
    """Reads the rows."""
    rows: list[Row] = []
    defect = ""
    chain = FIRST_CHAIN
    chains = {chain}
    for number, line in enumerate(read_lines(file), 1):
        if line.torn:  # by a kill, or a run that still trains
            break
        text, recorded = split_chain(line.text)
        try:
            CheckedRow.model_validate_json(line.text)
        except ValidationError:
            defect = defect or f"{METRICS}, line {number}: is no row"
            continue
        if recorded != next_chain(chain, text):
            event = f"{line.row['event']}, " if is_event(line.row) else ""
            row = f"{event}step {line.row['step']}"
            problem = "this row was changed, or one before it is missing"
            defect = defect or f"{METRICS}, line {number} ({row}): {problem}"
        chain = recorded or chain
        chains.add(chain)
        rows.append(line.row)
    return ReadRows(rows, defect, chains)


def _changes(kind: str, row: Row, stretches: Sequence[Stretch], folder: Path) -> Row | None:
    """All conditions from an event on; None for an event that changes none."""
    before = stretches[-1].conditions if stretches else {}
    match row.get("event"):
        case "start":
            lasting = {
                name: before[name] for name in ("branch", "skipped positions") if name in before
            }
            conditions = _start_conditions(kind, row, folder) | lasting
            steps = (before.get("train.steps"), conditions.get("train.steps"))
            is_settled = steps[0] == steps[1] is not None
            return conditions | (_minutes(before) if is_settled else {})
        case "length" if "config" in row:
            return before | _fields(kind, row["config"]) | _minutes(before)
        case "rollback":
            skipped = cast(list[object], before.get("skipped positions", []))
            return before | {"skipped positions": [*skipped, row.get("skipped_range")]}
        case "branch":
            names = ("run_id", "step", "checkpoint_sha256")
            return before | {"branch": {name: row.get(name) for name in names}}
        case _:
            return None


def _minutes(conditions: Row) -> Row:
    """`train.minutes`, which the steps that it has settled replace in the configuration."""
    name = "train.minutes"
    return {name: conditions[name]} if name in conditions else {}


def _with_length(stretches: Sequence[Stretch], settled: Row) -> list[Stretch]:
    """The stretches before the number of steps was settled, with that number: no learning rate
    before depends on it, and the step of settling depends on the clock."""
    length = {name: settled[name] for name in SETTLED if name in settled}
    return [
        stretch._replace(conditions=stretch.conditions | length)
        if stretch.conditions.get("train.steps") is None
        else stretch
        for stretch in stretches
    ]


def _fields(kind: str, config: Mapping[str, Any]) -> Row:
    """The fields of a recorded configuration by their dotted names, with this release's defaults
    for those that it lacks. A section without fields is none."""
    fields = flat(complete(CONFIGS[kind], config))
    return {name: value for name, value in fields.items() if value != {}}


def _start_conditions(kind: str, start: Row, folder: Path) -> Row:
    """The conditions that a start records."""
    config = start.get("config")
    conditions = _fields(kind, config if config else read_yaml(str(folder / CONFIG), "runs"))
    versions = start.get("versions") or {}
    conditions |= {f"versions.{name}": version for name, version in versions.items()}
    names = ("processes", "device", "threads", "compile", "commit", "hardware", "epoch_size")
    names += ("micro_batch", "tasks", "global_batch_size", "lr")
    names += ("data_hash", "classes", "image_shape")
    conditions |= {name: start.get(name) for name in names}
    tokenizer = {"sha256": start.get("tokenizer_sha256"), "vocab_size": start.get("vocab_size")}
    conditions["tokenizer"] = tokenizer
    conditions["code"] = start.get("code")
    try:
        mixture = recorded_mixture(start)
    except ValueError as error:
        problem = f"{METRICS}: the mixture of a start is damaged"
        raise UserError("runs", url_of_copy(folder), problem) from error
    if mixture:
        conditions["data"] = mixture.manifests
        conditions["mixture"] = [[begin, weights] for begin, weights in mixture.phases]
    return conditions


def first_common(first: Record, second: Record) -> int:
    """The step after which both runs have steps: that of the later branch, if there is one."""
    return max(first.stretches[0].begin, second.stretches[0].begin)


def differences(first: Record, second: Record) -> list[Cause]:
    """The conditions that differ in a step that both runs have taken, by that step; of equal steps,
    the strongest effect comes first. Those that follow from another are part of it."""
    begin = first_common(first, second)
    end = max(min(first.last, second.last), begin + 1)
    begins = {stretch.begin for record in (first, second) for stretch in record.stretches}
    steps = sorted({begin + 1, *(each + 1 for each in begins if begin < each < end)})
    causes: dict[str, Cause] = {}
    for step in steps:
        one = _without_own_branch(first.at(step), second)
        other = _without_own_branch(second.at(step), first)
        for name in {**one, **other}:
            values = (one.get(name), other.get(name))
            if values[0] != values[1] and name not in causes:
                causes[name] = Cause(name, step, values, effects_of(name, one, other))
    return ordered(_without_consequences(causes))


def _without_own_branch(conditions: Row, other: Record) -> Row:
    """The conditions without a branch from the other run: the steps before are that run's."""
    branch = cast(Row, conditions.get("branch") or {})
    if branch.get("run_id") == other.run_id:
        return {name: value for name, value in conditions.items() if name != "branch"}
    return conditions


def effects_of(name: str, one: Row, other: Row) -> tuple[Effect, ...]:
    """What a difference in this condition may change, the strongest first, under the conditions of
    the two runs."""
    parts = name.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    effects = next(EFFECTS[prefix] for prefix in prefixes if prefix in EFFECTS)
    if name == "train.mixed_precision" and precision_of(one) == precision_of(other):
        return ("none",)
    if name == "eval.every" and "auto" not in (one.get("eval.tokens"), other.get("eval.tokens")):
        return ("none",)
    if name == "train.micro_batch_size" and one.get("micro_batch"):
        return ("none",)  # a GPT records the micro-batch
    has_masks = _has_dropout(one) and _has_dropout(other)
    has_statistics = "resnet18" in (one.get("model.name"), other.get("model.name"))
    if (has_masks and name in DRAWS) or (has_statistics and name in GROUPS):
        effects = ("model", *effects)
    if parts[0] == "guard" and ("skipped positions" in one or "skipped positions" in other):
        effects = ("updates",)
    muon = {one.get("optim.name"), other.get("optim.name")}
    if name == "optim.muon_lr" and "muon" not in muon:
        effects = ("none",)
    return effects


def _has_dropout(conditions: Row) -> bool:
    return bool(conditions.get("model.dropout") or conditions.get("model.attention_dropout"))


def precision_of(conditions: Row) -> str:
    """The precision of matrix products, `fp32`, `bf16` or `fp16`. `auto` is bf16 on GPUs."""
    given = str(conditions.get("train.mixed_precision"))
    if given in ("bf16", "fp16"):
        return given
    is_gpu = conditions.get("device") not in ("cpu", None)
    return "bf16" if given == "auto" and is_gpu else "fp32"


def _without_consequences(causes: Mapping[str, Cause]) -> list[Cause]:
    """The causes that follow from no other one, which gets their effects."""
    kept = {name: cause for name, cause in causes.items() if not _is_of_other_class(cause, causes)}
    for name, origins in FOLLOWS.items():
        follower = kept.get(name)
        origin = next(_origins(origins, kept, follower), None) if follower else None
        if follower and origin:
            effects = {*origin.effects, *follower.effects} - {"none"}
            strongest_first = sorted(effects, key=STRENGTH.__getitem__)
            kept[origin.name] = origin._replace(effects=tuple(strongest_first) or ("none",))
            del kept[name]
    return [*kept.values()]


def _is_of_other_class(cause: Cause, causes: Mapping[str, Cause]) -> bool:
    """Whether it is a setting that only one of two classes has."""
    return "code" in causes and cause.name.startswith(f"{OWN}.") and None in cause.values


def _origins(names: Sequence[str], causes: Mapping[str, Cause], follower: Cause) -> Iterator[Cause]:
    """The causes that one of `names` names or, if it ends with a dot, that begin with it and change
    a number. None begins after the follower."""
    for name in names:
        for cause in causes.values():
            is_inside = name.endswith(".") and cause.name.startswith(name)
            is_named = cause.name == name or (is_inside and cause.effects != ("none",))
            if is_named and cause.step <= follower.step:
                yield cause


def ordered(causes: Sequence[Cause]) -> list[Cause]:
    """By the first step, then certain effects before possible ones, then by strength. Another
    tokenizer is before all that begins with it: it has other tokens, and other losses of them."""

    def key(cause: Cause) -> tuple[int, bool, bool, int]:
        is_other = cause.name != "tokenizer"
        return cause.step, is_other, cause.is_possible, STRENGTH[cause.effects[0]]

    return sorted(causes, key=key)
