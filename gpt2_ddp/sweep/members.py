"""The runs of a sweep or a ladder: ordinary runs of train_gpt2.py, one after another or several at
a time, that stop together and go on by the same command. No torch: a dry run needs none.

    members ─▶ check_log, prepare_data ─▶ train_all ─▶ start ─▶ a process for each run
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import NamedTuple

from gpt2_ddp.config.base import Section
from gpt2_ddp.config.cli import split_flags
from gpt2_ddp.config.own_settings import NO_CLASS, settle
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.environment import DIVERGED, STOPPED, usable_cores, world_size
from gpt2_ddp.distributed.process import CHILD, POLL_SECONDS, run_module
from gpt2_ddp.distributed.signals import Stopped, install_handlers
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import refuse_links, regular, writing
from gpt2_ddp.project import PROJECT
from gpt2_ddp.records.rows import is_locked


class Member(NamedTuple):
    folder: Path  # of the run
    flags: list[str]  # of train_gpt2.py
    config: TrainingConfig  # by these flags


class Running(NamedTuple):
    member: Member
    process: subprocess.Popen[bytes]
    sent: list[int]  # signals that it has got


def check_settings(member: Member) -> None:
    """Raises: UserError for settings that the class of the flag --task does not have, or refuses.
    The class that only a file names, and what it has, a run checks."""
    config = member.config
    if not config.own.given:
        return
    task = split_flags(TrainingConfig, member.flags).values.get("task")
    if isinstance(task, str):
        from gpt2_ddp.tasks.pretraining import settings_of  # noqa: PLC0415  torch

        settle(config.own, settings_of(task), task.rpartition(":")[2])
    elif not config.task:
        settle(config.own, Section, NO_CLASS)


def refuse_launcher(script: str) -> None:
    """Raises: UserError under a launcher: the runs are processes of their own."""
    if world_size() > 1:
        hint = "starts the runs itself; start it with python"
        raise UserError(script, "under a launcher", hint)


def prepare_data(members: Sequence[Member]) -> None:
    """Copies missing shards from URLs, or prepares them, once, not by several runs at a time.
    Raises: UserError."""
    # numpy, which --help and a user error do not need
    from gpt2_ddp.data.fetch import copy_missing, missing_data  # noqa: PLC0415

    for member in members:
        copy_missing(member.config)
        if recipe := missing_data(member.config):
            run_module("gpt2_ddp", "prepare_data", "--config", recipe)


def visible_gpus() -> list[str]:
    """The GPUs that runs may have, as CUDA_VISIBLE_DEVICES names them; none on a CPU."""
    from torch import cuda  # noqa: PLC0415  torch

    count = cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible and count else [*map(str, range(count))]


def train_all(members: list[Member], at_once: int, gpus: list[str]) -> dict[Path, str]:
    """Trains the runs. One that fails ends alone; one that a killed sweep left saving waits.
    Returns how those ended that are not complete, by their folders. Raises: Stopped."""
    todo = [*members]
    signals: list[int] = []  # those that this process has received
    running: dict[int, Running] = {}  # by slot
    incomplete: dict[Path, str] = {}

    def receive(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    uninstall = install_handlers(receive, last=False)
    try:
        while running or (todo and not signals):
            free_slots = set(range(at_once)) - running.keys() if not signals else ()
            for slot in free_slots:
                member = next((member for member in todo if not is_locked(member.folder)), None)
                if member:
                    todo.remove(member)
                    running[slot] = Running(member, start(member, slot, at_once, gpus), [])
                    note = f"{member.folder} starts; its output is in {member.folder}.log"
                    print(note, flush=True)
            time.sleep(POLL_SECONDS)
            for slot, (member, process, sent) in [*running.items()]:
                for number in signals[len(sent) :]:
                    process.send_signal(number)
                    sent.append(number)
                if process.poll() is not None:
                    del running[slot]
                    end = describe_end(member, process.returncode)
                    if process.returncode:
                        incomplete[member.folder] = end
                    print(f"{member.folder} {end}", flush=True)
    finally:
        uninstall()
    if signals:
        raise Stopped(Signals(signals[0]).name)
    return incomplete


def start(member: Member, slot: int, at_once: int, gpus: list[str]) -> subprocess.Popen[bytes]:
    """The process of a run, on the GPU of its slot or on its share of the cores. It stops when this
    process ends."""
    environment = os.environ | {CHILD: "1", "PYTHONUNBUFFERED": "1"}
    if gpus:
        environment["CUDA_VISIBLE_DEVICES"] = gpus[slot % len(gpus)]
    elif at_once > 1 and not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(max(usable_cores() // at_once, 1))
    member.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PROJECT / "scripts/train_gpt2.py"), *member.flags]
    with open(f"{member.folder}.log", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment, process_group=0)


def check_log(member: Member) -> None:
    """Raises: UserError if the file of a run's output is a link, a pipe or a folder: a received
    folder may have any."""
    file = Path(f"{member.folder}.log")
    refuse_links(file)
    with writing(file):
        if file.exists():
            regular(file)


def describe_end(member: Member, code: int) -> str:
    """How a run ended, by its exit code; of a failure, the last line of its output."""
    last = Path(f"{member.folder}.log").read_text(errors="replace").rstrip().rpartition("\n")[2]
    ends = {0: "is complete", DIVERGED: "diverged", STOPPED: "stopped"}
    return ends.get(code, f"failed: {last or code}")
