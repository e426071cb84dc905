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
from typing import NamedTuple

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.plan import SweepConfig
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


def find_members(config: SweepConfig, argv: list[str]) -> list[Member]:
    """All runs of a command line, variant by variant. Raises: UserError, also for values that
    train_gpt2.py refuses."""
    shared = []
    is_own = False
    fields = []
    found = list[Member]()
    own = {
        *SweepConfig.first,
        "run_name",
        "seed",
        *(text.partition("=")[0] for text in config.vary),
    }
    for word in argv:
        is_own = word[2:].partition("=")[0] in own if word.startswith("--") else is_own
        shared += [] if is_own else [word]
    for text in config.vary:
        name, _, values = text.partition("=")
        if not values or name in ("seed", "run_name", "output_dir"):
            raise UserError(
                "vary",
                text,
                "should be a field and values, like optim.lr=3e-4,6e-4; seeds: --seeds 1 2",
            )
        # not at a list's commas
        fields.append([(name, value) for value in re.split(r",(?![^\[]*\])", values)])
    for chosen, seed in product(product(*fields), config.seeds or (config.seed,)):
        parts = [*(f"{name.rpartition('.')[2]}_{value}" for name, value in chosen), f"seed_{seed}"]
        folder = Path(
            config.output_dir, re.sub(r"[^\w.-]+", "_", "-".join([config.run_name, *parts]))
        )
        words = [word for field, value in chosen for word in (f"--{field}", value)]
        flags = [*shared, "--run_name", folder.name, "--seed", str(seed), *words]
        preset = training_default({"data.path": " ".join(config.data.path), **dict(chosen)})
        found.append(Member(folder, flags, load(TrainingConfig, flags, preset)))
    return found


def train_all(members: list[Member], at_once: int, gpus: list[str]) -> dict[Path, str]:
    """Trains the runs. One that fails ends alone; one that a killed sweep left saving waits.
    Returns how those ended that are not complete, by their folders. Raises: Stopped."""
    # running: by slot
    todo = [*members]
    heard = []
    running = {}
    incomplete = {}
    uninstall = install_handlers(lambda number, frame: heard.append(number), last=False)
    try:
        while running or (todo and not heard):
            for slot in set(range(at_once)) - running.keys() if not heard else ():
                if member := next(
                    (member for member in todo if not is_locked(member.folder)), None
                ):
                    todo.remove(member)
                    running[slot] = member, start(member, slot, at_once, gpus), []
                    print(
                        f"{member.folder} starts; its output is in {member.folder}.log", flush=True
                    )
            time.sleep(POLL_SECONDS)
            for slot, (member, process, sent) in [*running.items()]:
                for number in heard[len(sent) :]:
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
    if heard:
        raise Stopped(Signals(heard[0]).name)
    return incomplete


def start(member: Member, slot: int, at_once: int, gpus: list[str]) -> subprocess.Popen[bytes]:
    """The process of a run, on the GPU of its slot or on its share of the cores. It stops when this
    process ends."""
    own = {CHILD: "1", "PYTHONUNBUFFERED": "1"} | (
        {"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}
    )
    if at_once > 1 and not gpus:
        own["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(
            max(usable_cores() // at_once, 1)
        )
    member.folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(PROJECT / "scripts/train_gpt2.py"), *member.flags]
    with open(f"{member.folder}.log", "ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=log, env=os.environ | own, process_group=0
        )


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
    return {0: "is complete", DIVERGED: "diverged", STOPPED: "stopped"}.get(
        code, f"failed: {last or code}"
    )


def compare(members: list[Member], incomplete: Mapping[Path, str], report: Path) -> int:
    """Prints the comparison, and writes it as `report`, NAME.json. Returns 1 if a run is
    `incomplete`. One that was refused is not in the comparison: what its folder has is of another
    configuration."""
    from gpt2_ddp.reports.groups import describe, group_runs
    from gpt2_ddp.reports.report import write_report
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
    return int(bool(incomplete))


def main(config: SweepConfig) -> int:
    """Trains what is missing, and compares all runs."""
    if world_size() > 1:
        raise UserError(
            "sweep.py", "under a launcher", "starts the runs itself; start it with python"
        )
    members = find_members(config, sys.argv[1:])
    if config.dry_run:
        for member in members:
            print(shlex.join(["python", "scripts/train_gpt2.py", *member.flags]))
        return 0
    from torch.cuda import device_count

    from gpt2_ddp.data.fetch import missing_data

    for member in members:
        check_log(member)
    for member in members:  # once, not by several runs at a time
        if recipe := missing_data(member.config):
            run_module("gpt2_ddp", "prepare_data", "--config", recipe)
    count = device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible and count else [*map(str, range(count))]
    incomplete = train_all(members, config.at_once or len(gpus) or 1, gpus)
    return compare(members, incomplete, Path(config.output_dir, f"{config.run_name}-sweep.json"))


if __name__ == "__main__":
    run_command(SweepConfig, main, default=training_default)
