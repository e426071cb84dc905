"""Bits that a table of counts needs for a text: a forecast of what training will reach, in a
second.

A model of the counts of one, two and three tokens in a row learns what every language model learns
first. What is left to predict, and how much of the text is a pattern at all, differs between texts
by a factor of two or more. The ratio of a trained model's bits to these hardly differs
(docs/own-text.md).
"""

import numpy as np
from numpy.typing import NDArray

ORDER = 3
"""Tokens in a row that are counted."""
DISCOUNT = 0.75
"""Taken off each count, and given to what was not seen."""
REPEATED = 8
"""Tokens in a row that are a repetition if they were there before: few are by chance."""

Tokens = NDArray[np.int64]
"""Token numbers, [N]; also sequences of tokens, each as one number."""


def bits_per_token(training: Tokens, validation: Tokens, vocab_size: int) -> float:
    """Mean bits per token of a validation text, without its first `ORDER` - 1 tokens, by counts of
    the training text.

    The method is interpolated absolute discounting (Ney, Essen and Kneser, 1994, "On structuring
    probabilistic dependences in stochastic language modelling").

    The probability of token w after the tokens h is (max(n(h, w) - d, 0) + d·t(h)·p(w)) / n(h).
    n counts in the training text, t(h) is the number of different tokens after h, p is the
    probability after h without its first token, and d is `DISCOUNT`. Before one token, p is 1 /
    `vocab_size`. Nothing changes p if h was not seen.
    """
    probability = np.full(len(validation), 1 / vocab_size)
    for length in range(1, ORDER + 1):
        probability = _add_context(
            probability[min(length - 1, 1) :],
            _sequences(training, length, vocab_size),
            _sequences(validation, length, vocab_size),
            vocab_size,
        )
    return float(-np.log2(probability).mean())


def repeated_share(training: Tokens, validation: Tokens) -> float:
    """The share of a validation text that is repeated word for word, 0 to 1. Each `REPEATED` tokens
    in a row count as repeated if the training text, or the validation text before, has them."""
    if min(len(training), len(validation)) < REPEATED:
        return 0.0
    # a collision of two hashes, of millions of 2**64, is unlikely, and does not matter
    known = np.unique(_hashes(training))
    asked = _hashes(validation)
    _, first = np.unique(asked, return_index=True)
    is_repeated = np.ones(len(asked), bool)
    is_repeated[first] = False
    return float(np.mean(is_repeated | np.isin(asked, known)))


def _hashes(tokens: Tokens) -> NDArray[np.uint64]:
    """A hash of each `REPEATED` tokens in a row."""
    count = len(tokens) - REPEATED + 1
    found = np.zeros(count, np.uint64)
    for place in range(REPEATED):
        found *= np.uint64(0x9E3779B97F4A7C15)  # odd, and its bits are mixed; products overflow
        found += tokens[place : place + count].astype(np.uint64) + np.uint64(1)
    return found


def _sequences(tokens: Tokens, length: int, vocab_size: int) -> Tokens:
    """Each `length` tokens in a row as one number."""
    numbers = tokens[: len(tokens) - length + 1].copy()
    for place in range(1, length):
        numbers *= vocab_size
        numbers += tokens[place : len(tokens) - length + 1 + place]
    return numbers


def _add_context(
    shorter: NDArray[np.float64], training: Tokens, validation: Tokens, vocab_size: int
) -> NDArray[np.float64]:
    """The probability of each sequence's last token after the others. `shorter`: the same after one
    token less."""
    sequences, counts = np.unique(training, return_counts=True)
    contexts, first, types = np.unique(
        sequences // vocab_size, return_index=True, return_counts=True
    )
    totals = np.add.reduceat(counts, first)
    found = _counts_of(validation, sequences, counts)
    asked = validation // vocab_size
    total = _counts_of(asked, contexts, totals)
    type_count = _counts_of(asked, contexts, types)
    longer = np.maximum(found - DISCOUNT, 0) + DISCOUNT * type_count * shorter
    return np.where(total > 0, longer / np.maximum(total, 1), shorter)


def _counts_of(asked: Tokens, known: Tokens, counts: Tokens) -> Tokens:
    """The count of each number that is asked for, 0 if it is not among the known, which are
    sorted."""
    places = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[places] == asked, counts[places], 0)
