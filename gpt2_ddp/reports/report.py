"""report.html and report.png: what happened in one or several runs."""

from pathlib import Path

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import write_atomically
from gpt2_ddp.reports.figure import draw
from gpt2_ddp.reports.page import page
from gpt2_ddp.reports.runs import read_runs


def report(config: ReportConfig) -> int:
    """The command: writes the report and prints its path."""
    if not config.runs:
        raise UserError("runs", "[]", "name at least one run folder, like runs/stdlib")
    runs = [Path(run) for run in config.runs]
    print(write_report(runs, Path(config.output) if config.output else runs[0]))
    return 0


def write_report(runs: list[Path], output: Path) -> Path:
    """Writes report.html, complete in itself, and report.png about run folders into the folder `output`.

    Each file appears whole or not at all. Rows and files that are missing or torn are left out, and the page says so.

    Returns:
        The path of report.html.

    Raises:
        UserError: a folder has no metrics to show, or `output` cannot be written.
    """
    loaded = read_runs(runs)
    svg, png = draw(loaded)
    html = page(loaded, svg)
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(output / "report.png", png)
        write_atomically(output / "report.html", html.encode(errors="replace"))  # a sample may hold half a character
    except OSError as error:
        raise UserError("output", output, f"cannot be written ({error.strerror}); name another folder") from error
    return output / "report.html"
