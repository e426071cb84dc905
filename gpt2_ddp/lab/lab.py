"""The DDP lab: common mistakes in DDP, wrong and right, measured on two CPU processes."""

from datetime import timedelta
from types import SimpleNamespace

import torch

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.distributed.spawn import refuse_launcher, start_processes
from gpt2_ddp.errors import UserError
from gpt2_ddp.lab import lessons
from gpt2_ddp.lab.experiment import Experiment, Numbers

EXPERIMENTS = {
    name: value for name, value in vars(lessons).items() if isinstance(value, Experiment)
}

PROCESSES = 2
# timeout of collectives: a rank does not wait for longer if the other one fails
BOUND = timedelta(seconds=60)


def run_lab(config: LabConfig) -> int:
    """Runs experiments, and prints them. Returns 0 if all claims hold, otherwise 1. Raises:
    UserError before any work."""
    refuse_launcher()
    for name in config.only:
        if name not in EXPERIMENTS:
            hint = f"is not an experiment; choose from {', '.join(EXPERIMENTS)}"
            raise UserError("only", name, hint)
    failed = 0
    for name, numbers in run_experiments(config.only or tuple(EXPERIMENTS)).items():
        experiment = EXPERIMENTS[name]
        fails = not experiment.holds(SimpleNamespace(**numbers))
        failed |= fails
        title = f"{name} FAILS" if fails else name
        print(f"{title}\n{as_list(experiment, experiment.measured.format_map(numbers))}\n")
    return failed


def as_list(experiment: Experiment, measured: str) -> str:
    """An experiment as a list in Markdown: claim, wrong way, right way, and the figures as text."""
    facts = {
        "claim": experiment.claim,
        "wrong": experiment.wrong,
        "right": experiment.right,
        "measured": measured,
    }
    return "\n".join(f"- **{name}**: {text}" for name, text in facts.items())


def run_experiments(names: tuple[str, ...]) -> dict[str, Numbers]:
    """Runs experiments one after the other on two new processes. Returns the numbers of each."""
    return start_processes(measure, PROCESSES, names)


def measure(names: tuple[str, ...]) -> dict[str, Numbers]:
    """On each rank: numbers of experiments."""
    accelerator = build_accelerator("cpu", "no", timeout=BOUND)
    torch.set_num_threads(1)
    return {name: EXPERIMENTS[name].run(accelerator) for name in names}
