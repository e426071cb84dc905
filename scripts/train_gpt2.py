"""Pretrain a GPT-2.

    python scripts/train_gpt2.py  # the built-in corpus, on this machine
    accelerate launch scripts/train_gpt2.py --config configs/gpt2_124m.yaml  # GPT-2 (124M) on GPUs
    torchrun --nproc_per_node 8 scripts/train_gpt2.py --config configs/gpt2_124m.yaml

The same command again resumes the run from its newest checkpoint.
"""

import os
from pathlib import Path

from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.distributed.environment import exit_code
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.script import run_command


def main(config: TrainingConfig) -> int:
    if is_main_process():
        from gpt2_ddp.data.manifest import missing_folders

        # a complete run needs no data
        if not os.path.exists(Path(config.output_dir, config.run_name)):
            from gpt2_ddp.data.fetch import missing_data

            if missing_folders(config):
                missing_data(config)
        print(f"{config.run_name}: loading PyTorch", flush=True)
    from gpt2_ddp.tasks.pretraining import make_pretraining
    from gpt2_ddp.training.loop import train

    result = train(config, make_pretraining)
    if result.outcome == "completed":
        from gpt2_ddp.tasks.comparison import print_comparison, print_forecast
        from gpt2_ddp.tasks.ending import print_end

        if is_main_process():
            print_comparison(result.run, config)
            print_forecast(result.run)
        print_end(result.run, "generate")
    return exit_code(result.outcome)


if __name__ == "__main__":
    run_command(
        TrainingConfig,
        main,
        default=training_default,
        settings_of="gpt2_ddp.tasks.pretraining:settings_of",
    )
