"""Train a small transformer language model made of torch.nn's layers.

    python scripts/train_transformer.py                                       # one process
    python scripts/train_transformer.py --launch.processes 2                  # two, started from Python
    torchrun --nproc_per_node 2 scripts/train_transformer.py --launch.backend gloo

The same command again resumes the run.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.jobs import TransformerConfig
from gpt2_ddp.distributed.environment import exit_code, is_main_process
from gpt2_ddp.distributed.spawn import run_processes


def train(config: TransformerConfig) -> str:
    from gpt2_ddp.tasks.jobs import run_job

    result = run_job(config)
    if result.outcome == "completed" and is_main_process():
        print(f"mean loss of the last epoch {result.metrics['train_loss']:.4f}, {result.seconds:.1f} s")
    return result.outcome


def main(config: TransformerConfig) -> int:
    return exit_code(run_processes(train, config.launch.processes, config))


if __name__ == "__main__":
    run_command(TransformerConfig, main, default="configs/jobs/transformer.yaml")
