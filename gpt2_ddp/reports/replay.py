"""Replay: trains a part of a run again from one of its checkpoints, and compares it with the run's
records.

It trains in a temporary folder with links to the checkpoint's files; the run folder is only read.
The same number of processes gives the same bits; another number changes the order of sums.
"""

import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Checkpoint, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.verify import verify
from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.spawn import run_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.rows import (
    METRICS,
    Outcome,
    Row,
    field_of,
    head,
    is_rollback,
    read_lines,
    valid_rows,
)
from gpt2_ddp.state import TaskState
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import Supervised
from gpt2_ddp.tasks.user_task import Code, trusted
from gpt2_ddp.training.loop import train
from gpt2_ddp.training.task import Due, Task
from gpt2_ddp.training.throughput import device_name

Rows = dict[int, Row]  # rows of metrics.jsonl by step
Finding = tuple[str, list[str] | None]  # a check and its defects; or a note and None
NEARLY = 5e-6
"""Relative difference of sums that another order may cause."""


class Span(NamedTuple):
    """Steps to train again, and the run's rows of these steps. `skipped`: positions [start, stop]
    that a rollback to `start` skipped, which its checkpoint lacks."""

    start: int  # step of a checkpoint; training begins after it
    stop: int  # at most that of the next checkpoint, which may have other settings and processes
    rows: Rows
    skipped: list[int] | None


def plan(run: Path, steps: str) -> Span:
    """The span of `--replay 1000:1100`. Reads small files only. Raises: UserError, which
    names the checkpoints."""
    start, stop = map(int, steps.split(":"))
    checkpoints = steps_of(list_checkpoints(run / "checkpoints"))
    near = [row for row in _rows(run) if is_rollback(row) or start < row["step"] <= stop]
    rows = {row["step"]: row for row in valid_rows(near)}
    last = next((step for step in checkpoints if step > start), max(rows, default=start))
    if start not in checkpoints or not start < stop <= last or stop not in {*rows, last}:
        choices = ", ".join(map(str, checkpoints)) or "none"
        hint = f"begin at a checkpoint ({choices}), and end at the next or at a row before it"
        raise UserError("replay", steps, hint)
    rollbacks = [row for row in near if is_rollback(row) and row["step"] <= start]
    skipped = None
    if rollbacks and rollbacks[-1]["step"] == start:
        skipped = rollbacks[-1].get("skipped_range")
    return Span(start, stop, rows, skipped)


def replay(
    run: Path, span: Span, settings: Row, intact: Mapping[int, Checkpoint], command: VerifyConfig
) -> Finding:
    """Trains the span again. Compares rows and, where it ends at one of the `intact`
    checkpoints, weights and optimizer state. `settings`: configuration after the newest one.
    Raises: UserError if the data are not those of the run, or this machine cannot train it;
    SystemExit 75 after a signal."""
    name = f"replay from step {span.start} to {span.stop}"
    if span.start not in intact:
        return name, [f"{name}: its checkpoint is damaged, so it cannot be trained again"]
    begin = intact[span.start]
    end = intact.get(span.stop)
    # the next checkpoint has the settings of these steps, which may differ from those before a stop
    after = next((intact[step] for step in intact if step >= span.stop), None)
    maker = after or begin
    state = maker.state.record
    code = trusted(maker, command.trust_run_code)
    with TemporaryDirectory(prefix="replay-") as folder:
        saved_config = after.config if after else settings
        config = _config(begin.kind, saved_config, folder, command.data, state)
        processes, reasons = _how_exactly(config, state)
        again = Path(folder) / config.run_name
        copy = again / "checkpoints" / begin.path.name
        shutil.copytree(begin.path.resolve(), copy, copy_function=os.symlink)
        log = begin.state.log  # a resume expects the rows before its checkpoint
        (again / METRICS).write_bytes(b"".join(head(run / METRICS, log.bytes)))
        compares_tensors = end is not None and not reasons
        outcome = run_processes(
            _train_again, processes, config, span, compares_tensors, state["threads"], code
        )
        if outcome == "stopped":
            raise SystemExit(STOPPED)
        new = valid_rows(row for row in _rows(again) if row["step"] in span.rows)
        defects = compare_rows(span.rows, {row["step"]: row for row in new}, exact=not reasons)
        if end and compares_tensors:
            ours = verify(again / "checkpoints" / end.path.name)
            for file in (MODEL, OPTIMIZER):
                if end.sha256(file) != ours.sha256(file):
                    path = (end.path / file).relative_to(run)
                    defects.append(f"{path}: has other bits when trained again")
    compared = f"rows: {len(span.rows)}"
    exactness = "bit for bit"
    if compares_tensors:
        compared += ", and all tensors"
    if reasons:
        exactness = f"to {NEARLY:.0e} ({'; '.join(reasons)}), weights not compared"
    return f"{name}, processes: {processes}, {compared}, {exactness}", defects


def compare_rows(rows: Rows, again: Rows, exact: bool) -> list[str]:
    """Differences between a run's rows and the replayed ones: all bits, or, if not `exact`, sums
    over ranks to a tolerance."""
    defects: list[str] = []
    for step, row in sorted(rows.items()):
        if step not in again:
            defects.append(f"{METRICS}: step {step} has no row when trained again")
        other = again.get(step, row)
        for name in {**other, **row}:
            old = row.get(name)
            new = other.get(name)
            if not _is_repeated(name, old, new, exact):
                difference = f"is {old}, but {new} when trained again"
                defects.append(f"{METRICS}: {name} of step {step} {difference}")
    return defects


def _is_repeated(name: str, old: object, new: object, exact: bool) -> bool:
    """Whether a field has its value again, as far as its kind promises that."""
    kind = field_of(name).kind
    # a source's folder may have another name here
    is_renamed = "/" in name and (old is None or new is None)
    if old == new or kind in ("measured", "own") or is_renamed:
        return True
    if exact:
        return False
    if isinstance(old, float) and isinstance(new, float) and kind != "counted":
        return math.isclose(old, new, rel_tol=NEARLY)
    return kind == "counted"


@dataclass
class ReplayTask:
    """A task whose run ends with the span, and logs and evaluates at the run's steps. `_save`: a
    checkpoint at its end, too."""

    _task: Task
    _span: Span
    _save: bool

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the task has
        return getattr(self._task, name)

    def total_steps(self, epoch_size: int | None) -> int:
        return self._span.stop

    def load_state_dict(self, state: TaskState) -> None:
        """Loads the task's state. Its feed then skips the ranges that the run skipped here."""
        self._task.load_state_dict(state)
        feed = self._task.feed
        skipped = self._span.skipped
        if skipped and tuple(skipped) not in feed.state.skipped_ranges:
            feed.skip_range(*skipped)

    def due(self, step: int, last: bool) -> Due:
        row = self._span.rows.get(step, {})
        return Due(log=bool(row), evaluate="val_loss" in row, save=last and self._save)


def _train_again(
    config: RunConfig, span: Span, save: bool, threads: int | None, code: Code | None
) -> Outcome:
    make: Any = partial(Supervised, make_job)
    if isinstance(config, TrainingConfig):
        make = code.load(Pretraining) if code else Pretraining

    def make_task(config: RunConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Task:
        # each number has its own order of sums
        torch.set_num_threads(threads or torch.get_num_threads())
        return cast(Task, ReplayTask(make(config, accelerator, saved), span, save))

    with redirect_stdout(sys.stderr):  # standard output is the verdict's
        return train(config, make_task).outcome


def _rows(run: Path) -> Iterator[Row]:
    return (line.row for line in read_lines(run / METRICS) if isinstance(line.row.get("step"), int))


def _config(kind: str, saved: Row, folder: str, data: Sequence[str], state: Row) -> RunConfig:
    """The settings `saved` for a run in another folder, without preparation, trackers, trace,
    mirror and tasks, whose items may be gone. `train.compile: auto` becomes the choice in `state`,
    on such a device: the span's few steps could give another one."""
    config = read_config(kind, saved, METRICS)
    values = config.model_dump(mode="json")
    changes: Row = {"output_dir": folder, "run_name": "replay", "train.max_minutes": None}
    changes |= {"tracking.log_with": (), "tracking.profile_steps": ()}
    changes["checkpoint.mirror"] = None
    changes["checkpoint.seconds"] = None
    is_alike = state["device"] == device_name(pick_device(config.train.device, "train."))
    if is_alike and config.train.compile == "auto":
        changes["train.compile"] = state["compile"]
    if isinstance(config, TrainingConfig):
        # a stretch of the warm-up, which does not depend on the number of steps
        if config.train.minutes:
            changes |= {"train.minutes": None, "train.steps": config.optim.warmup_steps}
        changes |= {"data.prepare": None, "data.path": data or config.data.paths}
        changes |= {"eval.patience": None, "eval.tasks": ()}
    else:
        changes["launch.processes"] = None
    return resolve(type(config), [], values | changes)


def _how_exactly(config: RunConfig, state: Row) -> tuple[int, list[str]]:
    """Number of processes for the replay of a stretch that ends with `state`, and reasons for
    different last digits."""
    device = pick_device(config.train.device, "train.")
    trained = state["processes"]
    fits = device.type != "cuda" or trained <= torch.cuda.device_count()
    now: Row = {
        "torch": torch.__version__,
        "device": device_name(device),
        "processes": trained if fits else 1,
    }
    before = now | state["versions"] | {"device": state["device"], "processes": trained}
    reasons = [f"the run had {name} {before[name]}" for name in now if now[name] != before[name]]
    if device.type == "cuda" and not config.train.deterministic:
        reasons.append("GPU results are repeatable only with train.deterministic")
    devices = {now["device"], before["device"]}
    draws_others = not fits or (len(devices) > 1 and "cpu" in devices)
    model = config.model_dump().get("model", {})  # not all small jobs have one
    if draws_others and (model.get("dropout") or model.get("attention_dropout")):
        problem = f"its dropout depends on its {trained} processes and on {before['device']}"
        hint = "replay it on the same number and kind of devices"
        raise UserError("replay", config.kind, f"{problem}; {hint}")
    return now["processes"], reasons
