"""Real processes for the tests: ranks of one world, forked from a server that has torch loaded already.

A fresh interpreter would take 4 s to import torch, and forking the test process deadlocks in its thread pools.
"""

import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gpt2_ddp.errors import UserError

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(  # _dynamo: every optimizer imports it, which takes a second and a half
    ["torch", "torch._dynamo", "accelerate", "gpt2_ddp.tasks.jobs", "gpt2_ddp.tasks.pretraining"]
)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def start_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[tuple[BaseProcess, Connection]]:
    """Starts `function(*args)` on each rank; one process alone gets no rank, like a plain `python script.py`."""
    port = free_port()
    started = []
    for rank in range(world):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        environment = {"OMP_NUM_THREADS": "1"}
        if world > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        process = CONTEXT.Process(target=_call, args=(environment, sender, function, args))
        process.start()
        sender.close()
        started.append((process, receiver))
    return started


def results(started: list[tuple[BaseProcess, Connection]], timeout: float = 120) -> list[Any]:
    """What each rank returned; raises what the first failing rank raised, as text."""
    deadline = time.monotonic() + timeout
    values = []
    try:
        for rank, (_, receiver) in enumerate(started):
            if not receiver.poll(max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"rank {rank} did not answer within {timeout} s")
            try:
                value, error = receiver.recv()
            except EOFError:
                value, error = None, f"rank {rank} died"
            if error is not None:
                raise RankError(error)
            values.append(value)
    finally:
        for process, _ in started:
            process.join(0 if values != [] and len(values) < len(started) else 10)
            if process.is_alive():
                process.kill()
                process.join()
    return values


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Runs `function(*args)` on each rank of a world and returns what each returned."""
    return results(start_ranks(function, world, *args), timeout)


def run_until_killed(function: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> None:
    """Runs `function(*args)` on each rank until the last rank dies of SIGKILL; then kills the other ranks."""
    started = start_ranks(function, world, *args)
    started[-1][0].join(timeout)
    exit_code = started[-1][0].exitcode
    for process, _ in started:
        process.kill()
        process.join()
    assert exit_code == -signal.SIGKILL, exit_code


def in_turn(*calls: tuple) -> list[Any]:
    """Calls one function after another in this process. Each call is a tuple of the function and its arguments.

    Returns:
        the value of each call, or the text of its UserError.
    """
    found = []
    for function, *args in calls:
        try:
            found.append(function(*args))
        except UserError as error:
            found.append(str(error))
    return found


class RankError(Exception):
    """A rank's traceback."""


def _call(environment: dict[str, str], sender: Connection, function: Callable[..., Any], args: tuple) -> None:
    import torch

    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "TORCHELASTIC_", "PET_", "SLURM_"))]:
        del os.environ[name]
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        sender.send((function(*args), None))
    except BaseException:
        sender.send((None, traceback.format_exc()))
        raise SystemExit(1) from None
