"""Requests to stop early: by signals, by time limits, agreed among all ranks. And the step of the
next checkpoint, by the main process's clock."""

import os
import signal
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from gpt2_ddp.distributed.environment import elastic_nodes, machines
from gpt2_ddp.distributed.ranks import LateSum, has_others
from gpt2_ddp.distributed.signals import has_signal, install_handlers
from gpt2_ddp.errors import is_main_process

T = TypeVar("T")

SIGNAL_SECONDS = 3.0  # longest delay between machines for a signal that is sent to all of them
RECENT = 16  # newest durations of a kind, whose median is typical
KEPT = 64  # newest durations of a kind that are kept


class Interrupted(BaseException):
    """A stop interrupted an evaluation or a sample, which stays pending. A BaseException, since it
    is no failure."""


class StopRequest:
    """A stop that all ranks agree on, requested by a signal to any rank or by the main process's
    clock.

    A single process stops after the current step. Several stop after it or the next one, since they
    agree one call late (`LateSum`). `max_minutes` count from `begun`, a `time.monotonic()`.
    `progress` is called before each poll.

    Attributes:
        reason: of the stop, on this rank; empty without a stop. is_agreed: whether all ranks have
            agreed to it.
        next_save: the step after which the main process wants the next checkpoint; 0 for none, as
            on other ranks.
        save_at: its number that all ranks have; that of the call of `check` before.
    """

    def __init__(
        self,
        begun: float,
        max_minutes: float | None = None,
        progress: Callable[[], None] = lambda: None,
    ):
        self.reason = ""
        self.is_agreed = False
        self.next_save = 0
        self.save_at = 0.0
        self._progress = progress
        self._deadlines: list[tuple[float, str]] = []
        if is_main_process() and max_minutes:
            self._deadlines.append((begun + 60 * max_minutes, f"train.max_minutes = {max_minutes}"))
        # in seconds since 1970
        if is_main_process() and (end := os.environ.get("SLURM_JOB_END_TIME", "")):
            self._deadlines.append(
                (time.monotonic() + float(end) - time.time(), "the Slurm job's time limit")
            )
        self._is_by_signal = False
        self._is_all_by_signals = True
        self._done = 0.0
        self._sum = LateSum()
        self._sum.start([0, 0, 0, 0])  # for the first `check`
        self._seconds = defaultdict[str, deque[float]](lambda: deque(maxlen=KEPT))
        self.restore_handlers = install_handlers(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_by_signal = self._is_by_signal or not self.reason
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Requests that all ranks stop after the current step or the next one."""
        self.reason = self.reason or reason

    @contextmanager
    def timed(self, what: str) -> Generator[None]:
        """Records the duration of a `step`, `save`, `evaluation` or `sample`."""
        begun = time.perf_counter()
        yield
        self.record_duration(what, time.perf_counter() - begun)

    def record_duration(self, what: str, seconds: float) -> None:
        """Records how long work takes, or a background `write` so far, for `reserve`. A save may
        wait for a write. The first step and the first evaluation may compile graphs: they do not
        count, and are recorded as `first step` and `first evaluation`."""
        first = f"first {what}"
        is_first = what in ("step", "evaluation") and not self._seconds[first]
        durations = self._seconds[first if is_first else what]
        if what == "write":  # the one before is of the same write
            durations.clear()
        durations.append(seconds)

    def typical(self, what: str, newest: int = RECENT) -> float:
        """The median of the newest durations, up to `KEPT`, in seconds; of two the larger one; 0
        without any."""
        values = sorted([*self._seconds[what]][-newest:])
        return values[len(values) // 2] if values else 0.0

    @property
    def reserve(self) -> float:
        """Seconds before a deadline at which to stop, so that the checkpoint is saved in time."""
        step, save, write = map(self.typical, ("step", "save", "write"))
        # agreed a step late; a save may wait for a write
        return 2 * step + 1.5 * max(save, 2 * write)

    def check(self, done: bool = False) -> bool:
        """Whether all ranks stop now. Each rank calls it at the same places. `done`: of the work of
        `run_on_main`."""
        for deadline, reason in self._deadlines:
            if time.monotonic() > deadline - self.reserve:
                self.request(reason)
        stops = bool(self.reason)  # read once: a signal may come at any time
        requested, signals, self._done, self.save_at = self._sum.result()
        self._sum.start([stops, stops and self._is_by_signal, done, self.next_save])
        self._is_all_by_signals = self._is_all_by_signals and requested == signals
        if requested or (self.reason and not has_others()):
            self.reason = self.reason or "another rank"
            self.is_agreed = True
        return self.is_agreed

    def is_of_other_machines(self) -> bool:
        """Whether an elastic launcher must start this rank again, as only other machines had
        signals; waits for one."""
        if not (self._is_all_by_signals and machines() > 1 and elastic_nodes()):
            return False
        deadline = time.monotonic() + SIGNAL_SECONDS
        while not has_signal() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not has_signal()

    def sync(self) -> bool:
        """`check`, including every signal received so far; the ranks wait for each other."""
        return self.check() or self.check()

    def poll(self, done: bool = False) -> None:
        """Checks for a stop in long work; all ranks call it at the same places. Raises:
        Interrupted, on all ranks."""
        self._progress()
        if self.check(done):
            raise Interrupted

    def run_on_main(self, work: Callable[[], T]) -> T | None:
        """The result of `work`, which polls, on the main process; None on the others, which poll
        meanwhile. Raises: Interrupted, on all ranks."""
        result = None
        self._done = 0.0
        if is_main_process():
            result = work()
            self.poll(done=True)
            self.poll()  # the others see the sum of a call one call later
        while not (is_main_process() or self._done):
            self.poll()
        return result
