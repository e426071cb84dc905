"""ladder.py: trains small runs of several sizes and lengths on a text, and answers what larger and
longer runs on it will reach.

    request ─▶ design.py ─▶ cells ─▶ members ─▶ check ─▶ train_all ─▶ read_rungs ─▶ Ladder
                              │                                                       │
              NAME-ladder.json: the same cells, when it goes on      answers, page, .ladder.json
"""

import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from gpt2_ddp.config.base import flat, shown
from gpt2_ddp.config.cli import load, read_yaml
from gpt2_ddp.config.own_text import HEAD, MOST_PASSES, describe_shape, given_fields
from gpt2_ddp.config.plan import LadderConfig, PlanConfig
from gpt2_ddp.config.saved import check_resumable, with_recorded
from gpt2_ddp.config.training import OWN_TEXT, TrainingConfig
from gpt2_ddp.data.manifest import Manifest, missing_folders, read_manifest
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.precision import settle_fast
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.evaluation.ladder import (
    VERSION,
    Answer,
    Ladder,
    Rung,
    describe_interval,
    settings_of,
)
from gpt2_ddp.evaluation.scaling import BEYOND, FEWEST, PRIORS
from gpt2_ddp.files import read_json
from gpt2_ddp.output import text_table, write_json
from gpt2_ddp.plan.plan import Plan, make_plan
from gpt2_ddp.project import command_for
from gpt2_ddp.records.rows import CONFIG, is_locked
from gpt2_ddp.reports.ladder_page import write_page
from gpt2_ddp.reports.runs import RunRecord, is_finite, read_runs
from gpt2_ddp.reports.values import count_text, duration_text
from gpt2_ddp.sweep.design import (
    EVALUATIONS,
    MOST_VALIDATION,
    Cell,
    Cost,
    Request,
    design,
    seconds_of,
)
from gpt2_ddp.sweep.members import (
    Member,
    check_log,
    prepare_data,
    refuse_launcher,
    train_all,
    visible_gpus,
)
from gpt2_ddp.training.own_text import SHARE, measure_speed, text_of

FEWEST_VALIDATION = 2000
"""Fewest tokens of the validation text."""
ALL_OF_TIME = 0.9
"""Share of the given time from which on a ladder fills it."""


class Planned(NamedTuple):
    """A ladder before its runs.

    Attributes:
        cells: its runs.
        cost: of a run.
        record: content of NAME-ladder.json.
    """

    cells: list[Cell]
    cost: Cost
    record: dict[str, Any]

    @property
    def seconds(self) -> float:
        """Time of all runs, one after another (estimate)."""
        return seconds_of(self.cells, self.cost)


def climb(config: LadderConfig) -> int:
    """The command. Returns 1 if a run is incomplete. Raises: UserError."""
    refuse_launcher("ladder.py")
    if not config.own_text:
        hint = "should be true, as in configs/own_text.yaml: a ladder is of runs of that rule"
        raise UserError("own_text", shown(config.own_text), hint)
    if not config.dry_run:
        prepare_data([Member(Path(config.output_dir), [], config)])
    folder = Path(config.data.paths[0])
    if config.dry_run and config.data.urls and missing_folders(config):
        hint = "has no copy on this machine yet; without --dry_run it is copied"
        raise UserError("data.path", config.data.path[0], hint)
    manifest = read_manifest(folder)
    gpus = visible_gpus()
    at_once = config.at_once or len(gpus) or 1
    file = Path(config.output_dir, f"{config.run_name}-ladder.json")
    planned = plan_ladder(config, manifest, file, at_once)
    members = [make_member(config, cell, planned.record) for cell in planned.cells]
    runs = [*zip(planned.cells, members, strict=True)]
    if config.dry_run:
        print(*describe_runs(runs, planned), sep="\n")
    print(*describe_plan(config, folder, planned, at_once), sep="\n")
    missing = [run for run in runs if not is_complete(*run, manifest)]
    if len(missing) < len(runs):
        print(_describe_rest([cell for cell, _ in missing], planned, at_once))
    sys.stdout.flush()
    todo = [member for _, member in missing]
    for member in todo:
        check_log(member)
    check_sizes(config, runs, at_once)
    if config.dry_run:
        return 0
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    write_json(file, planned.record)
    incomplete = train_all(todo, at_once, gpus)
    records = _read([member for member in members if member.folder not in incomplete])
    rungs = read_rungs(runs, records)
    for run, end in incomplete.items():
        print(f"{run} {end}; its output is in {run}.log")
    if len(rungs) < FEWEST:
        hint = f"are fewer than the {FEWEST} that a forecast needs; look at the runs' output"
        raise UserError("ladder", f"{len(rungs)} completed runs", hint)
    ladder = Ladder(
        version=VERSION,
        data_manifest=manifest.hash,
        settings=planned.record["settings"],
        text_tokens=text_of([manifest]).tokens,
        vocab_size=manifest.vocab_size,
        val_tokens=planned.record["val_tokens"],
        rungs=tuple(rungs),
    )
    finish(config, folder, ladder, file, planned, records)
    return int(bool(incomplete))


def plan_ladder(config: LadderConfig, manifest: Manifest, file: Path, at_once: int) -> Planned:
    """The runs: those of an earlier start of the same ladder, or new ones for this machine's speed.
    Raises: UserError for an earlier start of another one."""
    validation = manifest.tokens("val") - 1
    if validation < FEWEST_VALIDATION:
        hint = f"has {max(validation, 0):,} validation tokens; a ladder needs {FEWEST_VALIDATION:,}"
        raise UserError("data.path", config.data.path[0], f"{hint}: prepare more text")
    val_tokens = min(validation, MOST_VALIDATION)
    request = {
        "data_manifest": manifest.hash,
        "minutes": config.minutes,
        "shapes": [*config.shapes],
        "lengths": [*config.lengths],
        "repeats": config.repeats,
        "seed": config.seed,
        "settings": settings_of(config),
        "val_tokens": val_tokens,
    }
    before = _recorded(file)
    if before:
        record, cells = before
        check_same(config, request, record, file)
        return Planned(cells, Cost(record["speed"], val_tokens), record)
    here = measure_here(config)
    # on a CPU, runs at a time share it
    shared = 1 if visible_gpus() else at_once
    cost = Cost(here.speed / shared, val_tokens)
    cells = design(
        Request(
            minutes=config.minutes,
            at_once=at_once,
            shapes=config.shapes,
            lengths=config.lengths,
            repeats=config.repeats,
            context=given_fields(config).get("model.block_size"),
            seed=config.seed,
        ),
        text_of([manifest]),
        cost,
    )
    runs = [cell._asdict() for cell in cells]
    record = request | {"speed": cost.speed, "precision": here.precision, "runs": runs}
    return Planned(cells, cost, record)


def check_same(
    config: LadderConfig, request: Mapping[str, Any], before: Mapping[str, Any], file: Path
) -> None:
    """Raises: UserError for an earlier start of another ladder, whose record is in the file."""
    if request["data_manifest"] != before.get("data_manifest"):
        hint = f"has another text than the ladder of {file}; choose another run_name"
        raise UserError("data.path", config.data.path[0], hint)
    now = {name: value for name, value in request.items() if name != "settings"}
    now |= request["settings"] | {"train.mixed_precision": config.train.mixed_precision}
    then = {**before, **before.get("settings", {}), "train.mixed_precision": before["precision"]}
    if config.train.mixed_precision == "fast":  # the first start has measured
        del now["train.mixed_precision"]
    for name in sorted({*now} | {*before.get("settings", {})}):
        value = shown(now[name]) if name in now else "the rule's"
        earlier = shown(then[name]) if name in then else "the rule's"
        if value != earlier:
            advice = "repeat the flags of its first start, or choose another run_name"
            raise UserError(name, value, f"the ladder of {file} has {earlier}; {advice}")


def _recorded(file: Path) -> tuple[dict[str, Any], list[Cell]] | None:
    """The content of NAME-ladder.json, and its runs; None without one. Raises: UserError if it is
    damaged."""
    if not file.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = read_json(file)
        cells = TypeAdapter(list[Cell]).validate_python(content["runs"])
        has_settings = isinstance(content["settings"], dict) and str(content["precision"])
        if cells and float(content["speed"]) > 0 and has_settings:
            return content, cells
    raise UserError("run_name", file, "is no file of a ladder; remove it, or choose another name")


class Here(NamedTuple):
    """This machine: FLOP/s of training, in the precision of the runs, which is the same for all of
    them."""

    speed: float
    precision: str


def measure_here(config: TrainingConfig) -> Here:
    """Measures this machine, for half a second. Raises: UserError for a device that is not
    there."""
    device = pick_device(config.train.device, "train.")
    # of a typical width, as a measurement for each size would give some runs another precision
    model = config.model.model_copy(update={"n_embd": 2 * HEAD})
    settled = config.model_copy(update={"model": model})
    if config.train.mixed_precision == "fast":
        settled = settle_fast(settled, device)
    precision = settled.train.mixed_precision
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Here(SHARE * measure_speed(device, dtype), precision)


def make_member(config: LadderConfig, cell: Cell, record: Mapping[str, Any]) -> Member:
    """The run of a cell: an ordinary one of the rule. `record`: of the plan."""
    own = {
        "output_dir": config.output_dir,
        "run_name": f"{config.run_name}-{cell.name}",
        "seed": cell.seed,
        "data.path": config.data.path,
        "model.n_layer": cell.layers,
        "model.n_embd": cell.width,
        "train.steps": cell.steps,
        "train.global_batch_tokens": cell.batch,
        "train.mixed_precision": record["precision"],
        "eval.tokens": record["val_tokens"],
        "eval.every": cell.steps // EVALUATIONS,
        "checkpoint.every": cell.steps // EVALUATIONS,
        "checkpoint.keep_last": 1,
        "tracking.sample_every": 0,
    }
    preset = flat(read_yaml(OWN_TEXT))
    given = {
        name: value
        for name, value in given_fields(config).items()
        if name not in own and preset.get(name) != value
    }
    flags = ["--config", OWN_TEXT]
    for name, value in (given | own).items():
        words = [*map(shown, value)] if isinstance(value, list | tuple) else [shown(value)]
        flags += [f"--{name}", *words]
    folder = Path(config.output_dir, own["run_name"])
    try:
        return Member(folder, flags, load(TrainingConfig, flags))
    except UserError as error:  # the user gave the width as a part of a shape
        given = f"model.n_embd = {cell.width}: "
        size = f"shapes = {cell.layers}x{cell.width}: the width "
        mistakes = [mistake.replace(given, size) for mistake in error.mistakes]
        raise UserError.join(mistakes) from error


def describe_runs(runs: Sequence[tuple[Cell, Member]], planned: Planned) -> list[str]:
    """A line for each run, and the command of the first one."""
    rows = [["run", "steps", "tokens", "time"]]
    for cell, member in runs:
        seconds = seconds_of([cell], planned.cost)
        words = [f"{cell.steps:,}", count_text(cell.tokens), duration_text(seconds)]
        rows.append([str(member.folder), *words])
    command = shlex.join([*command_for("train_gpt2").split(), *runs[0][1].flags])
    return [text_table(rows), "each is an ordinary training; the command of the first:", command]


def describe_plan(config: LadderConfig, folder: Path, planned: Planned, at_once: int) -> list[str]:
    """The runs, their time, and what they will tell, as lines of text."""
    cells = planned.cells
    tokens = sum(cell.tokens for cell in cells)
    sizes = sorted({(cell.parameters, cell.layers, cell.width) for cell in cells})
    time = duration_text(planned.seconds / at_once)
    rows = [["size", "active parameters", "tokens of its runs"]]
    for parameters, layers, width in sizes:
        counts: dict[int, int] = {}
        for cell in cells:
            if (cell.layers, cell.width) == (layers, width):
                counts[cell.tokens] = counts.get(cell.tokens, 0) + 1
        words = [
            count_text(length) + (f" ({count} seeds)" if count > 1 else "")
            for length, count in sorted(counts.items())
        ]
        rows.append([f"{layers}x{width}", count_text(parameters), ", ".join(words)])
    head = f"{len(cells)} runs of {len(sizes)} sizes on {folder}"
    lines = [*text_table(rows).split("\n")]
    lines += _describe_lengths(config, cells)
    if not config.lengths and planned.seconds / at_once < ALL_OF_TIME * 60 * config.minutes:
        reason = f"no run reads this text more than {MOST_PASSES:g} times"
        lines.append(f"shorter than {config.minutes:g} minutes: {reason}")
    lines.append(_describe_answers(config.for_minutes, cells))
    return [
        f"{head}: {count_text(tokens)} tokens, about {time} (estimate, ±40%)",
        *(f"  {line}" for line in lines),
    ]


def _describe_lengths(config: LadderConfig, cells: Sequence[Cell]) -> list[str]:
    """What given lengths became, if they are no whole steps, in one line."""
    given = sorted({*config.lengths})
    trained = sorted({cell.tokens for cell in cells})
    changed = [
        f"{length:,.0f} became {tokens:,}"
        for length, tokens in zip(given, trained, strict=False)
        if round(length) != tokens
    ]
    return [f"lengths in multiples of {EVALUATIONS} steps: {', '.join(changed)}"] if changed else []


def _describe_answers(minutes: Sequence[float], cells: Sequence[Cell]) -> str:
    """What the ladder will tell, in one line."""
    times = " and ".join(f"{time:g}" for time in minutes)
    largest = count_text(BEYOND * max(cell.parameters for cell in cells))
    longest = count_text(BEYOND * max(cell.tokens for cell in cells))
    asked = f"it will tell the best size for {times} minutes, and the loss to expect"
    return f"{asked}, up to {largest} active parameters and {longest} tokens"


def _describe_rest(missing: Sequence[Cell], planned: Planned, at_once: int) -> str:
    """What a ladder that goes on has to train, in one line."""
    runs = len(planned.cells)
    time = duration_text(seconds_of(missing, planned.cost) / at_once)
    rest = f"the others take about {time}" if missing else "nothing is trained"
    return f"  complete already: {runs - len(missing)} of {runs} runs; {rest}"


def check_sizes(config: LadderConfig, runs: Sequence[tuple[Cell, Member]], at_once: int) -> None:
    """Plans the largest run. Raises: UserError for what its training would refuse; and for all
    sizes that do not fit the memory."""
    mistakes: list[str] = []
    checked: set[tuple[int, int]] = set()
    for cell, member in sorted(runs, key=lambda run: -run[0].parameters):
        size = (cell.layers, cell.width)
        # a killed ladder has left a locked run saving: `train_all` waits for it
        if size in checked or is_locked(member.folder):
            continue
        checked.add(size)
        plan = _plan(config, member)
        if plan.refused:
            raise UserError.join(plan.refused)
        here = at_once if plan.machine.kind == "cpu" else 1
        if here * plan.memory.peak <= plan.machine.memory:
            break  # smaller ones fit, too
        need = f"needs {here * plan.memory.peak / 1e9:.2f} GB of memory"
        hint = f"{need} and {plan.machine.memory / 1e9:.2f} GB are free; name smaller sizes"
        mistakes += UserError("shapes", f"{size[0]}x{size[1]}", hint).mistakes
    if mistakes:
        raise UserError.join(mistakes)


def _plan(config: LadderConfig, member: Member) -> Plan:
    """The plan of a run, without its notes."""
    with open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        return make_plan(load(PlanConfig, member.flags))


def is_complete(cell: Cell, member: Member, manifest: Manifest) -> bool:
    """Whether the folder has the complete run of this cell. Raises: UserError if it has another
    run, as a training would, and for one of another length or text."""
    for record in _read([member]):
        if not record.config:  # of no readable config.yaml: the training says what to do
            return False
        saved = read_yaml(str(member.folder / CONFIG))
        kind = str(record.start.get("kind", member.config.kind))
        check_resumable(with_recorded(member.config, saved), kind, saved, step=cell.steps)
        advice = "choose another run_name, or delete that folder"
        steps = record.config.get("train.steps")
        if steps != cell.steps:
            hint = f"has a run of {steps} steps, the ladder one of {cell.steps}"
            raise UserError("run_name", member.folder, f"{hint}; {advice}")
        if record.start.get("data_manifest", manifest.hash) != manifest.hash:
            raise UserError("run_name", member.folder, f"has a run on another text; {advice}")
        return record.status.get("state") == "completed"
    return False


def _read(members: Sequence[Member]) -> list[RunRecord]:
    """The records of the runs that have some."""
    records: list[RunRecord] = []
    for member in members:
        with suppress(UserError):
            records += read_runs([member.folder])
    return records


def read_rungs(runs: Sequence[tuple[Cell, Member]], records: Sequence[RunRecord]) -> list[Rung]:
    """What the runs of a ladder reached, of those that are complete."""
    by_folder = {record.folder: record for record in records}
    found: list[Rung] = []
    for cell, member in runs:
        record = by_folder.get(member.folder.resolve())
        rung = read_rung(cell, record) if record else None
        if rung:
            found.append(rung)
    return found


def read_rung(cell: Cell, run: RunRecord) -> Rung | None:
    """What a completed run has measured; None without an evaluation at its end."""
    steps, values = run.series("val_bits_per_byte")
    _, speeds = run.series("tokens_per_second")
    speeds = [speed for speed in speeds[1:] if is_finite(speed) and speed > 0]
    is_at_end = len(steps) > 1 and steps[-1] == cell.steps and is_finite(values[-1])
    if not is_at_end or not speeds or run.status.get("state") != "completed":
        return None
    curve = [
        (float(step) / cell.steps, float(bits))
        for step, bits in zip(steps, values, strict=True)
        if step > 0 and is_finite(bits)
    ]
    return Rung(
        name=run.folder.name,
        layers=cell.layers,
        width=cell.width,
        parameters=cell.parameters,
        tokens=cell.tokens,
        seed=cell.seed,
        bits=float(values[-1]),
        seconds_per_token=1 / median(speeds),
        curve=tuple(curve),
    )


def finish(
    config: LadderConfig,
    folder: Path,
    ladder: Ladder,
    file: Path,
    planned: Planned,
    records: Sequence[RunRecord],
) -> None:
    """Prints the answers, and writes them as NAME-ladder.json and .html; keeps the ladder with the
    data."""
    try:
        ladder.write(folder)
    except UserError as error:  # it may be somebody else's
        print_line(f"note: later runs on {folder} will not know this ladder: {error}")
    answers = [answer_for(ladder, minutes) for minutes in config.for_minutes]
    lines = [
        *describe_ladder(ladder),
        *(line for answer in answers for line in answer.lines(config)),
    ]
    print(*lines, sep="\n")
    results = {"rungs": [TypeAdapter(Rung).dump_python(rung) for rung in ladder.rungs]}
    results |= {"law": law_record(ladder), "answers": [answer.record() for answer in answers]}
    write_json(file, planned.record | results)
    page = write_page(file.with_suffix(".html"), folder, ladder, lines, records)
    print(f"report: {page}")


class TimedAnswer(NamedTuple):
    """What a time on the ladder's machine suffices for.

    Attributes:
        best: the best size; None if nothing is claimed.
        changes: relative change of the loss by name: with twice the text, or twice the time; None
            where nothing is claimed.
        balance: parameters above which more text does more than more parameters.
    """

    ladder: Ladder
    minutes: float
    best: Answer | None
    changes: Mapping[str, float | None]
    balance: float

    def lines(self, config: TrainingConfig) -> list[str]:
        """The answer as lines of text."""
        best = self.best
        if best is None:
            hint = f"beyond {BEYOND:g} times the ladder's largest run, of which nothing is said"
            return [f"in {self.minutes:g} minutes on this machine: {hint}; train a longer ladder"]
        passes = best.tokens / self.ladder.text_tokens
        shape = describe_shape(best.layers, best.width)
        size = f"{shape} ({count_text(best.parameters)} parameters)"
        amount = f"{count_text(best.tokens)} tokens, {passes:.1f} passes"
        expected = f"expect {describe_interval(best.interval)} bits per byte"
        name = f"{config.run_name}_{self.minutes:g}min".replace(".", "_")
        flags = ["--data.path", config.data.path[0], "--run_name", name]
        flags += ["--train.minutes", f"{self.minutes:g}"]
        flags += ["--model.n_layer", str(best.layers), "--model.n_embd", str(best.width)]
        lines = [
            f"in {self.minutes:g} minutes on this machine: {size}, {amount}: {expected}",
            f"  {command_for('train_gpt2')} {shlex.join(flags)}",
        ]
        if best.is_limited:
            lines.append("  a larger size may be better: it is too large for this ladder to say")
        known = [
            f"{what} {change:+.1%}" for what, change in self.changes.items() if change is not None
        ]
        if known:
            lines.append(f"  {', '.join(known)}")
        if math.isfinite(self.balance):
            words = "more text, read as often, does more than more parameters"
            lines.append(f"  above {count_text(self.balance)} parameters, {words}")
        return lines

    def record(self) -> dict[str, Any]:
        """For JSON."""
        best = self.best and self.best._asdict() | {"interval": self.best.interval._asdict()}
        changes = dict(self.changes)
        balance = self.balance if math.isfinite(self.balance) else None
        return {"minutes": self.minutes, "best": best, "changes": changes, "balance": balance}


def answer_for(ladder: Ladder, minutes: float) -> TimedAnswer:
    """The best size for a time on the ladder's machine, and what more of anything would change."""
    best = ladder.answer(lambda parameters: ladder.tokens_in(minutes, parameters))
    changes: dict[str, float | None] = {}
    balance = math.inf
    if best:
        more = {
            "twice the text": ladder.answer(lambda size: ladder.tokens_in(minutes, size), text=2),
            "twice the time": ladder.answer(lambda size: ladder.tokens_in(2 * minutes, size)),
        }
        changes = {
            name: other and other.interval.bits / best.interval.bits - 1
            for name, other in more.items()
        }
        balance = ladder.law.balance(best.tokens, ladder.text_tokens)
    return TimedAnswer(ladder, minutes, best, changes, balance)


def describe_ladder(ladder: Ladder) -> list[str]:
    """The law and its limits, as lines of text."""
    law = ladder.law
    values = law_record(ladder)
    formula = (
        f"bits per byte = {values['E']:.3f} + {values['A']:.3g} / N^{values['alpha']:.2f}"
        f" + {values['B']:.3g} / D^{values['beta']:.2f}"
    )
    noise = f"runs are off by {law.noise:.1%}"
    largest = count_text(BEYOND * law.largest)
    longest = count_text(BEYOND * law.longest)
    limits = f"nothing is said above {largest} parameters and {longest} tokens"
    return [
        formula,
        f"  with N active parameters and D tokens; {noise}; {limits}",
    ]


def law_record(ladder: Ladder) -> dict[str, float]:
    """The values of the law, by their names."""
    values = dict(zip(PRIORS, map(math.exp, ladder.law.best), strict=True))
    size, length = ladder.law.centre
    values["A"] *= size ** values["alpha"]
    values["B"] *= length ** values["beta"]
    return values | {"noise": ladder.law.noise}
