"""The files of a run folder: names, fields of state.json, and rows of metrics.jsonl and samples.jsonl. No torch.

A row is of a step or, with an `event`, of the run: a start, a checkpoint, a rollback, a branch, an end. Each line of
metrics.jsonl ends with its `chain`, a hash of all lines up to it, so changed and removed rows are detected.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpt2_ddp.errors import truncate
from gpt2_ddp.files import free_name, fsync_file, parse_json, regular, writing

METRICS, SAMPLES, STATUS, CONFIG = "metrics.jsonl", "samples.jsonl", "status.json", "config.yaml"


def is_locked(folder: Path) -> bool:
    """Whether a trainer has locked the run folder. For other processes: in the trainer, this would unlock it."""
    with suppress(OSError), regular(folder / ".lock").open() as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def is_data(folder: Path) -> bool:
    """Whether it is a folder of token shards, as people take it for a run."""
    return os.path.isfile(folder / "manifest.json") and any(folder.glob("*.bin"))


Count = Annotated[int, Field(ge=0)]


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)


class _Pending(_Fields):
    model_config = ConfigDict(extra="forbid")
    row: dict[str, Any] = {}
    evaluate: bool = False
    sample: bool = False


class _Parent(_Fields):
    step: Count


class _Mixture(_Fields):
    manifests: list[str]
    phases: list[tuple[Count, list[str]]]


class _Guard(_Fields):
    judged: Count = 0
    first_bad: Count | None = None
    losses: tuple[float, float, float] | None = None
    norms: tuple[float, float, float] | None = None
    noted: list[tuple[int, int, int, int]] = []


class State(_Fields):
    """The fields of state.json that are read, for damage that a hash cannot show. Others are allowed."""

    step: Count
    position: Count
    order_digest: str
    kind: str = "gpt2"
    run_id: str = ""
    rollbacks: Count = 0
    skipped: Count = 0
    epoch_size: Count | None = None
    epoch_loss: float = 0.0
    epoch_units: Count = 0
    since_row: tuple[float, float, float] = (0, 0, 0)
    passed: list[tuple[Count, Count]] = []
    pending: _Pending | None = Field(default=None, alias="owed")
    branched_from: _Parent | None = None
    metrics: dict[str, float | None] = {}
    metrics_chain: str | None = None
    val_loss: float | None = None
    best_evaluation: tuple[Count, float, float | None, Count] | None = None
    guard: _Guard = _Guard()
    scaler: dict[str, float] | None = None
    micro_batch: Annotated[int, Field(ge=1)] = 1
    data_manifest: str | None = None
    mixture: _Mixture | None = None
    tasks: dict[str, str] = {}


class GPTState(State):
    """The same for GPT-2."""

    tokenizer: str
    vocab_size: Count


def state_defect(state: dict[str, Any], model_bytes: int) -> str:
    """The first field of a state.json that is missing or has another type or size; empty if there is none.
    `model_bytes`: size of the weights, of which each id of a GPT has some."""
    is_gpt = state.get("kind") == "gpt2"
    try:
        (GPTState if is_gpt else State).model_validate_json(json.dumps(state))
    except ValidationError as error:
        first = error.errors()[0]
        name, is_missing = ".".join(map(str, first["loc"])), first["type"] == "missing"
        return f"has no {name}" if is_missing else f"has {name} = {truncate(first['input'], 40)}"
    return f"has vocab_size = {state['vocab_size']}" if is_gpt and state["vocab_size"] > model_bytes else ""


FIRST_CHAIN = "0" * 64  # chain before the first row


def next_chain(chain: str, text: str) -> str:
    """Chain of a row: SHA-256 of the chain before it, as 32 bytes, followed by the row's JSON text without a chain."""
    return hashlib.sha256(bytes.fromhex(chain) + text.encode()).hexdigest()


def split_chain(line: str) -> tuple[str, str | None]:
    """The row's JSON text without its chain, and the chain; None if it has none."""
    found = re.fullmatch(r'(.*), "chain": "([0-9a-f]{64})"}', line)
    return (found[1] + "}", found[2]) if found else (line, None)


def is_event(row: dict[str, Any]) -> bool:
    """Whether a row records an event of the run (start, checkpoint, rollback, end ...) instead of a step."""
    return "event" in row


def is_rollback(row: dict[str, Any]) -> bool:
    """Whether a row records a rollback to its step; later rows continue from that step."""
    return row.get("event") == "rollback"


def valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of steps that no rollback undid; without events."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if is_rollback(row):
            while found and found[-1]["step"] > row["step"]:
                found.pop()
        elif not is_event(row):
            found.append(row)
    return found


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for numbers that are not finite, which JSON lacks."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Line(NamedTuple):
    """A line of a .jsonl file: number (from 1), text, and row, or None if it is no object. `torn`: the last line,
    without a newline, after a crash."""

    number: int
    text: str
    row: dict[str, Any] | None
    torn: bool


def read_lines(file: Path) -> list[Line]:
    """The lines of a .jsonl file; none if the file is missing."""
    *lines, rest = (file.read_bytes() if file.is_file() else b"").split(b"\n")
    found = [Line(number, *parse(line), torn=False) for number, line in enumerate(lines, 1)]
    return [*found, Line(len(found) + 1, *parse(rest), torn=True)] if rest else found


def parse(line: bytes) -> tuple[str, dict[str, Any] | None]:
    """A line's text, and its object or None."""
    try:
        row = parse_json(line)
    except ValueError:
        row = None
    return line.decode(errors="replace"), row if isinstance(row, dict) else None


def _is_sound(row: dict[str, Any]) -> bool:
    """Whether the row has a step and only numbers of JSON."""
    with suppress(ValueError):
        json.dumps(row, allow_nan=False)
        return type(row.get("step")) is int
    return False


def until(lines: list[Line], step: int, rollbacks: int) -> list[Line]:
    """The lines up to `step`: all lines up to rollback number `rollbacks`, then those of steps until `step`."""
    rows = [(line, line.row) for line in lines if line.row]
    ahead, kept = min(rollbacks, sum(is_rollback(row) for _, row in rows)), []
    for line, row in rows:
        if ahead or (row["step"] <= step and not is_rollback(row)):
            kept.append(line)
        ahead -= bool(ahead) and is_rollback(row)
    return kept


def sound_lines(file: Path) -> list[Line]:
    """The lines whose row has a step. A file with other lines is copied aside, with a warning, for repair. A torn last
    line is dropped."""
    sound: list[Line] = []
    bad: list[Line] = []
    with writing(file):
        for line in read_lines(file):
            if line.row and _is_sound(line.row):
                sound.append(line)
            elif line.text.strip() and not line.torn:
                bad.append(line)
        if bad or not file.is_file():
            aside = free_name(file.with_name(f"{file.name}.damaged"))
            if bad:
                shutil.copyfile(file, aside)  # a copy: after a crash, the file still has the good rows
                fsync_file(aside)
            else:
                file.rename(aside)
            what = f"line {bad[0].number} is not a row with a step" if bad else "is not a file"
            print(f"warning: {file}: {what}; moved to {aside.name}, {len(sound)} rows are kept", file=sys.stderr)
    return sound
