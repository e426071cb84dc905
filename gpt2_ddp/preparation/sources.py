"""Where text comes from: the standard library's source, local files, the Hub. Documents are read in pieces, so that
a corpus of any size, or a single file of any size, passes through little memory."""

import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import replace_surrogates
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import regular
from gpt2_ddp.preparation.account import CorpusStats, Tally
from gpt2_ddp.preparation.decode import COMPRESSED, DetectedEncoding, detect_encoding
from gpt2_ddp.preparation.documents import (
    MANY,
    Blocks,
    InputSplit,
    check_column,
    check_parquet,
    hub_documents,
    json_documents,
    json_parts,
    parquet_documents,
    parquet_parts,
    split,
    text_documents,
    without_line_breaks,
)
from gpt2_ddp.preparation.find import find_files

PIECE = 2**20
"""Characters after which a long document is cut, at the next place where no token of GPT-2's can straddle the cut."""
LONGEST_PIECE = 4 * PIECE
"""Where it is cut if there is no such place: the text is not made of words."""
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=\S)(?= \S)")  # after a line break or before a blank, single and between words
JSON_LINES = {".jsonl", ".ndjson", ".json"}
USUAL = {"utf-8", "parquet"}


class DocumentChunk(NamedTuple):
    """Text of a document, and whether the document begins with it."""

    text: str
    first: bool


@dataclass
class Scan:
    """What a look at a source's files has found, before any long work.

    Attributes:
        account: what there is to say of the files; reading the source adds what was read.
        unusual: the files that are not UTF-8, with their encoding, or None for those that are left out.
    """

    account: CorpusStats = field(default_factory=CorpusStats)
    unusual: dict[str, str | None] = field(default_factory=dict)


def scan(config: PrepareConfig) -> Scan:
    """Looks at all files of the source, from their first byte to their last.

    Raises:
        UserError: there is no text, there is text in an unknown encoding, or a bad file is to stop the work.
    """
    found, garbled, bad = Scan(), Tally(), None
    account = found.account
    files = () if config.source.startswith("hub:") else find_files(config.source, config.output)
    for path in tqdm(files, desc="looking at files", unit=" files", disable=None, delay=2):
        try:
            is_parquet = _suffix(regular(path)) == ".parquet"
            seen = DetectedEncoding(check_parquet(path), 0) if is_parquet else detect_encoding(path, config.encoding)
            reason = "" if seen.encoding else "is not text"
        except (OSError, ValueError) as error:  # ValueError: not what its suffix says
            seen, reason = DetectedEncoding(None, 0), f"cannot be read ({error})"
        if seen.encoding not in USUAL:
            found.unusual[str(path)] = seen.encoding
        if seen.encoding is None:
            bad = bad or UserError("source", path, f"{reason}; choose text files, by a glob perhaps: 'texts/**/*.txt'")
            if config.on_bad_file == "stop":
                raise bad
            account.left_out.add(f"{path} {reason}")
            continue
        account.encodings[seen.encoding] = account.encodings.get(seen.encoding, 0) + 1
        if seen.undecodable:
            account.undecodable.add(f"{path}, line {seen.line}", seen.undecodable)
        if seen.garbled:
            garbled.add(f"{path}, line {seen.line}")
    if bad and not account.encodings:
        raise bad
    if garbled.count:
        tried = "UTF-8" if config.encoding == "auto" else f"UTF-8 or {config.encoding}"
        hint = f"cannot decode {garbled.of('files')} as {tried}; name another, like cp1252 (UTF-8 files stay UTF-8)"
        raise UserError("encoding", config.encoding, hint)
    return found


def read_pieces(config: PrepareConfig, seen: Scan | None = None) -> Iterator[DocumentChunk]:
    """The source's documents in their order, always the same, cut into pieces; empty documents are left out.

    Args:
        config: names the source.
        seen: what `scan` has found, where that was done already; its account counts what is read.

    Raises:
        UserError: the source is missing, unreadable or empty, or none of its rows has the column.
    """
    seen = seen or scan(config)
    seen.account.begin(config.document_separator)
    yield from _pieces(islice(_documents(config, seen), config.max_documents), seen.account)


def read_parts(config: PrepareConfig, parts: Iterable[InputSplit], account: CorpusStats) -> Iterator[DocumentChunk]:
    """The pieces of some parts of the source, which the account counts; as `read_pieces` gives those of all."""
    account.begin(config.document_separator)
    documents = _undivided(config, parts, account)
    return _pieces(_divided(config.document_separator, documents, account), account)


def has_documents(config: PrepareConfig, number: int, seen: Scan) -> bool:
    """Whether the source has at least so many documents."""
    seen.account.begin(config.document_separator)
    return sum(1 for _ in islice(_documents(config, seen), min(number, config.max_documents or number))) == number


def source_parts(config: PrepareConfig, seen: Scan) -> Iterator[InputSplit]:
    """The parts that all files of the source are made of, in their order."""
    for path in find_files(config.source, config.output):
        encoding, suffix = seen.unusual.get(str(path), "utf-8"), _suffix(path)
        if encoding is None:
            continue
        if suffix == ".parquet":
            yield from parquet_parts(path)
        elif suffix in JSON_LINES and encoding == "utf-8" and path.suffix.lower() not in COMPRESSED:
            yield from json_parts(path)
        else:
            yield InputSplit(path, encoding, path.stat().st_size)


def describe(config: PrepareConfig) -> str:
    """The source in words, for the manifest."""
    return f"stdlib (Python {platform.python_version()})" if config.source == "stdlib" else config.source


def _documents(config: PrepareConfig, seen: Scan) -> Iterator[Blocks]:
    account = seen.account
    if config.source.startswith("hub:"):
        found = hub_documents(config, account)
    else:
        found = _undivided(config, source_parts(config, seen), account)
    yield from _divided(config.document_separator, _checked(config.column, found, account), account)
    check_column(config.column, account)


def _checked(column: str, documents: Iterable[Blocks], account: CorpusStats) -> Iterator[Blocks]:
    for document in documents:
        yield document
        if account.rows == account.without_column == MANY:
            check_column(column, account)


def _divided(separator: str | None, documents: Iterable[Blocks], account: CorpusStats) -> Iterator[Blocks]:
    for document in documents:
        if separator is None:
            yield document
        else:
            for number, part in enumerate(split(document, separator)):
                if number:
                    account.idle_separator = None
                yield without_line_breaks(part)


def _undivided(config: PrepareConfig, parts: Iterable[InputSplit], account: CorpusStats) -> Iterator[Blocks]:
    for part in parts:
        if part.encoding == "parquet":
            yield from parquet_documents(part, config.column, account)
        elif _suffix(part.path) in JSON_LINES:
            yield from json_documents(part, config.column, account)
        else:
            yield from text_documents(part.path, part.encoding, config.documents)


def _pieces(documents: Iterable[Blocks], account: CorpusStats) -> Iterator[DocumentChunk]:
    for blocks in documents:
        for number, piece in enumerate(_cut(blocks)):
            text = piece if piece.isascii() else replace_surrogates(piece)
            account.read(text, first=number == 0)
            yield DocumentChunk(text, first=number == 0)


def _suffix(path: Path) -> str:
    """What kind of file it is, whether compressed or not."""
    suffixes = (suffix.lower() for suffix in reversed(path.suffixes))
    return next((suffix for suffix in suffixes if suffix not in COMPRESSED), "")


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
