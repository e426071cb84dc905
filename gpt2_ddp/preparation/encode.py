"""Encodes documents into the shards of their splits, with several processes, in the order of the
source.

Workers read parts of the files and encode them; the main process joins the tokens, and reads what
cannot be cut. If `gigatoken` is installed (`pip install gpt2_ddp[fast]`), it encodes GPT-2's BPE:
the same ids, many times faster. tiktoken encodes a sample of each item again, for comparison.
"""

import base64
import json
import re
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import (
    HEADER_BYTES,
    MANIFEST,
    Manifest,
    Shard,
    content_sha256,
    parse_manifest,
    token_dtype,
)
from gpt2_ddp.data.shards import MAGIC_AND_VERSION
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.data.tokenizer_file import GPT2_PATTERN
from gpt2_ddp.distributed.workers import Pool, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import sha256_file, write_atomically
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.preparation.sources import DocumentChunk, Source, read_pieces
from gpt2_ddp.preparation.split import Cut, empty_split, read_split
from gpt2_ddp.preparation.text_files import BLOCK, LARGEST, Part

# tiktoken also encodes 0.2 % of the characters, in 3 % of the time (estimate)
SAMPLE = 512
EVERY = 2**18
WITHOUT = "without it (pip uninstall gigatoken), tiktoken encodes the text"
WORD_END = re.compile(r"(?<=\S)(?=[ \n])")
"""Places where GPT-2's pattern divides every text: no token crosses them."""

Encoded = tuple[dict[str, np.ndarray], Counter[str]]  # an item's tokens, by split, and its counts
Item = tuple[list[Part], list[DocumentChunk]]
"""Parts for a worker to read; or pieces that the main process has read."""


def encode_item(tokenizer_name: str, config: PrepareConfig, item: Item) -> Encoded:
    """The tokens and counts of an item, in any process; with gigatoken, if it is installed."""
    parts, pieces = item
    counts: Counter[str] = Counter()
    tokenizer = _cached_tokenizer(tokenizer_name)
    quick = _cached_fast_encoder(tokenizer)
    unchecked = EVERY
    beginning = np.array([tokenizer.eot], token_dtype(tokenizer.vocab_size))
    encoded: dict[str, list[np.ndarray]] = {}
    for piece in pieces or read_pieces(config, parts, counts):
        tokens = (quick or tokenizer).encode(piece.text)
        if quick and unchecked >= EVERY:
            quick.check(piece.text, tokens)
            unchecked = 0
        unchecked += len(piece.text)
        encoded.setdefault(piece.split, []).extend([beginning, tokens] if piece.first else [tokens])
    return {split: np.concatenate(parts) for split, parts in encoded.items()}, counts


def write_splits(
    folder: Path, source: Source, tokenizer: str, cut: Cut | None, pool: Pool
) -> tuple[dict[str, list[Shard]], Counter[str]]:
    """Encodes the source into shards: each document is the end-of-text token, then its own tokens.
    `cut`: the result of `find_cut`. Returns the shards of each split, and the counts of
    `read_pieces`. Raises: UserError if the source cannot be read, or gives no tokens for a
    split."""
    for cached in (_cached_tokenizer, _cached_fast_encoder):
        # an earlier preparation of this process may have had another file of this name
        cached.cache_clear()
    config = source.config
    vocab_size = _cached_tokenizer(tokenizer).vocab_size
    names = ("train", "val") if config.val_fraction else ("train",)
    counts: Counter[str] = Counter()
    writers = {
        split: ShardWriter(folder, split, config.shard_tokens, vocab_size) for split in names
    }
    sizes: deque[float] = deque()
    items = _noting_sizes(make_items(source, counts, cut), sizes)
    encoded = in_order(partial(encode_item, tokenizer, config), items, pool)
    total = inf if config.max_documents else sum(part.bytes for part in source.parts)
    # an item is done when its tokens are here, in the order of the items
    encoded = progress(encoded, "encoding", "bytes", total, lambda _: sizes.popleft())
    for tokens, item_counts in encoded:
        counts += item_counts
        for split, ids in tokens.items():
            writers[split].add(ids)
    splits = {split: writer.close() for split, writer in writers.items()}
    for split, shards in splits.items():
        if not shards:
            raise empty_split(config, split, cut, counts)
    return splits, counts


def _noting_sizes(items: Iterable[Item], sizes: deque[float]) -> Iterator[Item]:
    """The items, while their sizes are appended to `sizes`: bytes of files, or of text."""
    for parts, pieces in items:
        of_files = sum(part.bytes for part in parts)
        of_text = sum(len(piece.text.encode()) for piece in pieces)
        sizes.append(of_files + of_text)
        yield parts, pieces


def make_items(source: Source, counts: Counter[str], cut: Cut | None) -> Iterator[Item]:
    """The items of the source, in order. Parts above `LARGEST` are read and counted here; with a
    cut, or with `max_documents`, all are."""
    in_main_process = cut is not None or source.config.max_documents is not None
    for batch in batches(source.parts, lambda part: part.bytes, inf if in_main_process else BLOCK):
        if batch[-1].bytes <= LARGEST and not in_main_process:
            yield batch, []
        else:
            read = read_split(source, batch, counts, cut)
            for pieces in batches(read, lambda piece: len(piece.text), BLOCK):
                yield [], pieces


@dataclass
class FastEncoder:
    """Encodes like `Tokenizer.encode`, for text without lone surrogates and a byte-level BPE with
    GPT-2's pattern. Ids, except those of special tokens, go from `first` on without a gap.
    `encoder`: gigatoken's, with ids from 0 on. It has no special tokens, since it would find them
    in the text."""

    tokenizer: Tokenizer
    encoder: Any
    first: int

    def encode(self, text: str) -> np.ndarray:
        """Ids [n], uint16, or uint32 for more than 65,536 ids. Raises: UserError if gigatoken
        panics."""
        try:
            ids = self.encoder.encode(text.encode())
        # a panic of Rust's is no Exception, and its class cannot be imported
        except BaseException as error:
            if type(error).__module__ != "pyo3_runtime":
                raise
            hint = f"panicked ({error}); {WITHOUT}"
            raise UserError("gigatoken", truncate(text, 60), hint) from None
        return (ids + np.uint32(self.first)).astype(token_dtype(self.tokenizer.vocab_size))

    def check(self, text: str, ids: np.ndarray) -> None:
        """Compares `ids`, the result of `encode`, with tiktoken's of the beginning, up to the first
        end of a word after `SAMPLE` characters. Raises: UserError if they differ."""
        end = WORD_END.search(text, SAMPLE)
        text = text[: end.start()] if end else text
        expected = self.tokenizer.encode(text)
        if not np.array_equal(ids[: len(expected)] if end else ids, expected):
            hint = f"its ids are not tiktoken's; {WITHOUT}"
            raise UserError("gigatoken", truncate(text, 60), hint)


def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """None if gigatoken is not installed, or does not support the tokenizer."""
    ranks = tokenizer.tokens
    first = min(ranks.values())
    if tokenizer.pattern != GPT2_PATTERN or max(ranks.values()) - first + 1 != len(ranks):
        return None
    try:
        # optional
        from gigatoken.gigatoken_rs import BPETokenizer  # noqa: PLC0415  optional # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            file.write(b"%b %d\n" % (base64.b64encode(token), rank - first))
        file.flush()
        return FastEncoder(tokenizer, BPETokenizer.from_tiktoken(file.name, "gpt2", {}), first)


_cached_tokenizer = cache(load_tokenizer)


@cache
def _cached_fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    return fast_encoder(tokenizer)


class ShardWriter:
    """Writes the tokens of one split into shards of `shard_tokens` tokens; the last may be
    shorter."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int):
        self.folder = folder
        self.split = split
        self.shard_tokens = shard_tokens
        self.dtype = token_dtype(vocab_size)
        self._paths: list[Path] = []
        self._room = 0  # tokens that the last shard lacks

    def add(self, tokens: np.ndarray) -> None:
        """Appends token ids [n], all below `vocab_size`."""
        tokens = np.ascontiguousarray(tokens, self.dtype)
        while len(tokens):
            if not self._room:
                self._paths.append(self.folder / f"{self.split}_{len(self._paths):06d}.bin")
                self._paths[-1].write_bytes(bytes(HEADER_BYTES))
                self._room = self.shard_tokens
            part, tokens = np.split(tokens, [self._room])
            with self._paths[-1].open("ab") as file:
                file.write(part.data)
            self._room -= len(part)

    def close(self) -> list[Shard]:
        """Writes the headers and returns all shards."""
        with ThreadPoolExecutor() as pool:  # hashing runs outside the GIL
            return [*pool.map(self._finish, self._paths)]

    def _finish(self, path: Path) -> Shard:
        tokens = (path.stat().st_size - HEADER_BYTES) // self.dtype.itemsize
        with path.open("r+b") as file:
            file.write(np.array([*MAGIC_AND_VERSION[self.dtype.itemsize], tokens], "<i4").data)
        return Shard(path.name, tokens, path.stat().st_size, sha256_file(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically. Raises: UserError if it is invalid, as when one shard is
    in both splits."""
    content = asdict(manifest)
    content["sha256"] = content_sha256(content)
    text = json.dumps(content, indent=1) + "\n"
    parse_manifest(text.encode(), folder / MANIFEST)
    write_atomically(folder / MANIFEST, text)
