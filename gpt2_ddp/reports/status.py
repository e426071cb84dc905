"""The state of runs: running, stalled, dead, or their outcome."""

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, get_type_hints

from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed.process import Process
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import no_such_folder, read_json, url_of_copy
from gpt2_ddp.records.rows import (
    FIELDS,
    METRICS,
    STATUS,
    Row,
    is_event,
    is_locked,
    parse_lines,
    read_events,
    time_left,
)

SILENT = 90.0
"""Seconds without a heartbeat after which a run on another machine counts as dead; heartbeats come
every 5 s."""

LATEST = 2**40
"""Limit of steps and of times, in seconds; the year 36,812."""
LINE = 1000  # most characters of a run's line
TAIL = 2**18  # bytes at the end of the rows that are searched for the newest one of a step
RESUMABLE = ("dead", "stopped", "failed")


class Health(NamedTuple):
    """State of a run, by its status.json."""

    state: str  # starting, running, stalled, dead, unknown; or the outcome
    step: int
    age: float  # seconds since its last progress, or since it ended
    detail: str  # stage and process, or reason of the end


def show_status(config: StatusConfig) -> int:
    """The command: prints a line for each run among the folders. Raises: UserError if none
    is a run."""
    folders = [Path(run) for run in config.runs] or sorted(Path("runs").glob("*"))
    runs = [folder for folder in folders if (folder / STATUS).is_file()]
    if not runs:
        folder = folders[0] if folders else Path("runs")
        hint = f"is no run folder, as it has no {STATUS}; name one, like runs/stdlib"
        raise UserError("runs", url_of_copy(folder), no_such_folder(folder) or hint)
    names = [url_of_copy(folder) for folder in runs]
    width = max(map(len, names))
    for name, folder in zip(names, runs, strict=True):
        print(truncate(f"{name:{width}}  {describe(folder)}".rstrip(), LINE))
    return 0


def describe(folder: Path, now: float | None = None) -> str:
    """State, step and total, age, losses, time left or the checkpoint to resume from, and details
    of a run. `now`: as for `health`."""
    current = health(folder, now)
    events, _ = read_events(folder / METRICS)
    total = next((row["steps"] for row in reversed(events) if type(row.get("steps")) is int), None)
    row = _newest_row(folder / METRICS)
    step = current.step
    if current.state in ("running", "stalled", "dead"):
        step = max(step, row.get("step", 0))  # the status is some seconds old
    steps = f"{step}/{total}" if total else str(step)
    age = timedelta(seconds=round(current.age))
    parts = [f"{current.state:9}", f"step {steps:>13}", f"{age!s:>8} ago", _losses(row)]
    left = _time_left(row, total) if current.state == "running" and total else None
    if left:
        parts.append(f"{left} left")
    if current.state in RESUMABLE:
        saved = _newest_checkpoint(folder, events)
        parts.append("no checkpoint" if saved is None else f"resumes from step {saved}")
    parts.append(current.detail)
    return "  ".join(filter(None, parts))


def _newest_row(file: Path) -> Row:
    """The last whole row of a step; empty if there is none among the last TAIL bytes."""
    with suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - TAIL))
        rows = [line.row for line in parse_lines(stream) if type(line.row.get("step")) is int]
        return next((row for row in reversed(rows) if not is_event(row)), {})
    return {}


def _losses(row: Row) -> str:
    """The losses of a row, as the terminal shows them."""
    names = (name for name in ("loss_mean", "val_loss") if isinstance(row.get(name), float))
    return "  ".join(FIELDS[name].text.format(row[name]) for name in names)


def _time_left(row: Row, total: int) -> timedelta | None:
    """Time from a row to the end of the run at its speed; None if it is unknown."""
    with suppress(TypeError, KeyError, ArithmeticError, ValueError):  # rows of another program
        left = time_left(row, total)
        return None if left is None else timedelta(seconds=round(left))
    return None


def _newest_checkpoint(folder: Path, events: list[Row]) -> int | None:
    """Step of the newest checkpoint folder, or, of a copy without these, of the newest one
    in the rows."""
    manifests = folder.glob("checkpoints/step-*/manifest.json")
    numbers = [manifest.parent.name.removeprefix("step-") for manifest in manifests]
    steps = [int(number) for number in numbers if number.isdecimal()]
    if not (folder / "checkpoints").is_dir():
        steps = [row["step"] for row in events if row["event"] == "checkpoint"][-1:]
    return max(steps, default=None)


def health(folder: Path, now: float | None = None) -> Health:
    """The state of the run in a folder with a status.json. For other processes: in the trainer,
    this would unlock the folder. `now`: seconds since 1970; None: the clock's."""
    now = time.time() if now is None else now
    written = min((folder / STATUS).stat().st_mtime, now)
    try:
        status = read_json(folder / STATUS)
        state = str(status["state"])
        step = int(status.get("step", 0))
        reason = str(status.get("reason", ""))
        beat = float(status.get("heartbeat", written))
        progress = float(status.get("progress", written))
        limit = float(status.get("limit", 0))
        at = f"at {status.get('stage', 'its beginning')}"
        identity = {}  # of the process
        if state == "running":
            identity = {name: kind(status[name]) for name, kind in get_type_hints(Process).items()}
        # false for NaN
        if not all(abs(number) < LATEST for number in (step, beat, progress, limit)):
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return Health("unknown", 0, now - written, f"{STATUS} is damaged")
    if not identity:
        if is_locked(folder):
            was = f"a trainer is starting; the run was {state}"
            return Health("starting", step, now - written, was)
        return Health(state, step, now - written, reason.partition("\n")[0])
    # another machine's clock may be ahead
    beat = min(beat, now)
    progress = min(progress, now)
    process = Process(**identity)
    is_silent = now - beat > SILENT
    if process.is_gone or (is_silent and not process.is_here):
        state = "dead"
    elif is_silent or now - progress > max(limit, SILENT):
        state = "stalled"
    heartbeat = f"last heartbeat {max(now - beat, 0):.0f} s ago"
    detail = f"{at}, pid {process.pid} on {process.host}, {heartbeat}"
    return Health(state, step, now - progress, detail)
