"""The DDP lab: common mistakes in DDP, wrong and right, measured on two CPU processes."""

from datetime import timedelta
from types import SimpleNamespace
from typing import NamedTuple

import torch

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.distributed.environment import refuse_launcher
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.distributed.spawn import start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.lab import lessons
from gpt2_ddp.lab.experiment import Experiment, Numbers
from gpt2_ddp.output import markdown_table

EXPERIMENTS = {name: value for name, value in vars(lessons).items() if isinstance(value, Experiment)}

PROCESSES = 2
BOUND = timedelta(seconds=60)  # timeout of collectives: a rank does not wait for longer if the other one fails


class Row(NamedTuple):
    experiment: Experiment
    numbers: Numbers

    @property
    def holds(self) -> bool:
        """Whether the numbers support the claim."""
        return self.experiment.holds(SimpleNamespace(**self.numbers))

    @property
    def measured(self) -> str:
        return self.experiment.measured.format_map(self.numbers)


def run_lab(config: LabConfig) -> int:
    """Runs experiments, then prints the table. Returns 0 if all claims hold, otherwise 1. Raises: UserError before any
    work."""
    refuse_launcher()
    for name in config.only:
        if name not in EXPERIMENTS:
            raise UserError("only", name, f"is not an experiment; choose from {', '.join(EXPERIMENTS)}")
    rows = run_experiments(config.only or tuple(EXPERIMENTS))
    print(as_markdown(rows))
    return 0 if all(row.holds for row in rows) else 1


def as_markdown(rows: list[Row]) -> str:
    """The experiments as a table: claim, wrong way, right way, measurement."""
    lines = []
    for row in rows:
        measured = row.measured if row.holds else f"{row.measured} FAILS"
        cells = row.experiment.claim, row.experiment.wrong, row.experiment.right, measured
        lines.append([" ".join(cell.split()) for cell in cells])
    return markdown_table(("claim", "wrong way", "right way", "measured"), lines, align=False)


def run_experiments(names: tuple[str, ...]) -> list[Row]:
    """Runs experiments one after the other on two new processes."""
    found = start_processes(measure, PROCESSES, names)
    return [Row(EXPERIMENTS[name], numbers) for name, numbers in zip(names, found, strict=True)]


def measure(names: tuple[str, ...]) -> list[Numbers]:
    """On each rank: numbers of experiments."""
    accelerator = build_accelerator("cpu", "no", timeout=BOUND)
    torch.set_num_threads(1)
    return [EXPERIMENTS[name].run(accelerator) for name in names]
