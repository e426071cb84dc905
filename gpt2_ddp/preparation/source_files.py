"""Files of a source: their list and order, whether they are text, and changes since they were
read."""

import codecs
import glob
import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig, before_glob, common_folder
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import LFS_HINT, LFS_POINTER, regular, sha256_file
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
"""Control characters except those of texts and terminal logs. A text file has at most one in 100
bytes."""
HEAD = 4096  # bytes that show the format of a file
REFUSED = {
    re.escape(LFS_POINTER): LFS_HINT,
    rb"(?s:.{257})ustar": "is a tar archive; unpack it, and name the folder",
    b"%PDF-": "is PDF; extract its text, as with pdftotext",
    rb"PK\x03\x04": "is zip or an Office document; unpack it, or export it as text",
    rb"SQLite format 3\0": "is SQLite; export the table as CSV",
    rb"\xff\xfe\0\0|\0\0\xfe\xff": "is UTF-32 by its first bytes; convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW",
    rb"\xff\xfe|\xfe\xff": "is UTF-16 by its first bytes; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW",
}
"""Beginnings of files that are refused, though some have no more control characters than text."""
NOT_TEXT = {
    rb"\x1f\x8b": "gzip: name it .gz",
    rb"BZh[1-9]1AY&SY": "bzip2: name it .bz2",
    rb"\xfd7zXZ\0": "xz: unpack it with xz -d",
    rb"\x28\xb5\x2f\xfd": "zstd: name it .zst",
    rb"\x04\x22\x4d\x18": "lz4: name it .lz4",
    rb"\x1f\x9d": "compress: unpack it",
    rb"7z\xbc\xaf\x27\x1c": "7z: unpack it",
    rb"\xd0\xcf\x11\xe0": "an old Office document: export it as text",
    rb"PAR1": "parquet: name it .parquet",
    rb"(?:[^\0]\0){8}": "UTF-16LE, it seems: convert it: iconv -f UTF-16LE -t UTF-8 OLD > NEW",
    rb"(?:\0[^\0]){8}": "UTF-16BE, it seems: convert it: iconv -f UTF-16BE -t UTF-8 OLD > NEW",
}
"""Beginnings of files that are no text by their control characters or bytes, and what they are."""
MARKUP = {
    rb"(?is:\s*(?:<\?xml.{,200}?\?>\s*)?(?:<!--.{,1000}?-->\s*)?<(?:!doctype\s+html|html\b))": "HTML",
    rb"(?s:\s*<\?xml\s|\s*<mediawiki\b)": "XML",
    rb"\{\\rtf": "RTF",
    rb"From \S+@\S+ .*\n": "mail (mbox)",
    rb"(?s:\s*\{\s*\"cells\":\s*\[)": "Jupyter notebooks",
}
"""Beginnings of files whose markup becomes text."""
# next to the shards, a line per file of the source: [name, bytes, time in ns, SHA-256]
RECORD = ".source.jsonl"


def find_files(config: PrepareConfig) -> list[Path]:
    """The files of all sources, without the output folder. Several sources give a file once, and
    all are sorted, so that a glob gives the same whether the shell or this function expands it.
    Raises: UserError if a source has none, as `list_files`."""
    files: dict[str, Path] = {}
    for source in config.source:
        found = list_files(source, config.output)
        if not found:
            hint = "no such files; name text, jsonl or parquet files, a folder, a glob, hub:OWNER/NAME, or stdlib"
            raise UserError("source", source, hint)
        files |= {os.path.abspath(path): path for path in found}
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
    deep = deep or os.path.isdir(name)
    seen = {os.path.realpath(without)} if without else set()
    files = []
    try:
        for place in (
            [Path(name)]
            if os.path.lexists(name)
            else sorted(map(Path, glob.glob(start.rstrip("/"))))
        ):
            if deep and place.is_dir():
                files += (
                    file
                    for file in files_below(place, seen)
                    if file.relative_to(place).match(pattern or "*")
                )
            elif not (deep or place.is_dir()):
                files.append(place)
    except OSError as error:
        raise UserError(
            "source", error.filename, f"cannot be listed ({error.strerror}); allow it"
        ) from error
    return files


def files_below(folder: Path, seen: set[str]) -> Iterator[Path]:
    """The files of a folder, and of those in it that are not `seen` yet, by whatever link. Raises:
    OSError."""
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
        # these are not listed: a machine's packages may have 100,000 files
        folders[:] = set(folders) - NOT_LIBRARY
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
    """The parts of a file, which is read as a whole, in little memory. `end`: pattern of the end of
    a document, where the file may be cut. Raises: OSError or ValueError if the file is no text in
    UTF-8, or cannot be read."""
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
    if controls * 100 > size or undecodable * TRACE > size:
        found = first_match(NOT_TEXT, head_of(path))
        if controls * 100 > size:
            raise ValueError(
                f"is not text (has {controls:,} control characters){found and f'; {found}'}"
            )
        hint = found or "convert it: iconv -f cp1252 -t UTF-8 OLD > NEW, or from its own encoding"
        raise ValueError(f"is not UTF-8 (cannot decode {undecodable:,} characters); {hint}")
    return [*parts, Part(str(path), start, 0, size - start)]


def head_of(path: Path) -> bytes:
    """The first bytes of a file, decompressed. Raises: OSError."""
    with open_bytes(path) as file:
        return file.read(HEAD)


def first_match(formats: dict[bytes, str], head: bytes) -> str:
    """The value of the first pattern that a file begins with; empty if there is none."""
    return next((text for pattern, text in formats.items() if re.match(pattern, head)), "")


class _Gzip(io.RawIOBase):
    """The bytes of a gzip file, of several in one, and without zeros that follow. Any damage raises
    an OSError."""

    def __init__(self, path: Path):
        self._file = gzip.open(path)  # noqa: SIM115 (`close` closes it)
        self._is_begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read1(len(buffer))
        except EOFError as error:
            raise OSError("Truncated compressed stream") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            is_rest = self._is_begun and "Not a gzipped" in str(error)
            hint = "other bytes follow its end; gzip -dc OLD > NEW leaves them out"
            raise OSError(hint if is_rest else f"is no gzip, or damaged: {error}") from error
        self._is_begun = self._is_begun or bool(data)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed if its suffix is that of a compressed file. Empty files are
    empty."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    if compression == "gzip":  # pyarrow refuses zeros at the end, as tapes and disk images have
        return io.BufferedReader(_Gzip(path), BLOCK)
    import pyarrow

    return pyarrow.input_stream(str(path), compression)  # pyright: ignore[reportReturnType]


def open_text(part: Part) -> io.TextIOWrapper:
    """Text of a part, line ends as they are; what cannot be decoded becomes U+FFFD. A byte order
    mark at the beginning of the file is left out."""
    file = open_bytes(Path(part.path))
    if part.start:
        file.seek(part.start)
    if part.end:
        with file:
            file = io.BytesIO(file.read(part.end - part.start))
    encoding = "utf-8" if part.start else "utf-8-sig"
    return io.TextIOWrapper(file, encoding=encoding, errors="replace", newline="")


def lines_before(part: Part) -> int:
    """Line breaks in the file before the part."""
    with open(part.path, "rb") as file:
        sizes = [BLOCK] * (part.start // BLOCK) + [part.start % BLOCK]
        return sum(file.read(size).count(b"\n") for size in sizes)


def fingerprint(config: PrepareConfig, entries: Sequence[Entry]) -> dict[str, Any]:
    """What the manifest's recipe keeps of a source: the digest of all names and hashes, or the
    version of a source of rows, None if unknown. The digest shows a change even without the
    record."""
    if rows := row_source(config):
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
    config: PrepareConfig, paths: Iterable[Path], known: Iterable[Entry] = ()
) -> Iterator[Entry]:
    """The files' current state. Files in `known` with the same size and time are not read."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    if config.source != ("stdlib",):
        places = [before_glob(os.path.expanduser(source)) for source in config.source]
        roots = [place if place.is_dir() else place.parent for place in places]
    # names are relative to this folder, so that a source may be copied to another place
    root = os.path.join(common_folder(roots), "")
    hashes = {entry[:3]: entry.sha256 for entry in known}
    for path in paths:
        file = (str(path).removeprefix(root), 0, 0)
        sha256 = ""
        with suppress(OSError):
            found = regular(path).stat()
            file = (file[0], found.st_size, found.st_mtime_ns)
            sha256 = hashes.get(file) or sha256_file(path)
        yield Entry(*file, sha256)
