"""Rows of tables: JSON lines and arrays, CSV, parquet, and the Arrow files that `datasets` reads."""

import csv
import glob
import json
import os
import threading
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tqdm import tqdm

from gpt2_ddp.preparation.source_files import Part, kind_of, open_text

Row = dict[str, Any]
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
"""Errors of readers at damaged or unsuitable files."""
CHECKED = 1000  # rows of a file that the check reads
LONGEST_FIELD = 2**31 - 1  # characters of a field of CSV
BATCH = 256  # rows of parquet that are in memory


def read_rows(part: Part, column: str) -> Iterator[Row]:
    """Each row of a table. Columns without the text may be missing. Raises: one of UNREADABLE."""
    kind = kind_of(part.path)
    if kind == "json":
        return _json_rows(part)
    if kind == "parquet":
        return _parquet_rows(part, column)
    if kind == "csv":
        return _csv_rows(part)
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # the error has the reason
    tqdm.set_lock(threading.RLock())  # its own is of all processes, and would outlive a worker
    path = glob.escape(os.path.abspath(part.path))
    return iter(datasets.load_dataset("arrow", data_files=path, split="train", streaming=True))


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
    """The rows of a row group. Reads only the column, if there is one of its name."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(part.path) as file:
        names = [file.schema.column(index).path for index in range(len(file.schema))]
        present = any(f"{name}.".startswith(f"{column}.") for name in names)
        for batch in file.iter_batches(BATCH, [part.start], [column] if present else None):
            yield from batch.to_pylist()
