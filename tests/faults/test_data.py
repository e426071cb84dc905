"""Data folders that are not what was prepared: each
is refused in one line, or means what it meant."""

import json
import os
import random
import shutil
from dataclasses import replace
from functools import partial

import pytest
from commands import expect_error
from faults.mutations import (
    CASES,
    change_json,
    check_told,
    flip,
    mangle,
    no_hang,
    open_data,
    put_something_else,
)
from golden_runs import CORPUS
from ranks import run_ranks
from runs import edit_manifest, state_of

from gpt2_ddp.data import shards as hashes
from gpt2_ddp.data.manifest import MANIFEST, read_manifest
from gpt2_ddp.data.shards import RECORD, verify_shards
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.preparation.encode import write_manifest

SHARDS = ["train_000000.bin", "train_000001.bin", "val_000000.bin"]


def identity(folder):
    """The identity of the data in a folder; None where they are refused, as they should be."""
    before = {*folder.rglob("*")}
    try:
        with no_hang():
            found = open_data(folder)
    except UserError as error:
        check_told(error)
        found = None
    assert {*folder.rglob("*")} ^ before <= {folder / RECORD}
    return found


@pytest.fixture
def data(corpus, tmp_path):
    """Shards of one's own, which were verified once."""
    folder = shutil.copytree(corpus, tmp_path / "data", ignore=shutil.ignore_patterns(RECORD))
    open_data(folder)
    return folder


def damage(folder, rng):
    """Does something to a folder of data; says what."""
    files = sorted(folder.iterdir())
    file = rng.choice(files)
    kind = rng.choice(["flip", "mangle", "copy", "something else", "values", "values", "sealed"])
    if kind in ("values", "sealed"):
        file = folder / rng.choice([MANIFEST, *["tokenizer.json"] * (kind == "values")])
        change_json(file, rng)
        if kind == "sealed":
            edit_manifest(folder)
    elif kind == "something else":
        put_something_else(file, rng)
    else:
        content = rng.choice(files).read_bytes() if kind == "copy" else file.read_bytes()
        file.write_bytes(
            {"flip": flip, "mangle": mangle, "copy": lambda content, _: content}[kind](content, rng)
        )
    return f"{kind} of {file.name}"


def files(folder):
    """The content of all files but the manifest's text and the record."""
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.name not in (MANIFEST, RECORD)
    }


@pytest.mark.parametrize(("seed", "cases"), CASES)
def test_damaged_folders(data, tmp_path, seed, cases):
    """What is not refused is what was there. A manifest
    that was sealed anew is a new one, right if it fits."""
    right = read_manifest(data)
    content = files(data)
    refused = 0
    for case in range(cases):
        folder = tmp_path / "damaged"
        shutil.copytree(data, folder)
        what = damage(folder, random.Random(f"{seed}/{case}"))
        if identity(folder) is None:
            refused += 1
        elif not what.startswith("sealed"):
            assert (read_manifest(folder), files(folder)) == (right, content), (case, what)
        shutil.rmtree(folder)
    # a damaged record, or a file copied to itself, is no reason
    assert refused > 0.7 * cases, refused


def test_one_flipped_bit_of_a_manifest_is_found(data):
    file = data / MANIFEST
    content = file.read_bytes()
    for case in range(100):
        file.write_bytes(flip(content, random.Random(case)))
        with pytest.raises(UserError):
            read_manifest(data)


def test_the_identity_of_data_is_pinned(tmp_path):
    data = shutil.copytree(CORPUS, tmp_path / "data")
    golden = state_of(CORPUS.parent / "gpt2_run")["task"]["data_manifest"]
    assert read_manifest(data).hash == golden
    write_manifest(data, replace(read_manifest(data), source="elsewhere", recipe={}))
    assert read_manifest(data).hash == golden


def hashed(folder, monkeypatch):
    """The shards that are read to be verified."""
    read = []
    monkeypatch.setattr(
        hashes, "sha256_file", lambda path: read.append(path.name) or sha256_file(path)
    )
    verify_shards(folder, read_manifest(folder))
    return read


def test_a_shard_that_was_right_is_not_read_again_until_it_changes(data, monkeypatch):
    (data / RECORD).unlink()
    assert hashed(data, monkeypatch) == SHARDS
    assert len((data / RECORD).read_text().splitlines()) == len(SHARDS)
    assert hashed(data, monkeypatch) == []
    shard = data / "train_000001.bin"
    times = shard.stat()
    shard.write_bytes(content := shard.read_bytes())
    assert hashed(data, monkeypatch) == ["train_000001.bin"]
    shard.write_bytes(flip(content, random.Random(1)))
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` does
    expect_error(r"train_000001\.bin", hashed, data, monkeypatch)
    shutil.copy(data / "val_000000.bin", data / "another.bin")
    (data / "another.bin").replace(data / "val_000000.bin")
    shard.write_bytes(content)
    assert hashed(data, monkeypatch) == ["train_000001.bin", "val_000000.bin"]
    assert hashed(data, monkeypatch) == []


def test_a_damaged_record_counts_for_nothing(data, monkeypatch):
    record = data / RECORD
    content = record.read_bytes()
    lines = content.splitlines()
    for case in range(100):
        broken = flip(content, random.Random(case))
        record.write_bytes(broken)
        assert len(hashed(data, monkeypatch)) == len(set(lines) - set(broken.splitlines())), case
    nowhere = data / "nowhere/record"  # a folder that cannot be written; for root there is no other
    makers = partial(record.write_bytes, bytes(1000)), record.mkdir, partial(os.mkfifo, record)
    for make in (*makers, partial(record.symlink_to, nowhere)):
        record.rmdir() if record.is_dir() else record.unlink()
        make()
        with no_hang():
            assert hashed(data, monkeypatch) == SHARDS
    assert hashed(data, monkeypatch) == SHARDS


def verify_my_part(folder):
    manifest = read_manifest(folder)
    for _ in range(5):
        verify_shards(folder, manifest, int(os.environ["RANK"]), 2)
        verify_shards(folder, manifest)


def test_ranks_remember_at_once(data, monkeypatch):
    (data / RECORD).unlink()
    run_ranks(verify_my_part, 2, data)
    lines = {*(data / RECORD).read_text().splitlines()}
    assert sorted(json.loads(line)[0] for line in lines) == SHARDS
    assert hashed(data, monkeypatch) == []


def test_a_manifest_that_says_otherwise_of_its_tokenizer(data):
    for field, value, right in (("vocab_size", 511, 512), ("vocab_size", 513, 512), ("eot", 1, 0)):
        edit_manifest(data, **{field: value})
        expect_error(r"^data\.path = ", open_data, data)
        edit_manifest(data, **{field: right})
