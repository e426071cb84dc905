"""Import a transformers model as a checkpoint, as a training with --train.init_from does.

    python scripts/import_hf.py hub:openai-community/gpt2     # from the Hub
    python scripts/import_hf.py exports/stdlib-step-00000700  # a folder with config.json

It prints the checkpoint, which is in the user's cache; other commands take it, too. The same
command again keeps an import of the same files. docs/export.md lists what is refused.
"""

from gpt2_ddp.config.tools import ImportConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(ImportConfig, "gpt2_ddp.export.imports:import_hf")
