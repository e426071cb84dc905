"""Token shards: files of token ids in the format of llm.c, and the manifest beside them that says what they are.

A shard `<split>_<index:06d>.bin` is 256 little-endian int32 (magic, version, token count, zeros), then its tokens:
uint16 for vocabularies of up to 65,536 ids, uint32 for larger ones. The shards of a split, joined, are one stream.
A folder is usable when it has a `manifest.json`, which is written last. Its key `sha256` is the SHA-256 of all others:
of `json.dumps(others, sort_keys=True)`. Version 1 had no such key.
"""

import hashlib
import json
import os
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from gpt2_ddp.config.cli import is_main_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_folder, read_small, regular, sha256_file, write_atomically

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 2**26
"""Bytes: 400,000 shards."""
HEADER_BYTES = 1024
MAGIC_AND_VERSION = {2: (20240520, 1), 4: (20240801, 7)}  # by bytes per token
AGAIN = "copy it again from where it is whole, or delete the folder and prepare the data again"
OPEN_FILES = 64
"""Shards that a `TokenStream` keeps open; a corpus may have more shards than a process may have files."""


Name = Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f]+$", max_length=255)]
Number = Annotated[int, Field(ge=0, lt=2**32)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Shard:
    """One file: its name, how many tokens and bytes it has, and its SHA-256."""

    file: Name
    tokens: Annotated[int, Field(ge=1, lt=2**31)]
    bytes: int
    sha256: Digest


Split = Annotated[str, Field(pattern=r"^(train|val)$")]
"""Another would be trained on by nobody, and a `val` that is missing would be missed by nobody."""


@dataclass(frozen=True)
class Manifest:
    """What the shards of a folder are; `recipe` says how they were made and is not part of their identity."""

    version: Literal[1, 2]
    tokenizer: Name
    tokenizer_sha256: str
    vocab_size: Number
    eot: Number
    source: str
    splits: Annotated[dict[Split, Annotated[list[Shard], Field(min_length=1)]], Field(min_length=1)]
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """SHA-256 that changes when a token or the tokenizer does, and not with where the text came from, nor with the
        manifest's version: checkpoints hold it."""
        content = {key: value for key, value in asdict(self).items() if key not in ("source", "recipe")}
        return _sha256(content | {"version": 1})

    def tokens(self, split: str) -> int:
        """Tokens of a split, 0 for one that does not exist."""
        return sum(shard.tokens for shard in self.splits.get(split, []))


def token_dtype(vocab_size: int) -> np.dtype:
    """The type of a token id in a shard: little-endian uint16, or uint32 for more than 65,536 ids."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def read_manifest(folder: Path) -> Manifest:
    """Reads and validates `manifest.json`; the main process says so when it is of version 1.

    Raises:
        UserError: the folder or its manifest is missing, unreadable, changed, or not a manifest of these versions.
    """
    path = Path(folder) / MANIFEST
    try:
        text = read_small(path, LARGEST_MANIFEST)
    except FileNotFoundError as error:
        raise UserError("data", folder, _no_manifest(Path(folder))) from error
    except OSError as error:
        raise UserError("data", folder, f"{MANIFEST} cannot be read ({error.strerror})") from error
    manifest = _parse(text, path)
    if manifest.version == 1 and is_main_process():
        own = path.parent / manifest.tokenizer
        cure = f"{_indexing(path.parent)} --tokenizer {own if os.path.isfile(own) else manifest.tokenizer}"
        print(f"note: {path} is of version 1, which has no hash of its own; delete it and run {cure} for one that has")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json`, whole or not at all, which makes the folder usable.

    Raises:
        UserError: it is none that could be read, as when a file is both trained on and validated on.
    """
    content = asdict(manifest)
    if manifest.version > 1:
        content["sha256"] = _sha256(content)
    text = json.dumps(content, indent=1) + "\n"
    _parse(text.encode(), folder / MANIFEST)
    write_atomically(folder / MANIFEST, text)


def _parse(text: bytes, path: Path) -> Manifest:
    try:
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
        content = json.loads(text)
        _check_sense(manifest)
    except ValueError as error:
        what = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            what = f"{'.'.join(map(str, first['loc'])) or 'JSON'}: {first['msg']}"
        cure = f"is not a manifest of this version ({what}); delete it and prepare the data again"
        raise UserError("data", path, cure) from error
    if content.pop("sha256", None) != (_sha256(content) if manifest.version > 1 else None):
        cure = f"copy it again from where it is whole, or delete it and run {_indexing(path.parent)}"
        raise UserError("data", path, f"is not the manifest that was written: its own sha256 differs; {cure}")
    return manifest


def _check_sense(manifest: Manifest) -> None:
    """Raises ValueError for what contradicts itself, and for what is both trained on and validated on."""
    if manifest.eot >= manifest.vocab_size:
        raise ValueError(f"eot: {manifest.eot} is outside the vocabulary of {manifest.vocab_size}")
    itemsize = token_dtype(manifest.vocab_size).itemsize
    names: set[str] = set()
    splits: dict[tuple[str, int], str] = {}
    for split, shards in manifest.splits.items():
        for shard in shards:
            if shard.bytes != HEADER_BYTES + shard.tokens * itemsize:
                raise ValueError(f"{shard.file}: {shard.tokens} tokens of {itemsize} bytes are not {shard.bytes} bytes")
            if shard.file in names:
                raise ValueError(f"{shard.file} is listed twice")
            if splits.setdefault((shard.sha256, shard.bytes), split) != split:
                raise ValueError(f"{shard.file} holds what the other split has, too")
            names.add(shard.file)


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class ShardWriter:
    """Writes the tokens of one split into shards of `shard_tokens` tokens, the last one shorter.

    A shard carries a temporary name until it is whole and on disk.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, vocab_size: int):
        self.folder = folder
        self.split = split
        self.shard_tokens = shard_tokens
        self.vocab_size = vocab_size
        self.dtype = token_dtype(vocab_size)
        self.shards: list[Shard] = []
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
        fsync_folder(self.folder)
        return self.shards

    def _name(self) -> str:
        return f"{self.split}_{len(self.shards):06d}.bin"

    def _temporary(self) -> Path:
        return self.folder / f".{self._name()}.tmp"

    def _finish(self) -> None:
        assert self._file is not None
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:3] = *MAGIC_AND_VERSION[self.dtype.itemsize], self._tokens
        with self._file as file:
            file.seek(0)
            file.write(header.data)
            file.flush()
            os.fsync(file.fileno())
        size = HEADER_BYTES + self._tokens * self.dtype.itemsize
        shard = Shard(self._name(), self._tokens, size, sha256_file(self._temporary()))
        self._temporary().replace(self.folder / shard.file)
        self.shards.append(shard)
        self._file, self._tokens = None, 0


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


def _no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return "is not a folder; prepare_data.py makes one"
    if any(folder.glob("*.bin")):
        indexing = f"index shards made elsewhere with {_indexing(folder)}"
        return f"has shards and no {MANIFEST}: run its prepare_data.py command again, or {indexing}"
    return f"has no {MANIFEST}; prepare_data.py writes it beside the shards"


def _indexing(folder: Path) -> str:
    return f"prepare_data.py --source 'bin:{folder}/*.bin'"
