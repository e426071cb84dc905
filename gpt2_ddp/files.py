"""Files that survive a crash: written beside their place, fsynced, renamed. What is said of a disk that refuses. And
files that others named: read only where reading ends.
"""

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.errors import UserError

PIECE = 2**20
"""Bytes that are hashed and written at a time: they are still in a core's cache when they are written."""

HINTS = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "allow larger files (`ulimit -f`)",
    errno.EROFS: "make that disk writable",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever a disk refuses inside, where `path` is written, renamed or removed, is for the user to mend.

    Raises:
        UserError: in the place of an OSError; it names `path` and the hint.
    """
    try:
        yield
    except OSError as error:
        hint = f"{HINTS.get(error.errno or 0, 'mend that disk or folder')}, and give the same command again to go on"
        raise UserError("file", path, f"cannot be written ({error.strerror or error}); {hint}") from error


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Replaces `path` with `content`; a reader, or a crash, sees the old file or the new one, never a part.

    Args:
        durable: waits until it is on disk; otherwise a crash of the machine may leave anything.

    Raises:
        UserError: as `writing`; the old file is still there then.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            fsync_folder(path.parent)


def write_hashed(path: Path, buffers: Iterable[Any]) -> tuple[int, str]:
    """Writes buffers of bytes one behind the other, and waits until they are on disk; hashed on the way, in one pass
    over the memory.

    Returns:
        bytes and their SHA-256, in hex; of what was to be written, so that a disk that wrote something else is found.

    Raises:
        OSError: the disk refuses.
    """
    sha256, size = hashlib.sha256(), 0
    stands_still = threading.current_thread() is threading.main_thread()  # so another core may hash; behind it, none
    with path.open("wb") as file, ThreadPoolExecutor(1) as helper:
        for piece in _pieces(buffers):
            hashed = helper.submit(sha256.update, piece) if stands_still else sha256.update(piece)
            file.write(piece)
            size += len(piece)
            if hashed:
                hashed.result()
        file.flush()
        os.fsync(file.fileno())
    return size, sha256.hexdigest()


def _pieces(buffers: Iterable[Any]) -> Iterator[bytearray | memoryview]:
    """The same bytes, in pieces of at most PIECE; small buffers are put together, large ones are not copied."""
    small = bytearray()
    for buffer in buffers:
        view = memoryview(buffer)
        if len(small) + len(view) > PIECE:
            yield small
            small = bytearray()
        if len(view) > PIECE:
            yield from (view[start : start + PIECE] for start in range(0, len(view), PIECE))
        else:
            small += view
    yield small


def check_writable(output: str) -> None:
    """To be asked before the work whose result goes to the file `output`; one that is there stays as it is.

    Raises:
        UserError: it cannot be written.
    """
    path = Path(output)
    try:
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UserError("output", output, f"cannot be written ({error.strerror}); name another file") from error


def check_can_make(folder: Path) -> None:
    """Raises the OSError that making this folder, or a file in it, would fail with, as far as can be told without."""
    for place in (folder.absolute(), *folder.absolute().parents):
        try:
            mode = place.stat().st_mode
        except FileNotFoundError:
            if place.is_symlink():  # to nowhere
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
            continue
        if not stat.S_ISDIR(mode):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return


def fsync_file(path: Path) -> None:
    """Waits until the file's data are on disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def fsync_folder(folder: Path) -> None:
    """Waits until the folder's entries (its files' names) are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """SHA-256 of the file's bytes, in hex; about a second per GB."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_name(path: Path) -> Path:
    """`path`, or with the first number behind it, like `path-2`, that no file has."""
    number = 1
    free = path
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def regular(path: Path) -> Path:
    """`path`, if an ordinary file is there: opening a pipe waits for a writer, and reading a device may never end.

    Raises:
        OSError: it is missing or something else, or no file can have its name.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "No file can have such a name") from error
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "Not an ordinary file, but a pipe or a device")
    return path


def read_small(path: Path, most: int) -> bytes:
    """The content of an ordinary file of at most `most` bytes; OSError for anything else, which is not read."""
    with regular(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"More than {most:,} bytes")
    return content


def is_newer(file: Path, other: Path) -> bool:
    """Whether `file` was written after `other`; False where one is not there."""
    try:
        return file.stat().st_mtime_ns > other.stat().st_mtime_ns
    except OSError:
        return False
