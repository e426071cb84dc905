"""Worker processes of loaders and pools: signals do not end them, only their parent does. No torch."""

import copy
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, SpawnProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, TypeVar

from gpt2_ddp.distributed.signals import SIGNALS, block_signals, start_resource_tracker

T = TypeVar("T")

LEAVE_SECONDS = 0.2
"""How long a worker that was told to end may take: it holds nothing that is worth more."""


class _Worker(BaseProcess):
    """A process that signals do not end: those to the process group must not, before its parent has heard them. It ends
    when its parent says so (`terminate`), and with its parent."""

    def start(self) -> None:
        """Starts it with signals blocked, and the pipe by which `terminate` tells it to end."""
        self._told, tell = multiprocessing.Pipe(duplex=False)
        with block_signals():
            super().start()
        self._told.close()

        def terminate() -> None:
            with suppress(OSError):  # it has ended
                tell.send(None)

        # also what ends it when the interpreter exits; SIGTERM is blocked, and of a SIGKILL torch makes an error
        self._popen.terminate = terminate  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        """What it was made for, beside a thread that ends it."""
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


class _DefaultWorker(_Worker, multiprocessing.Process):
    """Started as this process's own children usually are."""


class _SpawnedWorker(_Worker, SpawnProcess):
    """In a fresh interpreter, which does not run the user's script again: what helpers call is of modules."""

    def start(self) -> None:
        """Starts it without this process's main module, which it would import otherwise."""
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


def worker_context(method: str | None = None) -> BaseContext:
    """A multiprocessing context for a loader's or a pool's workers: signals do not end them, only this process and its
    end do.

    Args:
        method: `spawn`, or None for the usual one.
    """
    if method == "spawn":
        start_resource_tracker()
    context = copy.copy(multiprocessing.get_context(method or multiprocessing.get_start_method()))
    context.Process = _SpawnedWorker if method == "spawn" else _DefaultWorker  # pyright: ignore[reportAttributeAccessIssue]
    return context


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of helper processes in fresh interpreters. Where something is raised inside, what they are at does not
    matter any more, and they end at once."""
    pool = ProcessPoolExecutor(workers, mp_context=worker_context("spawn"))
    try:
        yield pool
    except BaseException:
        for worker in pool._processes.values():  # Python 3.14 has a public way
            worker.terminate()
        pool._result_queue._writer.close()  # pyright: ignore[reportAttributeAccessIssue]  or the pool would wait for the rest of a result that was being sent
        raise
    finally:
        pool.shutdown(cancel_futures=True)


class InlineExecutor(Executor):
    """Does in this process, at once, what a pool would do in others."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        """A future that has its result already; what is raised is raised."""
        future: Future[T] = Future()
        future.set_result(function(*arguments, **options))
        return future


def run_in_worker(function: Callable[..., T], *arguments: Any) -> T:
    """What `function`, of a module, returns in a helper process: there it can be interrupted also where it computes for
    long without coming to Python, and its memory goes with it."""
    with worker_pool(1) as pool:
        return pool.submit(function, *arguments).result()
