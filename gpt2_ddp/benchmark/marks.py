"""Runs a training script up to its first step, and says when it was where: `python -m gpt2_ddp.benchmark.marks`.

What it is told: a file for the marks, the time at which it was started, and the script with its flags. The stages are
those that the watch is told of anyway; nothing of the trainer knows of this.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

STAGES = {"import ours": "opening", "preparing data": "data", "reading tasks": "data", "building": "model"}
"""What is done from a mark on, where it is another word than the mark's own."""


def observe(file: str, begun: str, command: list[str]) -> None:
    """Writes [[stage, seconds, CPU seconds], ...], the end of each stage counted from the start of the process; ends it
    behind the first step as if it were killed, which leaves the run folder as it was."""
    marks: list[tuple[str, float, float]] = []
    stage = "python"

    def mark(following: str) -> None:
        nonlocal stage
        marks.append((stage, time.time() - float(begun), time.process_time()))
        stage = following

    def heartbeat(watchdog: Any, name: str, step: int | None = None, timeout: float = 0.0) -> None:
        was_step = stage == "step"
        prepares = name == "building" and any(done == "model" for done, *_ in marks)  # it is said of both
        mark("prepare" if prepares else STAGES.get(name, name))
        if was_step:
            Path(file).write_text(json.dumps(marks))
            os._exit(0)
        tell(watchdog, name, step, timeout)

    mark("import torch")
    import torch  # noqa: F401

    mark("import accelerate")
    import accelerate  # noqa: F401

    mark("import ours")
    from gpt2_ddp.distributed.watchdog import Watchdog
    from gpt2_ddp.tasks import pretraining  # noqa: F401
    from gpt2_ddp.training import loop  # noqa: F401

    mark("opening")
    tell, Watchdog.heartbeat = Watchdog.heartbeat, heartbeat  # pyright: ignore[reportAttributeAccessIssue]
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        mark("")
        Path(file).write_text(json.dumps(marks))


if __name__ == "__main__":
    observe(sys.argv[1], sys.argv[2], sys.argv[3:])
