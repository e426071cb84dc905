"""Trackers (Accelerate's tensorboard, wandb and trackio): each has every row of metrics.jsonl once,
also after kills.

Local files (tensorboard, wandb offline) are written again at each start, with all rows.
wandb and trackio report their last step, and receive later rows. Each keeps the first row of
a step (docs/tracking.md).
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.records.rows import METRICS, Row, read_lines, valid_rows

PROJECT = os.environ.get("WANDB_PROJECT") or "gpt2_ddp"
"""Name of the project in all trackers."""
T = TypeVar("T")


class Attempt(Protocol):
    """Calls a function. Returns its result, or None after an exception, with a warning that
    has the name."""

    def __call__(self, what: str, action: Callable[[], T], /) -> T | None: ...


class Running(NamedTuple):
    """A tracker that was started."""

    tracker: GeneralTracker
    last: int  # step of its last row; -1 for none


class Trackers:
    """The trackers of `tracking.log_with`, on the main process. A failing one causes a warning; the
    others continue. The same `run_id` resumes the same run there."""

    def __init__(self, attempt: Attempt, config: RunConfig, run_id: str, folder: Path):
        self._attempt = attempt
        self._running: dict[str, Running] = {}
        for name in config.tracking.log_with:
            start = partial(START[name], config, run_id, folder)
            running = attempt(f"{name} tracker", start)
            if running:
                self._running[name] = running
        lines = read_lines(folder / METRICS)
        for row in valid_rows(line.row for line in lines if type(line.row.get("step")) is int):
            self.log(row)

    def log(self, row: Row) -> None:
        """Sends the numbers of a row, and its chain, to each tracker without its step."""
        step = row["step"]
        values = {
            name: value
            for name, value in row.items()
            if (isinstance(value, int | float) and name != "step") or name == "chain"
        }
        for name, (tracker, last) in self._running.items():
            if step > last:
                self._running[name] = Running(tracker, step)
                self._attempt(f"{name} tracker", partial(tracker.log, values, step))

    def finish(self) -> None:
        """Writes buffered rows and ends."""
        for name, (tracker, _) in self._running.items():
            self._attempt(f"{name} tracker", tracker.finish)
        self._running = {}


def _tensorboard(config: RunConfig, run_id: str, folder: Path) -> Running:
    for before in (folder / PROJECT).glob("events.out.tfevents.*"):
        before.unlink()
    tracker = TensorBoardTracker(PROJECT, folder)
    tracker.start()
    tracker.log({"config": f"```\n{config.model_dump_json(indent=1)}\n```"}, 0)
    return Running(tracker, -1)


def _wandb(config: RunConfig, run_id: str, folder: Path) -> Running:
    """A run of wandb; offline, in the run folder, when nobody is logged in and WANDB_MODE
    is not set."""
    from requests.utils import get_netrc_auth  # noqa: PLC0415  only for wandb

    logged_in = os.environ.get("WANDB_API_KEY") or get_netrc_auth("https://api.wandb.ai")
    mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
    if mode == "offline":
        for before in folder.glob(f"wandb/offline-run-*-{run_id}"):
            shutil.rmtree(before, ignore_errors=True)
    resume = "allow" if mode == "online" else None  # offline it would be ignored, with a warning
    tracker = WandBTracker(
        PROJECT, name=config.run_name, id=run_id, resume=resume, mode=mode, dir=str(folder)
    )
    tracker.start()
    tracker.store_init_configuration(config.model_dump(mode="json"))
    return Running(tracker, tracker.run.starting_step - 1)


def _trackio(config: RunConfig, run_id: str, folder: Path) -> Running:
    """A run of trackio, which finds its runs by their names: so the id is part of it."""
    settings = {"name": f"{config.run_name}-{run_id}", "config": config.model_dump(mode="json")}
    tracker = TrackioTracker(PROJECT, resume="allow", **settings)
    tracker.start()
    # of a Space, too, where no file on this machine would say
    return Running(tracker, tracker.run._next_step - 1)


START: dict[str, Callable[[RunConfig, str, Path], Running]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "trackio": _trackio,
}
