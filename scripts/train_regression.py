"""Linear regression, y = 2x + 3, on any number of processes.

    python scripts/train_regression.py                       # one process
    python scripts/train_regression.py --launch.processes 2  # two, started from Python
    torchrun --nproc_per_node 2 scripts/train_regression.py  # two, by torchrun
    accelerate launch --multi_gpu --num_processes 2 scripts/train_regression.py

The same command again resumes the run.
"""

from gpt2_ddp.config.jobs import RegressionConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(
        RegressionConfig, "gpt2_ddp.tasks.command:start_job", default="configs/jobs/regression.yaml"
    )
