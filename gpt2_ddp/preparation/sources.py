"""Text of a source as documents: local files, the standard library's source, a dataset on the Hub.

A document is text in blocks, so documents of any length need little memory. A document ends before the next begins.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import END_OF_TEXT, replace_surrogates
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.source_files import (
    BLOCK,
    COMPRESSED,
    TRACE,
    DetectedEncoding,
    detect_encoding,
    find_files,
    open_text,
)

MANY = 1000  # the column is missing if none of the first so many rows has it
PIECE = 2**20
"""Characters after which a long document is cut, at the next place that no token of GPT-2 can cross."""
LONGEST_PIECE = 4 * PIECE  # latest cut if there is no such place, in text without words
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
JSON_LINES = {".jsonl", ".ndjson", ".json"}
USUAL = {"utf-8", "parquet"}
OF_FILES = ("encodings", "undecodable", "left_out", "as_named", "bpe_characters")
"""Statistics that reading the text again keeps."""
EXAMPLES = 3
MOST_NAMED = 100_000
"""Most files that the manifest names of those that are left out, or read in the encoding that the user named."""

Blocks = Iterable[str]  # the text of a document, in parts of any size


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
    """Counts of a source. Of its files: by encoding, undecodable, left out, read in the encoding that the user named.
    Of its text: documents, characters, UTF-8 bytes, rows, texts of the end-of-text token; characters that a BPE was
    trained on; the columns of the first row without text; an unused separator."""

    encodings: dict[str, int] = field(default_factory=dict)
    undecodable: Tally = field(default_factory=Tally)
    left_out: Tally = field(default_factory=Tally)
    as_named: Tally = field(default_factory=Tally)
    documents: int = 0
    characters: int = 0
    bytes: int = 0
    rows: int = 0
    without_text: Tally = field(default_factory=Tally)
    without_column: int = 0
    columns: list[str] = field(default_factory=list)
    end_of_text: int = 0
    bpe_characters: int = 0
    idle_separator: str | None = None


class DocumentChunk(NamedTuple):
    """Text of a document, and whether the document begins with it."""

    text: str
    first: bool


class Source:
    """The documents of a source, always in the same order. `stats`: counts of its files, by `scan`, and of what was
    read last. `unusual`: the files that are not UTF-8, with their encoding, or None for those that are left out."""

    def __init__(self, config: PrepareConfig):
        self.config, self.stats = config, CorpusStats()
        self.unusual: dict[str, str | None] = {}

    def pieces(self) -> Iterator[DocumentChunk]:
        """The documents, up to `max_documents`, cut into pieces; empty ones are left out. Counts what is read. Raises:
        UserError if the source is missing, unreadable or empty, or no row has the column."""
        for blocks in self._documents():
            for number, piece in enumerate(_cut(blocks)):
                text = piece if piece.isascii() else replace_surrogates(piece)
                self.stats.documents += number == 0
                self.stats.characters += len(text)
                self.stats.bytes += len(text) if text.isascii() else len(text.encode())
                self.stats.end_of_text += text.count(END_OF_TEXT)
                yield DocumentChunk(text, first=number == 0)

    def has_documents(self, number: int) -> bool:
        """Whether the source has at least so many documents."""
        return sum(1 for _ in islice(self._documents(), number)) == number

    def _documents(self) -> Iterator[Blocks]:
        kept = {name: getattr(self.stats, name) for name in OF_FILES}  # a source is read several times
        self.stats = CorpusStats(**kept, idle_separator=self.config.document_separator)
        yield from islice(self._divided(self._with_column(self._undivided())), self.config.max_documents)

    def _undivided(self) -> Iterator[Blocks]:
        if rows := row_source(self.config):
            yield from (self._text(row, name) for name, row in rows.rows(self.config))
            return
        for path in find_files(self.config.source, self.config.output):
            encoding, suffix = self.unusual.get(str(path), "utf-8"), _suffix(path)
            if encoding is None:
                continue
            if suffix == ".parquet":
                yield from self._of_parquet(path)
            elif suffix in JSON_LINES:
                yield from self._of_json(path, encoding)
            else:
                yield from self._of_text(path, encoding)

    def _with_column(self, documents: Iterable[Blocks]) -> Iterator[Blocks]:
        """The documents. Raises: UserError if no row of the source, or none of the first `MANY`, has text."""
        stats, column = self.stats, self.config.column
        for document in documents:
            yield document
            if stats.rows == stats.without_column == MANY:
                break
        if stats.rows and stats.without_text.count == stats.rows:
            hint = f"none of {stats.rows:,} rows has text there; columns of the first, {stats.without_text.where[0]}:"
            raise UserError("column", column, f"{hint} {', '.join(stats.columns) or 'none'}")

    def _divided(self, documents: Iterable[Blocks]) -> Iterator[Blocks]:
        separator = self.config.document_separator
        if separator is None:
            yield from documents
            return
        for document in documents:
            for number, part in enumerate(divide(document, separator)):
                if number:
                    self.stats.idle_separator = None
                yield without_line_breaks(part)

    def _of_text(self, path: Path, encoding: str) -> Iterator[Blocks]:
        """A text file as one document, or its lines or paragraphs."""
        kind = self.config.documents
        with open_text(path, encoding, None if kind == "line" else "") as file:
            blocks = iter(lambda: file.read(BLOCK), "")
            if kind == "file":
                yield blocks
            elif kind == "line":
                yield from divide(blocks, "\n")
            else:
                paragraphs = groupby(file, key=str.isspace)
                yield from (["".join(lines).rstrip("\r\n")] for blank, lines in paragraphs if not blank)

    def _of_json(self, path: Path, encoding: str) -> Iterator[Blocks]:
        """The column of a file that has one JSON object a line."""
        with open_text(path, encoding) as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    hint = f"line {number} is not JSON ({error}); write one object per line"
                    raise UserError("source", path, hint) from error
                if not isinstance(row, dict):
                    raise UserError("source", path, f"line {number} is not an object; write one object per line")
                del line
                yield self._text(row, f"{path}, line {number}")

    def _of_parquet(self, path: Path) -> Iterator[Blocks]:
        import pyarrow.parquet

        column, number = self.config.column, 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = [file.schema.column(index).path for index in range(len(file.schema))]
                present = any(f"{name}.".startswith(f"{column}.") for name in names)
                columns = [column] if present else None
                groups = range(file.num_row_groups)  # one by one: several would be read ahead
                batches = (file.iter_batches(256, [group], columns) for group in groups)
                for row in (row for group in batches for batch in group for row in batch.to_pylist()):
                    number += 1
                    yield self._text(row, f"{path}, row {number}")
        except UnicodeDecodeError as error:
            hint = f"has text after row {number} that is not UTF-8 ({error}), as parquet requires; write the file again"
            raise UserError("source", path, hint) from error
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise UserError("source", path, f"is not a complete parquet file ({error})") from error

    def _text(self, row: dict[str, Any], where: str) -> Blocks:
        """The row's text, in a key of the column's name or below keys joined by dots."""
        stats, column = self.stats, self.config.column
        stats.rows += 1
        try:
            text = _value(row, column)
        except KeyError:
            stats.without_column += 1
            text = None
        if not text and (text is None or isinstance(text, str)):
            stats.columns = stats.columns or list(_columns(row))
            stats.without_text.add(where)
            return [""]
        if not isinstance(text, str):
            raise UserError("column", column, f"{where}, has {type(text).__name__}, not text; choose another column")
        return [text] if len(text) <= BLOCK else (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))


def scan(config: PrepareConfig) -> Source:
    """Reads all files of the source completely, before any long work. Raises: UserError if there is no text, text in an
    unknown encoding, or a bad file with `on_bad_file: stop`."""
    source, garbled, bad = Source(config), Tally(), None
    stats = source.stats
    files = () if row_source(config) else find_files(config.source, config.output)
    for path in tqdm(files, desc="looking at files", unit=" files", disable=None, delay=2):
        found = _look(path, config.encoding)
        if found.fault and not (found.encoding and config.on_bad_file == "keep"):
            hint = ", or read it with on_bad_file keep" * bool(found.encoding)
            bad = bad or UserError("source", path, f"{found.fault}; choose text files, like 'texts/**/*.txt'{hint}")
            if config.on_bad_file == "stop":
                raise bad
            source.unusual[str(path)] = None
            stats.left_out.add(f"{path} {found.fault}", most=MOST_NAMED)
            continue
        if found.encoding not in USUAL:
            source.unusual[str(path)] = found.encoding
            if found.encoding == config.encoding:
                stats.as_named.add(path, most=MOST_NAMED)
        stats.encodings[found.encoding] = stats.encodings.get(found.encoding, 0) + 1
        if found.undecodable:
            stats.undecodable.add(f"{path}, line {found.line}", found.undecodable)
        if found.undecodable * TRACE > found.size and not found.fault:
            garbled.add(f"{path}, line {found.line}")
    if bad and not stats.encodings:
        raise bad
    if garbled.count:
        tried = "UTF-8" if config.encoding == "auto" else f"UTF-8 or {config.encoding}"
        hint = f"cannot decode {garbled.of('files')} as {tried}; name another, like cp1252 (UTF-8 files stay UTF-8)"
        raise UserError("encoding", config.encoding, hint)
    return source


def _look(path: Path, named: str) -> DetectedEncoding:
    try:
        if _suffix(path) != ".parquet":
            return detect_encoding(regular(path), named)
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(regular(path)):
            return DetectedEncoding("parquet", 0)
    except (OSError, ValueError) as error:  # ValueError: content and suffix differ
        return DetectedEncoding("", 0, fault=f"cannot be read ({error})")


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


def _value(row: Any, column: str) -> Any:
    if isinstance(row, dict) and column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    if not dot or not isinstance(row, dict):
        raise KeyError(column)
    return _value(row[outer], inner)


def _columns(row: dict[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in _columns(value)) if isinstance(value, dict) and value else (name,)


def _suffix(path: Path) -> str:
    """The kind of a file, without the suffix of its compression."""
    suffixes = (suffix.lower() for suffix in reversed(path.suffixes))
    return next((suffix for suffix in suffixes if suffix not in COMPRESSED), "")
