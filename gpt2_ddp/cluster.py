"""The check of new machines: connections, equal versions, correctness and speed of the all-reduce.

Ranks find each other in the key-value store at MASTER_ADDR and MASTER_PORT, before there is a process group, which
could hang. Every wait is bounded, and its error names the ranks that are missing. torch's own store retries for twice
its timeout, prints its stack in C++ each time, and reports a timeout whatever the reason. So plain sockets try first.
"""

import hashlib
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import accelerate
import torch
import torch.cuda.nccl
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.config.tools import CheckClusterConfig, check_writable
from gpt2_ddp.distributed.environment import is_main_process, world_size
from gpt2_ddp.distributed.launch import USE_TORCHRUN, build_accelerator, pick_device
from gpt2_ddp.distributed.watchdog import Verdict, Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.output import text_table

AFTERMATH = 5.0  # seconds that other ranks wait longer than rank 0, for its result
Facts = dict[str, Any]  # facts about a rank and its machine (`gather_facts`)
SAME_EVERYWHERE = ("world_size", "device_type", "python", "torch", "accelerate", "gpt2_ddp", "cuda", "nccl")
WARM_UP = 3  # all-reduces of a size before it is timed: the first opens connections


def check_cluster(config: CheckClusterConfig) -> None:
    """Checks this process's world; rank 0 prints and saves the results. Raises UserError for ranks that do not
    connect, differ or sum wrongly. If a rank dies or hangs later, all end with an `error:` line and exit code 2."""
    if config.output and is_main_process():
        check_writable(config.output)
    if world_size() == 1:
        build_accelerator(config.device, "no")  # raises where more were asked for
        print(f"note: only one process, so there is nothing to check; {USE_TORCHRUN.format(n=2)}")
        return
    place = RankEnv.from_environment()
    try:
        store = connect(place, config.timeout_seconds)
        facts = gather_facts(place, pick_device(config.device))
        ranks = rendezvous(store, place, facts, config.timeout_seconds)
    except UserError as error:
        if place.rank:  # run_command prints on rank 0 only, which may be the missing one
            print(*(f"error: {mistake}" for mistake in error.mistakes), sep="\n", file=sys.stderr)
        raise
    results = _measure(config, store, ranks, place.rank)
    if place.rank == 0:
        _report(config, ranks, results)
    wrong = [f"{row['bytes']} bytes on ranks {row['wrong_ranks']}" for row in results if row["wrong_ranks"]]
    if wrong:
        raise UserError("all-reduce", "; ".join(wrong), "wrong sums")


class RankEnv(NamedTuple):
    """A process of the world, from its launcher's environment."""

    rank: int
    world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> "RankEnv":
        """Raises: UserError when WORLD_SIZE is set without the variables that belong to it."""
        env = os.environ
        if absent := [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]:
            raise UserError("WORLD_SIZE", env["WORLD_SIZE"], f"is set without {', '.join(absent)}")
        return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]))


def connect(place: RankEnv, timeout: float) -> Store:
    """The store of this world: torchrun's own, or else one that rank 0 serves. Raises: UserError."""
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        try:
            socket.create_server(("", place.port)).close()
        except OSError as error:
            raise UserError("MASTER_PORT", place.port, f"rank 0 cannot open this port ({error.strerror})") from error
    else:
        _await_answer(place, timeout)
    address = "localhost" if serves else place.address
    share = {"wait_for_workers": False, "multi_tenant": True}  # the process group's rendezvous will share the server
    store = TCPStore(address, place.port, is_master=serves, timeout=timedelta(seconds=timeout), **share)
    if serves:
        _await_answer(place, timeout)  # the other ranks connect to this address, and so will the process group
    return PrefixStore(f"check_cluster/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_answer(place: RankEnv, timeout: float) -> None:
    """Waits until the address accepts a connection. Raises: UserError with the reason."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((place.address, place.port), max(left, 0.1)).close()
        except OSError as error:
            if left <= 0.1:
                here = f"rank {place.rank} on {socket.gethostname()}"
                reason = f"{here} cannot connect to it within {timeout:g} s ({error.strerror or error})"
                raise UserError("MASTER_ADDR", f"{place.address}:{place.port}", reason) from error
        time.sleep(0.1)  # the name may be resolvable, or rank 0 start, a moment later


def gather_facts(place: RankEnv, device: torch.device) -> Facts:
    """The facts about this process, which uses `device`."""
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")))
    on_gpu = device.type == "cuda"
    return {
        "rank": place.rank,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "device_type": device.type,
        "ip": _own_ip(place),
        "world_size": place.world_size,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "gpt2_ddp": hashlib.sha256(sources).hexdigest()[:12],  # of this package's code
        "cuda": torch.version.cuda or "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "-",
    }


def _own_ip(place: RankEnv) -> str:
    """This machine's address on the route to rank 0."""
    family, kind, *_, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(address)  # of a datagram socket: sends nothing, picks the route
        return sock.getsockname()[0]


def rendezvous(store: Store, place: RankEnv, facts: Facts, timeout: float) -> list[Facts]:
    """Waits until all ranks have connected; returns their facts by rank. Rank 0 waits `timeout` seconds for the
    others. They wait as long for rank 0, and then for its result. Raises UserError if ranks are missing, two have the
    same rank, or they differ in SAME_EVERYWHERE; SystemExit with 2 on other ranks, as rank 0 prints the error."""
    here = f"rank {place.rank} on {facts['host']}"
    if store.add(f"seats/{place.rank}", 1) > 1:
        raise UserError("RANK", place.rank, f"a second process (on {facts['host']}) has this rank")
    store.set(f"facts/{place.rank}", json.dumps(facts))
    if place.rank == 0:
        try:
            found = _wait_for_all(store, place.world_size, timeout)
        except UserError as error:
            store.set("arrivals", json.dumps(error.mistakes))
            time.sleep(2)  # the store ends with this process, and the others read it often
            raise
        store.set("arrivals", "[]")
        return found
    if not wait_until(lambda: store.check(["arrivals"]), timeout + AFTERMATH):
        raise UserError("rank", 0, f"did not connect or finish within {timeout + AFTERMATH:g} s; {here} did")
    if json.loads(store.get("arrivals")):
        sys.exit(2)
    return _read_facts(store, range(place.world_size))


def _wait_for_all(store: Store, world_size: int, timeout: float) -> list[Facts]:
    """Raises: UserError for missing ranks, or for differing facts, and names all of them."""
    keys = [f"facts/{rank}" for rank in range(world_size)]
    if not wait_until(lambda: store.check(keys), timeout):
        here = [rank for rank in range(world_size) if store.check([f"facts/{rank}"])]
        missing = [str(rank) for rank in range(world_size) if rank not in here]
        arrived = by_value(_read_facts(store, here), "host")
        raise UserError("ranks", ", ".join(missing), f"did not connect within {timeout:g} s (connected: {arrived})")
    found = _read_facts(store, range(world_size))
    differing = [name for name in SAME_EVERYWHERE if len({facts[name] for facts in found}) > 1]
    if differing:
        errors = [UserError(name, by_value(found, name), "must be equal on all ranks") for name in differing]
        raise UserError.join([mistake for error in errors for mistake in error.mistakes])
    return found


def _read_facts(store: Store, ranks: range | list[int]) -> list[Facts]:
    return [json.loads(text) for text in store.multi_get([f"facts/{rank}" for rank in ranks])]


def by_value(found: list[Facts], name: str) -> str:
    """Like `2.13.0 on ranks 0, 1 (a), 2.11.0 on ranks 2, 3 (b)`."""
    parts = []
    for value in dict.fromkeys(facts[name] for facts in found):
        members = [facts for facts in found if facts[name] == value]
        hosts = ", ".join(dict.fromkeys(facts["host"] for facts in members))
        parts.append(f"{value} on ranks {', '.join(str(facts['rank']) for facts in members)} ({hosts})")
    return ", ".join(parts)


def wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Polls until the condition holds; False when `timeout` seconds did not suffice."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _measure(config: CheckClusterConfig, store: Store, ranks: list[Facts], rank: int) -> list[dict]:
    """All-reduces every size, with a watchdog; returns the rows of the table, the same on all ranks."""
    watchdog = Watchdog(rank, len(ranks), config.timeout_seconds, store)
    watchdog.end_with(explain_verdict, exit_code=2)
    watchdog.heartbeat("connecting to the other ranks")
    patience = timedelta(seconds=2 * config.timeout_seconds + 60)  # the watchdog's error comes first: it names ranks
    mine = []
    try:
        accelerator = build_accelerator(config.device, "no", timeout=patience)
        for size in config.sizes:
            watchdog.heartbeat(f"all-reduce of {size:,} bytes")
            mine.append(time_all_reduce(size, config.repeats, accelerator, watchdog.progress))
        watchdog.heartbeat("comparing results")
        everyone = gather_object([mine])
    except RuntimeError as error:  # the only class that lost connections have in common
        watchdog.failed(error)
        time.sleep(patience.total_seconds())  # until the watchdog ends all processes, with one error
        raise
    watchdog.close()
    dist.destroy_process_group()
    return [_row(size, [found[i] for found in everyone]) for i, size in enumerate(config.sizes)]


def explain_verdict(verdict: Verdict) -> str:
    """The ranks at fault, without their stacks."""
    alive = "; all are alive, but not connected" if verdict.living else ""
    return "\n".join(line for line in verdict.reason.splitlines() if line[:1] != " ") + alive


def time_all_reduce(
    size: int, repeats: int, accelerator: Accelerator, progress: Callable[[], None]
) -> tuple[float, int]:
    """Sums `size` bytes of fp32 over all ranks, and calls `progress` before each all-reduce. Returns the median seconds
    of `repeats` all-reduces on this rank, and the number of elements that were wrong in the first. The numbers are
    whole and their sums below 2^24, so fp32 is exact in any order of summation."""
    device, factors = accelerator.device, [rank % 8 + 1 for rank in range(accelerator.num_processes)]
    index = torch.arange(size // 4, device=device) % 128
    value, expected = (index * factors[accelerator.process_index]).float(), (index * sum(factors)).float()
    total = value.clone()
    dist.all_reduce(total)
    wrong = int((total != expected).sum().item())
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds, buffer = [], torch.zeros_like(value)
    for turn in range(WARM_UP + repeats):
        progress()
        synchronize()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        synchronize()
        if turn >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), wrong


def _row(size: int, measured: list[tuple[float, int]]) -> dict:
    """A size's row: the slowest rank's median; bandwidths as nccl-tests defines them, in 10^9 bytes per second."""
    seconds, n = max(median for median, _ in measured), len(measured)
    algorithm = size / seconds / 1e9
    rates = {"algorithm_gb_per_s": round(algorithm, 4), "bus_gb_per_s": round(algorithm * 2 * (n - 1) / n, 4)}
    wrong_ranks = [rank for rank, (_, wrong) in enumerate(measured) if wrong]
    return {"bytes": size, "median_us": round(seconds * 1e6, 1), **rates, "wrong_ranks": wrong_ranks}


def _report(config: CheckClusterConfig, ranks: list[Facts], results: list[dict]) -> None:
    shown = ("rank", "host", "device", "ip", "python", "torch", "accelerate", "cuda", "nccl")
    print(text_table([shown, *([str(facts[name]) for name in shown] for facts in ranks)]))
    backend = "nccl" if ranks[0]["device_type"] == "cuda" else "gloo"
    cells = [("all-reduce", "median us", "algorithm GB/s", "bus GB/s", "sums")]
    for row in results:
        figures = f"{row['median_us']:.1f}", f"{row['algorithm_gb_per_s']:.3f}", f"{row['bus_gb_per_s']:.3f}"
        sums = f"wrong on {row['wrong_ranks']}" if row["wrong_ranks"] else "right"
        cells.append((f"{row['bytes']:,} B", *figures, sums))
    print(f"\n{text_table(cells)}")
    print(f"\n{len(ranks)} processes, {backend}; slowest rank's median; bus bandwidth = algorithm x 2(n-1)/n")
    if config.output:
        found = {"processes": len(ranks), "checked_from": socket.gethostname(), "ranks": ranks, "all_reduce": results}
        Path(config.output).write_text(json.dumps(found, indent=1) + "\n")
