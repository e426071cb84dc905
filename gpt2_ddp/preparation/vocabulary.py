"""Tokenizers made from the user's text: a byte-level BPE that is trained on it, or the characters that it has."""

import math
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_ddp.data.tokenizer import BYTE_OF_CHARACTER, END_OF_TEXT
from gpt2_ddp.data.tokenizer_file import CHARACTER
from gpt2_ddp.distributed.workers import run_in_worker
from gpt2_ddp.preparation.sources import Source

BPE_CHARACTERS = 10**9
"""A BPE is trained on the first so many characters of the source; more would hardly change it."""
SAY_SECONDS = 30
"""Between lines about the progress, where there is no terminal to draw a bar on."""


def make_tokenizer(source: Source, vocab_size: int, path: Path) -> None:
    """Makes the tokenizer that the source is to have of its own, `bpe` or `chars`, and writes it to `path`."""
    if source.config.tokenizer == "bpe":
        print(f"training a BPE of {vocab_size:,} tokens", flush=True)
        run_in_worker(_train_bpe, source, vocab_size, path)  # where it merges, no signal would come through
    else:
        print("collecting the characters", flush=True)
        write_characters(_texts(source), path)


def _train_bpe(source: Source, vocab_size: int, path: Path) -> None:
    def texts() -> Iterator[str]:
        yield from _texts(source, BPE_CHARACTERS)
        print("merging", flush=True)

    tqdm.set_lock(threading.RLock())  # its own is of all processes, and would outlive a helper that is ended
    train_bpe(texts(), vocab_size, path)


def suitable_vocab_size(size: int | None) -> int:
    """Number of ids of a BPE: three times the square root of the text's bytes, as a power of two from 512 to 32,768.
    The number of different words grows about as that root (Heaps, 1978). `size`: bytes; None: unknown."""
    wanted = 3 * math.sqrt(size) if size else 2**15
    return 2 ** min(max(round(math.log2(wanted)), 9), 15)


def train_bpe(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer on texts, which are read once, and saves it in `path`.
    `vocab_size`: ids in all, at least 257: end-of-text, 256 bytes, merges. Little text gives fewer merges."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer: Any = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "initial_alphabet": list(BYTE_OF_CHARACTER)}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


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
    """About `most` characters of the source, counted by a bar; without a terminal, by a line now and then."""
    read, said = 0, time.monotonic()
    with tqdm(desc="reading", unit=" characters", unit_scale=True, disable=None) as progress:
        for text, _ in source.pieces():
            yield text
            read += len(text)
            progress.update(len(text))
            if progress.disable and time.monotonic() > said + SAY_SECONDS:
                said = time.monotonic()
                print(f"read {read:,} characters", flush=True)
            if read >= most:
                return
