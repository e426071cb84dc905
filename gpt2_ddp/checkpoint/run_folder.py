"""A run's folder on its main process: lock, configuration, status and rows."""

import fcntl
import hashlib
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import checkpoint_ref, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.checkpointer import Checkpointer
from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    FIRST_CHAIN,
    METRICS,
    SAMPLES,
    STATUS,
    is_locked,
    next_chain,
    read_lines,
    sound_lines,
    split_chain,
    until,
)
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make, write_atomically, writing


class RunFolder:
    """`output_dir/run_name`, locked by one trainer at a time; `chain` is the hash of all rows of metrics.jsonl.

    Without `lock`, only checks the folder: creates, locks and repairs nothing. Raises UserError: the folder cannot be
    written, another trainer has locked it, `--fresh` finds a run in it, or its checkpoints are gone.
    """

    _lock: int | None = None

    def __init__(self, config: RunConfig, lock: bool = True):
        self.path = Path(config.output_dir) / config.run_name
        record = lambda event: self.append(METRICS, event)  # noqa: E731
        self.checkpoints = Checkpointer(self.path / "checkpoints", config.checkpoint.keep_last, lock, record)
        self._is_new = not os.path.exists(self.path)  # also for a name that is too long
        self._state, self._writing, self._appending, self.chain = "", threading.Lock(), threading.Lock(), FIRST_CHAIN
        try:
            if lock:
                self.checkpoints.folder.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            else:
                check_can_make(self.checkpoints.folder)
        except OSError as error:
            hint = f"cannot be written ({error.strerror}); choose another output_dir"
            raise UserError("output_dir", self.path, hint) from error
        try:
            # a lock of the process: the kernel releases it however the process ends, and forks do not inherit it
            if self._lock is not None:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(self._lock).st_nlink if self._lock is not None else is_locked(self.path):
                raise BlockingIOError  # another trainer has it; or its owner just removed the folder
        except OSError as error:
            self._unlock()
            hint = "another trainer is running in this folder; stop it or choose another run_name"
            raise UserError("run_name", config.run_name, hint) from error
        try:
            if lock:
                self.checkpoints.recover()
            self._check_content(config)
        except UserError:
            self._unlock()
            raise

    def _check_content(self, config: RunConfig) -> None:
        begun = (self.path / METRICS).exists()
        if config.fresh and (any(self.checkpoints.folder.glob("*")) or begun):
            hint = f"{self.path} already holds a run, and nothing is overwritten; remove it or choose another run_name"
            raise UserError("fresh", "true", hint)
        rows = [] if any(self.checkpoints.folder.glob("step-*")) else read_lines(self.path / METRICS)
        if any((line.row or {}).get("event") == "checkpoint" for line in rows):
            lost = f"{self.path} has lost its checkpoints, and a new start would erase its {METRICS}"
            hint = f"{lost}; restore them, choose another run_name, or remove the folder"
            raise UserError("run_name", config.run_name, hint)

    def release(self) -> None:
        """Unlocks the folder. A new folder that is still empty is removed."""
        if self._is_new and self._lock is not None:
            with suppress(OSError):  # not empty
                self.checkpoints.folder.rmdir()
                if [file.name for file in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_config(self, config: RunConfig) -> None:
        """Records the resolved configuration; `--config` accepts the file."""
        write_atomically(self.path / CONFIG, dump(config))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Records running (with the process's identity), completed, stopped, diverged or failed."""
        with self._writing:
            self._state = state
            process = {**this_process()._asdict(), "heartbeat": time.time()} if state == "running" else {}
            content = json.dumps({"state": state, "step": step, "reason": reason, **process}) + "\n"
            file = self.path / STATUS
            if not file.is_file() or file.read_text(errors="replace") != content:
                write_atomically(file, content)

    def write_heartbeat(self, status: dict[str, Any]) -> None:
        """Records stage and step of a running run (`Watchdog.status`). For any thread."""
        with self._writing, suppress(UserError):  # the disk may be full for a while
            if self._state == "running":
                content = json.dumps({"state": "running", "step": 0, "reason": "", **status}) + "\n"
                write_atomically(self.path / STATUS, content, durable=False)

    def write_failure(self, step: int, reason: str) -> None:
        """Records that the run failed, unless its end is recorded already. For any thread."""
        if self._state in ("", "running"):
            with suppress(UserError):  # the reason is printed as well
                self.write_status("failed", step, reason)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a row to the file `name`: METRICS, which adds its `chain`, or SAMPLES. For any thread."""
        with self._appending, writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(self._chained(row) if name == METRICS else json.dumps(row) + "\n")

    def append_sample(self, row: dict[str, Any], event: dict[str, Any]) -> None:
        """Appends a row to samples.jsonl. Before, appends `event` to metrics.jsonl, with the SHA-256 of that file."""
        file = self.path / SAMPLES
        content = (file.read_bytes() if file.exists() else b"") + f"{json.dumps(row)}\n".encode()
        self.append(METRICS, {**event, "samples_sha256": hashlib.sha256(content).hexdigest()})
        self.append(SAMPLES, row)

    def _chained(self, row: dict[str, Any]) -> str:
        text = json.dumps(row)
        self.chain = next_chain(self.chain, text)
        return f'{text[:-1]}, "chain": "{self.chain}"}}\n'

    def cut_rows(
        self,
        step: int,
        rollbacks: int = 0,
        chain: str | None = None,
        sample_pending: bool = False,
        start: dict[str, Any] | None = None,
        row_pending: bool = False,
    ) -> None:
        """Drops the rows and samples after a checkpoint, and a torn last line.

        Args:
            step: of the checkpoint. rollbacks: how many there were until then.
            chain: of the last row then; None: no row is kept.
            sample_pending, row_pending: whether the step's sample and row follow the checkpoint; the latter matters if
                the row of `chain` is damaged.
            start: row to add in the same write, with the SHA-256 of samples.jsonl: a kill leaves either the old rows or
                this one.
        """
        content = ""
        for file, pending in ((self.path / SAMPLES, sample_pending), (self.path / METRICS, row_pending)):
            lines = sound_lines(file) if file.exists() else []
            last = [number for number, line in enumerate(lines, 1) if line.text.endswith(f', "chain": "{chain}"}}')]
            kept = lines[: last[0]] if last else until(lines, step - pending if chain else -1, rollbacks)
            samples = hashlib.sha256(content.encode()).hexdigest()
            content = "".join(line.text + "\n" for line in kept)
            if file.name == METRICS:
                if chain and lines and not last:
                    what = f"the last row before the checkpoint of step {step} is missing or changed"
                    print(f"warning: {file}: {what}; rows up to that step are kept", file=sys.stderr)
                self.chain = (split_chain(kept[-1].text)[1] if kept else None) or FIRST_CHAIN
                content += self._chained({**start, "samples_sha256": samples}) if start else ""
            if content or os.path.lexists(file):  # also a link that leads nowhere, which appends would follow
                write_atomically(file, content)

    def record_start(
        self, facts: dict[str, Any], rollbacks: int, chain: str | None, sample_pending: bool, row_pending: bool
    ) -> None:
        """Cuts the rows (`cut_rows`) and adds a start row: `facts`, with the step, and the existing checkpoints."""
        there = list_checkpoints(self.checkpoints.folder)
        newest = checkpoint_ref(there[-1]) if there else None
        start = {"event": "start", **facts, "checkpoint": newest, "kept": steps_of(there)}
        self.cut_rows(facts["step"], rollbacks, chain, sample_pending, start, row_pending)

    def record_end(self, outcome: str, step: int, reason: str = "") -> None:
        """Records how training ended, in a row and in the status."""
        kept = steps_of(list_checkpoints(self.checkpoints.folder))
        self.append(METRICS, {"event": "end", "step": step, "outcome": outcome, "kept": kept})
        self.write_status(outcome, step, reason)

    def record_completed(self, step: int, rollbacks: int, chain: str | None, reason: str) -> None:
        """Prunes the checkpoints and records the end of a complete run, if its last process did not."""
        lines = read_lines(self.path / METRICS)
        if not lines or lines[-1].torn or (lines[-1].row or {}).get("outcome") != "completed":
            self.cut_rows(step, rollbacks, chain)
            self.checkpoints.prune(step)
            there = list_checkpoints(self.checkpoints.folder)
            self.append(METRICS, {"event": "checkpoint", **checkpoint_ref(there[-1]), "kept": steps_of(there)})
            self.record_end("completed", step, reason)
        self.write_status("completed", step, reason)
