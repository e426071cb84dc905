"""Which process this is, so that another one can tell later whether it still lives, and end it. No torch."""

import os
import signal
import socket
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process, anywhere.

    Args:
        host: its machine's name, for people.
        machine: this boot of the machine and the numbering of its processes; two containers may share a name. Empty
            where there is no /proc, and nothing can be told then.
        started: in clock ticks since the boot: a number may have gone to another process since.
    """

    host: str
    machine: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        """Whether it was started where this process runs."""
        return self.machine != "" and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether it has certainly ended; False when that cannot be told from here."""
        return self.is_here and _started(self.pid) != self.started

    def kill(self) -> None:
        """Ends it, if it runs here and still is the same process; that works on a stopped one, too."""
        if self.is_here and not self.is_gone and self.pid != os.getpid():
            os.kill(self.pid, signal.SIGKILL)


def this_process() -> Process:
    """The calling process."""
    return Process(socket.gethostname(), _machine(), os.getpid(), _started(os.getpid()))


@cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _started(pid: int) -> int:
    """0 for a process that is not there, or that has ended and only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may hold anything
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
