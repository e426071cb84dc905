"""The rendezvous of a cluster check: ranks find each other in the key-value store at MASTER_ADDR and MASTER_PORT.

There is no process group yet, which could hang. Every wait is bounded, and its error names the ranks that are missing.
torch's own store retries for twice its timeout, prints its stack in C++ each time, and reports a timeout whatever the
reason. So plain sockets try the address first.
"""

import hashlib
import itertools
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import psutil
import torch
import torch.cuda.nccl
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.distributed.launch import USE_TORCHRUN
from gpt2_ddp.errors import UserError

AFTERMATH = 5.0
"""Seconds that other ranks wait longer than rank 0, for what it found."""
SAME_EVERYWHERE = ("world_size", "device_type", "python", "torch", "accelerate", "gpt2_ddp", "cuda", "nccl")
"""Facts that must not differ between ranks."""

Facts = dict[str, Any]
"""What a rank tells of itself and its machine (`gather_facts`)."""


@dataclass(frozen=True)
class RankEnv:
    """A process of the world, from its launcher's environment."""

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


def connect(place: RankEnv, timeout: float) -> Store:
    """The store of this world: torchrun's own, or else one that rank 0 serves.

    Raises:
        UserError: nobody answers there within `timeout` seconds, or rank 0 cannot serve there.
    """
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        try:
            socket.create_server(("", place.port)).close()
        except OSError as error:
            hint = f"rank 0 cannot open this port ({error.strerror}); another program may be using it: choose another"
            raise UserError("MASTER_PORT", place.port, hint) from error
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


def _await_answer(place: RankEnv, timeout: float) -> None:
    """Waits until the address accepts a connection. Raises: UserError with the reason."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((place.address, place.port), max(left, 0.1)).close()
        except OSError as error:
            if left > 0.1:  # a name may be known, and rank 0 be started, in a moment
                time.sleep(0.1)
                continue
            raise UserError("MASTER_ADDR", f"{place.address}:{place.port}", _reason(place, timeout, error)) from error
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
    addresses = [(one, name) for name, ones in psutil.net_if_addrs().items() for one in ones if name != "lo"]
    own = [f"{one.address} ({name})" for one, name in addresses if one.family == socket.AF_INET]
    return (
        f"rank 0 on {host} serves this port, and is not reached by this address; is it this machine's? It has "
        f"{', '.join(own) or 'none but 127.0.0.1'}; give one of these to all ranks, or start rank 0 on that machine"
    )


def gather_facts(place: RankEnv, device: torch.device) -> Facts:
    """The facts about this process, which uses `device`. Raises: UserError if it has no CUDA device."""
    interface, ip, link = _route(place.address, place.port)
    host, name, nccl, host_ip = socket.gethostname(), platform.machine(), "-", "?"
    with suppress(OSError):
        host_ip = socket.gethostbyname(host)
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[1].rglob("*.py")))
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            hint = f"there are {count} CUDA devices on {host}; start {count} processes here"
            raise UserError("LOCAL_RANK", place.local_rank, hint)
        name = torch.cuda.get_device_name(place.local_rank)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "rank": place.rank,
        "local_rank": place.local_rank,
        "host": host,
        "device": name,
        "device_type": device.type,
        "interface": interface,  # of the route to MASTER_ADDR, as `ip`
        "ip": ip,
        "host_ip": host_ip,  # of the host's name, where gloo listens unless GLOO_SOCKET_IFNAME names an interface
        "link_gb_per_s": link,  # the interface's own speed, in 10^9 bytes per second; 0 if unknown
        "world_size": place.world_size,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "gpt2_ddp": hashlib.sha256(sources).hexdigest()[:12],  # of this package's code
        "cuda": torch.version.cuda or "-",
        "nccl": nccl,
    }


def _route(address: str, port: int) -> tuple[str, str, float]:
    """Interface and IP of the route to an address, and the interface's speed in 10^9 bytes per second, 0 if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))  # of a datagram socket: sends nothing, picks the route
            ip = sock.getsockname()[0]
    except OSError:
        return "?", "?", 0.0
    interfaces = psutil.net_if_addrs().items()
    interface = next((name for name, addresses in interfaces if ip in [a.address for a in addresses]), "?")
    stats = psutil.net_if_stats().get(interface)
    return interface, ip, stats.speed / 8e3 if stats else 0.0  # from Mbit/s


def rendezvous(store: Store, place: RankEnv, facts: Facts, timeout: float) -> list[Facts]:
    """Waits until all ranks have arrived; returns their facts in order of rank.

    Rank 0 waits `timeout` seconds for the others. They wait as long for rank 0, and then for its result.

    Raises:
        UserError: ranks are missing, two have the same rank, or they differ in SAME_EVERYWHERE.
        SystemExit: 2 on other ranks, after rank 0 has printed the error.
    """
    if store.add(f"seats/{place.rank}", 1) > 1:
        hint = f"a second process (on {facts['host']}) has this rank; give each its own (--machine_rank, --node_rank)"
        raise UserError("RANK", place.rank, hint)
    store.set(f"facts/{place.rank}", json.dumps(facts))
    if place.rank == 0:
        try:
            found = _wait_for_all(store, place.world_size, timeout)
        except UserError as error:
            store.set("arrivals", json.dumps(error.mistakes))
            others = [f"facts/{rank}" for rank in range(1, place.world_size)]
            wait_until(lambda: store.add("heard", 0) >= sum(store.check([key]) for key in others), 2)
            raise
        store.set("arrivals", "[]")
        return found
    if not wait_until(lambda: store.check(["facts/0"]), timeout):
        raise UserError("rank", 0, f"did not arrive within {timeout:g} s; rank {place.rank} ({facts['host']}) is here")
    if not wait_until(lambda: store.check(["arrivals"]), timeout + AFTERMATH):
        raise UserError("rank", 0, f"arrived, but fell silent; rank {place.rank} ({facts['host']}) is here")
    mistakes = json.loads(store.get("arrivals"))
    store.add("heard", 1)
    if mistakes:
        sys.exit(2)
    return _read_facts(store, range(place.world_size))


def _wait_for_all(store: Store, world_size: int, timeout: float) -> list[Facts]:
    """Raises: UserError for missing ranks, or naming every fact in which ranks differ and must not."""
    keys = [f"facts/{rank}" for rank in range(world_size)]
    if not wait_until(lambda: store.check(keys), timeout):
        here = [rank for rank in range(world_size) if store.check([f"facts/{rank}"])]
        missing = [rank for rank in range(world_size) if rank not in here]
        arrived = by_value(_read_facts(store, here), "host")
        hint = f"did not arrive within {timeout:g} s (arrived: {arrived}); each needs the same MASTER_ADDR and "
        hint += "MASTER_PORT, and its machine its own --machine_rank or --node_rank"
        raise UserError("rank" if len(missing) == 1 else "ranks", format_ranks(missing), hint)
    found = _read_facts(store, range(world_size))
    differing = [name for name in SAME_EVERYWHERE if len({facts[name] for facts in found}) > 1]
    if differing:
        errors = [UserError(name, by_value(found, name), "must be the same on all ranks") for name in differing]
        raise UserError.join([mistake for error in errors for mistake in error.mistakes])
    return found


def _read_facts(store: Store, ranks: range | list[int]) -> list[Facts]:
    return [json.loads(text) for text in store.multi_get([f"facts/{rank}" for rank in ranks])]


def by_value(found: list[Facts], name: str) -> str:
    """Like `2.13.0 on ranks 0-7 (host a), 2.11.0 on rank 8 (host b)`."""
    parts = []
    for value in dict.fromkeys(facts[name] for facts in found):
        members = [facts for facts in found if facts[name] == value]
        hosts = "" if name == "host" else f" ({', '.join(dict.fromkeys(facts['host'] for facts in members))})"
        ranks = [facts["rank"] for facts in members]
        parts.append(f"{value} on rank{'s' * (len(ranks) > 1)} {format_ranks(ranks)}{hosts}")
    return ", ".join(parts)


def format_ranks(ranks: list[int]) -> str:
    """Ranks in ascending order, like `0-7, 9`."""
    place = dict(zip(ranks, itertools.count(), strict=False))
    runs = [list(run) for _, run in itertools.groupby(ranks, key=lambda rank: rank - place[rank])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Polls until the condition holds; False when `timeout` seconds did not suffice."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
