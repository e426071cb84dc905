"""Watchdog of a process: ends it when its main thread makes no progress.

    main thread                         watchdog's thread, twice a second
    heartbeat("train", step)  ─count─▶  _observe  seconds without progress; the stage's limit
    progress()                          _judge    a Verdict if they exceed the limit
                                        _end      print, record, kill stuck processes, exit

`peers` has the watchdog of several ranks. It judges the heartbeats of other ranks, too.
"""

import faulthandler
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from gpt2_ddp.distributed.process import Process, this_process

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats
REPORT_INTERVAL = 5.0  # seconds between calls of `report_to`'s function
# least seconds that a stage may take without progress, where no patience is configured
TIMEOUT = 120.0
FIRST_TIMEOUT = 30 * 60.0  # of a stage's first occurrence: libraries load, graphs compile
# least seconds between two turns of the watchdog's thread that mean a suspended process
SUSPENDED = 10.0
# seconds without a heartbeat that are always allowed: loading a library may block all threads
SILENCE = 10.0
# seconds without a heartbeat that are allowed once a collective has failed on any rank
AFTERMATH = 5.0


class Heartbeat(NamedTuple):
    """The state of a rank, as other ranks read it."""

    process: Process
    rank: int
    turn: int = 0  # number of the heartbeat
    stage: str = "starting"
    step: int = 0
    progress: Sequence[int] = ()
    """Collectives started so far, and progress in this step: equal on ranks at the same place."""
    idle: float = 0.0  # seconds without progress, while this process was awake
    limit: float = TIMEOUT  # allowed seconds of these
    stack: str = ""  # of an idle main thread
    end: str = ""
    """How the rank has ended, if it has:
    `lost`: a collective failed, maybe because another rank ended;
    `refused`: by a user error of its own, which it prints;
    `failed`: by another error;
    `stopped`: by a signal, with nothing to save;
    `left`: it has closed its watchdog."""
    error: str = ""  # that this rank raised

    @property
    def name(self) -> str:
        """The rank and its machine, for messages."""
        return f"rank {self.rank} on {self.process.host}"

    @property
    def place(self) -> str:
        """Stage and step, for messages."""
        return f"{self.stage}, step {self.step}" if self.step else self.stage

    @property
    def stall(self) -> str:
        """What is said of a rank without progress."""
        text = f"{self.name}: no progress for {self.idle:.0f} s at {self.place}"
        return f"{text}\n{self.stack}".rstrip()


class Verdict(NamedTuple):
    """Why training cannot continue."""

    reason: str  # for the user
    stuck: Sequence[Process] = ()  # to be killed, as they may not end by themselves
    by: int = 0  # rank that prints the reason
    exit_code: int | None = None  # of the processes that it ends; None: the watchdog's


def stack_of(thread: int) -> str:
    """The newest calls of a thread of this process, the last one last. `faulthandler` reads them at
    one moment: frames of `sys._current_frames` may change meanwhile, which can crash Python
    3.11."""
    with suppress(OSError):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)  # what does not fit is cut off
        faulthandler.dump_traceback(writing)
        os.close(writing)
        with open(reading, errors="replace") as file:
            # `Thread 0x... (most recent call first):`, or `Current thread 0x...`
            calls = re.search(rf"hread 0x0*{thread:x}\b.*\n((  File .*\n)+)", file.read())
        if calls:
            return "\n".join(reversed(calls[1].splitlines()[:12]))
    return ""


def _record_nothing(reason: str, is_refused: bool) -> None:
    """Stands for `Watchdog.report_to`'s function until that is called."""


class Watchdog:
    """Judges the main thread by what it records, and ends the process if that thread makes no
    progress. A thread of its own judges; nothing in it may block. It counts seconds while this
    process is awake, so a suspended process causes no verdict. The public methods belong to the
    constructing thread, unless they say otherwise.

    Args:
        patience: timeout of every stage, in seconds, with SILENCE on top at its first occurrence.
            None: TIMEOUT or ten times the slowest stage so far, whichever is more, and
            FIRST_TIMEOUT at the first occurrence.
        exit_code: of processes that a verdict ends.

    Attributes:
        first_limit: least timeout of a stage's first occurrence; FIRST_TIMEOUT if graphs are
            compiled.
    """

    def __init__(self, patience: float | None, exit_code: int = 1, rank: int = 0):
        self._patience = patience
        self._exit_code = exit_code
        self._rank = rank
        # What the main thread records. Each call only writes some attributes, without a lock: the
        # watchdog's thread may read values of two moments, which matters for half a second.
        self.first_limit = patience + SILENCE if patience else FIRST_TIMEOUT
        self.thread = threading.get_ident()
        self._begun: dict[str, int] = {}  # step at which each stage first began
        self.stage = "starting"
        self.step = 0
        self.timeout = FIRST_TIMEOUT
        self.is_first = False
        self.count: int = 0  # progress in total
        self.count_before = 0  # progress before this step
        # What the watchdog's thread observes. `_clock` counts seconds while this process is awake.
        self.beat = Heartbeat(this_process(), rank)
        self.ended = threading.Event()
        self._clock = 0.0
        self._progressed = 0.0  # on `_clock`
        self._awake_since = 0.0  # on `_clock`
        self._woke = time.monotonic()
        self._seen_count: int = 0
        self._slowest = 0.0
        self._had_timeout = True
        self._record: Callable[[str, bool], None] = _record_nothing
        self._threads: list[threading.Thread] = []
        self._start(self._watch)

    def _start(self, loop: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=loop, name="watch", daemon=True)
        self._threads.append(thread)
        thread.start()
        return thread

    def heartbeat(self, stage: str, step: int | None = None, timeout: float = 0.0) -> None:
        """Records progress and the stage that begins, with `timeout` seconds on top of the usual
        limit. `step`: the one that begins; None: the current one."""
        if step is not None and step != self.step:
            self.step = step
            self.count_before = self.count
        self.is_first = self._begun.setdefault(stage, self.step) == self.step
        self.stage = stage
        self.timeout = timeout
        self.count = self.count + 1

    def progress(self) -> None:
        """Records progress in the stage, and ends its additional timeout."""
        self.timeout = 0.0
        self.count = self.count + 1

    def failed(self, error: BaseException) -> None:
        """Sends this rank's error or stop to the other ranks, if there are any."""

    def close(self) -> None:
        """Ends the watchdog."""
        self.ended.set()
        for thread in self._threads:
            thread.join(HEARTBEAT_INTERVAL)

    def report_to(
        self, report: Callable[[dict[str, Any]], object], record: Callable[[str, bool], None]
    ) -> None:
        """Sets, on the main process, the functions for the regular `status` and for the reason of a
        verdict. `record` gets the reason, and whether it is a user error."""

        def report_loop() -> None:
            while not self.ended.wait(REPORT_INTERVAL):
                report(self.status())

        self._record = record
        if self._rank == 0:
            self._start(report_loop)

    def status(self) -> dict[str, Any]:
        """This rank's stage, step and process; times in seconds since 1970, and the limit in
        seconds."""
        beat = self.beat
        now = time.time()
        times = {
            "heartbeat": round(now, 1),
            "progress": round(now - beat.idle, 1),
            "limit": round(beat.limit, 1),
        }
        return {"step": beat.step, "stage": beat.stage, **beat.process._asdict(), **times}

    def _watch(self) -> None:
        """Observes and judges until the watchdog has ended; the body of a thread."""
        while not self.ended.wait(HEARTBEAT_INTERVAL):
            self._observe()
            verdict = self._judge()
            if verdict and not self.ended.is_set():
                self._end(verdict)

    def _observe(self) -> None:
        """Updates this rank's heartbeat."""
        now = time.monotonic()
        elapsed = now - self._woke
        self._woke = now
        # a suspended process (SIGSTOP, a sleeping laptop) makes no progress, which is no fault
        self._clock += min(elapsed, 2 * HEARTBEAT_INTERVAL)
        if elapsed > SUSPENDED:  # what was observed before is outdated
            self._awake_since = self._clock
        limit = self._patience or max(TIMEOUT, 10 * self._slowest)
        if self.is_first:
            limit = max(limit, self.first_limit)
        idle = self._clock - max(self._progressed, self._awake_since)
        stack = ""
        if self.count != self._seen_count:
            # stages with a timeout of their own, such as a save, are no measure of the others
            if not self._had_timeout:
                self._slowest = max(self._slowest, idle)
            self._seen_count = self.count
            self._progressed = self._clock
            idle = 0.0
        self._had_timeout = self.timeout > 0
        if idle >= 2 * HEARTBEAT_INTERVAL:
            stack = stack_of(self.thread)
            if 'bdb.py"' in stack or 'pydevd.py"' in stack:  # it waits for the user of a debugger
                self._progressed = self._clock
                idle = 0.0
        self.beat = Heartbeat(
            process=self.beat.process,
            rank=self._rank,
            turn=self.beat.turn + 1,
            stage=self.stage,
            step=self.step,
            progress=[self._collectives(), self.count - self.count_before],
            idle=idle,
            limit=limit + self.timeout,
            stack=stack,
        )

    def _collectives(self) -> int:
        """Number of collectives that this rank has started; 0: unknown."""
        return 0

    def _judge(self) -> Verdict | None:
        """The verdict; None while training may continue."""
        beat = self.beat
        return Verdict(beat.stall) if beat.idle > beat.limit else None

    def _end(self, verdict: Verdict) -> None:
        """Prints, records and carries out a verdict: ends this process and the stuck ones."""
        if verdict.by == self._rank:
            lines = [  # lines of a stack are indented
                line if line.startswith(" ") else f"error: {line}"
                for line in verdict.reason.splitlines()
            ]
            with suppress(OSError):  # closed
                # not by print: the main thread may hold the lock of sys.stderr
                os.write(2, ("\n" + "\n".join(lines) + "\n").encode())
        for process in verdict.stuck:
            process.kill()

        def record() -> None:
            self._record(verdict.reason, verdict.exit_code is not None)
            sys.stdout.flush()

        last = threading.Thread(target=record, daemon=True)
        last.start()
        last.join(AFTERMATH)  # the disk may block
        time.sleep(3 * HEARTBEAT_INTERVAL)  # until other ranks have read the verdict
        # not by an exception: the main thread may be inside a collective that never returns
        os._exit(self._exit_code if verdict.exit_code is None else verdict.exit_code)
