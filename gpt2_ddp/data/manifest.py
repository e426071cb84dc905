"""The manifest of a folder of token shards: `manifest.json`, written last, which makes the folder
usable.

Its key `sha256` is the SHA-256 of `json.dumps(others, sort_keys=True)`, where `others` are all
other keys.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import AfterValidator, Field, TypeAdapter

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_file_name, parse_json, read_small

MANIFEST = "manifest.json"
VERSION = 3
"""Version of new manifests. Up to version 2, the BPE of a folder was trained on its validation
text, too."""
LARGEST_MANIFEST = 2**26
"""Largest manifest in bytes, for 400,000 shards."""
HEADER_BYTES = 1024
"""Size of a shard's header."""
AGAIN = "copy it again from an intact copy, or delete the folder and prepare the data again"

Name = Annotated[str, Field(max_length=255), AfterValidator(check_file_name)]
Number = Annotated[int, Field(ge=0, lt=2**32)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Shard:
    """A shard file; a manifest lists it."""

    file: Name
    """its name"""
    tokens: Annotated[int, Field(ge=1, lt=2**31)]
    bytes: int
    """size of the file"""
    sha256: Digest


Split = Annotated[str, Field(pattern=r"^(train|val)$")]


@dataclass(frozen=True)
class Manifest:
    """Contents of a shard folder.

    Attributes:
        tokenizer: its file in the folder, or the name of an encoding.
        eot: id of the end-of-text token, which begins each document.
        source: the text that was prepared, in words.
        splits: the shards of `train` and `val`, in their order.
        recipe: the configuration that made them; not part of the hash.
    """

    version: Literal[2, 3]
    tokenizer: Name
    tokenizer_sha256: str
    vocab_size: Number
    eot: Number
    source: str
    splits: Annotated[dict[Split, Annotated[list[Shard], Field(min_length=1)]], Field(min_length=1)]
    recipe: dict[str, Any] = field(default_factory=dict[str, Any])

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the tokens and the tokenizer, without source and recipe. Checkpoints record
        it."""
        content = {
            key: value for key, value in asdict(self).items() if key not in ("source", "recipe")
        }
        # a constant, as saved checkpoints have such hashes
        return content_sha256(content | {"version": 1})

    def tokens(self, split: str) -> int:
        """Number of tokens of a split; 0 for a missing split."""
        return sum(shard.tokens for shard in self.splits.get(split, []))

    @property
    def tokenizer_knows_validation(self) -> bool:
        """Whether the folder's tokenizer was trained on its validation text, too."""
        return self.version < 3 and self.recipe.get("tokenizer") == "bpe" and self.tokens("val") > 0


def tokenizer_note(manifests: Mapping[str, Manifest]) -> str:
    """Note on evaluations in these folders, whose tokenizer has seen the validation text; empty if
    there are none."""
    folders = [
        folder for folder, manifest in manifests.items() if manifest.tokenizer_knows_validation
    ]
    if not folders:
        return ""
    return (
        f"an earlier release prepared {' '.join(folders)}, "
        "and trained the tokenizer on the validation text, too: "
        "bits per byte of this text are up to some percent too low; "
        "prepare the text again for figures to compare"
    )


def text_bytes(manifest: Manifest) -> int:
    """Bytes of the text that the tokens were made of; 0 if prepare_data.py did not record them."""
    account: object = manifest.recipe.get("account")
    if not isinstance(account, dict):
        return 0
    size = cast(dict[str, object], account).get("bytes")
    return size if type(size) is int else 0


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of token ids in a shard: little-endian uint16, or uint32 for more than 65,536 ids."""
    return np.dtype("<u2" if vocab_size <= 65_536 else "<u4")


def read_manifest(folder: Path, field: str = "data.path") -> Manifest:
    """Reads and validates `manifest.json`. `field`: the one that names the folder. Raises:
    UserError if the manifest is missing, unreadable, changed since it was written, or of another
    version."""
    path = Path(folder) / MANIFEST
    try:
        text = read_small(path, LARGEST_MANIFEST)
    except OSError as error:
        hint = f"{MANIFEST} cannot be read ({error.strerror}); create it with prepare_data.py"
        raise UserError(field, folder, hint) from error
    return parse_manifest(text, path, field)


def parse_manifest(text: bytes, path: Path | str, field: str = "data.path") -> Manifest:
    """The manifest in the file or at the URL `path`. Raises: UserError."""
    try:
        manifest = TypeAdapter(Manifest).validate_json(text, strict=True)
        content = parse_json(text)
        _check_consistent(manifest)
    except ValueError as error:
        hint = f"is not a manifest of this version; delete it and prepare the data again ({error})"
        raise UserError(field, path, hint) from error
    if content.pop("sha256", None) != content_sha256(content):
        raise UserError(field, path, f"was changed: its own sha256 differs; {AGAIN}")
    return manifest


def _check_consistent(manifest: Manifest) -> None:
    """Raises: ValueError for a shard that is in both splits."""
    train, val = (
        {shard.sha256 for shard in manifest.splits.get(split, [])} for split in ("train", "val")
    )
    if train & val:
        raise ValueError(f"both splits have the shard of SHA-256 {min(train & val)}")


def content_sha256(content: dict[str, Any]) -> str:
    """SHA-256 of `json.dumps(content, sort_keys=True)`, in hex."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def missing_folders(config: TrainingConfig) -> list[str]:
    """The folders of `data.path` that have no manifest."""
    return [path for path in config.data.paths if not os.path.exists(os.path.join(path, MANIFEST))]
