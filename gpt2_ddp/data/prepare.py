"""Text to token shards. The same source and settings give the same bytes with any number of workers, and a folder is
usable only when it is whole: its manifest.json is written last, and a preparation that was killed starts over.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import tiktoken

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.encode import write_splits
from gpt2_ddp.data.index_shards import index_shards
from gpt2_ddp.data.shards import MANIFEST, Manifest, check_shard, read_manifest, token_dtype, write_manifest
from gpt2_ddp.data.sources import describe, read_pieces
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, load_tokenizer, train_bpe
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_file, write_atomically

LOCK = ".prepare.lock"
"""Held while a folder is written, and kept: it marks the folder's files as ours, so that leftovers can be cleared."""
BPE_CHARACTERS = 10**9
"""A BPE is trained on the first so many characters of the source; more would hardly change it."""


def prepare(config: PrepareConfig) -> Manifest:
    """Makes a folder of token shards; one that is ready already is left as it is.

    Returns:
        The folder's manifest.

    Raises:
        UserError: the source, the tokenizer or the output folder cannot be used, or the folder holds something else.
    """
    if config.source.startswith("bin:"):
        return index_shards(config)
    folder = Path(config.output or default_output(config))
    manifest = _finished(folder, config)  # first without the lock, since the folder may be read-only
    if manifest is None:
        with _alone_in(folder):
            manifest = _finished(folder, config) or _prepare(folder, config)
    return manifest


def default_output(config: PrepareConfig) -> str:
    """data/NAME, with the name of the file, folder or dataset: `texts/*.txt` goes to data/texts."""
    if config.source.startswith("hub:"):
        name = config.source.rpartition("/")[2]
        return f"data/{name}-{config.subset}" if config.subset else f"data/{name}"
    parts = takewhile(lambda part: not set(part) & set("*?["), Path(config.source).parts)
    return f"data/{Path(*parts).stem or 'text'}"


def _finished(folder: Path, config: PrepareConfig) -> Manifest | None:
    """The manifest of a folder that was prepared in the same way; UserError if in another; None if it is not ready."""
    if not os.path.exists(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    recipe, made_with = _recipe(config), manifest.recipe
    differing = [f"{name} {made_with.get(name)}" for name in recipe if made_with.get(name) != recipe[name]]
    if differing:
        cure = f"holds shards made with {', '.join(differing)}; choose another output, or delete it"
        raise UserError("output", folder, cure)
    for shards in manifest.splits.values():
        for shard in shards:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
    print(f"{folder} is already prepared: {_summary(manifest)}; delete it to prepare it anew")
    return manifest


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings that decide the tokens."""
    recipe = config.model_dump(mode="json", exclude={"output", "workers"})
    if config.tokenizer != "bpe":
        del recipe["vocab_size"]
    return recipe


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Makes the folder and holds it, after any other process that prepares it; leftovers are cleared."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        foreign = any(folder.glob("*.bin")) or (folder / TOKENIZER_FILE).exists()
        if foreign and not (folder / LOCK).exists():
            cure = (
                "holds files that prepare_data.py did not write; choose another output, or index shards with bin:GLOB"
            )
            raise UserError("output", folder, cure)
        lock = open(folder / LOCK, "w")  # noqa: SIM115 (held until the end)
    except OSError as error:
        raise UserError("output", folder, f"cannot be written ({error.strerror}); choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process prepares {folder}; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        _clear(folder)
        try:
            yield
        finally:
            _clear(folder)


def _clear(folder: Path) -> None:
    """Removes what a preparation that did not come to its end has left behind."""
    if not (folder / MANIFEST).exists():
        for pattern in ("train_*.bin", "val_*.bin", ".*.tmp", TOKENIZER_FILE):
            for leftover in folder.glob(pattern):
                leftover.unlink()


def _prepare(folder: Path, config: PrepareConfig) -> Manifest:
    start = time.perf_counter()
    try:
        name = _place_tokenizer(folder, config)
        tokenizer = load_tokenizer(name)
        splits = write_splits(folder, config, name)
        identity = tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot
        manifest = Manifest(2, *identity, describe(config), splits, _recipe(config))
        write_manifest(folder, manifest)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError("output", folder, f"{error.strerror}; free some, or choose another folder") from error
    print(f"{folder} is prepared: {_summary(manifest)}, in {time.perf_counter() - start:.0f} s")
    return manifest


def _summary(manifest: Manifest) -> str:
    tokens = [f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits]
    return f"{', '.join(tokens)}, vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"


def _place_tokenizer(folder: Path, config: PrepareConfig) -> str:
    """An encoding's name; or the path, inside the folder, of the tokenizer that is trained or copied there."""
    own = folder / TOKENIZER_FILE
    if config.tokenizer == "bpe":
        print(f"training a BPE of {config.vocab_size:,} tokens", flush=True)
        train_bpe(_first(BPE_CHARACTERS, (piece.text for piece in read_pieces(config))), config.vocab_size, own)
        fsync_file(own)
        return str(own)
    if config.tokenizer in tiktoken.list_encoding_names():
        return config.tokenizer
    load_tokenizer(config.tokenizer)  # refuses what is not one
    given = Path(config.tokenizer)
    write_atomically(own, (given / TOKENIZER_FILE if given.is_dir() else given).read_bytes())
    return str(own)


def _first(characters: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
