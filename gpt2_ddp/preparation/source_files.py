"""Files of a source: their list and order, whether they are text, and changes since they were read."""

import codecs
import glob
import hashlib
import io
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig, before_glob
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import regular, sha256_file
from gpt2_ddp.preparation.row_sources import row_source

NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
TABLE, SMALL_TABLE = 0.59, 4000
"""A module of more than 4,000 bytes is a table if so many of its lines are an entry: a literal and nothing else. With
tables left out, and those of `encodings` and the help texts of `pydoc_data`, a model learns to write code."""
LINE = re.compile(rb"^[ \t]*[^#\s]", re.MULTILINE)
ENTRY = re.compile(
    rb"""^[ \t]*(?:b?'[^'\n]*'|b?"[^"\n]*"|[\[({]*-?0?x?[0-9a-fA-F]+)[\])}]*[ \t]*(?:[:,)]|$)""", re.MULTILINE
)
KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
BLOCK = 2**20  # bytes or characters to read at a time
LARGEST = 2**24  # bytes of a part that a worker reads
TRACE = 10_000  # in a text file, at most one character in so many bytes is undecodable
CONTROLS = bytes({*range(32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})
"""Control characters except those of texts and terminal logs. A text file has at most one in 100 bytes."""
RECORD = ".source.jsonl"  # next to the shards, a line per file of the source: [name, bytes, time in ns, SHA-256]


def find_files(source: str, without: str | None = None) -> list[Path]:
    """The files of `stdlib` or of a path or glob, sorted by the parts of their names; hidden ones are left out, and the
    folder `without`. A glob has at most one `**`. A dangling link and a special file count as files: reading them
    fails. Raises: UserError if there is none, or if a folder cannot be listed."""
    if source == "stdlib":
        return library_files()
    name = os.path.join(".", os.path.expanduser(source))
    start, deep, pattern = f"{name}/".partition("/**/")
    deep = deep or os.path.isdir(name)
    seen = {os.path.realpath(without)} if without else set()
    files = []
    try:
        for place in [Path(name)] if os.path.lexists(name) else sorted(map(Path, glob.glob(start.rstrip("/")))):
            if deep and place.is_dir():
                files += (file for file in files_below(place, seen) if file.relative_to(place).match(pattern or "*"))
            elif not (deep or place.is_dir()):
                files.append(place)
    except OSError as error:
        raise UserError("source", error.filename, f"cannot be listed ({error.strerror}); allow it") from error
    if not files:
        hint = "no such files; name text, jsonl or parquet files, a folder, a glob, hub:OWNER/NAME, or stdlib"
        raise UserError("source", source, hint)
    return files


def files_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """The files of a folder, and of those in it that are not `seen` yet, by whatever link. Raises: OSError."""
    place = os.path.realpath(folder)
    if place in seen:
        return
    seen.add(place)
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from files_below(path, seen)
        else:
            yield path


def library_files() -> list[Path]:
    """Python's own modules, without tests, tables and installed packages."""
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - NOT_LIBRARY  # these are not listed: a machine's packages may have 100,000 files
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(path for path in found if not _is_table(path.read_bytes()))


def _is_table(code: bytes) -> bool:
    return len(code) > SMALL_TABLE and len(ENTRY.findall(code)) > TABLE * len(LINE.findall(code))


class Part(NamedTuple):
    """A file, or its bytes or row groups from `start` to `end`."""

    path: str
    start: int = 0
    end: int = 0  # 0: of the file
    bytes: float = inf  # to be read, about


class Entry(NamedTuple):
    """A file of the source; one that cannot be read has no hash."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


def kind_of(path: str | Path) -> str:
    """`text`, `json`, `csv` or `parquet`, by the suffix before that of a compression."""
    path = Path(str(path).lower())
    return KINDS.get((path.with_suffix("") if path.suffix in COMPRESSED else path).suffix, "text")


def text_parts(path: Path, end: bytes) -> list[Part]:
    """The parts of a file, which is read as a whole, in little memory. `end`: pattern of the end of a document, where
    the file may be cut. Raises: OSError or ValueError if the file is no text in UTF-8, or cannot be read."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = []
    start = size = undecodable = controls = 0
    with open_bytes(path) as file:
        for block in chain(iter(partial(file.read, BLOCK), b""), [b""]):
            text = decoder.decode(block, final=not block)
            undecodable += text.count("\ufffd") - block.count("\ufffd".encode())
            controls += len(block) - len(block.translate(None, CONTROLS))
            place = re.compile(end).search(block, BLOCK // 2) if end else None
            if place and size - start < LARGEST:
                cut = size + place.end()
                parts.append(Part(str(path), start, cut, cut - start))
                start = cut
            size += len(block)
    if controls * 100 > size:
        raise ValueError(f"is not text (has {controls:,} control characters)")
    if undecodable * TRACE > size:
        raise ValueError(f"is not UTF-8 (cannot decode {undecodable:,} characters); convert it with iconv")
    return [*parts, Part(str(path), start, 0, size - start)]


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed if its suffix is that of a compressed file."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow

    return pyarrow.input_stream(str(path), compression)  # pyright: ignore[reportReturnType]


def open_text(part: Part) -> io.TextIOWrapper:
    """Text of a part, line ends as they are; what cannot be decoded becomes U+FFFD."""
    file = open_bytes(Path(part.path))
    if part.start:
        file.seek(part.start)
    if part.end:
        with file:
            file = io.BytesIO(file.read(part.end - part.start))
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace", newline="")


def fingerprint(config: PrepareConfig, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the manifest's recipe keeps of a source: the digest of all names and hashes, or the version of a source of
    rows, None if unknown. The digest shows a change even without the record."""
    if rows := row_source(config):
        return {"commit": rows.version(config)}
    names = "".join(json.dumps([entry.name, entry.sha256]) for entry in entries)
    sha256 = hashlib.sha256(names.encode()).hexdigest()
    return {"files": len(entries), "bytes": sum(entry.bytes for entry in entries), "sha256": sha256}


def check_unchanged(folder: Path, config: PrepareConfig, was: dict[str, Any]) -> None:
    """Compares the source with its `fingerprint`. Files of the size and time in its record are not read again.
    Raises: UserError if it has changed."""
    before: list[Entry] = []
    with suppress(OSError):
        before = [Entry(*json.loads(line)) for line in (folder / RECORD).read_text().splitlines()]
    entries = [] if row_source(config) else list(file_entries(config, find_files(config.source, config.output), before))
    now = fingerprint(config, entries)
    if now != was and None not in now.values():
        hint = f"has changed since it was read; choose another output, or delete {folder}"
        raise UserError("source", config.source, hint)


def file_entries(config: PrepareConfig, paths: Iterable[Path], known: Iterable[Entry] = ()) -> Iterator[Entry]:
    """The files' current state. Files in `known` with the same size and time are not read."""
    place = before_glob(
        sysconfig.get_path("stdlib") if config.source == "stdlib" else os.path.expanduser(config.source)
    )
    # names are relative to this folder, so that a source may be copied to another place
    root = os.path.join(place if place.is_dir() else place.parent, "")
    hashes = {entry[:3]: entry.sha256 for entry in known}
    for path in paths:
        file, sha256 = (str(path).removeprefix(root), 0, 0), ""
        with suppress(OSError):
            found = regular(path).stat()
            file = (file[0], found.st_size, found.st_mtime_ns)
            sha256 = hashes.get(file) or sha256_file(path)
        yield Entry(*file, sha256)
