"""Text of a source as documents: local files, tables, the standard library's source, a dataset on
the Hub.

    PrepareConfig ── scan ──▶ Source     parts of all files, and what was left out
                                │
                        read_documents   a part at a time: text_files, tables or row_sources
                                │        ─▶ divide, at the separator
                        read_pieces      cut, counted, and with the split of its document
                                ▼
                         DocumentChunk ──▶ encode, split, bpe

A document is text in blocks, so documents of any length need little memory. A document ends before
the next begins. A new source of text is a format in `tables.TABLES`, or a prefix in
`row_sources.ROW_SOURCES`.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import replace_surrogates
from gpt2_ddp.data.tokenizer_file import END_OF_TEXT
from gpt2_ddp.distributed.workers import Pool, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular, size_of
from gpt2_ddp.preparation.columns import (
    UNREADABLE,
    NumberedRows,
    fault_of,
    kind_of_value,
    text_of,
)
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.preparation.row_sources import check_request, row_source
from gpt2_ddp.preparation.source_files import Entry, file_entries, find_files
from gpt2_ddp.preparation.tables import table_of
from gpt2_ddp.preparation.text_files import (
    BLOCK,
    MARKUP,
    REFUSED,
    Part,
    first_match,
    head_of,
    open_text,
    text_parts,
)

PIECE = 2**20
"""Characters after which a long document is cut, at the next place that no token of GPT-2 can
cross."""
LONGEST_PIECE = 4 * PIECE  # latest cut if there is no such place, in text without words
# after a line break or before a blank, single and between words
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")
MOST_NAMED = 100_000
"""Most files that the manifest names of those that are left out."""
WIDE = "; decompress it: zstd -d --long=31 FILE"
"""Hint for a frame of zstd whose window has more than 128 MB: other programs also refuse it by
default."""

Blocks = Iterable[str]  # the text of a document, in blocks of any size


@dataclass
class Source:
    """What `scan` finds.

    Attributes:
        parts: those of all files, in order.
        entries: the state of the files.
        left_out: the files that cannot be used, and why.
        notes: what the user may not expect.
    """

    config: PrepareConfig
    parts: list[Part]
    entries: list[Entry] = field(default_factory=list[Entry])
    left_out: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])


class FileScan(NamedTuple):
    """What `scan_file` finds.

    Attributes:
        parts: none if the file cannot be used.
        fault: why it cannot be used; empty if it can be.
        note: how it is read, where the user may not expect that; empty if there is nothing to say.
    """

    entry: Entry
    parts: list[Part]
    fault: str = ""
    note: str = ""


class DocumentChunk(NamedTuple):
    """A piece of a document.

    Attributes:
        first: whether the document begins with it.
        split: of the document, `train` or `val`.
    """

    text: str
    first: bool
    split: str


def read_pieces(
    config: PrepareConfig, parts: Iterable[Part], counts: Counter[str]
) -> Iterator[DocumentChunk]:
    """The documents of parts, up to `max_documents`, cut into pieces. Leaves out empty ones. Adds
    to `counts`: documents, bytes in UTF-8, texts of the end-of-text token, U+FFFD, separators,
    empty documents. Raises: UserError if they cannot be read."""
    for blocks in read_documents(config, parts, counts):
        split = ""
        for piece in _cut(blocks):
            text = replace_surrogates(piece)
            data = text.encode()
            is_first = not split
            if is_first:
                split = _split_of(data, config.val_fraction)
                counts["documents"] += 1
            counts["bytes"] += len(data)
            counts["end_of_text"] += text.count(END_OF_TEXT)
            counts["replaced"] += text.count("\ufffd")
            yield DocumentChunk(text, is_first, split)
        counts["empty"] += not split


def _split_of(beginning: bytes, val_fraction: float) -> str:
    """The split of a document: a function of its first piece alone."""
    digest = hashlib.sha256(beginning).digest()
    unit = int.from_bytes(digest[:6], "big") / 2**48  # in [0, 1)
    return "val" if unit < val_fraction else "train"


def read_documents(
    config: PrepareConfig, parts: Iterable[Part], counts: Counter[str] | None = None
) -> Iterator[Blocks]:
    """The documents of parts, up to `max_documents`. Adds the separators to `counts`."""
    counts = Counter() if counts is None else counts
    documents = (document for part in parts for document in _of_part(config, part, counts))
    return islice(documents, config.max_documents)


def _of_part(config: PrepareConfig, part: Part, counts: Counter[str]) -> Iterator[Blocks]:
    rows = read_rows(config, part)
    for document in _of_text(part) if rows is None else _of_rows(config, part, rows):
        if config.document_separator:
            yield from map(without_line_breaks, divide(document, config.document_separator, counts))
        else:
            yield document


def _of_text(part: Part) -> Iterator[Blocks]:
    """A text file as one document."""
    with open_text(part) as file:
        yield iter(lambda: file.read(BLOCK), "")


def _of_rows(config: PrepareConfig, part: Part, rows: NumberedRows) -> Iterator[Blocks]:
    """The column of a table."""
    try:
        for number, row in rows:
            text = text_of(row, config.column) or ""
            if not isinstance(text, str):
                problem = f"column {config.column} has {kind_of_value(text)}, not text"
                raise ValueError(f"{row_name(config, part, number)}: {problem}")
            yield (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))
    except UNREADABLE as error:
        cure = "correct the file, or remove that row, then prepare it again"
        raise UserError("source", part.path, f"cannot be read ({error}); {cure}") from error


def read_rows(config: PrepareConfig, part: Part) -> NumberedRows | None:
    """Rows of a table, or of a source of rows, with their numbers in the part, as `row_name` takes
    them; None for a file of text. Reading them raises one of UNREADABLE."""
    source = row_source(config)
    if source:
        return enumerate(source.rows(config), 1)
    table = table_of(part.path)
    return table.rows(part, config.column) if table else None


def row_name(config: PrepareConfig, part: Part, number: int) -> str:
    """Where a row is in its source, such as `line 7`."""
    table = None if row_source(config) else table_of(part.path)
    return table.row_name(part, number) if table else f"row {number:,}"


def scan(config: PrepareConfig, pool: Pool = None) -> Source:
    """Reads all files completely, in the processes of `pool`, or the first rows of a source of
    rows. Raises: UserError if there is no text."""
    check_request(config)
    return _scan_rows(config) if row_source(config) else _scan_all_files(config, pool)


def _scan_rows(config: PrepareConfig) -> Source:
    part = Part(config.source_name)
    fault = fault_of(read_rows(config, part) or (), config.column)
    if fault:
        raise UserError("source", config.source_name, fault)
    return Source(config, [part])


def _scan_all_files(config: PrepareConfig, pool: Pool) -> Source:
    source = Source(config, [])
    paths = find_files(config)
    # a file costs some time, even if it is small
    groups = batches(paths, lambda path: size_of(path) + BLOCK // 1000, BLOCK)
    scans = chain.from_iterable(in_order(partial(scan_files, config), groups, pool))
    total = sum(map(size_of, paths))
    scans = progress(scans, "looking at files", "bytes", total, lambda scan: scan.entry.bytes)
    noted: dict[str, list[Path]] = {}
    for path, scanned in zip(paths, scans, strict=True):
        source.entries.append(scanned.entry)
        source.parts += scanned.parts
        if scanned.note:
            noted.setdefault(scanned.note, []).append(path)
        if scanned.fault:
            source.left_out.append(f"{path} {scanned.fault}")
            if len(source.left_out) == len(paths):
                raise UserError("source", path, scanned.fault)
    for note, files in noted.items():
        names = f"{files[0]}" if len(files) == 1 else f"{len(files):,} files, such as {files[0]}"
        source.notes.append(f"{truncate(names)}: {note}")
    if config.column != "text" and not any(map(table_of, paths)):
        source.notes.append(f"no file is a table, so --column {config.column} has no effect")
    return source


def scan_files(config: PrepareConfig, paths: list[Path]) -> list[FileScan]:
    """Reads each file completely."""
    entries = file_entries(config, paths)
    return [scan_file(config, path, entry) for path, entry in zip(paths, entries, strict=True)]


def scan_file(config: PrepareConfig, path: Path, entry: Entry) -> FileScan:
    """The parts of a file, or why it cannot be used."""
    try:
        head = head_of(regular(path))
        refused = first_match(REFUSED, head)
        if refused:
            return FileScan(entry, [], f"cannot be read ({refused})")
        table = table_of(path)
        if table is None:
            parts = text_parts(path, _end_of_document(config.document_separator or ""))
            markup = first_match(MARKUP, head)
            note = f"{markup}, whose markup becomes text; extract the text first" if markup else ""
            return FileScan(entry, parts, note=note)
        parts = table.parts(path)
        rows = chain.from_iterable(table.rows(part, config.column) for part in parts)
        fault = fault_of(rows, config.column)
        if fault:
            return FileScan(entry, [], fault)
        return FileScan(entry, parts, note=table.note(path, config.column))
    except (OSError, ValueError) as error:  # ValueError: content and suffix differ
        hint = WIDE if "too much memory" in str(error) else ""
        return FileScan(entry, [], f"cannot be read ({error}{hint})")


def _end_of_document(separator: str) -> bytes:
    """Pattern of places where a text may be cut; empty if there are none. A separator that can
    overlap itself divides a text in another way where it is read from its middle on."""
    data = separator.encode()
    overlaps = any(data.endswith(data[:length]) for length in range(1, len(data)))
    return b"" if overlaps else re.escape(data)


def divide(blocks: Blocks, separator: str, counts: Counter[str]) -> Iterator[Blocks]:
    """The documents between separators, which are counted; nothing after the last one is no
    document."""
    for _, parts in groupby(_numbered(blocks, separator, counts), key=itemgetter(0)):
        yield (text for _, text in parts)


def _numbered(blocks: Blocks, separator: str, counts: Counter[str]) -> Iterator[tuple[int, str]]:
    """Parts of the documents between separators, with the number of the document."""
    number = 0
    held = ""
    for block in blocks:
        *ended, held = (held + block).split(separator)
        yield from enumerate(ended, number)
        number += len(ended)
        counts["separators"] += len(ended)
        if len(held) > BLOCK:
            end = len(held) - len(separator) + 1  # it may straddle two blocks
            yield number, held[:end]
            held = held[end:]
    if held:
        yield number, held


def without_line_breaks(blocks: Blocks) -> Iterator[str]:
    """The document without line breaks at its beginning and its end."""
    held = ""
    begun = False
    for block in blocks:
        block = held + block
        if not begun:
            block = block.lstrip("\r\n")
        text = block.rstrip("\r\n")
        begun = begun or bool(text)
        held = block[len(text) :]
        yield text


def _cut(blocks: Blocks) -> Iterator[str]:
    """A document in pieces, none of them empty."""
    held = ""
    for block in blocks:
        held += block
        while len(held) > PIECE:
            place = CUT.search(held, PIECE)
            if place is None and len(held) < LONGEST_PIECE:
                break
            end = place.start() if place else LONGEST_PIECE
            yield held[:end]
            held = held[end:]
    if held:
        yield held
