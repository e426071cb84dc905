"""Writes token shards."""

import json
from concurrent.futures import Executor, Future
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, Manifest, Shard, content_sha256, parse_manifest, token_dtype
from gpt2_ddp.data.shards import MAGIC_AND_VERSION
from gpt2_ddp.distributed.workers import InlineExecutor
from gpt2_ddp.files import fsync_file, sha256_file, write_atomically


class ShardWriter:
    """Writes the tokens of one split into shards of `shard_tokens` tokens; the last may be shorter.

    Args:
        pool: syncs and hashes shards in the background; None: in this process.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int, pool: Executor | None = None):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)
        self._pool = pool or InlineExecutor()
        self._shards: list[Future[Shard]] = []
        self._file = None
        self._tokens = 0

    def add(self, tokens: np.ndarray) -> None:
        """Appends token ids [n], all below `vocab_size`."""
        assert not len(tokens) or tokens.max() < self.vocab_size, "token id outside the vocabulary"
        tokens = np.ascontiguousarray(tokens, self.dtype)
        while len(tokens):
            if self._file is None:
                self._file = open(self._path(), "wb")  # noqa: SIM115 (open until the shard is full)
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
        return [shard.result() for shard in self._shards]

    def _path(self) -> Path:
        return self.folder / f"{self.split}_{len(self._shards):06d}.bin"

    def _finish(self) -> None:
        assert self._file is not None
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *MAGIC_AND_VERSION[self.dtype.itemsize], self._tokens
        with self._file as file:
            file.seek(0)
            file.write(header.data)
        size = HEADER_BYTES + self._tokens * self.dtype.itemsize
        self._shards.append(self._pool.submit(_sync_and_hash, self._path(), self._tokens, size))
        self._file, self._tokens = None, 0


def _sync_and_hash(path: Path, tokens: int, size: int) -> Shard:
    fsync_file(path)
    return Shard(path.name, tokens, size, sha256_file(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` atomically.

    Raises:
        UserError: the manifest is invalid, as when one shard is in both splits.
    """
    content = asdict(manifest)
    content["sha256"] = content_sha256(content)
    text = json.dumps(content, indent=1) + "\n"
    parse_manifest(text.encode(), folder / MANIFEST)
    write_atomically(folder / MANIFEST, text)
