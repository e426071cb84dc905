"""Files that survive a crash: written beside their place, fsynced, renamed."""

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces `path` with `content`; a reader, or a crash, sees the old file or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
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
