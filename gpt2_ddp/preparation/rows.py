"""Rows of tables: JSON lines and arrays, CSV, parquet and Arrow. A row is a value by column."""

import csv
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from gpt2_ddp.preparation.source_files import Part, kind_of, open_text

Row = dict[str, Any]
UNREADABLE = (OSError, ValueError, TypeError, LookupError, RecursionError, NotImplementedError, csv.Error)
"""Errors of readers at damaged or unsuitable files."""
CHECKED = 1000  # rows of a file that the check reads
BATCH = 256  # rows of parquet that are in memory
LONGEST_FIELD = 2**31 - 1  # characters of a field of CSV


def read_rows(part: Part, column: str) -> Iterator[tuple[str, Row]]:
    """Each row of a table, with its name in the file. Columns without the text may be missing. Raises: one of
    UNREADABLE."""
    kind = kind_of(part.path)
    if kind == "json":
        return _json_rows(part)
    return _csv_rows(part) if kind == "csv" else _arrow_rows(part, column)


def fault_of(rows: Iterator[tuple[str, Row]], column: str) -> str:
    """Why a table cannot be used, as far as its first rows show; empty if it can be."""
    columns: list[str] = []
    lacking = True
    try:
        for _, row in islice(rows, CHECKED):
            columns = columns or list(columns_of(row))
            lacking = lacking and not has_column(row, column)
    except UNREADABLE as error:
        return f"cannot be read ({error})"
    return f"{LACKS} {column}, only {', '.join(columns)}" if lacking and columns else ""


LACKS = "has no column"


def has_column(row: Row, column: str) -> bool:
    """Whether the row has a value, or null, for a column."""
    try:
        value_of(row, column)
    except KeyError:
        return False
    return True


def value_of(row: Any, column: str) -> Any:
    """The value in a key of the column's name, or below keys joined by dots. Raises: KeyError if there is none."""
    if isinstance(row, dict) and column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    if not dot or not isinstance(row, dict):
        raise KeyError(column)
    return value_of(row[outer], inner)


def columns_of(row: Row) -> Iterator[str]:
    """The names of a row's columns; those below a column are joined by dots."""
    for name, value in row.items():
        yield from (f"{name}.{inner}" for inner in columns_of(value)) if isinstance(value, dict) and value else (name,)


def _json_rows(part: Part) -> Iterator[tuple[str, Row]]:
    with open_text(part) as file:
        for number, line in enumerate(file, part.lines + 1):
            if line.isspace():
                continue
            if number == 1 and line.lstrip().startswith("["):
                rows = json.loads(line + file.read())
                yield from ((f"row {number}", _object(row, f"row {number}")) for number, row in enumerate(rows, 1))
                return
            name = f"line {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{name} is not JSON ({error}); write one object per line, or an array") from error
            del line
            yield name, _object(row, name)


def _object(row: Any, name: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{name} is not an object")
    return row


def _csv_rows(part: Part) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(LONGEST_FIELD)
    separator = "\t" if ".tsv" in part.path.lower() else ","
    with open_text(part) as file:
        reader = csv.DictReader(file, delimiter=separator, strict=True)
        for row in reader:
            name = f"line {reader.line_num}"
            if None in row:
                raise ValueError(f"{name} has more fields than the first line")
            yield name, row


def _arrow_rows(part: Part, column: str) -> Iterator[tuple[str, Row]]:
    rows = (row for batch in _batches(part, column) for row in batch.to_pylist())
    for number, row in enumerate(rows, part.lines + 1):
        yield f"row {number}", row


def _batches(part: Part, column: str) -> Iterator[Any]:
    """Arrow's record batches of a parquet or Arrow file: of parquet, only the column, if there is one of its name."""
    import pyarrow.parquet

    if kind_of(part.path) == "parquet":
        with pyarrow.parquet.ParquetFile(part.path) as file:
            names = [file.schema.column(index).path for index in range(len(file.schema))]
            present = any(f"{name}.".startswith(f"{column}.") for name in names)
            for group in range(part.start, part.end or file.num_row_groups):  # several would be read ahead
                yield from file.iter_batches(BATCH, [group], [column] if present else None)
        return
    with pyarrow.OSFile(part.path) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:  # the format with an index at its end
            table = pyarrow.ipc.open_file(file)
            reader = map(table.get_batch, range(table.num_record_batches))
        yield from reader
