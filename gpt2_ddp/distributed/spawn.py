"""Starts processes from Python, like mp.spawn: `--launch.processes 2` instead of a launcher.

    this process                            each rank, in a fresh interpreter
    run_processes  start_ranks ─────────▶   _call: standard streams, handlers of signals
                   _signal     ─signals─▶   _run_rank: function(*args)
                   _wait       ◀─result──   of rank 0, or its UserError, by a pipe
                               ◀─exit code  of each rank

Imports no torch: the parent starts the processes before any thread pool exists.
"""

import math
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from gpt2_ddp.distributed.environment import STOPPED, usable_cores, world_size
from gpt2_ddp.distributed.process import POLL_SECONDS, end_with_parent
from gpt2_ddp.distributed.signals import SIGNALS, Stopped, exit_on_signal, install_handlers
from gpt2_ddp.distributed.streams import CLOSED, OutputLost, standard_streams
from gpt2_ddp.distributed.workers import block_signals, start_resource_tracker
from gpt2_ddp.errors import UserError, is_main_process

T = TypeVar("T")

GRACE_SECONDS = 10  # for the other ranks after one has failed: they may report the same user error
STOP_SECONDS = 600  # after one was stopped: they save a checkpoint, and copy it to a mirror


def run_processes(function: Callable[..., T], processes: int | None, *args: object) -> T:
    """The main rank's result of a module's `function(*args)`. Called in this process or, for two
    and more, on each rank of a new world on this machine. Function, arguments and result are
    pickled.

    The ranks get torchrun's environment. Signals to this process reach all of them; they end when
    this process dies. Under a launcher, which has started the ranks already, `function` is called
    here for any `processes`.

    Raises:
        UserError: of the main rank, or of a launcher's variable that is not a number.
        Stopped: a rank was stopped with nothing to save.
        SystemExit: 1 if a rank crashed; its traceback is on stderr. 2 after a user error of another
            rank, which has printed it.
    """
    if processes in (None, 1) or "RANK" in os.environ:
        return function(*args)
    return start_processes(function, processes, *args)


def refuse_launcher() -> None:
    """Raises: UserError under a launcher of several processes, for a command that starts its own
    ones."""
    if world_size() > 1:
        hint = "the command starts its own processes; run it without a launcher"
        raise UserError("processes", world_size(), hint)


def start_processes(function: Callable[..., T], processes: int, *args: object) -> T:
    """As `run_processes`, always on a new world of new processes. A single process gets no rank."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    ranks = list(start_ranks(_run_rank, [(sender, function, args)] * processes))
    sender.close()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        _signal(ranks, number)  # they stop with a checkpoint

    uninstall = install_handlers(pass_on, last=False)
    try:
        result, error = _wait(ranks, receiver)
    finally:
        uninstall()
    if any(rank.exitcode == STOPPED for rank in ranks):
        raise Stopped("a signal to a rank")
    if any(rank.exitcode == CLOSED for rank in ranks):
        raise OutputLost("Broken pipe") from BrokenPipeError()
    if error is not None:
        raise error
    if any(rank.exitcode for rank in ranks):
        ends = ", ".join(f"{rank.name}: {rank.exitcode}" for rank in ranks)
        print(f"a process crashed (exit codes {ends})", file=sys.stderr)
        raise SystemExit(2 if any(rank.exitcode == 2 for rank in ranks) else 1)
    return result


def start_ranks(
    function: Callable[..., object], arguments: Sequence[tuple[object, ...]]
) -> Iterator[BaseProcess]:
    """Starts `function(*arguments[rank])` on each rank of a new world, in a fresh process that ends
    with this one.

    A single process gets no rank. A Ctrl-C of the terminal reaches this process only. A rank that
    is stopped with nothing to save ends with 75.
    """
    context = multiprocessing.get_context("spawn")
    port = reserve_port()
    start_resource_tracker()
    for rank, of_rank in enumerate(arguments):
        process = context.Process(target=_call, args=(function, of_rank), name=f"rank {rank}")
        with _environment(rank, len(arguments), port), block_signals():
            process.start()
        yield process


def reserve_port() -> int:
    """A port of this machine for rank 0 to listen at. On Linux the system gives it to no other
    program while this one runs."""
    held = socket.socket()
    # a bound socket does not keep rank 0 from listening
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    if sys.platform == "linux":
        _HELD.append(held)
    else:
        held.close()
    return port


_HELD: list[socket.socket] = []


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.setpgrp()  # the parent passes a Ctrl-C on: once, not twice
    with exit_on_signal(lambda line: None), standard_streams():  # the parent reports a signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # pending ones are delivered
        end_with_parent(signal.SIGTERM)
        function(*arguments)


def _run_rank(sender: Connection, function: Callable[..., T], args: tuple[object, ...]) -> None:
    try:
        answer: tuple[T | None, UserError | None] = (function(*args), None)
    except UserError as error:
        answer = (None, error)
    if is_main_process():
        with suppress(BrokenPipeError):  # the parent was killed
            sender.send(answer)
    sender.close()
    if answer[1] is not None:
        raise SystemExit(2)


def _wait(ranks: list[BaseProcess], receiver: Connection) -> tuple[Any, UserError | None]:
    """The main rank's result and error, once all ranks have ended. Soon after one fails, the others
    are ended; if a signal stopped that one, they are signalled to stop first."""
    answer = None
    deadline = math.inf
    running = ranks
    while running:
        # a rank's end may not show in these: what it has forked holds the other ends of its pipes
        sources: list[int | Connection] = [rank.sentinel for rank in running]
        if answer is None:
            sources.append(receiver)
        wait(sources, POLL_SECONDS)
        running = [rank for rank in ranks if rank.exitcode is None]
        if answer is None and receiver.poll():
            try:
                answer = receiver.recv()
            except EOFError:  # the main rank ended without one
                answer = (None, None)
        codes = {rank.exitcode for rank in ranks} - {None, 0}
        if codes and deadline == math.inf:
            deadline = time.monotonic() + (STOP_SECONDS if codes == {STOPPED} else GRACE_SECONDS)
            if STOPPED in codes:
                _signal(running, signal.SIGTERM)
        if time.monotonic() > deadline:
            for rank in running:
                rank.kill()
    return answer or (None, None)


@contextmanager
def _environment(rank: int, processes: int, port: int) -> Generator[None]:
    """Sets torchrun's environment of a rank, for a process that is started inside."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(usable_cores() // processes, 1)))
    if processes > 1:
        os.environ |= {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": f"{processes}",
            "LOCAL_WORLD_SIZE": f"{processes}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def _signal(ranks: list[BaseProcess], number: int) -> None:
    for rank in ranks:
        if rank.pid is not None and rank.exitcode is None:
            os.kill(rank.pid, number)
