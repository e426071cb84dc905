"""Plan a training: memory, time, disk, price and user errors, without starting it.

    python scripts/plan.py --config configs/gpt2_124m.yaml --gpu "H100 80GB HBM3" --gpus 8 \\
        --price 2.5
    torchrun --nproc_per_node 2 scripts/plan.py  # with as many processes as the launcher starts

Replace train_gpt2.py with plan.py in a command; keep the flags. Exit codes: 2 after user errors,
equal to those of the training; 1 if memory or disk do not suffice. See docs/plan.md.
"""

from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import training_default
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(
        PlanConfig,
        "gpt2_ddp.plan.plan:show_plan",
        default=training_default,
        settings_of="gpt2_ddp.tasks.pretraining:settings_of",
    )
