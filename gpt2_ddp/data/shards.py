"""Token shards: files of token ids in the format of llm.c.

A shard `<split>_<index:06d>.bin` is 256 little-endian int32 (magic, version, token count, zeros),
then its tokens: uint16 for vocabularies of up to 65,536 ids, uint32 for larger ones. The shards of
a split, joined, are one stream.
"""
# pyright: reportUnknownMemberType=false
# (torch.from_numpy has no types)

import json
import os
import resource
from collections import OrderedDict
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gpt2_ddp.data.manifest import AGAIN, HEADER_BYTES, Manifest, Shard, token_dtype
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, regular, sha256_file

if TYPE_CHECKING:
    from torch import Tensor

MAGIC_AND_VERSION = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes per token
OPEN_SHARE = 4
"""A process keeps shards open in at most 1 / 4 of its file descriptors."""
RECORD = ".verified.jsonl"
"""In a folder of shards: a line per file that was hashed, with its size and times."""
LARGEST = 2**26
"""Largest record in bytes (300,000 shards); a larger one is not read."""


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
    fields = np.frombuffer(header.ljust(HEADER_BYTES, b"\0"), "<i4")[:3].tolist()
    actual = [*fields, size]
    expected_size = HEADER_BYTES + shard.tokens * dtype.itemsize
    expected = [*MAGIC_AND_VERSION[dtype.itemsize], shard.tokens, expected_size]
    if actual != expected:
        hint = f"has magic, version, tokens and bytes {actual}, not {expected}; {AGAIN}"
        raise UserError("shard", path, hint)


class ShardFile(NamedTuple):
    """A shard on disk. A path gets another shard when its folder is prepared again, so the hash
    belongs to it."""

    path: str
    sha256: str


class OpenShards:
    """Shards that are open for reading. If a file more would take too many of the process's
    descriptors, the one that was not read for the longest time is closed."""

    def __init__(self) -> None:
        self._files: OrderedDict[ShardFile, FileIO] = OrderedDict()  # the last one read is last

    def read(self, shard: ShardFile, buffer: memoryview, offset: int) -> int:
        """Reads bytes from this offset of the shard on into the buffer; opens the shard if it is
        not open. Returns their number, which is smaller at the end of the file. Raises: OSError."""
        file = self._files.get(shard)
        if file is None:
            file = self._open(shard)
        else:
            self._files.move_to_end(shard)
        return os.preadv(file.fileno(), [buffer], offset)

    def _open(self, shard: ShardFile) -> FileIO:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        while self._files and len(self._files) >= limit // OPEN_SHARE:
            _, least_recent = self._files.popitem(last=False)
            least_recent.close()
        file = open(shard.path, "rb", buffering=0)  # noqa: SIM115 (`close` and `_open` close it)
        self._files[shard] = file
        return file

    def close(self) -> None:
        """Closes all files. A later read opens its shard again."""
        while self._files:
            _, file = self._files.popitem()
            file.close()


OPEN_SHARDS = OpenShards()
"""Those of this process, for all streams: the limit is the process's, too."""


class TokenStream:
    """A split as one stream of tokens, read at any position with `preadv`.

    A memory map would count as the process's memory, and a truncated file would end the process by
    SIGBUS.

    Args:
        check: read all headers; one process of a machine suffices.

    Attributes:
        dtype: of the tokens in the files, uint16 or uint32.
        eot: id of the token that begins each document.

    Raises: UserError if a shard is missing, or its header or size is wrong.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str, check: bool = True):
        self.vocab_size = manifest.vocab_size
        self.dtype = token_dtype(manifest.vocab_size)
        self.eot = manifest.eot
        shards = manifest.splits[split]
        self._files = [ShardFile(str(folder / shard.file), shard.sha256) for shard in shards]
        if check:
            for shard in shards:
                check_shard(folder, shard, self.dtype)
        self._ends = np.cumsum([shard.tokens for shard in shards])
        self._begins: list[int] = [0, *self._ends.tolist()]  # and the end of the last one

    def __len__(self) -> int:
        return self._begins[-1]

    def read(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Tokens [len(starts), length], uint16 or uint32: row i begins at position `starts[i]` of
        the stream. Raises: UserError if a shard became shorter, or has an id outside the
        vocabulary."""
        rows = np.empty((len(starts), length), self.dtype)
        shards = np.searchsorted(self._ends, starts, side="right").tolist()
        for row, shard, start in zip(rows, shards, starts.tolist(), strict=True):
            self._fill(row, shard, start)
        return rows

    def _fill(self, row: np.ndarray, shard: int, start: int) -> None:
        """Reads the tokens from position `start` on, which is in this shard, into a row. The row
        may reach into later shards."""
        filled = 0
        while filled < len(row):
            end = self._begins[shard + 1]
            tokens = row[filled : filled + end - start]
            self._read_shard(shard, start - self._begins[shard], tokens)
            filled += len(tokens)
            start = end
            shard += 1

    def _read_shard(self, shard: int, first: int, tokens: np.ndarray) -> None:
        """Fills `tokens` from token `first` of a shard on."""
        file = self._files[shard]
        offset = HEADER_BYTES + first * self.dtype.itemsize
        if OPEN_SHARDS.read(file, tokens.data, offset) < tokens.nbytes:
            raise UserError("shard", file.path, f"became shorter while it was read; {AGAIN}")
        largest = tokens.max()
        if largest >= self.vocab_size:
            hint = f"holds token id {largest}, outside the vocabulary of {self.vocab_size}; {AGAIN}"
            raise UserError("shard", file.path, hint)


def verify_shards(
    folder: Path, manifest: Manifest, part: int = 0, parts: int = 1, record: bool = True
) -> None:
    """Checks headers, sizes and SHA-256 of every `parts`-th shard from `part` on: a node's
    processes share the work.

    Files that the folder's record lists unchanged are not hashed. `record`: add verified files to
    the record, if the folder is writable. Raises: UserError if a shard differs from the manifest.
    """
    verified: set[str] = set()
    with suppress(OSError):
        verified = {*read_small(folder / RECORD, LARGEST).decode(errors="replace").splitlines()}
    shards = [shard for split in sorted(manifest.splits) for shard in manifest.splits[split]]
    for shard in shards[part::parts]:
        check_shard(folder, shard, token_dtype(manifest.vocab_size))
        path = folder / shard.file
        # before hashing, to detect a change meanwhile; ctime, as `cp -p` keeps mtime
        stat = path.stat()
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        line = json.dumps([shard.file, shard.sha256, stat.st_size, *times, stat.st_ino])
        if line in verified:
            continue
        if sha256_file(path) != shard.sha256:
            raise UserError("shard", path, f"its SHA-256 differs from the manifest's; {AGAIN}")
        if record:
            # opening a pipe fails at once
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            flags |= os.O_NOFOLLOW  # a folder from somebody else may have a link
            with suppress(OSError), open(os.open(folder / RECORD, flags, 0o666), "a") as file:
                file.write(f"{line}\n")


def count_windows(n_tokens: int, block_size: int, shifts: int = 1) -> int:
    """Number of full windows of block_size inputs and their targets in a stream of n_tokens, from
    each of its first `shifts` tokens on."""
    return max(n_tokens - shifts, 0) // block_size


def numbered(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """For each of the numbers `firsts` [n]: itself and the next ones, `counts` of them; joined."""
    before: np.ndarray = np.cumsum(counts) - counts
    total = int(counts.sum())
    return np.repeat(firsts - before, counts) + np.arange(total)


class Windows:
    """The windows of `stream`, read by number. N windows lie side by side, from token 0 on, or from
    another of the first `shifts` tokens.

    An item is s · N + i, of window i from token s on: it begins at token i · T + s. So the items
    below N are the windows from token 0 on.
    """

    def __init__(self, stream: TokenStream, block_size: int, shifts: int = 1):
        self.stream = stream
        self.block_size = block_size
        self.shifts = shifts

    def __len__(self) -> int:
        return count_windows(len(self.stream), self.block_size, self.shifts)

    def read(self, items: np.ndarray) -> "tuple[Tensor]":
        """Tokens int64 [b, T + 1] of the items int64 [b]."""
        import torch  # noqa: PLC0415  heavy: prepare_data.py starts a second sooner without it

        tokens = self.stream.read(self.starts(items), self.block_size + 1)
        return (torch.from_numpy(tokens.astype(np.int64)),)

    def starts(self, items: np.ndarray) -> np.ndarray:
        """Positions in the stream, int64 [n], of the first token of the items int64 [n]."""
        shift, window = np.divmod(items, len(self))
        assert shift.max(initial=0) < self.shifts, "an item outside of the windows"
        return window * self.block_size + shift

    def items_with(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """The items, int64 [n] ascending, with a token of one of the spans `first` to `last`, of
        any shift. An item has T + 1 tokens."""
        shifts = np.arange(self.shifts)
        size = self.block_size
        begins = -((size + shifts - first[:, None]) // size)  # the first that ends late enough
        begins = begins.clip(0)
        stops = ((last[:, None] - shifts) // size + 1).clip(0, len(self))
        counts = (stops - begins).clip(0)
        firsts: np.ndarray = begins + shifts * len(self)
        return np.unique(numbered(firsts.ravel(), counts.ravel()))
