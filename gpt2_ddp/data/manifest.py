"""The manifest of a folder of token shards: what they are. A folder is usable when it has a `manifest.json`, which is
written last.

Its key `sha256` is the SHA-256 of all others: of `json.dumps(others, sort_keys=True)`. Version 1 had no such key.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from gpt2_ddp.distributed.environment import is_main_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_small, write_atomically

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 2**26
"""Bytes: 400,000 shards."""
HEADER_BYTES = 1024
"""Of a shard, before its tokens."""
AGAIN = "copy it again from where it is whole, or delete the folder and prepare the data again"

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

    @property
    def parts(self) -> dict[str, str]:
        """What `hash` is made from, in words: they differ where it does."""
        tokenizer = _sha256({"sha256": self.tokenizer_sha256, "eot": self.eot})
        parts = {"tokenizer": f"{self.tokenizer} of {self.vocab_size:,} ids (hash {tokenizer[:16]})"}
        for split, shards in self.splits.items():
            content = _sha256({"shards": [asdict(shard) for shard in shards]})
            parts[f"{split} split"] = f"{self.tokens(split):,} tokens in {len(shards)} shards (hash {content[:16]})"
        return parts

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
        hint = f"{_indexing(path.parent)} --tokenizer {own if os.path.isfile(own) else manifest.tokenizer}"
        print(f"note: {path} is of version 1, which has no hash of its own; delete it and run {hint} for one that has")
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
        hint = f"is not a manifest of this version ({what}); delete it and prepare the data again"
        raise UserError("data", path, hint) from error
    if content.pop("sha256", None) != (_sha256(content) if manifest.version > 1 else None):
        hint = f"copy it again from where it is whole, or delete it and run {_indexing(path.parent)}"
        raise UserError("data", path, f"is not the manifest that was written: its own sha256 differs; {hint}")
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


def _no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return "is not a folder; prepare_data.py makes one"
    if any(folder.glob("*.bin")):
        indexing = f"index shards made elsewhere with {_indexing(folder)}"
        return f"has shards and no {MANIFEST}: run its prepare_data.py command again, or {indexing}"
    return f"has no {MANIFEST}; prepare_data.py writes it beside the shards"


def _indexing(folder: Path) -> str:
    return f"prepare_data.py --source 'bin:{folder}/*.bin'"
