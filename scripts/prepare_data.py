"""Prepare data: text to token shards.

    python scripts/prepare_data.py                                                # Python's standard library
    python scripts/prepare_data.py --source 'texts/**/*.txt' --output data/texts  # your own text
    python scripts/prepare_data.py --config configs/data_fineweb_edu_10bt.yaml    # 10 billion tokens from the Hub

The same command again keeps prepared data; an interrupted command starts over.
"""

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(PrepareConfig, "gpt2_ddp.preparation.prepare:prepare")
