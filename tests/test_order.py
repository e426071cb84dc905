"""The global order and its digests: every item once per epoch, and numbers that no release may change."""

import hashlib
import random

import numpy as np
import pytest
from runs import by_definition

from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.order import Order, next_digest, skipped_digest
from gpt2_ddp.state import FIRST_DIGEST


@pytest.mark.parametrize("n_items", [1, 2, 3, 4, 5, 10, 97, 100, 1000, 65_536, 65_537])
def test_every_epoch_is_a_permutation(n_items):
    order = Order(7, n_items)
    assert len(order) == n_items
    epochs = [order.items_at(np.arange(e * n_items, (e + 1) * n_items)) for e in range(3)]
    for epoch in epochs:
        assert epoch.dtype == np.uint64
        assert np.array_equal(np.sort(epoch), np.arange(n_items))
    if n_items >= 10:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], Order(8, n_items).items_at(np.arange(n_items)))


@pytest.mark.parametrize(
    ("seed", "n_items", "start", "items"),
    [
        (1337, 1000, 0, [789, 306, 606, 832, 213, 86, 477, 230]),
        (1337, 1000, 3000, [508, 149, 143, 91, 892, 820, 822, 310]),  # epoch 3
        (1337, 1000, 10**12, [332, 918, 145, 963, 157, 640, 284, 907]),
        (42, 97, 93, [88, 21, 18, 65, 50, 88, 40, 78]),  # across the end of epoch 0
        (5, 65_537, 65_533, [18210, 34671, 14964, 52247, 61785, 63598, 41673, 56372]),
        (2**63 - 1, 10**9 + 7, 10**15, [952219317, 699589384, 346536137, 776282658]),
        (0, 2, 0, [1, 0, 1, 0, 0, 1, 1, 0]),
        (7, 1, 5, [0, 0, 0, 0]),
    ],
)
def test_the_order_is_what_it_always_was(seed, n_items, start, items):
    assert Order(seed, n_items).items_at(np.arange(start, start + len(items))).tolist() == items


def test_the_order_follows_its_definition():
    """Random N, seeds and positions, with gaps between these and over ends of epochs."""
    rng = random.Random(0)
    for _ in range(40):
        seed, n = rng.randrange(2**63), rng.choice([rng.randint(1, 50), rng.randint(1, 10**4), rng.randint(1, 10**9)])
        first = rng.randrange(10**12)
        positions = sorted({first + rng.randrange(3 * n) for _ in range(12)})
        expected = [by_definition(seed, n, position) for position in positions]
        assert Order(seed, n).items_at(np.array(positions)).tolist() == expected, (seed, n, first)


def test_a_far_position_costs_what_the_first_one_costs(monkeypatch):
    """Counted: 512 positions go through the network once each, but for the few that land outside."""
    counted, feistel = [], Order._feistel

    def counting(self, values, keys):
        counted.append(len(values))
        return feistel(self, values, keys)

    monkeypatch.setattr(Order, "_feistel", counting)
    for start in (0, 10**15):
        counted.clear()
        Order(3, 10**9 + 7).items_at(np.arange(start, start + 512))
        assert 512 <= sum(counted) <= 520


STEPS = ([3, 1, 2], [2**40 + 5, 0], [7])


def test_the_digest_follows_its_definition_and_is_what_it_always_was():
    """2^40 + 5 needs all 8 bytes of an item; the second and third value need the past."""
    digest = expected = FIRST_DIGEST
    for items in STEPS:
        digest = next_digest(digest, np.array(items, np.uint64))
        content = b"".join(item.to_bytes(8, "little") for item in items)
        expected = hashlib.sha256(bytes.fromhex(expected) + content).hexdigest()
        assert digest == expected
    assert digest == "8bce91cbbea51bf4fa5e85d4f7ed283f7d2fe1320d97a6e4b5a71acf6756951d"


def test_the_digest_of_passed_positions_follows_its_definition():
    before = next_digest(FIRST_DIGEST, np.arange(3))
    for start, stop in ((5, 9), (0, 1), (10**12, 10**12 + 2**33)):
        content = bytes.fromhex(before) + b"pass" + start.to_bytes(8, "little") + stop.to_bytes(8, "little")
        assert skipped_digest(before, start, stop) == hashlib.sha256(content).hexdigest()
    assert skipped_digest(before, 5, 9) != skipped_digest(FIRST_DIGEST, 5, 9)
    assert skipped_digest(before, 5, 9) != skipped_digest(skipped_digest(before, 5, 7), 7, 9)


@pytest.mark.parametrize(
    ("passed", "digest"),
    [
        ([], "88d898e042abbfd1ed27b1be6cd301e6191ae68e79588861309cb8994c7b0169"),
        ([(240, 360), (2390, 2410)], "bc17af5068ec0ad46fbabb8a85460e5c25f0edb8f2767b01f3170d9d238b3f4e"),
    ],
)
def test_the_digest_of_100_steps_is_what_it_always_was(passed, digest):
    """24 items a step: not quite half an epoch of 5,000."""
    feed = Feed(Order(1337, 5000), GlobalBatch(24, interleaved(1, 4)))
    for start, stop in passed:
        feed.skip_range(start, stop)
    for _ in range(100):
        feed.next_step()
    assert feed.order_digest == digest


@pytest.mark.parametrize("n_items", [7, 300, 2048, 5000])
def test_a_few_positions_are_those_of_all_at_once(n_items):
    """Whatever was asked for before, within an epoch and over its end."""
    total = 3 * n_items + 600
    expected = Order(1, n_items).items_at(np.arange(total))  # in one piece
    order, rng = Order(1, n_items), np.random.default_rng(0)
    assert len(order.items_at(np.arange(0))) == 0
    for start in [*range(0, 64, 4), *rng.integers(0, total - 64, 60), n_items - 2, 2 * n_items - 1]:
        positions = start + np.sort(rng.choice(64, 8, replace=False))
        assert order.items_at(positions).tolist() == expected[positions].tolist()


@pytest.mark.parametrize(("first", "size"), [(0, 4), (5 * 10**6, 16)])
def test_positions_of_steps_in_turn_are_evaluated_once(monkeypatch, first, size):
    """Those of a later epoch, too."""
    calls, feistel = [], Order._feistel
    monkeypatch.setattr(Order, "_feistel", lambda self, *rest: calls.append(1) or feistel(self, *rest))
    order = Order(1, 10**6)
    for start in range(first, first + 2048, size):
        for _ in ("of the feed", "of the loader"):
            order.items_at(np.arange(start, start + size))
    assert len(calls) <= 4  # with those that fell outside and went through again
