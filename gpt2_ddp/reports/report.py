"""report.html and report.png: what happened in one or several runs."""

from pathlib import Path

import numpy as np

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.output import make_output_folder
from gpt2_ddp.reports.figure import draw, share_batch
from gpt2_ddp.reports.page import page
from gpt2_ddp.reports.runs import AXES, RunRecord, read_runs


def report(config: ReportConfig) -> int:
    """The command: writes the report and prints its path."""
    if not config.runs:
        raise UserError("runs", "[]", "name at least one run folder, like runs/stdlib")
    runs = [Path(run) for run in config.runs]
    print(write_report(runs, Path(config.output) if config.output else runs[0], config.axis))
    return 0


def write_report(runs: list[Path], output: Path, axis: str = "auto") -> Path:
    """Writes report.html, complete in itself, and report.png about run folders into the folder `output`.

    Each file appears whole or not at all. Rows and files that are missing or torn are left out, and the page says so.

    Args:
        axis: what the picture is drawn along, as `ReportConfig` has it.

    Returns:
        The path of report.html.

    Raises:
        UserError: a folder has no metrics to show, or none along `axis`, or `output` cannot be written.
    """
    loaded = read_runs(runs)
    picture = draw(loaded, choose_axis(loaded, axis))
    html, png = page(loaded, picture), picture.png()
    make_output_folder(output)
    write_atomically(output / "report.png", png)
    write_atomically(output / "report.html", html.encode(errors="replace"))  # a sample may hold half a character
    return output / "report.html"


def choose_axis(runs: list[RunRecord], axis: str) -> str:
    """The axis that `axis` means, as `ReportConfig` has it.

    Raises:
        UserError: a run does not have that one.
    """
    lacking = {each: [run.name for run in runs if run.along(each, np.zeros(1)) is None] for each in AXES}
    if axis == "auto":
        axis = "tokens" if not lacking["tokens"] and not share_batch(runs) else "steps"
    if lacking[axis]:
        hint = f"the rows of {', '.join(lacking[axis])} do not say it; choose another, or leave that run out"
        raise UserError("axis", axis, hint)
    return axis
