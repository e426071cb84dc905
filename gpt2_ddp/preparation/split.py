"""Which text of a source is validation text. This is decided before a tokenizer exists: the
tokenizer and its size depend on the training text alone.

A hash of a document's text decides its split, so that it keeps it when documents are added. In a
source of few documents, the last `val_fraction` of the text's bytes are the validation split.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from math import ceil
from typing import NamedTuple

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.sources import DocumentChunk, Source, read_documents, read_pieces
from gpt2_ddp.preparation.text_files import Part

EXPECTED_DOCUMENTS = 10
"""Least expected documents of the smaller split, for splits by hash; with fewer, it could be
empty."""
LONGEST_SEARCH = 2**16  # bytes
BLANK = re.compile(r"\s")


class Cut(NamedTuple):
    """The training split ends with the last line break between these bytes of the text, else before
    the last blank, else with the last character. `earliest` bounds the search."""

    earliest: int
    latest: int


def find_cut(source: Source) -> Cut | None:
    """Where the text of few documents is divided; None: a hash decides the split of each document.
    Reads a source of few documents. Raises: UserError if it cannot be read."""
    fraction = source.config.val_fraction
    if not fraction:
        return None
    least = ceil(EXPECTED_DOCUMENTS / min(fraction, 1 - fraction))
    if sum(1 for _ in islice(read_documents(source.config, source.parts), least)) == least:
        return None
    counts: Counter[str] = Counter()
    for _ in read_pieces(source.config, source.parts, counts):
        pass
    validation = round(counts["bytes"] * fraction)
    training = counts["bytes"] - validation
    return Cut(training - min(training // 2, validation // 2, LONGEST_SEARCH), training)


def read_split(
    source: Source, parts: Iterable[Part], counts: Counter[str], cut: Cut | None
) -> Iterator[DocumentChunk]:
    """`read_pieces`, each piece in its split. With a cut, `parts` are all parts of the source."""
    pieces = read_pieces(source.config, parts, counts)
    return pieces if cut is None else divide_pieces(pieces, cut)


def empty_split(
    config: PrepareConfig, split: str, cut: Cut | None, counts: Counter[str]
) -> UserError:
    """The error of a source that gives no text for a split. `cut` and `counts`: those that it was
    read with."""
    cure = "choose another source, or val_fraction 0"
    if not counts["bytes"]:
        hint = "has no text; choose another source"
    elif cut is None:
        hint = f"has too few different documents for a {split} split; {cure}"
    else:
        hint = f"has too little text for a {split} split; {cure}"
    return UserError("source", config.source_name, hint)


def divide_pieces(pieces: Iterable[DocumentChunk], cut: Cut) -> Iterator[DocumentChunk]:
    """The pieces of a text, before the cut in the training split, and after it in the validation
    split."""
    start = 0  # of the piece in the text, in bytes
    for text, first, _ in pieces:
        data = text.encode()
        end = start + len(data)
        if end <= cut.latest:
            yield DocumentChunk(text, first, "train")
        elif start >= cut.latest:
            yield DocumentChunk(text, first, "val")
        else:
            length = _training_length(data, Cut(cut.earliest - start, cut.latest - start))
            if length:
                yield DocumentChunk(text[:length], first, "train")
            yield DocumentChunk(text[length:], first and not length, "val")
        start = end


def _training_length(data: bytes, cut: Cut) -> int:
    """Characters of a piece that are before the cut. Bytes after `cut.latest` do not matter. A
    piece begins at a line break or a blank, if there are any."""
    text = data[: cut.latest].decode(errors="ignore")  # without a part of a character
    searched = len(data[: max(cut.earliest, 0)].decode(errors="ignore"))
    line = text.rfind("\n", searched) + 1
    if line or cut.earliest <= 0:
        return line
    blanks = [blank.start() for blank in BLANK.finditer(text, searched)]
    return blanks[-1] if blanks else len(text)
