"""Watchdog over the ranks: reports a rank that died, failed or stalled, and ends all processes.

Every rank writes a heartbeat to the rendezvous store twice a second. Rank 0 judges all ranks, the others judge rank 0.
A verdict ends a process even while its main thread is inside a collective.
"""

import json
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from itertools import count
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from gpt2_ddp.distributed.process import Process, stopped_children, this_process
from gpt2_ddp.distributed.signals import Stopped

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
REPORT_INTERVAL = 5.0  # seconds between calls of `report_to`'s function
TIMEOUT = 120.0  # least seconds that a stage may take without progress, where no patience is configured
FIRST_TIMEOUT = 30 * 60.0  # of a stage's first occurrence: libraries load, graphs compile
SUSPENDED = 10.0  # least seconds between two turns of the watchdog's thread that mean a suspended process
SILENCE = 10.0  # seconds without a heartbeat that are always allowed: loading a library may block all threads
AFTERMATH = 5.0  # seconds without a heartbeat that are allowed once a collective has failed on any rank
GRACE = 2.0  # seconds to wait for an expected heartbeat, error message or exit


class Heartbeat(NamedTuple):
    """The state of a rank, as other ranks read it."""

    process: Process
    turn: int = 0  # number of the heartbeat
    stage: str = "starting"
    step: int = 0
    progress_count: int = 0  # progress in this step
    collectives: int = 0  # started so far; as `progress_count`, equal on ranks at the same place
    idle: float = 0.0  # seconds without progress, while this process was awake
    limit: float = TIMEOUT  # allowed seconds of these
    stack: str = ""  # of an idle main thread
    failed: str = ""  # error that this rank raised
    lost: str = ""  # error of a collective that failed because another rank ended
    left: bool = False  # whether the rank has closed its watchdog
    stopped: bool = False  # whether a signal stopped the rank, with nothing to save


class Observed(NamedTuple):
    beat: Heartbeat  # a rank's latest
    silent: float  # its age in seconds, while the observer was awake
    gone: bool = False  # whether the rank's process has ended; known on the same machine only


class Verdict(NamedTuple):
    """Why training cannot continue."""

    reason: str  # for the user
    stuck: list[Process]  # to be killed, as they may not end by themselves
    living: list[int]  # ranks at fault that still send heartbeats


def judge(seen: Mapping[int, Observed], patience: float, silence_only: bool = False) -> Verdict | None:
    """The verdict on ranks by their heartbeats; None while training may continue.

    A rank without a heartbeat for `patience` seconds is at fault. A live rank is at fault when it has exceeded its
    limit and no other rank is further behind. Silent ranks come first, since their last heartbeat is old. With
    `silence_only`, only ranks that failed, ended or send no heartbeats are judged.
    """
    running = {rank: one for rank, one in seen.items() if not (one.beat.left or one.beat.stopped)}
    names = {rank: f"rank {rank} on {one.beat.process.host}" for rank, one in running.items()}
    failed, lost = (any(getattr(one.beat, kind) for one in running.values()) for kind in ("failed", "lost"))
    for rank, (beat, silent, _) in running.items():  # other ranks lost their collective because of it
        if beat.failed and (silent > GRACE or beat.idle > AFTERMATH):
            return Verdict(f"{names[rank]}: {beat.failed} (at {_at(beat)})", [], [rank])
    if failed:
        return None
    limit = min(max(patience, SILENCE), AFTERMATH if lost else math.inf)
    lines, stuck = [], []
    for rank, (beat, silent, gone) in running.items():
        if gone and silent > GRACE:
            lines.append(f"{names[rank]}: ended without an error message; last stage: {_at(beat)}; was it killed?")
        elif silent > limit:
            lines.append(f"{names[rank]}: no heartbeat for {silent:.0f} s; last stage: {_at(beat, stack=True)}")
            stuck.append(beat.process)
    if lines:
        return Verdict("\n".join(lines), stuck, [])
    if silence_only or lost or not running or any(one.silent > GRACE for one in running.values()):
        return None
    place = {rank: (one.beat.step, one.beat.collectives, one.beat.progress_count) for rank, one in running.items()}
    last = min(place.values())
    behind = {rank: one.beat for rank, one in running.items() if place[rank] == last}
    if any(beat.idle <= beat.limit for beat in behind.values()):
        return None
    lines = [f"{names[rank]}: no progress for {beat.idle:.0f} s at {_at(beat, True)}" for rank, beat in behind.items()]
    return Verdict("\n".join(lines), [], list(behind))


def _at(beat: Heartbeat, stack: bool = False) -> str:
    return beat.stage + f", step {beat.step}" * (beat.step > 0) + f"\n{beat.stack}" * (stack and beat.stack != "")


_number = count()


class Watchdog:
    """Sends this rank's heartbeats and judges those of other ranks.

    `heartbeat` and `progress` belong to the constructing thread; each costs some attribute writes. Seconds are counted
    while this process is awake, so a suspended process causes no verdict.

    Args:
        rank, world: this process's rank, and the number of ranks. Ranks construct their watchdogs in the same order.
        patience: timeout of every stage, in seconds, with SILENCE on top at its first occurrence. None: TIMEOUT or ten
            times the slowest stage so far, whichever is more, and FIRST_TIMEOUT at the first occurrence.
        store: rendezvous store; None: the process group's.
    """

    compiles = False  # whether graphs are compiled, which needs FIRST_TIMEOUT in any case
    explain: Callable[[Verdict], str] = staticmethod(lambda verdict: verdict.reason)  # returns the message for the user
    exit_code = 1  # of the processes that a verdict ends

    def __init__(self, rank: int, world: int, patience: float | None, store: Store | None = None):
        self._rank, self._world, self._patience = rank, world, patience
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        # written by the main thread
        self._stage, self._step, self._timeout, self._is_first = "starting", 0, FIRST_TIMEOUT, False
        self._count = self._count_before = 0
        self._begun: dict[str, int] = {}
        self._failed, self._failed_at, self._lost, self._left, self._stopped = "", 0.0, "", False, False
        # written by the watchdog's thread
        self._beat = Heartbeat(this_process())
        self._woke, self._seen_count, self._slowest, self._had_timeout = time.monotonic(), 0, 0.0, True
        self._progress_time = time.time()
        self._report: Callable[[dict[str, Any]], object] = lambda facts: None
        self._record: Callable[[str], None] = lambda reason: None
        # written by the store's thread, which may block: a stopped process that serves the store blocks its clients
        unknown = Heartbeat(Process("an unknown host", "", 0, 0))
        self._beats = dict.fromkeys(range(1, world) if rank == 0 else [0], unknown)
        self._silent: dict[int, tuple[int, float]] = dict.fromkeys(self._beats, (0, 0.0))
        self._wake, self._done, self._is_cut_off = threading.Event(), threading.Event(), False
        self._requested = self._completed = 0
        self._proposal: Verdict | None = None
        self._verdict: Verdict | None = None
        self._reports_verdict = world == 1
        # the process that serves the store; 0 for a store of rank 0
        self._launcher = os.getppid() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        loops = [self._watch] + [self._report_loop] * (rank == 0)
        if world > 1:
            self._base_store: Store = store or _get_default_store()  # a reference: on rank 0 it may be the server
            own: Store = self._base_store.clone()  # pyright: ignore  # a store serves one call at a time
            self._store = PrefixStore(f"watch/{next(_number)}", own)
            loops.append(self._sync_loop)
        self._threads = [threading.Thread(target=loop, name="watch", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def heartbeat(self, stage: str, step: int | None = None, timeout: float = 0.0) -> None:
        """Records progress and the stage that begins, with `timeout` seconds on top of the usual limit. `step`: the one
        that begins; None: the current one."""
        if step is not None and step != self._step:
            self._step, self._count_before = step, self._count
        self._is_first = self._begun.setdefault(stage, self._step) == self._step
        self._stage, self._timeout = stage, timeout
        self._count += 1

    def progress(self) -> None:
        """Records progress in the stage, and ends its additional timeout."""
        self._timeout = 0.0
        self._count += 1

    def report_to(self, report: Callable[[dict[str, Any]], object], record: Callable[[str], None]) -> None:
        """Sets, on the main process, the functions for the regular `status` and for the reason of a verdict."""
        self._report, self._record = report, record

    @property
    def status(self) -> dict[str, Any]:
        """This rank's stage, step and process; times in seconds since 1970, and the limit in seconds."""
        beat = self._beat
        times = {"heartbeat": time.time(), "progress": self._progress_time, "limit": beat.limit}
        rounded = {name: round(value, 1) for name, value in times.items()}
        return {"step": beat.step, "stage": beat.stage, **beat.process._asdict(), **rounded}

    def failed(self, error: BaseException) -> None:
        """Sends this rank's error, or that a signal stopped it, to the other ranks. An error of a collective follows
        the end of another rank. Then this waits for the verdict on that rank, which ends the process, and returns if
        no other rank is at fault."""
        if self._world == 1 or self._failed or self._ended.is_set():
            return
        self.progress()
        if isinstance(error, Stopped):
            self._stopped = True
            self._deliver()
            return
        message = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower()):
            self._lost = message
            self._deliver()
            self._ended.wait(AFTERMATH + 3 * GRACE)
        self._failed, self._lost, self._failed_at = message, "", time.monotonic()
        self._deliver()

    def close(self) -> None:
        """Ends the watchdog. Rank 0, which may serve the store, leaves last."""
        self._left = not self._failed
        self._ended.set()
        deadline = time.monotonic() + AFTERMATH
        while self._world > 1 and self._deliver() and time.monotonic() < deadline:
            if self._rank or all(beat.left or beat.failed for beat in self._beats.values()):
                break
        self._done.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(HEARTBEAT_INTERVAL)

    # The watchdog's thread, in which nothing may block

    def _watch(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            self._observe()
            if not self._stopped and any(beat.stopped for beat in self._beats.values()):
                self._stopped = True
                self._deliver()  # of rank 0, to the others
                os.kill(os.getpid(), signal.SIGTERM)
            self._wake.set()
            verdict = self._verdict or self._judge()
            if verdict and not self._ended.is_set():
                self._end(verdict)

    def _observe(self) -> None:
        """Updates this rank's heartbeat and the age of the others'."""
        before, now = self._beat, time.monotonic()
        elapsed, self._woke = now - self._woke, now
        forget = elapsed > SUSPENDED  # older heartbeats are outdated; other ranks may continue later
        elapsed = min(elapsed, 2 * HEARTBEAT_INTERVAL)
        patience = self._patience
        limit = patience or max(TIMEOUT, 10 * self._slowest)
        if self._is_first:
            limit = max(limit, FIRST_TIMEOUT if patience is None or self.compiles else patience + SILENCE)
        idle, stack = 0.0 if forget else before.idle + elapsed, ""
        if self._count != self._seen_count:
            self._slowest = max(self._slowest, 0.0 if self._had_timeout else idle)
            self._seen_count, self._progress_time, idle = self._count, time.time(), 0.0
        self._had_timeout = self._timeout > 0
        if idle >= 2 * HEARTBEAT_INTERVAL and (frame := sys._current_frames().get(self._thread)):
            stack = "".join(traceback.format_stack(frame)[-12:]).rstrip()
            stack += "".join(f"\n  its worker process {child.pid} is stopped (SIGSTOP)" for child in stopped_children())
            idle = 0.0 if _is_debugged(frame) else idle
        done, started = self._count - self._count_before, _collectives() if self._world > 1 else 0
        place = self._stage, self._step, done, started
        self._beat = Heartbeat(before.process, before.turn + 1, *place, idle, limit + self._timeout, stack)
        for rank, beat in self._beats.items():
            turn, silent = self._silent[rank]
            passed = 0.0 if self._is_cut_off and not self._lost else elapsed
            self._silent[rank] = beat.turn, 0.0 if forget or beat.turn != turn else silent + passed

    def _judge(self) -> Verdict | None:
        seen = {}
        for rank, beat in self._beats.items():
            silent = self._silent[rank][1]
            seen[rank] = Observed(beat, silent, silent > GRACE and beat.process.is_gone)
        # each rank waits longer than the rank below it, so that only one reports
        patience, own = (self._patience or TIMEOUT) + HEARTBEAT_INTERVAL * min(self._rank, 8), self._outgoing()
        seen[self._rank] = Observed(own._replace(idle=own.idle - GRACE) if self._rank else own, 0.0)
        return judge(dict(sorted(seen.items())), patience, silence_only=self._rank > 0)

    def _end(self, verdict: Verdict) -> None:
        """Prints, records and carries out a verdict: ends this process and the stuck ones."""
        verdict = verdict._replace(reason=self.explain(verdict))
        if not self._verdict and self._world > 1:
            self._proposal = verdict
            if not self._deliver():  # rank 0's store is lost: the first rank of this machine reports
                first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
                self._reports_verdict = self._rank == max(first, 1)
        verdict = self._verdict or verdict
        if self._reports_verdict:
            lines = ("error: " * (line[:1] != " ") + line for line in verdict.reason.splitlines())
            os.write(2, ("\n" + "\n".join(lines) + "\n").encode())  # the main thread may hold the lock of sys.stderr
        for process in verdict.stuck:
            process.kill()
        last = threading.Thread(target=lambda: (self._record(verdict.reason), sys.stdout.flush()), daemon=True)
        last.start()
        last.join(AFTERMATH)  # the disk may block
        if self._reports_verdict and self._world > 1:
            time.sleep(3 * HEARTBEAT_INTERVAL)  # until the other ranks have read the verdict
        for child in stopped_children():
            child.kill()
        os._exit(self.exit_code)  # the main thread may be inside a collective that never returns

    # The other threads

    def _report_loop(self) -> None:
        while not self._ended.wait(REPORT_INTERVAL):
            self._report(self.status)

    def _sync_loop(self) -> None:
        try:
            for key in ("verdict", *(f"signs/{rank}" for rank in self._beats)):
                self._store.compare_set(key, "", "")
            while not self._done.is_set():
                if self._launcher and os.getppid() != self._launcher:  # a call would print a C++ stack
                    raise dist.DistStoreError("the launcher's store has ended")
                requested = self._requested
                self._exchange()
                self._completed = requested
                self._wake.wait(2 * HEARTBEAT_INTERVAL)
                self._wake.clear()
        except dist.DistError:  # for good
            # A store of rank 0 ends with rank 0, which is then silent. A launcher's store may end by itself, so silence
            # counts only once a collective has failed, too.
            self._is_cut_off = self._launcher > 0

    def _exchange(self) -> None:
        """Writes this rank's heartbeat, and reads the verdict and the others' heartbeats."""
        self._store.set(f"signs/{self._rank}", json.dumps(self._outgoing()))
        if proposal := self._proposal:
            mine = json.dumps([self._rank, proposal])
            self._reports_verdict = self._store.compare_set("verdict", "", mine).decode() == mine
        verdict, *beats = self._store.multi_get(["verdict", *(f"signs/{rank}" for rank in self._beats)])
        for rank, beat in zip(self._beats, beats, strict=True):
            if beat:
                process, *rest = json.loads(beat)
                self._beats[rank] = Heartbeat(Process(*process), *rest)
        if verdict:
            reason, stuck, living = json.loads(verdict)[1]
            self._verdict = Verdict(reason, [Process(*process) for process in stuck], living)

    def _outgoing(self) -> Heartbeat:
        if self._failed:  # the watchdog's thread may not have observed the failure, and ends with `close`
            idle = time.monotonic() - self._failed_at
            return self._beat._replace(failed=self._failed, stage=self._stage, step=self._step, idle=idle)
        return self._beat._replace(lost=self._lost, left=self._left, stopped=self._stopped)

    def _deliver(self) -> bool:
        """Exchanges heartbeats now; returns whether that succeeded within GRACE seconds."""
        self._requested += 1
        requested, deadline = self._requested, time.monotonic() + GRACE
        self._wake.set()
        while self._completed < requested and time.monotonic() < deadline and self._threads[-1].is_alive():
            time.sleep(0.01)
        return self._completed >= requested


def _collectives() -> int:
    """Number of collectives that this process has started; 0 where torch has no such number. In a backward pass,
    waiting ranks differ from the stalled one in this number alone."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group()  # pyright: ignore
    except (AttributeError, RuntimeError):  # private; or the group has ended
        return 0


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger holds the thread of this frame."""
    while frame and not frame.f_code.co_filename.endswith(("bdb.py", "pydevd.py")):
        frame = frame.f_back
    return frame is not None
