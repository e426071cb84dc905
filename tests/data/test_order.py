"""The global order and its digests: every item once per epoch, and numbers that no release may
change. The digests of whole steps are in test_mixture.py."""

import hashlib

import numpy as np
import pytest
from runs import by_definition

from gpt2_ddp.data.mixture import MixedOrder, Phase, normal
from gpt2_ddp.data.order import Permutation, next_digest, skipped_digest
from gpt2_ddp.state import FIRST_DIGEST


@pytest.mark.parametrize("n", [1, 2, 3, 97, 100, 2048, 5000, 65_537])
def test_the_order_follows_its_definition(n):
    """Every epoch is a permutation of its own. Few positions
    are those of all at once, whatever was asked before."""
    rng = np.random.default_rng(n)
    seed = n**3
    order = Permutation(seed, n)
    epochs = Permutation(seed, n).items_at(np.arange(3 * n + 600))
    assert epochs.dtype == np.uint64
    for epoch in range(3):
        assert np.array_equal(np.sort(epochs[epoch * n : (epoch + 1) * n]), np.arange(n))
    if n > 50:
        assert len({tuple(epochs[at : at + 30]) for at in (0, n, 2 * n)}) == 3
    for start in [*range(0, 64, 4), *rng.integers(0, 3 * n, 60), max(n - 2, 0), 2 * n - 1]:
        positions = start + np.sort(rng.choice(300, rng.choice([0, 8, 8, 290]), replace=False))
        assert order.items_at(positions).tolist() == epochs[positions].tolist()
    for position in rng.integers(0, 3 * n, 100).tolist():
        assert epochs[position] == by_definition(seed, n, position)


ITEMS = [
    (1337, 1000, 3000, [508, 149, 143, 91, 892, 820, 822, 310]),
    (42, 97, 93, [88, 21, 18, 65, 50, 88, 40, 78]),
    (
        9223372036854775807,
        1000000007,
        1000000000000000,
        [952219317, 699589384, 346536137, 776282658],
    ),
    (0, 2, 0, [1, 0, 1, 0, 0, 1, 1, 0]),
]
"""Seed, number of items, first position, and the items
from there on: of an epoch, across the end of one."""


@pytest.mark.parametrize(("seed", "n_items", "start", "items"), ITEMS)
def test_the_order_is_what_it_always_was(seed, n_items, start, items):
    for count in (1, len(items)):
        positions = np.arange(start, start + count)
        assert Permutation(seed, n_items).items_at(positions).tolist() == items[:count]


@pytest.mark.parametrize(
    ("mixed", "most"), [(False, {4: 1.1, 4096: 1.01}), (True, {4: 3.6, 4096: 2.3})]
)
def test_a_step_costs_the_same_wherever_it_is(mixed, most, monkeypatch):
    """Values that go through the permutation: the positions themselves, which are made ahead for
    small steps, a few again, and in a mixture the blocks that they are of."""
    sizes = []
    permute = Permutation._feistel
    monkeypatch.setattr(
        Permutation, "_feistel", lambda self, v, k: sizes.append(len(v)) or permute(self, v, k)
    )
    n = 10**9 + 7
    for size, limit in most.items():
        for begins in (0, 10**6 * size, 10**15):
            order = Permutation(1, n)
            if mixed:
                order = MixedOrder(1, [n, n], [Phase(0, normal([2, 1]))], "ab")
            sizes.clear()
            for start in range(begins, begins + 4 * 4096, size):
                for _ in ("of the feed", "of the loader")[: 1 + (size == 4)]:
                    order.items_at(np.arange(start, start + size))
            assert sum(sizes) / 4096 / 4 < limit, (size, begins)
            assert len(sizes) < 400, "calls"


def test_digests_follow_their_definition():
    """2^40 + 5 needs all 8 bytes of an item."""
    digest = FIRST_DIGEST
    for items in ([3, 1, 2], [2**40 + 5, 0], [7]):
        content = bytes.fromhex(digest) + b"".join(item.to_bytes(8, "little") for item in items)
        digest = next_digest(digest, np.array(items, np.uint64))
        assert digest == hashlib.sha256(content).hexdigest()
    assert digest == "8bce91cbbea51bf4fa5e85d4f7ed283f7d2fe1320d97a6e4b5a71acf6756951d"
    for start, stop in ((5, 9), (10**12, 10**12 + 2**33)):
        passed = start.to_bytes(8, "little") + stop.to_bytes(8, "little")
        content = bytes.fromhex(digest) + b"pass" + passed
        digest = skipped_digest(digest, start, stop)
        assert digest == hashlib.sha256(content).hexdigest()
