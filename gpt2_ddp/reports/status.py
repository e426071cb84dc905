"""The state of runs: running, stalled, dead, or their outcome."""

import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.checkpoint.run_files import STATUS, is_locked
from gpt2_ddp.config.hints import no_such_folder
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
        folder = folders[0] if folders else Path("runs")
        hint = no_such_folder(folder) or f"is no run folder, as it has no {STATUS}; name one, like runs/stdlib"
        raise UserError("runs", folder, hint)
    width = max(len(str(folder)) for folder in runs)
    for folder in runs:
        found = health(folder)
        age = timedelta(seconds=round(max(found.age, 0)))  # the clock of another machine may be ahead
        line = f"{folder!s:{width}}  {found.state:9}  step {found.step:>7}  {age!s:>8} ago  {found.detail}"
        print(truncate(line.rstrip(), LINE))
    return 0


def health(folder: Path) -> Health:
    """The state of the run in a folder with a status.json. For other processes: in the trainer, this would unlock the
    folder."""
    now = time.time()
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
    is_silent = now - beat > SILENT
    if who.is_gone or (is_silent and not who.is_here):
        state = "dead"
    elif is_silent or now - progress > max(limit, SILENT):
        state = "stalled"
    words = f"{at}, pid {who.pid} on {who.host}, last heartbeat {max(now - beat, 0):.0f} s ago"
    return Health(state, step, now - progress, words)
