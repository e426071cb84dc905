"""Print the state of runs: running, stalled, dead, stopped, completed, failed or diverged.

python scripts/status.py  # all in runs/
python scripts/status.py runs/mine
"""

from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(StatusConfig, "gpt2_ddp.reports.status:show_status")
