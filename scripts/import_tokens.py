"""Import token files of llm.c, modded-nanogpt or nanoGPT as a folder of token shards.

    python scripts/import_tokens.py llm.c/dev/data/fineweb10B  # fineweb_train_*.bin, ..._val_*.bin
    python scripts/import_tokens.py nanoGPT/data/openwebtext  # train.bin, val.bin

The name of each file has its split: train or val. The first tokens are printed as text: compare
them, since the files do not name their tokenizer (--tokenizer).
"""

from gpt2_ddp.config.tools import ImportTokensConfig
from gpt2_ddp.script import run_command


def main(config: ImportTokensConfig) -> None:
    from gpt2_ddp.preparation.token_files import import_tokens
    from gpt2_ddp.tasks.ending import next_training

    print(next_training(import_tokens(config)))


if __name__ == "__main__":
    run_command(ImportTokensConfig, main)
