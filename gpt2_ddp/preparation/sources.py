"""Text of a source as documents: local files, tables (JSON lines and arrays, CSV, parquet), the standard library's
source, a dataset on the Hub.

A document is text in blocks, so documents of any length need little memory. A document ends before the next begins.
"""

import csv
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.alphabet import END_OF_TEXT
from gpt2_ddp.data.tokenizer import replace_surrogates
from gpt2_ddp.distributed.workers import Pool, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular, size_of
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.source_files import (
    BLOCK,
    COMPRESSED,
    Entry,
    Part,
    file_entries,
    find_files,
    kind_of,
    open_text,
    text_parts,
)

PIECE = 2**20
"""Characters after which a long document is cut, at the next place that no token of GPT-2 can cross."""
LONGEST_PIECE = 4 * PIECE  # latest cut if there is no such place, in text without words
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
MOST_NAMED = 100_000
"""Most files that the manifest names of those that are left out."""

UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
    NotImplementedError,
    csv.Error,
)
"""Errors of readers at damaged or unsuitable tables."""
CHECKED = 1000  # rows of a table that the check reads
LONGEST_FIELD = 2**31 - 1  # characters of a field of CSV
BATCH = 256  # rows of parquet that are in memory

Blocks = Iterable[str]  # the text of a document, in blocks of any size
Row = dict[str, Any]


@dataclass
class Source:
    """What `scan` finds: the parts of all files in order, the state of the files, and those that are left out."""

    config: PrepareConfig
    parts: list[Part]
    entries: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


class DocumentChunk(NamedTuple):
    """Text of a document, whether the document begins with it, and the document's split."""

    text: str
    first: bool
    split: str


def read_pieces(config: PrepareConfig, parts: Iterable[Part], counts: Counter[str]) -> Iterator[DocumentChunk]:
    """The documents of parts, up to `max_documents`, cut into pieces. Leaves out empty ones. Adds to `counts`:
    documents, bytes in UTF-8, texts of the end-of-text token, U+FFFD. Raises: UserError if they cannot be read."""
    split = ""
    for blocks in read_documents(config, parts):
        for number, piece in enumerate(_cut(blocks)):
            text = replace_surrogates(piece)
            data = text.encode()
            counts["documents"] += number == 0
            counts["bytes"] += len(data)
            counts["end_of_text"] += text.count(END_OF_TEXT)
            counts["replaced"] += text.count("\ufffd")
            if number == 0:  # in [0, 1), a function of the text alone
                unit = int.from_bytes(hashlib.sha256(data).digest()[:6], "big") / 2**48
                split = "val" if unit < config.val_fraction else "train"
            yield DocumentChunk(text, number == 0, split)


def read_documents(config: PrepareConfig, parts: Iterable[Part]) -> Iterator[Blocks]:
    """The documents of parts, up to `max_documents`."""
    documents = (document for part in parts for document in _of_part(config, part))
    return islice(documents, config.max_documents)


def _of_part(config: PrepareConfig, part: Part) -> Iterator[Blocks]:
    is_text = row_source(config) is None and kind_of(part.path) == "text"
    for document in _of_text(part) if is_text else _of_rows(config, part):
        if config.document_separator:
            yield from map(without_line_breaks, divide(document, config.document_separator))
        else:
            yield document


def _of_text(part: Part) -> Iterator[Blocks]:
    """A text file as one document."""
    with open_text(part) as file:
        yield iter(lambda: file.read(BLOCK), "")


def _of_rows(config: PrepareConfig, part: Part) -> Iterator[Blocks]:
    """The column of a table."""
    try:
        for row in read_rows(config, part):
            text = text_of(row, config.column) or ""
            if not isinstance(text, str):
                raise TypeError(f"column {config.column} has {text}, not text")
            yield (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))
    except UNREADABLE as error:
        line = getattr(error, "doc", "")  # of JSON
        hint = f"cannot be read ({error}) {truncate(line, 60)}"
        raise UserError("source", part.path, hint) from error


def read_rows(config: PrepareConfig, part: Part) -> Iterator[Row]:
    """Rows of a table, or of a source of rows. Columns without the text may be missing. Raises: one of UNREADABLE."""
    if source := row_source(config):
        return source.rows(config)
    kind = kind_of(part.path)
    if kind == "parquet":
        return _parquet_rows(part, config.column)
    return _json_rows(part) if kind == "json" else _csv_rows(part)


def fault_of(rows: Iterable[Row], column: str) -> str:
    """Why a table cannot be used, as far as its first rows show; empty if it can be."""
    row: Row = {}
    has_text = False
    try:
        for row in islice(rows, CHECKED):
            has_text = has_text or isinstance(text_of(row, column), str)
    except UNREADABLE as error:
        return f"cannot be read ({error})"
    return f"has no text in column {column}, only in {', '.join(row)}" if row and not has_text else ""


def text_of(row: Row, column: str) -> Any:
    """The value in a key of the column's name, or below keys joined by dots; None if there is none."""
    outer, _, inner = column.partition(".")
    if inner and column not in row:
        return text_of(row.get(outer) or {}, inner)
    return row.get(column)


def _json_rows(part: Part) -> Iterator[Row]:
    with open_text(part) as file:
        for line in file:
            if line.lstrip().startswith("["):
                yield from json.loads(line + file.read())
            elif not line.isspace():
                yield json.loads(line)


def _csv_rows(part: Part) -> Iterator[Row]:
    """Unlike pandas, refuses a line with more fields than the first one."""
    csv.field_size_limit(LONGEST_FIELD)
    with open_text(part) as file:
        for row in csv.DictReader(file, delimiter="\t" if ".tsv" in part.path.lower() else ",", strict=True):
            if None in row:
                raise ValueError(f"{row} has more fields than the first line")
            yield row


def _parquet_rows(part: Part, column: str) -> Iterator[Row]:
    """The rows of a row group. Reads only the column, or the one that has the nested column."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(part.path) as file:
        outer = column.partition(".")[0]
        columns = [outer] if outer in file.schema_arrow.names else None
        for batch in file.iter_batches(BATCH, [part.start], columns):
            yield from batch.to_pylist()


def look_at(config: PrepareConfig, paths: list[Path]) -> list[tuple[Entry, list[Part], str]]:
    """The state and the parts of each file, and why it cannot be used."""
    found = []
    for path, entry in zip(paths, file_entries(config, paths), strict=True):
        kind, parts = kind_of(path), []
        try:
            regular(path)
            parts = _row_groups(path) if kind == "parquet" else text_parts(path, _end_of_document(path, config))
            rows = (row for part in parts for row in read_rows(config, part))
            fault = fault_of(rows, config.column) if kind != "text" else ""
        except (OSError, ValueError) as error:  # ValueError: content and suffix differ
            fault = f"cannot be read ({error})"
        found.append((entry, [] if fault else parts, fault))
    return found


def _row_groups(path: Path) -> list[Part]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    return [Part(str(path), start=group, bytes=size) for group, size in enumerate(sizes)]


def _end_of_document(path: Path, config: PrepareConfig) -> bytes:
    """Pattern of places where a file of UTF-8 may be cut; empty if there are none."""
    suffix = path.suffix.lower()
    is_text = suffix not in COMPRESSED and kind_of(path) == "text"
    if suffix in (".jsonl", ".ndjson"):
        return b"\n"
    separator = (config.document_separator or "").encode()
    straddles = any(separator.endswith(separator[:length]) for length in range(1, len(separator)))
    return re.escape(separator) if is_text and not straddles else b""


def scan(config: PrepareConfig, pool: Pool = None) -> Source:
    """Reads all files completely, in the processes of `pool`, or the first rows of a source of rows. Raises: UserError
    if there is no text."""
    found = Source(config, [Part(config.source)])
    if row_source(config):
        if fault := fault_of(read_rows(config, *found.parts), config.column):
            raise UserError("source", config.source, fault)
        return found
    found.parts.clear()
    paths = find_files(config.source, config.output)
    files = batches(paths, lambda path: size_of(path) + BLOCK // 1000, BLOCK)
    looks = chain.from_iterable(in_order(partial(look_at, config), files, pool))
    progress = tqdm(looks, desc="looking at files", unit=" files", disable=None, delay=2)
    for path, (entry, parts, fault) in zip(paths, progress, strict=True):
        found.entries.append(entry)
        found.parts += parts
        if fault:
            found.left_out.append(f"{path} {fault}")
            if len(found.left_out) == len(paths):
                raise UserError("source", path, fault)
    return found


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
