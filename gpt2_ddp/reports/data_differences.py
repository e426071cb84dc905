"""Which shards of two runs' data differ, where the first tokens differ, and the first step that
trained on one of them.

All of it is read from the folders that the runs name, if they still have the runs' data.
"""

from collections.abc import Iterator
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt2_ddp.config.training import DataConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.manifest import (
    HEADER_BYTES,
    Manifest,
    Shard,
    read_manifest,
    text_bytes,
    token_dtype,
)
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import check_shard, count_windows
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.records.rows import Row
from gpt2_ddp.reports.conditions import Effect, Record
from gpt2_ddp.reports.recompute import MOST_STEPS

CHUNK = 2**24
"""Tokens that are compared at a time."""
NAMED = 3
"""Most shards of a folder that are named."""


class Folder(NamedTuple):
    """A folder of shards that a run trained on."""

    path: Path
    manifest: Manifest


class DataDifference(NamedTuple):
    """What differs in the data. `effects`: scores alone, if only validation text differs. `step`:
    the first one that trained on what differs, as far as that is known; else 1."""

    lines: list[str]
    effects: tuple[Effect, ...]
    step: int = 1


def describe_data(first: Record, second: Record, step: int) -> DataDifference:
    """The shards that differ, of the data at a step."""
    conditions = (first.at(step), second.at(step))
    folders = tuple(_folders(each) for each in conditions)
    lines: list[str] = []
    effects: tuple[Effect, ...] = ("scores",)
    first_step = 1
    for number, (one, other) in enumerate(zip_longest(*folders), 1):
        problems = [text for text in (one, other) if isinstance(text, str)]
        if problems or not isinstance(one, Folder) or not isinstance(other, Folder):
            lines += problems or [f"folder {number}: only one of the runs has it"]
            effects = ("data",)
            continue
        if one.manifest.hash == other.manifest.hash:
            continue
        different = [*_different(one, other)]
        splits = {shard.split for shard in different}
        if "train" in splits or not different:
            effects = ("data",)
        names = [f"{shard.split} shard {shard.name}" for shard in different]
        more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
        place = f"{one.path} and {other.path}"
        shown = ", ".join(names[:NAMED]) or "the tokenizer"
        lines.append(f"{place}: differ in {shown}{more}")
        is_alone = len(folders[0]) == len(folders[1]) == 1
        if not is_alone or "train" not in splits:
            continue
        with suppress(OSError, ValueError, UserError):
            window = _first_window(first, second, one, other)
            lines += window.lines
            if "val" not in splits:
                first_step = window.step
    return DataDifference(lines, effects, first_step)


def other_texts(first: Record, second: Record) -> tuple[str, str] | None:
    """The sources of two runs' data in words, if their manifests have other texts; None if they
    have the same, or cannot be read."""
    manifests: list[list[Manifest]] = []
    for record in (first, second):
        folders = _folders(record.stretches[0].conditions)
        known = [folder.manifest for folder in folders if isinstance(folder, Folder)]
        if not known or len(known) < len(folders):
            return None
        manifests.append(known)
    hashes = [[_hash_of_text(manifest) for manifest in each] for each in manifests]
    sources = [[manifest.source for manifest in each] for each in manifests]
    is_hashed = all(text for each in hashes for text in each)
    one, other = hashes if is_hashed else sources  # older manifests have no hash
    if one == other:
        return None
    names = [", ".join(map(_name_of, each)) for each in sources]
    if names[0] == names[1]:  # the file was changed, or is in another folder
        names = [
            ", ".join(text[:8] for text in each) if is_hashed else ", ".join(each)
            for each in (one, other)
        ]
    return names[0], names[1]


def _hash_of_text(manifest: Manifest) -> str:
    """SHA-256 of the files that were prepared; empty if the manifest has none."""
    match manifest.recipe:
        case {"fingerprint": {"sha256": str(sha256)}}:
            return sha256
        case _:
            return ""


def _name_of(source: str) -> str:
    """A source without its folder."""
    return Path(source).name if source.startswith("/") else source


def describe_texts(first: Record, second: Record) -> Iterator[str]:
    """The text and the tokens of each folder of two runs."""
    for name, record in (("A", first), ("B", second)):
        for folder in _folders(record.stretches[0].conditions):
            if isinstance(folder, str):
                yield f"{name}: {folder.partition(',')[0]}"
                continue
            manifest = folder.manifest
            size = text_bytes(manifest)
            of = f" of {size:,} bytes of text" if size else ""
            tokens = f"{manifest.tokens('train'):,} training tokens{of}"
            yield f"{name}: {folder.path}: {tokens}, from {manifest.source}"


def changed_shards(record: Record) -> tuple[list[str], list[str]]:
    """Training shards of the run's data that are not those of its manifests any more. And the
    folders that are missing, or have other data now. Hashes all training shards."""
    changed: list[str] = []
    unread: list[str] = []
    for folder in _folders(record.stretches[-1].conditions):
        if isinstance(folder, str):
            unread.append(folder)
            continue
        dtype = token_dtype(folder.manifest.vocab_size)
        for shard in folder.manifest.splits.get("train", []):
            file = folder.path / shard.file
            try:
                check_shard(folder.path, shard, dtype)
                is_right = sha256_file(file) == shard.sha256
            except UserError:
                is_right = False
            if not is_right:
                changed.append(f"{file}: differs from its manifest")
    return changed, unread


def _folders(conditions: Row) -> list[Folder | str]:
    """The folders of a GPT's data; of one that has other data now, the reason."""
    hashes = conditions.get("data") or []
    path = conditions.get("data.path")
    paths = DataConfig(path=(path,) if isinstance(path, str) else tuple(path or ())).paths
    folders: list[Folder | str] = []
    for path, sha256 in zip_longest(paths, hashes):
        if path is None or sha256 is None:
            break
        try:
            manifest = read_manifest(Path(path))
        except UserError:
            folders.append(f"{path}: cannot be read, so its shards are not compared")
            continue
        if manifest.hash == sha256:
            folders.append(Folder(Path(path), manifest))
        else:
            folders.append(f"{path}: has other data than the run, so its shards are not compared")
    return folders


class DifferentShard(NamedTuple):
    """A shard that differs: `first` and `second` are those of the two folders, None without one."""

    split: str
    name: str
    first: Shard | None
    second: Shard | None


def _different(one: Folder, other: Folder) -> Iterator[DifferentShard]:
    """The shards that differ."""
    for split in ("train", "val"):
        pairs = zip_longest(
            one.manifest.splits.get(split, []), other.manifest.splits.get(split, [])
        )
        for mine, theirs in pairs:
            if not mine or not theirs or mine.sha256 != theirs.sha256:
                yield DifferentShard(split, (mine or theirs).file, mine, theirs)


class FirstWindow(NamedTuple):
    """The windows that differ, in lines, and the first step that trained on one; 1 if that is not
    known."""

    lines: list[str]
    step: int = 1


def _first_window(first: Record, second: Record, one: Folder, other: Folder) -> FirstWindow:
    """The number of training windows that differ, the first one, and the first step that trained on
    one. No lines where the shards have other lengths, or other windows. Raises: OSError,
    UserError."""
    size = first.at(1)["model.block_size"]
    pairs = [
        (shard.first, shard.second) for shard in _different(one, other) if shard.split == "train"
    ]
    lengths = [
        [shard.tokens for shard in folder.manifest.splits["train"]] for folder in (one, other)
    ]
    is_same_type = one.manifest.vocab_size == other.manifest.vocab_size
    if lengths[0] != lengths[1] or not is_same_type or size != second.at(1)["model.block_size"]:
        return FirstWindow([])
    changed = np.zeros(count_windows(one.manifest.tokens("train"), size), bool)
    dtype = token_dtype(one.manifest.vocab_size)
    begin = 0
    for mine, theirs in zip(*(each.manifest.splits["train"] for each in (one, other)), strict=True):
        if (mine, theirs) in pairs:
            check_shard(one.path, mine, dtype)
            check_shard(other.path, theirs, dtype)
            for tokens in _different_tokens(one.path / mine.file, other.path / theirs.file, dtype):
                _mark(changed, begin + tokens, size)
        begin += mine.tokens
    windows = np.flatnonzero(changed)
    if not len(windows):
        return FirstWindow([])
    count = f"{len(windows):,} of {len(changed):,} training windows differ"
    line = f"{count}; the first is window {windows[0]:,}"
    step = _first_step(first, second, changed)
    if step is None:
        return FirstWindow([line])
    last = min(first.last, second.last)
    text = f"step {step:,} is the first that trained on one of them"
    if step > last:
        text = f"no step up to {last:,} trained on one of them"
    return FirstWindow([line, text], step)


def _different_tokens(first: Path, second: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Positions int64 [n] in a shard where two files have other tokens, a part of it at a time."""
    position = 0
    with first.open("rb") as one, second.open("rb") as other:
        one.seek(HEADER_BYTES)
        other.seek(HEADER_BYTES)
        while True:
            mine = np.fromfile(one, dtype, CHUNK)
            theirs = np.fromfile(other, dtype, CHUNK)
            if not len(mine) or len(mine) != len(theirs):
                return
            yield position + np.flatnonzero(mine != theirs)
            position += len(mine)


def _mark(changed: np.ndarray, tokens: np.ndarray, size: int) -> None:
    """Marks the windows that hold these tokens of the stream. The first token of a window is the
    last target of the window before."""
    windows = tokens // size
    before = windows[tokens % size == 0] - 1
    for numbers in (windows, before):
        changed[numbers[(numbers >= 0) & (numbers < len(changed))]] = True


SAME = ("seed", "train.global_batch_tokens", "data.shift_windows", "code", "skipped positions")
"""Conditions that must agree for one order of both runs."""


def _first_step(first: Record, second: Record, changed: np.ndarray) -> int | None:
    """The first step that trained on a changed window, or the one after all common steps. None if
    the runs do not both have the order of a plain run of one folder. Reads no data."""
    stretches = [stretch for record in (first, second) for stretch in record.stretches]
    plain = first.at(1)
    is_alike = all(
        plain.get(name) == stretch.conditions.get(name) for stretch in stretches for name in SAME
    )
    is_plain = not (plain.get("code") or plain["data.shift_windows"] or stretches[0].begin)
    last = min(first.last, second.last)
    if not is_alike or not is_plain or last > MOST_STEPS:
        return None
    windows = plain["train.global_batch_tokens"] // plain["model.block_size"]
    feed = Feed(Permutation(plain["seed"], len(changed)), GlobalBatch(windows, lambda size: []))
    for step in range(1, last + 1):
        if changed[feed.next_step().items.astype(np.int64)].any():
            return step
    return last + 1
