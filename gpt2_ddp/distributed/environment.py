"""The environment of this process: its launcher, its rank, exit codes, usable CPU cores and memory.
No torch."""

import math
import os
import re
from itertools import pairwise
from pathlib import Path

from gpt2_ddp.errors import UserError

DIVERGED = 3
STOPPED = 75
"""Exit codes of a run: diverged, which the same command would repeat; stopped early with a
checkpoint (EX_TEMPFAIL)."""
# environment variable: the file of exit codes that cloud/launch.sh reads
EXIT_CODES = "GPT2_DDP_EXIT_CODES"
ROOT = Path("/")  # folder of Linux's `proc` and `sys`
# variables without which no ranks can connect
RANK_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OTHER_RANK_NAMES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
# processes that mpirun started
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
NUMBERS = (
    *("WORLD_SIZE", "RANK", *OTHER_RANK_NAMES, *MPI_SIZES),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
)
"""Variables that Accelerate reads as numbers, before ranks connect."""


def launcher_number(name: str) -> int:
    """The number that a launcher's environment variable holds, of PET_NNODES' range MIN:MAX the
    least; 1 if unset. Raises UserError if it is not a number."""
    value = os.environ.get(name, "1")
    least = value.partition(":")[0] if name == "PET_NNODES" else value
    if not least.isdecimal():
        raise UserError(name, value, f"is not a launcher's number; `unset {name}`, or correct it")
    return int(least)


def world_size() -> int:
    """Number of processes that the launcher started; 1 without a launcher. They may not be
    connected yet. Raises UserError as `launcher_number`, also for the numbers that torch reads."""
    size, *_ = map(launcher_number, ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"))
    return size


def check_launcher() -> None:
    """Checks the variables that describe this process as a rank, all together. They may be left
    over in a shell.

    Raises:
        UserError: a number is none. Or variables are missing, without which the rank could not
            connect, or would wait for ever. Or there is no such rank. Or mpirun started several
            processes, which would not connect.
    """
    for name in NUMBERS:
        launcher_number(name)
    sizes = [
        launcher_number(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    ]
    if max(sizes) > 1 or {"RANK", "LOCAL_RANK"} & os.environ.keys():
        _check_rank(sizes[0])
        return
    for name in MPI_SIZES:
        size = launcher_number(name)
        if size > 1:
            left_over = f"If left over in this shell: `unset {name}`"
            started = "started by mpirun: use torchrun or `accelerate launch` instead"
            raise UserError(name, size, f"starts no ranks here. {left_over}; {started}")


def _check_rank(world: int) -> None:
    """Raises: UserError unless the variables describe one of `world` ranks, which can connect."""
    alone = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
    if alone == {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": None}:
        return  # a platform describes its only process, which connects to nobody
    missing = [name for name in RANK_NAMES if not os.environ.get(name, "").strip()]
    if missing:
        given = [name for name in (*RANK_NAMES, *OTHER_RANK_NAMES) if os.environ.get(name)]
        values = ", ".join(os.environ[name] for name in given)
        problem = f"describe a rank without {', '.join(missing)}, which launchers set, too"
        hint = f"If they are left over in this shell: `unset {' '.join(given)}`"
        raise UserError(", ".join(given), values, f"{problem}. {hint}")
    port = launcher_number("MASTER_PORT")
    if not 0 < port < 2**16:
        raise UserError("MASTER_PORT", port, f"is not a port; use 1 to {2**16 - 1}")
    rank = launcher_number("RANK")
    if rank >= world:
        hint = f"WORLD_SIZE is {world}: ranks are 0 to {world - 1}; correct or unset both"
        raise UserError("RANK", rank, hint)


def processes_here() -> int:
    """Number of processes that the launcher started on this machine; 1 if it does not say."""
    return launcher_number("LOCAL_WORLD_SIZE")


def under_launcher() -> bool:
    """Whether `accelerate launch` or torchrun started this process; both treat any non-zero exit
    code as a crash."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_DYNAMO_MODE" in os.environ


def machines() -> int:
    """Number of machines, each with a launcher of its own; 1 without a launcher."""
    return launcher_number("GROUP_WORLD_SIZE")


def elastic_nodes() -> str:
    """torchrun's `--nnodes MIN:MAX`, if it restarts the ranks with whatever machines are there;
    empty otherwise."""
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return ""
    nodes = launcher_option("nnodes")
    least, _, most = nodes.partition(":")
    return nodes if most not in ("", least) else ""


def launcher_option(name: str) -> str:
    """An option of the launcher that is this process's parent, from its command line or torchrun's
    PET_NAME; empty if unset. A `.` in the name is any character: Accelerate accepts `-` and `_`."""
    words = launcher_command()
    for word, following in pairwise([*words, ""]):
        flag, is_joined, value = word.partition("=")
        if re.fullmatch(f"--{name}", flag):
            return value if is_joined else following
    return os.environ.get(f"PET_{name.upper()}", "")


def launcher_command() -> list[str]:
    """The command line of this process's parent, in words; empty without one."""
    import psutil  # noqa: PLC0415  --help does not need it

    parent = psutil.Process().parent()
    return parent.cmdline() if parent else []


def exit_code(outcome: str) -> int:
    """Exit code of a run: 3 if `diverged`, 75 if `stopped` without a launcher, else 0. Records the
    code without one."""
    code = record_exit({"diverged": DIVERGED, "stopped": STOPPED}.get(outcome, 0))
    return 0 if code == STOPPED and under_launcher() else code


def record_exit(code: int) -> int:
    """Appends `code` to the file of cloud/launch.sh, if any: launchers end with other codes.
    Returns `code`."""
    if file := os.environ.get(EXIT_CODES):
        with open(file, "a") as codes:
            codes.write(f"{code}\n")
    return code


def stop_code() -> int:
    """Exit code of a process stopped by a signal; 75 for one of several ranks, so that the launcher
    ends the others."""
    code = exit_code("stopped")
    return STOPPED if world_size() > 1 else code


def usable_cores(*, hyperthreads: bool = False) -> int:
    """Number of cores that this process may keep busy, at least 1. It is the lesser of two limits:
    the affinity mask (taskset, Slurm, docker --cpuset-cpus), and the control groups' CPU quota
    (docker --cpus, Kubernetes, CPUQuota).

    `hyperthreads` count as cores for text and bytes; they do not speed up matrix products."""
    import psutil  # noqa: PLC0415  --help does not need it

    if hasattr(os, "sched_getaffinity"):
        mask = os.sched_getaffinity(0)
    else:  # macOS
        mask = set(range(os.cpu_count() or 1))
    cores = len(mask)
    if not hyperthreads:
        folder = ROOT / "sys/devices/system/cpu"
        # the hyperthreads of a core have the same list
        siblings = {
            _read(folder / f"cpu{thread}/topology/core_cpus_list") or str(thread) for thread in mask
        }
        cores = min(len(siblings), psutil.cpu_count(logical=False) or cores)
    return max(int(min(cores, _quota())), 1)


def spare_core(device: str, threads: int) -> bool:
    """Whether training leaves a core of this machine idle, with so many CPU `threads` per process.
    On an accelerator (`device` is not cpu), a process keeps one core busy."""
    return processes_here() * (threads if device == "cpu" else 1) < usable_cores()


def free_memory() -> int:
    """Bytes of memory that this process may still take. It is the least of the machine's free
    memory and of what the limits of its control groups leave (docker --memory, Kubernetes, Slurm,
    MemoryMax). Cached files count as free."""
    import psutil  # noqa: PLC0415  --help does not need it

    free = psutil.virtual_memory().available
    for folder in _control_groups():
        limits = [_read(folder / name) for name in ("memory.max", "memory.high")]
        stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
        used = int(_read(folder / "memory.current") or 0)
        used -= sum(int(stat.get(kind, 0)) for kind in ("active_file", "inactive_file"))
        free = min([free, *(int(limit) - used for limit in limits if limit.isdigit())])
    return max(free, 0)


def _quota() -> float:
    """CPU quota of this process's control groups, in cores; infinite without a limit."""
    limits = [_read(folder / "cpu.max").partition(" ") for folder in _control_groups()]
    return min(
        [int(time) / int(period) for time, _, period in limits if time.isdigit()], default=math.inf
    )


def _control_groups() -> list[Path]:
    """Folders of this process's control group (version 2) and of every group above."""
    mount = ROOT / "sys/fs/cgroup"
    line = re.search("^0::/(.*)", _read(ROOT / "proc/self/cgroup"), re.MULTILINE)
    # in a container it may be absent: there, the mount is the group itself
    group = Path(line[1] if line else "")
    return [mount / folder for folder in (group, *group.parents)]


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
