"""Shards made by others (llm.c, modded-nanogpt) become usable in place: all are read, then a manifest is written."""

import glob
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, Manifest, Shard, read_manifest, token_dtype
from gpt2_ddp.data.shards import read_header
from gpt2_ddp.data.tokenizer import Tokenizer, encoding_names, load_tokenizer
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.shard_writer import write_manifest

BLOCK_BYTES = 2**24


def index_shards(config: PrepareConfig) -> Manifest:
    """Checks every token of the shards of `bin:GLOB` and writes their folder's manifest.json, and nothing else.

    A file belongs to the split, `train` or `val`, that its name contains.

    Raises:
        UserError: there are no such files, or they are in several folders. One is not whole, has ids outside the
            vocabulary, or is in both splits. The folder has the manifest of other shards.
    """
    files = sorted(Path(file) for file in glob.glob(os.path.expanduser(config.source.removeprefix("bin:"))))
    if not files:
        raise UserError("source", config.source, "there are no such files; write bin:FOLDER/*.bin")
    folder = files[0].parent
    if any(path.parent != folder for path in files):
        raise UserError("source", config.source, "these lie in several folders; index each folder by itself")
    if config.output is not None and os.path.realpath(config.output) != os.path.realpath(folder):
        raise UserError("output", config.output, f"shards are indexed where they are; give {folder}, or nothing")
    tokenizer = _tokenizer_of_shards(config.tokenizer, folder)
    recipe = {"files": [path.name for path in files], "tokenizer_sha256": tokenizer.sha256}
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.recipe != recipe:
            raise UserError("output", folder, f"has the {MANIFEST} of other shards; delete it to index these")
        print(f"{folder} is already indexed: {_summary(manifest)}")
        return manifest

    splits: dict[str, list[Shard]] = {_split(path): [] for path in files}
    with ThreadPoolExecutor(config.workers or usable_cores(hyperthreads=True)) as pool:  # hashing runs outside the GIL
        for path, shard in zip(files, pool.map(partial(_index, tokenizer=tokenizer), files), strict=True):
            splits[_split(path)].append(shard)
    identity = tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot
    manifest = Manifest(2, *identity, config.source, splits, recipe)
    try:
        write_manifest(folder, manifest)
    except OSError as error:
        hint = f"{MANIFEST} cannot be written into it ({error.strerror}); make it writable, or link its files elsewhere"
        raise UserError("output", folder, hint) from error
    print(f"{folder} is indexed: {_summary(manifest)}")
    return manifest


def _summary(manifest: Manifest) -> str:
    return ", ".join(f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits)


def _tokenizer_of_shards(name: str, folder: Path) -> Tokenizer:
    if name in ("bpe", "chars"):
        raise UserError("tokenizer", name, "name the tokenizer that the shards were made with, such as gpt2")
    if name not in encoding_names() and os.path.realpath(Path(name).parent) != os.path.realpath(folder):
        raise UserError("tokenizer", name, f"copy the file into {folder}, beside the shards, and name it there")
    return load_tokenizer(name)


def _split(path: Path) -> str:
    names = [split for split in ("val", "train") if split in path.name]
    names = [split for split in names if split in re.split("[^a-z]", path.name)] or names  # not for its `interval`
    if len(names) != 1:
        raise UserError("shard", path, "its name should say either train or val; rename it, or narrow the glob")
    return names[0]


def _index(path: Path, tokenizer: Tokenizer) -> Shard:
    dtype = token_dtype(tokenizer.vocab_size)
    tokens = read_header(path, dtype)
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HEADER_BYTES))
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            largest = np.frombuffer(block, dtype).max()
            if largest >= tokenizer.vocab_size:
                hint = f"holds token id {largest}, but {tokenizer.name} has {tokenizer.vocab_size}; name its tokenizer"
                raise UserError("shard", path, hint)
    return Shard(path.name, tokens, HEADER_BYTES + tokens * dtype.itemsize, digest.hexdigest())
