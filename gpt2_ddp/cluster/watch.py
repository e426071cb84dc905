"""Ranks watch over each other while collectives run, so that a dead or stuck one is named and nobody waits for ever."""

import os
import sys
import threading
import time
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gpt2_ddp.cluster.roll_call import Facts, spell, wait_until

BEAT = 0.5
"""Seconds between two signs of life."""

SILENCE = 15.0
"""Seconds after which a rank without a sign of life is given up, or the timeout where that is less: loading CUDA's
kernels may hold a live one up for several."""

AFTERMATH = 5.0
"""The same once a collective has failed somewhere, when somebody is likely to be dead."""

FAILED = "failed: "


class Watch:
    """A thread that says twice a second what its rank is doing. Rank 0's judges them all; a verdict ends every process
    with exit code 2, even where the main thread is stuck in a collective.

    Args:
        store: where the ranks met.
        ranks: all of them, in order.
        rank: this one.
        timeout: seconds that a rank may be doing the same.
    """

    def __init__(self, store: Store, ranks: list[Facts], rank: int, timeout: float):
        self.doing = "connecting to the other ranks"
        self._store: Store = store.clone()  # pyright: ignore  # of its own: a store serves one call at a time
        self._ranks = ranks
        self._rank = rank
        self._timeout = timeout
        self._finished = threading.Event()
        now = time.monotonic()
        self._last_beat = [(b"", now)] * len(ranks)
        self._last_change = [("", now)] * len(ranks)
        self._answered = now
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, daemon=True).start()

    def fail(self, reason: str) -> NoReturn:
        """Says that this rank's collective failed, and waits for the verdict."""
        self.doing = FAILED + f"{self.doing}: {' '.join(reason.split())[:200]}"
        self._thread.join()
        raise AssertionError("the watch ends the process")

    def finish(self) -> None:
        """Ends the watch, once every rank has all it needs from the others."""
        self._finished.set()
        self._thread.join()

    def _run(self) -> None:
        count = 0
        while not self._finished.wait(BEAT):
            count += 1
            try:
                self._store.set(f"beats/{self._rank}", f"{count} {self.doing}")
                verdict = self._judge() if self._rank == 0 else self._hear()
            except dist.DistError:
                verdict = f"rank 0 = {self._host(0)}: ended, or its store can no longer be reached"
            self._answered = time.monotonic()
            if verdict and not self._finished.is_set():
                self._end(verdict)

    def _watch_store(self) -> None:
        """A stopped process that serves the store would keep its clients waiting for ever."""
        patience = min(SILENCE, self._timeout) + AFTERMATH
        while not self._finished.wait(BEAT):
            if time.monotonic() - self._answered > patience:
                print(f"error: rank 0 = {self._host(0)}: its store does not answer", file=sys.stderr, flush=True)
                os._exit(2)

    def _hear(self) -> str:
        """What rank 0 found, or that rank 0 itself fell silent."""
        if self._store.check(["verdict"]):
            return self._store.get("verdict").decode()
        return self._silent_ranks([0], min(SILENCE, self._timeout) + AFTERMATH)

    def _judge(self) -> str:
        silent = self._silent_ranks(range(len(self._ranks)), min(SILENCE, self._timeout))
        failed = [rank for rank, (doing, _) in enumerate(self._last_change) if doing.startswith(FAILED)]
        if failed and not silent:
            silent = self._silent_ranks(range(len(self._ranks)), min(AFTERMATH, self._timeout))
        if silent:
            return silent
        now = time.monotonic()
        if failed and now - max(self._last_change[rank][1] for rank in failed) > AFTERMATH + 2 * BEAT:
            return self._not_connected(self._last_change[failed[0]][0], failed)
        stuck = [rank for rank, (_, since) in enumerate(self._last_change) if now - since > self._timeout + AFTERMATH]
        return self._not_connected(f"{self._last_change[stuck[0]][0]} does not end", stuck) if stuck else ""

    def _silent_ranks(self, ranks: range | list[int], patience: float) -> str:
        now = time.monotonic()
        keys = [f"beats/{rank}" for rank in ranks]
        beats = self._store.multi_get(keys) if self._store.check(keys) else []
        for rank, beat in zip(ranks, beats, strict=False):
            if beat != self._last_beat[rank][0]:
                self._last_beat[rank] = beat, now
            doing = beat.decode().partition(" ")[2]
            if doing != self._last_change[rank][0]:
                self._last_change[rank] = doing, now
        silent = [rank for rank in ranks if now - self._last_beat[rank][1] > patience]
        said = [
            f"rank {rank} = {self._host(rank)}: no sign of life for {patience:g} s, last seen at: "
            f"{self._last_change[rank][0] or 'arrival'}; it died, stopped, or lost the network"
            for rank in silent
        ]
        return "\n".join(said)

    def _not_connected(self, what: str, ranks: list[int]) -> str:
        ways = ", ".join(dict.fromkeys(f"{facts.host}: {facts.interface} {facts.ip}" for facts in self._ranks))
        return (
            f"ranks = {spell(ranks)}: alive like all others, but not connected ({what}); open all ports between the "
            f"machines, and name the interface that joins them in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME "
            f"(routes to rank 0: {ways})"
        )

    def _host(self, rank: int) -> str:
        return self._ranks[rank].host

    def _end(self, verdict: str) -> NoReturn:
        try:
            heard = self._store.check(["verdict"])
            if self._rank == 0:
                self._store.set("verdict", verdict)
                wait_until(lambda: self._store.add("verdict heard", 0) >= len(self._ranks) - 1, 4 * BEAT)
            else:
                self._store.add("verdict heard", 1)
        except dist.DistError:
            heard = False
        if self._rank == 0 or not heard:
            for line in verdict.splitlines():
                print(f"error: {line}", file=sys.stderr, flush=True)
        os._exit(2)  # the main thread may be inside a collective that never returns
