"""How many CPU cores this process may use: the one count for threads, workers and the comparison's notes. No torch."""

import os
from pathlib import Path

import psutil

ROOT = Path("/")
"""Where Linux's `proc` and `sys` are."""


def usable_cores(*, hyperthreads: bool = False) -> int:
    """Cores that this process may keep busy, at least 1.

    The least of what the affinity mask leaves (taskset, Slurm, docker --cpuset-cpus) and the whole cores' worth of
    time that its control groups grant (docker --cpus, Kubernetes, CPUQuota).

    Args:
        hyperthreads: whether those that share a core count as one each: they help text and bytes along, which wait for
            memory, but not matrix products, which keep a core's arithmetic busy.
    """
    mask = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = len(mask) if hyperthreads else min(_physical_cores(mask), psutil.cpu_count(logical=False) or len(mask))
    return max(int(min(cores, _quota())), 1)


def spare_core(device: str, threads: int, workers: int) -> bool:
    """Whether training leaves a core of this machine to something beside it.

    Args:
        device: that a process trains on: cpu, cuda or mps; on the latter it keeps one core busy.
        threads: of a process on the CPU. workers: of its loader.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return processes * ((threads if device == "cpu" else 1) + workers) < usable_cores()


def _physical_cores(mask: set[int]) -> int:
    """How many cores the hyperthreads of a mask belong to; each is its own where Linux does not say."""
    folder = ROOT / "sys/devices/system/cpu"
    return len({_read(folder / f"cpu{thread}/topology/core_cpus_list") or str(thread) for thread in mask})


def _quota() -> float:
    """Cores' worth of time that the control groups around this process grant it, v2 or v1; infinite without a limit."""
    quota = float("inf")
    for line in _read(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = ROOT / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.strip("/")  # in a container it may be absent: there, the mount is the group itself
        for folder in (group, *group.parents):  # every group above limits it too
            limit = _read(folder / "cpu.max") or " ".join(
                _read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")
            )
            time, _, period = limit.partition(" ")
            if time.isdigit():  # no limit is `max` in v2, -1 in v1
                quota = min(quota, int(time) / int(period))
            if folder == mount:
                break
    return quota


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
