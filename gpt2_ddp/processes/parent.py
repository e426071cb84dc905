"""Processes that end with the one that started them, however it ends, and helpers that only it ends. No torch."""

import copy
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, SpawnProcess
from multiprocessing.process import BaseProcess

from gpt2_ddp.processes.signals import SIGNALS, held_back, start_resource_tracker

LOOK_SECONDS = 0.5
LEAVE_SECONDS = 0.2
"""How long a worker that was told to end may take: it holds nothing that is worth more."""


def end_with_parent(number: int) -> None:
    """Sends this process signal `number` once its parent process is gone, be it by `kill -9`.

    Not for a process that a shell started: `nohup python ... &` is to outlive it. A thread waits, rather than the
    kernel's PR_SET_PDEATHSIG: that fires when the *thread* ends that started this process, and on Linux alone.
    """
    parent, launcher = multiprocessing.parent_process(), os.getppid()

    def follow() -> None:
        if parent is not None:
            parent.join()  # knows of an end before this began
        else:
            while os.getppid() == launcher:
                time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=follow, name="end with parent", daemon=True).start()


class _Helper(BaseProcess):
    """A process that signals do not end: those to the process group must not, before its parent has heard them. It ends
    when its parent says so (`terminate`), and with its parent."""

    def start(self) -> None:
        self._told, tell = multiprocessing.Pipe(duplex=False)
        with held_back():
            super().start()
        self._told.close()

        def terminate() -> None:
            with suppress(OSError):  # it has ended
                tell.send(None)

        # also what ends it when the interpreter exits; SIGTERM is blocked, and of a SIGKILL torch makes an error
        self._popen.terminate = terminate  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a fork server's child is born without
        threading.Thread(target=self._end_when_told, name="end when told", daemon=True).start()
        super().run()

    def _end_when_told(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([self._told, parent.sentinel])
        os._exit(0)

    def join(self, timeout: float | None = None) -> None:
        super().join(None if timeout is None else min(timeout, LEAVE_SECONDS))


class _Helping(_Helper, multiprocessing.Process):
    """Started as this process's own children usually are."""


class _SpawnedHelper(_Helper, SpawnProcess):
    """In a fresh interpreter."""


def helper_context(method: str | None = None) -> BaseContext:
    """A multiprocessing context for a loader's or a pool's workers: signals do not end them, only this process and its
    end do.

    Args:
        method: `spawn`, or None for the usual one.
    """
    if method == "spawn":
        start_resource_tracker()
    context = copy.copy(multiprocessing.get_context(method or multiprocessing.get_start_method()))
    context.Process = _SpawnedHelper if method == "spawn" else _Helping  # pyright: ignore[reportAttributeAccessIssue]
    return context
