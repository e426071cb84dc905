"""Windows that begin elsewhere in each epoch (`data.shift_windows`): the tokens of each item, by
docs/verify.md in plain numpy and by numbers that no release may change; and runs over them."""

import hashlib
import re
import shutil
from functools import partial

import numpy as np
import pytest
from commands import expect_error
from conftest import write_shards
from ranks import in_turn, run_ranks
from runs import (
    all_rows,
    assert_same,
    change,
    checkpoint_at,
    forge,
    permuted,
    reseal,
    rows,
    train,
    training_config,
    verified,
)

from gpt2_ddp.checkpoint.format import CONFIG
from gpt2_ddp.data.corpus import open_corpus
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.files import read_json
from gpt2_ddp.state import FIRST_DIGEST


def shift_of(seed, epoch, size):
    """The shift of an epoch, from docs/verify.md."""
    key = hashlib.shake_256(f"{seed}/shift/{epoch}".encode()).digest(8)
    return int.from_bytes(key, "little") % size


def item_and_start(seed, n_tokens, size, position):
    """The item at a position, and its first token, from docs/verify.md in integers alone."""
    n = (n_tokens - size) // size
    epoch, index = divmod(position, n)
    window = permuted(seed, str(epoch), n, index)
    shift = shift_of(seed, epoch, size)
    return shift * n + window, window * size + shift


class Positions:
    """A stream whose tokens are their own positions."""

    def __init__(self, n_tokens):
        self.n_tokens = n_tokens

    def __len__(self):
        return self.n_tokens

    def read(self, starts, length):
        tokens = starts[:, None] + np.arange(length)
        assert tokens.min() >= 0
        assert tokens.max() < self.n_tokens
        return tokens


@pytest.mark.parametrize(
    ("n_tokens", "size"), [(64, 32), (95, 32), (96, 32), (97, 32), (5000, 32), (700, 7), (50, 1)]
)
def test_each_pair_of_tokens_once_per_epoch(n_tokens, size):
    """From the shift on; at the ends, fewer than three windows are left out."""
    windows = Windows(Positions(n_tokens), size, shifts=size)
    n = len(windows)
    order = Permutation(7, n, shifts=size)
    for epoch in range(5):
        items = order.items_at(np.arange(epoch * n, (epoch + 1) * n)).astype(np.int64)
        tokens = windows.read(items)[0].numpy()
        shift = shift_of(7, epoch, size)
        inputs = tokens[:, :-1].flatten()
        assert np.array_equal(tokens[:, 1:].flatten(), inputs + 1)
        assert np.array_equal(np.sort(inputs), np.arange(shift, shift + n * size))
        assert n_tokens - n * size < 2 * size
    # the last window of the largest shift fits, and no further one would
    assert windows.read(np.array([(size - 1) * n + n - 1]))[0].max() < n_tokens
    assert (n + 1) * size + size > n_tokens


def test_epochs_begin_elsewhere():
    """All shifts occur about equally often, that of the first epoch included."""
    shifts = [Permutation(1337, 10, shifts=32).shift(epoch) for epoch in range(3200)]
    assert shifts[:8] == [shift_of(1337, epoch, 32) for epoch in range(8)]
    assert shifts[:8] == FIRST_SHIFTS
    counts = np.bincount(shifts, minlength=32)
    assert len(counts) == 32
    assert counts.min() > 60
    assert counts.max() < 150
    assert [Permutation(1337, 10).shift(epoch) for epoch in range(9)] == [0] * 9
    others = [Permutation(1337, 10, "1/", 10**6).shift(0), Permutation(2, 10, "", 10**6).shift(0)]
    assert len({*others, Permutation(1337, 10, "", 10**6).shift(0)}) == 3


def test_the_items_are_what_they_always_were():
    """Across the end of the first epoch, of 30 windows of 32 tokens."""
    n_tokens = 999
    windows = Windows(Positions(n_tokens), 32, shifts=32)
    assert len(windows) == 30
    positions = np.arange(26, 34)
    items = Permutation(1337, 30, shifts=32).items_at(positions)
    starts = windows.read(items.astype(np.int64))[0][:, 0].tolist()
    expected = [item_and_start(1337, n_tokens, 32, position) for position in positions.tolist()]
    assert [*zip(items.tolist(), starts, strict=True)] == expected
    assert (items.tolist(), starts) == (ITEMS, STARTS)


FIRST_SHIFTS = [19, 26, 24, 3, 2, 9, 19, 14]
ITEMS = [577, 583, 581, 594, 789, 806, 798, 809]
STARTS = [243, 435, 371, 787, 314, 858, 602, 954]


def test_items_below_the_number_of_windows_are_not_shifted():
    """So an order of one's own may return the numbers of windows."""
    numbers = np.arange(30)
    shifted = Windows(Positions(999), 32, shifts=32)
    plain = Windows(Positions(999), 32)
    assert shifted.read(numbers)[0].tolist() == plain.read(numbers)[0].tolist()
    for windows, item in ((plain, 31), (shifted, 32 * 30)):
        with pytest.raises(AssertionError, match="outside"):
            windows.read(np.array([item]))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_rows_of_each_rank_by_hand(world):
    """Steps of 12 windows over epochs of 30, without skipped ranges. Digests are those of any
    number of ranks."""
    seed = 99
    windows = Windows(Positions(999), 32, shifts=32)
    skipped = [(20, 47), (90, 93)]
    left = [p for p in range(300) if not any(start <= p < stop for start, stop in skipped)]
    digest = FIRST_DIGEST
    for start, stop in skipped:
        content = b"pass" + start.to_bytes(8, "little") + stop.to_bytes(8, "little")
        digest = hashlib.sha256(bytes.fromhex(digest) + content).hexdigest()
    feeds = []
    read = []
    for rank in range(world):
        whole = GlobalBatch(12, partial(interleaved, world, 2), rows=2)
        feeds.append(Feed(Permutation(seed, 30, shifts=32), whole))
        for start, stop in skipped:
            feeds[-1].skip_range(start, stop)
        read.append(feeds[-1]._read_ahead(windows, rank, feeds[-1].state))
    for step in range(20):
        found = [
            item_and_start(seed, 999, 32, position) for position in left[12 * step : 12 * step + 12]
        ]
        packed = np.array([item for item, _ in found], "<u8").tobytes()
        digest = hashlib.sha256(bytes.fromhex(digest) + packed).hexdigest()
        right = {start: list(range(start, start + 33)) for _, start in found}
        taken = []
        for feed, batches in zip(feeds, read, strict=True):
            feed.next_step()
            assert feed.state.order_digest == digest
            for batch in batches:
                for row in batch.rows[0][: batch.n_valid].tolist():
                    assert row == right[row[0]]
                    taken.append(row[0])
                if batch.last:
                    break
        assert sorted(taken) == sorted(start for _, start in found)
    assert digest == DIGEST


DIGEST = "775560e6bda409d67d8e9cf28015b0832b6cbc74609f9c9b639d3c20ca015f05"


# Folders and runs


@pytest.fixture(scope="module")
def folder(corpus, tmp_path_factory):
    """999 tokens, which are 30 windows of 32 in each epoch."""
    place = tmp_path_factory.mktemp("short")
    shutil.copy(corpus / "tokenizer.json", place)
    parts = {}
    for split, count in (("train", 998), ("val", 400)):
        stream = TokenStream(corpus, read_manifest(corpus), split)
        tokens = stream.read(np.array([0]), len(stream))[0]
        parts[split] = [tokens[tokens != read_manifest(corpus).eot][:count]]
    write_shards(place, "short", parts)
    return place


def config_of(folder, place, changes=()):
    """A run of 10 steps of 12 windows: four epochs."""
    shifted = {"data.shift_windows": True, "eval.every": 5, "eval.tokens": None}
    shifted |= {"optim.decay_steps": 10}
    return training_config(folder, place, shifted | dict(changes))


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    """`whole/run`, of 10 steps; `halves/run`, of 5 steps and 5 more; and what was refused there."""
    place = tmp_path_factory.mktemp("runs")
    other = {"data.shift_windows": False}
    begin = checkpoint_at(place / "halves/run", 5)
    branch = {"run_name": "branch", "train.branch_from": str(begin)}
    calls = [
        config_of(folder, place / "whole"),
        config_of(folder, place / "halves", {"train.steps": 5}),
        config_of(folder, place / "halves", other),
        config_of(folder, place / "halves", other | branch),
        config_of(folder, place / "halves", branch),
        config_of(folder, place / "halves"),
    ]
    (outcomes,) = run_ranks(in_turn, 1, *[(train, config) for config in calls])
    return place, outcomes


def test_a_run_by_hand_and_resumed(runs, folder, capsys):
    """Bit for bit; its digest follows from seed and number of tokens alone."""
    place, outcomes = runs
    assert [outcomes[number] for number in (0, 1, 4, 5)] == ["completed"] * 4
    assert_same(place / "whole/run", place / "halves/run")
    digest = FIRST_DIGEST
    for row in rows(place / "whole/run")[1:]:
        step = row["step"]
        positions = range(12 * step - 12, 12 * step)
        items = [item_and_start(1337, 999, 32, position)[0] for position in positions]
        packed = np.array(items, "<u8").tobytes()
        digest = hashlib.sha256(bytes.fromhex(digest) + packed).hexdigest()
        assert row["order_digest"] == digest
        assert row["epoch"] == round(12 * step / 30, 4)
        assert row["tokens"] == 12 * 32 * step
    for name in ("whole/run", "halves/run", "halves/branch"):
        assert verified(place / name, capsys)[:2] == (0, []), name


def test_another_value_is_refused(runs):
    """It would be another order. A branch continues its parent's."""
    refused, branch = runs[1][2:4]
    assert refused.startswith("data.shift_windows = False: the run was started with True; restore")
    assert branch.startswith("data.shift_windows = False: ")
    assert branch.endswith("was trained with True, which a branch keeps; restore it")


def test_older_releases_refuse_its_checkpoints(runs, trained):
    """They ignore fields that they do not know, and read format 1 alone."""
    formats = [
        read_json(checkpoint_at(run, 10) / "manifest.json")["format"]
        for run in (runs[0] / "whole/run", trained)
    ]
    assert formats == [2, 1]


def test_a_forged_shift_is_found(runs, tmp_path, capsys):
    """In all records, with all hashes computed again."""
    run = tmp_path / "run"
    shutil.copytree(runs[0] / "whole/run", run)
    for file in (run / CONFIG, checkpoint_at(run, 5) / CONFIG, checkpoint_at(run, 10) / CONFIG):
        change(file, "shift_windows: true", "shift_windows: false")
    for step in (5, 10):
        reseal(checkpoint_at(run, step) / CONFIG)

    def edit(rows):
        for row in rows:
            if "config" in row:
                row["config"]["data"]["shift_windows"] = False

    forge(run, edit)
    code, defects, _ = verified(run, capsys)
    assert code == 1
    assert [re.sub(" is .*", "", defect) for defect in defects] == [
        f"metrics.jsonl, line 4: {name} of step 1" for name in ("epoch", "order_digest")
    ]


def test_little_text(folder, corpus, tmp_path):
    """64 tokens are a window of 32 and its shifts, and one token less is an error."""
    for count, windows in ((63, 1), (62, 0)):
        place = tmp_path / str(count)
        place.mkdir()
        shutil.copy(corpus / "tokenizer.json", place)
        write_shards(place, "little", {"train": [np.arange(count)]})
        config = config_of(place, tmp_path)
        if windows:
            (source,) = open_corpus(config).sources
            assert len(source) == windows
            assert Permutation(1, 1, shifts=32).items_at(np.arange(9)).tolist() == [
                shift_of(1, epoch, 32) for epoch in range(9)
            ]
        else:
            needed = "a window needs 64 tokens with data.shift_windows, but .* has 63; use more"
            expect_error(f"^data.path = .*62: {needed}", open_corpus, config)
            assert len(open_corpus(training_config(place, tmp_path)).sources[0]) == 1


def test_rows_record_the_field(runs):
    """That of the run, and of the branch."""
    for name in ("whole/run", "halves/branch"):
        (start, *_) = [row for row in all_rows(runs[0] / name) if row.get("event") == "start"]
        assert start["config"]["data"]["shift_windows"] is True
        assert start["epoch_size"] == 30
