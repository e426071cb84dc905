"""Text to token shards. The same source and settings give the same bytes with any number of
workers. manifest.json is written last and makes the folder usable; after a kill, a preparation
starts over.
"""

import errno
import heapq
import json
import math
import os
import platform
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import MANIFEST, VERSION, Manifest, Shard, read_manifest, tokenizer_note
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import (
    BYTE_OF_CHARACTER,
    END_OF_TEXT,
    TOKENIZER_FILE,
    Tokenizer,
    encoding_names,
    load_tokenizer,
)
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.distributed.workers import Pool, run_in_worker, worker_pool
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.output import locked_output, publish
from gpt2_ddp.preparation.encode import write_manifest, write_splits
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.source_files import RECORD, check_unchanged, fingerprint, list_files
from gpt2_ddp.preparation.sources import MOST_NAMED, DocumentChunk, Source, scan
from gpt2_ddp.preparation.split import Cut, empty_split, find_cut, read_split
from gpt2_ddp.preparation.tokenizer_check import check_tokenizer

# beside RECORD, of a preparation that was killed at its end
LEFT = ("train_*.bin", "val_*.bin", TOKENIZER_FILE)
LINE = 320  # most characters of such a file's line
NAMED = 3  # files that the summary names of those that are left out
LONGEST_WORD = 256
"""Most characters of a word, or of a run of blanks, that a BPE is trained on. The time of the
training grows with the square of a word's length, so longer ones are cut. The encoding of a text
cuts none."""
_LONG = f"{{{LONGEST_WORD + 1},}}"
LONG_WORDS = re.compile(
    "|".join(kind + _LONG for kind in (r"[^\W\d_]", r"\d", r"(?:[^\w\s]|_)", r"\s"))
)
"""Letters, digits, other characters, blanks: GPT-2's pattern leaves such parts of a text whole."""
LONG_RUNS = re.compile(rf"(?<!\S)\S{_LONG}|(?<!\s)\s{_LONG}")
"""Text without a blank, or of blanks alone. Long words are within such runs, which are found in a
third of the time."""
BPE_CHARACTERS = 10**8
"""Most characters of the source to train a BPE on. Of 500 MB of program files, a BPE of 32,768
tokens that was trained on 0.5e8, 1e8 and 2e8 characters encoded 3.62, 3.65 and 3.67 bytes a
token."""


def prepare(config: PrepareConfig) -> Manifest:
    """Creates a folder of token shards, and returns its manifest. Keeps a folder that is prepared
    already. Raises: UserError if source, tokenizer or output folder are unusable, or the folder has
    other content."""
    folder = Path(config.folder)
    config = config.model_copy(update={"output": str(folder)})
    # first without the lock, since the folder may be read-only
    if manifest := _finished(folder, config):
        return manifest
    try:
        with locked_output(
            folder, f"another process is preparing {folder}; waiting for it"
        ) as aside:
            if manifest := _finished(folder, config):
                return manifest
            _clear(folder)
            workers = config.workers or usable_cores(hyperthreads=True)
            with worker_pool(workers) if workers > 1 else nullcontext() as pool:
                return _prepare(aside, config, pool)
    except BrokenPipeError:  # of standard output: the data are right (`run_command`)
        raise
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free space on that disk, and run the same command again" if is_full else ""
        raise UserError("output", folder, f"cannot be prepared ({error}){hint}") from error


def _finished(folder: Path, config: PrepareConfig) -> Manifest | None:
    """The manifest of a folder with this recipe; None if it is not prepared. Raises: UserError for
    another recipe, or a source that has changed; a deleted one may have."""
    if not os.path.exists(folder / MANIFEST):
        return None
    manifest = read_manifest(folder)
    recipe = _recipe(config)
    made_with = manifest.recipe
    differing = [
        f"{name} {made_with.get(name)}" for name in recipe if made_with.get(name) != recipe[name]
    ]
    if differing:
        hint = f"has shards made with {', '.join(differing)}; choose another output, or delete it"
        raise UserError("output", folder, hint)
    for split in manifest.splits:
        TokenStream(folder, manifest, split)  # checks the shards
    is_file = config.tokenizer not in ("bpe", *encoding_names()) and os.path.exists(
        config.tokenizer
    )
    if is_file and load_tokenizer(config.tokenizer).sha256 != manifest.tokenizer_sha256:
        hint = f"has changed since the text was encoded with it; choose another output, or delete {folder}"
        raise UserError("tokenizer", config.tokenizer, hint)
    can_compare = row_source(config) or any(list_files(source) for source in config.source)
    if can_compare:
        check_unchanged(folder, config, made_with.get("fingerprint"))
    gone = (
        ""
        if can_compare
        else f" ({config.source_name} is not here any more, so it was not compared)"
    )
    print(
        f"{folder} is already prepared: {_summary(manifest)}{gone}; delete it to prepare it again"
    )
    if note := tokenizer_note({str(folder): manifest}):
        print(f"  note: {note}")
    return manifest


def _recipe(config: PrepareConfig) -> dict[str, Any]:
    """The settings that determine the tokens."""
    unused = set() if config.tokenizer == "bpe" and config.vocab_size else {"vocab_size"}
    recipe = config.model_dump(mode="json", exclude={"output", "workers", *unused})
    if len(config.source) == 1:
        recipe["source"] = config.source_name  # the form of earlier releases
    return recipe


def _clear(folder: Path) -> None:
    """Removes the files of a killed preparation. Raises: UserError for other files."""
    left = [file for pattern in LEFT for file in folder.glob(pattern)]
    if left and not (folder / RECORD).exists():
        hint = "has files that prepare_data.py did not write; choose another output"
        raise UserError("output", folder, hint)
    for file in left:
        file.unlink()


def _prepare(aside: Path, config: PrepareConfig, pool: Pool) -> Manifest:
    """Fills the folder `aside`, which then becomes the output."""
    folder = Path(config.folder)
    start = time.perf_counter()
    if config.tokenizer not in ("bpe", *encoding_names()):
        check_tokenizer(tokenizer_file(config.tokenizer))
    source = scan(config, pool)
    for note in source.notes:
        print(f"note: {note}", flush=True)
    (aside / RECORD).write_text("".join(f"{json.dumps(entry)}\n" for entry in source.entries))
    was = fingerprint(config, source.entries)
    source.entries.clear()
    cut = find_cut(source)
    name = config.tokenizer
    if name not in encoding_names():
        name = str(aside / TOKENIZER_FILE)
        make_tokenizer(source, cut, Path(name))
    splits, counts = write_splits(aside, source, name, cut, pool)
    check_unchanged(aside, config, was, "prepare it again when its files are at rest")
    account = counts | {"left_out": source.left_out[:MOST_NAMED]}
    recipe = _recipe(config) | {"fingerprint": was, "account": account}
    name_of_source = config.source_name
    text = (
        f"stdlib (Python {platform.python_version()})"
        if name_of_source == "stdlib"
        else name_of_source
    )
    manifest = make_manifest(load_tokenizer(name), text, splits, recipe)
    write_manifest(aside, manifest)
    publish(aside, folder, last=MANIFEST)
    print(f"{folder} is prepared: {_summary(manifest)}, in {time.perf_counter() - start:.0f} s")
    print(
        f"  {counts['documents']:,} documents, {counts['bytes']:,} bytes, {counts['replaced']:,} U+FFFD"
    )
    print(f"  left out: {len(source.left_out):,} files")
    for file in source.left_out[:NAMED]:
        print(f"    {truncate(file, LINE)}")
    if len(source.left_out) > NAMED:
        print(f"    and {len(source.left_out) - NAMED:,} more; {folder / MANIFEST} names them")
    for note in _notes(config, manifest, counts):
        print(f"  note: {note}")
    return manifest


def _notes(config: PrepareConfig, manifest: Manifest, counts: Counter[str]) -> Iterator[str]:
    """What the user may not expect of the finished data."""
    if counts["end_of_text"]:
        yield f"the text has {END_OF_TEXT} as plain text; if it ends documents, set --document_separator"
    if counts["empty"]:
        yield f"{counts['empty']:,} documents or rows without text were skipped"
    separator = config.document_separator
    if separator and not counts["separators"]:
        hint = "so no document was divided"
        if "\\" in separator:
            hint += "; a backslash is itself: write a line break as $'\\n' in bash, or as \"\\n\" in YAML"
        elif "\n" in separator:
            hint += (
                "; the text may have other line ends: in bash, CRLF is $'\\r\\n', and CR is $'\\r'"
            )
        yield f"the separator {json.dumps(separator, ensure_ascii=False)} never occurs in the text, {hint}"
    if config.vocab_size and manifest.vocab_size < config.vocab_size:
        yield f"the text gives only {manifest.vocab_size:,} of {config.vocab_size:,} tokens; the rest would not occur"


def make_manifest(
    tokenizer: Tokenizer, source: str, splits: dict[str, list[Shard]], recipe: dict[str, Any]
) -> Manifest:
    """The manifest of shards of this tokenizer's ids."""
    return Manifest(
        VERSION,
        tokenizer.name,
        tokenizer.sha256,
        tokenizer.vocab_size,
        tokenizer.eot,
        source,
        splits,
        recipe,
    )


def _summary(manifest: Manifest) -> str:
    tokens = [f"{manifest.tokens(split):,} {split} tokens" for split in manifest.splits]
    return ", ".join([*tokens, f"vocabulary {manifest.vocab_size:,} ({manifest.tokenizer})"])


def make_tokenizer(source: Source, cut: Cut | None, path: Path) -> None:
    """Trains the source's own tokenizer, `bpe`, or copies one, to `path`. `cut`: the result of
    `find_cut`."""
    name = source.config.tokenizer
    if name == "bpe":
        run_in_worker(_train_bpe, source, cut, path)  # merging blocks signals
    else:
        path.write_bytes(tokenizer_file(name).read_bytes())


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json that `name`, a file or its folder, means. Raises: UserError."""
    return Path(name, TOKENIZER_FILE) if os.path.isdir(name) else Path(name)


def _train_bpe(source: Source, cut: Cut | None, path: Path) -> None:
    """Trains a BPE on a sample of the training split."""
    # its own is of all processes, and would outlive a helper that is ended
    tqdm.set_lock(threading.RLock())
    counts: Counter[str] = Counter()
    source_counts: Counter[str] = Counter()
    first = BPE_CHARACTERS if row_source(source.config) else math.inf  # rows would be fetched
    total = math.inf if source.config.max_documents else sum(part.bytes for part in source.parts)
    pieces = read_split(source, source.parts, source_counts, cut)
    pieces = progress(pieces, "reading", "bytes", total, lambda piece: len(piece.text.encode()))
    texts = random_sample(_training_texts(pieces, first, counts), BPE_CHARACTERS)
    if not counts["bytes"]:
        raise empty_split(source.config, "train", cut, source_counts)
    size = source.config.vocab_size or suitable_vocab_size(counts["bytes"])
    print(f"training a BPE of {size:,} tokens on {sum(map(len, texts)):,} characters", flush=True)
    train_bpe(texts, size, path)


def _training_texts(
    pieces: Iterable[DocumentChunk], most: float, counts: Counter[str]
) -> Iterator[str]:
    """Texts of the training split, until they have `most` bytes. Adds their `bytes` to `counts`."""
    for piece in pieces:
        if counts["bytes"] >= most:
            return
        if piece.split == "train":
            counts["bytes"] += len(piece.text.encode())
            yield piece.text


def random_sample(texts: Iterable[str], most: int) -> list[str]:
    """At most `most` characters of the texts: whole texts, always the same ones, each with the same
    probability."""
    draw = random.Random(0)
    sample = []
    characters = 0
    for text in texts:
        heapq.heappush(sample, (-draw.random(), text))
        characters += len(text)
        while characters > most:
            characters -= len(heapq.heappop(sample)[1])
    return [text for _, text in sample]


def suitable_vocab_size(size: int) -> int:
    """Number of ids of a BPE: three times the square root of the text's bytes, as a power of two
    from 512 to 32,768. The number of different words grows about as that root (Heaps, 1978)."""
    return 2 ** min(max(round(math.log2(3 * math.sqrt(size))), 9), 15)


def cut_long_words(text: str) -> list[str]:
    """The text, in parts: cut in its long words, after every `LONGEST_WORD` characters of them."""
    ends = []
    for run in LONG_RUNS.finditer(text):
        for word in LONG_WORDS.finditer(text, *run.span()):
            ends += range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD)
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def train_bpe(texts: Sequence[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer on texts and saves it in `path`.
    `vocab_size`: ids in all, at least 257: end-of-text, 256 bytes, merges. Little text gives fewer
    merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=sys.stderr.isatty(),
        special_tokens=[END_OF_TEXT],
        initial_alphabet=[*BYTE_OF_CHARACTER],
    )
    tokenizer.train_from_iterator(map(cut_long_words, texts), trainer, len(texts))
    tokenizer.save(str(path))
