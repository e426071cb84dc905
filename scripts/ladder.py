"""Train small runs on a text, and foretell larger ones: how large, how long, how good?

    python scripts/ladder.py --data.path data/book --run_name book
    python scripts/ladder.py --data.path data/book --run_name book --minutes 60 --for_minutes 240
    python scripts/ladder.py --data.path data/book --run_name book --dry_run

The same command again resumes what is missing. See docs/ladder.md.
"""

from gpt2_ddp.config.plan import LadderConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(LadderConfig, "gpt2_ddp.sweep.ladder:climb", default="configs/ladder_small.yaml")
