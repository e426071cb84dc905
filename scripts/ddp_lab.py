"""Measure common mistakes in DDP, wrong and right, on two CPU processes.

    python scripts/ddp_lab.py  # all experiments; starts its own two processes
    python scripts/ddp_lab.py --only set_epoch padded_test_set  # some of them

docs/ddp-lab.md explains each experiment, and has its code.
"""

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(LabConfig, "gpt2_ddp.lab.lab:run_lab")
