"""Token files of llm.c and nanoGPT as a folder of ours: written by hand, as their sources do, and
read by a training's own reader."""

import numpy as np
import pytest
from commands import expect_error

from gpt2_ddp.config.tools import ImportTokensConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream, verify_shards
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.preparation.token_files import import_tokens

GPT2 = load_tokenizer("gpt2")
TEXT = "The cat sat on the mat. " * 40
TOKENS = [GPT2.eot, *GPT2.encode(TEXT).tolist()]


def llm_c(path, tokens, magic=20240520, version=1, dtype="<u2", count=None):
    """As llm.c's `write_datafile`."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())


def nanogpt(path, tokens):
    """As nanoGPT's prepare.py."""
    np.array(tokens, np.uint16).tofile(path)


def run(source, output, **changes):
    values = {"source": (str(source),), "output": str(output)} | changes
    return import_tokens(ImportTokensConfig.model_validate(values))


def tokens_of(folder, split):
    manifest = read_manifest(folder)
    verify_shards(folder, manifest)
    stream = TokenStream(folder, manifest, split)
    return stream.read(np.array([0]), len(stream))[0].tolist()


def test_files_of_llm_c(tmp_path, capsys):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    llm_c(dumps / "fineweb_train_000002.bin", TOKENS[::-1])
    llm_c(dumps / "fineweb_train_000001.bin", TOKENS)
    llm_c(dumps / "fineweb_val_000000.bin", TOKENS[:99])
    folder = run(dumps, tmp_path / "out", shard_tokens=1024)
    assert tokens_of(folder, "train") == TOKENS + TOKENS[::-1], "in the order of their names"
    assert tokens_of(folder, "val") == TOKENS[:99]
    manifest = read_manifest(folder)
    assert (manifest.tokenizer, manifest.vocab_size) == ("gpt2", 50257)
    assert len(manifest.splits["train"]) == -(-2 * len(TOKENS) // 1024)
    printed = capsys.readouterr().out
    assert "val begins: '<|endoftext|>The cat sat" in printed, "a person compares it"
    expect_error("^output = .*out: has data already", run, dumps, tmp_path / "out")


def test_files_of_nanogpt_and_of_another_tokenizer(corpus, tmp_path, capsys):
    """Without a header; a tokenizer.json is copied; wide ids become those of the vocabulary."""
    data = tmp_path / "openwebtext"
    data.mkdir()
    nanogpt(data / "train.bin", TOKENS)
    folder = run(data, tmp_path / "out")
    assert tokens_of(folder, "train") == TOKENS
    assert "no validation loss" in capsys.readouterr().out
    small = [token % 500 for token in TOKENS]
    llm_c(tmp_path / "x_val_1.bin", small, 20240801, 7, "<u4")
    changes = {"tokenizer": str(corpus)}
    folder = run(tmp_path / "x_val_1.bin", tmp_path / "own", **changes)
    assert tokens_of(folder, "val") == small
    own = read_manifest(corpus)
    manifest = read_manifest(folder)
    assert (manifest.tokenizer, manifest.tokenizer_sha256) == (own.tokenizer, own.tokenizer_sha256)
    assert (folder / "tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()


WRONG = {
    "a_train_1.bin": (lambda path: llm_c(path, TOKENS, count=7), "its header has 7 tokens"),
    "b_train_1.bin": (lambda path: llm_c(path, [], count=0), "its header has 0 tokens"),
    "c_train_1.bin": (lambda path: llm_c(path, [], count=-5), "its header has -5 tokens"),
    "d_val.bin": (lambda path: llm_c(path, TOKENS, magic=20240522), "no token shard"),
    "e_train.bin": (lambda path: llm_c(path, TOKENS, version=2), "no token shard"),
    "f_train.bin": (lambda path: path.write_bytes(b"abc"), "has 3 bytes"),
    "g_train.bin": (lambda path: path.write_bytes(b""), "has 0 bytes"),
    "h_train.bin": (lambda path: nanogpt(path, [1, 60000]), "has the token id 60,000, outside"),
    "tokens.bin": (lambda path: nanogpt(path, TOKENS), "its name should have the split"),
    "train_val.bin": (lambda path: nanogpt(path, TOKENS), "its name should have the split"),
    "trainer.bin": (lambda path: nanogpt(path, TOKENS), "its name should have the split"),
    "i_train.bin": (lambda path: path.mkdir(), "has no .bin file"),
    "j_train.bin": (lambda path: None, "cannot be read"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_files_are_refused_by_one_line_and_leave_nothing(tmp_path, name):
    make, problem = WRONG[name]
    make(tmp_path / name)
    expect_error(f"^source = .*{name}: .*{problem}", run, tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_characters_of_nanogpt_are_refused(tmp_path):
    nanogpt(tmp_path / "train.bin", [1, 2, 3])
    (tmp_path / "meta.pkl").write_bytes(b"not read")
    expect_error("^source = .*characters.*--tokenizer bytes", run, tmp_path, tmp_path / "out")


def test_both_splits_with_the_same_tokens_are_refused(tmp_path):
    for split in ("train", "val"):
        nanogpt(tmp_path / f"{split}.bin", TOKENS)
    expect_error("both splits have the shard", run, tmp_path, tmp_path / "out")
    expect_error("^source = \\(none\\): name token files", ImportTokensConfig.model_validate, {})
