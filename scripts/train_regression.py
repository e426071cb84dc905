"""Linear regression, y = 2x + 3, on any number of processes.

    python scripts/train_regression.py                                        # one process
    python scripts/train_regression.py --launch.processes 2                   # two, started from Python
    torchrun --nproc_per_node 2 scripts/train_regression.py                   # two, by torchrun
    accelerate launch --multi_gpu --num_processes 2 scripts/train_regression.py

The same command again resumes the run.
"""

from functools import partial
from typing import Any

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.jobs import RegressionConfig
from gpt2_ddp.tasks.command import start_job


def summary(result: Any) -> str:
    from safetensors.torch import load_file

    line = load_file(result.checkpoint / "model.safetensors")
    weight, bias = line["linear.weight"].item(), line["linear.bias"].item()
    return f"weight {weight:.4f}, bias {bias:.4f}, loss {result.metrics['val_loss']:.4f}"


if __name__ == "__main__":
    run_command(RegressionConfig, partial(start_job, summary=summary), default="configs/jobs/regression.yaml")
