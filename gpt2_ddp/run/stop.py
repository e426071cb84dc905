"""Stopping early, on request, with a checkpoint saved."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist
from accelerate import Accelerator


class StopRequest:
    """A stop that all ranks agree on, asked for by a signal to any of them or by main's clock.

    Each step starts a tiny all-reduce on a group of the CPU and reads the one before: no rank waits for another, and no
    GPU is synchronised. A second SIGINT ends the process at once.

    Args:
        max_minutes: of main's clock, from now on; None: no limit.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, accelerator: Accelerator, max_minutes: float | None = None):
        self.reason = ""
        self._deadline = float("inf")
        if max_minutes and accelerator.is_main_process:
            self._deadline = time.monotonic() + 60 * max_minutes
        self._over = f"train.max_minutes = {max_minutes}"
        self._group = dist.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: dist.Work | None = None
        self._previous = {number: signal.signal(number, self._on_signal) for number in self.SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request(signal.Signals(number).name)

    def request(self, reason: str) -> None:
        """Asks all ranks to stop after the step that they are in, or the one after it."""
        self.reason = self.reason or reason

    def agreed(self) -> bool:
        """Whether all ranks stop now; every rank calls it once a step and gets the same answer."""
        if time.monotonic() > self._deadline:
            self.request(self._over)
        if self._group is None:
            return bool(self.reason)
        if self._pending is not None:
            self._pending.wait()
            if self._flag.item():
                self.reason = self.reason or "another rank"
                return True
        self._flag.fill_(bool(self.reason))
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return False

    def restore_handlers(self) -> None:
        """Gives the signals back to whom they belonged."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
