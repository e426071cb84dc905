"""Token shards: files of token ids in the format of llm.c.

A shard `<split>_<index:06d>.bin` is 256 little-endian int32 (magic, version, token count, zeros),
then its tokens: uint16 for vocabularies of up to 65,536 ids, uint32 for larger ones. The shards of
a split, joined, are one stream.
"""

import json
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt2_ddp.data.manifest import AGAIN, HEADER_BYTES, Manifest, Shard, token_dtype
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, regular, sha256_file

if TYPE_CHECKING:
    from torch import Tensor

MAGIC_AND_VERSION = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes per token
OPEN_SHARE = 4
"""A process keeps shards open in at most 1 / 4 of its file descriptors."""


def check_shard(folder: Path, shard: Shard, dtype: np.dtype) -> None:
    """Compares a shard's header and size with the manifest. Raises: UserError if the file is
    missing or differs."""
    path = folder / shard.file
    try:
        with open(regular(path), "rb") as file:
            header = file.read(HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise UserError("shard", path, f"cannot be read ({error.strerror}); {AGAIN}") from error
    found = [*np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), "<i4")[:3].tolist(), size]
    expected = [
        *MAGIC_AND_VERSION[dtype.itemsize],
        shard.tokens,
        HEADER_BYTES + shard.tokens * dtype.itemsize,
    ]
    if found != expected:
        raise UserError(
            "shard", path, f"has magic, version, tokens and bytes {found}, not {expected}; {AGAIN}"
        )


class TokenStream:
    """A split as one stream of tokens, read at any position with `preadv`.

    A memory map would count as the process's memory, and a truncated file would end the process by
    SIGBUS.
    `check`: read all headers; one process of a machine suffices. Raises: UserError if a shard is
    missing, or its header or size is wrong.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str, check: bool = True):
        self.vocab_size, self.dtype = manifest.vocab_size, token_dtype(manifest.vocab_size)
        self.eot = manifest.eot  # begins each document
        shards = manifest.splits[split]
        self._files = [(str(folder / shard.file), shard.sha256) for shard in shards]
        for shard in shards if check else ():
            check_shard(folder, shard, self.dtype)
        self._ends = np.cumsum([shard.tokens for shard in shards])
        self._begins = [0, *self._ends.tolist()]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [len(starts), length], uint16 or uint32: row i begins at position `starts[i]` of
        the stream. Raises: UserError if a shard became shorter, or has an id outside the
        vocabulary."""
        rows = np.empty((len(starts), length), self.dtype)
        shards = np.searchsorted(self._ends, starts, side="right").tolist()
        for row, shard, start in zip(rows, shards, starts.tolist(), strict=True):
            filled = 0
            while filled < length:
                first, after = self._begins[shard : shard + 2]
                part = row[filled : filled + after - start]
                offset = HEADER_BYTES + (start - first) * self.dtype.itemsize
                if (
                    os.preadv(_opener()(*self._files[shard]).fileno(), [part.data], offset)
                    < part.nbytes
                ):
                    raise UserError(
                        "shard", self._files[shard][0], f"became shorter while it was read; {AGAIN}"
                    )
                if part.max() >= self.vocab_size:
                    hint = f"holds token id {part.max()}, outside the vocabulary of {self.vocab_size}; {AGAIN}"
                    raise UserError("shard", self._files[shard][0], hint)
                filled += len(part)
                start = after
                shard += 1
        return rows


@cache
def _opener() -> Callable[[str, str], FileIO]:
    """Opens the shard of a path and a SHA-256, since a path may get other shards; keeps the last
    ones open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return lru_cache(limit // OPEN_SHARE)(lambda path, sha256: open(path, "rb", buffering=0))


RECORD = ".verified.jsonl"
LARGEST = 2**26
"""Largest record in bytes (300,000 shards); a larger one is not read."""


def verify_shards(
    folder: Path, manifest: Manifest, part: int = 0, parts: int = 1, record: bool = True
) -> None:
    """Checks headers, sizes and SHA-256 of every `parts`-th shard from `part` on: a node's
    processes share the work.

    Files that the folder's record lists unchanged are not hashed. `record`: add verified files to
    the record, if the folder is writable. Raises: UserError if a shard differs from the manifest.
    """
    known: set[str] = set()
    with suppress(OSError):
        known = {*read_small(folder / RECORD, LARGEST).decode(errors="replace").splitlines()}
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    for shard in shards[part::parts]:
        check_shard(folder, shard, token_dtype(manifest.vocab_size))
        path = folder / shard.file
        # before hashing, to detect a change meanwhile; ctime, as `cp -p` keeps mtime
        stat = path.stat()
        file = [
            shard.file,
            shard.sha256,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
            stat.st_ino,
        ]
        line = json.dumps(file)
        if line in known:
            continue
        if sha256_file(path) != shard.sha256:
            raise UserError("shard", path, f"its SHA-256 differs from the manifest's; {AGAIN}")
        if record:
            # opening a pipe fails at once
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            flags |= os.O_NOFOLLOW  # a folder from somebody else may have a link
            with suppress(OSError), open(os.open(folder / RECORD, flags, 0o666), "a") as file:
                file.write(f"{line}\n")


def count_windows(n_tokens: int, block_size: int) -> int:
    """Number of full windows of block_size inputs and their targets in a stream of n_tokens."""
    return max(n_tokens - 1, 0) // block_size


class Windows:
    """The windows of `stream`, read by number."""

    def __init__(self, stream: TokenStream, block_size: int):
        self.stream = stream
        self.block_size = block_size

    def __len__(self) -> int:
        return count_windows(len(self.stream), self.block_size)

    def read(self, items: np.ndarray) -> "tuple[Tensor]":
        """Tokens int64 [b, T + 1] of the windows int64 [b]."""
        import torch  # here: processes that prepare data start a second sooner without it

        tokens = self.stream.read(items * self.block_size, self.block_size + 1)
        return (torch.from_numpy(tokens.astype(np.int64)),)
