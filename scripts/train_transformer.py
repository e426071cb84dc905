"""Train a small transformer language model made of torch.nn's layers.

    python scripts/train_transformer.py                       # one process
    python scripts/train_transformer.py --launch.processes 2  # two, started from Python
    torchrun --nproc_per_node 2 scripts/train_transformer.py --launch.backend gloo

The same command again resumes the run.
"""

from gpt2_ddp.config.jobs import TransformerConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(
        TransformerConfig,
        "gpt2_ddp.tasks.command:start_job",
        default="configs/jobs/transformer.yaml",
    )
