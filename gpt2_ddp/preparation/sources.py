"""Text of a source as documents: local files, the standard library's source, a dataset on the Hub.

A document is text in blocks, so documents of any length need little memory. A document ends before the next begins.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import END_OF_TEXT, replace_surrogates
from gpt2_ddp.distributed.workers import InlineExecutor, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.source_files import BLOCK, TRACE, Entry, Part, find_files, kind_of, look_at, open_text

MANY = 1000  # the column is missing if none of the first so many rows has it
PIECE = 2**20
"""Characters after which a long document is cut, at the next place that no token of GPT-2 can cross."""
LONGEST_PIECE = 4 * PIECE  # latest cut if there is no such place, in text without words
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
OF_TEXT = ("documents", "characters", "bytes", "rows", "without_column", "end_of_text")  # counts that parts add up to
EXAMPLES = 3
MOST_NAMED = 100_000
"""Most files that the manifest names of those that are left out, or read in the encoding that the user named."""

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
    """Counts of a source. Of its files: by encoding, undecodable, left out, read in the encoding that the user named.
    Of its text: documents, characters, UTF-8 bytes, rows, texts of the end-of-text token. Characters that a BPE was
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

    def add(self, other: "CorpusStats") -> None:
        """Adds the counts of text that follows."""
        for name in OF_TEXT:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.without_text.count += other.without_text.count
        self.without_text.where = [*self.without_text.where, *other.without_text.where][:EXAMPLES]
        self.columns = self.columns or other.columns
        self.idle_separator = self.idle_separator and other.idle_separator


class DocumentChunk(NamedTuple):
    """Text of a document, whether the document begins with it, and the document's split."""

    text: str
    first: bool
    split: str


class Source:
    """The documents of a source, always in the same order. `stats`: counts of its files, by `scan`, and of what was
    read last. `unusual`: the parts of files that are large or not UTF-8; none of those that are left out."""

    def __init__(self, config: PrepareConfig):
        self.config, self.stats = config, CorpusStats(idle_separator=config.document_separator)
        self.unusual: dict[str, list[Part]] = {}
        self.entries: list[Entry] = []  # of all files, if `scan` hashed them

    def parts(self) -> Iterator[Part]:
        """The files in order, large ones in parts; or all rows."""
        if row_source(self.config):
            yield Part(self.config.source)
            return
        for path in map(str, find_files(self.config.source, self.config.output)):
            size = BLOCK // 1000 + (os.path.exists(path) and os.path.getsize(path))
            yield from self.unusual.get(path, [Part(path, bytes=size)])

    def pieces(self, parts: Iterable[Part] | None = None) -> Iterator[DocumentChunk]:
        """The documents of parts, or all, up to `max_documents`, cut into pieces. Leaves out empty ones; counts what is
        read. Raises: UserError if the source is missing, unreadable or empty, or no row has the column."""
        split = ""
        for blocks in self._documents(parts):
            for number, piece in enumerate(_cut(blocks)):
                text = piece if piece.isascii() else replace_surrogates(piece)
                self.stats.documents += number == 0
                self.stats.characters += len(text)
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
        none: dict[str, Any] = dict.fromkeys(OF_TEXT, 0) | {"without_text": Tally(), "columns": []}
        self.stats = replace(self.stats, **none, idle_separator=self.config.document_separator)

    def _documents(self, parts: Iterable[Part] | None = None) -> Iterator[Blocks]:
        self.restart()
        documents = chain.from_iterable(map(self._of_part, self.parts() if parts is None else parts))
        yield from islice(self._divided(documents, whole=parts is None), self.config.max_documents)

    def _of_part(self, part: Part) -> Iterator[Blocks]:
        if rows := row_source(self.config):
            return (self._text(row, name) for name, row in rows.rows(self.config))
        readers = {"parquet": self._of_parquet, "json": self._of_json, "text": self._of_text}
        return readers[kind_of(part.path)](part)

    def check_column(self, finished: bool = False) -> None:
        """Raises: UserError if none of the rows has text, or, before all are read, `MANY` lack the column."""
        stats = self.stats
        missing, least = (stats.without_text.count, 1) if finished else (stats.without_column, MANY)
        if missing == stats.rows >= least:
            hint = f"none of {stats.rows:,} rows has text there; columns of the first, {stats.without_text.where[0]}:"
            raise UserError("column", self.config.column, f"{hint} {', '.join(stats.columns) or 'none'}")

    def _divided(self, documents: Iterable[Blocks], whole: bool) -> Iterator[Blocks]:
        """The documents between separators. `whole`: these are all documents."""
        separator = self.config.document_separator
        for document in documents:
            for number, part in enumerate(divide(document, separator) if separator else [document]):
                if number:
                    self.stats.idle_separator = None
                yield without_line_breaks(part) if separator else part
            if whole:
                self.check_column()
        if whole:
            self.check_column(finished=True)

    def _of_text(self, part: Part) -> Iterator[Blocks]:
        """A text file as one document, or its lines or paragraphs."""
        kind = self.config.documents
        with open_text(part, None if kind == "line" else "") as file:
            blocks = iter(lambda: file.read(BLOCK), "")
            if kind == "file":
                if part.start:  # the separator is before it
                    self.stats.idle_separator = None
                yield blocks
            elif kind == "line":
                yield from divide(blocks, "\n")
            else:
                paragraphs = groupby(file, key=str.isspace)
                yield from (["".join(lines).rstrip("\r\n")] for blank, lines in paragraphs if not blank)

    def _of_json(self, part: Part) -> Iterator[Blocks]:
        """The column of a file that has one JSON object a line."""
        with open_text(part) as file:
            for number, line in enumerate(file, part.lines + 1):
                if line.isspace():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    hint = f"line {number} is not JSON ({error}); write one object per line"
                    raise UserError("source", part.path, hint) from error
                if not isinstance(row, dict):
                    raise UserError("source", part.path, f"line {number} is not an object; write one object per line")
                del line
                yield self._text(row, f"{part.path}, line {number}")

    def _of_parquet(self, part: Part) -> Iterator[Blocks]:
        import pyarrow.parquet

        path, column, number = part.path, self.config.column, 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                names = [file.schema.column(index).path for index in range(len(file.schema))]
                present = any(f"{name}.".startswith(f"{column}.") for name in names)
                columns = [column] if present else None
                number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
                groups = range(part.start, part.end or file.num_row_groups)  # one by one: several would be read ahead
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


def scan(config: PrepareConfig, pool: Executor | None = None, workers: int = 1, hashed: bool = False) -> Source:
    """Reads all files completely, in the `workers` processes of `pool`. `hashed`: the source has `entries`. Raises:
    UserError if there is no text, text in an unknown encoding, or a bad file with `on_bad_file: stop`."""
    source, garbled, bad = Source(config), Tally(), None
    stats = source.stats
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
        if found.encoding != "utf-8" or found.size > BLOCK:
            source.unusual[path] = [Part(path, found.encoding, *part) for part in found.parts]
        if found.encoding == config.encoding != "utf-8":
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
