"""Checks the values of rows: their fields, alone and against the rows before; lists of checkpoints; best evaluations.

A consistent chain does not make a row true. These contradictions need neither the data nor the model.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.mixture import source_weights
from gpt2_ddp.model.evaluate import count_scored
from gpt2_ddp.reports.verify_rows import Record, Records
from gpt2_ddp.scoring import METRICS
from gpt2_ddp.training.progress import Best

EVENTS = {"checkpoint", "room", "sample", "end"}
"""Events besides starts, branches and rollbacks."""
TEXTS = {"order_digest", "chain"}
OF_STEP = {"loss", "lr", "grad_norm", "skipped", "order_digest"}
"""Fields of every row except the first one, of the weights before the first step."""
MEASURED = {"loss", "loss_mean", "train_loss", "grad_norm", "mfu", "val_loss", "val_bits_per_byte"}
"""Fields that are null where the number is not finite or unknown."""
COUNTED = {"step", "epoch", "tokens", "samples", "lr", "skipped", "not_finite", "data_share", "val_tokens"}
COUNTED |= {"tokens_per_second", "samples_per_second", "val_samples", "val_accuracy", "val_top5"}
OF_SOURCES = {"tokens", "epoch", "val_loss", "val_bits_per_byte"}
"""Fields with one more for each folder of a mixture."""


def check_values(rows: Records) -> Iterator[str]:
    """Defects of the numbers in rows: unknown fields, missing or negative numbers, numbers that contradict others."""
    first, tasks, valid = 0, set(), [{"step": 0, "skipped": 0}]  # `valid`: the rows of steps that no rollback undid
    constants: dict[tuple[str, Any], float] = {}
    ended = False
    for place, row in rows.items():
        event, defects = row.get("event"), []
        if event == "branch":
            first, valid = row["step"], []
        elif event == "rollback":
            valid = [kept for kept in valid if kept["step"] <= row["step"]]
        elif event == "start":
            tasks = {f"{name}_{metric}" for name in row.get("tasks") or () for metric in METRICS}
            constants = {} if "mixture" in row else constants  # its weights may have changed
        elif event is None:
            defects = [*_check_numbers(row, tasks, first), *_compare(valid[-1:], row)]
            valid.append(row)
        elif event not in EVENTS:
            defects = [f"has the unknown event {event}"]
        if ended and event != "start":
            defects.append("follows the end of a session")
        ended = event == "end"
        for (what, key), value in _constants(row).items() if event is None else ():
            if not math.isclose(value, right := constants.setdefault((what, key), value), rel_tol=1e-9):
                defects.append(f"{what} is {value}, in earlier rows {right}")
        yield from (f"{place}: {defect}" for defect in defects)


def _compare(valid: list[Record], row: Record) -> Iterator[str]:
    """Defects between a row and the valid row before it."""
    for before in valid:
        steps, skipped = row["step"] - before["step"], row.get("skipped", 0) - before.get("skipped", 0)
        if "skipped" in row and not 0 <= skipped <= steps:
            yield f"skipped is {row['skipped']}, {before.get('skipped', 0)} at step {before['step']}"
        loss, mean = row.get("loss"), row.get("loss_mean")
        if not isinstance(loss, float) or not isinstance(mean, float) or "not_finite" in row:
            continue
        if steps == 1 and not math.isclose(loss, mean, rel_tol=1e-5):
            yield f"loss_mean of step {row['step']} alone is {mean}, its loss {loss}"


def _check_numbers(row: Record, tasks: set[str], first: int) -> Iterator[str]:
    for name in sorted(OF_STEP - row.keys()) if row["step"] > first else ():
        yield f"{name} of step {row['step']} is missing"
    for name, value in row.items():
        kind, _, source = name.partition("/")
        known = kind in OF_SOURCES if source else name in TEXTS | MEASURED | COUNTED | tasks
        sound = name in TEXTS or (type(value) in (int, float) and 0 <= value < math.inf)
        missing = name in ("loss", "loss_mean") and not row.get("not_finite")
        if not known:
            yield f"has the unknown field {name}"
        elif not sound and (value is not None or missing or not (kind in MEASURED or name in tasks)):
            yield f"{name} of step {row['step']} is {value}"


def _constants(row: Record) -> dict[tuple[str, Any], float]:
    """Numbers that no step changes: scored samples; tokens per byte of the scored text, by the number of its tokens."""
    found: dict[tuple[str, Any], float] = {}
    for name, value in row.items():
        bits, loss = value, row.get(name.replace("val_bits_per_byte", "val_loss"))
        if name.startswith("val_bits_per_byte") and isinstance(bits, float) and isinstance(loss, float) and loss > 0:
            found["tokens per byte by " + name, row.get("val_tokens")] = bits * math.log(2) / loss
        elif name == "val_samples" and type(value) is int:
            found[name, None] = value
    return found


def scored_tokens(config: TrainingConfig, manifests: Sequence[Manifest]) -> int:
    """`val_tokens` of each evaluation: validation splits of positive weight share `eval.tokens` equally."""
    scored = [manifests[number] for number, weight in source_weights(config, manifests).items() if weight]
    assert config.eval.tokens != "auto", "eval.tokens is resolved when the run starts"
    tokens = config.eval.tokens and -(-config.eval.tokens // max(len(scored), 1))
    return sum(count_scored(one.tokens("val"), config.model.block_size, tokens) for one in scored)


def recorded_checkpoint(row: Record) -> Record | None:
    """Step and SHA-256 of the checkpoint that a row records: of a save, or the newest one at a start."""
    reference = row if row.get("event") == "checkpoint" else row.get("checkpoint")
    return reference if isinstance(reference, dict) and {"step", "sha256"} <= reference.keys() else None


def check_kept(rows: Records) -> Iterator[str]:
    """Defects of the lists of checkpoints in events: each is of saved checkpoints, and of the one saved last."""
    saved: list[Any] = []
    for number, (place, row) in enumerate(rows.items()):
        reference, kept = recorded_checkpoint(row), row.get("kept")
        saved += [reference["step"]] if reference else []
        if number and row.get("event") == "start" and (not reference or reference["step"] != row["step"]):
            yield f"{place}: starts at step {row['step']}, without a checkpoint of that step"
        if kept is None:
            continue
        yield from (f"{place}: kept has step {step}, which was not saved" for step in kept if step not in saved)
        if reference and reference["step"] not in kept:
            yield f"{place}: kept lacks its own checkpoint, of step {reference['step']}"


def best_until(rows: Iterable[Record], step: int) -> Best:
    """The best evaluation of these rows up to a step."""
    best = Best()
    for row in rows:
        if row["step"] <= step and "val_loss" in row:
            best = best.after(row["step"], row | {"val_loss": row["val_loss"] or math.nan})
    return best
