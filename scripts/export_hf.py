"""Export a checkpoint to transformers' format, and check there that it computes the same.

    python scripts/export_hf.py runs/stdlib                                       # exports/stdlib-step-00001000
    python scripts/export_hf.py runs/gpt2_124m --output gpt2-mine
    python scripts/export_hf.py runs/stdlib --gguf                                # and model.gguf, for llama.cpp
    python scripts/export_hf.py runs/gpt2_124m --push_to_hub me/gpt2-mine         # needs `hf auth login`

Exits with 1, and leaves the folder under the name of .rejected, where transformers makes something else of it;
docs/export.md tells what is written and what is compared.
"""

from gpt2_ddp.config.cli import run_command
from gpt2_ddp.config.tools import ExportConfig

if __name__ == "__main__":
    run_command(ExportConfig, "gpt2_ddp.export.export:export_hf")
