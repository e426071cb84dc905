"""Where text comes from: the standard library's source, local files, the Hub. Documents are read in pieces, so that
a corpus of any size, or a single file of any size, passes through little memory."""

import glob
import io
import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import replace_surrogates
from gpt2_ddp.errors import UserError

PIECE = 2**20
"""Characters after which a long document is cut, at the next place where no token of GPT-2's can straddle the cut."""
LONGEST_PIECE = 16 * PIECE
"""Where it is cut if there is no such place: the text is not made of words."""
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
JSON_LINES = {".jsonl", ".ndjson", ".json"}
COMPRESSED = {".gz", ".bz2", ".zst", ".lz4"}

Blocks = Iterable[str]
"""The text of a document, in parts of any size."""


class Piece(NamedTuple):
    """Text of a document, and whether the document begins with it."""

    text: str
    first: bool


def read_pieces(config: PrepareConfig) -> Iterator[Piece]:
    """The source's documents in their order, always the same, cut into pieces; empty documents are left out.

    Bytes that are not UTF-8 become U+FFFD.

    Raises:
        UserError: the source is missing, unreadable or empty, or does not have the column.
    """
    for blocks in islice(_documents(config), config.max_documents):
        for number, text in enumerate(_cut(blocks)):
            yield Piece(text, first=number == 0)


def has_documents(config: PrepareConfig, number: int) -> bool:
    """Whether the source has at least so many documents."""
    return sum(1 for _ in islice(_documents(config), min(number, config.max_documents or number))) == number


def describe(config: PrepareConfig) -> str:
    """The source in words, for the manifest."""
    return f"stdlib (Python {platform.python_version()})" if config.source == "stdlib" else config.source


def _documents(config: PrepareConfig) -> Iterator[Blocks]:
    if config.source.startswith("hub:"):
        yield from _hub_documents(config)
        return
    files = _library_files() if config.source == "stdlib" else _local_files(config.source)
    for path in files:
        suffix = next((suffix for suffix in reversed(path.suffixes) if suffix not in COMPRESSED), "")
        if suffix == ".parquet":
            yield from _parquet_documents(path, config.column)
        elif suffix in JSON_LINES:
            yield from _json_documents(path, config.column)
        else:
            yield from _text_documents(path, config.documents)


def _library_files() -> list[Path]:
    """Python's own modules, without their tests and without what was installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not NOT_LIBRARY & set(path.relative_to(root).parts))


def _local_files(source: str) -> list[Path]:
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        found = (file for file in path.rglob("*") if not any(part[0] == "." for part in file.relative_to(path).parts))
    else:
        found = [path] if os.path.exists(path) else map(Path, glob.iglob(str(path), recursive=True))
    files = sorted(file for file in found if os.path.isfile(file))
    if not files:
        cure = "there is no such file; name a text, jsonl or parquet file, a folder, a glob, hub:OWNER/NAME, or stdlib"
        raise UserError("source", source, cure)
    for file in files:
        try:
            with _open(file) as text:
                binary = "\0" in text.read(1024) and ".parquet" not in file.suffixes
        except (OSError, ValueError) as error:  # ValueError: not what its suffix says
            raise UserError("source", file, f"cannot be read ({error})") from error
        if binary:
            raise UserError("source", file, f"is not text; choose the text files with a glob, like '{source}/**/*.txt'")
    return files


def _open(path: Path) -> io.TextIOWrapper:
    """Text of a file, line ends as they are; decompressed, if its suffix says so."""
    import pyarrow

    return io.TextIOWrapper(pyarrow.input_stream(str(path)), encoding="utf-8", errors="replace", newline="")


def _text_documents(path: Path, documents: str) -> Iterator[Blocks]:
    if documents == "file":
        yield _blocks(path)
        return
    with _open(path) as file:
        if documents == "line":
            yield from ([line.rstrip("\r\n")] for line in file)
        else:
            paragraphs = groupby(file, key=str.isspace)
            yield from (["".join(lines).rstrip("\r\n")] for blank, lines in paragraphs if not blank)


def _blocks(path: Path) -> Blocks:
    with _open(path) as file:
        while block := file.read(PIECE):
            yield block


def _json_documents(path: Path, column: str) -> Iterator[Blocks]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, line {number},"
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError("source", path, f"line {number} is not JSON ({error}); one object a line") from error
            if not isinstance(row, dict):
                raise UserError("source", path, f"line {number} is not an object; write one object a line")
            yield _value_blocks(row, column, where)


def _parquet_documents(path: Path, column: str) -> Iterator[Blocks]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield _value_blocks(row, column, str(path))
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError("source", path, f"is not a whole parquet file ({error})") from error


def _hub_documents(config: PrepareConfig) -> Iterator[Blocks]:
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name = config.source.removeprefix("hub:")
    try:
        HfApi().dataset_info(name, revision=config.revision, timeout=10)  # load_dataset alone retries for long
        rows: Any = datasets.load_dataset(
            name, config.subset, split=config.split, revision=config.revision, streaming=True
        )
        for row in rows:
            yield _value_blocks(row, config.column, name)
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        cure = f"cannot be read from the Hub ({reason}); a local file or folder, or stdlib, needs no network"
        raise UserError("source", config.source, cure) from error


def _value_blocks(row: dict[str, Any], column: str, where: str) -> Blocks:
    if column not in row:
        raise UserError("column", column, f"{where} has no such column, but {', '.join(map(str, row)) or 'none'}")
    text = row[column] if row[column] is not None else ""
    if not isinstance(text, str):
        raise UserError("column", column, f"{where} holds {type(text).__name__}, not text; choose another column")
    text = replace_surrogates(text)
    return [text] if len(text) <= PIECE else (text[at : at + PIECE] for at in range(0, len(text), PIECE))


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
