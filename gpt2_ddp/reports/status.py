"""The state of runs: running, stalled, dead, or their outcome."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.checkpoint.run_files import STATUS, is_locked
from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed.process import Process
from gpt2_ddp.errors import UserError

SILENT = 90.0
"""Seconds without a heartbeat after which a run on another machine counts as dead; heartbeats come every 5 s."""


class Health(NamedTuple):
    """State of a run, by its status.json."""

    state: str  # starting, running, stalled, dead, unknown; or the outcome
    step: int
    age: float  # seconds since its last progress, or since it ended
    detail: str  # stage and process, or reason of the end


def show_status(config: StatusConfig) -> int:
    """The command: prints a line for each run. Raises: UserError if none is a run."""
    folders = [Path(run) for run in config.runs]
    runs = [folder for folder in folders if (folder / STATUS).is_file()]
    if not runs:
        folder = folders[0]
        near = sorted(str(file.parent) for place in (folder, folder.parent) for file in place.glob(f"*/{STATUS}"))
        hint = "name a run folder" + (f", like {', '.join(near[:3])}" if near else "")
        raise UserError("runs", folder, f"has no {STATUS}; {hint}")
    width = max(len(str(folder)) for folder in folders)
    for folder in folders:
        if folder not in runs:  # `runs/*` also matches the output of compare_parallel.py
            print(f"{folder!s:{width}}  no run")
            continue
        found = health(folder)
        age = timedelta(seconds=round(found.age))
        print(f"{folder!s:{width}}  {found.state:9}  step {found.step:>7}  {age!s:>8} ago  {found.detail}".rstrip())
    return 0


def health(folder: Path, now: float | None = None) -> Health:
    """The state of the run in a folder with a status.json, at `now`, in seconds since 1970. For other processes: in the
    trainer, this would unlock the folder."""
    now = time.time() if now is None else now
    written = (folder / STATUS).stat().st_mtime
    try:
        status: dict[str, Any] = json.loads((folder / STATUS).read_text(encoding="utf-8"))
        state, step, reason = str(status["state"]), int(status.get("step", 0)), str(status.get("reason", ""))
        beat, progress = float(status.get("heartbeat", written)), float(status.get("progress", written))
        limit, at = float(status.get("limit", 0)), f"at {status.get('stage', 'its beginning')}"
        facts = {name: kind(status[name]) for name, kind in Process.__annotations__.items() if state == "running"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
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
