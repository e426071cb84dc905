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
from collections.abc import Callable, Iterable, Iterator, MutableSequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from gpt2_ddp.errors import truncate
from gpt2_ddp.files import free_name, fsync_file, parse_json, regular, writing

METRICS, SAMPLES, STATUS, CONFIG = "metrics.jsonl", "samples.jsonl", "status.json", "config.yaml"
HASH = "samples_sha256"
NO_SAMPLES = hashlib.sha256().hexdigest()


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
Positive = Annotated[int, Field(ge=1)]
Sums = tuple[float, float, float]


class _Pending(BaseModel, extra="forbid"):
    row: dict[str, Any] = {}
    evaluate: bool = False
    sample: bool = False


class _Parent(BaseModel):
    step: Count


class _Mixture(BaseModel):
    manifests: list[str]
    phases: list[tuple[Count, list[str]]]


class _Guard(BaseModel):
    judged: Count = 0
    first_bad: Count | None = None
    losses: Sums | None = None
    norms: Sums | None = None
    noted: list[tuple[int, int, int, int]] = []


class State(BaseModel):
    """The fields of state.json that are read, for damage that a hash cannot show. Others are allowed."""

    step: Count
    position: Count
    order_digest: str
    kind: str
    run_id: str = ""
    rollbacks: Count = 0
    skipped: Count = 0
    epoch_size: Count | None = None
    epoch_loss: float = 0.0
    epoch_units: Count = 0
    since_row: Sums = (0, 0, 0)
    passed: list[tuple[Count, Count]] = []
    owed: _Pending | None = None
    branched_from: _Parent | None = None
    metrics: dict[str, float | None] = {}
    metrics_chain: str | None = None
    val_loss: float | None = None
    best_evaluation: tuple[Count, float, float | None, Count] | None = None
    guard: _Guard = _Guard()
    scaler: dict[str, float] | None = None
    micro_batch: Positive = 1
    processes: Positive = 1
    threads: Positive | None = None
    versions: dict[str, str] = {}
    data_manifest: str | None = None
    mixture: _Mixture | None = None
    tasks: dict[str, str] = {}


class GPTState(State):
    """The same for GPT-2."""

    tokenizer: Annotated[str, Field(pattern="^[^/]*$")]
    vocab_size: Count
    tokens: Count = 0


def state_defect(state: dict[str, Any], model_bytes: int) -> str:
    """The first field of a state.json that is missing or has another type or size; empty if there is none.
    `model_bytes`: size of the weights, of which each id of a GPT has some."""
    is_gpt = state.get("kind") == "gpt2"
    try:
        (GPTState if is_gpt else State).model_validate_json(json.dumps(state), strict=True)
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


def valid_rows(
    rows: Iterable[dict[str, Any]], found: MutableSequence[dict[str, Any]] | None = None
) -> MutableSequence[dict[str, Any]]:
    """The rows of steps that no rollback undid; without events. They are appended to `found`, or to a new list."""
    found = [] if found is None else found
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
    """A line of a .jsonl file."""

    number: int  # from 1
    text: str
    row: dict[str, Any] | None  # None if it is no object
    torn: bool  # without a newline, after a crash


def read_lines(file: Path) -> Iterator[Line]:
    """Yields the lines of a .jsonl file; none if the file is missing."""
    if file.is_file():
        with file.open("rb") as stream:
            yield from parse_lines(stream)


def parse_lines(stream: Iterable[bytes]) -> Iterator[Line]:
    for number, line in enumerate(stream, 1):
        text, row = line.removesuffix(b"\n"), None
        with suppress(ValueError):
            row = parse_json(text)
        row = row if isinstance(row, dict) else None
        yield Line(number, text.decode(errors="replace"), row, torn=not line.endswith(b"\n"))


def _is_sound(line: Line) -> bool:
    """Whether the line is whole, and its row has a step and only numbers of JSON."""
    if not line.row or line.torn or type(line.row.get("step")) is not int:
        return False
    with suppress(ValueError):
        json.dumps(line.row, allow_nan=False)
        return True
    return False


def kept_lines(
    file: Path, is_last: Callable[[Line], bool] | None, step: int, rollbacks: int, missing: str
) -> Iterator[Line]:
    """The lines that a resumed run keeps, read one at a time; their rows have a step. `is_last`: whether a line is the
    last one to keep; None: no line is kept. If no line is the last, `missing` is the problem, and those up to rollback
    number `rollbacks` are kept, then those of steps until `step`. A damaged file is copied aside, with a warning."""
    if os.path.lexists(file) and not file.is_file():
        _set_aside(file, "is not a file")
    if is_last is None:
        return iter(())
    end, backs, problem = 0, [0], ""
    with writing(file):
        for line in read_lines(file):
            if not _is_sound(line):
                is_damage = not line.torn and bool(line.text.strip())
                problem = problem or f"line {line.number} is not a row with a step" * is_damage
                continue
            if not end and is_last(line):
                end = line.number
            if line.row and is_rollback(line.row):
                backs.append(line.number)
    if problem := problem or missing * (not end):
        _set_aside(file, problem)
    ahead = end or backs[: rollbacks + 1][-1]

    sound = filter(_is_sound, takewhile(lambda line: not end or line.number <= end, read_lines(file)))
    rows = ((line, line.row or {}) for line in sound)
    return (line for line, row in rows if line.number <= ahead or (row["step"] <= step and not is_rollback(row)))


def _set_aside(file: Path, problem: str) -> None:
    """Copies a damaged file, for repair, with a warning; moves what is no file. Raises: UserError."""
    where, aside = "", free_name(file.with_name(f"{file.name}.damaged"))
    with writing(file):
        if file.is_file():
            shutil.copyfile(file, aside)  # a copy: after a crash, the file still has the good rows
            fsync_file(aside)
            where = f"; a copy is in {aside.name}"
        elif os.path.lexists(file):
            where = f"; moved to {file.rename(aside).name}"
    print(f"warning: {file}: {problem}{where}", file=sys.stderr)
