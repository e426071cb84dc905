"""Files and datasets to documents. A document is text in parts, so that one of any length passes through little memory;
it ends before the next begins."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.account import CorpusStats
from gpt2_ddp.preparation.decode import BLOCK, open_text, read_blocks

MANY = 1000
"""If none of the first so many rows has the column, none will."""

Blocks = Iterable[str]
"""The text of a document, in parts of any size."""


class InputSplit(NamedTuple):
    """Some of the source's documents, which are one stretch of a file.

    Args:
        path: the file.
        encoding: what it is encoded in.
        size: bytes, about.
        start: the first byte, of JSON lines in UTF-8; which row group, of parquet; None: the file is one part.
        row: rows of the file before it.
    """

    path: Path
    encoding: str
    size: int
    start: int | None = None
    row: int = 0


def json_parts(path: Path) -> Iterator[InputSplit]:
    """Whole lines of an uncompressed file in UTF-8."""
    start = row = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, lines = len(block), block.count(b"\n")
            while not block.endswith(b"\n") and (block := file.readline(BLOCK)):  # a line may be of any length
                size, lines = size + len(block), lines + block.endswith(b"\n")
            yield InputSplit(path, "utf-8", size, start, row)
            start, row = start + size, row + lines


def parquet_parts(path: Path) -> Iterator[InputSplit]:
    """The row groups of a file."""
    import pyarrow.parquet

    with _whole(path), pyarrow.parquet.ParquetFile(path) as file:
        row = 0
        for index in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(index)
            yield InputSplit(path, "parquet", group.total_byte_size, index, row)
            row += group.num_rows


def text_documents(path: Path, encoding: str, documents: str) -> Iterator[Blocks]:
    """A text file as one document, or its lines or paragraphs."""
    if documents == "file":
        yield read_blocks(path, encoding)
    elif documents == "line":
        yield from split(read_blocks(path, encoding, newline=None), "\n")
    else:
        with open_text(path, encoding) as file:
            paragraphs = groupby(file, key=str.isspace)
            yield from (["".join(lines).rstrip("\r\n")] for blank, lines in paragraphs if not blank)


def split(blocks: Blocks, separator: str) -> Iterator[Blocks]:
    """The documents between separators; nothing after the last one is no document."""
    source, held = iter(blocks), ""
    for block in source:
        *whole, held = (held + block).split(separator)
        yield from ([document] for document in whole)
        if len(held) > BLOCK:
            behind: list[str] = []
            document = _until(separator, held, source, behind)
            yield document
            deque(document, 0)  # what nobody took
            *whole, held = "".join(behind).split(separator)
            yield from ([document] for document in whole)
    if held:
        yield [held]


def _until(separator: str, held: str, blocks: Iterator[str], behind: list[str]) -> Iterator[str]:
    """The text before the separator; what is behind it in its block is put into `behind`."""
    for block in blocks:
        text, found, after = (held + block).partition(separator)
        if found:
            behind.append(after)
            yield text
            return
        end = len(text) - len(separator) + 1  # it may straddle two blocks
        yield text[:end]
        held = text[end:]
    yield held


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


def json_documents(part: InputSplit, column: str, account: CorpusStats) -> Iterator[Blocks]:
    """The column of a file that has one JSON object a line."""
    path = part.path
    stretch = None if part.start is None else (part.start, part.start + part.size)
    with open_text(path, part.encoding, part=stretch) as file:
        for number, line in enumerate(file, start=part.row + 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError("source", path, f"line {number} is not JSON ({error}); one object a line") from error
            if not isinstance(row, dict):
                raise UserError("source", path, f"line {number} is not an object; write one object a line")
            del line
            yield _text(row, column, f"{path}, line {number}", account)


def check_parquet(path: Path) -> str:
    """Its name as a format; OSError or ValueError if the file is none, or is not whole."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path):
        return "parquet"


def parquet_documents(part: InputSplit, column: str, account: CorpusStats) -> Iterator[Blocks]:
    """The column of a row group."""
    import pyarrow.parquet

    path, number = part.path, part.row
    try:
        with _whole(path), pyarrow.parquet.ParquetFile(path) as file:
            names = [file.schema.column(index).path for index in range(len(file.schema))]
            present = any(f"{name}.".startswith(f"{column}.") for name in names)
            columns = [column] if present else None
            for batch in file.iter_batches(batch_size=256, row_groups=[part.start], columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield _text(row, column, f"{path}, row {number}", account)
    except UnicodeDecodeError as error:
        hint = f"holds text after row {number} that is not UTF-8 ({error}), as parquet's has to be; write it again"
        raise UserError("source", path, hint) from error


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError("source", path, f"is not a whole parquet file ({error})") from error


def hub_documents(config: PrepareConfig, account: CorpusStats) -> Iterator[Blocks]:
    """The column of a dataset on the Hub, as it arrives."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name = config.source.removeprefix("hub:")
    try:
        HfApi().dataset_info(name, revision=config.revision, timeout=10)  # load_dataset alone retries for long
        rows: Any = datasets.load_dataset(
            name, config.subset, split=config.split, revision=config.revision, streaming=True
        )
        for number, row in enumerate(rows):
            yield _text(row, config.column, f"{name}, row {number}", account)
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        hint = f"cannot be read from the Hub ({reason}); a local file or folder, or stdlib, needs no network"
        raise UserError("source", config.source, hint) from error


def check_column(column: str, account: CorpusStats) -> None:
    """Refuses a source of whose rows none has text."""
    if account.rows and account.without_text.count == account.rows:
        hint = f"none of {account.rows:,} rows has text there; the first, {account.without_text.where[0]}, has"
        raise UserError("column", column, f"{hint} {', '.join(account.columns) or 'none'}")


def _text(row: dict[str, Any], column: str, where: str, account: CorpusStats) -> Blocks:
    """The row's text, in a key of this name or below keys joined by dots."""
    account.rows += 1
    try:
        text = _value(row, column)
    except KeyError:
        account.without_column += 1
        text = None
    if not text and (text is None or isinstance(text, str)):
        account.columns = account.columns or list(_columns(row))
        account.without_text.add(where)
        return [""]
    if not isinstance(text, str):
        raise UserError("column", column, f"{where}, holds {type(text).__name__}, not text; choose another column")
    return [text] if len(text) <= BLOCK else (text[at : at + BLOCK] for at in range(0, len(text), BLOCK))


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
