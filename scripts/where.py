"""Find the steps that trained on a text, or the texts that a step trained on.

    python scripts/where.py runs/stdlib --text "def insort_right"
    python scripts/where.py runs/stdlib --file quote.txt --json
    python scripts/where.py runs/stdlib --step 120 --rank 0
    python scripts/where.py runs/stdlib --spike grad_norm

Reads the run's rows and its data. docs/where.md explains the answers.
"""

from gpt2_ddp.config.tools import WhereConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(WhereConfig, "gpt2_ddp.reports.where:answer_question")
