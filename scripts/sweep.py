"""Train variants of a training with several seeds, as ordinary runs, and compare them.

    python scripts/sweep.py --seeds 1 2 3 \\
        --vary optim.muon_lr=0.02,0.03 model.architecture=gpt2,llama
    python scripts/sweep.py --seeds 1 2 3 --vary optim.lr=3e-4,6e-4 \\
        --config configs/gpt2_124m.yaml --dry_run

All other flags are those of train_gpt2.py. The same command again resumes what is missing. See
docs/sweep.md.
"""

import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path

from gpt2_ddp.config.base import flat
from gpt2_ddp.config.cli import load, read_yaml
from gpt2_ddp.config.own_text import CHOSEN, given_fields
from gpt2_ddp.config.plan import SweepConfig
from gpt2_ddp.config.saved import with_recorded
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.errors import UserError
from gpt2_ddp.script import run_command
from gpt2_ddp.sweep.members import (
    Member,
    check_log,
    check_settings,
    prepare_data,
    refuse_launcher,
    train_all,
    visible_gpus,
)


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
    refuse_launcher("sweep.py")
    members = find_members(config, sys.argv[1:])
    if config.dry_run:
        for member in members:
            print(shlex.join(["python", "scripts/train_gpt2.py", *member.flags]))
        return 0
    for member in members:
        check_log(member)
    prepare_data(members)
    members = settled(members, config.at_once or 1)
    gpus = visible_gpus()
    incomplete = train_all(members, config.at_once or len(gpus) or 1, gpus)
    return compare(members, incomplete, Path(config.output_dir, f"{config.run_name}-sweep.json"))


if __name__ == "__main__":
    run_command(
        SweepConfig,
        main,
        default=training_default,
        settings_of="gpt2_ddp.tasks.pretraining:settings_of",
    )
