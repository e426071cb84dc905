"""Token shards: files of token ids in the format of llm.c.

A shard `<split>_<index:06d>.bin` is 256 little-endian int32 (magic, version, token count, zeros), then its tokens:
uint16 for vocabularies of up to 65,536 ids, uint32 for larger ones. The shards of a split, joined, are one stream.
"""

import os
from collections import OrderedDict
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.data.manifest import AGAIN, HEADER_BYTES, Manifest, Shard, token_dtype
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_file, fsync_folder, regular, sha256_file
from gpt2_ddp.processes.parent import InProcess

MAGIC_AND_VERSION = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes per token
OPEN_FILES = 64
"""Shards that a `TokenStream` keeps open; a corpus may have more shards than a process may have files."""


class ShardWriter:
    """Writes the tokens of one split into shards of `shard_tokens` tokens, the last one shorter.

    A shard carries a temporary name until it is whole and on disk.

    Args:
        pool: waits for the disk and hashes, meanwhile; None: this process does.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int, pool: Executor | None = None):
        self.folder = folder
        self.split = split
        self.shard_tokens = shard_tokens
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self._pool = pool or InProcess()
        self._shards: list[Future[Shard]] = []
        self._file = None
        self._tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Appends token ids [n], all below `vocab_size`."""
        assert not len(tokens) or tokens.max() < self.vocab_size, "token id outside the vocabulary"
        tokens = np.ascontiguousarray(tokens, self.dtype)
        while len(tokens):
            if self._file is None:
                self._file = open(self._temporary(), "wb")  # noqa: SIM115 (open until the shard is full)
                self._file.write(bytes(HEADER_BYTES))
            part, tokens = np.split(tokens, [self.shard_tokens - self._tokens])
            self._file.write(part.data)
            self._tokens += len(part)
            if self._tokens == self.shard_tokens:
                self._finish()

    def close(self) -> list[Shard]:
        """Finishes the last shard and returns all of them."""
        if self._file is not None:
            self._finish()
        shards = [shard.result() for shard in self._shards]
        fsync_folder(self.folder)
        return shards

    def _name(self) -> str:
        return f"{self.split}_{len(self._shards):06d}.bin"

    def _temporary(self) -> Path:
        return self.folder / f".{self._name()}.tmp"

    def _finish(self) -> None:
        assert self._file is not None
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *MAGIC_AND_VERSION[self.dtype.itemsize], self._tokens
        with self._file as file:
            file.seek(0)
            file.write(header.data)
        size = HEADER_BYTES + self._tokens * self.dtype.itemsize
        place = self.folder / self._name()
        self._shards.append(self._pool.submit(_seal, self._temporary(), place, self._tokens, size))
        self._file, self._tokens = None, 0


def _seal(temporary: Path, place: Path, tokens: int, size: int) -> Shard:
    """Gives a shard its name, once it is on disk."""
    fsync_file(temporary)
    shard = Shard(place.name, tokens, size, sha256_file(temporary))
    temporary.replace(place)
    return shard


def read_header(path: Path, dtype: np.dtype) -> int:
    """Checks a shard's header and size; returns its number of tokens.

    Raises:
        UserError: naming the file, when it is missing, truncated, or not a shard of `dtype` tokens.
    """
    try:
        with open(regular(path), "rb") as file:
            header = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError("shard", path, f"cannot be read ({error.strerror}); {AGAIN}") from error
    if size < HEADER_BYTES:
        raise UserError("shard", path, f"has {size} bytes, less than a header's {HEADER_BYTES}; {AGAIN}")
    magic, version, tokens = np.frombuffer(header, "<i4")[:3].tolist()
    expected = MAGIC_AND_VERSION[dtype.itemsize]
    if (magic, version) != expected:
        cure = f"has magic and version {(magic, version)}, not {expected} as shards of {dtype.name} tokens; {AGAIN}"
        raise UserError("shard", path, cure)
    if tokens < 1 or size != HEADER_BYTES + tokens * dtype.itemsize:
        cure = f"has {size} bytes, and its header promises {tokens} tokens of {dtype.itemsize} bytes; {AGAIN}"
        raise UserError("shard", path, cure)
    return tokens


def check_shard(folder: Path, shard: Shard, dtype: np.dtype) -> None:
    """Checks a shard's header and size against the manifest; UserError naming the file."""
    path = folder / shard.file
    tokens = read_header(path, dtype)
    if tokens != shard.tokens:
        raise UserError("shard", path, f"has {tokens} tokens where the manifest says {shard.tokens}; {AGAIN}")


class TokenStream:
    """A split as one stream of tokens, read at any position with `preadv`.

    Not a memory map: pages of a map count as the process's memory, and a truncated file would kill it with SIGBUS.
    It can be pickled and forked, so loader workers can have it; it is not meant for several threads.

    Raises:
        UserError: the split or a shard is missing, or a shard's header or size is wrong.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str):
        self._files: OrderedDict[int, int] = OrderedDict()  # shard -> file descriptor, least recently used first
        if split not in manifest.splits:
            cure = f"{folder} has no such split, only {', '.join(manifest.splits)}; prepare it with val_fraction > 0"
            raise UserError("split", split, cure)
        self.dtype = token_dtype(manifest.vocab_size)
        self.vocab_size = manifest.vocab_size
        self._paths = [Path(folder) / shard.file for shard in manifest.splits[split]]
        for shard in manifest.splits[split]:
            check_shard(Path(folder), shard, self.dtype)
        self._ends = np.cumsum([shard.tokens for shard in manifest.splits[split]])
        self._bounds = [0, *self._ends.tolist()]

    def __len__(self) -> int:
        return self._bounds[-1]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [len(starts), length], uint16 or uint32: row i begins at position `starts[i]` of the stream.

        Raises:
            IndexError: a row reaches outside the stream.
            UserError: naming the shard, when it was cut since it was opened or holds an id outside the vocabulary.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(f"{length} tokens from {starts.min()} to {starts.max()} in a stream of {len(self)}")
        rows = np.empty((len(starts), length), self.dtype)
        buffer, itemsize, filled = rows.reshape(-1).view(np.uint8).data, self.dtype.itemsize, 0
        shards = np.searchsorted(self._ends, starts, side="right").tolist()
        for shard, start in zip(shards, starts.tolist(), strict=True):
            end = start + length
            while start < end:
                stop = min(end, self._bounds[shard + 1])
                size = (stop - start) * itemsize
                self._read_into(buffer[filled : filled + size], shard, (start - self._bounds[shard]) * itemsize)
                filled, start, shard = filled + size, stop, shard + 1
        if rows.size and rows.max() >= self.vocab_size:
            row, column = np.argwhere(rows >= self.vocab_size)[0]
            path = self._paths[np.searchsorted(self._ends, starts[row] + column, side="right")]
            cure = f"holds token id {rows[row, column]}, outside the vocabulary of {self.vocab_size}; {AGAIN}"
            raise UserError("shard", path, cure)
        return rows

    def close(self) -> None:
        """Closes the files; reading opens them again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def __del__(self):
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_files": OrderedDict()}

    def _read_into(self, buffer: memoryview, shard: int, offset: int) -> None:
        if shard not in self._files:
            if len(self._files) == OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[shard] = os.open(self._paths[shard], os.O_RDONLY)
        self._files.move_to_end(shard)
        done = 0
        while done < len(buffer):
            count = os.preadv(self._files[shard], [buffer[done:]], HEADER_BYTES + offset + done)
            if count == 0:
                raise UserError("shard", self._paths[shard], f"became shorter while it was read; {AGAIN}")
            done += count
