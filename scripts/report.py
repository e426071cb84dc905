"""Draw one or several runs: report.html, a single file, and report.png.

python scripts/report.py  # the built-in run
python scripts/report.py --runs runs/a runs/b --output runs/a-against-b  # overlaid
python scripts/report.py --runs runs/a runs/b --output runs/groups.json  # and groups, as JSON
"""

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(ReportConfig, "gpt2_ddp.reports.report:report")
