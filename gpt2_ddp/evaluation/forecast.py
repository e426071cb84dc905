"""The bits per byte that a run of a text of one's own will reach, before it begins.

    training text ── counts of three tokens in a row ──▶ bits per byte ─┐
    parameters, tokens trained on, passes over the text ──▶ share ──────┴─▶ forecast

docs/own-text.md has the runs behind the constants, and how far they were from the forecast.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_ddp.config.own_text import GROWTH
from gpt2_ddp.data.manifest import Manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.evaluation.counts import Tokens, bits_per_token, repeated_share

MOST_COUNTED = 2**21
"""Tokens of the training text that are counted, its last ones: a second or two."""
FEWEST_COUNTED = 1000
"""Tokens of the validation text; of fewer, nothing is foretold."""
SHARE = 0.85
TOKENS = 2.9e6
PARAMETERS = 2.2e6
"""What such a run needs, as a share of the bits by counts: measured."""
BY_TOKENS = -0.06
BY_PARAMETERS = -0.03
"""Powers by which that share falls, with more tokens and more parameters."""
LEARNED = 0.1
BY_DOUBLING = 0.2
MOST_LEARNED = 0.8
"""Share of what is repeated word for word that a run of `TOKENS` need not guess, what each doubling
of them adds, and the most."""
WORTH = 15.4
"""Passes over a text after which a further one is worth 1/e of new text (Muennighoff et al., 2023,
"Scaling Data-Constrained Language Models", R*)."""


class CountedText(NamedTuple):
    """A text, and what counts of it tell.

    Attributes:
        tokens: of the training split.
        bits: per byte of the validation text, by counts of the training text.
        by_doubling: factor of `bits` when the training text is doubled.
        repeated: share of the validation text that is repeated word for word.
    """

    tokens: int
    bits: float
    by_doubling: float
    repeated: float = 0.0

    def times(self, factor: float) -> "CountedText":
        """So many times as much text of this kind."""
        bits = self.bits * self.by_doubling ** math.log2(factor)
        return self._replace(tokens=round(self.tokens * factor), bits=bits)


def count_text(folder: Path, manifest: Manifest) -> CountedText | None:
    """Counts the text of a folder of shards; None if its splits are too small. Raises: UserError if
    a shard is damaged."""
    sizes = {split: manifest.tokens(split) for split in ("train", "val")}
    if min(sizes.values()) < FEWEST_COUNTED:
        return None
    training = _last_tokens(folder, manifest, "train")
    validation = _last_tokens(folder, manifest, "val")
    file = folder / manifest.tokenizer
    tokenizer = load_tokenizer(str(file) if file.exists() else manifest.tokenizer)
    per_byte = 1 / float(tokenizer.token_bytes()[validation].mean())
    vocabulary = manifest.vocab_size
    half = training[len(training) // 2 :]
    bits = per_byte * bits_per_token(training, validation, vocabulary)
    of_half = per_byte * bits_per_token(half, validation, vocabulary)
    repeated = repeated_share(training, validation)
    counted = CountedText(len(training), bits, bits / of_half, repeated)
    return counted.times(sizes["train"] / len(training))


def _last_tokens(folder: Path, manifest: Manifest, split: str) -> Tokens:
    """The last tokens of a split, at most `MOST_COUNTED`."""
    stream = TokenStream(folder, manifest, split)
    count = min(len(stream), MOST_COUNTED)
    (tokens,) = stream.read(np.array([len(stream) - count]), count)
    return tokens.astype(np.int64)


class Forecast(NamedTuple):
    """What a run of the rule (config/own_text.py) will reach.

    Attributes:
        text: to train on.
        parameters: active ones.
        tokens: to train on, repeated ones included.
    """

    text: CountedText
    parameters: float
    tokens: float

    @property
    def bits_per_byte(self) -> float:
        """Of the validation text, after training. Of eight texts of 4 MB, it was 14 % lower (code)
        to 7 % higher than foretold."""
        worth = worth_of(self.tokens, self.text.tokens) / TOKENS
        share = SHARE * worth**BY_TOKENS * (self.parameters / PARAMETERS) ** BY_PARAMETERS
        learned = min(max(LEARNED + BY_DOUBLING * math.log2(worth), 0), MOST_LEARNED)
        return self.text.bits * share * (1 - learned * self.text.repeated)

    def with_work(self, factor: float) -> "Forecast":
        """Of a run of so many times as much arithmetic, by more time or a faster machine."""
        parameters = self.parameters * factor**GROWTH
        return self._replace(parameters=parameters, tokens=self.tokens * factor ** (1 - GROWTH))

    def with_text(self, factor: float) -> "Forecast":
        """Of a run with so many times as much text."""
        return self._replace(text=self.text.times(factor))

    def record(self) -> dict[str, float]:
        """The fields of a row, which `from_record` takes."""
        values = {"bits_per_byte": self.bits_per_byte, **self.text._asdict()}
        return values | {"parameters": self.parameters, "trained_tokens": self.tokens}


def from_record(values: Mapping[str, float]) -> Forecast:
    """The forecast that a row holds."""
    repeated = values.get("repeated", 0.0)  # runs of earlier releases have none
    text = CountedText(int(values["tokens"]), values["bits"], values["by_doubling"], repeated)
    return Forecast(text, values["parameters"], values["trained_tokens"])


def worth_of(tokens: float, different: float) -> float:
    """New tokens that are worth as much as these, of which so many are different.

    By Muennighoff et al., U + U·R*·(1 - exp(-R / R*)), with R passes after the first."""
    repeats = max(tokens / different - 1, 0)
    return min(tokens, different) + different * WORTH * (1 - math.exp(-repeats / WORTH))
