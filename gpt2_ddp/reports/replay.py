"""Replay: trains a part of a run again from one of its checkpoints, and compares it with the run's records.

It trains in a temporary folder with links to the checkpoint's files; the run folder is only read. The same number of
processes gives the same bits; another number changes the order of sums.
"""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor

from gpt2_ddp.checkpoint.checkpoint import MODEL, OPTIMIZER, Checkpoint, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    METRICS,
    Outcome,
    finite,
    is_event,
    is_rollback,
    read_lines,
    valid_rows,
)
from gpt2_ddp.config.cli import read_yaml
from gpt2_ddp.config.jobs import JobConfig
from gpt2_ddp.config.kinds import read_config
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.distributed.spawn import run_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.verify_rows import NEARLY, equal, rule_of
from gpt2_ddp.state import TaskState
from gpt2_ddp.tasks.jobs import make_job
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import Supervised
from gpt2_ddp.training.loop import train
from gpt2_ddp.training.meters import device_name
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.task import Due, MakeTask, Task

Rows = dict[int, dict[str, Any]]  # rows of metrics.jsonl by step
Finding = tuple[str, list[str] | None]  # a check and its defects; or a note and None


class Span(NamedTuple):
    """Steps to train again, and the run's rows of these steps. `skipped`: positions [start, stop] that a rollback to
    `start` skipped, which its checkpoint lacks."""

    start: int  # step of a checkpoint; training begins after it
    stop: int
    rows: Rows
    skipped: list[int] | None = None


def plan(run: Path, steps: str) -> Span:
    """The span of `--replay 1000:1100`. Reads small files only. Raises: UserError, which names the checkpoints."""
    start, stop = map(int, steps.split(":"))
    checkpoints = steps_of(list_checkpoints(run / "checkpoints"))
    moves = (row["step"] for row in _rows(run) if is_rollback(row) or not is_event(row))
    end = max([*deque(moves, maxlen=1), *checkpoints], default=0)
    near = (row for row in _rows(run) if is_rollback(row) or start < row["step"] <= stop)
    own = {row["step"]: row for row in valid_rows(near)}
    problems = [
        (start not in checkpoints, f"no checkpoint of step {start}"),
        (stop <= start, "should end after its first step"),
        (stop > end, f"the run's last step is {end}"),
        (not own and stop not in checkpoints, "the run recorded nothing to compare in these steps"),
    ]
    if wrong := next((problem for is_so, problem in problems if is_so), ""):
        there = f"existing: {', '.join(map(str, checkpoints)) or 'none'}"
        raise UserError("replay", steps, f"{wrong}; begin at a checkpoint ({there}) and end at a step up to {end}")
    return Span(start, stop, own)


def replay(
    run: Path, span: Span, rollbacks: list[dict[str, Any]], intact: Iterable[Checkpoint], data: Sequence[str]
) -> Iterator[Finding]:
    """Trains the span again. Compares rows, and weights and optimizer state at the end of each stretch between two of
    the `intact` checkpoints, since each stretch may have its own number of processes. Yields for each stretch a text
    and its defects, None if it cannot be trained again. Raises: UserError if the data are not those of the run, or
    this machine cannot train it; SystemExit 75 after a signal."""
    checkpoints = {checkpoint.step: checkpoint for checkpoint in intact}
    if span.start not in checkpoints:
        what = f"replay from step {span.start}"
        yield what, [f"{what}: its checkpoint is damaged, so it cannot be trained again"]
        return
    saved = sorted(checkpoints)
    ends = [step for step in saved if span.start < step < span.stop]
    for start, stop in pairwise([span.start, *ends, span.stop]):
        # the next checkpoint has the settings of this stretch, which may differ from those before a stop
        maker = next((checkpoints[step] for step in saved if step >= stop), None)
        rows = {step: row for step, row in span.rows.items() if start < step <= stop}
        back = [row for row in rollbacks if row["step"] <= start][-1:]
        skipped = next((row["skipped_range"] for row in back if row["step"] == start), None)
        yield _replay_stretch(run, Span(start, stop, rows, skipped), checkpoints, maker, data)


def _replay_stretch(
    run: Path, span: Span, checkpoints: dict[int, Checkpoint], maker: Checkpoint | None, data: Sequence[str]
) -> Finding:
    what = f"replay from step {span.start} to {span.stop}"
    begin, end = checkpoints[span.start], checkpoints.get(span.stop)
    if not begin.state.has_optimizer_state:  # whether the run continued with zeros is not recorded
        return f"{what}: not possible, its checkpoint has no optimizer state (checkpoint.save_optimizer)", None
    files, state = [*([maker.path / CONFIG] if maker else []), run / CONFIG], (maker or begin).state.record
    same = (begin.kind, begin.config, begin.step)
    found = {file.relative_to(run): setting_defects(read_yaml(str(file), "run"), file, *same) for file in files}
    if any(found.values()):
        return what, [f"{file}: {defect}" for file, defects in found.items() for defect in defects]
    with _copied(begin, files[0], data, state) as (config, processes, reasons):
        again, bits = Path(config.output_dir) / config.run_name, end is not None and not reasons
        if run_processes(_train_again, processes, config, span, bits, state["threads"]) == "stopped":
            raise SystemExit(STOPPED)
        rows = {row["step"]: row for row in valid_rows(_rows(again))}
        defects = compare_rows(span.rows, rows, exact=not reasons)
        if end and bits:
            ours = again / "checkpoints" / f"step-{span.stop:08d}"
            defects += [defect for name in (MODEL, OPTIMIZER) for defect in _tensors(run, end.path / name, ours / name)]
    saved = "weights and optimizer state" if end and end.state.has_optimizer_state else "weights"
    compared = f"{len(span.rows)} row{'s' * (len(span.rows) != 1)}" + f", {saved}" * bits
    compared += " (without task scores)" * bool(begin.state.record.get("tasks"))
    how = f"to {NEARLY:.0e} ({'; '.join(reasons)}), weights not compared" if reasons else "bit for bit"
    return f"{what} by {processes} process{'es' * (processes > 1)}: {compared}, {how}", defects


@contextmanager
def _copied(
    checkpoint: Checkpoint, settings: Path, data: Sequence[str], state: dict[str, Any]
) -> Iterator[tuple[RunConfig, int, list[str]]]:
    """A temporary run folder with links to a checkpoint's files. Yields its configuration, and `_how_exactly`."""
    with TemporaryDirectory(prefix="replay-") as folder:
        config = _config(checkpoint.kind, settings, folder, data, state)
        copy = Path(folder) / config.run_name / "checkpoints" / checkpoint.path.name
        copy.mkdir(parents=True)
        for file in checkpoint.path.iterdir():
            (copy / file.name).symlink_to(file.resolve())
        yield config, *_how_exactly(config, state)


def rescore(
    run: Path, rows: Iterable[dict[str, Any]], intact: Iterable[Checkpoint], data: Sequence[str]
) -> Iterator[Finding]:
    """Evaluates each of the `intact` checkpoints whose step has a val_loss in the valid `rows` again. Yields a text for
    each, and its defects; None if there is nothing to compare. Raises: as `replay`."""
    scores = {row["step"]: row for row in rows if "val_loss" in row}
    for checkpoint in sorted(intact, key=lambda checkpoint: checkpoint.step):
        step, state = checkpoint.step, checkpoint.state.record
        what = f"scores of step {step}"
        if step not in scores or state["val_loss"] is None:
            yield f"{what}: not evaluated, so nothing confirms these weights; --replay trains them again", None
            continue
        with _copied(checkpoint, checkpoint.path / CONFIG, data, state) as (config, processes, reasons):
            new = run_processes(_score_again, processes, config, step, state["threads"])
        place, old = checkpoint.path.relative_to(run), scores[step]
        wrong = [name for name in new if name in old and not equal(new[name], old[name], NEARLY if reasons else 0.0)]
        defects = [f"{place}: {name} is {new[name]}, in {METRICS} {old[name]}" for name in wrong]
        how = f"to {NEARLY:.0e} ({'; '.join(reasons)})" if reasons else "bit for bit"
        yield f"{what}, evaluated again by {processes} process{'es' * (processes > 1)}, {how}", defects


def _score_again(config: RunConfig, step: int, threads: int | None) -> dict[str, Any]:
    with closing(Run(config, _make_task(config, Span(step, step + 1, {}), False, threads))) as run:
        run.build()
        return finite(run.evaluate(lambda: None))


def compare_rows(rows: Rows, again: Rows, exact: bool) -> list[str]:
    """Differences between a run's rows and the replayed ones in the fields that RULES compares: all bits, or, if not
    `exact`, sums over ranks to a tolerance."""
    defects = []
    for step, row in sorted(rows.items()):
        other = again.get(step, {})
        for name, old in row.items():
            rule, new = rule_of(name), other.get(name)
            is_expected = name in other or rule.needed == "step"  # a source's folder may have another name here
            if rule.again is not None and is_expected and not equal(old, new, 0.0 if exact else rule.again):
                defects.append(f"{METRICS}: {name} of step {step} is {old}, but {new} when trained again")
    return defects


class ReplayTask:
    """A task whose run ends with the span, and logs and evaluates at the run's steps."""

    def __init__(self, task: Task, span: Span, save: bool):
        self._task, self._span, self._save = task, span, save

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def total_steps(self, epoch_size: int | None) -> int:
        return self._span.stop

    def load_state_dict(self, state: TaskState) -> None:
        """Loads the task's state. Its feed then skips the ranges that the run skipped here."""
        self._task.load_state_dict(state)
        if self._span.skipped and tuple(self._span.skipped) not in self._task.feed.skipped_ranges:
            self._task.feed.skip_range(*self._span.skipped)

    def due(self, step: int, last: bool) -> Due:
        row = self._span.rows.get(step)
        return Due(log=row is not None, evaluate=row is not None and "val_loss" in row, save=last and self._save)


def _train_again(config: RunConfig, span: Span, save: bool, threads: int | None) -> Outcome:
    with redirect_stdout(sys.stderr):  # standard output is the verdict's
        return train(config, _make_task(config, span, save, threads)).outcome


def _make_task(config: RunConfig, span: Span, save: bool, threads: int | None) -> MakeTask:
    make: Any = Pretraining if isinstance(config, TrainingConfig) else partial(Supervised, make_job)

    def make_task(config: RunConfig, accelerator: Accelerator, saved: Checkpoint | None) -> Any:
        torch.set_num_threads(threads or torch.get_num_threads())  # each number has its own order of sums
        return ReplayTask(make(config, accelerator, saved), span, save)

    return make_task


def _rows(run: Path) -> Iterator[dict[str, Any]]:
    return (line.row for line in read_lines(run / METRICS) if line.row and isinstance(line.row.get("step"), int))


def setting_defects(
    settings: dict[str, Any], file: object, kind: str, saved: dict[str, Any], step: int = 0
) -> list[str]:
    """The settings of `file` that do not match the training of a checkpoint with the configuration `saved`."""
    try:
        read_config(kind, settings, file).check_resumable(kind, saved, step)
    except UserError as error:
        return error.mistakes
    return []


def _config(kind: str, file: Path, folder: str, data: Sequence[str], state: dict[str, Any]) -> RunConfig:
    """The settings in `file` for a run in another folder, without preparation, trackers, profile and tasks, whose items
    may be gone. `auto` becomes the choice in `state`, on such a device: the span's few steps could give another one."""
    config = read_config(kind, read_yaml(str(file), "run"), file)
    values: dict[str, Any] = config.model_dump(mode="json") | {"output_dir": folder, "run_name": "replay"}
    values["train"] |= {"max_minutes": None, "profile_steps": 0}
    if state["device"] == device_name(pick_device(config.train.device, "train.")):
        settled = {"compile": state["compile"], "micro_batch_size": state.get("micro_batch")}
        values["train"] |= {name: to for name, to in settled.items() if to and values["train"].get(name) == "auto"}
    values["tracking"] |= {"log_with": "none"}
    if isinstance(config, TrainingConfig):
        values["data"] |= {"prepare": None, "path": data or config.data.paths}
        values["eval"] |= {"patience": None, "tasks": ()}
    if isinstance(config, JobConfig):
        values["launch"] |= {"processes": None}
        if data and "path" in values.get("data", {}):
            values["data"]["path"] = data[0]
    return type(config).model_validate(values)


def _how_exactly(config: RunConfig, state: dict[str, Any]) -> tuple[int, list[str]]:
    """Number of processes for the replay of a stretch that ends with `state`, and reasons for different last digits."""
    trained = processes = state["processes"]
    version = state["versions"].get("torch", torch.__version__)
    reasons = [] if version == torch.__version__ else [f"the run had torch {version}"]
    device = pick_device(config.train.device, "train.")
    here = device_name(device)
    there = state["device"]
    if there != here:
        reasons.append(f"the run was on {there}, this machine has {here}")
    if device.type == "cuda":
        processes = trained if trained <= torch.cuda.device_count() else 1
        if not config.train.deterministic:
            reasons.append("GPU results are repeatable only with train.deterministic")
    if processes != trained:
        reasons.append(f"the run had {trained} processes")
    draws_others = processes != trained or (there != here and "cpu" in (there, here))
    if draws_others and config.model_dump()["model"].get("dropout"):
        hint = f"its dropout depends on its {trained} processes and on {there}"
        raise UserError("replay", config.kind, f"{hint}; replay it on the same number and kind of devices")
    return processes, reasons


def _tensors(run: Path, file: Path, again: Path) -> list[str]:
    """Whether two files of tensors hold the same bits."""
    with safe_open(file, "pt") as old, safe_open(again, "pt") as new:
        names, known = {*old.keys()} | {*new.keys()}, {*old.keys()} & {*new.keys()}
        altered = {name for name in known if _bits(old.get_tensor(name)) != _bits(new.get_tensor(name))}
    wrong = sorted((names - known) | altered)
    how_many = f"{len(wrong)} of {len(names)} tensors"
    return [f"{file.relative_to(run)}: {how_many}, {wrong[0]} first, differ when trained again"] if wrong else []


def _bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
