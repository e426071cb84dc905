"""The watch over ranks: one that dies, raises or stands still is named, and nobody waits for it for ever.

Every rank says twice a second where it is, over the store by which the ranks have met. Rank 0 judges all of them, the
others rank 0; a verdict ends all processes, even where a main thread is inside a collective.
"""

import json
import os
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

from gpt2_ddp.distributed.identity import Process, this_process

SILENCE = 10.0
"""Seconds without a sign of life that are forgiven in any case: loading a library may hold up a live process's threads
for several."""

AFTERMATH = 5.0
"""The same once a collective has failed somewhere, when somebody is likely to be dead."""

GRACE = 2.0
"""Seconds for what is about to be said or to end by itself; four signs of life."""


class Heartbeat(NamedTuple):
    """A rank's sign of life.

    All its seconds were counted by the rank itself while it was awake: a process that was suspended counts none.

    Args:
        turn: of the watch's thread; a higher one is news.
        stage, step: where the main thread is.
        marks: times that it has said so in this step. collectives: that it has started. Both are equal on ranks that
            are equally far.
        idle: seconds without progress. limit: how many are taken for granted here.
        stack: of the main thread, once it has been idle for a while.
        failed: what this rank has raised.
        lost: what a collective failed with, because another rank is gone.
        left: it is done, and says no more.
    """

    process: Process
    turn: int = 0
    stage: str = "starting"
    step: int = 0
    progress_count: int = 0
    collectives: int = 0
    idle: float = 0.0
    limit: float = 120.0
    stack: str = ""
    failed: str = ""
    lost: str = ""
    left: bool = False


class Observed(NamedTuple):
    """A rank's last sign of life, and for how many seconds (of the observer's being awake) there has been no newer."""

    sign: Heartbeat
    silent: float
    gone: bool = False
    """its process has ended, as can be told on the same machine"""


class Verdict(NamedTuple):
    """Why the ranks cannot go on.

    Args:
        reason: in full.
        stuck: the processes that have to be ended as they may not do it themselves.
        living: the ranks to blame that said so themselves: they have raised something, or make no progress.
    """

    reason: str
    stuck: list[Process]
    living: list[int]


def judge(seen: Mapping[int, Observed], patience: float) -> Verdict | None:
    """What all ranks' signs of life come to, if one of them, or all, will not go on.

    A rank without a sign of life for `patience` seconds is to blame, whatever it does; a live one once it has made no
    progress for as long as it may, if no other rank is further behind: the others only wait for it. In that order: a
    silent rank is heard first, since its last place may be old.
    """
    if verdict := judge_silence(seen, patience):
        return verdict
    running = {rank: one for rank, one in seen.items() if not one.sign.left}
    if not running or any(one.silent > GRACE or one.sign.failed or one.sign.lost for one in running.values()):
        return None
    last = min(_place(one.sign) for one in running.values())
    behind = {rank: one.sign for rank, one in running.items() if _place(one.sign) == last}
    if any(sign.idle <= sign.limit for sign in behind.values()):
        return None
    said = [f"{_name(rank, sign)}: no progress for {sign.idle:.0f} s{_where(sign)}" for rank, sign in behind.items()]
    return Verdict("\n".join(said), [], list(behind))


def judge_silence(seen: Mapping[int, Observed], patience: float) -> Verdict | None:
    """The same about ranks that say nothing any more: they raised something, ended without a word, or stand still."""
    running = {rank: one for rank, one in seen.items() if not one.sign.left}
    for rank, one in running.items():  # what it raised is why the others are lost
        if one.sign.failed and (one.silent > GRACE or one.sign.idle > AFTERMATH):
            return Verdict(f"{_name(rank, one.sign)}: {one.sign.failed} (at {_at(one.sign)})", [], [rank])
    if any(one.sign.failed for one in running.values()):
        return None
    limit = max(patience, SILENCE)
    if any(one.sign.lost for one in running.values()):
        limit = min(limit, AFTERMATH)
    said, stuck = [], []
    for rank, (sign, silent, gone) in running.items():
        if gone and silent > GRACE:
            said.append(f"{_name(rank, sign)}: ended without a word, last seen at {_at(sign)}; was it killed?")
        elif silent > limit:
            what = f"no sign of life for {silent:.0f} s, last seen{_where(sign)}"
            said.append(f"{_name(rank, sign)}: {what}")
            stuck.append(sign.process)
    return Verdict("\n".join(said), stuck, []) if said else None


def _place(sign: Heartbeat) -> tuple[int, int, int]:
    return sign.step, sign.collectives, sign.progress_count


def _name(rank: int, sign: Heartbeat) -> str:
    return f"rank {rank} on {sign.process.host}"


def _at(sign: Heartbeat) -> str:
    return sign.stage + (f", step {sign.step}" if sign.step else "")


def _where(sign: Heartbeat) -> str:
    return f" at {_at(sign)}" + (f"\n{sign.stack}" if sign.stack else "")


HEARTBEAT_INTERVAL = 0.5
"""Seconds between two signs of life."""

REPORT_INTERVAL = 5.0
"""Seconds between two reports to whom `report_to` names."""

TIMEOUT = 120.0
"""Seconds that a stage may take without progress, if this run has not been seen to need more."""

FIRST_TIMEOUT = 30 * 60.0
"""The same for a stage's first time: libraries are loaded, graphs compiled, and no step has been timed yet."""

ASLEEP = 10.0
"""Seconds between two turns of the watch's own thread from which on it was not slow, but suspended."""

_number = count()


class Watchdog:
    """A rank's sign of life, and its ears. `at` and `progress` are for the thread that has made this one, cost some
    attribute writes, and may come as often as one likes.

    All seconds are counted while this process is awake, so that one that was suspended neither accuses nor is accused.

    Args:
        rank, world: of this process; ranks have to make their watches in the same order.
        patience: seconds that any stage may take that does not announce more, and SILENCE on top in the step in which
            it first comes up; None: PATIENCE or ten times the slowest so far, whichever is more, and FIRST_TIME then.
        store: by which the ranks have met; None: the process group's.
        explain: what the user is told of a verdict.
        exit_code: of the processes that a verdict ends.

    Attributes:
        compiles: graphs will be compiled, so that FIRST_TIME holds whatever `patience` says.
    """

    compiles = False

    def __init__(
        self,
        rank: int,
        world: int,
        patience: float | None,
        store: Store | None = None,
        explain: Callable[[Verdict], str] = lambda verdict: verdict.reason,
        exit_code: int = 1,
    ):
        self._rank, self._world, self._patience = rank, world, patience
        self._explain, self._exit_code = explain, exit_code
        self._thread = threading.get_ident()
        self._ended = threading.Event()
        # of the main thread
        self._stage, self._step, self._timeout, self._is_first = "starting", 0, FIRST_TIMEOUT, False
        self._count = self._count_before = 0
        self._begun: dict[str, int] = {}
        self._failed, self._failed_at, self._lost, self._left = "", 0.0, "", False
        # of the watch's thread
        self._sign = Heartbeat(this_process())
        self._woke, self._seen_count, self._slowest, self._announced = time.monotonic(), 0, 0.0, True
        self._progress_time = time.time()
        self._report: Callable[[dict[str, Any]], object] = lambda facts: None
        self._record: Callable[[str], None] = lambda reason: None
        # of the courier, which may be stuck: a stopped process that serves the store keeps its clients waiting
        nobody = Heartbeat(Process("an unknown host", "", 0, 0))
        self._signs = dict.fromkeys(range(1, world) if rank == 0 else [0], nobody)
        self._silent: dict[int, tuple[int, float]] = dict.fromkeys(self._signs, (0, 0.0))
        self._wake, self._done, self._is_cut_off = threading.Event(), threading.Event(), False
        self._asked = self._answered = 0
        self._offer: Verdict | None = None
        self._heard: Verdict | None = None
        self._is_speaker = world == 1
        loops = [self._watch] + [self._report_loop] * (rank == 0)
        if world > 1:
            self._met: Store = store or _get_default_store()  # kept, since rank 0's may be its server
            own: Store = self._met.clone()  # pyright: ignore  # a store serves one call at a time
            self._store = PrefixStore(f"watch/{next(_number)}", own)
            loops.append(self._sync_loop)
        self._threads = [threading.Thread(target=loop, name="watch", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def heartbeat(self, stage: str, step: int | None = None, timeout: float = 0.0) -> None:
        """Says that there was progress, and what comes now.

        Args:
            step: the one that begins; None: still the one before.
            timeout: seconds that this stage may take besides the usual patience.
        """
        if step is not None and step != self._step:
            self._step, self._count_before = step, self._count
        self._is_first = self._begun.setdefault(stage, self._step) == self._step
        self._stage, self._timeout = stage, timeout
        self._count += 1

    def progress(self) -> None:
        """Says that the stage goes on, so that what it has announced is over."""
        self._timeout = 0.0
        self._count += 1

    def report_to(self, report: Callable[[dict[str, Any]], object], record: Callable[[str], None]) -> None:
        """Names, on the main process, who is told every few seconds where it is (`facts`), and who records a
        verdict."""
        self._report, self._record = report, record

    @property
    def status(self) -> dict[str, Any]:
        """Where this rank is, for readers elsewhere: times in seconds since 1970, and how many seconds without progress
        are taken for granted."""
        sign = self._sign
        times = {"heartbeat": time.time(), "progress": self._progress_time, "limit": sign.limit}
        rounded = {name: round(value, 1) for name, value in times.items()}
        return {"step": sign.step, "stage": sign.stage, **sign.process._asdict(), **rounded}

    def failed(self, error: BaseException) -> None:
        """Tells the other ranks what this one has raised. Where that is but the echo of another rank's end, the other
        is waited for, and named, which ends this process; this returns where nobody else is to blame."""
        if self._world == 1 or self._failed or self._ended.is_set():
            return
        self.progress()
        said = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
        if _is_echo(error):
            self._lost = said
            self._deliver()
            self._ended.wait(AFTERMATH + 3 * GRACE)
        self._failed, self._lost, self._failed_at = said, "", time.monotonic()
        self._deliver()

    def close(self) -> None:
        """Ends the watch: this rank is done with the others. Rank 0, who may serve the store, leaves last."""
        self._left = not self._failed
        self._ended.set()
        deadline = time.monotonic() + AFTERMATH
        while self._world > 1 and self._deliver() and time.monotonic() < deadline:
            if self._rank or all(sign.left or sign.failed for sign in self._signs.values()):
                break
        self._done.set()
        self._wake.set()
        for thread in self._threads:
            thread.join(HEARTBEAT_INTERVAL)

    # The watch's thread, in which nothing may block

    def _watch(self) -> None:
        while not self._ended.wait(HEARTBEAT_INTERVAL):
            self._observe()
            self._wake.set()
            verdict = self._heard or self._judge()
            if verdict and not self._ended.is_set():
                self._end(verdict)

    def _observe(self) -> None:
        """One turn: where the main thread is and since when, and since when the others have said nothing."""
        before, now = self._sign, time.monotonic()
        elapsed, self._woke = now - self._woke, now
        forget = elapsed > ASLEEP  # what was seen before is old, and the others may wake later than this one
        elapsed = min(elapsed, 2 * HEARTBEAT_INTERVAL)
        usual = max(self._patience or TIMEOUT, 0 if self._patience else 10 * self._slowest)
        first_time = FIRST_TIMEOUT if self._patience is None or self.compiles else self._patience + SILENCE
        limit = max(usual, first_time) if self._is_first else usual
        idle, stack = 0.0 if forget else before.idle + elapsed, ""
        if self._count != self._seen_count:
            self._slowest = max(self._slowest, 0.0 if self._announced else idle)
            self._seen_count, self._progress_time, idle = self._count, time.time(), 0.0
        self._announced = self._timeout > 0
        if idle >= 2 * HEARTBEAT_INTERVAL and (frame := sys._current_frames().get(self._thread)):
            stack = "".join(traceback.format_stack(frame)[-12:]).rstrip()
            idle = 0.0 if _is_debugged(frame) else idle
        self._sign = Heartbeat(
            before.process,
            before.turn + 1,
            self._stage,
            self._step,
            self._count - self._count_before,
            _collectives() if self._world > 1 else 0,
            idle,
            limit + self._timeout,
            stack,
        )
        for rank, sign in self._signs.items():
            turn, silent = self._silent[rank]
            passed = 0.0 if self._is_cut_off and not self._lost else elapsed
            self._silent[rank] = sign.turn, 0.0 if forget or sign.turn != turn else silent + passed

    def _judge(self) -> Verdict | None:
        seen = {}
        for rank, sign in self._signs.items():
            silent = self._silent[rank][1]
            seen[rank] = Observed(sign, silent, silent > GRACE and sign.process.is_gone)
        # the others wait a little longer than rank 0, and each than the one before it, so that one of them speaks
        patience, own = (self._patience or TIMEOUT) + HEARTBEAT_INTERVAL * min(self._rank, 8), self._outgoing()
        if self._rank:
            return judge_silence({**seen, self._rank: Observed(own._replace(idle=own.idle - GRACE), 0.0)}, patience)
        return judge({0: Observed(own, 0.0), **seen}, patience)

    def _end(self, verdict: Verdict) -> None:
        verdict = verdict._replace(reason=self._explain(verdict))
        if not self._heard and self._world > 1:
            self._offer = verdict
            if not self._deliver():  # nobody can be asked who speaks: the first on this machine, as rank 0 is lost
                first = self._rank - int(os.environ.get("LOCAL_RANK", "0"))
                self._is_speaker = self._rank == max(first, 1)
        verdict = self._heard or verdict
        if self._is_speaker:
            lines = ("error: " * (line[:1] != " ") + line for line in verdict.reason.splitlines())
            os.write(2, ("\n" + "\n".join(lines) + "\n").encode())  # the main thread may hold the lock of sys.stderr
        for process in verdict.stuck:
            process.kill()
        last = threading.Thread(target=lambda: (self._record(verdict.reason), sys.stdout.flush()), daemon=True)
        last.start()
        last.join(AFTERMATH)  # a disk may be what stands still
        if self._is_speaker and self._world > 1:
            time.sleep(3 * HEARTBEAT_INTERVAL)  # until the others have heard it
        os._exit(self._exit_code)  # the main thread may be inside a collective that never returns

    # The other threads

    def _report_loop(self) -> None:
        while not self._ended.wait(REPORT_INTERVAL):
            self._report(self.status)

    def _sync_loop(self) -> None:
        try:
            for key in ("verdict", *(f"signs/{rank}" for rank in self._signs)):
                self._store.compare_set(key, "", "")
            while not self._done.is_set():
                asked = self._asked
                self._exchange()
                self._answered = asked
                self._wake.wait(2 * HEARTBEAT_INTERVAL)
                self._wake.clear()
        except dist.DistError:  # for good
            # where rank 0 serves the store, its silence tells the rest; the end of a launcher's store says nothing,
            # unless a collective fails as well
            self._is_cut_off = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    def _exchange(self) -> None:
        self._store.set(f"signs/{self._rank}", json.dumps(self._outgoing()))
        if offer := self._offer:
            mine = json.dumps([self._rank, offer])
            self._is_speaker = self._store.compare_set("verdict", "", mine).decode() == mine
        verdict, *signs = self._store.multi_get(["verdict", *(f"signs/{rank}" for rank in self._signs)])
        for rank, sign in zip(self._signs, signs, strict=True):
            if sign:
                process, *rest = json.loads(sign)
                self._signs[rank] = Heartbeat(Process(*process), *rest)
        if verdict:
            reason, stuck, living = json.loads(verdict)[1]
            self._heard = Verdict(reason, [Process(*process) for process in stuck], living)

    def _outgoing(self) -> Heartbeat:
        if self._failed:  # the watch's thread may not have looked since, and will not once this one is closed
            idle = time.monotonic() - self._failed_at
            return self._sign._replace(failed=self._failed, stage=self._stage, step=self._step, idle=idle)
        return self._sign._replace(lost=self._lost, left=self._left)

    def _deliver(self) -> bool:
        """Whether the present sign has been sent, and the others' were fetched, within a moment."""
        self._asked += 1
        asked, deadline = self._asked, time.monotonic() + GRACE
        while self._answered < asked and time.monotonic() < deadline and self._threads[-1].is_alive():
            self._wake.set()
            time.sleep(0.01)
        return self._answered >= asked


def _collectives() -> int:
    """How many this process has started: in a backward pass, ranks that wait differ in nothing else from the one that
    they wait for. 0 where torch does not tell."""
    try:
        return dist.group.WORLD._get_sequence_number_for_group()  # pyright: ignore
    except (AttributeError, RuntimeError):  # private; or there is no group any more
        return 0


def _is_echo(error: BaseException) -> bool:
    """Whether a collective failed, as it does when another rank has ended."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether somebody looks at this thread in a debugger: it stands still, and may."""
    while frame and not frame.f_code.co_filename.endswith(("bdb.py", "pydevd.py")):
        frame = frame.f_back
    return frame is not None
