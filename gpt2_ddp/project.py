"""The folder of `scripts/` and `configs/`: the clone, or the package of an installed wheel."""

import subprocess
from contextlib import suppress
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parent
INSTALLED = (PACKAGE / "scripts").is_dir()
PROJECT = PACKAGE if INSTALLED else PACKAGE.parent


def git_commit() -> str | None:
    """The clone's commit, with `-dirty` after changes; None without git, and for an installed
    package."""
    if INSTALLED:  # a repository around it is that of some other project
        return None
    flags = ("--always", "--dirty", "--exclude=*", "--abbrev=40")
    command = ["git", "-C", str(PROJECT), "describe", *flags]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        return done.stdout.strip() or None
    return None


def command_for(script: str) -> str:
    """The command line of a script, named without `.py`."""
    return f"gpt2-ddp {script}" if INSTALLED else f"python scripts/{script}.py"
