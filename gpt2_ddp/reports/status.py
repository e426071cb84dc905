"""The state of runs: running, stalled, dead, or their outcome."""

import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.checkpoint.run_files import STATUS, is_locked
from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed.process import Process
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_json

SILENT = 90.0
"""Seconds without a heartbeat after which a run on another machine counts as dead; heartbeats come every 5 s."""

LATEST = 2**40
"""Limit of steps and of times, in seconds; the year 36,812."""
LINE = 1000  # most characters of a run's line


class Health(NamedTuple):
    """State of a run, by its status.json."""

    state: str  # starting, running, stalled, dead, unknown; or the outcome
    step: int
    age: float  # seconds since its last progress, or since it ended
    detail: str  # stage and process, or reason of the end


def show_status(config: StatusConfig) -> int:
    """The command: prints a line for each run among the folders. Raises: UserError if none is a run."""
    folders = [Path(run) for run in config.runs] or sorted(Path("runs").glob("*"))
    runs = [folder for folder in folders if (folder / STATUS).is_file()]
    if not runs:
        raise no_run(folders[0] if folders else Path("runs"), STATUS)
    width = max(len(str(folder)) for folder in runs)
    for folder in runs:
        found = health(folder)
        age = timedelta(seconds=round(found.age))
        line = f"{folder!s:{width}}  {found.state:9}  step {found.step:>7}  {age!s:>8} ago  {found.detail}"
        print(truncate(line.rstrip(), LINE))
    return 0


def no_run(folder: Path, file: str) -> UserError:
    """The error for a folder that lacks the `file` of all runs."""
    return UserError("runs", folder, f"is no run folder, as it has no {file}; name one, like runs/stdlib")


def health(folder: Path, now: float | None = None) -> Health:
    """The state of the run in a folder with a status.json, at `now`, in seconds since 1970. For other processes: in the
    trainer, this would unlock the folder."""
    now = time.time() if now is None else now
    written = (folder / STATUS).stat().st_mtime
    try:
        status = read_json(folder / STATUS)
        state, step, reason = str(status["state"]), int(status.get("step", 0)), str(status.get("reason", ""))
        beat, progress = float(status.get("heartbeat", written)), float(status.get("progress", written))
        limit, at = float(status.get("limit", 0)), f"at {status.get('stage', 'its beginning')}"
        facts = {name: kind(status[name]) for name, kind in Process.__annotations__.items() if state == "running"}
        if not all(abs(number) < LATEST for number in (step, beat, progress, limit)):  # false for NaN
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return Health("unknown", 0, now - written, f"{STATUS} is damaged")
    if not facts:
        words = f"a trainer is starting; the run was {state}" if is_locked(folder) else reason.partition("\n")[0]
        return Health("starting" if is_locked(folder) else state, step, now - written, words)
    who = Process(**facts)
    place, silence = f"pid {who.pid} on {who.host}", f"no heartbeat for {now - beat:.0f} s"
    if who.is_gone:
        return Health("dead", step, now - progress, f"{place} is gone, last seen {at}")
    if not who.is_here and now - beat > SILENT:
        return Health("dead", step, now - progress, f"{place}: {silence}, last seen {at}")
    if now - progress > max(limit, SILENT) or now - beat > SILENT:
        what = silence if now - beat > SILENT else f"no progress for {now - progress:.0f} s"
        return Health("stalled", step, now - progress, f"{place}: {what}, {at}")
    return Health("running", step, now - progress, f"{at}, {place}")
