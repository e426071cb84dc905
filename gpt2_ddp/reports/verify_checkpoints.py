"""Checks a run's checkpoints: their files, and their hashes and states against the rows of metrics.jsonl."""

import math
from collections.abc import Iterator
from pathlib import Path

from safetensors import safe_open

from gpt2_ddp.checkpoint.checkpoint import (
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    CorruptCheckpoint,
    list_checkpoints,
    misfit,
    record_defect,
    verify,
)
from gpt2_ddp.checkpoint.run_files import METRICS, is_rollback, recorded_checkpoint
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.files import sha256_file
from gpt2_ddp.reports.verify_rows import Log, Record, Records, differing
from gpt2_ddp.state import FIRST_CHAIN, Best, GPTState, State
from gpt2_ddp.tasks.trained_model import outline, shape_defect, tensor_shapes

Checkpoints = dict[str, Checkpoint]
"""Intact checkpoints, by the place of their state in the run folder."""


def read_checkpoints(run: Path) -> tuple[Checkpoints, list[str]]:
    """Every checkpoint whose hashes are right, and the defects of the others."""
    found: Checkpoints = {}
    defects = []
    for folder in list_checkpoints(run / "checkpoints"):
        try:
            checkpoint = verify(folder)
        except CorruptCheckpoint as damage:
            if folder.is_dir():  # not deleted meanwhile by a running training
                defects.append(f"{damage.file.relative_to(run)}: {damage.reason}")
            continue
        place, step = f"checkpoints/{folder.name}/{STATE}", checkpoint.step
        if folder.name != f"step-{step:08d}":
            defects.append(f"{place}: holds the state of step {step}")
        found[place] = checkpoint
    return found, defects


def check_checkpoints(run: Path, config: RunConfig, log: Log, checkpoints: Checkpoints) -> Iterator[str]:
    """Defects between the checkpoints and the rows, which hold their hashes and which of them were kept."""
    events, there = log.events, list_checkpoints(run / "checkpoints")
    rows, aside = [*events.values()], {file.name for file in (run / "checkpoints").glob("step-*.rejected*")}
    for name in sorted(aside.union(*(row.get("rejected", []) for row in rows))):
        yield f"checkpoints/{name}: is not what {METRICS} recorded; a start or a rollback rejected it"
    saved, kept, defects = check_kept(events)
    yield from defects
    gone = [step for step in kept if not (run / f"checkpoints/step-{step:08d}").is_dir()]
    # a running training may have deleted them meanwhile, which it records first
    still_kept = check_kept(Log(run / METRICS).events)[1] if gone else ()
    yield from (f"checkpoints/step-{step:08d}: is missing" for step in gone if step in still_kept)
    if saved and not kept and not there:
        yield "checkpoints: all are missing, although the run has saved some"
    first = next((row["step"] for row in events.values() if row["event"] == "start"), math.inf)
    for place, checkpoint in checkpoints.items():
        name, chain = place.removesuffix(f"/{STATE}"), checkpoint.state.log.chain
        try:
            defect = record_defect(checkpoint, rows, log.seen.get(chain, 0))
            wrong = [f"{name}/{defect}" for defect in _check_files(checkpoint, config)]
        except FileNotFoundError:  # deleted meanwhile by a running training
            continue
        if defect:
            yield f"{name}: {defect}"
        if chain not in log.seen and (checkpoint.step > first or chain != FIRST_CHAIN):
            yield f"{place}: its chain is not in metrics.jsonl"
        yield from compare_state(place, checkpoint.state, log.by_step)
        yield from wrong


def check_kept(events: Records) -> tuple[set[int], list[int], list[str]]:
    """The steps of recorded checkpoints, the steps that were kept last, and defects of the lists `kept` in events: they
    name saved checkpoints, their own, and the newest `keep_last` of those before, except that of the first step."""
    saved: set[int] = set()
    kept: list[int] = []
    defects: list[str] = []
    keep_last, first = 0, next((row["step"] for row in events.values() if row["event"] == "start"), None)
    for number, (place, row) in enumerate(events.items()):
        step, _ = recorded_checkpoint(row) or (None, "")
        if step is not None:
            saved.add(step)
        if row["event"] == "start":
            keep_last = flat(row.get("config") or {}).get("checkpoint.keep_last")
            if number and step != row["step"]:
                defects.append(f"{place}: starts at step {row['step']}, without a checkpoint of that step")
        if is_rollback(row):
            kept = [other for other in kept if other <= row["step"]]
        if "kept" not in row:
            continue
        now = [*dict.fromkeys(row["kept"])]
        defects += [f"{place}: kept has step {other}, which was not saved" for other in now if other not in saved]
        coming = row["step"] if step is None else step  # a full disk makes room for it
        if step is not None and step not in now:
            defects.append(f"{place}: kept lacks its own checkpoint, of step {step}")
        if type(keep_last) is int and keep_last > 0 and row["event"] != "start":
            newest = {*sorted({*kept, coming})[-keep_last:]} - {*now, coming, first}
            defects += [f"{place}: kept lacks a checkpoint of keep_last, step {other}" for other in sorted(newest)]
        kept = now
    return saved, kept, defects


def compare_state(place: str, state: State, rows: dict[int, Record]) -> Iterator[str]:
    """Defects between a state and the valid rows, by step."""
    row, origin = rows.get(state.step, {}), f"the row of step {state.step}"
    if row.get("skipped") is not None:
        yield from differing(place, state.record, origin, row, ["skipped"])
    if "loss" in row and any(state.losses.since_row):
        yield f"{place}: since_row is {state.losses.since_row}, after {origin}"
    if state.progress.val_loss is not None and "val_loss" in row:
        scores = state.progress.scores
        yield from differing(place, scores, origin, row, [name for name in scores if name in row])
        best = Best()
        for step, other in rows.items():
            if step <= state.step and "val_loss" in other:
                best = best.after(step, other)
        found = state.progress.best
        if (found.step, found.val_loss) != (best.step, best.val_loss):
            yield f"{place}: best is {found!r}, in metrics.jsonl {best!r}"


def check_tokenizer_file(file: Path, sha256: object, origin: str) -> Iterator[str]:
    """Defects of a tokenizer.json, whose hash is in the file `origin`; a tokenizer of a library has no file."""
    if file.suffix == ".json" and not file.is_file():
        yield f"{file.name}: is missing"
    elif file.is_file() and sha256_file(file) != sha256:
        yield f"{file.name}: its SHA-256 differs from tokenizer_sha256 in {origin}"


def _check_files(checkpoint: Checkpoint, config: RunConfig) -> Iterator[str]:
    """Defects of a checkpoint's tokenizer and tensors: other hashes, names, types or shapes, or a number not finite."""
    state, folder = checkpoint.state, checkpoint.path
    if isinstance(state, GPTState):
        yield from check_tokenizer_file(folder / state.task.tokenizer, state.task.tokenizer_sha256, STATE)
    for file in (MODEL, OPTIMIZER):
        yield from _check_numbers(folder / file, state, config)
    if not (isinstance(config, TrainingConfig) and isinstance(state, GPTState)):
        return
    if defect := shape_defect(config.model, state.task.vocab_size, tensor_shapes(folder / MODEL)):
        yield f"{MODEL}: {defect}"
        return
    optimizer_state = {name: shape for name, (_, shape) in tensor_shapes(folder / OPTIMIZER).items()}
    if problem := misfit(optimizer_state, outline(config.model, state.task.vocab_size)):
        yield f"{OPTIMIZER}: {problem}"
    elif not optimizer_state and state.step > state.losses.skipped:
        yield f"{OPTIMIZER}: has no tensors"


def _check_numbers(file: Path, state: State, config: RunConfig) -> Iterator[str]:
    """The first tensor that no training writes: not finite, a negative square, or Adam's number of steps."""
    taken = state.step - state.losses.skipped
    # a loss scaler's skips are not counted; small jobs may begin with a new optimizer state
    is_exact = isinstance(config, TrainingConfig) and config.guard.skip and not state.optimizer.scaler
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118, it is not a dict
            tensor, kind = tensors.get_tensor(name), name.partition(".")[0] if file.name == OPTIMIZER else ""
            if config.guard.skip and not tensor.isfinite().all():  # a bad gradient's step is skipped
                yield f"{file.name}: {name} is not finite"
            elif kind == "exp_avg_sq" and (tensor < 0).any():
                yield f"{file.name}: {name} has negative squares"
            elif kind == "step" and ((tensor > taken) | (tensor < (taken if is_exact else 0))).any():
                yield f"{file.name}: {name} is {tensor.tolist()}, after {taken} steps that were not skipped"
            else:
                continue
            return
