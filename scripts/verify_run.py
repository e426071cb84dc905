"""Check that rows, checkpoints, configuration and data of a run are unchanged and agree.

    python scripts/verify_run.py  # the built-in run
    python scripts/verify_run.py --run runs/gpt2_124m --data /mnt/shards  # the shards have moved
    python scripts/verify_run.py runs/gpt2_124m --replay 8000:8100  # also trains these steps again

Exit code: 0 without defects, else 1. docs/verify.md lists the checks and their limits.
"""

from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(VerifyConfig, "gpt2_ddp.reports.verify:verify_run")
