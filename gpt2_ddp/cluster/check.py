"""The check of new machines: all ranks arrive, agree in versions and all-reduce correctly; and how fast."""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gpt2_ddp.cluster.rendezvous import Facts, RankEnv, connect, format_ranks, gather_facts, rendezvous
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.plan import GPT2_IDS
from gpt2_ddp.config.tools import CheckClusterConfig, check_writable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST, read_manifest
from gpt2_ddp.distributed.environment import is_main_process, world_size
from gpt2_ddp.distributed.launch import USE_TORCHRUN, build_accelerator, pick_device
from gpt2_ddp.distributed.watchdog import Verdict, Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output import text_table

WARM_UP = 3
"""All-reduces of a size before it is timed: the first opens connections."""
BACKWARD = 2 / 3
"""Share of the backward pass in a step's arithmetic: two matrix products for each of the forward pass."""
SLOW = 4
"""A network that is as many times slower than its interface gets a note: the protocol, other traffic and ranks that
share it take some."""


def check_cluster(config: CheckClusterConfig) -> None:
    """Checks this process's world; rank 0 prints and saves the results.

    Raises:
        UserError: for ranks that do not arrive, differ in versions, or sum wrongly; on rank 0, for an `output` that
            cannot be written. A rank that dies or hangs later ends all processes with an `error:` line and exit code 2.
    """
    if config.output and is_main_process():
        check_writable(config.output)
    training = load(TrainingConfig, ["--config", config.training]) if config.training else None
    if world_size() == 1:
        accelerator = build_accelerator(config.device, "no")  # raises where more were asked for
        alone = RankEnv(rank=0, local_rank=0, world_size=1, address="127.0.0.1", port=1)
        facts = gather_facts(alone, accelerator.device)
        _report(config, [facts], [], [f"only one process: nothing to connect; {USE_TORCHRUN.format(n=2)}"])
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
        _report(config, ranks, results, [*_notes(ranks), *network_notes(config, training, ranks, results)])
    wrong = [f"{row['bytes']} bytes on ranks {row['wrong_ranks']}" for row in results if row["wrong_ranks"]]
    if wrong:
        raise UserError("all-reduce", "; ".join(wrong), "wrong sums: suspect the network or the device of these ranks")


def _measure(config: CheckClusterConfig, store: Store, ranks: list[Facts], rank: int) -> list[dict]:
    """All-reduces every size, with a watchdog; returns the rows of the table, the same on all ranks."""
    watchdog = Watchdog(rank, len(ranks), config.timeout_seconds, store)
    watchdog.explain, watchdog.exit_code = partial(explain_verdict, ranks), 2
    watchdog.heartbeat("connecting to the other ranks")
    patience = timedelta(seconds=2 * config.timeout_seconds + 60)  # the watchdog's error comes first: it names ranks
    mine = []
    try:
        accelerator = build_accelerator(config.device, "no", timeout=patience)
        for size in config.sizes:
            watchdog.heartbeat(f"all-reduce of {spell_bytes(size)}")
            mine.append(time_all_reduce(size, config.repeats, rank, len(ranks), accelerator.device, watchdog.progress))
        watchdog.heartbeat("comparing results")
        store.set(f"results/{rank}", json.dumps(mine))
        keys = [f"results/{other}" for other in range(len(ranks))]
        store.wait(keys, patience)
        everyone = [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as error:  # the only class that lost connections have in common
        watchdog.failed(error)
        time.sleep(patience.total_seconds())  # until the watchdog ends all processes, with one error
        raise
    watchdog.close()
    dist.destroy_process_group()
    return [_row(size, [found[i] for found in everyone]) for i, size in enumerate(config.sizes)]


def explain_verdict(ranks: list[Facts], verdict: Verdict) -> str:
    """The hint for ranks that live but do not finish a collective, without their stacks."""
    lines = [line for line in verdict.reason.splitlines() if line[:1] != " "]
    if not verdict.living:
        return "\n".join(lines)
    ways = ", ".join(dict.fromkeys(f"{facts['host']}: {facts['interface']} {facts['ip']}" for facts in ranks))
    return (
        f"ranks = {format_ranks(verdict.living)}: alive like all others, but not connected ({lines[0]}); open all "
        "ports between the machines, and name the interface that joins them in GLOO_SOCKET_IFNAME and "
        f"NCCL_SOCKET_IFNAME (routes to rank 0: {ways})"
    )


def time_all_reduce(
    size: int, repeats: int, rank: int, world_size: int, device: torch.device, progress: Callable[[], None]
) -> tuple[float, int]:
    """Sums `size` bytes of fp32 over all ranks.

    The numbers are whole and their sums below 2^24, so that fp32 is exact in any order of summation.

    Args:
        progress: called between two all-reduces.

    Returns:
        (median seconds of `repeats` all-reduces on this rank, elements that were wrong in the first)
    """
    index = torch.arange(size // 4, device=device) % 128
    value = (index * (rank % 8 + 1)).float()
    expected = (index * sum(other % 8 + 1 for other in range(world_size))).float()
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
    seconds = max(median for median, _ in measured)
    n = len(measured)
    algorithm = size / seconds / 1e9
    return {
        "bytes": size,
        "median_us": round(seconds * 1e6, 1),
        "algorithm_gb_per_s": round(algorithm, 4),
        "bus_gb_per_s": round(algorithm * 2 * (n - 1) / n, 4),
        "wrong_ranks": [rank for rank, (_, wrong) in enumerate(measured) if wrong],
    }


def _notes(ranks: list[Facts]) -> Iterator[str]:
    """Warnings about devices, host names and routes."""
    hosts = {facts["host"] for facts in ranks}
    if len({facts["device"] for facts in ranks}) > 1:
        yield "devices differ: the slowest sets the pace of every step"
    deceived = sorted({facts["host"] for facts in ranks if facts["host_ip"].startswith("127.")})
    if len(hosts) > 1 and deceived and "GLOO_SOCKET_IFNAME" not in os.environ:
        yield f"the host name of {', '.join(deceived)} resolves to a loopback address; set GLOO_SOCKET_IFNAME"
    if len(hosts) > 1 and any(facts["interface"] == "lo" for facts in ranks if facts["host"] != ranks[0]["host"]):
        yield "several hosts, yet some reach rank 0 over loopback: are they containers of one machine?"


def gradient_bytes(config: TrainingConfig) -> int:
    """Bytes that DDP all-reduces in a step: 4 for each parameter, in any precision of the model."""
    data = Path(config.data.paths[0])
    ids = read_manifest(data).vocab_size if (data / MANIFEST).is_file() else GPT2_IDS
    with torch.device("meta"):
        return 4 * sum(parameter.numel() for parameter in GPT(config.model, ids, eot=0).parameters())


def share_of_a_step(communication: float, computation: float) -> tuple[float, float]:
    """The least and the largest share of a step that all-reducing adds: gradients travel during the whole backward
    pass, or after it.

    Args:
        communication: seconds of the all-reduce of all gradients alone.
        computation: seconds of the forward and backward passes alone.
    """
    least = max(communication - BACKWARD * computation, 0)
    return least / (computation + least), communication / (computation + communication)


def network_notes(
    config: CheckClusterConfig, training: TrainingConfig | None, ranks: list[Facts], rows: list[dict]
) -> Iterator[str]:
    """What the measured speed means for `training`, and beside the speed of the network's interface.

    Args:
        rows: of the table.
    """
    largest = max(rows, key=lambda row: row["bytes"])
    if training:
        size = gradient_bytes(training)
        seconds = size / largest["algorithm_gb_per_s"] / 1e9
        line = f"{config.training}: {size / 1e6:,.0f} MB of gradients take {seconds:.3g} s of each step on this network"
        if config.step_seconds:
            least, most = share_of_a_step(seconds, config.step_seconds)
            line += f": {least:.0%} of it where they travel during the backward pass, {most:.0%} at most"
        yield line
    speeds = {facts["host"]: facts["link_gb_per_s"] for facts in ranks if facts["link_gb_per_s"]}
    if len({facts["host"] for facts in ranks}) > 1 and speeds and ranks[0]["device_type"] == "cpu":
        host, bus = min(speeds, key=speeds.__getitem__), largest["bus_gb_per_s"]
        if speeds[host] / bus >= SLOW:
            line = f"the network is {speeds[host] / bus:.0f} times slower than its interface says ({bus:.3g} of "
            line += f"{speeds[host]:.3g} GB/s on {host}): a slower switch or cable between, a tunnel, or others"
            yield f"{line} who use it"


def _report(config: CheckClusterConfig, ranks: list[Facts], results: list[dict], notes: list[str]) -> None:
    shown = ("rank", "host", "device", "interface", "ip", "python", "torch", "accelerate", "cuda", "nccl")
    print(text_table([shown, *([str(facts[name]) for name in shown] for facts in ranks)]))
    if results:
        backend = "nccl" if ranks[0]["device_type"] == "cuda" else "gloo"
        heads = ("all-reduce", "median us", "algorithm GB/s", "bus GB/s", "sums")
        cells = []
        for row in results:
            figures = f"{row['median_us']:.1f}", f"{row['algorithm_gb_per_s']:.3f}", f"{row['bus_gb_per_s']:.3f}"
            sums = f"wrong on {row['wrong_ranks']}" if row["wrong_ranks"] else "right"
            cells.append((spell_bytes(row["bytes"]), *figures, sums))
        print(f"\n{text_table([heads, *cells])}")
        print(f"\n{len(ranks)} processes, {backend}; slowest rank's median; bus bandwidth = algorithm x 2(n-1)/n")
    for note in notes:
        print(f"note: {note}")
    if config.output:
        found = {"processes": len(ranks), "checked_from": socket.gethostname(), "ranks": ranks}
        Path(config.output).write_text(json.dumps({**found, "all_reduce": results, "notes": notes}, indent=1) + "\n")


def spell_bytes(size: int) -> str:
    """Like `64.0 MiB`; whole below 1 KiB."""
    power = min((size.bit_length() - 1) // 10, 3)
    return f"{size / 1024**power:.{min(power, 1)}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
