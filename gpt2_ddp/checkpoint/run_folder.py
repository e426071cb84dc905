"""A run's folder on its main process: lock, configuration, status and rows."""

import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import checkpoint_ref, list_checkpoints, steps_of
from gpt2_ddp.checkpoint.checkpointer import Checkpointer
from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    FIRST_CHAIN,
    HASH,
    METRICS,
    NO_SAMPLES,
    SAMPLES,
    STATUS,
    Line,
    is_locked,
    kept_lines,
    next_chain,
    read_lines,
    split_chain,
)
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make, overwrite, write_atomically, writing

LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EAGAIN)  # the folder is gone, or another trainer has the lock


class RunFolder:
    """`output_dir/run_name`, locked by one trainer at a time; `chain` is the hash of all rows of metrics.jsonl. Without
    `lock`, only checks the folder: creates, locks and repairs nothing. Raises: UserError for an unusable folder."""

    _lock: int | None = None
    _is_lost = False

    def __init__(self, config: RunConfig, lock: bool = True):
        self.path = Path(config.output_dir) / config.run_name
        check_lock, record = self.check_lock if lock else None, partial(self.append, METRICS)
        self.checkpoints = Checkpointer(self.path / "checkpoints", config.checkpoint.keep_last, check_lock, record)
        self._is_new = not os.path.exists(self.path)  # also for a name that is too long
        self._state, self._writing, self._appending, self.chain = "", threading.Lock(), threading.Lock(), FIRST_CHAIN
        self._samples = hashlib.sha256()  # of samples.jsonl
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
            if is_locked(self.path) if self._lock is None else not self.has_lock():
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

    def has_lock(self) -> bool:
        """Whether this process has the lock of the folder that is at the path now, which somebody may have replaced; a
        network disk may have given the lock to another machine. For any thread."""
        if (lock := self._lock) is not None and not self._is_lost:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_lost = not os.path.samestat(os.fstat(lock), os.lstat(self.path / ".lock"))
            except OSError as error:  # a disk that does not answer is no loss
                self._is_lost = error.errno in LOST
        return not self._is_lost

    def check_lock(self) -> None:
        """Raises: UserError if this process has lost the folder or its lock. Called before changes of files."""
        if not self.has_lock():
            hint = "was removed, renamed or replaced, or another trainer has it; this run writes nothing more there"
            raise UserError("run folder", self.path, f"the folder or its .lock {hint}")

    def release(self) -> None:
        """Unlocks the folder. A new folder that is still empty is removed."""
        if self._is_new and self._lock is not None and self.has_lock():
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
            self.check_lock()
            self._state = state
            process = {**this_process()._asdict(), "heartbeat": time.time()} if state == "running" else {}
            self._put_status({"state": state, "step": step, "reason": reason, **process})

    def write_heartbeat(self, status: dict[str, Any]) -> bool:
        """Records `Watchdog.status` of a running run. Returns whether the run has its folder. For any thread."""
        has_lock = self.has_lock()
        with self._writing, suppress(UserError):  # the disk may be full for a while
            if has_lock and self._state == "running":
                self._put_status({"state": "running", "step": 0, "reason": "", **status}, durable=False)
        return has_lock

    def _put_status(self, status: dict[str, Any], durable: bool = True) -> None:
        file, content = self.path / STATUS, json.dumps(status) + "\n"
        if not file.is_file() or file.read_text(errors="replace") != content:
            try:
                write_atomically(file, content, durable)
            except UserError as error:  # a full disk still has the blocks of the old file
                try:
                    overwrite(file, content)
                except OSError:
                    raise error from None

    def write_failure(self, step: int, reason: str) -> None:
        """Records that the run failed, unless its end is recorded already. For any thread."""
        if self._state in ("", "running"):
            with suppress(UserError):  # the reason is printed as well
                self.write_status("failed", step, reason)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Appends a row to the file `name`: METRICS, which adds its `chain`, or SAMPLES. For any thread. Does nothing
        if the folder is lost: at the next heartbeat, all ranks stop."""
        if not self.has_lock():
            return
        with self._appending, writing(self.path / name), (self.path / name).open("a", encoding="utf-8") as stream:
            stream.write(self._chained(row) if name == METRICS else json.dumps(row) + "\n")

    def append_sample(self, row: dict[str, Any], event: dict[str, Any]) -> None:
        """Appends a row to samples.jsonl. Before, appends `event` to metrics.jsonl, with the SHA-256 of that file."""
        after = self._samples.copy()
        after.update(f"{json.dumps(row)}\n".encode())
        self.append(METRICS, {**event, "samples_sha256": after.hexdigest()})
        self.append(SAMPLES, row)
        self._samples = after

    def _chained(self, row: dict[str, Any]) -> str:
        text = json.dumps(row)
        self.chain = next_chain(self.chain, text)
        return f'{text[:-1]}, "chain": "{self.chain}"}}\n'

    def cut_rows(
        self, step: int, rollbacks: int = 0, chain: str | None = None, start: dict[str, Any] | None = None
    ) -> None:
        """Drops the rows and samples after a checkpoint, and a torn last line. The samples that are left have the last
        SHA-256 that the remaining rows record. A file that was changed is copied aside, with a warning.

        Args:
            step: of the last row at the checkpoint. rollbacks: their number then.
            chain: of the last row; None: no row is kept.
            start: row to add, with the SHA-256 of samples.jsonl. In the same write: a kill leaves old rows or this one.
        """
        file = self.path / METRICS
        is_last = (lambda line: line.text.endswith(f', "chain": "{chain}"}}')) if chain else None
        missing = f"the last row before the checkpoint is missing or changed; rows up to step {step} are kept"
        kept = kept_lines(file, is_last, step, rollbacks, missing)

        def content() -> Iterator[bytes]:
            text, recorded = "", "" if chain else NO_SAMPLES
            for text, row in ((line.text, line.row or {}) for line in kept):
                recorded = row.get(HASH, recorded)
                yield f"{text}\n".encode()
            self.chain = split_chain(text)[1] or FIRST_CHAIN
            self._cut_samples(step, rollbacks, recorded)
            if start:
                yield self._chained({**start, "samples_sha256": self._samples.hexdigest()}).encode()

        write_atomically(file, content())

    def _cut_samples(self, step: int, rollbacks: int, recorded: str) -> None:
        """Drops the samples after those whose SHA-256 is `recorded`; without such ones, after `step`."""
        file, digest = self.path / SAMPLES, hashlib.sha256()

        def is_last(line: Line) -> bool:
            digest.update(f"{line.text}\n".encode())
            return digest.hexdigest() == recorded

        there = bool(recorded) or file.exists()
        missing = f"{METRICS} has another SHA-256 of it; samples up to step {step} are kept" * there
        kept = kept_lines(file, None if recorded == NO_SAMPLES else is_last, step, rollbacks, missing)
        self._samples = hashlib.sha256()

        def content() -> Iterator[bytes]:
            for line in kept:
                self._samples.update(text := f"{line.text}\n".encode())
                yield text

        if os.path.lexists(file):  # also a link that leads nowhere, which appends would follow
            write_atomically(file, content())

    def record_start(self, facts: dict[str, Any], rollbacks: int, chain: str | None, row_pending: bool = False) -> None:
        """Cuts the rows and adds a start row. `row_pending`: whether the step's row follows the checkpoint."""
        there = list_checkpoints(self.checkpoints.folder)
        newest = checkpoint_ref(there[-1]) if there else None
        start = {"event": "start", **facts, "checkpoint": newest, "kept": steps_of(there)}
        self.cut_rows(facts["step"] - row_pending, rollbacks, chain, start)

    def record_end(self, outcome: str, step: int, reason: str = "") -> None:
        """Records how training ended, in a row and in the status."""
        kept = steps_of(list_checkpoints(self.checkpoints.folder))
        self.append(METRICS, {"event": "end", "step": step, "outcome": outcome, "kept": kept})
        self.write_status(outcome, step, reason)

    def record_completed(self, step: int, rollbacks: int, chain: str | None, reason: str) -> None:
        """Prunes the checkpoints and records the end of a complete run, if its last process did not."""
        last = next(iter(deque(read_lines(self.path / METRICS), maxlen=1)), None)
        if not last or last.torn or (last.row or {}).get("outcome") != "completed":
            self.cut_rows(step, rollbacks, chain)
            self.checkpoints.prune(step)
            there = list_checkpoints(self.checkpoints.folder)
            self.append(METRICS, {"event": "checkpoint", **checkpoint_ref(there[-1]), "kept": steps_of(there)})
            self.record_end("completed", step, reason)
        self.write_status("completed", step, reason)
