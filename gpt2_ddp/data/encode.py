"""Documents to the shards of their splits, encoded by several processes in the order of the source."""

import hashlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import IO

import numpy as np
from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.shards import Shard, ShardWriter
from gpt2_ddp.data.sources import Piece, has_documents, read_pieces
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.processes.cores import usable_cores
from gpt2_ddp.processes.parent import helper_context

CHUNK = 2**20
"""Characters that a process encodes at a time."""
EXPECTED_DOCUMENTS = 10
"""Splits are made by hash if the smaller one can expect so many documents; if fewer, there could be none."""

Chunk = list[tuple[str, Piece]]
"""Pieces of documents, with the splits that the documents belong to."""


def write_splits(folder: Path, config: PrepareConfig, tokenizer: str) -> dict[str, list[Shard]]:
    """Encodes the source into shards: each document is the end-of-text token, then its own tokens.

    A hash of a document's text decides its split, so that it keeps it when documents are added. In a source of few
    documents, the last `val_fraction` of the tokens is the validation split.

    Args:
        folder: where the shards go.
        tokenizer: name or path, for `load_tokenizer`.

    Raises:
        UserError: the source cannot be read, or gives no tokens for a split.
    """
    fraction, vocab_size = config.val_fraction, load_tokenizer(tokenizer).vocab_size
    names = ("train", "val") if fraction else ("train",)
    writers = {split: ShardWriter(folder, split, config.shard_tokens, vocab_size) for split in names}
    if fraction == 0 or has_documents(config, ceil(EXPECTED_DOCUMENTS / min(fraction, 1 - fraction))):
        for encoded in _encode_source(config, tokenizer, fraction):
            for split, tokens in encoded.items():
                writers[split].add(tokens)
    else:
        with tempfile.TemporaryFile(dir=folder, prefix=".", suffix=".tmp") as spool:
            for encoded in _encode_source(config, tokenizer, 0.0):
                spool.write(encoded["train"].data)
            _divide(spool, writers, fraction)
    splits = {split: writer.close() for split, writer in writers.items()}
    for split, shards in splits.items():
        if not shards:
            cure = f"has too little text for a {split} split; choose another source, or val_fraction 0"
            raise UserError("source", config.source, cure)
    return splits


def _divide(spool: IO[bytes], writers: dict[str, ShardWriter], fraction: float) -> None:
    """Gives the last `fraction` of the spooled tokens to the validation split, the others to the training split."""
    dtype = writers["val"].dtype
    total = spool.tell() // dtype.itemsize
    val = round(total * fraction)
    spool.seek(0)
    for split, count in (("train", total - val), ("val", val)):
        while count:
            tokens = np.frombuffer(spool.read(min(count, CHUNK) * dtype.itemsize), dtype)
            writers[split].add(tokens)
            count -= len(tokens)


def _encode_source(config: PrepareConfig, tokenizer: str, fraction: float) -> Iterator[dict[str, np.ndarray]]:
    """Tokens of the source's chunks in their order, by split."""
    workers = config.workers or usable_cores(hyperthreads=True)
    with tqdm(desc="encoding", unit=" tokens", unit_scale=True, disable=None) as progress:
        for encoded in _map_in_order(partial(_encode_chunk, tokenizer), _chunks(config, fraction), workers):
            progress.update(sum(map(len, encoded.values())))
            yield encoded


def _chunks(config: PrepareConfig, fraction: float) -> Iterator[Chunk]:
    chunk, characters, split = [], 0, ""
    for piece in read_pieces(config):
        if piece.first:
            split = "val" if _unit_hash(piece.text) < fraction else "train"
        chunk.append((split, piece))
        characters += len(piece.text)
        if characters >= CHUNK:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _unit_hash(text: str) -> float:
    """A number in [0, 1) that only the text decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _encode_chunk(tokenizer_name: str, chunk: Chunk) -> dict[str, np.ndarray]:
    tokenizer = _cached_tokenizer(tokenizer_name)
    encoded: dict[str, list[np.ndarray]] = {}
    for split, piece in chunk:
        tokens = tokenizer.encode(piece.text)
        beginning = [np.array([tokenizer.eot], tokens.dtype)] if piece.first else []
        encoded.setdefault(split, []).extend([*beginning, tokens])
    return {split: np.concatenate(arrays) for split, arrays in encoded.items()}


_cached_tokenizer = cache(load_tokenizer)


def _map_in_order(
    function: Callable[[Chunk], dict[str, np.ndarray]], chunks: Iterator[Chunk], workers: int
) -> Iterator[dict[str, np.ndarray]]:
    """`map` over processes that looks only a few chunks ahead. Processes, because tiktoken is a quarter slower in
    threads; spawned, because forking a process that has threads can deadlock."""
    if workers == 1:
        yield from map(function, chunks)
        return
    pool, pending = ProcessPoolExecutor(workers, mp_context=helper_context("spawn")), deque()
    try:
        for chunk in chunks:
            pending.append(pool.submit(function, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BaseException:
        for worker in pool._processes.values():  # what they are at does not matter any more
            worker.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
