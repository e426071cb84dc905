"""Files of a source: their list and order, their encoding, and changes since they were read."""

import codecs
import fnmatch
import glob
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular, sha256_file, write_atomically
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
    ".arrow": "arrow",
}
NOT_TEXT = {
    re.compile(rb"%PDF-"): "a PDF",
    re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*<(!doctype\s+)?html\b", re.I | re.S): "HTML; extract its text",
}
"""Beginnings of files whose characters are no text to train on."""
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
BLOCK = 2**20  # bytes or characters to read at a time
LARGEST = 2**24  # bytes of a part that a worker reads
TRACE = 10_000  # in a text file, at most one byte in so many is undecodable
CONTROLS = bytes({*range(32), 127} - {*b"\a\b\t\n\v\f\r\x1b"})
"""Control characters except those of texts and terminal logs. A text file has at most one in 100 bytes."""
MARKS = {  # UTF-32's first: UTF-16's mark is a prefix of it
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
RECORD = ".source.jsonl"  # next to the shards, a line per file of the source: [name, bytes, time in ns, SHA-256]
NAMED_CHANGES = 2
"""Most names in a message, per kind of change."""


def find_files(source: str, without: str | None = None, split: str = "train") -> Iterator[Path]:
    """The files of `stdlib` or of a path or glob, sorted by the parts of their names; hidden ones are left out, and the
    folder `without`. Of a dataset that `datasets` saved, these are the tables of its `split`.

    Each folder is listed once, by whatever link, so that loops end; a million files need the memory of one folder's
    names. A folder that cannot be listed, a dangling link and a special file are given like files: reading them fails.
    Raises: UserError if there is none."""
    if source == "stdlib":
        yield from library_files()
        return
    path = os.path.expanduser(source)
    seen = {_identity(without)} if without and os.path.isdir(without) else set()
    if os.path.isdir(path):
        found = _below(path, seen, split)
    else:
        found = [path] if os.path.lexists(path) else _matching(path, seen, split)
    files = map(Path, found)
    first = next(files, None)
    if first is None:
        hint = "no such file or folder; name text, jsonl or parquet files, a folder, a glob, hub:OWNER/NAME, or stdlib"
        raise UserError("source", source, hint)
    yield first
    yield from files


def library_files() -> list[Path]:
    """Python's own modules, without tests, tables and installed packages."""
    found: list[Path] = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = set(folders) - NOT_LIBRARY  # these are not listed: a machine's packages may have 100,000 files
        found += (Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(path for path in found if not _is_table(path, path.stat().st_mtime_ns))


@cache
def _is_table(path: Path, _: int) -> bool:
    code = path.read_bytes()
    return len(code) > SMALL_TABLE and len(ENTRY.findall(code)) > TABLE * len(LINE.findall(code))


def describe(config: PrepareConfig) -> str:
    """Description of the source, for the manifest."""
    return f"stdlib (Python {platform.python_version()})" if config.source == "stdlib" else config.source


def _below(folder: str, seen: set[tuple[int, int]], split: str) -> Iterator[str]:
    """The files of a folder, and of those in it that are not `seen` yet."""
    try:
        identity = _identity(folder)
        if identity in seen:
            return
        seen.add(identity)
        with os.scandir(folder) as entries:
            found = sorted((entry.name, os.path.isdir(entry)) for entry in entries if entry.name[0] != ".")
        found = _saved(folder, dict(found), split) or found
    except OSError:
        yield folder
        return
    for name, is_folder in found:
        path = os.path.join(folder, name)
        if is_folder:
            yield from _below(path, seen, split)
        else:
            yield path


def _saved(folder: str, found: dict[str, bool], split: str) -> list[tuple[str, bool]]:
    """What holds the rows in a folder of `save_to_disk`: one split's folder, or tables. Empty for other folders."""
    if "dataset_dict.json" in found:
        return [(split, True)]
    if not {"state.json", "dataset_info.json"} <= found.keys():
        return []
    with suppress(ValueError, LookupError, TypeError):
        state = json.loads(Path(folder, "state.json").read_bytes())
        return [(file["filename"], False) for file in state["_data_files"]]
    return []


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _matching(pattern: str, seen: set[tuple[int, int]], split: str) -> Iterator[str]:
    """The files of a glob. `glob` itself would follow `**` along links for ever."""
    parts = Path(pattern).parts
    if "**" not in parts:
        yield from (name for name in sorted(glob.iglob(pattern), key=_parts) if not os.path.isdir(name))
        return
    at = parts.index("**")
    base, below = os.path.join(".", *parts[:at]), parts[at:]
    for folder in sorted(filter(os.path.isdir, glob.iglob(base)), key=_parts):
        for path in _below(folder, seen, split):
            if _fits(_parts(path[len(folder) :].strip(os.sep)), below) or os.path.isdir(path):
                yield path


def _parts(path: str) -> list[str]:
    return path.split(os.sep)


def _fits(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if patterns[0] == "**":
        return any(_fits(names[skipped:], patterns[1:] or ("*",)) for skipped in range(len(names)))
    here = bool(names) and fnmatch.fnmatchcase(names[0], patterns[0])
    return here and (_fits(names[1:], patterns[1:]) if patterns[1:] else not names[1:])


class Part(NamedTuple):
    """A file, or its bytes or row groups from `start` to `end`."""

    path: str
    encoding: str = "utf-8"
    start: int = 0
    end: int = 0  # 0: of the file
    lines: int = 0  # or rows, of the file above the part
    bytes: float = inf  # to be read, about


class Entry(NamedTuple):
    """A file of the source; one that cannot be read has no hash."""

    name: str
    bytes: int
    mtime_ns: int
    sha256: str


class DetectedEncoding(NamedTuple):
    """Result of scanning a whole file."""

    encoding: str  # Python's name of the codec to read the file with; empty if it cannot be read
    size: int  # bytes, decompressed
    undecodable: int = 0  # bytes that the codec cannot decode
    line: int = 0  # where the first of them is, from 1
    fault: str = ""  # why the file is no text, or damaged; empty for text
    parts: Sequence[tuple[int, int, int, int]] = ()  # last fields of each `Part`


def kind_of(path: str | Path) -> str:
    """`text`, `json`, `csv`, `parquet` or `arrow`, by the suffix before that of a compression."""
    suffixes = (suffix.lower() for suffix in reversed(Path(path).suffixes))
    return KINDS.get(next((suffix for suffix in suffixes if suffix not in COMPRESSED), ""), "text")


def detect_encoding(path: Path, named: str, end: bytes = b"") -> DetectedEncoding:
    """The encoding of a file, which is read as a whole, in little memory. `named`: the codec of files that are neither
    UTF-8 nor marked as UTF-16 or UTF-32; `auto`: there are none. A file with twice as many bytes that continue a
    character of UTF-8 as undecodable ones is UTF-8 with damage; texts in 23 other encodings had 0.43 times as many.
    `end`: pattern of the end of a document, where a file in UTF-8 may be cut.
    Raises: OSError or ValueError if the file cannot be read, or its content and suffix differ."""
    with open_bytes(path) as file:
        head = file.read(BLOCK)
        marked = next((name for mark, name in MARKS.items() if head.startswith(mark)), None)
        found, continuing, ascii_only = _scan(head, file, marked or "utf-8", end)
    kind = next((kind for beginning, kind in NOT_TEXT.items() if beginning.match(head)), None)
    if kind:
        found = found._replace(fault=f"is not text ({kind})")
    is_utf8 = 2 * found.undecodable < continuing or not (found.undecodable or ascii_only)
    if marked is None and is_utf8 and found.undecodable * TRACE > found.size:
        damage = f"is UTF-8 with {found.undecodable:,} undecodable bytes, the first in line {found.line}"
        return found._replace(fault=found.fault or damage)
    if marked or named == "auto" or is_utf8 or codecs.lookup(named).name == "utf-8":
        return found
    with open_bytes(path) as file:  # again: only the end of a file can show that it is not UTF-8
        other, _, is_ascii = _scan(file.read(BLOCK), file, named)
    return found if is_ascii else other


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed if its suffix is that of a compressed file."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow

    return pyarrow.input_stream(str(path), compression)  # pyright: ignore[reportReturnType]


def open_text(part: Part, newline: str | None = "") -> io.TextIOWrapper:
    """Text of a part without a byte order mark, line ends as they are; what cannot be decoded becomes U+FFFD."""
    name = "utf-8-sig" if codecs.lookup(part.encoding).name == "utf-8" and not part.start else part.encoding
    file = open_bytes(Path(part.path))
    if part.start:
        file.seek(part.start)
    if part.end:
        with file:
            file = io.BytesIO(file.read(part.end - part.start))
    return io.TextIOWrapper(file, encoding=name, errors="replace", newline=newline)


def _scan(head: bytes, file: IO[bytes], encoding: str, end: bytes = b"") -> tuple[DetectedEncoding, int, bool]:
    """Findings about a file in this encoding, bytes less characters, and whether it is ASCII without escapes."""
    decoder = codecs.getincrementaldecoder(encoding)(_note.__name__)
    size = undecodable = bad_line = lines = characters = controls = 0
    ascii_only, block, parts, start, above = True, head, [], 0, 0
    while True:
        _noted.clear()
        text = decoder.decode(block, final=not block)
        characters += len(text)
        if _noted:
            bad_line = bad_line or 1 + lines + block.count(b"\n", 0, _noted[0][0])
            undecodable += sum(end - start for start, end in _noted)
        if not block:
            break
        plain = block if encoding == "utf-8" else text.encode("utf-8", "surrogatepass")
        controls += len(plain) - len(plain.translate(None, CONTROLS))
        place = re.compile(end).search(block, BLOCK // 2) if end and plain is block else None
        if place and size - start < LARGEST:
            parts.append((start, size + place.end(), above, size + place.end() - start))
            start, above = size + place.end(), lines + block.count(b"\n", 0, place.end())
        ascii_only = ascii_only and plain == block and block.isascii()
        size += len(block)
        lines += plain.count(b"\n")
        block = file.read(BLOCK)
    parts.append((start, 0, above, size - start))
    fault = f"is not text (has {controls:,} control characters)" * (controls * 100 > size)
    found = DetectedEncoding(encoding, size, undecodable, bad_line, fault, parts)
    return found, size - characters, ascii_only


_noted: list[tuple[int, int]] = []


def _note(error: UnicodeError) -> tuple[str, int]:
    """Replaces like `replace` and notes which bytes."""
    assert isinstance(error, UnicodeDecodeError)
    _noted.append((error.start, error.end))
    return "\ufffd", error.end


codecs.register_error(_note.__name__, _note)


def record_source(folder: Path, config: PrepareConfig, entries: Sequence[Entry] = ()) -> dict[str, Any]:
    """Writes `RECORD` of the files, durably. Returns what the manifest's recipe keeps. That is the digest of all names
    and hashes, which shows a change even without the record; or the version of a source of rows, {} if unknown."""
    write_atomically(folder / RECORD, "".join(f"{json.dumps(entry)}\n" for entry in entries))
    if rows := row_source(config):
        commit = rows.version(config)
        return {"commit": commit} if commit else {}
    return {"files": len(entries), "bytes": sum(entry.bytes for entry in entries), "sha256": _digest(entries)}


def check_unchanged(folder: Path, config: PrepareConfig, was: dict[str, Any], then: str | None = None) -> None:
    """Compares the source with its record. Files of equal size and time count as equal. Unknown states pass: deleted
    files, no answer from the Hub. `was`: returned by `record_source`. `then`: the source's description when its tokens
    were made; None: they are being made. Raises: UserError, with the changes."""
    changes = ""
    if "commit" in was:
        rows = row_source(config)
        commit = (rows and rows.version(config)) or was["commit"]
        changes = f"commit {was['commit'][:12]} then, {commit[:12]} now" if commit != was["commit"] else ""
    elif "sha256" in was:
        before: list[Entry] = []
        with suppress(OSError, ValueError, TypeError):
            before = [Entry(*json.loads(line)) for line in (folder / RECORD).read_text().splitlines()]
        before = before if _digest(before) == was["sha256"] else []
        try:
            paths = tqdm(
                find_files(config.source, config.output, config.split),
                desc="looking at files",
                unit=" files",
                disable=None,
            )
            now = list(file_entries(config, paths, before))
        except UserError:
            if then is None:
                raise
            print(f"note: {config.source} no longer exists, so changes to it were not checked")
            return
        if _digest(now) != was["sha256"]:
            size = sum(entry.bytes for entry in now)
            sizes = f"{was['bytes']:,} bytes in {was['files']:,} files then, {size:,} in {len(now):,} now"
            changes = _difference(before, now) if before else sizes
            if then and then != describe(config):  # of another Python
                changes += f"; {then} then, {describe(config)} now"
    if changes:
        hint = f"has changed since it was prepared ({changes}); choose another output, or delete that folder"
        if then is None:
            hint = f"has changed while it was read ({changes}); run the command again once no program writes to it"
        raise UserError("source", config.source, hint)


def file_entries(config: PrepareConfig, paths: Iterable[Path], known: Iterable[Entry] = ()) -> Iterator[Entry]:
    """The files' current state. Files in `known` with the same size and time are not read."""
    root, hashes = os.path.join(_root(config.source), ""), {entry[:3]: entry.sha256 for entry in known}
    for path in paths:
        file, sha256 = (str(path).removeprefix(root), 0, 0), ""
        with suppress(OSError):
            found = regular(path).stat()
            file = (file[0], found.st_size, found.st_mtime_ns)
            sha256 = hashes.get(file) or sha256_file(path)
        yield Entry(*file, sha256)


def _root(source: str) -> Path:
    """The folder that names are relative to, so that a source may be copied to another place."""
    if source == "stdlib":
        return Path(sysconfig.get_path("stdlib"))
    path = Path(os.path.expanduser(source))
    if os.path.exists(path):
        return path if os.path.isdir(path) else path.parent
    return Path(*takewhile(lambda part: not set(part) & set("*?["), path.parts))


def _digest(entries: Iterable[Entry]) -> str:
    return hashlib.sha256("".join(json.dumps([entry.name, entry.sha256]) for entry in entries).encode()).hexdigest()


def _difference(then: list[Entry], now: list[Entry]) -> str:
    before, after = ({entry.name: entry.sha256 for entry in entries} for entries in (then, now))
    changes = {
        "added": [name for name in after if name not in before],
        "edited": [name for name in after if before.get(name, after[name]) != after[name]],
        "removed": [name for name in before if name not in after],
    }
    return "; ".join(f"{len(names):,} {kind}: {_first(names)}" for kind, names in changes.items() if names)


def _first(names: list[str]) -> str:
    first = [truncate(name, 30) for name in names[:NAMED_CHANGES]]
    return ", ".join(first + ["..."] * (len(names) > NAMED_CHANGES))
