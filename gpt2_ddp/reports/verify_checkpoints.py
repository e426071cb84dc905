"""The checkpoints of a run: is each the one that was written and recorded, and are all there that were kept?"""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpt2_ddp.checkpoint.checkpoint import (
    MODEL,
    STATE,
    Checkpoint,
    CorruptCheckpoint,
    checkpoint_ref,
    list_checkpoints,
    verify,
)
from gpt2_ddp.checkpoint.run_files import METRICS, is_rollback, valid_rows
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.reports.verify_order import Record, Records
from gpt2_ddp.reports.verify_rows import read_metrics

SHARED = ("skipped", "val_loss")
"""What a row and the state of the same step both hold, besides what the order of the data says."""


Checkpoints = dict[str, Checkpoint]
"""The intact checkpoints of a run, by the place in it where the state of each stands."""


def read_checkpoints(run: Path) -> tuple[Checkpoints, list[str]]:
    """Every checkpoint whose hashes are right, and what is wrong with the others."""
    checkpoints: Checkpoints = {}
    defects = []
    for folder in list_checkpoints(run / "checkpoints"):
        try:
            checkpoint = verify(folder)
        except CorruptCheckpoint as damage:
            if folder.is_dir():  # and not removed meanwhile by a run that goes on
                defects.append(f"{damage.file.relative_to(run)}: {damage.reason}")
            continue
        place, step = f"checkpoints/{folder.name}/{STATE}", checkpoint.state["step"]
        if folder.name != f"step-{step:08d}":
            defects.append(f"{place}: is the state of step {step}")
        checkpoints[place] = checkpoint
    return checkpoints, defects


def check_checkpoints(run: Path, config: RunConfig, rows: Records, checkpoints: Checkpoints) -> Iterator[str]:
    """What is wrong between the checkpoints and the rows, which hold their hashes, and which were kept."""
    recorded, kept = _recorded(rows)
    first = next((row["step"] for row in rows.values() if row.get("event") == "start"), None)
    heads = {row["chain"]: number for number, row in enumerate(rows.values()) if "chain" in row}
    there = list_checkpoints(run / "checkpoints")
    names = {f"checkpoints/step-{step:08d}": step for step in kept}
    gone = [name for name in names if f"{name}/{STATE}" not in checkpoints and not (run / name).is_dir()]
    if gone:  # or removed meanwhile by a run that goes on: that says so in its rows first
        _, still_kept = _recorded(read_metrics(run / METRICS)[0])
        yield from (f"{name}: is missing" for name in gone if names[name] in still_kept)
    if not there and not kept and recorded:
        yield "checkpoints: none is there, and the run has saved some"
    by_step = {row["step"]: row for row in valid_rows(rows.values())}
    ended = max((row["step"] for row in rows.values() if row.get("event") in ("checkpoint", "end")), default=0)
    for place, checkpoint in checkpoints.items():
        state, folder = checkpoint.state, checkpoint.path
        try:
            step, sha256 = int(folder.name[5:]), checkpoint_ref(folder)["sha256"]
            misshapen = [*_check_shapes(run, folder, config, state)]
        except FileNotFoundError:  # removed meanwhile by a run that goes on
            continue
        right, recorded_at = recorded.get(step, (sha256, 0))
        # a kill may have come before the row of a step saved again, after pending work
        is_again = folder == there[-1] and heads.get(state.get("metrics_chain"), -1) >= recorded_at
        if sha256 != right and not is_again:
            yield f"checkpoints/{folder.name}: is not the one that metrics.jsonl recorded, by its manifest's SHA-256"
        ours = first is not None and step > first
        if ours and step not in recorded and ([folder] != there[-1:] or step <= ended):  # or a kill came before its row
            yield f"checkpoints/{folder.name}: is none that metrics.jsonl recorded"
        if (chain := state.get("metrics_chain")) not in heads and (ours or chain):
            yield f"{place}: the rows that it follows, by its metrics_chain, are not those of metrics.jsonl"
        row = by_step.get(state["step"], {})
        for name in SHARED:
            if None not in (state.get(name), row.get(name)) and state[name] != row[name]:
                yield f"{place}: {name} is {state[name]}, in the row of step {state['step']} {row[name]}"
        yield from misshapen


def unconfirmed(rows: Records, states: Records) -> int:
    """How many rows nothing outside of metrics.jsonl confirms: those behind the newest checkpoint's."""
    heads = {state.get("metrics_chain") for state in states.values()}
    count = 0
    for row in rows.values():
        count = 0 if row.get("chain") in heads else count + ("event" not in row)
    return count


def _recorded(rows: Records) -> tuple[dict[int, tuple[str, int]], list[int]]:
    """SHA-256 and row number of the recorded checkpoints, by step; and the steps of those kept last."""
    recorded: dict[int, tuple[str, int]] = {}
    kept: list[int] = []
    for number, row in enumerate(rows.values()):
        reference = row if row.get("event") == "checkpoint" else row.get("checkpoint")
        if isinstance(reference, dict) and {"step", "sha256"} <= reference.keys():
            recorded[reference["step"]] = reference["sha256"], number
        kept = [step for step in row.get("kept") or kept if type(step) is int]
        if is_rollback(row):
            kept = [step for step in kept if step <= row["step"]]
    return recorded, kept


def _check_shapes(run: Path, folder: Path, config: RunConfig, state: Record) -> Iterator[str]:
    """Whether a GPT's weights are those of the model section."""
    if not isinstance(config, TrainingConfig) or "vocab_size" not in state:
        return
    with torch.device("meta"), without_init():
        model = GPT(config.model, state["vocab_size"])
    right = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    try:
        with safe_open(folder / MODEL, "pt") as tensors:
            found = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118, it is no dict
    except SafetensorError as error:
        yield f"{(folder / MODEL).relative_to(run)}: {error}"
        return
    if wrong := [name for name in sorted(right.keys() | found.keys()) if right.get(name) != found.get(name)]:
        said = f"{wrong[0]} has the shape {found.get(wrong[0])}, by the model section {right.get(wrong[0])}"
        yield f"{(folder / MODEL).relative_to(run)}: {said}"
