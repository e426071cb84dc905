"""The experiments of the DDP lab, by room, and what a reader is told of one."""

import re
import textwrap

from gpt2_ddp.errors import UserError
from gpt2_ddp.lab import data, gradients, loop, ranks, wrapper
from gpt2_ddp.lab.experiment import Experiment
from gpt2_ddp.project import PROJECT

ROOMS = {
    title: [value for value in vars(room).values() if isinstance(value, Experiment)]
    for title, room in {
        "Gradients and weights": gradients,
        "The wrapper": wrapper,
        "Samples": data,
        "One rank and all": ranks,
        "The loop": loop,
    }.items()
}
EXPERIMENTS = [experiment for room in ROOMS.values() for experiment in room]

DOCUMENTATION = PROJECT / "docs" / "ddp-lab.md"


def choose(names: tuple[str, ...], field: str = "only") -> list[Experiment]:
    """The experiments of these names, or all for none. Raises: UserError, for `field`, for an unknown name."""
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    for name in names:
        if name not in known:
            raise UserError(field, name, f"is no experiment; there are {', '.join(known)}")
    return [known[name] for name in names] or EXPERIMENTS


def lesson(experiment: Experiment) -> str:
    """Its paragraph of docs/ddp-lab.md, without the name; empty where no docs/ is, as in an image or a wheel."""
    text = DOCUMENTATION.read_text(encoding="utf-8") if DOCUMENTATION.exists() else ""
    found = re.search(rf"^\*\*{experiment.name}\.\*\* (.*?)\n(?:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def explain(experiment: Experiment) -> str:
    """For a terminal: the claim, the lesson, both ways, and the code that measures them."""
    ways = f"wrong: {experiment.wrong}\nright: {experiment.right}"
    told = textwrap.fill(lesson(experiment), 100, break_long_words=False, break_on_hyphens=False)
    return "\n\n".join(part for part in (experiment.claim, told, ways, experiment.code.rstrip()) if part)
