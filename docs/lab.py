"""Writes the measured parts of docs/ddp-lab.md: runs the lab, and keeps what was written by hand.

    python docs/lab.py        # less than 20 s on two cores

By hand: headings, and the text below each heading, up to `- **wrong**`. `tests/test_lab.py` fails if the other parts
differ from the code, or figures from those of a run.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.lab import experiment as helpers
from gpt2_ddp.lab.experiment import Experiment
from gpt2_ddp.lab.lab import EXPERIMENTS, run_experiments
from gpt2_ddp.output import markdown_table
from gpt2_ddp.project import PROJECT

DOCUMENTATION = PROJECT / "docs" / "ddp-lab.md"
HELPERS = "make_model", "make_rows", "share", "mse", "train", "gradient", "distance", "largest"


def contents() -> str:
    """The table of contents."""
    rows = [(f"[{found.name}](#{found.name})", found.claim) for found in EXPERIMENTS.values()]
    return markdown_table(("lesson", "claim"), rows, align=False)


def code_of(experiment: Experiment) -> str:
    """The source of the measuring function, after the functions of its module that it uses."""
    decorated = inspect.getsource(experiment.measure)
    found = decorated[decorated.index("\ndef ") + 1 :]
    for name, used in reversed(vars(inspect.getmodule(experiment.measure)).items()):  # used parts come first
        ours = getattr(used, "__module__", "") == experiment.measure.__module__
        if ours and (inspect.isfunction(used) or inspect.isclass(used)) and re.search(rf"\b{name}\b", found):
            found = f"{inspect.getsource(used)}\n\n{found}"
    return found.rstrip()


def part(experiment: Experiment, measured: str) -> str:
    """What follows a lesson's text: both ways, figures and code."""
    ways = ("wrong", experiment.wrong), ("right", experiment.right), ("measured", measured)
    lines = [f"- **{name}**: {' '.join(text.split())}" for name, text in ways]
    return "\n".join([*lines, "", "```python", code_of(experiment), "```", "", ""])


def page(text: str, measured: Mapping[str, str]) -> str:
    """The page with its parts written anew. `measured`: the figures as text, by name of the experiment."""
    text = re.sub(r"^\| lesson \|.*?\n(?=\n)", lambda _: f"{contents()}\n", text, flags=re.MULTILINE | re.DOTALL)
    for found in EXPERIMENTS.values():
        old = rf"(^### {found.name}\n\n.*?\n\n)(?:- \*\*wrong\*\*.*?)?(?=^##|\Z)"
        new = lambda match, found=found: match[1] + part(found, measured[found.name])  # noqa: E731
        text = re.sub(old, new, text, count=1, flags=re.MULTILINE | re.DOTALL)
    code = "\n\n".join(inspect.getsource(getattr(helpers, name)) for name in HELPERS)
    head, rule, _ = text.partition("`gpt2_ddp/lab/experiment.py`.\n\n")
    return f"{head}{rule}```python\n{code}```\n"


if __name__ == "__main__":
    rows = list(run_experiments([*EXPERIMENTS.values()], LabConfig().seed))
    assert all(row.holds for row in rows), [row for row in rows if not row.holds]
    figures = {row.experiment.name: row.measured for row in rows}
    DOCUMENTATION.write_text(page(DOCUMENTATION.read_text(encoding="utf-8"), figures), encoding="utf-8")
    print(f"wrote {DOCUMENTATION}")
