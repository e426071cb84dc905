"""gigatoken in tiktoken's place: equal ids, and what happens
when they differ. A stand-in replaces it if absent."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from commands import expect_error
from nasty import difficult_texts

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.workers import AHEAD, in_order
from gpt2_ddp.preparation import encode
from gpt2_ddp.preparation.encode import SAMPLE, FastEncoder, fast_encoder
from gpt2_ddp.preparation.prepare import prepare, train_bpe

LIE = "xylophone"


def first_id(tokenizer):
    return min(tokenizer.tokens.values())


class StandIn:
    """As much of gigatoken's encoder as is used: ids from
    0 on, uint32, of UTF-8. It may lie about one word."""

    def __init__(self, tokenizer, lies=False):
        self.tokenizer = tokenizer
        self.lies = lies
        self.calls = 0

    def encode(self, data):
        self.calls += 1
        text = data.decode()
        text = text.replace(LIE, "") if self.lies else text
        return self.tokenizer.encode(text).astype(np.uint32) - np.uint32(first_id(self.tokenizer))


def stand_in(monkeypatch, lies):
    made = []

    def make(tokenizer):
        made.append(StandIn(tokenizer, lies))
        return FastEncoder(tokenizer, made[-1], first_id(tokenizer))

    monkeypatch.setattr(encode, "fast_encoder", make)
    encode._cached_fast_encoder.cache_clear()
    monkeypatch.setattr(encode, "EVERY", 2000)
    return made


@pytest.fixture(autouse=True)
def _forget():
    yield
    encode._cached_fast_encoder.cache_clear()


@pytest.fixture
def rows(tmp_path):
    """300 documents in JSON lines, as many as the splits need;
    the later ones have the word that a liar lies about."""
    draw = random.Random(0)
    words = ["one ", "two\n", "é", " 漢字", "<|endoftext|>", "\ud800", "'s ", "    "]
    rows = [{"text": "".join(draw.choices(words, k=draw.randint(0, 300)))} for _ in range(300)]
    for row in rows[250:]:
        row["text"] = f"{LIE} " * 40
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def prepared(rows, name, **changes):
    values = {
        "source": str(rows),
        "output": str(rows.with_name(name)),
        "tokenizer": "gpt2",
        "workers": 1,
    }
    prepare(
        PrepareConfig.model_validate(
            values | {"shard_tokens": 20_000, "val_fraction": 0.2} | changes
        )
    )
    return {path.name: path.read_bytes() for path in rows.with_name(name).iterdir()}


@pytest.mark.parametrize("tokenizer", ["gpt2", "bpe"])
def test_gigatoken_gives_the_same_ids(tokenizer, tmp_path):
    pytest.importorskip("gigatoken")
    if tokenizer == "bpe":
        train_bpe(difficult_texts()[:500], 400, tmp_path / "tokenizer.json")
    exact = load_tokenizer(str(tmp_path) if tokenizer == "bpe" else tokenizer)
    fast = fast_encoder(exact)
    assert fast_encoder(load_tokenizer("bytes")) is None
    for text in [*difficult_texts(), "a<|endoftext|>b", "x" + " " * 1_500_000 + "y"]:
        ids = fast.encode(text)
        assert ids.dtype == exact.encode("").dtype
        np.testing.assert_array_equal(ids, exact.encode(text), repr(text[:80]))


@pytest.fixture
def slow(rows, monkeypatch):
    """The files that tiktoken alone prepares."""
    monkeypatch.setattr(encode, "fast_encoder", lambda tokenizer: None)
    return prepared(rows, "slow")


def test_the_fast_encoder_changes_neither_bytes_nor_manifest(rows, slow, monkeypatch):
    made = stand_in(monkeypatch, lies=False)
    fast = prepared(rows, "fast")
    assert made[0].calls >= 299  # documents with text, and some samples without a word
    assert fast == slow


def test_one_that_lies_is_found_out(rows, monkeypatch):
    made = stand_in(monkeypatch, lies=True)
    expect_error("^gigatoken = ", prepared, rows, "fast")
    assert made[0].calls > 200  # it had encoded most, before it was asked for what it lies about
    assert {*rows.parent.iterdir()} == {rows}


def test_the_first_ids_of_a_text_are_compared():
    tokenizer = load_tokenizer("gpt2")
    liar, honest = (FastEncoder(tokenizer, StandIn(tokenizer, lies), 0) for lies in (True, False))
    for text in (LIE, LIE + " one" * SAMPLE, "一" * 3 * SAMPLE + LIE, "\n\n     x\u2003'" * SAMPLE):
        ids = honest.encode(text)
        honest.check(text, ids)
        for wrong in (
            np.roll(ids, 1),
            np.r_[ids[0], ids],
            ids[:0],
            *[liar.encode(text)] * (LIE in text),
        ):
            expect_error("ids are not tiktoken's", honest.check, text, wrong)
    liar.check("one " * SAMPLE + LIE, liar.encode("one " * SAMPLE + LIE))  # after the sample


class PanicException(BaseException):
    """As pyo3 has it: in no module that could be imported, and of no other kind."""

    __module__ = "pyo3_runtime"


def test_a_panic_of_rust_is_no_crash(rows, monkeypatch):
    stand_in(monkeypatch, lies=False)
    honest = StandIn.encode

    def panics(self, data):
        if self.calls > 200:
            raise PanicException("index out of bounds")
        return honest(self, data)

    monkeypatch.setattr(StandIn, "encode", panics)
    expect_error(r"^gigatoken = .*panicked \(index out of bounds\)", prepared, rows, "fast")
    monkeypatch.setattr(
        StandIn, "encode", lambda self, data: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        prepared(rows, "stopped")


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_only_a_few_items_are_under_way(workers):
    given = 0
    taken = 0
    most = 0

    def items():
        nonlocal given, most
        for given in range(1, 51):
            most = max(most, given - taken)
            yield given

    pool = ThreadPoolExecutor(workers) if workers > 1 else None
    for found in in_order(lambda item: item, items(), pool):
        taken += 1
        assert found == taken
    assert (given, taken) == (50, 50)
    assert most == (AHEAD * workers if workers > 1 else 1)
