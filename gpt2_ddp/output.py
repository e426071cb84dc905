"""Output of commands: tables, JSON, and folders that are complete or absent."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_path, write_atomically, writing

ATTEMPTS = 1000  # attempts to lock a folder while other processes end and remove their locks


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; columns are padded, so that it is readable unrendered too."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replaces a JSON file, as `write_atomically`."""
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def make_output_folder(output: str | Path) -> Path:
    """Creates the folder that `--output` names. Raises: UserError if that fails, or it is
    read-only."""
    folder = Path(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_can_make(folder)
    except OSError as error:
        raise _unusable(output, error) from error
    return folder


def _unusable(output: str | Path, error: OSError) -> UserError:
    """The user error of an output that cannot be made."""
    reason = "it is a file" if os.path.isfile(output) else error.strerror
    return UserError("output", output, f"cannot be written ({reason}); name another folder")


def check_can_make(folder: Path) -> None:
    """Raises the OSError that making this folder, or a file in it, would raise; makes nothing."""
    try:
        folder.lstat()
    except FileNotFoundError:
        check_can_make(folder.absolute().parent)
        return
    number = errno.EACCES if folder.is_dir() else errno.EEXIST  # or it is a dangling link
    if number == errno.EEXIST or not os.access(folder, os.W_OK | os.X_OK):
        raise OSError(number, os.strerror(number))


@contextmanager
def locked_output(output: Path, waiting: str = "") -> Generator[Path]:
    """Locks `output`, and yields an empty hidden folder next to it, for `publish`. Removes lock and
    folder at the end.

    The hidden folder is inside `output` if that is a disk's root, or its parent is not writable. If
    another process has the lock, prints `waiting` and waits. Raises UserError if `waiting` is empty
    then, if writing fails, or, before any work, if `output` is a file or read-only.
    """
    output = Path(os.path.realpath(output))
    try:
        check_can_make(output)
    except OSError as error:
        raise _unusable(output, error) from error
    is_in_fixed_folder = output.is_dir() and not os.access(output.parent, os.W_OK)
    is_fixed = is_in_fixed_folder or os.path.ismount(output)
    base = output if is_fixed else output.parent
    aside = base / f".{output.name}.tmp"
    path = base / f".{output.name}.lock"
    with writing(output):
        base.mkdir(parents=True, exist_ok=True)
        lock = _lock(output, path, waiting)
    with lock:
        try:
            shutil.rmtree(aside, ignore_errors=True)  # of a killed process
            with writing(output):
                aside.mkdir()
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            with writing(output):
                path.unlink()  # while it is locked


def _lock(output: Path, path: Path, waiting: str) -> IO[str]:
    """The open, locked file `path`."""
    for _ in range(ATTEMPTS):
        # no link of somebody else
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        lock = open(descriptor, "w")  # noqa: SIM115 (the caller closes it)
        # the process that had the lock has removed the file, which is ESTALE on NFS
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not waiting:
                    hint = "wait for that process, or name another folder"
                    message = f"another process is writing it; {hint}"
                    raise UserError("output", output, message) from None
                print(waiting, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(path)):
                return lock
        lock.close()
    raise UserError("output", output, "cannot be locked; choose another folder")


def publish(aside: Path, output: Path, last: str = "") -> None:
    """Waits until the files of `aside` are on disk, and renames it to `output`. If that is a folder
    with files, renames each file into it, the one named `last` at last. Raises: UserError if
    writing fails."""
    output = Path(os.path.realpath(output))
    with writing(output):
        for path in aside.rglob("*"):
            if path.is_file():
                fsync_path(path)
        fsync_path(aside)
        if not output.is_dir() or not any(output.iterdir()):
            aside.rename(output)
        else:
            for path in sorted(aside.iterdir(), key=lambda path: (path.name == last, path.name)):
                if path.name == last:  # it is there only with all others
                    fsync_path(output)
                path.rename(output / path.name)
            fsync_path(output)
        fsync_path(output.parent)
