"""Pretrain a GPT-2.

    accelerate launch scripts/train_gpt2.py                                       # the built-in corpus, on this machine
    accelerate launch scripts/train_gpt2.py --config configs/gpt2_124m.yaml       # GPT-2 (124M) on your GPUs
    torchrun --nproc_per_node 8 scripts/train_gpt2.py --config configs/gpt2_124m.yaml --train.compile

The same command given again goes on where the run stopped.
"""

from gpt2_ddp.config.cli import is_main_process, run_command
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.processes.environment import exit_code


def main(config: TrainingConfig) -> int:
    from gpt2_ddp.reports.report import write_report
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    result = train(config, Pretraining)
    if result.outcome == "completed" and is_main_process():
        print(f"report: {write_report([result.run], result.run)}")
    return exit_code(result.outcome)


if __name__ == "__main__":
    run_command(TrainingConfig, main, default="configs/gpt2_stdlib.yaml")
