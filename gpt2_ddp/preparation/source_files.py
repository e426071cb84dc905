"""Files of a source: their list and order, and changes since they were read."""

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.config.tools import PrepareConfig, before_glob, common_folder
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import regular, sha256_file
from gpt2_ddp.preparation.row_sources import row_source

NOT_LIBRARY = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}
TABLE = 0.59
SMALL_TABLE = 4000
"""A module of more than 4,000 bytes is a table if so many of its lines are an entry: a literal and
nothing else. With tables left out, and those of `encodings` and the help texts of `pydoc_data`, a
model learns to write code."""
LINE = re.compile(rb"^[ \t]*[^#\s]", re.MULTILINE)
ENTRY = re.compile(
    rb"""^[ \t]*(?:b?'[^'\n]*'|b?"[^"\n]*"|[\[({]*-?0?x?[0-9a-fA-F]+)[\])}]*[ \t]*(?:[:,)]|$)""",
    re.MULTILINE,
)
RECORD = ".source.jsonl"
"""Next to the shards, a line per file of the source: [name, bytes, time in ns, SHA-256]."""


def find_files(config: PrepareConfig) -> list[Path]:
    """The files of all sources, without the output folder. Several sources give a file once, and
    all are sorted, so that a glob gives the same whether the shell or this function expands it.
    Raises: UserError if a source has none, as `list_files`."""
    files: dict[str, Path] = {}
    for source in config.source:
        paths = list_files(source, config.output)
        if not paths:
            kinds = "text, jsonl or parquet files, a folder, a glob, hub:OWNER/NAME, or stdlib"
            raise UserError("source", source, f"no such files; name {kinds}")
        files |= {os.path.abspath(path): path for path in paths}
    return sorted(files.values()) if len(config.source) > 1 else [*files.values()]


def list_files(source: str, without: str | None = None) -> list[Path]:
    """The files of `stdlib` or of a path or glob, sorted by the parts of their names; hidden ones
    are left out, and the folder `without`. A glob has at most one `**`. A dangling link and a
    special file count as files: reading them fails. Raises: UserError if a folder cannot be
    listed."""
    if source == "stdlib":
        return library_files()
    name = os.path.join(".", os.path.expanduser(source))
    start, deep, pattern = f"{name}/".partition("/**/")
    is_deep = bool(deep) or os.path.isdir(name)
    seen = {os.path.realpath(without)} if without else set[str]()
    files: list[Path] = []
    try:
        if os.path.lexists(name):  # also a name with the characters of a glob
            places = [Path(name)]
        else:
            places = sorted(map(Path, glob.glob(start.rstrip("/"))))
        for place in places:
            if not place.is_dir():
                if not is_deep:
                    files.append(place)
            elif is_deep:
                below = files_below(place, seen)
                files += (file for file in below if file.relative_to(place).match(pattern or "*"))
    except OSError as error:
        hint = f"cannot be listed ({error.strerror}); allow it"
        raise UserError("source", error.filename, hint) from error
    return files


def files_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """The files of a folder, and of those in it that are not `seen` yet, by whatever link. Raises:
    OSError."""
    real = os.path.realpath(folder)
    if real in seen:
        return
    seen.add(real)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from files_below(path, seen)
        else:
            yield path


def library_files() -> list[Path]:
    """Python's own modules, without tests, tables and installed packages."""
    modules: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        # these are not listed: a machine's packages may have 100,000 files
        folders[:] = set(folders) - NOT_LIBRARY
        modules += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(path for path in modules if not _is_table(path.read_bytes()))


def _is_table(code: bytes) -> bool:
    return len(code) > SMALL_TABLE and len(ENTRY.findall(code)) > TABLE * len(LINE.findall(code))


class Entry(NamedTuple):
    """A file of the source, as it was when it was read.

    Attributes:
        name: its path, relative to the source's folder.
        mtime_ns: time of its last change, in nanoseconds.
        sha256: empty if the file cannot be read.
    """

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


def fingerprint(config: PrepareConfig, entries: Sequence[Entry]) -> dict[str, str | int | None]:
    """What the manifest's recipe keeps of a source: the digest of all names and hashes, or the
    version of a source of rows, None if unknown. The digest shows a change even without the
    record."""
    rows = row_source(config)
    if rows:
        return {"commit": rows.version(config)}
    names = "".join(json.dumps([entry.name, entry.sha256]) for entry in entries)
    sha256 = hashlib.sha256(names.encode()).hexdigest()
    return {"files": len(entries), "bytes": sum(entry.bytes for entry in entries), "sha256": sha256}


def check_unchanged(folder: Path, config: PrepareConfig, was: object, hint: str = "") -> None:
    """Compares the source with its `fingerprint`. Files of the size and time in its record are not
    read again.

    `was`: of a folder of somebody else it may be anything. `hint`: what to do about a change, by
    default with a folder that is prepared. Raises: UserError if it has changed."""
    before: tuple[Entry, ...] = ()
    # a folder of somebody else may have anything
    with suppress(OSError, ValueError, TypeError, RecursionError):
        lines = regular(folder / RECORD).read_text().splitlines()
        record = tuple(Entry(*json.loads(line)) for line in lines)
        hash(record)  # not of lists in place of names
        before = record
    entries = [] if row_source(config) else list(file_entries(config, find_files(config), before))
    now = fingerprint(config, entries)
    if now != was and None not in now.values():
        hint = hint or f"choose another output, or delete {folder}"
        raise UserError("source", config.source_name, f"has changed since it was read; {hint}")


def file_entries(
    config: PrepareConfig, paths: Iterable[Path], recorded: Iterable[Entry] = ()
) -> Iterator[Entry]:
    """The files' current state. Files in `recorded` with the same size and time are not read."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    if config.source != ("stdlib",):
        folders = [before_glob(os.path.expanduser(source)) for source in config.source]
        roots = [folder if folder.is_dir() else folder.parent for folder in folders]
    # names are relative to this folder, so that a source may be copied to another place
    root = os.path.join(common_folder(roots), "")
    hashes = {entry[:3]: entry.sha256 for entry in recorded}
    for path in paths:
        name = str(path).removeprefix(root)
        size = mtime_ns = 0
        sha256 = ""
        with suppress(OSError):
            stat = regular(path).stat()
            size = stat.st_size
            mtime_ns = stat.st_mtime_ns
            sha256 = hashes.get((name, size, mtime_ns)) or sha256_file(path)
        yield Entry(name, size, mtime_ns, sha256)
