"""Export a checkpoint to transformers' format, and compare the results.

    python scripts/export_hf.py runs/stdlib         # exports/stdlib-step-00000700
    python scripts/export_hf.py runs/gpt2_124m --output gpt2-mine
    python scripts/export_hf.py runs/stdlib --gguf  # also model.gguf, for llama.cpp

If transformers' results differ, exits with 1 and writes no folder. docs/export.md lists the files
and the comparisons.
"""

from gpt2_ddp.config.tools import ExportConfig
from gpt2_ddp.remote.copies import run_command_on_runs

if __name__ == "__main__":
    run_command_on_runs(ExportConfig, "gpt2_ddp.export.export:export_hf")
