"""Machines for the tests: network namespaces joined by a cable, each with a name, processes and a folder of its own."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import BIN, ROOT, environment

WIRE = "wire0"
"""The interface at each end of the cable."""


class Machine:
    """A machine: what runs on it sees its own network, host name, /etc/hosts and processes, and starts in its folder.

    Args:
        number: from 0 on; its address is 10.0.0.(number + 1).
    """

    def __init__(self, number: int, folder: Path):
        self.name, self.address = f"node-{'ab'[number]}", f"10.0.0.{number + 1}"
        self.netns = f"gpt2-{os.getpid()}-{self.name}"
        self.folder = folder / self.name
        self.hosts = folder / f"{self.name}.hosts"
        self.started: list[subprocess.Popen] = []
        self.folder.mkdir()
        for name in ("scripts", "configs"):
            (self.folder / name).symlink_to(ROOT / name)

    def start(self, command: str, **env: str) -> subprocess.Popen:
        """What a person types into a shell there; it ends, with all that it has started, when this process is killed.
        Its output is in the file `output`."""
        shell = f"mount --bind {self.hosts} /etc/hosts && hostname {self.name} && {command}"
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        env = environment(PATH=path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | env
        new = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with self.output.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.netns, *new, "sh", "-c", shell],
                cwd=self.folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self.started.append(process)
        return process

    @property
    def output(self) -> Path:
        return self.folder / "output"

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def errors(self) -> list[str]:
        """The `error:` lines of what was started last."""
        return [line for line in self.said.splitlines() if line.startswith("error: ")]

    def ranks(self) -> list[psutil.Process]:
        """The training processes that its launcher has started."""
        if not self.started or self.started[-1].poll() is not None:
            return []
        launchers = psutil.Process(self.started[-1].pid).children(recursive=True)
        return [process for process in launchers if process.cmdline()[1:3] == ["-u", "scripts/train_gpt2.py"]]

    def ip(self, command: str) -> None:
        subprocess.run(["ip", "-n", self.netns, *command.split()], check=True)

    def exec(self, command: str) -> None:
        subprocess.run(["ip", "netns", "exec", self.netns, *command.split()], check=True)

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines and the cable between them, gone at the end with all that runs there."""
    if os.getuid() != 0:
        pytest.skip("network namespaces are made by root alone")
    machines = Machine(0, folder), Machine(1, folder)
    try:
        make = [f"netns add {machine.netns}" for machine in machines]
        first, second = [machine.netns for machine in machines]
        make += [f"link add {WIRE} netns {first} type veth peer name {WIRE} netns {second}"]
        for machine in machines:
            make += [f"-n {machine.netns} addr add {machine.address}/24 dev {WIRE}"]
            make += [f"-n {machine.netns} link set {interface} up" for interface in (WIRE, "lo")]
            names = "".join(f"{other.address} {other.name}\n" for other in machines)
            machine.hosts.write_text(f"127.0.0.1 localhost\n{names}")
        for command in make:
            try:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, text=True)
            except OSError as error:
                pytest.skip(f"no command `ip` (of the package iproute2): {error}")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"network namespaces cannot be made here: {error.stderr}")
        yield machines
    finally:
        for machine in machines:
            machine.end()
            subprocess.run(["ip", "netns", "del", machine.netns], check=False, capture_output=True)


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
