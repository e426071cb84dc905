"""The launcher of this process: the world that it describes, and the exit codes that it understands. No torch."""

import os
import re
from pathlib import Path

from gpt2_ddp.errors import UserError

STOPPED = 75
"""Exit code of what was stopped early on request, with nothing lost (EX_TEMPFAIL: the same command goes on)."""

_COUNT = r"[1-9][0-9]*"
_NUMBERS = {
    "WORLD_SIZE": _COUNT,
    "LOCAL_WORLD_SIZE": _COUNT,
    "RANK": r"[0-9]+",
    "LOCAL_RANK": r"[0-9]+",
    "MASTER_PORT": r"[0-9]+",
    "SLURM_STEP_NUM_TASKS": _COUNT,
    "OMPI_COMM_WORLD_SIZE": _COUNT,
    "PET_NNODES": rf"{_COUNT}(:{_COUNT})?",
    "PET_NPROC_PER_NODE": rf"{_COUNT}|auto|cpu|gpu|xpu",
}
"""Variables that launchers set, with what they may hold."""


def is_main_process() -> bool:
    """Whether this is rank 0, or the only process, or one whose RANK is no number; known before torch is imported."""
    rank = os.environ.get("RANK", "")
    return not rank.isdigit() or int(rank) == 0


def world_size() -> int:
    """How many processes the launcher started in all; 1 without one.

    A variable that is empty, as a template leaves it that nobody filled in, or -1 is unset here: Accelerate, torch and
    the reader of this process's rank would fail at it.

    Raises:
        UserError: for a variable of the launcher's that is no number.
    """
    for name, pattern in _NUMBERS.items():
        value = os.environ.get(name, "").strip()
        if value in ("", "-1"):
            os.environ.pop(name, None)
        elif not re.fullmatch(pattern, value):
            kind = "a rank or port, 0 or more" if pattern == r"[0-9]+" else "a number of processes or nodes, 1 or more"
            raise UserError(name, value, f"should be {kind}; launchers set it: `unset {name}`, or correct it")
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_other_ranks() -> bool:
    """Whether this process is one of several of a world, which may not be connected yet."""
    return os.environ.get("WORLD_SIZE", "").strip() not in ("", "-1", "1")


def under_launcher() -> bool:
    """Whether `accelerate launch` or torchrun started this process; they make a crash of any non-zero exit code."""
    return "TORCHELASTIC_RUN_ID" in os.environ or accelerate_words() is not None


def accelerate_words() -> list[str] | None:
    """What follows the command's name in the `accelerate launch` that is this process's parent, or None."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return None
    import psutil  # late: `--help` has no use for it

    parent = psutil.Process().parent()
    words = parent.cmdline() if parent else []
    endings = ("accelerate-launch", "accelerate.commands.launch", "commands/launch.py")
    for last, word in enumerate(words):
        if word.endswith(endings) or (word == "launch" and "accelerate" in Path(words[last - 1]).name):
            return words[last + 1 :]
    return None


def exit_code(outcome: str) -> int:
    """0; 1 for a run that has `diverged`; 75 for one that is `stopped` early, where no launcher takes that for a
    failure."""
    return 1 if outcome == "diverged" else STOPPED if outcome == "stopped" and not under_launcher() else 0


def stop_code() -> int:
    """Exit code of a process that was stopped on its own. For one of several ranks it has to be a failure, by which its
    launcher learns that the others must end too."""
    return STOPPED if has_other_ranks() else exit_code("stopped")
