"""Score a checkpoint: loss, perplexity and bits per byte of a split, or tasks.

python scripts/evaluate.py runs/stdlib
python scripts/evaluate.py runs/stdlib --tasks cloze
torchrun --nproc_per_node 8 scripts/evaluate.py runs/gpt2_124m --mixed_precision bf16
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.tools import EvaluateConfig

if __name__ == "__main__":
    run_command(EvaluateConfig, "gpt2_ddp.tasks.checkpoints:evaluate_checkpoint")
