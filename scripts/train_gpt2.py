"""Pretrain a GPT-2.

    python scripts/train_gpt2.py                                               # the built-in corpus, on this machine
    accelerate launch scripts/train_gpt2.py --config configs/gpt2_124m.yaml    # GPT-2 (124M) on your GPUs
    torchrun --nproc_per_node 8 scripts/train_gpt2.py --config configs/gpt2_124m.yaml

The same command again resumes the run from its newest checkpoint.
"""

import os
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, CalledProcessError

from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.distributed.environment import exit_code
from gpt2_ddp.distributed.process import run_module
from gpt2_ddp.errors import UserError, is_main_process
from gpt2_ddp.script import run_command


def main(config: TrainingConfig) -> int:
    if is_main_process():
        from gpt2_ddp.data.manifest import missing_folders

        is_new = not os.path.exists(Path(config.output_dir, config.run_name))
        if is_new and missing_folders(config):  # a complete run needs no data
            from gpt2_ddp.data.missing import missing_data

            missing_data(config)
        print(f"{config.run_name}: loading PyTorch", flush=True)
    from gpt2_ddp.tasks.pretraining import make_pretraining
    from gpt2_ddp.training.loop import train

    result = train(config, make_pretraining)
    if result.outcome == "completed" and is_main_process():
        report = result.run / "report.html"
        if not find_spec("matplotlib"):
            report = "none: matplotlib is not installed"
        else:
            try:
                run_module("gpt2_ddp", "report", str(result.run), stdout=DEVNULL)
            except (UserError, CalledProcessError) as error:
                report = f"none: {error}"
        print(f"report: {report}")
    return exit_code(result.outcome)


if __name__ == "__main__":
    run_command(TrainingConfig, main, default=training_default)
