"""A folder while data are prepared in it: one process at a time, and what does not come to its end leaves nothing."""

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from gpt2_ddp.data.manifest import MANIFEST
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.fingerprint import RECORD

SHARDS = ("train_*.bin", "val_*.bin", ".*.tmp")
"""The files that hold tokens, and parts of such files."""
LOCK = ".prepare.lock"
"""Held while a folder is written, and kept: it marks the folder's files as ours, so that leftovers can be cleared."""
ATTEMPTS = 1000
"""To make a folder and lock it, while others that fail take it away."""


@contextmanager
def locked_output(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it, after any other process that prepares it; leftovers are cleared.

    Raises:
        UserError: it cannot be made or written, or holds shards that are not ours.
    """
    made: list[Path] = []
    try:
        with _hold(folder, made):
            _clear(folder)
            try:
                yield
            finally:
                _clear(folder)
                if not (folder / MANIFEST).exists():
                    _remove_others(folder, made)
    finally:
        for path in made:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _hold(folder: Path, made: list[Path]) -> IO[str]:
    """The folder's lock, once nobody else has it; folders that are made for it are added to `made`, inner ones first.
    One who fails takes lock and folder away: they may be gone, or another's, when the lock is had."""
    for _ in range(ATTEMPTS):
        try:
            if not os.path.exists(folder):
                return _make(folder, made)
            foreign = any(folder.glob("*.bin")) or (folder / TOKENIZER_FILE).exists()
            if foreign and not (folder / LOCK).exists():
                hint = "holds files that prepare_data.py did not write; choose another output, or index shards with "
                raise UserError("output", folder, f"{hint}bin:GLOB")
            lock = open(folder / LOCK, "w")  # noqa: SIM115 (held until the end)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                continue
            raise UserError("output", folder, f"cannot be written ({error.strerror}); choose another folder") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process prepares {folder}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK)):
                return lock
        lock.close()
    raise UserError("output", folder, "cannot be made; choose another folder")


def _make(folder: Path, made: list[Path]) -> IO[str]:
    """Makes the folder with its lock in it, held. It comes and goes by renaming: one who found it empty, or without a
    lock, could put a lock into it that keeps its maker from removing it.

    Raises:
        OSError: it cannot be made, or another was quicker.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    made[:0] = missing[1:]
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = _aside(folder)
    aside.mkdir()
    lock = open(aside / LOCK, "w")  # noqa: SIM115 (held until the end)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        aside.rename(folder)
    except OSError:
        lock.close()
        _remove(aside)
        raise
    made[:0] = [folder]
    return lock


def _remove_others(folder: Path, made: list[Path]) -> None:
    """Takes away the lock, and with it the folder if it was made here and holds nothing else."""
    if folder in made and [path.name for path in folder.iterdir()] == [LOCK]:
        _remove(folder.rename(_aside(folder)))
    else:
        (folder / LOCK).unlink()


def _aside(folder: Path) -> Path:
    return folder.with_name(f".prepare-{uuid.uuid4().hex}.tmp")


def _remove(folder: Path) -> None:
    (folder / LOCK).unlink()
    folder.rmdir()


def _clear(folder: Path) -> None:
    """Removes what a preparation that did not come to its end has left behind."""
    if not (folder / MANIFEST).exists():
        remove(folder, *SHARDS, TOKENIZER_FILE, RECORD)


def remove(folder: Path, *patterns: str) -> None:
    """Removes the files in a folder whose names match."""
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()
