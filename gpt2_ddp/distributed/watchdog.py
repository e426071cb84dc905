"""Watchdog over the ranks: reports a rank that died, failed or stalled, and ends all processes.

Every rank writes a heartbeat to the rendezvous store twice a second. Rank 0 judges all ranks, the others judge rank 0.
A verdict ends a process even while its main thread is inside a collective.
"""

import faulthandler
import json
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.distributed.launch import COLLECTIVE, WATCHED
from gpt2_ddp.distributed.process import Process, this_process
from gpt2_ddp.distributed.signals import Stopped, before_forced_end

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
    end: str = ""
    """How the rank has ended, if it has: `lost`: a collective failed, maybe because another rank ended; `failed`: by an
    error of its own; `stopped`: by a signal, with nothing to save; `left`: it has closed its watchdog."""
    error: str = ""  # that this rank raised


class Observed(NamedTuple):
    beat: Heartbeat  # a rank's latest
    silent: float  # its age in seconds, while the observer was awake
    gone: bool = False  # whether the rank's process has ended; known on the same machine only


class Verdict(NamedTuple):
    """Why training cannot continue."""

    reason: str  # for the user
    stuck: list[Process]  # to be killed, as they may not end by themselves


def judge(seen: Mapping[int, Observed], patience: float, silence_only: bool = False) -> Verdict | None:
    """The verdict on ranks by their heartbeats; None while training may continue.

    A rank without a heartbeat for `patience` seconds is at fault. A live rank is at fault when it has exceeded its
    limit and no other rank is further behind. Silent ranks come first, since their last heartbeat is old. With
    `silence_only`, only ranks that failed, ended or send no heartbeats are judged.
    """
    running = {rank: one for rank, one in seen.items() if one.beat.end not in ("left", "stopped")}
    names = {rank: f"rank {rank} on {one.beat.process.host}" for rank, one in running.items()}
    ends = {one.beat.end for one in running.values()}
    for rank, (beat, silent, _) in running.items():  # other ranks lost their collective because of it
        if beat.end == "failed" and (silent > GRACE or beat.idle > AFTERMATH):
            return Verdict(f"{names[rank]}: {beat.error} (at {_at(beat)})", [])
    if "failed" in ends:
        return None
    limit = min(max(patience, SILENCE), AFTERMATH if "lost" in ends else math.inf)
    lines, stuck = [], []
    for rank, (beat, silent, gone) in running.items():
        if gone and silent > GRACE:
            lines.append(f"{names[rank]}: ended without an error message; last stage: {_at(beat)}; was it killed?")
        elif silent > limit:
            lines.append(f"{names[rank]}: no heartbeat for {silent:.0f} s; last stage: {_at(beat, stack=True)}")
            stuck.append(beat.process)
    if lines:
        return Verdict("\n".join(lines), stuck)
    if silence_only or "lost" in ends or not running or any(one.silent > GRACE for one in running.values()):
        return None
    place = {rank: (one.beat.step, one.beat.collectives, one.beat.progress_count) for rank, one in running.items()}
    last = min(place.values())
    behind = {rank: one.beat for rank, one in running.items() if place[rank] == last}
    if any(beat.idle <= beat.limit for beat in behind.values()):
        return None
    lines = [f"{names[rank]}: no progress for {beat.idle:.0f} s at {_at(beat, True)}" for rank, beat in behind.items()]
    return Verdict("\n".join(lines), [])


def stack_of(thread: int) -> str:
    """The newest calls of a thread of this process, the last one last. `faulthandler` reads them at one moment: frames
    of `sys._current_frames` may change meanwhile, which can crash Python 3.11."""
    with suppress(OSError):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)  # what does not fit is cut off
        faulthandler.dump_traceback(writing)
        os.close(writing)
        with open(reading, errors="replace") as file:
            if found := re.search(rf"hread 0x0*{thread:x}\b.*\n((  File .*\n)+)", file.read()):
                return "\n".join(reversed(found[1].splitlines()[:12]))
    return ""


def _at(beat: Heartbeat, stack: bool = False) -> str:
    return beat.stage + f", step {beat.step}" * (beat.step > 0) + f"\n{beat.stack}" * (stack and beat.stack != "")


class Pulse:
    """What the main thread records, for the other threads to read; each call costs some attribute writes."""

    def __init__(self):
        self.compiles = False  # whether graphs are compiled
        self.thread, self._begun = threading.get_ident(), dict[str, int]()
        self.stage, self.step, self.timeout, self.is_first = "starting", 0, FIRST_TIMEOUT, False
        self.count = self.count_before = 0  # progress in total, and before this step
        self.ended_at, self.error, self.how_ended = 0.0, "", ""

    def heartbeat(self, stage: str, step: int | None = None, timeout: float = 0.0) -> None:
        """Records progress and the stage that begins, with `timeout` seconds on top of the usual limit. `step`: the one
        that begins; None: the current one."""
        if step is not None and step != self.step:
            self.step, self.count_before = step, self.count
        self.is_first = self._begun.setdefault(stage, self.step) == self.step
        self.stage, self.timeout, self.count = stage, timeout, self.count + 1

    def expect_graphs(self) -> None:
        """Graphs will be compiled: the first occurrence of any stage may take FIRST_TIMEOUT."""
        self.compiles = True

    def progress(self) -> None:
        """Records progress in the stage, and ends its additional timeout."""
        self.timeout, self.count = 0.0, self.count + 1


class _Link:
    """The exchange with other ranks. Its thread may block: a stopped process that serves the store blocks clients."""

    _number = count()

    def __init__(self, rank: int, world: int, store: Store | None):
        self.rank, self.world = rank, world
        others = range(1, world) if rank == 0 else [0]
        self.beats = dict.fromkeys(others, Heartbeat(Process("an unknown host", "", 0, 0)))
        self.verdict = self._proposal = None
        self.reports_verdict, self.is_cut_off, self._is_running = world == 1, False, world > 1
        self.wake, self._done = threading.Event(), threading.Event()
        self._requested = self._completed = 0  # exchanges: the callers of `deliver` write one, the thread the other
        # the process that serves the store; 0 for a store of rank 0
        self._launcher = os.getppid() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        if world > 1:
            everyone: Any = dist.group.WORLD
            self._base_store: Any = store or everyone.get_group_store()  # a reference: on rank 0 it may be the server
            own = self._base_store.clone()  # a store serves one call at a time
            self._store = PrefixStore(f"watch/{next(self._number)}", own)

    def run(self, outgoing: Callable[[], Heartbeat]) -> None:
        """Exchanges heartbeats until `close`, or until the store is lost; the body of a thread."""
        try:
            for key in ("verdict", *(f"signs/{rank}" for rank in self.beats)):
                self._store.compare_set(key, "", "")
            while not self._done.is_set():
                if self._launcher and os.getppid() != self._launcher:  # a call would print a C++ stack
                    raise dist.DistStoreError("the launcher's store has ended")
                requested, sent = self._requested, outgoing()
                self._exchange(sent)
                self._completed = requested
                if self.rank and (sent.end == "left" or sent.end == self.beats[0].end == "stopped"):
                    break  # rank 0 may end, with the store, and a further call would print a C++ stack
                self.wake.wait(2 * HEARTBEAT_INTERVAL)
                self.wake.clear()
        except dist.DistError:  # for good; a store of rank 0 ends with rank 0, a launcher's may end by itself
            self.is_cut_off = self._launcher > 0
            for group in WATCHED if self.is_cut_off else ():  # nobody judges live ranks any more
                group.set_timeout(COLLECTIVE)
        finally:
            self._is_running = False

    def _exchange(self, outgoing: Heartbeat) -> None:
        """Reads the verdict and the others' heartbeats, and writes this rank's, after which rank 0 may end."""
        if proposal := self._proposal:
            mine = json.dumps([self.rank, proposal])
            self.reports_verdict = self._store.compare_set("verdict", "", mine).decode() == mine
        verdict, *beats = self._store.multi_get(["verdict", *(f"signs/{rank}" for rank in self.beats)])
        for rank, beat in zip(self.beats, beats, strict=True):
            if beat:
                process, *rest = json.loads(beat)
                self.beats[rank] = Heartbeat(Process(*process), *rest)
        if verdict:
            reason, stuck = json.loads(verdict)[1]
            self.verdict = Verdict(reason, [Process(*process) for process in stuck])
        self._store.set(f"signs/{self.rank}", json.dumps(outgoing))

    def deliver(self) -> bool:
        """Exchanges heartbeats now; returns whether that succeeded within GRACE seconds."""
        self._requested += 1
        requested, deadline = self._requested, time.monotonic() + GRACE
        self.wake.set()
        while self._completed < requested and time.monotonic() < deadline and self._is_running:
            time.sleep(0.01)
        return self._completed >= requested

    def propose(self, verdict: Verdict) -> None:
        """Makes this the verdict of all ranks, unless another rank was first."""
        self._proposal = verdict
        if not self.deliver():  # rank 0's store is lost: the first rank of this machine reports
            self.reports_verdict = self.rank == max(self.rank - int(os.environ.get("LOCAL_RANK", "0")), 1)

    def close(self) -> None:
        """Ends the thread. Rank 0, which may serve the store, leaves last."""
        deadline = time.monotonic() + AFTERMATH
        while self.deliver() and time.monotonic() < deadline:
            if self.rank or all(beat.end not in ("", "lost") for beat in self.beats.values()):
                break
        self._done.set()
        self.wake.set()


class Watchdog(Pulse):
    """Sends this rank's heartbeats and judges those of other ranks. A thread of its own makes the heartbeat, judges all
    and ends the process; nothing in it may block. It counts seconds while this process is awake, so a suspended process
    causes no verdict. The public methods belong to the constructing thread, unless they say otherwise.

    Args:
        rank, world: this process's rank, and the number of ranks. Ranks construct their watchdogs in the same order.
        patience: timeout of every stage, in seconds, with SILENCE on top at its first occurrence. None: TIMEOUT or ten
            times the slowest stage so far, whichever is more, and FIRST_TIMEOUT at the first occurrence.
        store: rendezvous store; None: the process group's.
        exit_code: of processes that a verdict ends.
    """

    def __init__(self, rank: int, world: int, patience: float | None, store: Store | None = None, exit_code: int = 1):
        super().__init__()
        self._link, self._patience, self._exit_code = _Link(rank, world, store), patience, exit_code
        self.beat, self.ended = Heartbeat(this_process()), threading.Event()
        self._seen = {rank: Observed(beat, 0.0) for rank, beat in self._link.beats.items()}
        self._woke, self._seen_count, self._slowest, self._had_timeout = time.monotonic(), 0, 0.0, True
        self._report = self._record = lambda _: None
        loops = [self._watch] + [self._report_loop] * (rank == 0)
        loops += [lambda: self._link.run(self.outgoing)] * (world > 1)
        self._threads = [threading.Thread(target=loop, name="watch", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()
        before_forced_end(lambda: self.end("stopped"))

    def failed(self, error: BaseException) -> None:
        """Sends this rank's error or stop to the other ranks. An error of a collective follows the end of another rank.
        Then this waits for the verdict on that rank, which ends the process. Returns if no other is at fault."""
        if self._link.world == 1 or self.how_ended == "failed" or self.ended.is_set():
            return
        self.progress()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower()):
            self.end("lost", message)
            self.ended.wait(AFTERMATH + 3 * GRACE)
        self.end("stopped" if isinstance(error, Stopped) else "failed", message)

    def end(self, how: str, error: str = "") -> None:
        """Sends the end of this rank, and its error, to the other ranks. For any thread."""
        self.ended_at, self.error, self.how_ended = time.monotonic(), error, how
        self._link.deliver()

    def close(self) -> None:
        """Ends the watchdog. Rank 0 waits some seconds for the other ranks to leave or fail."""
        self.ended.set()
        self._link.close()
        for thread in self._threads:
            thread.join(HEARTBEAT_INTERVAL)

    def report_to(self, report: Callable[[dict[str, Any]], object], record: Callable[[str], None]) -> None:
        """Sets, on the main process, the functions for the regular `status` and for the reason of a verdict."""
        self._report, self._record = report, record

    def status(self) -> dict[str, Any]:
        """This rank's stage, step and process; times in seconds since 1970, and the limit in seconds."""
        beat, now = self.beat, time.time()
        times = {"heartbeat": round(now, 1), "progress": round(now - beat.idle, 1), "limit": round(beat.limit, 1)}
        return {"step": beat.step, "stage": beat.stage, **beat.process._asdict(), **times}

    def _report_loop(self) -> None:
        while not self.ended.wait(REPORT_INTERVAL):
            self._report(self.status())

    def _watch(self) -> None:
        """Observes and judges until the watchdog has ended; the body of a thread."""
        while not self.ended.wait(HEARTBEAT_INTERVAL):
            self._observe()
            if self.how_ended in ("", "lost") and any(b.end == "stopped" for b in self._link.beats.values()):
                self.how_ended = "stopped"
                self._link.deliver()  # of rank 0, to the others
                os.kill(os.getpid(), signal.SIGTERM)
            self._link.wake.set()
            if (verdict := self._link.verdict or self._judge()) and not self.ended.is_set():
                self._end(verdict)

    def _observe(self) -> None:
        """Updates this rank's heartbeat and the age of the others'."""
        before, now = self.beat, time.monotonic()
        elapsed, self._woke = now - self._woke, now
        forget, elapsed = elapsed > SUSPENDED, min(elapsed, 2 * HEARTBEAT_INTERVAL)  # older heartbeats are outdated
        patience, limit = self._patience, self._patience or max(TIMEOUT, 10 * self._slowest)
        if self.is_first:
            limit = max(limit, FIRST_TIMEOUT if patience is None or self.compiles else patience + SILENCE)
        idle, stack = 0.0 if forget else before.idle + elapsed, ""
        if self.count != self._seen_count:
            self._slowest = max(self._slowest, 0.0 if self._had_timeout else idle)
            self._seen_count, idle = self.count, 0.0
        self._had_timeout = self.timeout > 0
        if idle >= 2 * HEARTBEAT_INTERVAL:
            stack = stack_of(self.thread)
            idle = 0.0 if 'bdb.py"' in stack or 'pydevd.py"' in stack else idle  # debugged
        done, started = self.count - self.count_before, _collectives() if self._link.world > 1 else 0
        place = self.stage, self.step, done, started
        self.beat = Heartbeat(before.process, before.turn + 1, *place, idle, limit + self.timeout, stack)
        # without the launcher's store, silence counts only once a collective has failed
        passed = 0.0 if self._link.is_cut_off and self.how_ended != "lost" else elapsed
        for rank, beat in self._link.beats.items():
            seen = self._seen[rank]
            silent = 0.0 if forget or beat.turn != seen.beat.turn else seen.silent + passed
            self._seen[rank] = Observed(beat, silent, silent > GRACE and beat.process.is_gone)

    def outgoing(self) -> Heartbeat:
        """This rank's heartbeat with what the main thread recorded since; for any thread."""
        beat = self.beat
        if self.how_ended == "failed":  # this thread may not have observed the failure, and ends with `close`
            beat = beat._replace(stage=self.stage, step=self.step, idle=time.monotonic() - self.ended_at)
        return beat._replace(end=self.how_ended or ("left" if self.ended.is_set() else ""), error=self.error)

    def _judge(self) -> Verdict | None:
        rank, beat = self._link.rank, self.outgoing()
        # each rank waits longer than the rank below it, so that only one reports
        patience = (self._patience or TIMEOUT) + HEARTBEAT_INTERVAL * min(rank, 8)
        mine = Observed(beat._replace(idle=beat.idle - GRACE) if rank else beat, 0.0)
        return judge(dict(sorted({**self._seen, rank: mine}.items())), patience, silence_only=rank > 0)

    def _end(self, verdict: Verdict) -> None:
        """Prints, records and carries out a verdict: ends this process and the stuck ones."""
        link = self._link
        if not link.verdict and link.world > 1:
            link.propose(verdict)
        verdict = link.verdict or verdict
        if link.reports_verdict:
            lines = ("error: " * (line[:1] != " ") + line for line in verdict.reason.splitlines())
            os.write(2, ("\n" + "\n".join(lines) + "\n").encode())  # the main thread may hold the lock of sys.stderr
        for process in verdict.stuck:
            process.kill()
        last = threading.Thread(target=lambda: (self._record(verdict.reason), sys.stdout.flush()), daemon=True)
        last.start()
        last.join(AFTERMATH)  # the disk may block
        if link.reports_verdict and link.world > 1:
            time.sleep(3 * HEARTBEAT_INTERVAL)  # until the other ranks have read the verdict
        os._exit(self._exit_code)  # the main thread may be inside a collective that never returns


def _collectives() -> int:
    """Number of started collectives; 0: unknown. It alone tells a rank stalled in a backward pass from waiting ones."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group()  # pyright: ignore  # torch has no public one
    except (AttributeError, RuntimeError):  # it may change; or the group has ended
        return 0
