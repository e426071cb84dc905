"""Draw one or several runs: report.html, a single file, and report.png.

python scripts/report.py  # the built-in run
python scripts/report.py --runs runs/a runs/b --output runs/a-against-b  # overlaid
python scripts/report.py --runs runs/a runs/b --output runs/groups.json  # and groups, as JSON
python scripts/report.py runs/a --every 30  # again every 30 s, until the run has ended
"""

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(ReportConfig, "gpt2_ddp.reports.report:report")
