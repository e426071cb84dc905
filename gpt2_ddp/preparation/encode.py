"""Encodes documents into the shards of their splits, with several processes, in the order of the source.

Workers read parts of the files and encode them; the main process joins the tokens, and reads what cannot be cut.
If `gigatoken` is installed (`pip install gpt2_ddp[fast]`), it encodes GPT-2's BPE: the same ids, many times faster.
tiktoken encodes a sample of each item again, for comparison.
"""

import base64
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import asdict
from functools import cache, partial
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, Manifest, Shard, content_sha256, parse_manifest, token_dtype
from gpt2_ddp.data.shards import MAGIC_AND_VERSION
from gpt2_ddp.data.tokenizer import GPT2_PATTERN, Tokenizer, load_tokenizer
from gpt2_ddp.distributed.workers import InlineExecutor, batches, in_order
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import fsync_file, sha256_file, write_atomically
from gpt2_ddp.preparation.source_files import BLOCK, LARGEST, Part
from gpt2_ddp.preparation.sources import CorpusStats, DocumentChunk, Source

EXPECTED_DOCUMENTS = 10
"""Least expected documents of the smaller split, for splits by hash; with fewer, it could be empty."""
SAMPLE, EVERY = 512, 2**18  # tiktoken also encodes 0.2 % of the characters, in 3 % of the time (estimate)
WORD_END = re.compile(r"(?<=\S)(?=[ \n])")
"""Places where GPT-2's pattern divides every text: no token crosses them."""

Encoded = dict[str, np.ndarray]  # an item's tokens, by split
Item = tuple[list[Part], list[DocumentChunk], CorpusStats | None]
"""Parts for a worker to read; or pieces that the main process has read; or the statistics of such pieces."""


def encode_item(tokenizer_name: str, fast: bool, config: PrepareConfig, item: Item) -> tuple[Encoded, CorpusStats]:
    """The tokens and statistics of an item, in any process. `fast`: with gigatoken, if it is installed."""
    (parts, pieces, stats), reader = item, Source(config)
    tokenizer = _cached_tokenizer(tokenizer_name)
    quick, unchecked = _cached_fast_encoder(tokenizer) if fast else None, EVERY
    beginning = np.array([tokenizer.eot], token_dtype(tokenizer.vocab_size))
    encoded: dict[str, list[np.ndarray]] = {}
    for piece in pieces or reader.pieces(parts):
        tokens = (quick or tokenizer).encode(piece.text)
        if quick and unchecked >= EVERY:
            quick.check(piece.text, tokens)
            unchecked = 0
        unchecked += len(piece.text)
        encoded.setdefault(piece.split, []).extend([beginning, tokens] if piece.first else [tokens])
    return {split: np.concatenate(parts) for split, parts in encoded.items()}, stats or reader.stats


def write_splits(
    folder: Path, source: Source, tokenizer: str, pool: Executor, workers: int, fast: bool
) -> dict[str, list[Shard]]:
    """Encodes the source into shards: each document is the end-of-text token, then its own tokens.

    A hash of a document's text decides its split, so that it keeps it when documents are added. In a source of few
    documents, the last `val_fraction` of the tokens is the validation split. `source`: as `scan` returns it; counts
    what is encoded. `pool` has `workers` processes.
    Raises: UserError if the source cannot be read, or gives no tokens for a split."""
    config, vocab_size = source.config, _cached_tokenizer(tokenizer).vocab_size
    fraction, names = config.val_fraction, ("train", "val") if config.val_fraction else ("train",)
    by_hash = fraction == 0 or source.has_documents(ceil(EXPECTED_DOCUMENTS / min(fraction, 1 - fraction)))
    config = config if by_hash else config.model_copy(update={"val_fraction": 0.0})
    splits: dict[str, list[Shard]] = {}
    for try_fast in (fast, False):
        writers = {split: ShardWriter(folder, split, config.shard_tokens, vocab_size, pool) for split in names}
        encode = partial(encode_item, tokenizer, try_fast, config)
        try:
            encoded = _count(source, in_order(encode, make_items(source.parts(), config), pool, workers))
            if by_hash:
                for tokens in encoded:
                    for split, ids in tokens.items():
                        writers[split].add(ids)
            else:
                _divide(folder, (ids for tokens in encoded for ids in tokens.values()), writers, fraction)
            splits = {split: writer.close() for split, writer in writers.items()}
            break
        except EncodersDiffer as error:
            print(f"note: {error}; tiktoken encodes the whole text", flush=True)
            for writer in writers.values():
                writer.close()
            for file in folder.glob("*.bin"):
                file.unlink()
    for split, shards in splits.items():
        if not shards:
            hint = f"has too little text for a {split} split; choose another source, or val_fraction 0"
            raise UserError("source", config.source, hint)
    return splits


def _count(source: Source, encoded: Iterator[tuple[Encoded, CorpusStats]]) -> Iterator[Encoded]:
    source.restart()
    with tqdm(desc="encoding", unit=" tokens", unit_scale=True, disable=None) as progress:
        for tokens, stats in encoded:
            source.stats.add(stats)
            progress.update(sum(map(len, tokens.values())))
            yield tokens


def _divide(
    folder: Path, encoded: Iterable[np.ndarray], writers: "dict[str, ShardWriter]", val_fraction: float
) -> None:
    """Writes the last `val_fraction` of the tokens to `val`, the others to `train`, when their number is known."""
    dtype = writers["val"].dtype
    with tempfile.TemporaryFile(dir=folder) as file:
        for tokens in encoded:
            file.write(tokens.data)
        total = file.tell() // dtype.itemsize
        ends = {"train": total - round(total * val_fraction), "val": total}
        file.seek(0)
        for split, end in ends.items():
            while (left := end - file.tell() // dtype.itemsize) > 0:
                writers[split].add(np.fromfile(file, dtype, min(left, BLOCK)))


def make_items(parts: Iterator[Part], config: PrepareConfig) -> Iterator[Item]:
    """The items of all parts, in order. Parts above `LARGEST`, and all with `max_documents`, are read here."""
    for batch in batches(parts, lambda part: part.bytes, inf if config.max_documents else BLOCK):
        if batch[-1].bytes <= LARGEST and not config.max_documents:
            yield batch, [], None
        else:
            reader = Source(config)
            pieces = batches(reader.pieces(batch), lambda piece: len(piece.text), BLOCK)
            yield from (([], read, None) for read in pieces)
            yield [], [], reader.stats


class EncodersDiffer(Exception):
    """gigatoken's ids differ from tiktoken's, or gigatoken panicked."""


class FastEncoder:
    """Encodes like `Tokenizer.encode`, for text without lone surrogates and a byte-level BPE with GPT-2's pattern. Ids,
    except those of special tokens, have no gap. `encoder`: gigatoken's, with ids from 0 on. It has no special tokens,
    since it would find them in the text."""

    def __init__(self, tokenizer: Tokenizer, encoder: Any):
        self.tokenizer, self.encoder = tokenizer, encoder
        self.first, self.dtype = first_id(tokenizer), token_dtype(tokenizer.vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Ids [n], uint16, or uint32 for more than 65,536 ids. Raises: EncodersDiffer: gigatoken has panicked."""
        try:
            ids = self.encoder.encode(text.encode())
        except BaseException as error:  # a panic of Rust's is no Exception, and its class cannot be imported
            if type(error).__module__ != "pyo3_runtime":
                raise
            raise EncodersDiffer(f"gigatoken panicked ({error}) at {truncate(text, 60)!r}") from None
        return (ids + np.uint32(self.first)).astype(self.dtype)

    def check(self, text: str, ids: np.ndarray) -> None:
        """Compares `ids`, the result of `encode`, with tiktoken's of the beginning, up to the first end of a word after
        `SAMPLE` characters. Raises: EncodersDiffer."""
        end = WORD_END.search(text, SAMPLE)
        text = text[: end.start()] if end else text
        expected = self.tokenizer.encode(text)
        if not np.array_equal(ids[: len(expected)] if end else ids, expected):
            raise EncodersDiffer(f"gigatoken and tiktoken encode {truncate(text, 60)!r} differently")


def first_id(tokenizer: Tokenizer) -> int:
    """The smallest id of a token that is not special."""
    return min(tokenizer.encoding._mergeable_ranks.values())


def fast_encoder(tokenizer: Tokenizer) -> FastEncoder | None:
    """None if gigatoken is not installed, or does not support the tokenizer."""
    ranks, first = tokenizer.encoding._mergeable_ranks, first_id(tokenizer)
    if tokenizer.encoding._pat_str != GPT2_PATTERN or max(ranks.values()) - first + 1 != len(ranks):
        return None
    try:
        from gigatoken.gigatoken_rs import BPETokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
            file.write(b"%b %d\n" % (base64.b64encode(token), rank - first))
        file.flush()
        return FastEncoder(tokenizer, BPETokenizer.from_tiktoken(file.name, "gpt2", {}))


_cached_tokenizer = cache(load_tokenizer)
_cached_fast_encoder = cache(lambda tokenizer: fast_encoder(tokenizer))


class ShardWriter:
    """Writes the tokens of one split into shards of `shard_tokens` tokens; the last may be shorter. `pool` syncs and
    hashes them in the background; None: in this process."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int, pool: Executor | None = None):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)
        self._pool = pool or InlineExecutor()
        self._shards: list[Future[Shard]] = []
        self._file, self._tokens = None, 0

    def add(self, tokens: np.ndarray) -> None:
        """Appends token ids [n], all below `vocab_size`."""
        assert not len(tokens) or tokens.max() < self.vocab_size, "token id outside the vocabulary"
        tokens = np.ascontiguousarray(tokens, self.dtype)
        while len(tokens):
            if self._file is None:
                path = self.folder / f"{self.split}_{len(self._shards):06d}.bin"
                self._file = path.open("wb")
                self._file.write(bytes(HEADER_BYTES))
            part, tokens = np.split(tokens, [self.shard_tokens - self._tokens])
            self._file.write(part.data)
            self._tokens += len(part)
            if self._tokens == self.shard_tokens:
                self._finish()

    def close(self) -> list[Shard]:
        """Finishes the last shard and returns all of them."""
        self._finish()
        return [shard.result() for shard in self._shards]

    def _finish(self) -> None:
        if self._file is None:
            return
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *MAGIC_AND_VERSION[self.dtype.itemsize], self._tokens
        with self._file as file:
            file.seek(0)
            file.write(header.data)
        size = HEADER_BYTES + self._tokens * self.dtype.itemsize
        self._shards.append(self._pool.submit(_sync_and_hash, Path(self._file.name), self._tokens, size))
        self._file, self._tokens = None, 0


def _sync_and_hash(path: Path, tokens: int, size: int) -> Shard:
    fsync_file(path)
    return Shard(path.name, tokens, size, sha256_file(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically. Raises: UserError if it is invalid, as when one shard is in both splits."""
    content = asdict(manifest)
    content["sha256"] = content_sha256(content)
    text = json.dumps(content, indent=1) + "\n"
    parse_manifest(text.encode(), folder / MANIFEST)
    write_atomically(folder / MANIFEST, text)
