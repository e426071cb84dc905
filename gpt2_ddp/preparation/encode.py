"""Documents to the shards of their splits, encoded by several processes in the order of the source.

Workers read, too, and write the tokens to files, which the main process joins: what passes between processes is small.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import token_dtype
from gpt2_ddp.data.shards import Shard
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.account import CorpusStats
from gpt2_ddp.preparation.documents import InputSplit, check_column
from gpt2_ddp.preparation.fast_encoder import EVERY, EncodersDiffer, fast_encoder
from gpt2_ddp.preparation.shard_writer import ShardWriter
from gpt2_ddp.preparation.sources import DocumentChunk, Scan, has_documents, read_parts, read_pieces, source_parts

CHUNK = 2**20
"""Characters, or bytes of files, that a process encodes at a time."""
LARGE = 8 * CHUNK
"""Bytes of a file from which on several processes encode it, where it cannot be read but from its beginning on."""
AHEAD = 3
"""Chunks per worker that are under way, or wait to be joined."""
EXPECTED_DOCUMENTS = 10
"""Splits are made by hash if the smaller one can expect so many documents; if fewer, there could be none."""

Pieces = Iterable[tuple[str, DocumentChunk]]
"""Pieces of documents, with the splits that the documents belong to."""


class WorkItem(NamedTuple):
    """What a process encodes at a time: pieces that were read already, or else parts of files.

    Args:
        account: counts what was read here, up to these pieces.
    """

    pieces: list[tuple[str, DocumentChunk]]
    parts: list[InputSplit]
    account: CorpusStats


def write_splits(  # noqa: PLR0913
    folder: Path, config: PrepareConfig, tokenizer: str, seen: Scan, pool: Executor, workers: int, fast: bool
) -> dict[str, list[Shard]]:
    """Encodes the source into shards: each document is the end-of-text token, then its own tokens.

    A hash of a document's text decides its split, so that it keeps it when documents are added. In a source of few
    documents, the last `val_fraction` of the tokens is the validation split.

    Args:
        folder: where the shards go.
        tokenizer: name or path, for `load_tokenizer`.
        seen: what a look at the source has found; its account counts what is encoded.
        pool: has `workers` processes.
        fast: with gigatoken, where it is installed.

    Raises:
        UserError: the source cannot be read, or gives no tokens for a split.
    """
    fraction, vocab_size = config.val_fraction, _cached_tokenizer(tokenizer).vocab_size
    names = ("train", "val") if fraction else ("train",)
    by_hash = fraction == 0 or has_documents(config, ceil(EXPECTED_DOCUMENTS / min(fraction, 1 - fraction)), seen)
    splits: dict[str, list[Shard]] = {}
    for try_fast in (fast, False):
        writers = {split: ShardWriter(folder, split, config.shard_tokens, vocab_size, pool) for split in names}
        encode = partial(_encode, folder, tokenizer, try_fast, config, fraction if by_hash else 0.0)
        try:
            encoded = _encode_source(config, encode, fraction if by_hash else 0.0, seen, pool, workers)
            _join(encoded, writers, None if by_hash else fraction)
            splits = {split: writer.close() for split, writer in writers.items()}
            break
        except EncodersDiffer as error:
            print(f"note: {error}; tiktoken encodes all of it", flush=True)
            for writer in writers.values():
                writer.close()
            for file in (*folder.glob("*.bin"), *folder.glob(".*.tmp")):
                file.unlink()
    check_column(config.column, seen.account)
    for split, shards in splits.items():
        if not shards:
            hint = f"has too little text for a {split} split; choose another source, or val_fraction 0"
            raise UserError("source", config.source, hint)
    return splits


def _join(encoded: Iterator[dict[str, Path]], writers: dict[str, ShardWriter], fraction: float | None) -> None:
    """Gives the tokens of files to the writers of their splits, or, of all tokens, the last `fraction` to `val`."""
    if fraction is None:
        for files in encoded:
            for split, path in files.items():
                for tokens in _read(path, writers[split].dtype):
                    writers[split].add(tokens)
        return
    paths, dtype = [files["train"] for files in encoded], writers["val"].dtype
    total = sum(path.stat().st_size for path in paths) // dtype.itemsize
    left = total - round(total * fraction)
    for path in paths:
        for tokens in _read(path, dtype):
            train, val = np.split(tokens, [left])
            writers["train"].add(train)
            writers["val"].add(val)
            left -= len(train)


def _read(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The tokens of a file, which is gone after that."""
    with path.open("rb") as file:
        while len(tokens := np.fromfile(file, dtype, CHUNK)):
            yield tokens
    path.unlink()


def _encode_source(
    config: PrepareConfig, encode: partial, fraction: float, seen: Scan, pool: Executor, workers: int
) -> Iterator[dict[str, Path]]:
    """Files of the tokens of the source's chunks, by split, in their order."""
    seen.account.begin(config.document_separator)
    with tqdm(desc="encoding", unit=" tokens", unit_scale=True, disable=None) as progress:
        for files, tokens, account in _in_order(encode, _chunks(config, fraction, seen), pool, workers):
            seen.account.add(account)
            progress.update(tokens)
            yield files


def _chunks(config: PrepareConfig, fraction: float, seen: Scan) -> Iterator[WorkItem]:
    """The whole source, in its order."""
    if config.source.startswith("hub:") or config.max_documents:
        whole = Scan(CorpusStats(), seen.unusual)
        yield from _cut(read_pieces(config, whole), fraction, whole.account)
        return
    held: list[InputSplit] = []
    for part in source_parts(config, seen):
        if part.start is None and part.size > LARGE:
            if held:
                yield WorkItem([], held, CorpusStats())
            held, account = [], CorpusStats()
            yield from _cut(read_parts(config, [part], account), fraction, account)
            continue
        held.append(part)
        if sum(part.size for part in held) >= CHUNK or len(held) == CHUNK // 2**10:
            yield WorkItem([], held, CorpusStats())
            held = []
    if held:
        yield WorkItem([], held, CorpusStats())


def _cut(pieces: Iterable[DocumentChunk], fraction: float, account: CorpusStats) -> Iterator[WorkItem]:
    """Chunks of pieces; the last one has their account."""
    held, characters = [], 0
    for split, piece in _with_splits(pieces, fraction):
        held.append((split, piece))
        characters += len(piece.text)
        if characters >= CHUNK:
            yield WorkItem(held, [], CorpusStats())
            held, characters = [], 0
    yield WorkItem(held, [], account)


def _with_splits(pieces: Iterable[DocumentChunk], fraction: float) -> Pieces:
    split = ""
    for piece in pieces:
        if piece.first:
            split = "val" if _unit_hash(piece.text) < fraction else "train"
        yield split, piece


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _encode(  # noqa: PLR0913
    folder: Path, tokenizer_name: str, fast: bool, config: PrepareConfig, fraction: float, number: int, chunk: WorkItem
) -> tuple[dict[str, Path], int, CorpusStats]:
    """Writes the tokens of a chunk: their files by split, how many there are, and the account of what was read."""
    tokenizer = _cached_tokenizer(tokenizer_name)
    quick, unchecked = _cached_fast_encoder(tokenizer) if fast else None, EVERY
    account, pieces = chunk.account, chunk.pieces
    if chunk.parts:
        pieces = _with_splits(read_parts(config, chunk.parts, account), fraction)
    paths: dict[str, Path] = {}
    files, count, beginning = {}, 0, np.array([tokenizer.eot], token_dtype(tokenizer.vocab_size))
    with ExitStack() as stack:
        for split, piece in pieces:
            if split not in files:
                paths[split] = folder / f".{split}-{number:09d}.tmp"
                files[split] = stack.enter_context(paths[split].open("wb"))
            tokens = (quick or tokenizer).encode(piece.text)
            if quick and unchecked >= EVERY:
                quick.check(piece.text, tokens)
                unchecked = 0
            unchecked += len(piece.text)
            if piece.first:
                files[split].write(beginning.data)
            files[split].write(tokens.data)
            count += len(tokens) + piece.first
    return paths, count, account


_cached_tokenizer = cache(load_tokenizer)
_cached_fast_encoder = cache(lambda tokenizer: fast_encoder(tokenizer))


def _in_order(
    encode: partial, chunks: Iterator[WorkItem], pool: Executor, workers: int
) -> Iterator[tuple[dict[str, Path], int, CorpusStats]]:
    """`map` over a pool that looks only a few chunks ahead. Processes, because tiktoken is a quarter slower in threads;
    spawned, because forking a process that has threads can deadlock."""
    pending: deque[Future] = deque()
    try:
        for number, chunk in enumerate(chunks):
            pending.append(pool.submit(encode, number, chunk))
            if len(pending) >= (AHEAD * workers if workers > 1 else 1):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except EncodersDiffer:  # nobody is to write any more
        wait([future for future in pending if not future.cancel()])
        raise
