"""The DDP lab: common mistakes in DDP, wrong and right, measured on two CPU processes."""

import os
import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import torch

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.distributed.environment import world_size
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.lab import lessons
from gpt2_ddp.lab.experiment import Experiment, Numbers
from gpt2_ddp.output import markdown_table
from gpt2_ddp.project import command_for

EXPERIMENTS = {name: value for name, value in vars(lessons).items() if isinstance(value, Experiment)}

PROCESSES = 2
BOUND = timedelta(seconds=60)  # timeout of collectives: a rank does not wait for longer if the other one fails
NOT_MEASURED = 4  # exit code: an experiment gave no numbers


class Row(NamedTuple):
    experiment: Experiment
    numbers: Numbers
    error: str = ""  # why there are no numbers

    @property
    def holds(self) -> bool | None:
        """Whether the numbers support the claim; None without numbers."""
        return None if self.error else self.experiment.holds(SimpleNamespace(**self.numbers))

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "FAILS", None: "not measured"}[self.holds]

    @property
    def measured(self) -> str:
        return self.error or self.experiment.measured.format_map(self.numbers)


def run_lab(config: LabConfig) -> int:
    """Runs experiments, prints each as it ends, then the table. Returns 0 if all claims hold, 1 if one fails, otherwise
    `NOT_MEASURED`. Raises: UserError before any work."""
    if world_size() > 1:
        hint = f"the lab starts its own two processes: run `{command_for('ddp_lab')}` without a launcher"
        raise UserError("processes", world_size(), hint)
    rows = run_experiments(choose(config.only), config.seed)
    print(f"\n{as_markdown(rows)}")
    print("Next: docs/ddp-lab.md explains each row, and has its code")
    found = [row.holds for row in rows]
    return 1 if False in found else NOT_MEASURED if None in found else 0


def choose(names: tuple[str, ...]) -> list[Experiment]:
    """The experiments of these names, or all for none. Raises: UserError for an unknown name."""
    for name in names:
        if name not in EXPERIMENTS:
            raise UserError("only", name, f"is not an experiment; choose from {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in names or EXPERIMENTS]


def as_markdown(rows: list[Row]) -> str:
    """The experiments as a table: claim, wrong way, right way, measurement."""
    lines = []
    for row in rows:
        measured = row.measured if row.holds else f"{row.measured} {row.verdict}"
        cells = row.experiment.claim, row.experiment.wrong, row.experiment.right, measured
        lines.append([" ".join(cell.split()) for cell in cells])
    return markdown_table(("claim", "wrong way", "right way", "measured"), lines, align=False)


def run_experiments(experiments: list[Experiment], seed: int) -> list[Row]:
    """Runs experiments one after the other on two new processes; after one without numbers, on new ones again."""
    found: list[tuple[Numbers, str]] = []
    while left := [experiment.name for experiment in experiments[len(found) :]]:
        found += start_processes(measure, PROCESSES, left, seed)
    return [Row(experiment, *answer) for experiment, answer in zip(experiments, found, strict=True)]


def measure(names: list[str], seed: int) -> list[tuple[Numbers, str]]:
    """On each rank: numbers of experiments, until one has none and an error instead. The main process prints each as
    it ends."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    accelerator, found = build_accelerator("cpu", "no", timeout=BOUND), []
    torch.set_num_threads(1)
    for name in names:
        try:
            row = Row(EXPERIMENTS[name], EXPERIMENTS[name].run(accelerator, seed))
        except Exception as error:  # any error goes to the table
            traceback.print_exc()
            row = Row(EXPERIMENTS[name], {}, f"{type(error).__name__}: {error}")
        if accelerator.is_main_process:
            print(f"{row.verdict}  {row.experiment.claim}\n       {row.measured}", flush=True)
        found.append((row.numbers, row.error))
        if row.error:
            break  # the other rank may be at another experiment now
    return found
