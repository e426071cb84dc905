"""Text to token shards. The same source and settings give the same bytes with any number of workers, and a folder is
usable only when it is whole: its manifest.json is written last, and a preparation that was killed starts over.
"""

import errno
import os
import threading
import time
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import MANIFEST, Manifest, read_manifest, token_dtype
from gpt2_ddp.data.shards import check_shard
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, encoding_names, load_tokenizer
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.distributed.workers import InlineExecutor, worker_pool
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make, write_atomically
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.account import lines
from gpt2_ddp.preparation.encode import write_splits
from gpt2_ddp.preparation.fingerprint import RECORD, check_unchanged, record_source
from gpt2_ddp.preparation.index_shards import index_shards
from gpt2_ddp.preparation.shard_writer import write_manifest
from gpt2_ddp.preparation.sources import Scan, describe, read_pieces, scan
from gpt2_ddp.preparation.vocabulary import make_tokenizer, suitable_vocab_size

ACCOUNT = "account"
"""What became of the source, in the manifest's recipe, which is no part of the data's identity."""
MARK = ".prepare.lock"
"""An empty file that marks the files of a folder as ours. Older releases locked it."""
LEFT = ("train_*.bin", "val_*.bin", ".train*.tmp", ".val*.tmp", ".*.json*.tmp", TOKENIZER_FILE, RECORD)
"""What a killed preparation may leave in its folder."""


def prepare(config: PrepareConfig, fast: bool = True) -> Manifest:
    """Makes a folder of token shards; one that is ready already is left as it is.

    Args:
        fast: with gigatoken, where it is installed; the result is the same.

    Returns:
        The folder's manifest.

    Raises:
        UserError: the source, the tokenizer or the output folder cannot be used, or the folder holds something else.
    """
    if config.source.startswith("bin:"):
        return index_shards(config)
    folder = Path(config.folder)
    source = "" if config.source == "stdlib" else os.path.expanduser(config.source)
    if os.path.isdir(source) and os.path.isdir(folder) and os.path.samefile(source, folder):
        raise UserError("output", folder, "is the source; choose another folder, which may be in it")
    config = config.model_copy(update={"output": str(folder)})
    manifest = _finished(folder, config)  # first without the lock, since the folder may be read-only
    if manifest is None:
        try:
            check_can_make(folder)
        except OSError as error:
            raise UserError("output", folder, f"cannot be written ({error.strerror}); choose another folder") from error
        with locked_output(folder, f"another process prepares {folder}; waiting for it") as aside:
            manifest = _finished(folder, config)
            if manifest is None:
                _clear(folder)
                workers = config.workers or usable_cores(hyperthreads=True)
                with worker_pool(workers) if workers > 1 else nullcontext(InlineExecutor()) as pool:
                    return _prepare(aside, config, pool, workers, fast)
    else:
        check_unchanged(folder, config, manifest.recipe.get("fingerprint", {}), manifest.source)
    print(f"{folder} is already prepared: {_summary(manifest)}; delete it to prepare it anew")
    _print_account(manifest)
    return manifest


def _finished(folder: Path, config: PrepareConfig) -> Manifest | None:
    """The manifest of a folder that was prepared in the same way; UserError if in another; None if it is not ready."""
    if not os.path.exists(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    recipe, defaults = _recipe(config), PrepareConfig().model_dump(mode="json", exclude={"source"})
    made_with = defaults | manifest.recipe  # a field that has come since has its default there
    if recipe.get("vocab_size", 0) is None:  # any will do
        del recipe["vocab_size"]
    differing = [f"{name} {made_with.get(name)}" for name in recipe if made_with.get(name) != recipe[name]]
    if differing:
        hint = f"holds shards made with {', '.join(differing)}; choose another output, or delete it"
        raise UserError("output", folder, hint)
    for shards in manifest.splits.values():
        for shard in shards:
            check_shard(folder, shard, token_dtype(manifest.vocab_size))
    return manifest


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings that decide the tokens."""
    recipe = config.model_dump(mode="json", exclude={"output", "workers"})
    if config.tokenizer != "bpe":
        del recipe["vocab_size"]
    return recipe


def _clear(folder: Path) -> None:
    """Removes what a killed preparation left in the folder. Raises: UserError for files of others."""
    if (folder / MARK).exists():
        for file in (file for pattern in LEFT for file in folder.glob(pattern)):
            file.unlink()
    elif any(folder.glob("*.bin")) or (folder / TOKENIZER_FILE).exists():
        hint = "holds files that prepare_data.py did not write; choose another output, or index shards with bin:GLOB"
        raise UserError("output", folder, hint)


def _prepare(aside: Path, config: PrepareConfig, pool: Executor, workers: int, fast: bool) -> Manifest:
    """Fills the folder `aside`, which then becomes the output."""
    folder, start = Path(config.folder), time.perf_counter()
    fingerprint: dict[str, Any] = {}
    try:
        seen, fingerprint = _look(aside, config, pool)
        recipe = _recipe(config) | {"fingerprint": fingerprint}
        size = config.vocab_size or suitable_vocab_size(fingerprint.get("bytes"))
        config = config.model_copy(update={"vocab_size": size})
        name = _place_tokenizer(aside, config, seen)
        tokenizer = load_tokenizer(name)
        if config.tokenizer == "bpe" and tokenizer.vocab_size < size:
            print(f"the BPE has {tokenizer.vocab_size:,} tokens, not {size:,}: there is no more to merge")
        splits = write_splits(aside, config, name, seen, pool, workers, fast)
        check_unchanged(aside, config, fingerprint)
        identity = tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot
        manifest = Manifest(2, *identity, describe(config), splits, recipe | {ACCOUNT: asdict(seen.account)})
        write_manifest(aside, manifest)
        (aside / MARK).touch()
        publish(aside, folder, last=MANIFEST)
    except (OSError, UserError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError("output", folder, f"{error.strerror}; free some, or choose another folder") from error
        check_unchanged(aside, config, fingerprint)  # that is why, perhaps
        raise
    print(f"{folder} is prepared: {_summary(manifest)}, in {time.perf_counter() - start:.0f} s")
    _print_account(manifest)
    return manifest


def _look(folder: Path, config: PrepareConfig, pool: Executor) -> tuple[Scan, dict[str, Any]]:
    """What the files are, and what they were."""
    is_hub = config.source.startswith("hub:")  # which is asked nothing more, where it does not answer
    recorded = None if is_hub else pool.submit(_record, folder, config)  # a worker hashes the files meanwhile
    seen = scan(config)
    if next(read_pieces(config, seen), None) is None:
        raise UserError("source", config.source, "has too little text for a train split: it has none")
    return seen, recorded.result() if recorded else record_source(folder, config)


def _record(folder: Path, config: PrepareConfig) -> dict[str, Any]:
    tqdm.set_lock(threading.RLock())  # its own is of all processes, and would outlive a helper that is ended
    return record_source(folder, config)


def _summary(manifest: Manifest) -> str:
    tokens = [f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits]
    return f"{', '.join(tokens)}, vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"


def _print_account(manifest: Manifest) -> None:
    if ACCOUNT in manifest.recipe:
        print(*lines(manifest.recipe[ACCOUNT], {split: manifest.tokens(split) for split in manifest.splits}), sep="\n")


def _place_tokenizer(folder: Path, config: PrepareConfig, seen: Scan) -> str:
    """An encoding's name; or the path, inside the folder, of the tokenizer that is trained or copied there."""
    own = folder / TOKENIZER_FILE
    given = Path(config.tokenizer)
    file = given / TOKENIZER_FILE if os.path.isdir(given) else given
    if config.tokenizer in ("bpe", "chars", *encoding_names()) and os.path.isfile(file):
        print(f"note: {given} is the tokenizer of that name; for the file that there is write ./{given}", flush=True)
    if config.tokenizer in ("bpe", "chars"):
        make_tokenizer(config, seen, own)
        return str(own)
    if config.tokenizer in encoding_names():
        return config.tokenizer
    load_tokenizer(config.tokenizer)  # refuses what is not one
    write_atomically(own, file.read_bytes())
    return str(own)
