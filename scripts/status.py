"""Print the state of runs: running, stalled, dead, stopped, completed, failed or diverged.

python scripts/status.py              # all in runs/
python scripts/status.py runs/mine
"""

from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(StatusConfig, "gpt2_ddp.reports.status:show_status")
