"""A training of 10^12 tokens on 1,024 ranks, simulated: the counts and bytes of docs/benchmarks.md. The seconds of that
page were measured; this file tests only figures that do not depend on the machine's speed."""

import json
import tracemalloc
from fractions import Fraction
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt2_ddp.data import order as orders
from gpt2_ddp.data.feed import Feed, GlobalBatch, _BatchSampler, interleaved
from gpt2_ddp.data.mixture import MixedOrder, Phase
from gpt2_ddp.data.order import Order
from gpt2_ddp.distributed import watchdog as watching
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.distributed.watchdog import Heartbeat, Observed, Watchdog, judge
from gpt2_ddp.state import FIRST_DIGEST

WORLD, WINDOWS, STEP, BATCH = 1024, 10**12 // 1024, 4096, 4
LATE = 10**6
"""A step to go on from."""


def order(kind: str) -> Order | MixedOrder:
    if kind == "one source":
        return Order(1337, WINDOWS)
    weights = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
    return MixedOrder(1337, [WINDOWS // 2, WINDOWS // 4, WINDOWS // 4], [Phase(0, weights)], ["a", "b", "c"])


class Numbers:
    """A source whose rows are the numbers of its items; nothing of 2 TB is there."""

    def __len__(self) -> int:
        return WINDOWS

    def read(self, items: np.ndarray) -> tuple[torch.Tensor]:
        self.asked = len(items)
        return (torch.from_numpy(items),)


def rank(number: int, kind: str) -> Feed:
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=WORLD, process_index=number)
    return Feed(order(kind), GlobalBatch(STEP, interleaved(WORLD, BATCH)), Numbers(), accelerator)  # pyright: ignore


@pytest.mark.parametrize("kind", ["one source", "mixture"])
@pytest.mark.parametrize("begins", [0, LATE])
def test_ranks_have_the_same_digest_and_read_only_their_own(kind, begins):
    """The windows of all 1,024 ranks are the step's, each once; a rank reads 4 of the 4,096."""
    digests, shares = set(), []
    for number in (0, 1, WORLD - 1):
        feed = rank(number, kind)
        feed.seek(begins * STEP, FIRST_DIGEST, [])
        for _ in range(2):
            step = feed.next_step()
            (batch,) = step.micro_batches
            (shares,) = feed.share(STEP)
            own = shares[number]
            assert batch.rows[0].tolist() == step.items[own.start : own.stop].tolist()
            assert (vars(feed.source)["asked"], len(set(step.items.tolist()))) == (BATCH, STEP)
        digests.add(feed.order_digest)
        assert feed.position == (begins + 2) * STEP
    assert len(digests) == 1
    assert sorted(item for own in shares for item in own) == list(range(STEP))


@pytest.mark.parametrize("kind", ["one source", "mixture"])
def test_a_step_costs_the_same_wherever_it_is(kind, monkeypatch):
    """Values that go through the permutation: the step's, a few again, and in a mixture the blocks that it is of.
    Memory is that of a step, not of the corpus or of the steps before."""
    sizes: list[int] = []
    permute = Order._feistel
    monkeypatch.setattr(orders.Order, "_feistel", lambda self, v, k: sizes.append(len(v)) or permute(self, v, k))
    counted = {}
    for begins in (0, LATE):
        feed = Feed(order(kind), GlobalBatch(STEP, interleaved(WORLD, BATCH)))
        feed.seek(begins * STEP, FIRST_DIGEST, [])
        sizes.clear()
        tracemalloc.start()
        for _ in range(10):
            feed.next_step()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2e6, "bytes"
        counted[begins] = sum(sizes) / 10 / STEP
    assert max(counted.values()) < {"one source": 1.01, "mixture": 2.3}[kind], counted


def test_the_sampler_makes_one_range_per_rank_and_micro_batch():
    """Accelerate asks for all ranks' batches to give one of them on: that is O(ranks) per micro-batch."""
    feed = Feed(Order(1337, WINDOWS), GlobalBatch(STEP, interleaved(WORLD, BATCH)))
    made = list(islice(_BatchSampler(feed, 0), WORLD))
    assert [len(items) for items in made] == [BATCH] * WORLD
    assert np.concatenate(made).tolist() == feed.order.items_at(np.arange(STEP)).tolist()


class CountingStore:
    """Stands for the store by which the ranks have met."""

    def __init__(self, values: dict[str, str]):
        self.values = values
        self.sent: list[int] = []

    def clone(self) -> "CountingStore":
        return self

    def set(self, key: str, value: str) -> None:
        self.sent.append(len(value))
        self.values[key] = value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        found = [self.values.get(key, "").encode() for key in keys]
        self.sent.append(sum(map(len, found)))
        return found

    def compare_set(self, key: str, old: str, new: str) -> bytes:
        return self.values.setdefault(key, new).encode()


@pytest.mark.parametrize(("number", "most"), [(0, 200 * WORLD), (1, 2 * 200)])
def test_signs_of_life_are_two_requests_a_turn(number, most, monkeypatch):
    """Rank 0 fetches all of them at once, of less than 200 bytes each; any other one rank 0's alone. A turn comes
    twice a second."""
    monkeypatch.setattr(watching.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(watching, "PrefixStore", lambda _, store: store)
    sign = json.dumps(Heartbeat(this_process(), 10**6, "forward/backward", LATE, 9, 9 * LATE, 0.5, 1800.0))
    store = CountingStore({f"signs/{other}": sign for other in range(WORLD)})
    watch = Watchdog(number, WORLD, None, store=store)  # pyright: ignore[reportArgumentType]
    store.sent.clear()
    watch._link._exchange(watch._observer.outgoing())
    assert len(store.sent) == 2
    assert sum(store.sent) < most
    assert all(seen.turn == 10**6 for seen in watch._link.beats.values())
    assert len(watch._link.beats) == (WORLD - 1 if number == 0 else 1)
    assert watch._observer._judge() is None


class Counted(int):
    """A number that counts its comparisons."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other


def test_a_verdict_is_linear_in_the_ranks():
    beats = (Heartbeat(this_process(), step=Counted(rank > 0), idle=999.0) for rank in range(WORLD))
    verdict = judge({rank: Observed(beat, 0.3) for rank, beat in enumerate(beats)}, 120)
    assert verdict is not None
    assert verdict.living == [0]
    assert Counted.compared < 5 * WORLD
