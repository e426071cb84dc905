"""Stopping early, on request, with a checkpoint saved."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator

from gpt2_ddp.distributed.signals import install_handlers, is_second_interrupt


class Agreement:
    """Sums of a few integers over all ranks, one call late: each call starts a tiny all-reduce on a group of the CPU
    and reads the one before. No rank waits for another, and no GPU is synchronised. Integers, because their sums are
    the same in any order, and so on every rank and for any number of them.

    Args:
        size: how many integers; their sums have to stay below 2^63.
    """

    def __init__(self, accelerator: Accelerator, size: int):
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._sums: Sequence[int] | torch.Tensor = [0] * size
        self._pending: dist.Work | None = None

    def exchange(self, values: Sequence[int]) -> list[int]:
        """Takes this rank's values; returns the sums of those of the call before, zeros at first. Every rank calls it
        equally often and gets the same answers."""
        if self._pending is not None:
            self._pending.wait()
        sums = list(map(int, self._sums))
        self._sums = values
        if self._group is not None:
            self._sums = torch.tensor(values, dtype=torch.int64)
            self._pending = dist.all_reduce(self._sums, group=self._group, async_op=True)
        return sums


T = TypeVar("T")

CARRIED = 4
"""Further integers that travel with a rank's wish to stop: the guard's (`training.guard`)."""


class Interrupted(BaseException):
    """Something long that follows a step was broken off, as a stop was asked for; what it was is still owed. It is no
    Exception: nobody is to take it for a failure."""


class StopRequest:
    """A stop that all ranks agree on, asked for by a signal to any of them or by main's clock.

    A lone process stops after the step that it is in, several after that or the next one: they agree one call late
    (`Agreement`). A SIGINT that follows later than a second after the first signal ends the process at once.

    Args:
        begun: `time.monotonic()` when the run began.
        max_minutes: of main's clock, from then on; None: no limit but Slurm's.
        progress: called before each poll.

    Attributes:
        is_agreed: whether all ranks have agreed to stop.
        restore_handlers: gives the signals back to whom they belonged.
        carried: sums over all ranks of what calls of `agreed` handed over, since they were last taken out.
        reserve: seconds before the deadline at which to stop, so that the checkpoint is saved by then.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        begun: float,
        max_minutes: float | None = None,
        progress: Callable[[], None] = lambda: None,
    ):
        self.reason, self.is_agreed, self.reserve = "", False, 0.0
        self.carried, self._progress = [0] * CARRIED, progress
        self._alone = accelerator.num_processes == 1
        self._deadlines: list[tuple[float, str]] = []
        if accelerator.is_main_process:
            if max_minutes:
                self._deadlines.append((begun + 60 * max_minutes, f"train.max_minutes = {max_minutes}"))
            if end := os.environ.get("SLURM_JOB_END_TIME", ""):  # in seconds since 1970
                self._deadlines.append((time.monotonic() + float(end) - time.time(), "the Slurm job's time limit"))
        self._agreement, self._done, self._is_main = Agreement(accelerator, 2 + CARRIED), 0, accelerator.is_main_process
        self._slowest = {"step": 0.0, "save": 0.0}
        self.restore_handlers = install_handlers(self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if is_second_interrupt(number):
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Asks all ranks to stop after the step that they are in, or the one after it."""
        self.reason = self.reason or reason

    def record_duration(self, what: str, seconds: float) -> None:
        """Learns how long a `step` or a `save` takes: two steps and a save pass until a stop is agreed on and saved."""
        self._slowest[what] = max(self._slowest[what], seconds)
        self.reserve = 2 * self._slowest["step"] + 1.5 * self._slowest["save"]

    def agreed(self, carry: Sequence[int] = (0,) * CARRIED, done: bool = False) -> bool:
        """Whether all ranks stop now. Every rank calls it at the same places, at least once a step, and gets the same
        answer; `carry` is summed up over them on the way. `done`: what the others follow is over."""
        for deadline, reason in self._deadlines:
            if time.monotonic() > deadline - self.reserve:
                self.request(reason)
        asked, self._done, *sums = self._agreement.exchange([bool(self.reason), done, *carry])
        self.carried = [a + b for a, b in zip(self.carried, sums, strict=True)]
        if asked or (self._alone and self.reason):
            self.reason = self.reason or "another rank"
            self.is_agreed = True
        return self.is_agreed

    def sync(self) -> bool:
        """The same, with what any rank has heard until now; the ranks wait for each other."""
        return self.agreed() or self.agreed()

    def poll(self) -> None:
        """To be called by all ranks at the same places of something long. Raises: Interrupted, on all of them alike,
        when a stop was asked for meanwhile."""
        self._progress()
        if self.agreed():
            raise Interrupted

    def run_on_main(self, work: Callable[[], T]) -> T | None:
        """Has the main process alone do what takes long and polls, and the others poll along until it is done.

        Returns:
            on the main process, what `work` returned.

        Raises:
            Interrupted: on all ranks, when a stop was asked for meanwhile; on the others also when it was right at the
            end.
        """
        result, self._done = None, 0
        if self._is_main:
            result = work()
            if not self.agreed(done=True):
                self.agreed()
        else:
            while not self._done:
                self.poll()
        return result
