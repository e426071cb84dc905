"""Text to token shards. The same source and settings give the same bytes with any number of workers. manifest.json is
written last and makes the folder usable; after a kill, a preparation starts over.

Shards of other programs (llm.c, modded-nanogpt) are indexed in place: all are read, then a manifest is written.
"""

import errno
import glob
import hashlib
import heapq
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter
from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, Manifest, Shard, read_manifest, token_dtype
from gpt2_ddp.data.shards import check_shard, read_header
from gpt2_ddp.data.tokenizer import (
    BYTE_OF_CHARACTER,
    END_OF_TEXT,
    TOKENIZER_FILE,
    Tokenizer,
    encoding_names,
    load_tokenizer,
)
from gpt2_ddp.data.tokenizer_file import CHARACTER
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.distributed.workers import InlineExecutor, run_in_worker, worker_pool
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import check_can_make, write_atomically
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.encode import write_manifest, write_splits
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.rows import fault_of
from gpt2_ddp.preparation.source_files import RECORD, check_unchanged, describe, record_source
from gpt2_ddp.preparation.sources import CorpusStats, Source, scan

ACCOUNT = "account"  # statistics of the source, in the manifest's recipe, which is not part of the data's identity
LEFT = ("train_*.bin", "val_*.bin", TOKENIZER_FILE)  # beside RECORD, of a preparation that was killed at its end
BLOCK_BYTES = 2**24  # bytes of an indexed shard to read at a time
BPE_CHARACTERS = 10**8
"""Most characters of the source to train a BPE on. Of 500 MB of program files, a BPE of 32,768 tokens that was trained
on 0.5e8, 1e8 and 2e8 characters encoded 3.62, 3.65 and 3.67 bytes a token."""


def prepare(config: PrepareConfig, fast: bool = True) -> Manifest:
    """Creates a folder of token shards, and returns its manifest. Keeps a folder that is prepared already. `fast`: use
    gigatoken if it is installed; the result is the same. Raises: UserError if source, tokenizer or output folder are
    unusable, or the folder has other content."""
    if config.source.startswith("bin:"):
        return index_shards(config)
    folder = Path(config.folder)
    source = "" if config.source == "stdlib" else os.path.expanduser(config.source)
    if os.path.isdir(source) and os.path.isdir(folder) and os.path.samefile(source, folder):
        raise UserError("output", folder, "is the source; choose another folder (one inside it works)")
    config = config.model_copy(update={"output": str(folder)})
    manifest = _finished(folder, config)  # first without the lock, since the folder may be read-only
    if manifest is None:
        try:
            check_can_make(folder)
        except OSError as error:
            raise UserError("output", folder, f"cannot be written ({error.strerror}); choose another folder") from error
        with locked_output(folder, f"another process is preparing {folder}; waiting for it") as aside:
            manifest = _finished(folder, config)
            if manifest is None:
                _clear(folder)
                workers = config.workers or usable_cores(hyperthreads=True)
                with worker_pool(workers) if workers > 1 else nullcontext(InlineExecutor()) as pool:
                    return _prepare(aside, config, pool, workers, fast)
    else:
        check_unchanged(folder, config, manifest.recipe["fingerprint"], manifest.source)
    print(f"{folder} is already prepared: {_summary(manifest)}; delete it to prepare it again")
    _print_account(manifest)
    return manifest


def _finished(folder: Path, config: PrepareConfig) -> Manifest | None:
    """The manifest of a folder with this recipe; None if it is not prepared. Raises: UserError for another recipe."""
    if not os.path.exists(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    recipe, made_with = _recipe(config), manifest.recipe
    if recipe.get("vocab_size", 0) is None:  # any will do
        del recipe["vocab_size"]
    differing = [f"{name} {made_with.get(name)}" for name in recipe if made_with.get(name) != recipe[name]]
    if differing:
        hint = f"has shards made with {', '.join(differing)}; choose another output, or delete it"
        raise UserError("output", folder, hint)
    for shard in (shard for shards in manifest.splits.values() for shard in shards):
        check_shard(folder, shard, token_dtype(manifest.vocab_size))
    return manifest


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings that determine the tokens."""
    unused = set() if config.tokenizer == "bpe" else {"vocab_size"}
    return config.model_dump(mode="json", exclude={"output", "workers", *unused})


def _clear(folder: Path) -> None:
    """Removes the files of a killed preparation. Raises: UserError for other files."""
    if (folder / RECORD).exists():
        for file in (file for pattern in LEFT for file in folder.glob(pattern)):
            file.unlink()
    elif any(folder.glob("*.bin")) or (folder / TOKENIZER_FILE).exists():
        hint = "has files that prepare_data.py did not write; choose another output, or index shards with bin:GLOB"
        raise UserError("output", folder, hint)


def _prepare(aside: Path, config: PrepareConfig, pool: Executor, workers: int, fast: bool) -> Manifest:
    """Fills the folder `aside`, which then becomes the output."""
    folder, start = Path(config.folder), time.perf_counter()
    fingerprint: dict[str, Any] = {}
    try:
        source = scan(config, pool, workers, hashed=True)
        _check_text(source)  # no further requests to the Hub if the first one fails
        fingerprint = record_source(aside, config, source.entries)
        source.entries.clear()
        name = _place_tokenizer(aside, source)
        tokenizer = load_tokenizer(name)
        splits = write_splits(aside, source, name, pool, workers, fast)
        check_unchanged(aside, config, fingerprint)
        recipe = _recipe(config) | {"fingerprint": fingerprint, ACCOUNT: asdict(source.stats)}
        identity = tokenizer.name, tokenizer.sha256, tokenizer.vocab_size, tokenizer.eot
        manifest = Manifest(2, *identity, describe(config), splits, recipe)
        write_manifest(aside, manifest)
        publish(aside, folder, last=MANIFEST)
    except (OSError, UserError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError("output", folder, f"{error.strerror}; free disk space, or choose another folder") from error
        check_unchanged(aside, config, fingerprint)  # this may be the cause
        raise
    print(f"{folder} is prepared: {_summary(manifest)}, in {time.perf_counter() - start:.0f} s")
    _print_account(manifest)
    return manifest


def _check_text(source: Source) -> None:
    """Raises: UserError if the first rows of a source of rows, which `scan` does not read, lack the column; or if the
    source has no text."""
    config = source.config
    rows = row_source(config)
    if rows and (fault := fault_of(rows.rows(config), config.column)):
        raise UserError("column", config.column, f"{config.source} {fault}")
    if next(source.pieces(), None) is None:
        if source.stats.rows:
            raise UserError("column", config.column, f"has no text in {source.stats.without_text.of('rows')}")
        raise UserError("source", config.source, "has no text for a train split; name files with text")


def _place_tokenizer(folder: Path, source: Source) -> str:
    """An encoding's name; or the path, inside the folder, of the tokenizer that is trained or copied there."""
    own, name = folder / TOKENIZER_FILE, source.config.tokenizer
    file = Path(name, TOKENIZER_FILE) if os.path.isdir(name) else Path(name)
    if name in ("bpe", "chars", *encoding_names()) and os.path.isfile(file):
        print(f"note: {name} means the tokenizer of that name; write ./{name} for the file", flush=True)
    if name in encoding_names():
        return name
    if name in ("bpe", "chars"):
        make_tokenizer(source, own)
    else:
        load_tokenizer(name)  # refuses what is not one
        write_atomically(own, file.read_bytes())
    return str(own)


def _summary(manifest: Manifest, with_tokenizer: bool = True) -> str:
    tokens = [f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits]
    more = [f"vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"] * with_tokenizer
    return ", ".join(tokens + more)


def _print_account(manifest: Manifest) -> None:
    """Prints the statistics of the source."""
    stats = TypeAdapter(CorpusStats).validate_python(manifest.recipe[ACCOUNT])
    print(*account_lines(stats, {split: manifest.tokens(split) for split in manifest.splits}), sep="\n")


def account_lines(stats: CorpusStats, tokens: dict[str, int]) -> Iterator[str]:
    """Lines of text: counts of read, omitted and replaced input, and the tokens of each split."""
    if stats.encodings:
        kinds = ", ".join(f"{count:,} {name}" for name, count in stats.encodings.items())
        yield f"  files         {sum(stats.encodings.values()):,} ({kinds})"
        yield f"  left out      {stats.left_out.of('files')}"
        yield f"  undecodable   {stats.undecodable.of('bytes')}"
    yield f"  documents     {stats.documents:,}"
    if stats.rows:
        yield f"  without text  {stats.without_text.of('rows')} of {stats.rows:,}"
    yield f"  text          {stats.bytes:,} bytes in UTF-8"
    each = ", ".join(f"{count:,} {split}" for split, count in tokens.items())
    yield f"  tokens        {each}; {stats.bytes / max(1, sum(tokens.values())):.2f} bytes per token"
    if stats.end_of_text:
        times = f"{stats.end_of_text:,} time{'s' * (stats.end_of_text > 1)}"
        yield (
            f"  note: {END_OF_TEXT} is in the text {times}, encoded as plain text; to split documents there, add "
            f"--document_separator '{END_OF_TEXT}'"
        )


def index_shards(config: PrepareConfig) -> Manifest:
    """Checks every token of the shards of `bin:GLOB` and writes their folder's manifest.json, and nothing else. A file
    belongs to the split, `train` or `val`, that its name contains.
    Raises: UserError for no such files, or in several folders, and for the manifest of other shards. Also for a file
    that is not whole, has ids outside the vocabulary, or is in both splits."""
    files = sorted(Path(file) for file in glob.glob(os.path.expanduser(config.source.removeprefix("bin:"))))
    if not files:
        raise UserError("source", config.source, "no such files; write bin:FOLDER/*.bin")
    folder, name = files[0].parent, config.tokenizer
    if any(path.parent != folder for path in files):
        raise UserError("source", config.source, "the files are in several folders; index each folder by itself")
    if config.output is not None and os.path.realpath(config.output) != os.path.realpath(folder):
        raise UserError("output", config.output, f"shards are indexed in place; set it to {folder}, or remove it")
    if name in ("bpe", "chars"):
        raise UserError("tokenizer", name, "name the shards' tokenizer, such as gpt2")
    if name not in encoding_names() and os.path.realpath(Path(name).parent) != os.path.realpath(folder):
        raise UserError("tokenizer", name, f"copy the file into {folder}, next to the shards, and name the copy")
    tokenizer = load_tokenizer(name)
    recipe = {"files": [path.name for path in files], "tokenizer_sha256": tokenizer.sha256}
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        if manifest.recipe != recipe:
            raise UserError("output", folder, f"has a {MANIFEST} of other shards; delete it to index these")
        print(f"{folder} is already indexed: {_summary(manifest, with_tokenizer=False)}")
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
    print(f"{folder} is indexed: {_summary(manifest, with_tokenizer=False)}")
    return manifest


def _split(path: Path) -> str:
    names = [split for split in ("val", "train") if split in path.name]
    names = [split for split in names if split in re.split("[^a-z]", path.name)] or names  # not for its `interval`
    if len(names) != 1:
        raise UserError("shard", path, "its name should contain either train or val; rename it, or narrow the glob")
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
                hint = f"has token id {largest}, {tokenizer.name} has {tokenizer.vocab_size} ids; name its tokenizer"
                raise UserError("shard", path, hint)
    return Shard(path.name, tokens, HEADER_BYTES + tokens * dtype.itemsize, digest.hexdigest())


def make_tokenizer(source: Source, path: Path) -> None:
    """Trains the source's own tokenizer, `bpe` or `chars`, and writes it to `path`."""
    if source.config.tokenizer == "bpe":
        run_in_worker(_train_bpe, source, path)  # merging blocks signals
    else:
        print("collecting the characters", flush=True)
        write_characters(_texts(source), path)


def _train_bpe(source: Source, path: Path) -> None:
    """Trains a BPE on a sample of the source."""
    tqdm.set_lock(threading.RLock())  # its own is of all processes, and would outlive a helper that is ended
    first = BPE_CHARACTERS if row_source(source.config) else math.inf  # rows would be fetched
    texts = random_sample(_texts(source, first), BPE_CHARACTERS)
    size = source.config.vocab_size or suitable_vocab_size(source.stats.bytes)
    characters = sum(map(len, texts))
    print(f"training a BPE of {size:,} tokens on {characters:,} characters", flush=True)
    made = train_bpe(texts, size, path)
    if made < size:
        print(f"the BPE has {made:,} tokens, not {size:,}: the text has no further pairs to merge", flush=True)


def random_sample(texts: Iterable[str], most: int) -> list[str]:
    """At most `most` characters of the texts: whole texts, always the same ones, each with the same probability."""
    draw, sample, characters = random.Random(0), [], 0
    for text in texts:
        heapq.heappush(sample, (-draw.random(), text))
        characters += len(text)
        while characters > most:
            characters -= len(heapq.heappop(sample)[1])
    return [text for _, text in sample]


def suitable_vocab_size(size: int) -> int:
    """Number of ids of a BPE: three times the square root of the text's bytes, as a power of two from 512 to 32,768.
    The number of different words grows about as that root (Heaps, 1978)."""
    return 2 ** min(max(round(math.log2(3 * math.sqrt(size))), 9), 15)


def train_bpe(texts: Sequence[str], vocab_size: int, path: Path) -> int:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer on texts and saves it in `path`. Returns its number of ids.
    `vocab_size`: ids in all, at least 257: end-of-text, 256 bytes, merges. Little text gives fewer merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": list(BYTE_OF_CHARACTER)}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=sys.stderr.isatty(), **options)
    tokenizer.train_from_iterator(texts, trainer, len(texts))
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def write_characters(texts: Iterable[str], path: Path) -> None:
    """Saves a tokenizer.json that has an id for each character of the texts, in the order of their code points; the
    last id is end-of-text's. It knows no other characters."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    characters = sorted({character for text in texts for character in set(text)})
    tokenizer: Any = tokenizers.Tokenizer(models.WordLevel({text: rank for rank, text in enumerate(characters)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(CHARACTER), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.save(str(path))


def _texts(source: Source, most: float = math.inf) -> Iterator[str]:
    """About `most` characters of the source, counted by a bar."""
    with tqdm(desc="reading", unit=" characters", unit_scale=True, disable=None) as progress:
        for piece in source.pieces():
            yield piece.text
            progress.update(len(piece.text))
            most -= len(piece.text)
            if most <= 0:
                return
