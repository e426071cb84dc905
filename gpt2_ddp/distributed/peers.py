"""Several ranks: they connect in time, and a watchdog reports one that died, failed or stalled, and
ends all processes.

    each rank, twice a second  ──Heartbeat──▶  rendezvous store  ──▶  rank 0 judges all ranks,
                                                                      the others judge rank 0
    each rank ends itself      ◀──Verdict────  rendezvous store  ◀──  the first that has one

A verdict ends a process even while its main thread is inside a collective. Imported with more than
one process.
"""

import json
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.distributed.environment import RANK_NAMES, world_size
from gpt2_ddp.distributed.process import Process
from gpt2_ddp.distributed.ranks import COLLECTIVE, WATCHED
from gpt2_ddp.distributed.signals import Stopped, before_forced_end
from gpt2_ddp.distributed.watchdog import (
    AFTERMATH,
    HEARTBEAT_INTERVAL,
    SILENCE,
    TIMEOUT,
    Heartbeat,
    Verdict,
    Watchdog,
)
from gpt2_ddp.errors import UserError, is_main_process, print_own

# seconds for ranks to connect after the rendezvous, unless `train.patience_seconds` is set
CONNECTING = 300.0
PATIENT = 20.0  # seconds of connecting after which a rank says what it waits for
LEAST_CONNECTING = 30.0  # one rank may load libraries for longer than another
GRACE = 2.0  # seconds to wait for an expected heartbeat, error message or exit


def connect(start: Callable[..., PartialState], patience: float | None) -> PartialState:
    """The result of `start(timeout=...)`, which connects the ranks. Raises: UserError, on every
    rank, if they do not connect within `patience` seconds (None: CONNECTING)."""
    seconds = max(patience or CONNECTING, LEAST_CONNECTING)
    connected = threading.Event()
    watching = threading.Thread(
        target=_watch_connecting, args=(connected, seconds), name="connecting", daemon=True
    )
    watching.start()
    try:
        return start(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        if not _is_of_collective(error):
            raise
        mistake = _not_connected(str(error).splitlines()[0].rpartition("] ")[2])
        # `run_command` prints the main process's error only; here every rank has its own
        if not is_main_process():
            print(f"error: {mistake}", file=sys.stderr)
            mistake.is_printed = True
        raise mistake from error
    finally:
        connected.set()


def _watch_connecting(connected: threading.Event, seconds: float) -> None:
    """Ends this rank if the ranks do not connect: gloo connects to an unreachable rank five times,
    each time for its whole timeout."""
    if not connected.wait(PATIENT):
        variables = ", ".join(f"{name} {os.environ.get(name)}" for name in RANK_NAMES)
        note = f"note: this rank waits for all others to connect ({variables})"
        print(note, file=sys.stderr, flush=True)
    if not connected.wait(seconds + AFTERMATH - PATIENT):
        reason = f"one of them has not answered within {seconds:.0f} s"
        print(f"error: {_not_connected(reason)}", file=sys.stderr)
        os._exit(2)


def _not_connected(reason: str) -> UserError:
    rank = f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()}"
    problem = f"{rank} cannot connect to the others ({reason[-100:]})"
    interface = "name the interface that joins them in GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME"
    hint = f"open all ports between the machines, and {interface} for GPUs"
    return UserError("processes", world_size(), f"{problem}; {hint}")


def _is_of_collective(error: BaseException) -> bool:
    """Whether a collective or a connection failed; gloo has no error class."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error).lower()


class Observed(NamedTuple):
    beat: Heartbeat  # a rank's latest
    silent: float  # its age in seconds, while the observer was awake


def judge(seen: Sequence[Observed], patience: float, silence_only: bool = False) -> Verdict | None:
    """The verdict on ranks by their heartbeats; None while training may continue.

    A rank without a heartbeat for `patience` seconds is at fault. A live rank is at fault when it
    has exceeded its limit and no other rank is further behind. Silent ranks come first, since their
    last heartbeat is old. With `silence_only`, only ranks that failed, ended or send no heartbeats
    are judged.
    """
    running = [observed for observed in seen if observed.beat.end not in ("left", "stopped")]
    ends = {observed.beat.end for observed in running}
    if ends & {"failed", "refused"}:  # other ranks lost their collective because of it
        return _judge_errors(running)
    limit = min(max(patience, SILENCE), AFTERMATH if "lost" in ends else math.inf)
    lines: list[str] = []
    stuck: list[Process] = []
    for beat, silent in running:
        stage = f"last stage: {beat.place}"
        if silent > GRACE and beat.process.is_gone:
            lines.append(f"{beat.name}: ended without an error message; {stage}; was it killed?")
        elif silent > limit:
            stage = f"{stage}\n{beat.stack}".rstrip()
            lines.append(f"{beat.name}: no heartbeat for {silent:.0f} s; {stage}")
            stuck.append(beat.process)
    is_current = all(observed.silent <= GRACE for observed in running)
    if not lines and not silence_only and "lost" not in ends and is_current:
        lines = _judge_progress([observed.beat for observed in running])
    return Verdict("\n".join(lines), stuck) if lines else None


def _judge_progress(beats: Sequence[Heartbeat]) -> list[str]:
    """What is said of the ranks that are furthest behind, if they have all exceeded their limits.
    The others wait for them in a collective, so their own idle time is no fault."""
    places = [[beat.step, *beat.progress] for beat in beats]
    behind = [beat for beat, place in zip(beats, places, strict=True) if place == min(places)]
    if all(beat.idle > beat.limit for beat in behind):
        return [beat.stall for beat in behind]
    return []


def _judge_errors(seen: Sequence[Observed]) -> Verdict | None:
    """The verdict on ranks that ended with an error; None for a moment, in which this rank may
    raise the same one."""
    for beat, silent in seen:
        if beat.end == "failed" and (silent > GRACE or beat.idle > AFTERMATH):
            return Verdict(f"{beat.name}: {beat.error} (at {beat.place})")
    for beat, silent in seen:
        if beat.end == "refused" and (silent > GRACE or beat.idle > AFTERMATH):
            return Verdict(f"{beat.name}: {beat.error}", by=beat.rank, exit_code=2)
    return None


class PeerWatchdog(Watchdog):
    """Watchdog of one of several ranks. Sends its heartbeats, and judges those of other ranks. The
    exchange has a thread of its own, which may block: a stopped process that serves the store
    blocks clients.

    Args:
        rank, world: this process's rank, and the number of ranks. Ranks construct their watchdogs
            in the same order.
        store: rendezvous store; None: the process group's.
        patience, exit_code: as for `Watchdog`.
    """

    _number = count()

    def __init__(
        self,
        rank: int,
        world: int,
        patience: float | None,
        store: Store | None = None,
        exit_code: int = 1,
    ):
        unknown = Process("an unknown host", "", 0, 0)
        others = range(1, world) if rank == 0 else [0]
        # with their times on `_clock`
        self.seen = {other: (Heartbeat(unknown, other), 0.0) for other in others}
        self.how_ended = ""  # as `Heartbeat.end`
        self.error = ""
        self.verdict: Verdict | None = None
        self._proposal: Verdict | None = None
        self.is_cut_off = False  # from the launcher's store, which has ended
        self._is_done = False
        self._has_refused = False
        self._sent = Heartbeat(unknown, rank)
        self._wake = threading.Event()
        # the process that serves the store; 0 for a store of rank 0
        is_served_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._launcher = os.getppid() if is_served_by_launcher else 0
        everyone: Any = dist.group.WORLD
        # a reference: on rank 0 it may be the server
        self._base_store: Any = store or everyone.get_group_store()
        clone = self._base_store.clone()  # a store serves one call at a time
        self._store = PrefixStore(f"watch/{next(self._number)}", clone)
        super().__init__(patience, exit_code, rank)
        self._exchange = self._start(self._exchange_loop)
        before_forced_end(partial(self.end, "stopped"))

    def failed(self, error: BaseException) -> None:
        """Sends this rank's error or stop to the other ranks. An error of a collective follows the
        end of another rank. Then this waits for the verdict on that rank, which ends the process.
        Returns if no other is at fault."""
        if self.how_ended == "failed" or self._has_refused or self.ended.is_set():
            return
        self.progress()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        if isinstance(error, UserError) and not error.on_every_rank:
            self._refuse(error, message)
            return
        if _is_of_collective(error):
            self.end("lost", message)
            self.ended.wait(AFTERMATH + 3 * GRACE)
        self.end("stopped" if isinstance(error, Stopped) else "failed", message)

    def _refuse(self, error: UserError, message: str) -> None:
        """Sends a user error that other ranks may not have, which end with 2. The main process
        records it before, as its launcher may end it. Another rank prints it, unless the main
        process has the same one."""
        self._has_refused = True
        self._record(message, True)
        self.end("refused", message)
        if self._rank == 0:
            return

        def has_answer() -> bool:
            return self.verdict is not None or self.seen[0][0].end not in ("", "lost")

        self._wait(has_answer, 2 * AFTERMATH)
        main = self.seen[0][0]
        if (main.end, main.error) != ("refused", message):
            print_own(error)
        self.end("left")

    def end(self, how: str, error: str = "") -> None:
        """Sends the end of this rank, and its error, to the other ranks. For any thread."""
        self.error = error
        self.how_ended = how
        self._wait(lambda: self._sent.end == how)

    def close(self) -> None:
        """Ends the watchdog. Rank 0, which may serve the store, waits some seconds for the others
        to leave or fail."""
        self.ended.set()

        def may_end() -> bool:
            others_ended = all(beat.end not in ("", "lost") for beat, _ in self.seen.values())
            return self._sent.end != "" and (self._rank > 0 or others_ended)

        self._wait(may_end, AFTERMATH)
        self._is_done = True
        self._wake.set()
        super().close()

    def _wait(self, condition: Callable[[], object], seconds: float = GRACE) -> None:
        """Exchanges heartbeats until the condition holds, for so many seconds at most."""
        deadline = time.monotonic() + seconds
        while not condition() and self._exchange.is_alive() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)

    def _exchange_loop(self) -> None:
        """Exchanges heartbeats until `close`, or until the store is lost; the body of a thread."""
        try:
            for key in ("verdict", *(f"signs/{rank}" for rank in self.seen)):
                self._store.compare_set(key, "", "")
            while not self._is_done:
                # a call would print a C++ stack
                if self._launcher and os.getppid() != self._launcher:
                    raise dist.DistStoreError("the launcher's store has ended")
                sent = self.outgoing()
                self._exchange_once(sent)
                self._sent = sent
                if self._rank:
                    main = self.seen[0][0]
                    if sent.end == "left" or sent.end == main.end == "stopped":
                        # rank 0 may end, with the store, and a further call would print a C++ stack
                        break
                self._wake.wait(2 * HEARTBEAT_INTERVAL)
                self._wake.clear()
        except dist.DistError:
            # For good. A store of rank 0 ends with rank 0, and a launcher's may end by itself. Then
            # nobody judges live ranks any more: collectives get their usual timeout again.
            self.is_cut_off = self._launcher > 0
            if self.is_cut_off:
                for group in WATCHED:
                    group.set_timeout(COLLECTIVE)

    def _exchange_once(self, outgoing: Heartbeat) -> None:
        """Reads the verdict and the others' heartbeats, and writes this rank's, after which rank 0
        may end."""
        if self._proposal:
            self._store.compare_set("verdict", "", json.dumps(self._proposal))
        keys = ["verdict", *(f"signs/{rank}" for rank in self.seen)]
        verdict, *beats = self._store.multi_get(keys)
        for rank, data in zip(self.seen, beats, strict=True):
            if not data:  # none yet
                continue
            process, *fields = json.loads(data)
            beat = Heartbeat(Process(*process), *fields)
            if beat != self.seen[rank][0]:
                self.seen[rank] = beat, self._clock
        if verdict:
            reason, stuck, *fields = json.loads(verdict)
            self.verdict = Verdict(reason, [Process(*process) for process in stuck], *fields)
        self._store.set(f"signs/{self._rank}", json.dumps(outgoing))

    def outgoing(self) -> Heartbeat:
        """This rank's heartbeat with what the main thread recorded since; for any thread."""
        beat = self.beat
        if self.count != self._seen_count:
            beat = beat._replace(stage=self.stage, step=self.step, idle=0.0)
        end = self.how_ended
        if not end and self.ended.is_set():
            end = "left"
        return beat._replace(end=end, error=self.error)

    def _observe(self) -> None:
        # silence counts once a collective has failed
        if self.is_cut_off and self.how_ended != "lost":
            self._awake_since = self._clock
        super()._observe()

    def _collectives(self) -> int:
        """It alone distinguishes a rank that stalled in a backward pass from ranks that wait."""
        try:
            return dist.group.WORLD._get_sequence_number_for_group()  # pyright: ignore  # torch has no public one
        except (AttributeError, RuntimeError):  # it may change; or the group has ended
            return 0

    def _judge(self) -> Verdict | None:
        if self._has_refused:  # the main thread ends this process
            return None
        others_stopped = any(beat.end == "stopped" for beat, _ in self.seen.values())
        if others_stopped and self.how_ended in ("", "lost"):
            self.end("stopped")  # of rank 0, to the others
            os.kill(os.getpid(), signal.SIGTERM)
        self._wake.set()
        rank = self._rank
        beat = self.outgoing()
        # each rank waits longer than the rank below it, so that only one reports
        patience = (self._patience or TIMEOUT) + HEARTBEAT_INTERVAL * min(rank, 8)
        if rank:
            beat = beat._replace(idle=beat.idle - GRACE)
        seen = [Observed(beat, 0.0)]
        for other, at in self.seen.values():
            seen.append(Observed(other, self._clock - max(at, self._awake_since)))
        return self.verdict or judge(seen, patience, silence_only=rank > 0)

    def _end(self, verdict: Verdict) -> None:
        # The first proposal in the store counts, so that all ranks end by the same verdict, and one
        # of them prints it.
        is_user_error = verdict.exit_code is not None
        self._proposal = verdict if is_user_error else verdict._replace(by=self._rank)
        self._wait(lambda: self.verdict)
        if not is_user_error:
            # without the store of rank 0, the first rank of this machine reports
            first = max(self._rank - int(os.environ.get("LOCAL_RANK", "0")), 1)
            verdict = verdict._replace(by=first)
        final = self.verdict or verdict
        if final.exit_code is not None:
            self._await_report(final)
        super()._end(final)

    def _await_report(self, verdict: Verdict) -> None:
        """Waits until the rank with a user error has printed it, and rank 0 has recorded it: a
        launcher ends all ranks as soon as one has ended."""
        self._record(verdict.reason, True)
        self.end("left")
        if self._rank == 0:
            self._wait(lambda: self.seen[verdict.by][0].end == "left", 2 * AFTERMATH)
            return
        main = self.seen[0][0].process
        deadline = time.monotonic() + 2 * AFTERMATH
        while main.is_here and not main.is_gone and time.monotonic() < deadline:
            time.sleep(0.05)
