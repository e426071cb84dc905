"""Which files a source is made of: Python's own modules, a file, a folder or a glob, always in the same order."""

import fnmatch
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpt2_ddp.errors import UserError

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
TABLES = ("html/entities.py", "re/_casefix.py", "stringprep.py", "locale.py", "_sysconfigdata*.py")
"""Modules that are tables: more than six in ten of their lines are an entry, a literal and nothing else. With them left
out, and the tables of `encodings` and the help texts of `pydoc_data`, a model learns to write code, not code points."""


def find_files(source: str, without: str | None = None) -> Iterator[Path]:
    """The files of `stdlib` or of a path or glob, sorted by the parts of their names; hidden ones are left out, and the
    folder `without`.

    Folders are listed as they are gone through, each once, by whatever link, so that loops end and a million files
    need the memory of one folder's names. A folder that cannot be listed, a link to nothing, and what is no file is
    given as if it were one: reading it says why.

    Raises:
        UserError: there is none.
    """
    if source == "stdlib":
        yield from library_files()
        return
    path = os.path.expanduser(source)
    seen = {_identity(without)} if without and os.path.isdir(without) else set()
    found = _below(path, seen) if os.path.isdir(path) else [path] if os.path.lexists(path) else _matching(path, seen)
    files = map(Path, found)
    first = next(files, None)
    if first is None:
        hint = "there is no such file; name a text, jsonl or parquet file, a folder, a glob, hub:OWNER/NAME, or stdlib"
        raise UserError("source", source, hint)
    yield first
    yield from files


def library_files() -> list[Path]:
    """Python's own modules, without tests, tables, and what was installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    found = (path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts))
    return sorted(path for path in found if not any(path.match(str(root / table)) for table in TABLES))


def _below(folder: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """The files of a folder, and of those in it that are not `seen` yet."""
    try:
        identity = _identity(folder)
        if identity in seen:
            return
        seen.add(identity)
        with os.scandir(folder) as entries:
            found = sorted((entry.name, _is_folder(entry)) for entry in entries if entry.name[0] != ".")
    except OSError:
        yield folder
        return
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if is_folder:
            yield from _below(path, seen)
        else:
            yield path


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()  # which raises where links lead in a circle


def _matching(pattern: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """The files of a glob. `glob` itself would follow `**` along links for ever."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from (name for name in sorted(glob.iglob(pattern), key=_parts) if not os.path.isdir(name))
        return
    at = parts.index("**")
    base, below = os.path.join(".", *parts[:at]), parts[at:]
    for folder in sorted(filter(os.path.isdir, glob.iglob(base)), key=_parts):
        for path in _below(folder, seen):
            if _fits(path[len(folder) :].strip(os.sep).split(os.sep), below) or os.path.isdir(path):
                yield path


def _parts(path: str) -> list[str]:
    return path.split(os.sep)


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if patterns[0] == "**":
        return any(_fits(names[skipped:], patterns[1:] or ("*",)) for skipped in range(len(names)))
    here = bool(names) and fnmatch.fnmatchcase(names[0], patterns[0])
    return here and (_fits(names[1:], patterns[1:]) if patterns[1:] else not names[1:])
