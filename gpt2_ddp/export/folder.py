"""A folder that is there whole or not at all: made beside its place by one process, fsynced and renamed."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import free_name, fsync_file, fsync_folder, writing

LOCK = ".lock"
"""Held while the folder is made, so that what a killed process left can be told from what another one makes."""


class ExportMismatch(Exception):
    """What was made in the folder is not as it should be.

    Args:
        reason: what is wrong with it.

    Attributes:
        left: where it was left, to be looked at.
    """

    left: Path

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(reason)


@contextmanager
def atomic_directory(output: Path) -> Iterator[Path]:
    """Gives a hidden folder to write into, which becomes `output` in the end. Where something fails it is removed; only
    what is `ExportMismatch` is left, under the name of `output` with `.rejected`.

    Raises:
        UserError: `output` is there and not an empty folder, another process makes it, or the disk refuses.
    """
    output = Path(os.path.abspath(output))  # `.` has no name
    aside = output.parent / f".{output.name}.tmp"
    with writing(output):
        empty = os.path.isdir(output) and not os.path.islink(output) and not os.listdir(output)
        if os.path.lexists(output) and not empty:
            raise UserError("output", output, "is there already, and nothing is overwritten; remove it or name another")
        aside.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(aside / LOCK, "w")  # noqa: SIM115 (held until the end)
        except OSError:
            with suppress(OSError):  # another's
                aside.rmdir()
            raise
    with lock:
        _hold(lock.fileno(), aside, output)
        try:
            with writing(output):
                _clear(aside)
                yield aside
                _become(aside, output)
        except ExportMismatch as rejected:
            rejected.left = free_name(output.with_name(f"{output.name}.rejected"))
            with writing(rejected.left):
                _become(aside, rejected.left)
            raise
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def _hold(lock: int, aside: Path, output: Path) -> None:
    with suppress(OSError):  # another has it, or had it when we opened it and has come to its end
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(aside / LOCK)):
            return
    raise UserError("output", output, "another process makes it at this moment; wait for that one, or name another")


def _clear(folder: Path) -> None:
    """Removes what a process that was killed left behind."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def _become(aside: Path, place: Path) -> None:
    for path in aside.rglob("*"):
        if path.is_file():
            fsync_file(path)
    fsync_folder(aside)
    aside.rename(place)
    fsync_folder(place.parent)
    (place / LOCK).unlink()  # only now: one who finds the folder without it would take it for a dead process's
