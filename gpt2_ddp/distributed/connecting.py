"""Connects several ranks in time, or ends them with one line each. Imported with more than one process."""

import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread

import torch.distributed as dist
from accelerate import PartialState

from gpt2_ddp.distributed.environment import CONNECTED, LAST_SEEN, world_size
from gpt2_ddp.errors import UserError, is_main_process

CONNECTING = 300.0  # seconds for ranks to connect after the rendezvous, unless `train.patience_seconds` is set
LEAST_CONNECTING = 30.0  # one rank may load libraries for longer than another
GRACE = 5.0  # further seconds before a rank ends without gloo's error


def connect(start: Callable[..., PartialState], patience: float | None) -> PartialState:
    """The result of `start(timeout=...)`, which connects the ranks. Raises: UserError, on every rank, if they do not
    connect within `patience` seconds (None: CONNECTING)."""
    seconds, connected = max(patience or CONNECTING, LEAST_CONNECTING), Event()
    Thread(target=_watch_connecting, args=(connected, seconds), name="connecting", daemon=True).start()
    try:
        return start(timeout=timedelta(seconds=seconds))
    except RuntimeError as error:  # gloo has no error class
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        mistake = _not_connected(str(error).splitlines()[0].rpartition("] ")[2])
        if not is_main_process():  # `run_command` prints the main process's error only; here every rank has its own
            print(f"error: {mistake}", file=sys.stderr)
        raise mistake from error
    finally:
        connected.set()


def _watch_connecting(connected: Event, seconds: float) -> None:
    """Ends this rank if the ranks do not connect: gloo connects to an unreachable rank five times, each time for its
    whole timeout. At the first connection, ranks of this machine that have ended are noticed within seconds."""
    begun = time.monotonic()
    while not connected.wait(0.5):
        now = time.monotonic()
        gone = [] if CONNECTED.is_set() else [rank for rank, seen in LAST_SEEN.items() if now > seen + GRACE]
        if gone or now > begun + seconds + GRACE:
            error = _not_connected(f"one of them has not answered within {seconds:.0f} s")
            if gone:
                error = UserError("processes", world_size(), f"rank {gone[0]} ended early; see its output")
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(2)


def _not_connected(reason: str) -> UserError:
    here = f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()} cannot connect to the others"
    hint = "open all ports between the machines, and name the interface that joins them in GLOO_SOCKET_IFNAME, or "
    return UserError("processes", world_size(), f"{here} ({reason[-100:]}); {hint}NCCL_SOCKET_IFNAME for GPUs")
