"""The shard format and its stream: against a plain
array, and against files that are broken in every way."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import expect_error, expect_field
from golden_runs import CORPUS
from runs import edit_manifest, training_config

from gpt2_ddp.data import shards
from gpt2_ddp.data.manifest import HEADER_BYTES, Manifest, read_manifest
from gpt2_ddp.data.shards import TokenStream, verify_shards
from gpt2_ddp.preparation.encode import ShardWriter, write_manifest
from gpt2_ddp.tasks.pretraining import Pretraining

CPU = torch.device("cpu")


def write(folder, tokens, shard_tokens=1000, vocab_size=50_257, **changes):
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, "train", shard_tokens, vocab_size)
    for part in np.array_split(tokens, 7):  # parts and shards end in different places
        writer.add(part)
    values = {"tokenizer": "gpt2", "tokenizer_sha256": "0", "eot": 0, "source": "test"} | changes
    manifest = Manifest(
        version=2, vocab_size=vocab_size, splits={"train": writer.close()}, **values
    )
    write_manifest(folder, manifest)
    return manifest


def random_tokens(number, vocab_size=50_257):
    return np.random.default_rng(number).integers(0, vocab_size, number)


@pytest.mark.parametrize("vocab_size", [500, 65_536, 65_537, 200_000])
def test_file_format(tmp_path, vocab_size):
    tokens = [0, vocab_size - 1, 7]
    write(tmp_path, np.array(tokens), vocab_size=vocab_size)
    data = (tmp_path / "train_000000.bin").read_bytes()
    magic, version, dtype = (20240520, 1, "<u2") if vocab_size <= 65_536 else (20240801, 7, "<u4")
    assert np.frombuffer(data[:1024], "<i4").tolist() == [magic, version, 3] + [0] * 253
    assert np.frombuffer(data[1024:], dtype).tolist() == tokens
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "train_000000.bin"]


@pytest.mark.parametrize("seed", range(20))
def test_stream_equals_the_joined_shards(tmp_path, seed):
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([300, 100_000]))
    tokens = rng.integers(0, vocab_size, rng.integers(2, 3000))
    # rows straddle many, or few
    shard_tokens = int(rng.integers(1, 100) if seed % 2 else rng.integers(100, 5000))
    manifest = write(tmp_path, tokens, shard_tokens, vocab_size)
    assert {shard.tokens for shard in manifest.splits["train"][:-1]} <= {shard_tokens}
    verify_shards(tmp_path, manifest)
    stream = TokenStream(tmp_path, read_manifest(tmp_path), "train")
    assert len(stream) == len(tokens) == manifest.tokens("train")
    for length in (1, 2, int(rng.integers(1, len(tokens) + 1)), len(tokens)):
        starts = rng.integers(0, len(tokens) - length + 1, 5)
        rows = stream.read(starts, length)
        assert rows.dtype == (np.uint16 if vocab_size <= 65_536 else np.uint32)
        np.testing.assert_array_equal(rows, [tokens[start : start + length] for start in starts])
    assert stream.read(np.array([], int), 5).shape == (0, 5)


def test_a_process_keeps_some_shards_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards.resource, "getrlimit", lambda _: (64, 64))
    shards.OPEN_SHARDS.close()
    tokens = random_tokens(80)
    manifest = write(tmp_path, tokens, shard_tokens=2)
    stream, other = (TokenStream(tmp_path, manifest, "train") for _ in range(2))
    before = len(os.listdir("/proc/self/fd"))
    for reader in (stream, other):
        np.testing.assert_array_equal(reader.read(np.array([0]), len(tokens))[0], tokens)
        assert len(os.listdir("/proc/self/fd")) - before == 16
        reader.read(np.array([48]), 1)  # of the open ones, the one that was read first
        reader.read(np.array([0]), 2)
        monkeypatch.setattr(shards, "open", None, raising=False)  # it is still open
        reader.read(np.array([48]), 1)
        monkeypatch.delattr(shards, "open")
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    # other shards at the same paths, of which some are open
    again = write(tmp_path, tokens + 1, shard_tokens=2)
    np.testing.assert_array_equal(
        TokenStream(tmp_path, again, "train").read(np.array([78]), 2)[0], tokens[78:] + 1
    )
    shards.OPEN_SHARDS.close()
    assert len(os.listdir("/proc/self/fd")) == before


def open_data(local_main, **changes):
    place = SimpleNamespace(
        num_processes=1, process_index=0, is_local_main_process=local_main, device=CPU
    )
    Pretraining(training_config(CORPUS, Path("/nowhere"), changes), place, None).open_data()


def test_one_process_of_a_machine_reads_the_headers(monkeypatch):
    read = []
    real = shards.check_shard
    monkeypatch.setattr(shards, "check_shard", lambda *given: (read.append(given), real(*given))[1])
    open_data(False)
    assert read == []
    open_data(True)
    assert len(read) == 3


def other_header(index, value):
    """Replaces a number of the header: magic, version or tokens."""
    return lambda data: data[: 4 * index] + np.int32(value).tobytes() + data[4 * index + 4 :]


DAMAGES = {
    "cut in the header": lambda data: data[:1000],
    "cut in the tokens": lambda data: data[:-1],
    "longer": lambda data: data + b"\0\0",
    "wrong magic": other_header(0, 20240801),
    "wrong version": other_header(1, 2),
    "wrong count": other_header(2, 999),
    "no tokens": lambda data: other_header(2, 0)(data[:HEADER_BYTES]),
    "fewer tokens than the manifest's": lambda data: other_header(2, 500)(
        data[: HEADER_BYTES + 1000]
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shards_are_named(tmp_path, damage):
    manifest = write(tmp_path, random_tokens(2500))
    path = tmp_path / "train_000001.bin"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    expect_field("shard", str(path), TokenStream, tmp_path, manifest, "train")
    expect_field("shard", str(path), verify_shards, tmp_path, manifest)


def test_one_flipped_bit_is_found_by_its_hash(tmp_path):
    """By the process whose part it is in."""
    manifest = write(tmp_path, random_tokens(2500))
    path = tmp_path / "train_000001.bin"
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 777] ^= 1
    path.write_bytes(data)
    for part, parts in ((0, 1), (1, 3)):
        expect_error(
            r"train_000001\.bin.*SHA-256", verify_shards, tmp_path, manifest, part=part, parts=parts
        )
    for part in (0, 2):
        verify_shards(tmp_path, manifest, part=part, parts=3)


def test_what_cannot_be_read(tmp_path):
    """An id outside the vocabulary, and a file that was cut meanwhile."""
    manifest = write(tmp_path, random_tokens(2500))
    with open(tmp_path / "train_000001.bin", "r+b") as file:
        file.seek(HEADER_BYTES + 2 * 30)
        file.write(np.uint16(50_257).tobytes())
    stream = TokenStream(tmp_path, manifest, "train")
    stream.read(np.array([0, 1031]), 1000)  # beside it
    expect_error(r"train_000001\.bin: holds token id 50257", stream.read, np.array([0, 990]), 100)
    os.truncate(tmp_path / "train_000000.bin", HEADER_BYTES + 100)
    expect_error(r"train_000000\.bin.*shorter", stream.read, np.array([40]), 20)


def test_manifest_hash_is_of_the_data_alone(tmp_path):
    tokens = random_tokens(2500)
    first = write(tmp_path / "a", tokens)
    assert first == read_manifest(tmp_path / "a")
    moved = write(tmp_path / "b", tokens, source="/elsewhere", recipe={"workers": 8})
    assert moved.hash == first.hash
    assert write(tmp_path / "c", tokens, tokenizer_sha256="1").hash != first.hash
    assert write(tmp_path / "d", tokens ^ 1).hash != first.hash


BROKEN = [
    {"version": 4},
    {"eot": "0"},
    {"vocab_size": 50257.0},
    {"source": None},
    {"splits": {}},
    {"splits": {"train": []}},
    {"splits": {"train": [{}], "test": [{"file": "x", "sha256": "a" * 64}]}},
    {"splits": {"train": [{"file": "../x.bin"}]}},
    {"splits": {"train": [{"file": "a\x00b"}]}},
    {"splits": {"train": [{"tokens": 0, "bytes": 1024}]}},
    {"splits": {"train": [{"sha256": "0"}]}},
    {"splits": {"train": [{}], "val": [{"file": "x"}]}},
]
"""Changed fields; what differs in each shard from the only one."""


@pytest.mark.parametrize("changes", BROKEN)
def test_broken_manifests(tmp_path, changes):
    """Sealed again, so that only the fields are wrong; and with another seal, or cut off."""
    (shard,) = write(tmp_path, random_tokens(10)).splits["train"]
    path = tmp_path / "manifest.json"
    whole = path.read_text()
    usual = dataclasses.asdict(shard)
    if "splits" in changes:
        splits = {
            split: [usual | other for other in shards]
            for split, shards in changes["splits"].items()
        }
        changes = {"splits": splits}
    edit_manifest(tmp_path, **changes)
    for text in (
        path.read_text(),
        json.dumps(json.loads(whole) | {"sha256": "0" * 64}),
        whole[:-5],
        "[]",
    ):
        path.write_text(text)
        expect_field("data.path", str(path), read_manifest, tmp_path)


def test_folders_without_manifest(tmp_path):
    expect_error(r"^data\.path = .*absent: ", read_manifest, tmp_path / "absent")
    expect_error(r"^data\.path = ", read_manifest, tmp_path)
    manifest = write(tmp_path, random_tokens(10))
    expect_error("splits", write_manifest, tmp_path, dataclasses.replace(manifest, splits={}))
    assert read_manifest(tmp_path) == manifest
    (tmp_path / "manifest.json").unlink()
    expect_error("manifest.json cannot be read", read_manifest, tmp_path)
