"""A run's folder: made, locked by one trainer at a time, unlocked by its main process; and its
records: rows of metrics.jsonl, status and configuration.

    RunFolder.open       locks RUN/.lock
    RunLog.resume        cuts the rows back to the checkpoint, and appends `start`
    RunLog.append        one row at a time, each with the chain of all before it
    RunLog.sync          before a checkpoint gets its name: it has the chain of the last row
    RunLog.write_status  running, ... completed; `write_heartbeat` in between, by the watchdog
    RunFolder.release    unlocks

Before each change, the lock and the size of the rows are checked. Another trainer may have the
folder by then, or a person may have moved it.
"""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.distributed.ranks import on_every_rank, on_main, runs_on_main
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.files import fsync_path, make_folder, refuse_links, size_of, write_atomically, writing
from gpt2_ddp.records.rows import (
    CONFIG,
    METRICS,
    STATUS,
    Row,
    chain_of,
    head,
    is_locked,
    is_rollback,
    read_events,
    repaired,
    split_chain,
)
from gpt2_ddp.state import FIRST_CHAIN, LogEnd, Progress, next_chain

# the folder is gone, or another trainer has the lock
LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EAGAIN)


class RunFolder:
    """`output_dir/run_name`, on every rank; the main process locks it. Without `lock`, it only
    checks the folder: creates, locks and repairs nothing."""

    def __init__(self, config: RunConfig, lock: bool = True):
        self.path = Path(config.output_dir) / config.run_name
        self.wants_lock = lock
        self.checkpoints = self.path / "checkpoints"
        self._is_new = not os.path.exists(self.path)  # also for a name that is too long
        self._lock: int | None = None
        self._is_lost = False

    @runs_on_main
    def open(self) -> None:
        """Makes and locks the folder, until `release`. Raises: UserError, on every rank, for an
        unusable folder."""
        try:
            if self.wants_lock:
                # of a run of somebody else
                refuse_links(*self.path.glob("*"), *self.path.glob("checkpoints/*"))
                make_folder(self.checkpoints)
                self._lock = os.open(
                    self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644
                )
                # a lock of the process: the kernel releases it however the process ends, and forks
                # do not inherit it
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self.has_lock():
                    raise BlockingIOError  # its owner just removed the folder
            elif is_locked(self.path):
                raise BlockingIOError
        except BlockingIOError as error:
            hint = "another trainer is running in this folder; stop it or choose another run_name"
            raise UserError("run_name", self.path.name, hint) from error
        except OSError as error:
            hint = f"cannot be written ({error.strerror}); choose another output_dir"
            raise UserError("output_dir", self.path, hint) from error
        if any(self.checkpoints.glob("*step-*")):  # hidden ones, too
            return
        events, _ = read_events(self.path / METRICS)
        if any(event["event"] == "checkpoint" for event in events):
            lost = f"{self.path} has lost its checkpoints"
            effect = f"a new start would erase its {METRICS}"
            hint = "restore them, choose another run_name, or remove the folder"
            raise UserError("run_name", self.path.name, f"{lost}, and {effect}; {hint}")

    def has_lock(self) -> bool:
        """Whether this process has the lock of the folder at the path. Somebody may have replaced
        the folder; a network disk may have given the lock to another machine. True without a lock,
        as on other ranks. For any thread."""
        lock = self._lock
        if lock is not None and not self._is_lost:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._is_lost = not os.path.samestat(os.fstat(lock), os.lstat(self.path / ".lock"))
            except OSError as error:  # a disk that does not answer is no loss
                self._is_lost = error.errno in LOST
        return not self._is_lost

    def check_lock(self) -> None:
        """Raises: UserError if this process has lost the folder or its lock. Called before changes
        of files."""
        if not self.has_lock():
            lost = "was removed, renamed or replaced, or another trainer has it"
            problem = f"the folder or its .lock {lost}; this run writes nothing more there"
            raise UserError("run folder", self.path, problem)

    def check_is_shared(self, is_needed: bool = True) -> None:
        """Compares this machine's folder with rank 0's, if the rank needs the same one: an elastic
        launcher may move rank 0, and ranks that share a model write parts. Collective. Raises:
        UserError, on every rank."""
        lock = self.path / ".lock"
        inode_of_main = on_main(lambda: lock.stat().st_ino)

        def compare() -> None:
            if is_needed and (not lock.exists() or lock.stat().st_ino != inode_of_main):
                host = socket.gethostname()
                problem = f"is another folder on {host} than on rank 0's machine"
                raise UserError("output_dir", self.path.parent, f"{problem}; use a shared disk")

        on_every_rank(compare)

    def release(self) -> None:
        """Unlocks the folder. A new folder that is still empty is removed."""
        if self._lock is None:
            return
        if self._is_new and self.has_lock():
            with suppress(OSError):  # not empty
                self.checkpoints.rmdir()
                for file in self.path.glob(".*"):  # locks
                    file.unlink()
                self.path.rmdir()
        os.close(self._lock)
        self._lock = None


class RunLog:
    """The records of a run, on every rank; the main process writes them.

    Args:
        more_status: returns keys for status.json while the run runs.

    Attributes:
        chain: of the last row.
        is_gone: whether the files of the run were gone at the last heartbeat.
    """

    def __init__(self, folder: RunFolder, more_status: Callable[[], Row] = dict):
        self.path = folder.path
        self.is_main = is_main_process()
        self._folder = folder
        self._more_status = more_status
        self.is_gone = False
        self._state = ""
        self._writing = threading.RLock()  # of status.json
        self._appending = threading.Lock()  # of rows: a background save appends, too
        self._rows = self.path / METRICS
        self.chain = FIRST_CHAIN
        self._size = size_of(self._rows)  # after this process's last change
        self._is_lost = False  # whether another program has changed the rows

    @runs_on_main
    def write_config(self, config: RunConfig) -> None:
        """Records the resolved configuration; `--config` accepts the file. Collective."""
        write_atomically(self.path / CONFIG, dump(config))

    def write_status(self, state: str, step: int, reason: str = "") -> None:
        """Records running (with the process's identity), completed, stopped, diverged or failed."""
        if not self.is_main:
            return
        with self._writing:
            if state == "failed":  # also if the rows are lost
                self._folder.check_lock()
            else:
                self.check()
            self._state = state
            status: Row = {"state": state, "step": step, "reason": reason}
            if state == "running":
                status |= {**this_process()._asdict(), "heartbeat": time.time()}
            self._put_status(status)

    def write_heartbeat(self, status: Row) -> None:
        """Records the watchdog's `status` of a running run, and whether its files are gone.
        For any thread."""
        has_lock = self._folder.has_lock()
        with self._writing, suppress(UserError):  # the disk may be full for a while
            if has_lock and self._state == "running":
                status = {
                    "state": "running",
                    "step": 0,
                    "reason": "",
                    **status,
                    **self._more_status(),
                }
                self._put_status(status, durable=False)
        self.is_gone = not has_lock or self._is_lost

    def check(self) -> None:
        """Raises: UserError if this process has lost the folder, or if another program has changed
        its rows."""
        self._folder.check_lock()
        if self._is_lost:
            problem = "was removed or changed by another program, and this run writes no row to it"
            raise UserError("file", self._rows, f"{problem}; run the command again")

    def write_failure(self, step: int, reason: str, is_refused: bool = False) -> None:
        """Records that the run failed, unless its end is recorded already. A user error
        (`is_refused`) leaves the records of a run that has not begun to train as they are.
        For any thread."""
        recorded = ("running",) if is_refused else ("", "running")
        with self._writing, suppress(UserError):  # the reason is printed as well
            if self._state in recorded:
                try:
                    self.write_status("failed", step, reason)
                except UserError:
                    self._folder.check_lock()
                    self._overwrite_status({"state": "failed", "step": step, "reason": reason})

    def _overwrite_status(self, status: Row) -> None:
        """Replaces the content of status.json where it is: a full disk has room for
        no second file."""
        content = (json.dumps(status) + "\n").encode()
        with suppress(OSError):
            file = os.open(self.path / STATUS, os.O_WRONLY | os.O_NOFOLLOW)
            try:
                os.pwrite(file, content, 0)
                os.ftruncate(file, len(content))
            finally:
                os.close(file)

    def _put_status(self, status: Row, durable: bool = True) -> None:
        file = self.path / STATUS
        content = json.dumps(status) + "\n"
        if not file.is_file() or file.read_text(errors="replace") != content:
            write_atomically(file, content, durable)

    def append(self, row: Row) -> None:
        """Appends a row to metrics.jsonl, with its chain. For any thread. Does nothing if the
        folder is lost, or if the file has not the size that it should: at the next heartbeat, all
        ranks stop."""
        if self._is_lost or not (self.is_main and self._folder.has_lock()):
            return
        with self._appending, writing(self._rows):
            if size_of(self._rows) != self._size:
                self._is_lost = True
                return
            try:
                with self._rows.open("a", encoding="utf-8") as stream:
                    stream.write(self._chained(row))
            finally:  # a full disk may have taken a part
                self._size = size_of(self._rows)

    def _chained(self, row: Row) -> str:
        text = json.dumps(row)
        self.chain = next_chain(self.chain, text)
        return f'{text[:-1]}, "chain": "{self.chain}"}}\n'

    def end(self) -> LogEnd:
        """The end of the rows so far, for a checkpoint."""
        with self._appending:
            return LogEnd(chain=self.chain, bytes=self._size)

    def sync(self) -> None:
        """Waits until all rows are on disk, since a checkpoint has the chain of the last one. For
        any thread. Raises: UserError, as `check`."""
        self.check()
        if self._rows.is_file():
            with writing(self._rows):
                fsync_path(self._rows)

    @runs_on_main
    def resume(self, end: LogEnd, progress: Progress, start: Row | None = None) -> None:
        """Drops the rows after a checkpoint that has `end` and `progress`, and adds the row
        `start`. In the same write: a kill leaves the old rows or these. A damaged file is copied
        aside, with a warning. Collective. Raises: UserError, on every rank."""
        self._folder.check_lock()
        kept = head(self._rows, end.bytes)
        if chain_of(self._rows, end.bytes) != end.chain:
            # that row follows the checkpoint
            kept = repaired(self._rows, progress.step - bool(progress.pending.row))

        def rows() -> Iterator[bytes]:
            line = b""
            for line in kept:
                yield line
            self.chain = split_chain(line.decode(errors="replace").rstrip("\n"))[1] or FIRST_CHAIN
            if start:
                yield self._chained(start).encode()

        write_atomically(self._rows, rows())
        self._size = size_of(self._rows)

    def newest_checkpoint(self) -> int:
        """The step of the newest checkpoint that the run has by its rows; 0 for
        none. Not collective."""
        newest = 0
        for event in read_events(self._rows)[0]:
            if is_rollback(event):
                newest = min(newest, event["step"])
                continue
            kept: object = event.get("kept")
            if isinstance(kept, list):
                steps = cast(list[object], kept)
                newest = max((step for step in steps if type(step) is int), default=0)
        return newest

    def outcome(self) -> str | None:
        """How the run ended, by its last event; None if it has not."""
        events, _ = read_events(self._rows)
        return events[-1].get("outcome") if events else None
