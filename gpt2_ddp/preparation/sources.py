"""Text of a source as documents: local files, the standard library's source, a dataset on the Hub.

A document is text in blocks, so documents of any length need little memory. A document ends before the next begins.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import END_OF_TEXT, replace_surrogates
from gpt2_ddp.distributed.workers import InlineExecutor, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.rows import LACKS, UNREADABLE, fault_of, has_column, read_rows, value_of
from gpt2_ddp.preparation.source_files import (
    BLOCK,
    COMPRESSED,
    TRACE,
    DetectedEncoding,
    Entry,
    Part,
    detect_encoding,
    file_entries,
    find_files,
    kind_of,
    open_bytes,
    open_text,
)

PIECE = 2**20
"""Characters after which a long document is cut, at the next place that no token of GPT-2 can cross."""
LONGEST_PIECE = 4 * PIECE  # latest cut if there is no such place, in text without words
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
OF_TEXT = ("documents", "bytes", "rows", "end_of_text")  # counts that parts add up to
EXAMPLES = 3
MOST_NAMED = 100_000
"""Most files that the manifest names of those that are left out."""

Blocks = Iterable[str]  # the text of a document, in blocks of any size


@dataclass
class Tally:
    """A count, and the places of the first few items."""

    count: int = 0
    where: list[str] = field(default_factory=list)

    def add(self, where: object, count: int = 1, most: int = EXAMPLES) -> None:
        """Adds to the count; keeps the first `most` places."""
        self.count += count
        if len(self.where) < most:
            self.where.append(truncate(where, 5000))

    def of(self, unit: str) -> str:
        """Text like `2 files (a; b)`."""
        first = list(map(truncate, self.where[:EXAMPLES]))
        more = ["..."] * (self.count > len(first) >= EXAMPLES)
        places = f" ({'; '.join([*first, *more])})" * bool(first)
        return f"{self.count:,} {unit[: -1 if self.count == 1 else None]}{places}"


@dataclass
class CorpusStats:
    """Counts of a source. Of its files: by encoding, undecodable, left out.
    Of its text: documents, UTF-8 bytes, rows, rows without text, texts of the end-of-text token."""

    encodings: dict[str, int] = field(default_factory=dict)
    undecodable: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    documents: int = 0
    bytes: int = 0
    rows: int = 0
    without_text: Tally = field(default_factory=Tally)
    end_of_text: int = 0

    def add(self, other: "CorpusStats") -> None:
        """Adds the counts of text that follows."""
        for name in OF_TEXT:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.without_text.count += other.without_text.count
        self.without_text.where = [*self.without_text.where, *other.without_text.where][:EXAMPLES]


class DocumentChunk(NamedTuple):
    """Text of a document, whether the document begins with it, and the document's split."""

    text: str
    first: bool
    split: str


class Source:
    """The documents of a source, always in the same order. `stats`: counts of its files, by `scan`, and of what was
    read last. `unusual`: the parts of files that are large or not UTF-8; none of those that are left out."""

    def __init__(self, config: PrepareConfig):
        self.config, self.stats = config, CorpusStats()
        self.unusual: dict[str, list[Part]] = {}
        self.entries: list[Entry] = []  # of all files, if `scan` hashed them

    def parts(self) -> Iterator[Part]:
        """The files in order, large ones in parts; or all rows."""
        if row_source(self.config):
            yield Part(self.config.source)
            return
        for path in map(str, find_files(self.config.source, self.config.output, self.config.split)):
            size = BLOCK // 1000 + (os.path.exists(path) and os.path.getsize(path))
            yield from self.unusual.get(path, [Part(path, bytes=size)])

    def pieces(self, parts: Iterable[Part] | None = None) -> Iterator[DocumentChunk]:
        """The documents of parts, or all, up to `max_documents`, cut into pieces. Leaves out empty ones; counts what is
        read. Raises: UserError if the source is missing or unreadable."""
        split = ""
        for blocks in self._documents(parts):
            for number, piece in enumerate(_cut(blocks)):
                text = piece if piece.isascii() else replace_surrogates(piece)
                self.stats.documents += number == 0
                self.stats.bytes += len(text) if text.isascii() else len(text.encode())
                self.stats.end_of_text += text.count(END_OF_TEXT)
                if number == 0:  # in [0, 1), a function of the text alone
                    unit = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
                    split = "val" if unit < self.config.val_fraction else "train"
                yield DocumentChunk(text, number == 0, split)

    def has_documents(self, number: int) -> bool:
        """Whether the source has at least so many documents."""
        return sum(1 for _ in islice(self._documents(), number)) == number

    def restart(self) -> None:
        """Sets the counts of text to 0: a source is read several times."""
        self.stats = replace(self.stats, **dict.fromkeys(OF_TEXT, 0), without_text=Tally())

    def _documents(self, parts: Iterable[Part] | None = None) -> Iterator[Blocks]:
        self.restart()
        documents = chain.from_iterable(map(self._of_part, self.parts() if parts is None else parts))
        yield from islice(self._divided(documents), self.config.max_documents)

    def _of_part(self, part: Part) -> Iterator[Blocks]:
        if rows := row_source(self.config):
            return (self._text(row, name) for name, row in rows.rows(self.config))
        return self._of_text(part) if kind_of(part.path) == "text" else self._of_rows(part)

    def _divided(self, documents: Iterable[Blocks]) -> Iterator[Blocks]:
        """The documents between separators."""
        separator = self.config.document_separator
        for document in documents:
            for part in divide(document, separator) if separator else [document]:
                yield without_line_breaks(part) if separator else part

    def _of_text(self, part: Part) -> Iterator[Blocks]:
        """A text file as one document, or its lines or paragraphs."""
        kind = self.config.documents
        with open_text(part, None if kind == "line" else "") as file:
            blocks = iter(lambda: file.read(BLOCK), "")
            if kind == "file":
                yield blocks
            elif kind == "line":
                yield from divide(blocks, "\n")
            else:
                paragraphs = groupby(file, key=str.isspace)
                yield from (["".join(lines).rstrip("\r\n")] for blank, lines in paragraphs if not blank)

    def _of_rows(self, part: Part) -> Iterator[Blocks]:
        """The column of a table."""
        name = "its beginning"
        try:
            for name, row in read_rows(part, self.config.column):
                yield self._text(row, f"{part.path}, {name}")
        except UNREADABLE as error:
            raise UserError("source", part.path, f"cannot be read after {name}: {error}") from error

    def _text(self, row: dict[str, Any], where: str) -> Blocks:
        """The row's text, in a key of the column's name or below keys joined by dots."""
        stats, column = self.stats, self.config.column
        stats.rows += 1
        text = value_of(row, column) if has_column(row, column) else None
        if not text and (text is None or isinstance(text, str)):
            stats.without_text.add(where)
            return [""]
        if not isinstance(text, str):
            raise UserError("column", column, f"{where}, has {type(text).__name__}, not text; choose another column")
        return [text] if len(text) <= BLOCK else (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))


def look_at(config: PrepareConfig, hashed: bool, files: list[Part]) -> list[tuple[str, list[Entry], DetectedEncoding]]:
    """The name, the state if `hashed`, and the encoding of each file."""
    paths = [Path(file.path) for file in files]
    return [(str(path), list(file_entries(config, [path] * hashed)), _look(path, config)) for path in paths]


def _look(path: Path, config: PrepareConfig) -> DetectedEncoding:
    kind = kind_of(path)
    try:
        size = regular(path).stat().st_size
        if kind == "parquet":
            found = DetectedEncoding(kind, size, parts=_row_groups(path))
        elif kind == "arrow":
            found = DetectedEncoding(kind, size, parts=[(0, 0, 0, size)])
        else:
            found = detect_encoding(path, config.encoding, _end_of_document(path, config))
    except (OSError, ValueError) as error:  # ValueError: content and suffix differ
        return DetectedEncoding("", 0, fault=f"cannot be read ({error})")
    fault = (
        ""
        if kind == "text" or found.fault
        else fault_of(read_rows(Part(str(path), found.encoding), config.column), config.column)
    )
    return found._replace(encoding="", fault=fault) if fault else found


def _row_groups(path: Path) -> list[tuple[int, int, int, int]]:
    """The last fields of each `Part` of a parquet file."""
    import pyarrow.parquet

    parts, rows = [], 0
    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
    for part in batches(range(len(groups)), lambda number: groups[number].total_byte_size, BLOCK):
        inside = groups[part[0] : part[-1] + 1]
        parts.append((part[0], part[-1] + 1, rows, sum(group.total_byte_size for group in inside)))
        rows += sum(group.num_rows for group in inside)
    return parts


def _end_of_document(path: Path, config: PrepareConfig) -> bytes:
    """Pattern of places where a file of UTF-8 may be cut; empty if there are none."""
    kind = kind_of(path)
    if path.suffix.lower() in COMPRESSED or kind == "csv":
        return b""
    if kind == "json":
        with open_bytes(path) as file:
            return b"" if file.read(100).lstrip(b"\xef\xbb\xbf \r\n\t").startswith(b"[") else b"\n"
    separator = (config.document_separator or "").encode()
    overlaps = [length for length in range(1, len(separator)) if separator.endswith(separator[:length])]
    alone = b"".join(b"(?<!%b)" % re.escape(separator[:-length]) for length in overlaps)  # no other one straddles it
    ends = {"file": separator and alone + re.escape(separator), "line": b"\n", "paragraph": rb"\n\r?\n"}
    return ends[config.documents]


def scan(config: PrepareConfig, pool: Executor | None = None, workers: int = 1, hashed: bool = False) -> Source:
    """Reads all files completely, in the `workers` processes of `pool`. `hashed`: the source has `entries`. Raises:
    UserError if there is no text, text in an unknown encoding, or a bad file with `on_bad_file: stop`."""
    source, garbled, bad = Source(config), Tally(), None
    stats, tables = source.stats, 0
    files = batches(() if row_source(config) else source.parts(), lambda part: part.bytes, BLOCK)
    looks = chain.from_iterable(in_order(partial(look_at, config, hashed), files, pool or InlineExecutor(), workers))
    for path, entry, found in tqdm(looks, desc="looking at files", unit=" files", disable=None, delay=2):
        source.entries += entry
        if found.fault and not (found.encoding and config.on_bad_file == "keep"):
            hint = ", or read it with on_bad_file keep" * bool(found.encoding)
            bad = bad or UserError("source", path, f"{found.fault}; choose text files, like 'texts/**/*.txt'{hint}")
            if config.on_bad_file == "stop":
                raise bad
            source.unusual[path] = []
            stats.left_out.add(f"{path} {found.fault}", most=MOST_NAMED)
            continue
        tables += kind_of(path) != "text"
        _take(source, path, found, garbled)
    if not tables and not row_source(config):
        _check_column(config, stats)
    if bad and not stats.encodings:
        raise bad
    if garbled.count:
        tried = "UTF-8" if config.encoding == "auto" else f"UTF-8 or {config.encoding}"
        hint = f"cannot decode {garbled.of('files')} as {tried}; name another, like cp1252 (UTF-8 files stay UTF-8)"
        raise UserError("encoding", config.encoding, hint)
    return source


def _take(source: Source, path: str, found: DetectedEncoding, garbled: Tally) -> None:
    """Counts a file that is read, and keeps its parts if they are unusual."""
    if found.encoding != "utf-8" or found.size > BLOCK:
        source.unusual[path] = [Part(path, found.encoding, *part) for part in found.parts]
    source.stats.encodings[found.encoding] = source.stats.encodings.get(found.encoding, 0) + 1
    if found.undecodable:
        source.stats.undecodable.add(f"{path}, line {found.line}", found.undecodable)
    if found.undecodable * TRACE > found.size and not found.fault:
        garbled.add(f"{path}, line {found.line}")


def _check_column(config: PrepareConfig, stats: CorpusStats) -> None:
    """Raises: UserError if the user named a column, or nothing but tables without it was found. No table is read."""
    lacking = any(LACKS in where for where in stats.left_out.where)
    if config.column != "text" or (lacking and not stats.encodings):
        hint = f"is in no file of the source ({stats.left_out.of('files')} left out); text files have no columns"
        raise UserError("column", config.column, hint)


def divide(blocks: Blocks, separator: str) -> Iterator[Blocks]:
    """The documents between separators; nothing after the last one is no document."""
    for _, parts in groupby(_numbered(blocks, separator), key=itemgetter(0)):
        yield (text for _, text in parts)


def _numbered(blocks: Blocks, separator: str) -> Iterator[tuple[int, str]]:
    """Parts of the documents between separators, with the number of the document."""
    number, held = 0, ""
    for block in blocks:
        *whole, held = (held + block).split(separator)
        yield from enumerate(whole, number)
        number += len(whole)
        if len(held) > BLOCK:
            end = len(held) - len(separator) + 1  # it may straddle two blocks
            yield number, held[:end]
            held = held[end:]
    if held:
        yield number, held


def without_line_breaks(blocks: Blocks) -> Iterator[str]:
    """The document without line breaks at its beginning and its end."""
    held, begun = "", False
    for block in blocks:
        block = held + block
        if not begun:
            block = block.lstrip("\r\n")
        text = block.rstrip("\r\n")
        begun, held = begun or bool(text), block[len(text) :]
        yield text


def _cut(blocks: Blocks) -> Iterator[str]:
    held = ""
    for block in blocks:
        held += block
        while len(held) > PIECE:
            found = CUT.search(held, PIECE)
            if found is None and len(held) < LONGEST_PIECE:
                break
            end = found.start() if found else LONGEST_PIECE
            yield held[:end]
            held = held[end:]
    if held:
        yield held
