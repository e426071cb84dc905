"""Where `scripts/` and `configs/` are: beside the package in a clone, inside it where a wheel was installed."""

from pathlib import Path

PACKAGE = Path(__file__).parent
INSTALLED = (PACKAGE / "scripts").is_dir()
PROJECT = PACKAGE if INSTALLED else PACKAGE.parent
"""The folder that holds both."""


def command_for(script: str) -> str:
    """What a user types to run a script of this name, without its `.py`."""
    return f"gpt2-ddp {script}" if INSTALLED else f"python scripts/{script}.py"
