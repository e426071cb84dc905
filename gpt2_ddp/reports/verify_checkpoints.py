"""Checks a run's checkpoints: their files, and their hashes and states against the rows of metrics.jsonl."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from gpt2_ddp.checkpoint.checkpoint import (
    DTYPES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Checkpoint,
    CorruptCheckpoint,
    list_checkpoints,
    misfit,
    verify,
)
from gpt2_ddp.checkpoint.run_files import METRICS, is_rollback, valid_rows
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.files import sha256_file
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.reports.verify_rows import Record, Records, read_metrics
from gpt2_ddp.training.progress import Best

OF_STEP = ("skipped", "val_loss")
"""Fields of a row and of the state of the same step, besides those of the order of the data."""
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
        place, step = f"checkpoints/{folder.name}/{STATE}", checkpoint.state["step"]
        if folder.name != f"step-{step:08d}":
            defects.append(f"{place}: holds the state of step {step}")
        found[place] = checkpoint
    return found, defects


def check_checkpoints(run: Path, config: RunConfig, rows: Records, checkpoints: Checkpoints) -> Iterator[str]:
    """Defects between the checkpoints and the rows, which hold their hashes and which of them were kept."""
    saved, kept, defects = check_kept(rows)
    yield from defects
    there = list_checkpoints(run / "checkpoints")
    folders = {step: f"checkpoints/step-{step:08d}" for step in kept}
    gone = [step for step in kept if f"{folders[step]}/{STATE}" not in checkpoints]
    gone = [step for step in gone if not (run / folders[step]).is_dir()]
    if gone:  # or deleted meanwhile by a running training, which records that first
        still_kept = check_kept(read_metrics(run / METRICS)[0])[1]
        yield from (f"{folders[step]}: is missing" for step in gone if step in still_kept)
    if not there and not kept and saved:
        yield "checkpoints: all are missing, although the run has saved some"

    chains = {row["chain"]: number for number, row in enumerate(rows.values()) if "chain" in row}
    by_step = {row["step"]: row for row in valid_rows(rows.values())}
    first = next((row["step"] for row in rows.values() if row.get("event") == "start"), math.inf)
    ended = max((row["step"] for row in rows.values() if row.get("event") in ("checkpoint", "end")), default=0)
    for place, checkpoint in checkpoints.items():
        folder, chain = checkpoint.path, checkpoint.state.get("metrics_chain")
        try:
            step, sha256 = int(folder.name[5:]), sha256_file(folder / MANIFEST)
            misshapen = [f"checkpoints/{folder.name}/{defect}" for defect in _check_files(checkpoint, config)]
        except FileNotFoundError:  # deleted meanwhile by a running training
            continue
        name, is_newest, is_own = f"checkpoints/{folder.name}", [folder] == there[-1:], step > first
        right, saved_at = saved.get(step, (sha256, 0))
        # a kill may have come before the row of a step saved again, after pending work
        is_again = is_newest and chains.get(chain, -1) >= saved_at
        if sha256 != right and not is_again:
            yield f"{name}: its manifest's SHA-256 differs from metrics.jsonl's"
        if is_own and step not in saved and (not is_newest or step <= ended):  # or a kill came before its row
            yield f"{name}: is not recorded in metrics.jsonl"
        if chain not in chains and (is_own or chain):
            yield f"{place}: its metrics_chain is not in metrics.jsonl"
        yield from compare_state(place, checkpoint.state, by_step)
        yield from misshapen


def check_kept(rows: Records) -> tuple[dict[int, tuple[str, int]], list[int], list[str]]:
    """The recorded checkpoints, and defects of the lists `kept` in events: they name saved checkpoints, and their own.

    Returns:
        SHA-256 and row number of each, by step; the steps that were kept last; defects.
    """
    saved: dict[int, tuple[str, int]] = {}
    kept: list[int] = []
    defects: list[str] = []
    for number, (place, row) in enumerate(rows.items()):
        reference = row if row.get("event") == "checkpoint" else row.get("checkpoint") or {}
        step = reference["step"] if "sha256" in reference and type(reference.get("step")) is int else None
        if step is not None:
            saved[step] = reference["sha256"], number
        if number and row.get("event") == "start" and step != row["step"]:
            defects.append(f"{place}: starts at step {row['step']}, without a checkpoint of that step")
        if (listed := row.get("kept")) is not None:
            unknown = [other for other in listed if other not in [*saved]]
            defects += [f"{place}: kept has step {other}, which was not saved" for other in unknown]
            if step is not None and step not in listed:
                defects.append(f"{place}: kept lacks its own checkpoint, of step {step}")
            kept = [*dict.fromkeys(other for other in listed if type(other) is int)]
        if is_rollback(row):
            kept = [other for other in kept if other <= row["step"]]
    return saved, kept, defects


def compare_state(place: str, state: Record, rows: dict[int, Record]) -> Iterator[str]:
    """Defects between a state and the valid rows, by step."""
    row, origin = rows.get(state["step"], {}), f"the row of step {state['step']}"
    both = [field for field in OF_STEP if None not in (state.get(field), row.get(field))]
    yield from differing(place, state, origin, row, both)
    if "loss" in row and any(state.get("since_row") or ()):
        yield f"{place}: since_row is {state['since_row']}, after {origin}"
    if state.get("val_loss") is not None and "val_loss" in row:
        scores = state.get("metrics", {})
        yield from differing(place, scores, origin, row, [name for name in scores if name in row])
        best = Best()
        for step, other in rows.items():
            if step <= state["step"] and "val_loss" in other:
                best = best.after(step, other | {"val_loss": other["val_loss"] or math.nan})
        if (state.get("best_evaluation") or [])[:2] != [*best[:2]]:
            yield f"{place}: best_evaluation is {state.get('best_evaluation')}, in metrics.jsonl {[*best]}"


def differing(place: str, found: Record, origin: str, right: Record, names: Iterable[str]) -> list[str]:
    """Defects of the fields `names` at `place`, whose values differ from those at `origin`."""
    wrong = [name for name in names if found.get(name) != right.get(name)]
    return [f"{place}: {name} is {found.get(name)}, in {origin} {right.get(name)}" for name in wrong]


def _check_files(checkpoint: Checkpoint, config: RunConfig) -> Iterator[str]:
    """Defects of a checkpoint's tokenizer and tensors: other hashes, names, types or shapes, or a number not finite."""
    state, folder = checkpoint.state, checkpoint.path
    tokenizer = folder / str(state.get("tokenizer"))
    if tokenizer.suffix == ".json" and not tokenizer.is_file():
        yield f"{tokenizer.name}: is missing"
    elif tokenizer.is_file() and sha256_file(tokenizer) != state.get("tokenizer_sha256"):
        yield f"{tokenizer.name}: its SHA-256 differs from tokenizer_sha256 in {STATE}"
    found: dict[str, dict[str, tuple[str, list[int]]]] = {MODEL: {}, OPTIMIZER: {}}
    for file, layout in found.items():
        with safe_open(folder / file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, it is not a dict
                part = tensors.get_slice(name)
                layout[name] = part.get_dtype(), part.get_shape()
            # a bad gradient's step is skipped
            ruined = [name for name in layout if config.guard.skip and not tensors.get_tensor(name).isfinite().all()]
        if ruined:
            yield f"{file}: {ruined[0]} is not finite"
    if not isinstance(config, TrainingConfig) or "vocab_size" not in state:
        return
    with torch.device("meta"), without_init():
        model = GPT(config.model, state["vocab_size"])
    right = {name: (DTYPES[tensor.dtype], [*tensor.shape]) for name, tensor in model.state_dict().items()}
    weights: dict[str, Any] = found[MODEL]
    if wrong := [name for name in sorted(right.keys() | weights.keys()) if right.get(name) != weights.get(name)]:
        ours, theirs = (" ".join(map(str, one.get(wrong[0]) or ["none"])) for one in (right, weights))
        yield f"{MODEL}: {wrong[0]} is {theirs}, by the model section {ours}"
    optimizer_state = {name: shape for name, (_, shape) in found[OPTIMIZER].items()}
    if problem := misfit(optimizer_state, model):
        yield f"{OPTIMIZER}: {problem}"
    elif not optimizer_state and state["step"] > state.get("skipped", 0):
        yield f"{OPTIMIZER}: has no tensors"
