"""The check of new machines: connections, equal versions, correctness and speed of the all-reduce.

Ranks find each other in the key-value store at MASTER_ADDR and MASTER_PORT, before there is a
process group, which could hang. Every wait is bounded, and its error names the ranks that are
missing. torch's own store retries for twice its timeout, prints its stack in C++ each time, and
reports a timeout whatever the reason. So plain sockets try first.
"""

import hashlib
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.cuda.nccl
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.distributed_c10d import PrefixStore, Store

from gpt2_ddp.config.tools import CheckClusterConfig
from gpt2_ddp.distributed.environment import world_size
from gpt2_ddp.distributed.launch import USE_TORCHRUN, build_accelerator, pick_device
from gpt2_ddp.distributed.peers import PeerWatchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.output import text_table

AFTERMATH = 5.0  # seconds that a failed rank 0 serves the store for ranks that still wait
Facts = dict[str, Any]  # facts about a rank and its machine (`gather_facts`)
SAME_EVERYWHERE = (
    "world_size",
    "device_type",
    "python",
    "torch",
    "accelerate",
    "gpt2_ddp",
    "cuda",
    "nccl",
)
# of a timed all-reduce, in fp32
BYTES = 2**26
REPEATS = 9


def check_cluster(config: CheckClusterConfig) -> None:
    """Checks this process's world; rank 0 prints the results. Raises UserError for ranks that do
    not connect, differ or sum wrongly. If a rank dies or hangs later, all end with an `error:` line
    and exit code 2."""
    if world_size() == 1:
        build_accelerator(config.device, "no")  # raises where more were asked for
        print(f"note: only one process, so there is nothing to check; {USE_TORCHRUN.format(n=2)}")
        return
    rank = int(os.environ["RANK"])
    try:
        store = connect(rank, config.timeout_seconds)
        facts = gather_facts(rank, pick_device(config.device))
        ranks = rendezvous(store, facts, config.timeout_seconds)
    except UserError as error:
        # run_command prints on rank 0 only, which may be the missing one
        if rank and not error.on_every_rank:
            print(f"error: {error}", file=sys.stderr)
            error.is_printed = True
        raise
    except dist.DistError as error:  # the store has ended with rank 0, which has printed why
        raise UserError("rank", 0, "ended early; see its output") from error
    measured = _measure(config, store, ranks, rank)
    if rank == 0:
        shown = ("rank", "host", "device", "python", "torch", "accelerate", "cuda", "nccl")
        print(text_table([shown, *([str(facts[name]) for name in shown] for facts in ranks)]))
        seconds = max(seconds for seconds, _ in measured)
        n = len(ranks)
        bandwidth = BYTES / seconds / 1e9 * 2 * (n - 1) / n  # as nccl-tests defines it
        print(f"\nall-reduce of {BYTES:,} bytes: bus bandwidth {bandwidth:.4g} GB/s")
    if wrong := [number for number, (_, is_wrong) in enumerate(measured) if is_wrong]:
        raise UserError("all-reduce", f"ranks {wrong}", "wrong sums")


def connect(rank: int, timeout: float) -> Store:
    """The store of this world: torchrun's own, or else one that rank 0 serves. Raises:
    UserError."""
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if serves:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            hint = f"rank 0 cannot open this port ({error.strerror})"
            raise UserError("MASTER_PORT", port, hint) from error
    else:
        _await_answer(address, port, timeout)
    # the process group's rendezvous will share the server
    share = {"wait_for_workers": False, "multi_tenant": True}
    host = "localhost" if serves else address
    store = dist.TCPStore(host, port, is_master=serves, timeout=timedelta(seconds=timeout), **share)  # pyright: ignore[reportPrivateImportUsage]
    if serves:
        # the other ranks connect to this address, and so will the process group
        _await_answer(address, port, timeout)
    return PrefixStore(f"check_cluster/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _await_answer(address: str, port: int, timeout: float) -> None:
    """Waits until the address accepts a connection. Raises: UserError with the reason."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((address, port), max(left, 0.1)).close()
        except OSError as error:
            if left <= 0.1:
                here = f"rank {os.environ['RANK']} on {socket.gethostname()}"
                reason = error.strerror or error
                hint = f"{here} cannot connect to it within {timeout:g} s ({reason})"
                raise UserError("MASTER_ADDR", f"{address}:{port}", hint) from error
        time.sleep(0.1)  # the name may be resolvable, or rank 0 start, a moment later


def gather_facts(rank: int, device: torch.device) -> Facts:
    """The facts about this process, which uses `device`."""
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.rglob("*.py")))
    on_gpu = device.type == "cuda"
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "device_type": device.type,
        "world_size": world_size(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "gpt2_ddp": hashlib.sha256(sources).hexdigest()[:12],  # of this package's code
        "cuda": torch.version.cuda or "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "-",
    }


def rendezvous(store: Store, facts: Facts, timeout: float) -> list[Facts]:
    """Waits `timeout` seconds until all ranks have connected; returns their facts by rank. Raises
    UserError if ranks are missing, two have the same rank, or they differ in SAME_EVERYWHERE."""
    rank = facts["rank"]
    keys = [f"facts/{number}" for number in range(facts["world_size"])]
    if store.add(f"seats/{rank}", 1) > 1:
        raise UserError("RANK", rank, f"a second process (on {facts['host']}) has this rank")
    store.set(keys[rank], json.dumps(facts))
    deadline = time.monotonic() + timeout
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
    missing = [number for number, key in enumerate(keys) if not store.check([key])]
    ranks = [json.loads(store.get(key)) for number, key in enumerate(keys) if number not in missing]
    mistakes = [mistake for name in SAME_EVERYWHERE for mistake in _difference(ranks, name)]
    if missing:
        hint = f"did not connect within {timeout:g} s (connected: {_names(ranks)})"
        mistakes = UserError("ranks", ", ".join(map(str, missing)), hint).mistakes
    if mistakes:
        error = UserError.join(mistakes)
        error.on_every_rank = 0 not in missing
        time.sleep(AFTERMATH if rank == 0 else 0)
        raise error
    return ranks


def _names(ranks: Iterable[Facts]) -> str:
    return ", ".join(f"{facts['rank']} ({facts['host']})" for facts in ranks)


def _difference(ranks: list[Facts], name: str) -> list[str]:
    """The error of a fact that differs: each value, and the ranks that have it."""
    values = dict.fromkeys(facts[name] for facts in ranks)
    if len(values) <= 1:
        return []
    texts = [
        f"{value} on ranks {_names(facts for facts in ranks if facts[name] == value)}"
        for value in values
    ]
    return UserError(name, "; ".join(texts), "must be equal on all ranks").mistakes


def _measure(
    config: CheckClusterConfig, store: Store, ranks: list[Facts], rank: int
) -> list[tuple[float, bool]]:
    """All-reduces on all ranks, with a watchdog; returns what `time_all_reduce` found on each
    rank."""
    watchdog = PeerWatchdog(rank, len(ranks), config.timeout_seconds, store, exit_code=2)
    watchdog.heartbeat("connecting to the other ranks")
    # the watchdog's error comes first: it names ranks
    patience = timedelta(seconds=2 * config.timeout_seconds + 60)
    try:
        accelerator = build_accelerator(config.device, "no", timeout=patience)
        watchdog.heartbeat(f"all-reduce of {BYTES:,} bytes")
        mine = time_all_reduce(accelerator, watchdog.progress)
        watchdog.heartbeat("comparing results")
        everyone = gather_object([mine])
    except RuntimeError as error:  # the only class that lost connections have in common
        watchdog.failed(error)
        # until the watchdog ends all processes, with one error
        time.sleep(patience.total_seconds())
        raise
    watchdog.close()
    dist.destroy_process_group()
    return everyone


def time_all_reduce(accelerator: Accelerator, progress: Callable[[], None]) -> tuple[float, bool]:
    """The median seconds of all-reduces of `BYTES` on this rank, and whether the first one had a
    wrong sum. Calls `progress` before each. The numbers are whole and their sums below 2^24, so
    fp32 is exact in any order of sums."""
    device = accelerator.device
    factors = [rank % 8 + 1 for rank in range(accelerator.num_processes)]
    index = torch.arange(BYTES // 4, device=device) % 128
    value = (index * factors[accelerator.process_index]).float()
    expected = (index * sum(factors)).float()
    dist.all_reduce(value)
    is_wrong = not torch.equal(value, expected)
    value.zero_()
    seconds = []
    for _ in range(REPEATS):
        progress()
        start = read_clock(device)
        dist.all_reduce(value)
        seconds.append(read_clock(device) - start)
    return statistics.median(seconds), is_wrong


def read_clock(device: torch.device) -> float:
    """Wall seconds, once the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
