"""Worker processes of pools; only their parent ends them, signals do not. No torch."""

import copy
import multiprocessing
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import TypeVar

from gpt2_ddp.distributed.process import end_with_parent
from gpt2_ddp.distributed.signals import SIGNALS

Pool = ProcessPoolExecutor | None
T = TypeVar("T")
Item = TypeVar("Item")

AHEAD = 3
"""Items per worker that are in work, or whose results wait."""


class _Worker(SpawnProcess):
    """A process in a fresh interpreter, without the user's script, that ends with its parent.
    Signals are blocked: the parent handles them."""

    terminate = SpawnProcess.kill  # SIGTERM is blocked

    def start(self) -> None:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with block_signals():
                super().start()
        finally:
            sys.modules["__main__"] = main

    def run(self) -> None:
        end_with_parent(signal.SIGKILL)
        super().run()


@contextmanager
def block_signals() -> Generator[None]:
    """Blocks the signals of stops in processes that are started inside, until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_resource_tracker() -> None:
    """Starts multiprocessing's resource tracker with signals blocked: a SIGUSR1 to the process
    group would end it. Call this before `block_signals`, which the start would undo."""
    with block_signals():
        resource_tracker.ensure_running()


@contextmanager
def worker_pool(workers: int) -> Generator[ProcessPoolExecutor]:
    """A pool of worker processes in fresh interpreters. An exception inside ends the workers at
    once."""
    start_resource_tracker()
    context = copy.copy(multiprocessing.get_context("spawn"))
    context.Process = _Worker  # pyright: ignore[reportAttributeAccessIssue]
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        yield pool
    except BaseException:
        for worker in pool._processes.values():  # Python 3.14 has a public way
            worker.terminate()
        # or the pool would wait for the rest of a result that was being sent
        pool._result_queue._writer.close()  # pyright: ignore[reportAttributeAccessIssue]
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def in_order(work: Callable[[Item], T], items: Iterable[Item], pool: Pool) -> Iterator[T]:
    """`map` over a pool, only a few items ahead; without one, in this process. The pool has
    processes, since tiktoken is a quarter slower in threads (estimate). They are spawned, since
    forking a process with threads can deadlock."""
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
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= least:
            yield batch
            batch = []
            total = 0
    if batch:
        yield batch


def run_in_worker(function: Callable[..., T], *arguments: object) -> T:
    """The result of a module's function in a worker process: signals can interrupt it, and its
    memory is freed."""
    with worker_pool(1) as pool:
        return pool.submit(function, *arguments).result()
