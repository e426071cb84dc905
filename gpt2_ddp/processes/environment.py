"""The world that a launcher describes in the environment. No torch."""

import os
import re

from gpt2_ddp.errors import UserError

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
