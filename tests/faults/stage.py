"""Runs a script in which one stage lasts long, in steps that Python sees, and leaves a mark when it begins.

python stage.py hashing|evaluation|sampling|saving MARK SCRIPT [ARGUMENTS]
"""

import os
import runpy
import sys
import time
from pathlib import Path


def lasting(function, seconds: float, mark: Path):
    def longer(*args, **options):
        mark.touch()
        time.sleep(seconds)
        return function(*args, **options)

    return longer


def prolong(stage: str, mark: Path) -> None:
    if stage == "hashing":  # on the first rank alone: the other one waits for it
        from gpt2_ddp import files

        if os.environ.get("RANK", "0") == "0":
            files.sha256_file = lasting(files.sha256_file, 60, mark)
    elif stage == "saving":
        os.fsync = lasting(os.fsync, 0.2, mark)
    elif stage == "sampling":
        from gpt2_ddp.model import generate

        generate.next_logits = lasting(generate.next_logits, 0.1, mark)
    else:
        from gpt2_ddp.model.gpt import GPT

        forward = GPT.forward
        slow = lasting(forward, 0.5, mark)
        GPT.forward = lambda self, *args, **options: (forward if self.training else slow)(self, *args, **options)


if __name__ == "__main__":
    stage, mark, sys.argv = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    prolong(stage, mark)
    runpy.run_path(sys.argv[0], run_name="__main__")
