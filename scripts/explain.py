"""Explain why two runs differ: the first cause, then the others, and the first steps that differ.

    python scripts/explain.py runs/a runs/b
    python scripts/explain.py runs/a s3://BUCKET/runs/b --json

Exit code: 0 if the runs are equal, 1 if they differ for a reason that they record. 3 if nothing
that they record explains it, or if a run was changed after it was written. docs/explain.md has
examples.
"""

from gpt2_ddp.config.tools import ExplainConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(ExplainConfig, "gpt2_ddp.reports.explain:explain_runs")
