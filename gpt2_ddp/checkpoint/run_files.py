"""What lies in a run's folder, for those who only look at it. No torch: status.py answers at once."""

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
from typing import Any, NamedTuple

from gpt2_ddp.files import free_name, fsync_file, writing

METRICS, SAMPLES, STATUS, CONFIG = "metrics.jsonl", "samples.jsonl", "status.json", "config.yaml"


def read_status(folder: Path) -> dict[str, Any]:
    """What the run folder's status.json says; nothing where it is missing or damaged."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / STATUS).read_bytes())
        return found if isinstance(found, dict) else {}
    return {}


def is_locked(folder: Path) -> bool:
    """Whether a trainer has locked the run folder. Not for the trainer itself, which this would unlock."""
    try:
        lock = os.open(folder / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


FIRST_CHAIN = "0" * 64
"""The chain before the first row."""


def next_chain(chain: str, text: str) -> str:
    """SHA-256 of the chain before a row, as 32 bytes, followed by the row's JSON text without its own chain."""
    return hashlib.sha256(bytes.fromhex(chain) + text.encode()).hexdigest()


def split_chain(line: str) -> tuple[str, str | None]:
    """A line of metrics.jsonl as the row's JSON text without its chain, and that; None for one of an older release."""
    found = re.fullmatch(r'(.*), "chain": "([0-9a-f]{64})"}', line)
    return (found[1] + "}", found[2]) if found else (line, None)


def is_event(row: dict[str, Any]) -> bool:
    """Whether a row of a .jsonl file tells of the run (`event` says what: start, checkpoint, rollback, end ...), and
    not of a step of the training."""
    return "event" in row


def is_rollback(row: dict[str, Any]) -> bool:
    """Whether a row of a .jsonl file says that the run went back to the step that it names; rows that follow begin
    behind that step again."""
    return row.get("event") == "rollback"


def valid_rows(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of steps that still hold: without those that a rollback has undone, and without events."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if is_rollback(row):
            found = [kept for kept in found if kept["step"] <= row["step"]]
        elif not is_event(row):
            found.append(row)
    return found


def finite(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null for numbers that are not finite, as JSON has none."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


class Line(NamedTuple):
    """A line of a .jsonl file: its number, the first being 1, its text, and the object that it holds; None for none.
    A torn one has no newline: the last one, after a crash."""

    number: int
    text: str
    row: dict[str, Any] | None
    torn: bool


def read_lines(file: Path) -> list[Line]:
    """The lines of metrics.jsonl or samples.jsonl, none for a file that is not there."""
    *lines, rest = (file.read_bytes() if file.is_file() else b"").split(b"\n")
    found = [Line(number, *parse(line), torn=False) for number, line in enumerate(lines, 1)]
    return [*found, Line(len(found) + 1, *parse(rest), torn=True)] if rest else found


def parse(line: bytes) -> tuple[str, dict[str, Any] | None]:
    """A line as text, and the object that it holds; None for none."""
    try:
        row = json.loads(line.decode())
    except (ValueError, RecursionError):
        row = None
    return line.decode(errors="replace"), row if isinstance(row, dict) else None


def _is_sound(row: dict[str, Any]) -> bool:
    """Whether it has a step, and no number that JSON has not."""
    with suppress(ValueError):
        json.dumps(row, allow_nan=False)
        return type(row.get("step")) is int
    return False


def until(lines: list[Line], step: int, rollbacks: int) -> list[Line]:
    """The lines until `step`, by their own steps: what there was to go by before rows had a chain."""
    rows = [(line, line.row) for line in lines if line.row]
    ahead, kept = min(rollbacks, sum(is_rollback(row) for _, row in rows)), []
    for line, row in rows:
        if ahead or (row["step"] <= step and not is_rollback(row)):
            kept.append(line)
        ahead -= bool(ahead) and is_rollback(row)
    return kept


def sound_lines(file: Path) -> list[Line]:
    """The lines that hold a row with a step. A file with others is set aside, with a warning: it may be worth mending.
    A torn last line is what a kill leaves, and no damage."""
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
                shutil.copyfile(file, aside)  # and not renamed: whatever happens now, the good rows are in their place
                fsync_file(aside)
            else:
                file.rename(aside)
            what = f"line {bad[0].number} is no row with a step" if bad else "is no file"
            print(f"warning: {file}: {what}; set aside as {aside.name}, {len(sound)} rows are kept", file=sys.stderr)
    return sound
