"""Tables: files whose rows hold the documents, such as JSON lines, CSV and parquet.

A format is a subclass of `Table`, and an instance of it in `TABLES` for each of its suffixes. One
of UTF-8 text, or with a library of its own, needs no other code:

    scan ────────▶ Table.parts   what workers read, one at a time; damage is found here
                   Table.rows    the first rows: is there text in the column?
                   Table.note    what the user may not expect
    preparation ─▶ Table.rows    all rows of a part
                   Table.row_name, for errors
"""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# (pyarrow has no types)

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, cast

from gpt2_ddp.errors import truncate
from gpt2_ddp.preparation.columns import CHECKED, NumberedRows, Row, kind_of_value
from gpt2_ddp.preparation.text_files import (
    COMPRESSED,
    Part,
    lines_before,
    open_text,
    text_parts,
)

LONGEST_FIELD = 2**31 - 1  # characters of a field of CSV
CSV_SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}
EXCERPT = 30  # characters of a line that an error shows on both sides of its place
BATCH = 256  # rows of parquet that are in memory


class Table(ABC):
    """A format of files whose rows hold the documents. By default, a file is read as a whole."""

    @abstractmethod
    def rows(self, part: Part, column: str) -> NumberedRows:
        """The rows of a part, in their order. Columns without the text may be missing. Raises: one
        of `columns.UNREADABLE`."""

    def parts(self, path: Path) -> list[Part]:
        """The parts of a file, which workers read each on its own. Raises: OSError or ValueError if
        the file is damaged."""
        return [Part(str(path), bytes=path.stat().st_size)]

    def row_name(self, part: Part, number: int) -> str:
        """Where a row is in its file, for errors. `number`: as `rows` gives it."""
        return f"row {number:,}"

    def note(self, path: Path, column: str) -> str:
        """What the user may not expect of a usable file; empty if there is nothing to say."""
        return ""


class TextTable(Table):
    """A format of text in UTF-8. The number of a row is that of a line."""

    def parts(self, path: Path) -> list[Part]:
        return text_parts(path, b"")

    def row_name(self, part: Part, number: int) -> str:
        return line_name(part, number)


def line_name(part: Part, number: int) -> str:
    """A line of a part, by its number in the file."""
    before = lines_before(part) if part.start else 0
    return f"line {number + before:,}"


class Json(TextTable):
    """The object of each line, or the objects of an array. A row's number is that of the line where
    it begins."""

    def rows(self, part: Part, column: str) -> Iterator[tuple[int, Row]]:
        is_first = not part.start
        with open_text(part) as file:
            for number, line in enumerate(file, 1):
                line = line.lstrip("\ufeff")  # of a file that was joined to another
                if not line or line.isspace():
                    continue
                is_array = is_first and line.lstrip().startswith("[")
                is_first = False
                text = line + file.read() if is_array else line
                for row in _json_objects(part, number, text, is_array):
                    yield number, row


class JsonLines(Json):
    """JSON in lines: a file is cut at ends of lines."""

    def parts(self, path: Path) -> list[Part]:
        return text_parts(path, b"\n")


def _json_objects(part: Part, number: int, text: str, is_array: bool) -> Iterator[Row]:
    """The objects of a text of JSON, which begins at this line of the part. Raises: ValueError."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(_json_problem(part, number, text, error)) from error
    rows = cast(list[object], value) if is_array else [value]
    for row in rows:
        if not isinstance(row, dict):
            excerpt = truncate(text.strip(), 2 * EXCERPT)
            problem = f"has {kind_of_value(row)} instead of an object with columns: {excerpt}"
            raise ValueError(f"{line_name(part, number)} {problem}")
        yield cast(Row, row)


def _json_problem(part: Part, number: int, text: str, error: Exception) -> str:
    """Where JSON is wrong: line of the file, column, an excerpt, and what is expected."""
    if isinstance(error, RecursionError):
        return f"{line_name(part, number)}: is nested too deeply; correct or remove it"
    if not isinstance(error, json.JSONDecodeError):
        return f"{line_name(part, number)}: a number has too many digits; correct or remove it"
    excerpt = truncate(text[max(error.pos - EXCERPT, 0) : error.pos + EXCERPT].strip(), 3 * EXCERPT)
    place = f"{line_name(part, number + error.lineno - 1)}, column {error.colno:,}"
    hint = "; write each object in one line, or all as one array" if text.strip() == "{" else ""
    return f"{place}: {error.msg}: {excerpt}{hint}"


class CsvOptions(NamedTuple):
    """How fields are written.

    Attributes:
        is_quoted: whether a field may be in quotation marks; otherwise these are text.
        is_usual: whether the file's suffix tells the separator.
    """

    separator: str
    is_quoted: bool = True
    is_usual: bool = True

    # no return type: before Python 3.13, that of csv.reader has no public name
    def reader(self, lines: Iterable[str], strict: bool = True):
        """The fields of each row of the lines."""
        quoting = csv.QUOTE_MINIMAL if self.is_quoted else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.separator, quoting=quoting, strict=strict)


class Csv(TextTable):
    """CSV: commas between fields; or semicolons, tabs or bars if only they give the column."""

    def options(self, first: str, column: str) -> CsvOptions:
        """How fields are written, by the first line."""
        for separator in CSV_SEPARATORS:
            options = CsvOptions(separator, is_usual=separator == ",")
            if column in next(options.reader([first], strict=False), []):
                return options
        return CsvOptions(",")

    def rows(self, part: Part, column: str) -> Iterator[tuple[int, Row]]:
        """The fields of each row, with the number of its last line. Unlike pandas, refuses a row
        with more fields than the first one."""
        csv.field_size_limit(LONGEST_FIELD)
        with open_text(part) as file:
            first = _first_line(file)
            options = self.options(first, column)
            names = next(options.reader([first]), [])
            if names.count(column) > 1:
                times = names.count(column)
                raise ValueError(f"column {column} is named {times} times in the first line")
            rows = options.reader(file)
            while True:
                try:
                    fields = next(rows)
                except StopIteration:
                    return
                except csv.Error as error:
                    problem = f"line {rows.line_num + 1:,}: {error}"
                    raise ValueError(f"{problem}; is a quotation mark missing?") from error
                number = rows.line_num + 1
                if len(fields) != len(names):
                    _check_fields(fields, names, column, number, options)
                if fields:
                    yield number, dict(zip(names, fields, strict=False))

    def note(self, path: Path, column: str) -> str:
        part = Part(str(path))
        with open_text(part) as file:
            options = self.options(_first_line(file), column)
        if not options.is_quoted:
            texts = (str(row.get(column)) for _, row in islice(self.rows(part, column), CHECKED))
            if not any(map(_is_in_quotes, texts)):
                return ""
            return (
                "texts keep their quotation marks, as in TSV; "
                "if a program wrote it like CSV, name it .csv"
            )
        if options.is_usual:
            return ""
        return f"{CSV_SEPARATORS[options.separator]} are read as the marks between fields"


class Tsv(Csv):
    """TSV: tabs between fields and no quoting, unless the first line has quotation marks."""

    def options(self, first: str, column: str) -> CsvOptions:
        return CsvOptions("\t", is_quoted=first.startswith('"'))


def _first_line(lines: Iterable[str]) -> str:
    """The first line that is not blank: the names of the columns. Empty if there is none."""
    return next((line for line in lines if not line.isspace()), "")


def _is_in_quotes(text: str) -> bool:
    return len(text) > 1 and text.startswith('"') and text.endswith('"')


def _check_fields(
    fields: list[str], names: list[str], column: str, number: int, options: CsvOptions
) -> None:
    """Raises: ValueError for a row of another number of fields than the first line has, unless only
    fields after the column are missing."""
    if len(fields) > len(names):
        problem = f"line {number:,} has {len(fields)} fields, the first line has {len(names)}"
        hint = "put fields that have a separator in quotation marks"
        if not options.is_quoted:
            hint = "a text has a tab"
        raise ValueError(f"{problem}; {hint}")
    # without quotation marks, a line break in a text would begin another row
    position = names.index(column) if column in names else 0
    if not options.is_quoted and 0 < len(fields) <= position:
        raise ValueError(
            f"line {number:,} has {len(fields)} of {len(names)} fields; a field of TSV has no line "
            "break; a file with fields in quotation marks is CSV: name it .csv"
        )


class Parquet(Table):
    """Parquet: a part is a row group."""

    def rows(self, part: Part, column: str) -> Iterator[tuple[int, Row]]:
        """Reads only the column, or the one that has the nested column."""
        return enumerate(_parquet_rows(part, column), 1)

    def parts(self, path: Path) -> list[Part]:
        import pyarrow.parquet  # noqa: PLC0415  heavy: few sources are parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            sizes = [
                file.metadata.row_group(group).total_byte_size
                for group in range(file.num_row_groups)
            ]
        return [Part(str(path), start=group, bytes=size) for group, size in enumerate(sizes)]

    def row_name(self, part: Part, number: int) -> str:
        return f"row {number:,} of row group {part.start + 1:,}"


def _parquet_rows(part: Part, column: str) -> Iterator[Row]:
    import pyarrow.parquet  # noqa: PLC0415  heavy: few sources are parquet

    with pyarrow.parquet.ParquetFile(part.path) as file:
        outer = column.partition(".")[0]
        columns = [outer] if outer in file.schema_arrow.names else None
        for batch in file.iter_batches(BATCH, [part.start], columns):
            yield from batch.to_pylist()


TABLES: dict[str, Table] = {
    ".jsonl": JsonLines(),
    ".ndjson": JsonLines(),
    ".json": Json(),
    ".csv": Csv(),
    ".tsv": Tsv(),
    ".parquet": Parquet(),
}
"""The format of each suffix. Files of other suffixes are text: each is a document."""


def table_of(path: str | Path) -> Table | None:
    """The format of a table, by the suffix before that of a compression; None for other files."""
    path = Path(str(path).lower())
    if path.suffix in COMPRESSED:
        path = path.with_suffix("")
    return TABLES.get(path.suffix)
