"""A run's folder: made, locked by one trainer at a time, unlocked by its main process; and its records: rows of
metrics.jsonl, samples, status and configuration."""

import errno
import fcntl
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.run_files import (
    CONFIG,
    HASH,
    METRICS,
    SAMPLES,
    STATUS,
    chain_of,
    head,
    is_locked,
    read_events,
    split_chain,
)
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.distributed.ranks import on_every_rank, on_main, runs_on_main
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.files import check_can_make, fsync_path, make_folder, size_of, write_atomically, writing
from gpt2_ddp.state import FIRST_CHAIN, LogEnd, Progress, next_chain

LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EAGAIN)  # the folder is gone, or another trainer has the lock

Row = dict[str, Any]


class RunFolder:
    """`output_dir/run_name`, on every rank; the main process locks it. Without `lock`, it only checks the folder:
    creates, locks and repairs nothing. Raises: UserError, on every rank, for an unusable folder."""

    def __init__(self, config: RunConfig, lock: bool = True):
        self.path, self.wants_lock = Path(config.output_dir) / config.run_name, lock
        self.checkpoints = self.path / "checkpoints"
        self._is_new = not os.path.exists(self.path)  # also for a name that is too long
        self._lock: int | None = None
        self._is_lost = False
        self._open(config)

    @runs_on_main
    def _open(self, config: RunConfig) -> None:
        try:
            if self.wants_lock:
                make_folder(self.checkpoints)
                self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
            else:
                check_can_make(self.checkpoints)
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
            self._check_content(config)
        except UserError:
            self._unlock()
            raise

    def _check_content(self, config: RunConfig) -> None:
        kept = any(self.checkpoints.glob("step-*")) or any(self.checkpoints.glob(".step-*"))
        if not kept and any(event["event"] == "checkpoint" for event in read_events(self.path / METRICS)[0]):
            lost = f"{self.path} has lost its checkpoints, and a new start would erase its {METRICS}"
            hint = f"{lost}; restore them, choose another run_name, or remove the folder"
            raise UserError("run_name", config.run_name, hint)

    def has_lock(self) -> bool:
        """Whether this process has the lock of the folder at the path. Somebody may have replaced the folder; a network
        disk may have given the lock to another machine. True without a lock, as on other ranks. For any thread."""
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

    def check_is_shared(self, is_needed: bool = True) -> None:
        """Compares this machine's folder with rank 0's, if the rank needs the same one: an elastic launcher may move
        rank 0, and ranks that share a model write parts. Collective. Raises: UserError, on every rank."""
        lock = self.path / ".lock"
        there = on_main(lambda: lock.stat().st_ino)

        def compare() -> None:
            if is_needed and (not lock.exists() or lock.stat().st_ino != there):
                hint = f"is another folder on {socket.gethostname()} than on rank 0's machine; use a shared disk"
                raise UserError("output_dir", self.path.parent, hint)

        on_every_rank(compare)

    def release(self) -> None:
        """Unlocks the folder. A new folder that is still empty is removed."""
        if self._is_new and self._lock is not None and self.has_lock():
            with suppress(OSError):  # not empty
                self.checkpoints.rmdir()
                for file in self.path.glob(".*"):  # locks
                    file.unlink()
                self.path.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class RunLog:
    """The records of a run, on every rank; the main process writes them. `more`: keys for status.json while it runs.
    `chain`: of the last row."""

    def __init__(self, folder: RunFolder, more: Callable[[], Row] = dict):
        self.path, self.is_main, self._folder = folder.path, is_main_process(), folder
        self._more = more
        self.is_gone = False  # by the last heartbeat
        self._state, self._writing, self._appending = "", threading.RLock(), threading.Lock()
        self.chain, self._samples = FIRST_CHAIN, hashlib.sha256()  # of the rows, and of samples.jsonl
        self._sizes: dict[str, int] = {}  # bytes of both files after this process's last change
        self._lost = ""  # that of them which another program has changed

    @runs_on_main
    def write_config(self, config: RunConfig) -> None:
        """Records the resolved configuration; `--config` accepts the file. Collective."""
        write_atomically(self.path / CONFIG, dump(config))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Records running (with the process's identity), completed, stopped, diverged or failed."""
        if not self.is_main:
            return
        with self._writing:
            (self._folder.check_lock if state == "failed" else self.check)()
            self._state = state
            process = {**this_process()._asdict(), "heartbeat": time.time()} if state == "running" else {}
            self._put_status({"state": state, "step": step, "reason": reason, **process})

    def write_heartbeat(self, status: Row) -> None:
        """Records the watchdog's `status` of a running run, and whether its files are gone. For any thread."""
        has_lock = self._folder.has_lock()
        with self._writing, suppress(UserError):  # the disk may be full for a while
            if has_lock and self._state == "running":
                status = {"state": "running", "step": 0, "reason": "", **status, **self._more()}
                self._put_status(status, durable=False)
        self.is_gone = not has_lock or bool(self._lost)

    def check(self) -> None:
        """Raises: UserError if this process has lost the folder, or if another program has changed its rows."""
        self._folder.check_lock()
        if self._lost:
            hint = "was removed or changed by another program, and this run writes no row to it; run the command again"
            raise UserError("file", self.path / self._lost, hint)

    def write_failure(self, step: int, reason: str) -> None:
        """Records that the run failed, unless its end is recorded already. For any thread."""
        with self._writing, suppress(UserError):  # the reason is printed as well
            if self._state in ("", "running"):
                self.write_status("failed", step, reason)

    def _put_status(self, status: Row, durable: bool = True) -> None:
        file, content = self.path / STATUS, json.dumps(status) + "\n"
        if not file.is_file() or file.read_text(errors="replace") != content:
            write_atomically(file, content, durable)

    def append(self, row: Row, name: str = METRICS) -> None:
        """Appends a row to metrics.jsonl, with its chain, or to samples.jsonl. For any thread. Does nothing if the
        folder is lost, or if the file has not the size that it should: at the next heartbeat, all ranks stop."""
        if self._lost or not (self.is_main and self._folder.has_lock()):
            return
        file = self.path / name
        with self._appending, writing(file):
            if (size := size_of(file)) != self._sizes.get(name, size):
                self._lost = name
                return
            try:
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(self._chained(row) if name == METRICS else json.dumps(row) + "\n")
            finally:  # a full disk may have taken a part
                self._sizes[name] = size_of(file)

    def append_sample(self, row: Row, event: Row) -> None:
        """Appends a row to samples.jsonl. Before, appends `event` to metrics.jsonl, with the SHA-256 of that file."""
        after = self._samples.copy()
        after.update(f"{json.dumps(row)}\n".encode())
        self.append({**event, HASH: after.hexdigest()})
        self.append(row, SAMPLES)
        self._samples = after

    def append_rollback(self, event: Row) -> None:
        """Appends a rollback to metrics.jsonl and, if there are samples, to samples.jsonl."""
        if (self.path / SAMPLES).exists():
            self.append_sample(event, event)
        else:
            self.append(event)

    def _chained(self, row: Row) -> str:
        text = json.dumps(row)
        self.chain = next_chain(self.chain, text)
        return f'{text[:-1]}, "chain": "{self.chain}"}}\n'

    def end(self) -> LogEnd:
        """The end of the rows and samples so far, for a checkpoint."""
        with self._appending:
            rows, samples = (self._sizes.get(name) or size_of(self.path / name) for name in (METRICS, SAMPLES))
            sha256 = self._samples.hexdigest()
            return LogEnd(chain=self.chain, bytes=rows, samples_bytes=samples, samples_sha256=sha256)

    def sync(self) -> None:
        """Waits until all rows are on disk. For any thread."""
        for file in (self.path / SAMPLES, self.path / METRICS):
            if file.is_file():  # a checkpoint has the chain of the last row, and a row the hash of all samples
                with writing(file):
                    fsync_path(file)

    @runs_on_main
    def resume(self, end: LogEnd, progress: Progress, start: Row | None = None) -> None:
        """Drops the rows and samples after a checkpoint that has `end` and `progress`, and adds the row `start`, with
        the SHA-256 of the samples. In the same write: a kill leaves the old rows or these. A damaged file is copied
        aside, with a warning. Collective. Raises: UserError, on every rank."""
        self._folder.check_lock()
        file, samples = self.path / METRICS, self.path / SAMPLES
        is_same = _hash(samples, end.samples_bytes).hexdigest() == end.samples_sha256
        problem = "" if is_same else "the checkpoint has another SHA-256 of it"
        if end.samples_bytes or os.path.lexists(samples):  # also a link that leads nowhere, which appends would follow
            write_atomically(samples, _kept(samples, end.samples_bytes, progress, problem))
        self._samples = _hash(samples, size_of(samples))
        is_whole = chain_of(file, end.bytes) == end.chain
        gap = "" if is_whole else "a row before the checkpoint is missing or changed"

        def kept_rows() -> Iterator[bytes]:
            line = b""
            for line in _kept(file, end.bytes, progress, gap):
                yield line
            self.chain = split_chain(line.decode(errors="replace").rstrip("\n"))[1] or FIRST_CHAIN
            if start:
                yield self._chained({**start, HASH: self._samples.hexdigest()}).encode()

        write_atomically(file, kept_rows())
        self._sizes = {name: size_of(self.path / name) for name in (METRICS, SAMPLES)}

    def outcome(self) -> str | None:
        """How the run ended, by its last event; None if it has not."""
        events, _ = read_events(self.path / METRICS)
        return events[-1].get("outcome") if events else None


def _hash(file: Path, size: int) -> Any:
    """SHA-256 of a file's first `size` bytes, to which more can be added; of nothing, if the file is missing."""
    sha256 = hashlib.sha256()
    for line in head(file, size):
        sha256.update(line)
    return sha256


def _kept(file: Path, size: int, progress: Progress, problem: str) -> Iterator[bytes]:
    """The lines of a file's first `size` bytes; if it has a problem, those that are left of it, a copy being aside."""
    if os.path.lexists(file) and not file.is_file():
        problem = "is not a file"
    if not problem:
        yield from head(file, size)
        return
    from gpt2_ddp.checkpoint.intact import repaired

    # a pending row follows the checkpoint
    yield from repaired(file, problem, progress.step - bool(progress.pending.row))
