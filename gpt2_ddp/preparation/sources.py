"""Text of a source as documents: local files, tables (JSON lines and arrays, CSV, parquet), the
standard library's source, a dataset on the Hub.

A document is text in blocks, so documents of any length need little memory. A document ends before
the next begins.
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

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import replace_surrogates
from gpt2_ddp.data.tokenizer_file import END_OF_TEXT
from gpt2_ddp.distributed.workers import Pool, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import regular, size_of
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.preparation.row_sources import check_request, row_source
from gpt2_ddp.preparation.source_files import (
    BLOCK,
    COMPRESSED,
    MARKUP,
    REFUSED,
    Entry,
    Part,
    file_entries,
    find_files,
    first_match,
    head_of,
    kind_of,
    lines_before,
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

UNREADABLE = (
    OSError,
    EOFError,
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
CSV_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
WIDE = "; decompress it: zstd -d --long=31 FILE"
"""Hint for a frame of zstd whose window has more than 128 MB: other programs also refuse it by
default."""
EXCERPT = 30  # characters of a line that an error shows on both sides of its place
BATCH = 256  # rows of parquet that are in memory

Blocks = Iterable[str]  # the text of a document, in blocks of any size
Row = dict[str, Any]


@dataclass
class Source:
    """What `scan` finds: the parts of all files in order, the state of the files, those that are
    left out, and notes for the user."""

    config: PrepareConfig
    parts: list[Part]
    entries: list[Entry] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Look(NamedTuple):
    """What `look_at` finds of a file.

    Args:
        fault: why it cannot be used; empty if it can be.
        note: how it is read, where the user may not expect that; empty if there is nothing to say.
    """

    entry: Entry
    parts: list[Part]
    fault: str
    note: str


class DocumentChunk(NamedTuple):
    """Text of a document, whether the document begins with it, and the document's split."""

    text: str
    first: bool
    split: str


def read_pieces(
    config: PrepareConfig, parts: Iterable[Part], counts: Counter[str]
) -> Iterator[DocumentChunk]:
    """The documents of parts, up to `max_documents`, cut into pieces. Leaves out empty ones. Adds
    to `counts`: documents, bytes in UTF-8, texts of the end-of-text token, U+FFFD, separators,
    empty documents. Raises: UserError if they cannot be read."""
    split = ""
    for blocks in read_documents(config, parts, counts):
        counts["empty"] += 1
        for number, piece in enumerate(_cut(blocks)):
            counts["empty"] -= number == 0
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


def read_documents(
    config: PrepareConfig, parts: Iterable[Part], counts: Counter[str] | None = None
) -> Iterator[Blocks]:
    """The documents of parts, up to `max_documents`. Adds the separators to `counts`."""
    counts = Counter() if counts is None else counts
    documents = (document for part in parts for document in _of_part(config, part, counts))
    return islice(documents, config.max_documents)


def _of_part(config: PrepareConfig, part: Part, counts: Counter[str]) -> Iterator[Blocks]:
    is_text = row_source(config) is None and kind_of(part.path) == "text"
    for document in _of_text(part) if is_text else _of_rows(config, part):
        if config.document_separator:
            yield from map(without_line_breaks, divide(document, config.document_separator, counts))
        else:
            yield document


def _of_text(part: Part) -> Iterator[Blocks]:
    """A text file as one document."""
    with open_text(part) as file:
        yield iter(lambda: file.read(BLOCK), "")


def _of_rows(config: PrepareConfig, part: Part) -> Iterator[Blocks]:
    """The column of a table."""
    number = 0
    try:
        for number, row in read_rows(config, part):
            text = text_of(row, config.column) or ""
            if not isinstance(text, str):
                found = f"column {config.column} has {kind_of_value(text)}, not text"
                raise ValueError(f"{row_name(part, number)}: {found}")
            yield (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))
    except UNREADABLE as error:
        hint = (
            f"cannot be read ({error}); correct the file, or remove that row, then prepare it again"
        )
        raise UserError("source", part.path, hint) from error


def read_rows(config: PrepareConfig, part: Part) -> Iterator[tuple[int, Row]]:
    """Rows of a table, or of a source of rows, with their numbers in the part, as `row_name` takes
    them. Columns without the text may be missing. Raises: one of UNREADABLE."""
    if source := row_source(config):
        return enumerate(source.rows(config), 1)
    kind = kind_of(part.path)
    if kind == "parquet":
        return enumerate(_parquet_rows(part, config.column), 1)
    return _json_rows(part) if kind == "json" else _csv_rows(part, config.column)


def row_name(part: Part, number: int) -> str:
    """Where a row is in its file: `line 7`, for files with lines."""
    if kind_of(part.path) in ("json", "csv"):
        return f"line {number + (lines_before(part) if part.start else 0):,}"
    group = f" of row group {part.start + 1:,}" if kind_of(part.path) == "parquet" else ""
    return f"row {number:,}{group}"


def kind_of_value(value: object) -> str:
    """What a value is that should be text or an object, in words."""
    if is_chat(value):
        return "a chat (a list of turns)"
    words = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "a list",
        bytes: "bytes",
    }
    return words.get(
        type(value),
        "an object" if isinstance(value, dict) else "null" if value is None else "no text",
    )


def is_chat(value: object) -> bool:
    """Whether a value is a list of turns, as chat models are trained on: `{"role": ..., "content":
    ...}`."""
    turns = value if isinstance(value, list) and value else [None]
    return all(isinstance(turn, dict) and turn.keys() & {"content", "value"} for turn in turns)


def fault_of(rows: Iterable[tuple[int, Row]], column: str) -> str:
    """Why a table cannot be used, as far as its first rows show; empty if it can be."""
    columns: dict[str, Any] = {}
    other = None
    has_text = False
    try:
        for _, row in islice(rows, CHECKED):
            value = text_of(row, column)
            has_text = has_text or isinstance(value, str)
            other = other if other is not None else value
            columns |= row if not columns else {}
    except UNREADABLE as error:
        return f"cannot be read ({error})"
    if has_text or not columns:
        return ""
    if any(map(is_chat, columns.values())):
        return f"has chats, not text, in {', '.join(columns)}; write each chat as one text first (docs/data.md)"
    if other is not None:
        return f"has {kind_of_value(other)} in column {column}, not text"
    return f"has no text in column {column}, only in {', '.join(map(str, columns))}; choose another --column"


def text_of(row: Row, column: str) -> Any:
    """The value in a key of the column's name, or below keys joined by dots; None if there is none.
    Raises: ValueError for a value that has nothing below it."""
    outer, _, inner = column.partition(".")
    if not inner or column in row:
        return row.get(column)
    below = row.get(outer)
    if below is not None and not isinstance(below, dict):
        raise ValueError(f"column {outer} has {kind_of_value(below)}, so there is no {column}")
    return text_of(below or {}, inner)


def _json_rows(part: Part) -> Iterator[tuple[int, Row]]:
    """The object of each line, or the objects of an array; with the number of the line where it
    begins."""
    is_first = not part.start
    with open_text(part) as file:
        for number, line in enumerate(file, 1):
            line = line.lstrip("\ufeff")  # of a file that was joined to another
            if not line or line.isspace():
                continue
            is_array = is_first and line.lstrip().startswith("[")
            is_first = False
            text = line + file.read() if is_array else line
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(_json_problem(part, number, text, error)) from error
            for row in value if is_array else [value]:
                if not isinstance(row, dict):
                    excerpt = truncate(text.strip(), 2 * EXCERPT)
                    found = f"has {kind_of_value(row)} instead of an object with columns: {excerpt}"
                    raise ValueError(f"{row_name(part, number)} {found}")
                yield number, row


def _json_problem(part: Part, number: int, text: str, error: Exception) -> str:
    """Where JSON is wrong: line of the file, column, an excerpt, and what is expected."""
    if not isinstance(error, json.JSONDecodeError):
        problem = (
            "is nested too deeply"
            if isinstance(error, RecursionError)
            else "a number has too many digits"
        )
        return f"{row_name(part, number)}: {problem}; correct or remove it"
    excerpt = truncate(text[max(error.pos - EXCERPT, 0) : error.pos + EXCERPT].strip(), 3 * EXCERPT)
    place = f"{row_name(part, number + error.lineno - 1)}, column {error.colno:,}"
    hint = "; write each object in one line, or all as one array" if text.strip() == "{" else ""
    return f"{place}: {error.msg}: {excerpt}{hint}"


def _csv_rows(part: Part, column: str) -> Iterator[tuple[int, Row]]:
    """The fields of each row, with the number of its last line. Unlike pandas, refuses a row with
    more fields than the first one."""
    csv.field_size_limit(LONGEST_FIELD)
    with open_text(part) as file:
        first = next((line for line in file if not line.isspace()), "")
        options = csv_options(part, first, column)
        names: list[str] = next(csv.reader([first], strict=True, **options), [])
        if names.count(column) > 1:
            raise ValueError(
                f"column {column} is named {names.count(column)} times in the first line"
            )
        wanted = names.index(column) if column in names else 0
        is_plain = options["quoting"] == csv.QUOTE_NONE
        rows = csv.reader(file, strict=True, **options)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                raise ValueError(
                    f"line {rows.line_num + 1:,}: {error}; is a quotation mark missing?"
                ) from error
            number = rows.line_num + 1
            if len(row) > len(names):
                hint = (
                    "a text has a tab"
                    if is_plain
                    else "put fields that have a separator in quotation marks"
                )
                raise ValueError(
                    f"line {number:,} has {len(row)} fields, the first line has {len(names)}; {hint}"
                )
            if is_plain and 0 < len(row) <= wanted:
                hint = "a field of TSV has no line break; a file with fields in quotation marks is CSV: name it .csv"
                raise ValueError(f"line {number:,} has {len(row)} of {len(names)} fields; {hint}")
            if row:
                yield number, dict(zip(names, row, strict=False))


def csv_options(part: Part, first: str, column: str) -> dict[str, Any]:
    """How fields are written, by the suffix and the first line. TSV has tabs and no quoting, unless
    its first line has quotation marks. CSV has commas; or semicolons, tabs or bars if only they
    give the column."""
    if ".tsv" in part.path.lower():
        return {
            "delimiter": "\t",
            "quoting": csv.QUOTE_MINIMAL if first.startswith('"') else csv.QUOTE_NONE,
        }
    fitting = (
        mark for mark in CSV_SEPARATORS if column in next(csv.reader([first], delimiter=mark), [])
    )
    return {"delimiter": next(fitting, ","), "quoting": csv.QUOTE_MINIMAL}


def csv_note(path: Path, column: str) -> str:
    """What a reader of a CSV or TSV file may not expect: another separator, quotation marks that
    are text."""
    part = Part(str(path))
    with open_text(part) as file:
        first = next((line for line in file if not line.isspace()), "")
    options = csv_options(part, first, column)
    if options["quoting"] == csv.QUOTE_NONE:
        texts = (str(row.get(column)) for _, row in islice(_csv_rows(part, column), CHECKED))
        if any(len(text) > 1 and text.startswith('"') and text.endswith('"') for text in texts):
            return "texts keep their quotation marks, as in TSV; if a program wrote it like CSV, name it .csv"
        return ""
    is_usual = ".tsv" in part.path.lower() or options["delimiter"] == ","
    return (
        ""
        if is_usual
        else f"{CSV_SEPARATORS[options['delimiter']]} are read as the marks between fields"
    )


def _parquet_rows(part: Part, column: str) -> Iterator[Row]:
    """The rows of a row group. Reads only the column, or the one that has the nested column."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(part.path) as file:
        outer = column.partition(".")[0]
        columns = [outer] if outer in file.schema_arrow.names else None
        for batch in file.iter_batches(BATCH, [part.start], columns):
            yield from batch.to_pylist()


def look_at(config: PrepareConfig, paths: list[Path]) -> list[Look]:
    """The state and the parts of each file, and what there is to say of it."""
    found = []
    for path, entry in zip(paths, file_entries(config, paths), strict=True):
        kind = kind_of(path)
        parts = []
        note = ""
        try:
            head = head_of(regular(path))
            if refused := first_match(REFUSED, head):
                raise ValueError(refused)
            parts = (
                _row_groups(path)
                if kind == "parquet"
                else text_parts(path, _end_of_document(path, config))
            )
            rows = (row for part in parts for row in read_rows(config, part))
            fault = fault_of(rows, config.column) if kind != "text" else ""
            if kind == "text":
                markup = first_match(MARKUP, head)
                note = markup and f"{markup}, whose markup becomes text; extract the text first"
            elif kind == "csv" and not fault:
                note = csv_note(path, config.column)
        except (OSError, ValueError) as error:  # ValueError: content and suffix differ
            fault = f"cannot be read ({error}{WIDE if 'too much memory' in str(error) else ''})"
        found.append(Look(entry, [] if fault else parts, fault, note))
    return found


def _row_groups(path: Path) -> list[Part]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        sizes = [
            file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)
        ]
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
    """Reads all files completely, in the processes of `pool`, or the first rows of a source of
    rows. Raises: UserError if there is no text."""
    check_request(config)
    found = Source(config, [Part(config.source_name)])
    if row_source(config):
        if fault := fault_of(read_rows(config, *found.parts), config.column):
            raise UserError("source", config.source_name, fault)
        return found
    found.parts.clear()
    paths = find_files(config)
    files = batches(paths, lambda path: size_of(path) + BLOCK // 1000, BLOCK)
    looks = chain.from_iterable(in_order(partial(look_at, config), files, pool))
    noted: dict[str, list[Path]] = {}
    looks = progress(
        looks, "looking at files", "bytes", sum(map(size_of, paths)), lambda look: look.entry.bytes
    )
    for path, look in zip(paths, looks, strict=True):
        found.entries.append(look.entry)
        found.parts += look.parts
        if look.note:
            noted.setdefault(look.note, []).append(path)
        if look.fault:
            found.left_out.append(f"{path} {look.fault}")
            if len(found.left_out) == len(paths):
                raise UserError("source", path, look.fault)
    for note, files in noted.items():
        names = f"{files[0]}" if len(files) == 1 else f"{len(files):,} files, such as {files[0]}"
        found.notes.append(f"{truncate(names)}: {note}")
    if config.column != "text" and all(kind_of(path) == "text" for path in paths):
        found.notes.append(f"no file is a table, so --column {config.column} has no effect")
    return found


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
        *whole, held = (held + block).split(separator)
        yield from enumerate(whole, number)
        number += len(whole)
        counts["separators"] += len(whole)
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
