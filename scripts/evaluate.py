"""Score a checkpoint: its split, its test samples or tasks. Write the predictions of a small job.

python scripts/evaluate.py runs/stdlib  # loss, perplexity, bits per byte
python scripts/evaluate.py runs/stdlib --tasks hellaswag my/items.jsonl
python scripts/evaluate.py runs/photos --images photo.jpg folder  # their likeliest class
torchrun --nproc_per_node 8 scripts/evaluate.py runs/gpt2_124m --mixed_precision bf16
"""

from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(EvaluateConfig, "gpt2_ddp.tasks.checkpoints:evaluate_checkpoint")
