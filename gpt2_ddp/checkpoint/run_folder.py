"""A run's folder: made, locked by one trainer at a time, and unlocked by its main process."""

import errno
import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path

from gpt2_ddp.checkpoint.run_files import METRICS, is_locked, read_lines
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.ranks import on_every_rank, on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make

LOST = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.EAGAIN)  # the folder is gone, or another trainer has the lock


class RunFolder:
    """`output_dir/run_name`, on every rank; the main process locks it. Without `lock`, it only checks the folder:
    creates, locks and repairs nothing. Raises: UserError, on every rank, for an unusable folder."""

    def __init__(self, config: RunConfig, lock: bool = True):
        self.path, self.wants_lock = Path(config.output_dir) / config.run_name, lock
        self.checkpoints = self.path / "checkpoints"
        self._is_new = not os.path.exists(self.path)  # also for a name that is too long
        self._lock: int | None = None
        self._is_lost = False
        on_main(lambda: self._open(config))

    def _open(self, config: RunConfig) -> None:
        try:
            if self.wants_lock:
                self.checkpoints.mkdir(parents=True, exist_ok=True)
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
        begun = (self.path / METRICS).exists()
        if config.fresh and (any(self.checkpoints.glob("*")) or begun):
            hint = f"{self.path} already holds a run, and nothing is overwritten; remove it or choose another run_name"
            raise UserError("fresh", "true", hint)
        kept = any(self.checkpoints.glob("step-*")) or any(self.checkpoints.glob(".step-*"))
        rows = [] if kept else read_lines(self.path / METRICS)
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

    def check_is_shared(self) -> None:
        """Raises: UserError, on every rank, if a machine has another folder: an elastic launcher may move rank 0."""
        lock = self.path / ".lock"
        there = on_main(lambda: lock.stat().st_ino)

        def compare() -> None:
            if not lock.exists() or lock.stat().st_ino != there:
                hint = f"is another folder on {socket.gethostname()} than on rank 0's machine; use a shared disk"
                raise UserError("output_dir", self.path.parent, hint)

        on_every_rank(compare)

    def release(self) -> None:
        """Unlocks the folder. A new folder that is still empty is removed."""
        if self._is_new and self._lock is not None and self.has_lock():
            with suppress(OSError):  # not empty
                self.checkpoints.rmdir()
                if [file.name for file in self.path.iterdir()] == [".lock"]:
                    (self.path / ".lock").unlink()
                    self.path.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
