"""Common mistakes in DDP: the wrong way and the right one, measured on two CPU processes.

    python scripts/ddp_lab.py                                    # all experiments; no launcher: it starts its own two
    python scripts/ddp_lab.py --only set_epoch padded_test_set   # some of them
    python scripts/ddp_lab.py --explain called_module            # a lesson, and the code that measures it

Each row is explained in docs/ddp-lab.md.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.tools import LabConfig

if __name__ == "__main__":
    run_command(LabConfig, "gpt2_ddp.lab.lab:run_lab")
