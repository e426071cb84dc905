"""Bytes of a file to text: which encoding they are in, and whether they are text at all."""

import codecs
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
BLOCK = 2**20
"""Bytes, or characters, that are read at a time."""
TRACE = 10_000
"""One byte in so many may be undecodable, or a control character, in what is still taken as text."""
IN_TEXT = [bytes([byte]) for byte in b"\n\t\r\b\v\f\x1b"]
"""The control characters that texts and terminals' logs have; no text has the others."""
MARKS = {  # UTF-32's first: the shorter mark is its beginning
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class DetectedEncoding(NamedTuple):
    """What a look at a whole file has found.

    Attributes:
        encoding: Python's name of the codec to read the file with; None if it is not text.
        size: bytes, decompressed.
        undecodable: bytes that the codec cannot decode.
        line: where the first of them is, from 1.
    """

    encoding: str | None
    size: int
    undecodable: int = 0
    line: int = 0

    @property
    def garbled(self) -> bool:
        """Whether more than a trace of the file cannot be decoded."""
        return self.undecodable * TRACE > self.size


def detect_encoding(path: Path, named: str) -> DetectedEncoding:
    """Reads the whole file, in little memory, and says what it is.

    Args:
        path: a file, compressed if its suffix says so.
        named: the codec of files that are neither UTF-8 nor marked as UTF-16 or UTF-32; `auto`: there are none.

    Raises:
        OSError, ValueError: the file cannot be read, or is not what its suffix says.
    """
    with open_bytes(path) as file:
        head = file.read(BLOCK)
        if head.startswith(b"%PDF-"):  # which may be of ASCII characters alone
            return DetectedEncoding(None, len(head))
        marked = next((name for mark, name in MARKS.items() if head.startswith(mark)), None) or _wide(head)
        found, ascii_only = _scan(head, file, marked or "utf-8")
    is_utf8 = not found.undecodable and not ascii_only
    if marked or named == "auto" or is_utf8 or codecs.lookup(named).name == "utf-8":
        return found
    with open_bytes(path) as file:  # again: only the end of a file can show that it is not UTF-8
        other, is_ascii = _scan(file.read(BLOCK), file, named)
    return found if is_ascii else other


def open_bytes(path: Path) -> io.BufferedReader:
    """A file's bytes, decompressed if its suffix says so."""
    compression = COMPRESSED.get(path.suffix.lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow

    return pyarrow.input_stream(str(path), compression)  # pyright: ignore[reportReturnType]


def open_text(
    path: Path, encoding: str, newline: str | None = "", part: tuple[int, int] | None = None
) -> io.TextIOWrapper:
    """Text of a file without its byte order mark, line ends as they are; what cannot be decoded becomes U+FFFD.

    Args:
        part: the bytes [start, stop) of an uncompressed file, which begin and end where characters do; None: all.
    """
    name = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" and not (part and part[0]) else encoding
    file = open_bytes(path)
    if part:
        with file:
            file.seek(part[0])
            file = io.BytesIO(file.read(part[1] - part[0]))
    return io.TextIOWrapper(file, encoding=name, errors="replace", newline=newline)


def read_blocks(path: Path, encoding: str, newline: str | None = "") -> Iterator[str]:
    """The text of a file, in parts."""
    with open_text(path, encoding, newline) as file:
        while block := file.read(BLOCK):
            yield block


def _wide(head: bytes) -> str | None:
    """UTF-16 without a mark, where that is certain: every other byte is often NUL, those between them never."""
    for name, high, low in (("utf-16-le", head[1::2], head[::2]), ("utf-16-be", head[::2], head[1::2])):
        if high.count(0) * 20 > len(high) and not low.count(0):
            return name
    return None


def _scan(head: bytes, file: IO[bytes], encoding: str) -> tuple[DetectedEncoding, bool]:
    """What there is to say of a file, read in this encoding, and whether it is ASCII that escapes nothing."""
    decoder = codecs.getincrementaldecoder(encoding)(_note.__name__)
    size = controls = undecodable = first = lines = 0
    ascii_only, block = True, head
    while True:
        _noted.clear()
        text = decoder.decode(block, final=not block)
        if _noted:
            first = first or 1 + lines + block.count(b"\n", 0, _noted[0][0])
            undecodable += sum(end - start for start, end in _noted)
        if not block:
            break
        plain = block if encoding == "utf-8" else text.encode("utf-8", "surrogatepass")
        controls += _count_controls(plain)
        ascii_only = ascii_only and plain == block and block.isascii()
        size += len(block)
        lines += block.count(b"\n")
        block = file.read(BLOCK)
    is_text = controls * TRACE <= size
    return DetectedEncoding(encoding if is_text else None, size, undecodable, first), ascii_only


def _count_controls(text: bytes) -> int:
    """How many control characters there are that are not `IN_TEXT`."""
    found = np.count_nonzero(np.frombuffer(text, np.uint8) < 32) + text.count(b"\x7f")
    for control in IN_TEXT:  # at 7 GB/s, where `translate` has one
        found -= text.count(control) if found else 0
    return int(found)


_noted: list[tuple[int, int]] = []


def _note(error: UnicodeError) -> tuple[str, int]:
    """Replaces like `replace` and notes which bytes."""
    assert isinstance(error, UnicodeDecodeError)
    _noted.append((error.start, error.end))
    return "\ufffd", error.end


codecs.register_error(_note.__name__, _note)
