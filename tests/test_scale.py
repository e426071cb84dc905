"""Signs of life and verdicts on 1,024 ranks, simulated: counts and bytes, which depend on no machine's speed."""

import json
from types import SimpleNamespace

import pytest

from gpt2_ddp.distributed import watchdog as watching
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.distributed.watchdog import Heartbeat, Observed, Watchdog, judge

WORLD = 1024


class CountingStore:
    """Stands for the store by which the ranks have met."""

    def __init__(self, values):
        self.values = values
        self.sent = []

    def clone(self):
        return self

    def set(self, key, value):
        self.sent.append(len(value))
        self.values[key] = value

    def multi_get(self, keys):
        found = [self.values.get(key, "").encode() for key in keys]
        self.sent.append(sum(map(len, found)))
        return found

    def compare_set(self, key, old, new):
        return self.values.setdefault(key, new).encode()


@pytest.mark.parametrize(("number", "most"), [(0, 200 * WORLD), (1, 2 * 200)])
def test_signs_of_life_are_two_requests_a_turn(number, most, monkeypatch):
    """Rank 0 fetches all of them at once, of less than 200 bytes each; any other one rank 0's alone. A turn comes
    twice a second."""
    monkeypatch.setattr(watching.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(watching, "PrefixStore", lambda _, store: store)
    sign = json.dumps(Heartbeat(this_process(), 10**6, "forward/backward", 10**6, 9, 10**7, 0.5, 1800.0))
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

    def __eq__(self, other):
        Counted.compared += 1
        return int(self) == other


def test_a_verdict_is_linear_in_the_ranks():
    beats = (Heartbeat(this_process(), step=Counted(rank > 0), idle=999.0) for rank in range(WORLD))
    verdict = judge({rank: Observed(beat, 0.3) for rank, beat in enumerate(beats)}, 120)
    assert verdict.reason.startswith("rank 0 ")
    assert Counted.compared < 5 * WORLD
