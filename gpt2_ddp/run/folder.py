"""A run's folder: its lock, configuration, status and metrics."""

import fcntl
import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import RunConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import free_name, fsync_file, write_atomically, writing
from gpt2_ddp.processes.identity import this_process
from gpt2_ddp.run.checkpoint import CheckpointFolder
from gpt2_ddp.run.snapshot import Snapshot

METRICS, SAMPLES, STATUS, CONFIG = "metrics.jsonl", "samples.jsonl", "status.json", "config.yaml"
SAVED = ".saved"
"""There once a checkpoint was: without any, the run is not at its beginning, but has lost them."""


class RunFolder:
    """`output_dir/run_name`, held by one trainer at a time; on the main process only.

    Raises:
        UserError: the folder cannot be written, another trainer holds it, `--fresh` finds it in use, or its checkpoints
            are gone.
    """

    def __init__(self, config: RunConfig):
        self.path = Path(config.output_dir) / config.run_name
        self.checkpoints = CheckpointFolder(self.path / "checkpoints", config.checkpoint.keep_last)
        self._is_new = not os.path.exists(self.path)  # also where its name is too long for one
        self._state, self._writing = "", threading.Lock()
        try:
            self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            cure = f"cannot be written ({error.strerror}); choose another output_dir"
            raise UserError("output_dir", self.path, cure) from error
        try:
            # of the process alone: the kernel lets go of it however we die, and forked loader workers never had it
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._lock).st_nlink:
                raise BlockingIOError  # its holder gave the folder up at this moment, and removed it
        except OSError as error:
            os.close(self._lock)
            cure = "another trainer is running in this folder; stop it or choose another run_name"
            raise UserError("run_name", config.run_name, cure) from error
        try:
            self._check_content(config)
        except UserError:
            os.close(self._lock)
            raise

    def _check_content(self, config: RunConfig) -> None:
        self.checkpoints.recover()
        begun = (self.path / METRICS).exists()
        if config.fresh and (any(self.checkpoints.folder.iterdir()) or begun):
            cure = f"{self.path} already holds a run, and nothing is overwritten; remove it or choose another run_name"
            raise UserError("fresh", "true", cure)
        if begun and self._was_saved() and not any(self.checkpoints.folder.glob("step-*")):
            cure = (
                f"the checkpoints in {self.path} are gone, and starting over would erase its {METRICS}; put them back"
            )
            raise UserError("run_name", config.run_name, f"{cure}, or choose another run_name, or remove the folder")

    def _was_saved(self) -> bool:
        """Whether the run once had a checkpoint. The first releases left no mark, but who ended a run had saved it."""
        if (self.path / SAVED).exists():
            return True
        with suppress(OSError, ValueError, KeyError, TypeError):
            return json.loads((self.path / STATUS).read_bytes())["state"] in ("completed", "stopped")
        return False

    def release(self) -> None:
        """Lets other trainers in. A folder that is new and never came to hold anything is removed."""
        if self._is_new:
            with suppress(OSError):  # not empty
                self.checkpoints.folder.rmdir()
                if [file.name for file in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
        os.close(self._lock)

    def write_config(self, config: RunConfig) -> None:
        """Records the resolved configuration; `--config` takes it back."""
        write_atomically(self.path / CONFIG, dump(config))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Records running, completed, stopped or failed, unless it stands there already; of a running one, by whom."""
        with self._writing:
            self._state = state
            process = {**this_process()._asdict(), "heartbeat": time.time()} if state == "running" else {}
            content = json.dumps({"state": state, "step": step, "reason": reason, **process}) + "\n"
            file = self.path / STATUS
            if not file.is_file() or file.read_text(errors="replace") != content:
                write_atomically(file, content)

    def write_heartbeat(self, facts: dict[str, Any]) -> None:
        """Records that a running run runs, and where it is (`Watch.facts`); for another thread than the trainer's."""
        with self._writing, suppress(UserError):  # a disk that is full for a while is no reason to say no more
            if self._state == "running":
                content = json.dumps({"state": "running", "step": 0, "reason": "", **facts}) + "\n"
                write_atomically(self.path / STATUS, content, durable=False)

    def write_failure(self, step: int, reason: str) -> None:
        """Records, from another thread than the trainer's, that the run failed, if it has not ended before."""
        if self._state in ("", "running"):
            with suppress(UserError):  # what is to be told is the reason, which is printed as well
                self.write_status("failed", step, reason)

    def save(self, snapshot: Snapshot, good: int | None = None) -> None:
        """Saves a checkpoint (`CheckpointFolder.save`), and marks a run that has its first one."""
        self.checkpoints.save(snapshot, good)
        if not (self.path / SAVED).exists():
            write_atomically(self.path / SAVED, "")

    def cut_metrics(self, step: int, rollbacks: int = 0) -> None:
        """Drops the rows after `step`, which will be trained again, and a last line that a crash left torn.

        Args:
            rollbacks: how many the run has behind it at that step; rows before the last of them are kept.
        """
        for file in (self.path / METRICS, self.path / SAMPLES):
            if file.exists():
                lines = [(line.text, line.row) for line in _sound_lines(file) if line.row]
                ahead, kept = min(rollbacks, sum(is_rollback(row) for _, row in lines)), []
                for text, row in lines:
                    if ahead or (row["step"] <= step and not is_rollback(row)):
                        kept.append(text + "\n")
                    ahead -= bool(ahead) and is_rollback(row)
                write_atomically(file, "".join(kept))

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row to the file `name`, METRICS or SAMPLES."""
        with writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def is_rollback(row: dict[str, Any]) -> bool:
    """Whether a row of a .jsonl file says that the run went back to the step that it names; rows that follow begin
    behind that step again."""
    return row.get("event") == "rollback"


def standing(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that still hold: without those that a rollback has undone, and without the rollbacks."""
    found: list[dict[str, Any]] = []
    for row in rows:
        if is_rollback(row):
            found = [kept for kept in found if kept["step"] <= row["step"]]
        else:
            found.append(row)
    return found


def is_held(folder: Path) -> bool:
    """Whether a trainer holds the run folder. Not for the trainer itself, which would let go of it thereby."""
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
    found = [Line(number, *_parse(line), torn=False) for number, line in enumerate(lines, 1)]
    return [*found, Line(len(found) + 1, *_parse(rest), torn=True)] if rest else found


def _parse(line: bytes) -> tuple[str, dict[str, Any] | None]:
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


def _sound_lines(file: Path) -> list[Line]:
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
