"""Indexing shards that others made."""

import os
from pathlib import Path

import numpy as np
import pytest

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, read_manifest
from gpt2_ddp.data.shards import RECORD, verify_shards
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.prepare import prepare


def make_dump(folder: Path, **sizes: int) -> None:
    folder.mkdir()
    for name, tokens in sizes.items():
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, tokens
        ids = np.random.default_rng(tokens).integers(0, 50_257, tokens).astype("<u2")
        (folder / f"{name}.bin").write_bytes(header.tobytes() + ids.tobytes())


def test_dumps_of_others_are_indexed_in_place(tmp_path, capsys):
    folder = tmp_path / "fineweb10B"
    make_dump(folder, fineweb_val_000000=300, fineweb_train_000002=100, fineweb_train_000001=200)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    indexing = PrepareConfig(source=f"bin:{folder}/*.bin", tokenizer="gpt2")
    manifest = prepare(indexing)
    assert [shard.file for shard in manifest.splits["train"]] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    assert (manifest.tokens("train"), manifest.tokens("val"), manifest.eot) == (300, 300, 50256)
    verify_shards(folder, read_manifest(folder))
    assert before == {name: (folder / name).read_bytes() for name in before}
    assert {path.name for path in folder.iterdir()} == {*before, "manifest.json", RECORD}
    assert prepare(indexing) == manifest
    assert "is already indexed" in capsys.readouterr().out
    make_dump(tmp_path / "more", fineweb_train_000003=100)
    (tmp_path / "more" / "fineweb_train_000003.bin").rename(folder / "fineweb_train_000003.bin")
    with pytest.raises(UserError, match=r"manifest\.json of other shards; delete it"):
        prepare(indexing)


def test_dumps_that_are_wrong(tmp_path):
    folder = tmp_path / "dump"
    make_dump(folder, train_0=300)
    source = f"bin:{folder}/*.bin"
    mistakes = [
        ({"source": f"bin:{tmp_path}/none/*.bin"}, "there are no such files"),
        ({"tokenizer": "bpe"}, "name the tokenizer that the shards were made with"),
        ({"tokenizer": str(tmp_path / "tokenizer.json")}, "copy the file into"),
        ({"output": str(tmp_path)}, "shards are indexed where they are"),
    ]
    for changes, message in mistakes:
        with pytest.raises(UserError, match=message):
            prepare(PrepareConfig.model_validate({"source": source, "tokenizer": "gpt2"} | changes))
    with open(folder / "train_0.bin", "r+b") as file:
        file.seek(HEADER_BYTES + 100)
        file.write(np.uint16(50_300).tobytes())
    with pytest.raises(UserError, match=r"train_0\.bin: holds token id 50300"):
        prepare(PrepareConfig(source=source, tokenizer="gpt2"))
    os.truncate(folder / "train_0.bin", 1500)
    with pytest.raises(UserError, match=r"train_0\.bin: has 1500 bytes"):
        prepare(PrepareConfig(source=source, tokenizer="gpt2"))
    (folder / "train_0.bin").rename(folder / "shard_0.bin")
    with pytest.raises(UserError, match="either train or val"):
        prepare(PrepareConfig(source=source, tokenizer="gpt2"))
    assert not (folder / "manifest.json").exists()


def test_a_file_belongs_to_the_split_that_its_name_says_as_a_word(tmp_path):
    make_dump(tmp_path / "dump", retrieval_train_0=300, edu_validation_0=200)
    manifest = prepare(PrepareConfig(source=f"bin:{tmp_path}/dump/*.bin", tokenizer="gpt2"))
    assert (manifest.tokens("train"), manifest.tokens("val")) == (300, 200)
    make_dump(tmp_path / "other", trainval_0=300)
    with pytest.raises(UserError, match="either train or val"):
        prepare(PrepareConfig(source=f"bin:{tmp_path}/other/*.bin", tokenizer="gpt2"))
