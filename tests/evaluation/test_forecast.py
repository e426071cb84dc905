"""What a run of one's own text will reach, by counts."""

import json
import math
from collections import Counter

import numpy as np
import pytest
from close import assert_close

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.evaluation import forecast as module
from gpt2_ddp.evaluation.counts import DISCOUNT, bits_per_token, repeated_share
from gpt2_ddp.evaluation.forecast import CountedText, Forecast, count_text, from_record, worth_of


def bits_by_hand(training, validation, vocab_size):
    """`bits_per_token`, a token at a time, by dictionaries."""
    counts = Counter()
    for length in (1, 2, 3):
        counts.update(
            tuple(training[start : start + length]) for start in range(len(training) - length + 1)
        )
    after = {}
    for sequence, count in counts.items():
        after.setdefault(sequence[:-1], {})[sequence[-1]] = count

    def probability(token, context):
        if context is None:
            return 1 / vocab_size
        shorter = probability(token, context[1:] if context else None)
        known = after.get(context)
        if not known:
            return shorter
        rest = DISCOUNT * len(known) * shorter
        return (max(known.get(token, 0) - DISCOUNT, 0) + rest) / sum(known.values())

    bits = [
        -math.log2(probability(validation[place], tuple(validation[place - 2 : place])))
        for place in range(2, len(validation))
    ]
    return sum(bits) / len(bits)


@pytest.mark.parametrize("vocab_size", [5, 40, 60_000])
def test_counts_are_those_of_a_loop(vocab_size):
    draw = np.random.default_rng(vocab_size)
    tokens = np.minimum(draw.geometric(0.1, 900), vocab_size) - 1
    tokens[::7] = vocab_size - 1
    training, validation = tokens[:700], tokens[700:]
    expected = bits_by_hand(training.tolist(), validation.tolist(), vocab_size)
    assert_close(bits_per_token(training, validation, vocab_size), expected, 1e-12)


def test_a_text_that_tells_nothing_needs_all_bits():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 4, 20_000)
    assert abs(bits_per_token(tokens[:15_000], tokens[15_000:], 4) - 2) < 0.01


def test_a_repeated_text_needs_few():
    tokens = np.tile(np.arange(50), 40)
    assert bits_per_token(tokens[:1500], tokens[1500:], 50) < 0.1


def test_the_share_that_is_repeated():
    """Of eight tokens in a row, those that were there before."""
    draw = np.random.default_rng(2)
    new = draw.integers(0, 1000, (3, 500))
    assert repeated_share(new[0], new[1]) == 0
    assert repeated_share(new[0], new[0]) == 1
    within = repeated_share(new[0], np.concatenate([new[1], new[1]]))
    assert_close(within, 493 / 993)  # 7 of the second half begin in the first
    both = repeated_share(new[0], np.concatenate([new[2], new[0]]))
    assert_close(both, 493 / 993)
    assert repeated_share(new[0][:7], new[1]) == 0


def test_what_is_repeated_is_learned_in_longer_runs():
    plain = CountedText(10**9, 2.0, 0.95)
    repeating = plain._replace(repeated=0.5)
    gains = []
    for tokens in (1e3, 2.9e6, 11.6e6, 1e10):
        without = Forecast(plain, 2e6, tokens).bits_per_byte
        gains.append(1 - Forecast(repeating, 2e6, tokens).bits_per_byte / without)
    assert_close(gains, [0, 0.05, 0.25, 0.4])


def test_a_folder_s_text_is_counted_per_byte(corpus, monkeypatch):
    manifest = read_manifest(corpus)
    text = count_text(corpus, manifest)
    assert text.tokens == manifest.tokens("train")
    assert 1 < text.bits < 5
    assert 0.8 < text.by_doubling < 1
    # of a large text, only its last tokens are counted; the rest is extrapolated
    monkeypatch.setattr(module, "MOST_COUNTED", text.tokens // 2)
    again = count_text(corpus, manifest)
    assert abs(again.tokens - text.tokens) <= 1
    assert abs(again.bits / text.bits - 1) < 0.1
    monkeypatch.setattr(module, "FEWEST_COUNTED", 10**9)
    assert count_text(corpus, manifest) is None


def test_more_of_anything_is_better_and_new_text_better_than_old():
    first = Forecast(CountedText(1_000_000, 2.0, 0.95), 2e6, 3e6)
    assert first.with_work(4).bits_per_byte < first.bits_per_byte
    assert first.with_text(4).bits_per_byte < first.bits_per_byte
    assert_close(first.with_text(2).text.bits, 1.9)
    assert worth_of(5, 10) == 5
    assert 1.9e6 < worth_of(2e6, 1e6) < 2e6
    assert worth_of(100e6, 1e6) < 17e6
    fewer = Forecast(CountedText(100_000, 2.0, 0.95), 2e6, 3e6)
    assert fewer.bits_per_byte > first.bits_per_byte


def test_a_row_keeps_a_forecast():
    forecast = Forecast(CountedText(1_000_000, 2.0, 0.95, 0.25), 2e6, 3e6)
    record = json.loads(json.dumps(forecast.record()))
    assert from_record(record) == forecast
    del record["repeated"]  # as in a run of an earlier release
    assert from_record(record).text.repeated == 0
    assert record["bits_per_byte"] == forecast.bits_per_byte
