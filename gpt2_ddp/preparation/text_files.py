"""Files of text: their bytes, decompressed; their text in UTF-8, in parts that workers can read.
And formats that are refused, since they are no text.
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false
# (pyarrow has no types)

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpt2_ddp.files import LFS_HINT, LFS_POINTER

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

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
    rb"\xff\xfe\0\0|\0\0\xfe\xff": (
        "is UTF-32 by its first bytes; convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW"
    ),
    rb"\xff\xfe|\xfe\xff": (
        "is UTF-16 by its first bytes; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
    ),
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
HTML = rb"(?is:\s*(?:<\?xml.{,200}?\?>\s*)?(?:<!--.{,1000}?-->\s*)?<(?:!doctype\s+html|html\b))"
MARKUP = {
    HTML: "HTML",
    rb"(?s:\s*<\?xml\s|\s*<mediawiki\b)": "XML",
    rb"\{\\rtf": "RTF",
    rb"From \S+@\S+ .*\n": "mail (mbox)",
    rb"(?s:\s*\{\s*\"cells\":\s*\[)": "Jupyter notebooks",
}
"""Beginnings of files whose markup becomes text."""


class Part(NamedTuple):
    """A file, or a range of it, that is read at once.

    Attributes:
        start, end: bytes of a text, or a row group of a table. `end` 0: up to the end of the file.
        bytes: to be read, about.
    """

    path: str
    start: int = 0
    end: int = 0
    bytes: float = inf


def text_parts(path: Path, end: bytes) -> list[Part]:
    """The parts of a file, which is read as a whole, in little memory. `end`: pattern of the end of
    a document, where the file may be cut; empty if there is none. A compressed file is not cut.
    Raises: OSError or ValueError if the file is no text in UTF-8, or cannot be read."""
    can_cut = end and path.suffix.lower() not in COMPRESSED
    end_of_document = re.compile(end) if can_cut else None
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts: list[Part] = []
    start = size = undecodable = controls = 0
    with open_bytes(path) as file:
        for block in _blocks(file):
            text = decoder.decode(block, final=not block)
            undecodable += text.count("\ufffd") - block.count("\ufffd".encode())
            controls += len(block) - len(block.translate(None, CONTROLS))
            place = end_of_document.search(block, BLOCK // 2) if end_of_document else None
            if place and size - start < LARGEST:
                cut = size + place.end()
                parts.append(Part(str(path), start, cut, cut - start))
                start = cut
            size += len(block)
    if controls * 100 > size:
        format_hint = first_match(NOT_TEXT, head_of(path))
        problem = f"is not text (has {controls:,} control characters)"
        raise ValueError(f"{problem}; {format_hint}" if format_hint else problem)
    if undecodable * TRACE > size:
        hint = first_match(NOT_TEXT, head_of(path))
        if not hint:
            hint = "convert it: iconv -f cp1252 -t UTF-8 OLD > NEW, or from its own encoding"
        raise ValueError(f"is not UTF-8 (cannot decode {undecodable:,} characters); {hint}")
    return [*parts, Part(str(path), start, 0, size - start)]


def _blocks(file: io.BufferedIOBase) -> Iterator[bytes]:
    """The bytes of a file, and an empty block at its end, for the decoder."""
    while True:
        block = file.read(BLOCK)
        yield block
        if not block:
            return


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

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        try:
            data = self._file.read1(len(view))
        except EOFError as error:
            raise OSError("Truncated compressed stream") from error
        except (zlib.error, gzip.BadGzipFile) as error:
            is_rest = self._is_begun and "Not a gzipped" in str(error)
            hint = "other bytes follow its end; gzip -dc OLD > NEW leaves them out"
            raise OSError(hint if is_rest else f"is no gzip, or damaged: {error}") from error
        self._is_begun = self._is_begun or bool(data)
        view[: len(data)] = data
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
    import pyarrow  # noqa: PLC0415  heavy: few sources have such files

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
