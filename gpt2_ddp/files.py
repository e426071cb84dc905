"""Files that survive a crash: written beside their place, fsynced, renamed. What is said of a disk that refuses. And
files that others named: read only where reading ends.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2_ddp.errors import UserError

CURES = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "allow larger files (`ulimit -f`)",
    errno.EROFS: "make that disk writable",
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Whatever a disk refuses inside, where `path` is written, renamed or removed, is for the user to mend.

    Raises:
        UserError: in the place of an OSError; it names `path` and the cure.
    """
    try:
        yield
    except OSError as error:
        cure = f"{CURES.get(error.errno or 0, 'mend that disk or folder')}, and give the same command again to go on"
        raise UserError("file", path, f"cannot be written ({error.strerror or error}); {cure}") from error


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
