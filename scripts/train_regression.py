"""Linear regression, y = 2x + 3, on any number of processes.

    python scripts/train_regression.py                                        # one process
    python scripts/train_regression.py --launch.processes 2                   # two, started from Python
    torchrun --nproc_per_node 2 scripts/train_regression.py                   # two, by torchrun
    accelerate launch --multi_gpu --num_processes 2 scripts/train_regression.py

The same command again resumes the run.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.jobs import RegressionConfig
from gpt2_ddp.distributed.environment import exit_code, is_main_process
from gpt2_ddp.distributed.spawn import run_processes


def train(config: RegressionConfig) -> str:
    from safetensors.torch import load_file

    from gpt2_ddp.tasks.jobs import run_job

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        line = load_file(result.checkpoint / "model.safetensors")
        found = f"weight {line['linear.weight'].item():.4f}, bias {line['linear.bias'].item():.4f}"
        print(f"{found}, loss {result.metrics['val_loss']:.4f}, {result.seconds:.1f} s")
    return result.outcome


def main(config: RegressionConfig) -> int:
    return exit_code(run_processes(train, config.launch.processes, config))


if __name__ == "__main__":
    run_command(RegressionConfig, main, default="configs/jobs/regression.yaml")
