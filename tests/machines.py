"""Machines for the tests: network namespaces on one switch,
each with a name, processes and a folder of its own."""

import os
import subprocess
from contextlib import contextmanager

import psutil
import pytest
from commands import BIN, ROOT, environment

WIRE = "wire0"
"""The interface of a machine's cable."""


class Machine:
    """A machine: what runs on it sees its own network, host name, /etc/hosts and processes, and
    starts in its folder.

    Args:
        number: from 0 on; its address is 10.0.0.(number + 1).
    """

    def __init__(self, number, folder):
        self.name = f"node-{'abc'[number]}"
        self.address = f"10.0.0.{number + 1}"
        self.netns = f"gpt2-{os.getpid()}-{self.name}"
        self.folder = folder / self.name
        self.hosts = folder / f"{self.name}.hosts"
        self.started = []
        self.folder.mkdir()
        for name in ("scripts", "configs"):
            (self.folder / name).symlink_to(ROOT / name)

    def start(self, command, **env):
        """What a person types into a shell there; it ends, with all that it has started, when this
        process is killed. Its output is in the file `output`."""
        shell = f"mount --bind {self.hosts} /etc/hosts && hostname {self.name} && {command}"
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        env = environment(PATH=path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1") | env
        new = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with self.output.open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.netns, *new, "sh", "-c", shell],
                cwd=self.folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    @property
    def output(self):
        return self.folder / "output"

    @property
    def said(self):
        return self.output.read_text()

    @property
    def errors(self):
        """The `error:` lines of what was started last."""
        return [line for line in self.said.splitlines() if line.startswith("error: ")]

    def ranks(self):
        """The training processes that its launcher has started."""
        return [
            process
            for process in self._processes()
            if process.cmdline()[1:3] == ["-u", "scripts/train_gpt2.py"]
        ]

    def launcher(self):
        """Its torchrun."""
        return next(
            process
            for process in self._processes()
            if process.cmdline()[1:2] == [str(BIN / "torchrun")]
        )

    def _processes(self):
        if not self.started or self.started[-1].poll() is not None:
            return []
        return psutil.Process(self.started[-1].pid).children(recursive=True)

    def ip(self, command):
        subprocess.run(["ip", "-n", self.netns, *command.split()], check=True)

    def exec(self, command):
        subprocess.run(["ip", "netns", "exec", self.netns, *command.split()], check=True)

    def end(self):
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def joined_machines(folder, count=2):
    """Machines, and a switch between them, gone at the end with all that runs there."""
    if os.getuid() != 0:
        pytest.skip("network namespaces are made by root alone")
    machines = tuple(Machine(number, folder) for number in range(count))
    switch = f"gpt2-{os.getpid()}-switch"
    try:
        make = [f"netns add {name}" for name in (switch, *(machine.netns for machine in machines))]
        make += [f"-n {switch} link add switch type bridge", f"-n {switch} link set switch up"]
        for machine in machines:
            make += [
                f"link add {WIRE} netns {machine.netns} type veth peer name {machine.name} "
                f"netns {switch}"
            ]
            make += [
                f"-n {switch} link set {machine.name} master switch",
                f"-n {switch} link set {machine.name} up",
            ]
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
        for name in (switch, *(machine.netns for machine in machines)):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def nothing_is_left(machines):
    """The next test has a cable, and nobody else on the port."""
    yield
    for machine in machines:
        machine.end()
        machine.ip(f"link set {WIRE} up")
