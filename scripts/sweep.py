"""Train variants of a training with several seeds, as ordinary runs, and compare them.

    python scripts/sweep.py --seeds 1 2 3 \\
        --vary optim.muon_lr=0.02,0.03 model.architecture=gpt2,llama
    python scripts/sweep.py --seeds 1 2 3 --vary optim.lr=3e-4,6e-4 \\
        --config configs/gpt2_124m.yaml --dry_run

All other flags are those of train_gpt2.py. The same command again resumes what is missing. See
docs/sweep.md.
"""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from signal import Signals
from types import FrameType
from typing import NamedTuple

from gpt2_ddp.config.base import Section, flat
from gpt2_ddp.config.cli import load, read_yaml, split_flags
from gpt2_ddp.config.own_settings import NO_CLASS, settle
from gpt2_ddp.config.own_text import CHOSEN, given_fields
from gpt2_ddp.config.plan import SweepConfig
from gpt2_ddp.config.saved import with_recorded
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.distributed.environment import DIVERGED, STOPPED, usable_cores, world_size
from gpt2_ddp.distributed.process import CHILD, POLL_SECONDS, run_module
from gpt2_ddp.distributed.signals import Stopped, install_handlers
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import refuse_links, regular, writing
from gpt2_ddp.project import PROJECT
from gpt2_ddp.records.rows import is_locked
from gpt2_ddp.script import run_command


class Member(NamedTuple):
    folder: Path  # of the run
    flags: list[str]  # of train_gpt2.py
    config: TrainingConfig  # by these flags


class Running(NamedTuple):
    member: Member
    process: subprocess.Popen[bytes]
    sent: list[int]  # signals that it has got


def find_members(config: SweepConfig, argv: list[str]) -> list[Member]:
    """All runs of a command line, variant by variant. Raises: UserError, also for values that
    train_gpt2.py refuses."""
    varied = {text.partition("=")[0] for text in config.vary}
    not_shared = {*SweepConfig.first, "run_name", "seed", *varied}
    shared: list[str] = []  # words of flags that all runs have
    is_shared = True
    for word in argv:
        if word.startswith("--"):
            is_shared = word[2:].partition("=")[0] not in not_shared
        if is_shared:
            shared.append(word)
    fields: list[list[tuple[str, str]]] = []
    for text in config.vary:
        name, _, values = text.partition("=")
        if not values or name in ("seed", "run_name", "output_dir"):
            hint = "should be a field and values, like optim.lr=3e-4,6e-4; seeds: --seeds 1 2"
            raise UserError("vary", text, hint)
        # not at a list's commas
        fields.append([(name, value) for value in re.split(r",(?![^\[]*\])", values)])
    members: list[Member] = []
    for chosen, seed in product(product(*fields), config.seeds or (config.seed,)):
        parts = [*(f"{name.rpartition('.')[2]}_{value}" for name, value in chosen), f"seed_{seed}"]
        name = re.sub(r"[^\w.-]+", "_", "-".join([config.run_name, *parts]))
        folder = Path(config.output_dir, name)
        words = [word for field, value in chosen for word in (f"--{field}", value)]
        flags = [*shared, "--run_name", folder.name, "--seed", str(seed), *words]
        preset = training_default({"data.path": " ".join(config.data.path), **dict(chosen)})
        members.append(Member(folder, flags, load(TrainingConfig, flags, preset)))
        check_settings(members[-1])
    return members


def check_settings(member: Member) -> None:
    """Raises: UserError for settings that the class of the flag --task does not have, or refuses.
    The class that only a file names, and what it has, a run checks."""
    config = member.config
    if not config.own.given:
        return
    task = split_flags(TrainingConfig, member.flags).values.get("task")
    if isinstance(task, str):
        from gpt2_ddp.tasks.pretraining import settings_of

        settle(config.own, settings_of(task), task.rpartition(":")[2])
    elif not config.task:
        settle(config.own, Section, NO_CLASS)


def settled(members: list[Member], at_once: int) -> list[Member]:
    """The members, with a flag for each field that the rule for a text of one's own chooses. One
    measurement of the machine serves all; a sweep that goes on has the values of its first run. So
    only what is varied differs."""
    if not any(member.config.own_text for member in members):
        return members
    from accelerate import Accelerator
    from torch import cuda

    from gpt2_ddp.training.own_text import complete, this_machine

    files = [member.folder / "config.yaml" for member in members]
    recorded = next((read_yaml(str(file)) for file in files if file.is_file()), None)
    machine = None
    if recorded is None:
        here = this_machine(Accelerator(cpu=not cuda.is_available()))
        machine = here._replace(speed=here.speed / at_once)
    found: list[Member] = []
    for member in members:
        given = given_fields(member.config)
        if recorded is not None:
            chosen = with_recorded(member.config, recorded)
        else:
            assert machine
            chosen = complete(member.config, machine).config
        values = flat(chosen.model_dump(mode="json"))
        flags = [f"--{name}={values[name]}" for name in sorted(CHOSEN - given.keys())]
        flags = [flag for flag in flags if not flag.endswith("=None")]
        found.append(member._replace(flags=[*member.flags, *flags], config=chosen))
    return found


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


def compare(members: list[Member], incomplete: Mapping[Path, str], report: Path) -> int:
    """Prints the comparison, and writes it as `report`, NAME.json. Returns 1 if a run is
    `incomplete`. One that was refused is not in the comparison: what its folder has is of another
    configuration."""
    from gpt2_ddp.reports.groups import describe, group_runs
    from gpt2_ddp.reports.report import EXPLAIN, write_report
    from gpt2_ddp.reports.runs import read_runs

    runs = []
    for member in members:
        with suppress(UserError):  # it failed before its first row
            (run,) = read_runs([member.folder])
            if member.folder not in incomplete or run.status.get("state") != "completed":
                runs.append(run)
    below = [f"{folder} {end}; its output is in {folder}.log" for folder, end in incomplete.items()]
    print(*describe(group_runs(runs)), *below, sep="\n")
    if runs:
        print("report:", write_report([report.parent / run.name for run in runs], report))
    if len(runs) > 1:
        print(EXPLAIN)
    return int(bool(incomplete))


def main(config: SweepConfig) -> int:
    """Trains what is missing, and compares all runs."""
    if world_size() > 1:
        hint = "starts the runs itself; start it with python"
        raise UserError("sweep.py", "under a launcher", hint)
    members = find_members(config, sys.argv[1:])
    if config.dry_run:
        for member in members:
            print(shlex.join(["python", "scripts/train_gpt2.py", *member.flags]))
        return 0
    from torch import cuda

    from gpt2_ddp.data.fetch import missing_data

    for member in members:
        check_log(member)
    for member in members:  # once, not by several runs at a time
        if recipe := missing_data(member.config):
            run_module("gpt2_ddp", "prepare_data", "--config", recipe)
    members = settled(members, config.at_once or 1)
    count = cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible and count else [*map(str, range(count))]
    incomplete = train_all(members, config.at_once or len(gpus) or 1, gpus)
    return compare(members, incomplete, Path(config.output_dir, f"{config.run_name}-sweep.json"))


if __name__ == "__main__":
    run_command(
        SweepConfig,
        main,
        default=training_default,
        settings_of="gpt2_ddp.tasks.pretraining:settings_of",
    )
