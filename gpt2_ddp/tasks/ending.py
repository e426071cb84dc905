"""The last lines of commands: what to run next."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError

from gpt2_ddp.config.training import DataConfig
from gpt2_ddp.distributed import process
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.project import command_for


def print_end(run: Path, script: str) -> None:
    """Draws the report of a completed run, and prints its path and the command of the next
    `script`. Does nothing on ranks other than the main one."""
    if not is_main_process():
        return
    report = str(run / "report.html")
    if not find_spec("matplotlib"):
        report = "none: matplotlib is not installed"
    else:
        try:
            process.run_module("gpt2_ddp", "report", str(run), stdout=DEVNULL)
        except (UserError, CalledProcessError) as error:
            report = f"none: {error}"
    print(f"report: {report}")
    print(f"next: {command_for(script)} {shlex.quote(str(run))}")


def next_training(folder: Path) -> str:
    """The command that trains on prepared data."""
    words = [command_for("train_gpt2")]
    if str(folder) not in DataConfig().path:
        words.append(f"--data.path {shlex.quote(str(folder))}")
        if re.fullmatch(r"\w[\w.-]*", folder.name):
            words.append(f"--run_name {folder.name}")
    return f"next: {' '.join(words)}"
