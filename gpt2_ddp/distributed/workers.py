"""Worker processes of pools; only their parent ends them, signals do not. No torch."""

import copy
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

from gpt2_ddp.distributed.signals import SIGNALS

Pool = ProcessPoolExecutor | None
T = TypeVar("T")
Item = TypeVar("Item")

LEAVE_SECONDS = 0.2  # longest wait for the end of a worker
AHEAD = 3
"""Items per worker that are in work, or whose results wait."""


class _Worker(SpawnProcess):
    """A process in a fresh interpreter, without the user's script, that ends with its parent or by `terminate`. Signals
    are blocked, since the parent handles them."""

    def start(self) -> None:
        self._end, sender = multiprocessing.Pipe(duplex=False)
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            with block_signals():
                super().start()
        finally:
            sys.modules["__main__"] = main
        self._end.close()

        def terminate() -> None:
            with suppress(OSError):  # it has ended
                sender.send(None)

        # multiprocessing calls this at exit, too. SIGTERM is blocked, and torch reports a SIGKILL as an error
        self._popen.terminate = terminate  # pyright: ignore[reportAttributeAccessIssue]

    def run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # children of a fork server do not inherit the mask
        threading.Thread(target=self._wait_for_end, name="wait for end", daemon=True).start()
        super().run()

    def _wait_for_end(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        wait([self._end, parent.sentinel])
        os._exit(0)

    def join(self, timeout: float | None = None) -> None:
        super().join(None if timeout is None else min(timeout, LEAVE_SECONDS))


def worker_context() -> BaseContext:
    """A multiprocessing context for workers."""
    start_resource_tracker()
    context = copy.copy(multiprocessing.get_context("spawn"))
    context.Process = _Worker  # pyright: ignore[reportAttributeAccessIssue]
    return context


@contextmanager
def block_signals() -> Iterator[None]:
    """Blocks the three signals in processes that are started inside, until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_resource_tracker() -> None:
    """Starts multiprocessing's resource tracker with signals blocked: a SIGUSR1 to the process group would end it. Call
    this before `block_signals`, which the start would undo."""
    with block_signals():
        resource_tracker.ensure_running()


@contextmanager
def worker_pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of worker processes in fresh interpreters. An exception inside ends the workers at once."""
    pool = ProcessPoolExecutor(workers, mp_context=worker_context())
    try:
        yield pool
    except BaseException:
        for worker in pool._processes.values():  # Python 3.14 has a public way
            worker.terminate()
        pool._result_queue._writer.close()  # pyright: ignore[reportAttributeAccessIssue]  or the pool would wait for the rest of a result that was being sent
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(work: Callable[[Item], T], items: Iterable[Item], pool: Pool) -> Iterator[T]:
    """`map` over a pool, only a few items ahead; without one, in this process. The pool has processes, since tiktoken
    is a quarter slower in threads (estimate). They are spawned, since forking a process with threads can deadlock."""
    if pool is None:
        yield from map(work, items)
        return
    pending: deque[Future[T]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) >= AHEAD * pool._max_workers:  # pyright: ignore[reportAttributeAccessIssue]
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def batches(items: Iterable[T], size: Callable[[T], float], least: float) -> Iterator[list[T]]:
    """The items in lists whose sizes add up to `least` or more; the last may have less."""
    batch, total = [], 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def run_in_worker(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a module's function in a worker process: signals can interrupt it, and its memory is freed."""
    with worker_pool(1) as pool:
        return pool.submit(function, *arguments).result()
