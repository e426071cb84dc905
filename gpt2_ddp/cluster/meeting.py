"""Where ranks meet: the key-value store at MASTER_ADDR and MASTER_PORT, and why one may not get there.

torch's store tries for twice the time that it is given, prints its stack in C++ each time, and says at last that it has
timed out, whatever the reason. So the way is tried with plain sockets first.
"""

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.distributed.launch import USE_TORCHRUN
from gpt2_ddp.errors import UserError


@dataclass(frozen=True)
class RankEnv:
    """A process in the world, as its launcher's environment tells."""

    rank: int
    local_rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> "RankEnv":
        """Raises: UserError when WORLD_SIZE is set without the variables that belong to it."""
        env = os.environ
        absent = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
        if absent:
            hint = f"is set without {', '.join(absent)}; " + USE_TORCHRUN.format(n=env["WORLD_SIZE"])
            raise UserError("WORLD_SIZE", env["WORLD_SIZE"], hint)
        rank, world_size, port = int(env["RANK"]), int(env["WORLD_SIZE"]), int(env["MASTER_PORT"])
        return cls(rank, int(env["LOCAL_RANK"]), world_size, env["MASTER_ADDR"], port)

    @property
    def where(self) -> str:
        """Like `10.0.0.1:29500`."""
        return f"{self.address}:{self.port}"


def connect(place: RankEnv, timeout: float) -> Store:
    """The store of this world: torchrun's own, or else one that rank 0 serves.

    Raises:
        UserError: nobody answers there within `timeout` seconds, or rank 0 cannot serve there.
    """
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        _check_free(place.port)
    else:
        _await_answer(place, timeout)
    store = TCPStore(
        "localhost" if serves else place.address,
        place.port,
        is_master=serves,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,  # the process group's rendezvous will share the server
    )
    if serves:
        _await_answer(place, timeout)  # the others come by this address, and so will the process group
    prefix = f"check_cluster/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return PrefixStore(prefix, store)


def _check_free(port: int) -> None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        hint = f"rank 0 cannot open this port ({error.strerror}); another program may be using it: choose another"
        raise UserError("MASTER_PORT", port, hint) from error


def _await_answer(place: RankEnv, timeout: float) -> None:
    """Waits until somebody listens there; raises why not."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((place.address, place.port), max(left, 0.1)).close()
        except OSError as error:
            if left > 0.1:  # a name may be known, and rank 0 be started, in a moment
                time.sleep(0.1)
                continue
            raise UserError("MASTER_ADDR", place.where, _reason(place, timeout, error)) from error
        return


def _reason(place: RankEnv, timeout: float, error: OSError) -> str:
    host = socket.gethostname()
    if isinstance(error, socket.gaierror):
        return (
            f"rank {place.rank} on {host} does not know this name ({error.strerror}); give rank 0's IP address, or put "
            "its name into DNS or /etc/hosts"
        )
    if place.rank:
        return (
            f"rank {place.rank} on {host} got no answer from rank 0 there within {timeout:g} s; is it started, and may "
            "this machine reach that port?"
        )
    own = [
        f"{address.address} ({name})"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name != "lo"
    ]
    return (
        f"rank 0 on {host} serves this port, and is not reached by this address; is it this machine's? It has "
        f"{', '.join(own) or 'none but 127.0.0.1'}; give one of these to all ranks, or start rank 0 on that machine"
    )
