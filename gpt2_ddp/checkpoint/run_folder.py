"""A run's folder: its lock, configuration, status and metrics."""

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import Snapshot, checkpoint_ref, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.checkpointer import CheckpointFolder
from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    FIRST_CHAIN,
    METRICS,
    SAMPLES,
    SAVED,
    STATUS,
    is_held,
    next_chain,
    parse,
    read_status,
    sound_lines,
    split_chain,
    until,
)
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make, fsync_file, write_atomically, writing
from gpt2_ddp.training.progress import Progress


class RunFolder:
    """`output_dir/run_name`, held by one trainer at a time; on the main process only.

    Args:
        hold: False only looks at it: nothing is made, locked or put right, and what would be refused is refused.

    Attributes:
        chain: the newest row's, a hash of all rows up to it.

    Raises:
        UserError: the folder cannot be written, another trainer holds it, `--fresh` finds it in use, or its checkpoints
            are gone.
    """

    _lock: int | None = None

    def __init__(self, config: RunConfig, hold: bool = True):
        self.path = Path(config.output_dir) / config.run_name
        self.checkpoints = CheckpointFolder(self.path / "checkpoints", config.checkpoint.keep_last, hold)
        self._is_new = not os.path.exists(self.path)  # also where its name is too long for one
        self._state, self._writing, self._appending, self.chain = "", threading.Lock(), threading.Lock(), FIRST_CHAIN
        try:
            if hold:
                self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            else:
                check_can_make(self.checkpoints.folder)
        except OSError as error:
            hint = f"cannot be written ({error.strerror}); choose another output_dir"
            raise UserError("output_dir", self.path, hint) from error
        try:
            # of the process alone: the kernel lets go of it however we die, and forked loader workers never had it
            if self._lock is not None:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._lock).st_nlink if self._lock is not None else is_held(self.path):
                raise BlockingIOError  # another's; or its holder gave the folder up at this moment, and removed it
        except OSError as error:
            self._let_go()
            hint = "another trainer is running in this folder; stop it or choose another run_name"
            raise UserError("run_name", config.run_name, hint) from error
        try:
            if hold:
                self.checkpoints.recover()
            self._check_content(config)
        except UserError:
            self._let_go()
            raise

    def _check_content(self, config: RunConfig) -> None:
        begun = (self.path / METRICS).exists()
        if config.fresh and (any(self.checkpoints.folder.glob("*")) or begun):
            hint = f"{self.path} already holds a run, and nothing is overwritten; remove it or choose another run_name"
            raise UserError("fresh", "true", hint)
        if begun and self._was_saved() and not any(self.checkpoints.folder.glob("step-*")):
            hint = (
                f"the checkpoints in {self.path} are gone, and starting over would erase its {METRICS}; put them back"
            )
            raise UserError("run_name", config.run_name, f"{hint}, or choose another run_name, or remove the folder")

    def _was_saved(self) -> bool:
        """Whether the run once had a checkpoint. The first releases left no mark, but who ended a run had saved it."""
        return (self.path / SAVED).exists() or read_status(self.path).get("state") in ("completed", "stopped")

    def release(self) -> None:
        """Lets other trainers in. A folder that is new and never came to hold anything is removed."""
        if self._is_new and self._lock is not None:
            with suppress(OSError):  # not empty
                self.checkpoints.folder.rmdir()
                if [file.name for file in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
        self._let_go()

    def _let_go(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
        """Records that a running run runs, and where it is (`Watch.status`); for another thread than the trainer's."""
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
        """Saves a checkpoint (`CheckpointFolder.save`), after the rows before it and recorded by one behind it; and
        marks a run that has its first one."""
        if (self.path / METRICS).is_file():
            with writing(self.path / METRICS):
                fsync_file(self.path / METRICS)
        self.checkpoints.save(snapshot, good, lambda event: self.append(METRICS, event))
        if not (self.path / SAVED).exists():
            write_atomically(self.path / SAVED, "")

    def cut_metrics(
        self,
        step: int,
        rollbacks: int = 0,
        chain: str | None = None,
        start: dict[str, Any] | None = None,
        owed: Collection[str] = (),
    ) -> None:
        """Drops the rows after `step`, which will be trained again, and a last line that a crash left torn.

        Args:
            rollbacks: how many the run has behind it at that step; rows before the last of them are kept.
            chain: of the row that was the last one then, where that was written down; nothing else need be known.
            start: row to add in the same moment: a kill leaves the last session's rows or this one's start.
            owed: whether the step's `row` or `sample` is still to come; one that is there came after the checkpoint.
        """
        for file, due in ((self.path / METRICS, "row"), (self.path / SAMPLES, "sample")):
            lines = sound_lines(file) if file.exists() else []
            last = [number for number, line in enumerate(lines, 1) if line.text.endswith(f', "chain": "{chain}"}}')]
            kept = lines[: last[0]] if last else until(lines, step - (due in owed), rollbacks)
            content = "".join(line.text + "\n" for line in kept)
            if file.name == METRICS:
                if chain and lines and not last:
                    what = f"the row that the checkpoint of step {step} follows is not there as it was written"
                    print(f"warning: {file}: {what}; rows up to that step are kept", file=sys.stderr)
                self.chain = (split_chain(kept[-1].text)[1] if kept else None) or FIRST_CHAIN
                content += self._chained(start) if start else ""
            if content or file.exists():
                write_atomically(file, content)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Adds a row to the file `name`, METRICS or SAMPLES; one of METRICS ends with its `chain`. For any thread."""
        with self._appending, writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(self._chained(row) if name == METRICS else json.dumps(row) + "\n")

    def _chained(self, row: dict[str, Any]) -> str:
        """The row's line of METRICS."""
        text = json.dumps(row)
        self.chain = next_chain(self.chain, text)
        return f'{text[:-1]}, "chain": "{self.chain}"}}\n'

    def record_start(self, run: Progress, facts: dict[str, Any]) -> None:
        """Records a start in a row of `facts`, the checkpoint that it goes on from, and those that are there; it takes
        the place of the rows that will be trained again."""
        there = list_checkpoints(self.checkpoints.folder)
        begins_at = checkpoint_ref(there[-1]) if there else None
        start = {"event": "start", "step": run.step, **facts, "checkpoint": begins_at, "kept": steps_of(there)}
        last = -1 if run.is_at_start else run.step
        self.cut_metrics(last, run.rollbacks, run.metrics_chain, start, run.pending or ())

    def record_end(self, outcome: str, step: int, reason: str = "") -> None:
        """Records how a session ended, in a row and in the status."""
        kept = steps_of(list_checkpoints(self.checkpoints.folder))
        self.append(METRICS, {"event": "end", "step": step, "outcome": outcome, "kept": kept})
        self.write_status(outcome, step, reason)

    def record_completed(self, run: Progress) -> None:
        """Records of a run that was found complete what its last session may not have come to say. Rows of older
        releases, which have no chain, stay as they are."""
        file = self.path / METRICS
        *_, last, rest = (b"\n" + (file.read_bytes() if file.is_file() else b"")).split(b"\n")
        if run.metrics_chain and (rest or (parse(last)[1] or {}).get("event") != "end"):
            self.cut_metrics(run.step, run.rollbacks, run.metrics_chain)
            there = list_checkpoints(self.checkpoints.folder)
            self.append(METRICS, {"event": "checkpoint", **checkpoint_ref(there[-1]), "kept": steps_of(there)})
            self.record_end("completed", run.step, run.early_end)
        self.write_status("completed", run.step, run.early_end)
