"""Processes: their identity on all machines, and children that end with their parent. No torch."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpt2_ddp.distributed.environment import STOPPED, machines
from gpt2_ddp.distributed.signals import Stopped, has_signal
from gpt2_ddp.distributed.streams import CLOSED, OutputLost
from gpt2_ddp.errors import UserError, is_main_process

if TYPE_CHECKING:
    import psutil

POLL_SECONDS = 0.5
CHILD = "GPT2_DDP_CHILD"  # environment variable of what `start_module` started
LAUNCHERS = (
    *("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_"),
    *("ACCELERATE_", "TORCHELASTIC_", "PET_"),
    *("OMPI_", "PMI_", "MPI_LOCAL", "MV2_"),
)
"""Prefixes of the environment variables by which launchers describe a rank."""


class Process(NamedTuple):
    """The identity of a process on any machine."""

    host: str  # name of the machine, for messages
    # boot id and PID namespace, since containers may share a name; empty without /proc
    machine: str
    pid: int
    started: int  # clock ticks since boot, since a PID is used again

    @property
    def is_here(self) -> bool:
        """Whether the process was started on this machine, in this PID namespace."""
        return self.machine != "" and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False on other machines."""
        return self.is_here and _started(self.pid) != self.started

    def kill(self) -> None:
        """Sends SIGKILL, unless the process is gone, is elsewhere, or is this one."""
        if self.is_here and not self.is_gone and self.pid != os.getpid():
            os.kill(self.pid, signal.SIGKILL)


def this_process() -> Process:
    return Process(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))


@cache
def _machine() -> str:
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot_id + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int:
    """Start time of a process; 0 if it is missing or a zombie."""
    try:
        # its name may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def main_process_here() -> "psutil.Process | None":
    """The main process (rank 0) of this rank's world, as a psutil.Process; None if it has ended,
    was started on another machine or by another launcher, or is this process."""
    if is_main_process():
        return None
    import psutil  # noqa: PLC0415  --help does not need it

    mine = {name: os.environ.get(name) for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    with suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with suppress(psutil.Error):  # it has ended
                theirs = process.environ()
                is_of_this_world = mine == {name: theirs.get(name) for name in mine}
                if theirs.get("RANK") == "0" and is_of_this_world:
                    return process
    return None


def wait_for_end(process: "psutil.Process", seconds: float) -> bool:
    """Waits for the end of a process, which is no child, for so many seconds at most. Returns
    whether it has ended."""
    import psutil  # noqa: PLC0415  --help does not need it

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False


def end_with_parent(number: int) -> None:
    """Sends this process signal `number` when its parent process ends, even by `kill -9`. One of
    several machines that lost its launcher without a signal is lost: its ranks are killed, and the
    other machines' launchers continue or end.

    Commands of a shell must not call this: `nohup python ... &` should outlive its shell. A thread
    waits for the end: PR_SET_PDEATHSIG would fire when the parent's *thread* ends that started this
    process, and exists on Linux only.
    """
    parent = multiprocessing.parent_process()
    launcher = os.getppid()

    def signal_at_end() -> None:
        if parent is not None:
            parent.join()  # also if it ended before
        else:
            while os.getppid() == launcher:
                time.sleep(POLL_SECONDS)
        is_lost = machines() > 1 and not has_signal()
        os.kill(os.getpid(), signal.SIGKILL if is_lost else number)

    threading.Thread(target=signal_at_end, name="end with parent", daemon=True).start()


def start_module(
    module: str,
    *arguments: str,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[str]:
    """Starts `python -m MODULE` in a process group of its own and without a rank. `gpt2_ddp` runs a
    script, whose name is the first argument. The working folder's modules are not imported. The
    streams are as for Popen."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)
    }
    environment |= {CHILD: "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-P", "-m", module, *arguments]
    # that of the child's streams
    encoding = os.environ.get("PYTHONIOENCODING", "").partition(":")[0] or None
    return subprocess.Popen(
        command,
        env=environment,
        process_group=0,
        text=True,
        encoding=encoding,
        errors="replace",
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def run_module(module: str, *arguments: str, stdout: int | None = None) -> None:
    """Runs `python -m MODULE`, as `start_module`. It ends with this process.

    Raises:
        UserError: the module's user errors (exit code 2).
        Stopped: the module was stopped.
        OutputLost: the module's standard output, which may be this process's, is closed.
        CalledProcessError: the module crashed, with a traceback on stderr.
    """
    mistakes: list[str] = []
    with start_module(module, *arguments, stdout=stdout, stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr
            for line in process.stderr:
                if line.startswith("error: "):
                    mistakes.append(line.removeprefix("error: ").rstrip("\n"))
                else:
                    print(line, end="", file=sys.stderr)
            code = process.wait()
        except BaseException:  # a signal to this process
            process.terminate()
            raise
    if code == 2 and mistakes:
        raise UserError.join(mistakes)
    if code == STOPPED:
        raise Stopped(f"a signal to {module} {arguments[0]}")
    if code == CLOSED:
        raise OutputLost("Broken pipe") from BrokenPipeError()
    if code:
        raise subprocess.CalledProcessError(code, process.args)
