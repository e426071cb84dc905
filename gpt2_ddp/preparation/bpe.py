"""Trains a byte-level BPE, with GPT-2's pre-tokenizer, on the training split of a source."""
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# (tqdm and tokenizers have few types)

import heapq
import math
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from gpt2_ddp.data.tokenizer_file import BYTE_OF_CHARACTER, END_OF_TEXT
from gpt2_ddp.distributed.workers import run_in_worker
from gpt2_ddp.preparation.progress import progress
from gpt2_ddp.preparation.row_sources import row_source
from gpt2_ddp.preparation.sources import DocumentChunk, Source
from gpt2_ddp.preparation.split import Cut, empty_split, read_split

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


def train_on_source(source: Source, cut: Cut | None, path: Path) -> None:
    """Trains a BPE on a sample of the training split, in a process of its own, and saves it in
    `path`. `cut`: the result of `find_cut`. Raises: UserError if there is no text."""
    run_in_worker(_train_on_source, source, cut, path)  # merging blocks signals


def _train_on_source(source: Source, cut: Cut | None, path: Path) -> None:
    # tqdm's own lock is of all processes, and would outlive a helper that is ended
    tqdm.set_lock(threading.RLock())
    counts: Counter[str] = Counter()
    source_counts: Counter[str] = Counter()
    most = BPE_CHARACTERS if row_source(source.config) else math.inf  # rows would be fetched
    total = math.inf if source.config.max_documents else sum(part.bytes for part in source.parts)
    pieces = read_split(source, source.parts, source_counts, cut)
    pieces = progress(pieces, "reading", "bytes", total, lambda piece: len(piece.text.encode()))
    texts = random_sample(_training_texts(pieces, most, counts), BPE_CHARACTERS)
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
    sample: list[tuple[float, str]] = []  # a heap: the text that is dropped next is first
    characters = 0
    for text in texts:
        heapq.heappush(sample, (-draw.random(), text))
        characters += len(text)
        while characters > most:
            characters -= len(heapq.heappop(sample)[1])
    return [text for _, text in sample]


def suitable_vocab_size(size: float) -> int:
    """Number of ids of a BPE: the square root of the text's bytes, as a power of two from 512 to
    32,768. The number of different words grows about as that root (Heaps, 1978); the factor is that
    of the lowest loss (docs/own-text.md)."""
    return 2 ** min(max(round(math.log2(math.sqrt(size))), 9), 15)


def cut_long_words(text: str) -> list[str]:
    """The text, in parts: cut in its long words, after every `LONGEST_WORD` characters of them."""
    ends: list[int] = []
    for run in LONG_RUNS.finditer(text):
        for word in LONG_WORDS.finditer(text, *run.span()):
            ends += range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD)
    return [text[start:end] for start, end in pairwise([0, *ends, len(text)])]


def train_bpe(texts: Sequence[str], vocab_size: int, path: Path) -> None:
    """Trains a byte-level BPE with GPT-2's pre-tokenizer on texts and saves it in `path`.
    `vocab_size`: ids in all, at least 257: end-of-text, 256 bytes, merges. Little text gives fewer
    merges."""
    # heavy: only a preparation that trains a BPE needs it
    import tokenizers  # noqa: PLC0415  heavy
    from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: PLC0415  heavy

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
