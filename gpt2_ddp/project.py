"""The folder of `scripts/` and `configs/`: the clone, or the package of an installed wheel."""

from pathlib import Path

PACKAGE = Path(__file__).parent
INSTALLED = (PACKAGE / "scripts").is_dir()
PROJECT = PACKAGE if INSTALLED else PACKAGE.parent


def command_for(script: str) -> str:
    """The command line of a script, named without `.py`."""
    return f"gpt2-ddp {script}" if INSTALLED else f"python scripts/{script}.py"
