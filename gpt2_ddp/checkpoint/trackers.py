"""Trackers (tensorboard, wandb, trackio): each receives every row of metrics.jsonl once, over kills and resumes.

After a kill, a tracker may have rows after the newest checkpoint, or lack rows before it, since some write late. Each
reports its last step when it starts (`held`), and receives only later rows of metrics.jsonl. tensorboard can delete
rows after a rollback; wandb and trackio keep the first row of a step (docs/tracking.md).
"""

import os
import shutil
from collections.abc import Callable
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import Any, TypeVar

from gpt2_ddp.checkpoint.run_files import METRICS, read_lines, valid_rows
from gpt2_ddp.config.base import flat
from gpt2_ddp.config.run import RunConfig

T = TypeVar("T")
Attempt = Callable[[str, Callable[[], T]], T | None]
"""(name, function) -> the function's result, or None after an exception."""
EVENTS = "events.out.tfevents.*"


class Tracker:
    """One tracker's run; on the main process."""

    held: int  # step of its last row; -1 for none
    _run: Any  # of wandb or trackio, which share this interface

    def log(self, numbers: dict[str, Any], step: int) -> None:
        self._run.log(numbers, step=step)

    def go_back(self, step: int) -> None:
        """Deletes the rows after this step, if the tracker can."""

    def finish(self) -> None:
        """Writes buffered rows and ends."""
        self._run.finish()


class Trackers:
    """The trackers of `tracking.log_with`. A failing one causes a warning; the others continue. Each is started, and
    sent the rows of metrics.jsonl that it lacks. The same `run_id` resumes the same run there."""

    def __init__(self, attempt: Attempt, config: RunConfig, run_id: str, folder: Path):
        self._attempt = attempt
        self._running: dict[str, Tracker] = {}
        rows = valid_rows(line.row for line in read_lines(folder / METRICS) if line.row)
        last = rows[-1]["step"] if rows else -1
        for name in config.tracking.log_with:
            tracker = self._attempt(f"{name} tracker", lambda name=name: KINDS[name](config, run_id, folder, last))
            if tracker:
                self._running[name] = tracker
        for row in rows:
            self.log(row)

    def log(self, row: dict[str, Any]) -> None:
        """Sends the numbers of a row to each tracker without its step."""
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "step"}
        for name, tracker in self._running.items():
            if row["step"] > tracker.held:
                tracker.held = row["step"]
                self._attempt(f"{name} tracker", lambda tracker=tracker: tracker.log(numbers, row["step"]))

    def go_back(self, step: int) -> None:
        """Deletes the rows after this step from the trackers that can."""
        for name, tracker in self._running.items():
            self._attempt(f"{name} tracker", lambda tracker=tracker: tracker.go_back(step))

    def finish(self) -> None:
        """Ends the trackers."""
        for name, tracker in self._running.items():
            self._attempt(f"{name} tracker", tracker.finish)
        self._running = {}


class TensorBoard(Tracker):
    """Event files in the run folder; rows after a checkpoint are cut, as in metrics.jsonl."""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, last: int):
        from torch.utils.tensorboard.summary import hparams

        self._folder, self._writer = folder / config.tracking.project, None
        self.go_back(last if any(self._folder.glob(EVENTS)) else -1)
        if self.held == -1:
            for summary in hparams(_settings(config), {}):
                self._writer._get_file_writer().add_summary(summary)

    def log(self, numbers: dict[str, Any], step: int) -> None:
        """Writes a scalar for each number, and flushes."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def go_back(self, step: int) -> None:
        """Cuts the files after `step`, and begins a new one."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from torch.utils.tensorboard.writer import SummaryWriter

        self.finish()
        for file in self._folder.glob(EVENTS):
            _cut_events(file, step)
        self._writer: Any = SummaryWriter(str(self._folder))
        # for a tensorboard that has read what was cut off
        mark = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
        self._writer._get_file_writer().add_event(mark)
        self.held = step

    def finish(self) -> None:
        if self._writer:
            self._writer.close()


def _cut_events(file: Path, step: int) -> None:
    """Cuts an event file off before its first event after `step`, or where a kill tore it. An event is a TFRecord: its
    length, 4 bytes, itself, 4 bytes."""
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

    end = 0
    with file.open("rb") as stream:
        while len(head := stream.read(12)) == 12:
            length = int.from_bytes(head[:8], "little")
            event = stream.read(length + 4)
            if len(event) < length + 4 or Event.FromString(event[:-4]).step > step:
                break
            end = stream.tell()
    if end:
        os.truncate(file, end)
    else:
        file.unlink()


class WandB(Tracker):
    """A run of wandb by its id; offline, in the run folder, when nobody is logged in and WANDB_MODE does not say
    otherwise. Offline, each start writes a new file with all rows, and removes the files of earlier starts."""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, last: int):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in() else "offline")
        tracking, online = config.tracking, mode == "online"
        if mode == "offline":
            for before in folder.glob(f"wandb/offline-run-*-{run_id}"):
                shutil.rmtree(before, ignore_errors=True)
        own = {"entity": tracking.entity, "project": tracking.project, "group": tracking.group, "tags": tracking.tags}
        resume = "allow" if online else None  # offline it would be ignored, with a warning
        self._run = wandb.init(**own, name=config.run_name, id=run_id, resume=resume, mode=mode, dir=str(folder))
        self.held = self._run.starting_step - 1
        self._run.config.update(_settings(config), allow_val_change=True)


class Trackio(Tracker):
    """A run of trackio, which finds its runs by their names: so the id is part of it."""

    def __init__(self, config: RunConfig, run_id: str, folder: Path, last: int):
        import trackio

        name, tracking = f"{config.run_name}-{run_id}", config.tracking
        settings = {"name": name, "group": tracking.group, "resume": "allow", "config": _settings(config)}
        self._run = trackio.init(tracking.project, **settings)
        self.held = self._run._next_step - 1  # of a Space, too, where no file here would say


Start = Callable[[RunConfig, str, Path, int], Tracker]
"""(configuration, the run's id, its folder, the last step of metrics.jsonl) -> a tracker's run."""
KINDS: dict[str, Start] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def _settings(config: RunConfig) -> dict[str, int | float | bool | str]:
    """The sections' fields with dotted names; what is no single value as text."""
    found = {name: value for name, value in flat(config.model_dump(mode="json")).items() if "." in name}
    return {name: value if isinstance(value, int | float | str) else str(value) for name, value in found.items()}


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc().authenticators("api.wandb.ai") is not None
    except (OSError, NetrcParseError):
        return False
