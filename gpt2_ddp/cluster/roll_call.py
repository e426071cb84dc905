"""Who is there: ranks find each other over a key-value store, before there is a process group that could hang. Every
wait is bounded, and ends with the names of the ranks that were waited for."""

import hashlib
import itertools
import json
import platform
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import accelerate
import psutil
import torch
import torch.cuda.nccl
from torch.distributed.distributed_c10d import Store

from gpt2_ddp.cluster.meeting import RankEnv
from gpt2_ddp.errors import UserError

AFTERMATH = 5.0
"""Seconds that other ranks wait longer than rank 0, for what it found."""


@dataclass(frozen=True)
class NodeInfo:
    """What a rank says of itself; `interface` and `ip` are those of its route to MASTER_ADDR, `host_ip` is what its
    host name resolves to, where gloo listens unless GLOO_SOCKET_IFNAME says otherwise. `link_gb_per_s` is what the
    interface says of itself, in 10^9 bytes; 0: nothing."""

    rank: int
    local_rank: int
    host: str
    device: str
    device_type: str
    interface: str
    ip: str
    host_ip: str
    link_gb_per_s: float
    world_size: int
    python: str
    torch: str
    accelerate: str
    gpt2_ddp: str
    cuda: str
    nccl: str


SAME_EVERYWHERE = ("world_size", "device_type", "python", "torch", "accelerate", "gpt2_ddp", "cuda", "nccl")


def gather_facts(place: RankEnv, device: torch.device) -> NodeInfo:
    """The facts about this process, which is to use `device`."""
    interface, ip = _route(place.address, place.port)
    name, nccl = platform.machine(), "-"
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if place.local_rank >= count:
            hint = f"there are {count} CUDA devices on {socket.gethostname()}; start {count} processes here"
            raise UserError("LOCAL_RANK", place.local_rank, hint)
        name = torch.cuda.get_device_name(place.local_rank)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return NodeInfo(
        rank=place.rank,
        local_rank=place.local_rank,
        host=socket.gethostname(),
        device=name,
        device_type=device.type,
        interface=interface,
        ip=ip,
        host_ip=_resolved(socket.gethostname()),
        link_gb_per_s=_link(interface),
        world_size=place.world_size,
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.__version__,
        accelerate=accelerate.__version__,
        gpt2_ddp=_sources(),
        cuda=torch.version.cuda or "-",
        nccl=nccl,
    )


def _sources() -> str:
    """A short hash of this package's code: an old copy on one machine is as bad as an old torch."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _route(address: str, port: int) -> tuple[str, str]:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((address, port))  # of a datagram socket: sends nothing, picks the route
            ip = sock.getsockname()[0]
    except OSError:
        return "?", "?"
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if ip in [a.address for a in addresses]), "?"), ip


def _link(interface: str) -> float:
    """By Linux, in megabits; -1, or an error, where it is not known."""
    try:
        return max(int(Path(f"/sys/class/net/{interface}/speed").read_text()), 0) / 8e3
    except (OSError, ValueError):
        return 0.0


def _resolved(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return "?"


def rendezvous(store: Store, place: RankEnv, facts: NodeInfo, timeout: float) -> list[NodeInfo]:
    """Waits until all ranks are there; what each says of itself, in order of rank.

    Rank 0 waits `timeout` seconds for the others, and they as long for rank 0 and then for what it found.

    Raises:
        UserError: ranks did not come, one came twice, or they are not alike in what they must be.
        SystemExit: 2, when rank 0 has found and said so.
    """
    if store.add(f"seats/{place.rank}", 1) > 1:
        hint = f"a second process (on {facts.host}) has this rank; give each its own (--machine_rank, --node_rank)"
        raise UserError("RANK", place.rank, hint)
    store.set(f"facts/{place.rank}", json.dumps(asdict(facts)))
    if place.rank == 0:
        try:
            found = _wait_for_all(store, place.world_size, timeout)
            check_alike(found)
        except UserError as error:
            store.set("arrivals", json.dumps(error.mistakes))
            wait_until(lambda: store.add("heard", 0) >= _count_arrived(store, place.world_size) - 1, 2)
            raise
        store.set("arrivals", "[]")
        return found
    if not wait_until(lambda: store.check(["facts/0"]), timeout):
        raise UserError("rank", 0, f"did not arrive within {timeout:g} s; rank {place.rank} ({facts.host}) is here")
    if not wait_until(lambda: store.check(["arrivals"]), timeout + AFTERMATH):
        raise UserError("rank", 0, f"arrived, but fell silent; rank {place.rank} ({facts.host}) is here")
    mistakes = json.loads(store.get("arrivals"))
    store.add("heard", 1)
    if mistakes:
        sys.exit(2)
    return _read_facts(store, range(place.world_size))


def _wait_for_all(store: Store, world_size: int, timeout: float) -> list[NodeInfo]:
    keys = [f"facts/{rank}" for rank in range(world_size)]
    if not wait_until(lambda: store.check(keys), timeout):
        here = [rank for rank in range(world_size) if store.check([f"facts/{rank}"])]
        missing = [rank for rank in range(world_size) if rank not in here]
        arrived = by_value(_read_facts(store, here), "host")
        hint = f"did not arrive within {timeout:g} s (arrived: {arrived}); each needs the same MASTER_ADDR and "
        hint += "MASTER_PORT, and its machine its own --machine_rank or --node_rank"
        raise UserError("rank" if len(missing) == 1 else "ranks", format_ranks(missing), hint)
    return _read_facts(store, range(world_size))


def _count_arrived(store: Store, world_size: int) -> int:
    return sum(store.check([f"facts/{rank}"]) for rank in range(world_size))


def _read_facts(store: Store, ranks: range | list[int]) -> list[NodeInfo]:
    return [NodeInfo(**json.loads(text)) for text in store.multi_get([f"facts/{rank}" for rank in ranks])]


def check_alike(found: list[NodeInfo]) -> None:
    """Raises: UserError naming every fact in which ranks differ and must not, with the ranks and their hosts."""
    mistakes = []
    for name in SAME_EVERYWHERE:
        if len({getattr(facts, name) for facts in found}) > 1:
            mistakes += UserError(name, by_value(found, name), "must be the same on all ranks").mistakes
    if mistakes:
        raise UserError.join(mistakes)


def by_value(found: list[NodeInfo], name: str) -> str:
    """Like `2.13.0 on ranks 0-7 (host a), 2.11.0 on rank 8 (host b)`."""
    groups: dict[object, list[NodeInfo]] = defaultdict(list)
    for facts in found:
        groups[getattr(facts, name)].append(facts)
    parts = []
    for value, members in groups.items():
        hosts = "" if name == "host" else f" ({', '.join(dict.fromkeys(facts.host for facts in members))})"
        ranks = [facts.rank for facts in members]
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
