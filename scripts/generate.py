"""Continue prompts with a trained model.

    python scripts/generate.py runs/stdlib --prompts "def main(" "import os" --num_samples 2
    python scripts/generate.py runs/gpt2_124m --temperature 0  # always the likeliest token

Samples go to standard output. A single sample is printed while it is generated.
"""

from gpt2_ddp.config.tools import GenerateConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(GenerateConfig, "gpt2_ddp.tasks.trained_model:generate_text")
