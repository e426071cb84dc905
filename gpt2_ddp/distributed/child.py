"""Processes that end with the one that started them, however it ends, and helpers that only it ends. No torch."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import TypeVar

from gpt2_ddp.distributed.environment import STOPPED
from gpt2_ddp.distributed.signals import Stopped
from gpt2_ddp.errors import UserError
from gpt2_ddp.project import PROJECT

T = TypeVar("T")

LOOK_SECONDS = 0.5
CHILD = "GPT2_DDP_CHILD"
"""Variable of a script that another one runs, and that ends with it."""
LAUNCHERS = ("RANK", "WORLD_", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "ACCELERATE_", "TORCHELASTIC_", "PET_", "OMPI_")
"""What begins the names of the variables by which launchers describe a rank."""


def end_with_parent(number: int) -> None:
    """Sends this process signal `number` once its parent process is gone, be it by `kill -9`.

    Not for a process that a shell started: `nohup python ... &` is to outlive it. A thread waits, rather than the
    kernel's PR_SET_PDEATHSIG: that fires when the *thread* ends that started this process, and on Linux alone.
    """
    parent, launcher = multiprocessing.parent_process(), os.getppid()

    def follow() -> None:
        if parent is not None:
            parent.join()  # knows of an end before this began
        else:
            while os.getppid() == launcher:
                time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), number)

    threading.Thread(target=follow, name="end with parent", daemon=True).start()


def run_script(script: str, *arguments: str, quiet: bool = False) -> None:
    """Runs scripts/SCRIPT.py as a process of its own, without a rank, which ends with this one.

    Args:
        quiet: whether its standard output is dropped.

    Raises:
        UserError: its `error:` lines, where it exits with 2.
        Stopped: where it was stopped.
        CalledProcessError: where it crashed; its traceback is on stderr.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment |= {CHILD: "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(PROJECT / "scripts" / f"{script}.py"), *arguments]
    mistakes: list[str] = []
    stdout = subprocess.DEVNULL if quiet else None
    pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, process_group=0, **pipes) as process:
        try:
            assert process.stderr
            for line in process.stderr:
                if line.startswith("error: "):
                    mistakes.append(line.removeprefix("error: ").rstrip("\n"))
                else:
                    print(line, end="", file=sys.stderr)
            code = process.wait()
        except BaseException:  # a signal to this process
            process.terminate()
            raise
    if code == 2 and mistakes:
        raise UserError.join(mistakes)
    if code == STOPPED:
        raise Stopped(f"a signal to {script}.py")
    if code:
        raise subprocess.CalledProcessError(code, command)
