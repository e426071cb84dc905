"""What a training takes: memory, time, disk and price; and everything that would be refused.

    python scripts/plan.py --config configs/gpt2_124m.yaml --gpu "H100 80GB HBM3" --gpus 8 --price 2.5
    python scripts/plan.py --measure                              # this machine, by 25 steps of the real training
    torchrun --nproc_per_node 2 scripts/plan.py --measure --json  # with as many processes as the launcher starts

The command is train_gpt2.py's with the script's name exchanged. It ends with 2 where that one would be refused, with
the same lines, and with 1 where memory or disk do not suffice. See docs/plan.md.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import training_default

if __name__ == "__main__":
    run_command(PlanConfig, "gpt2_ddp.plan.plan:show_plan", default=training_default)
