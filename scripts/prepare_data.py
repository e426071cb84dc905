"""Prepare data: text to token shards.

    python scripts/prepare_data.py  # Python's standard library
    python scripts/prepare_data.py --source 'texts/**/*.txt' --output data/texts  # your own text
    python scripts/prepare_data.py --config configs/data_fineweb_edu_10bt.yaml  # from the Hub

The same command again keeps prepared data; an interrupted command starts over.
"""

import os
from pathlib import Path

from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.distributed.process import CHILD
from gpt2_ddp.script import run_command


def main(config: PrepareConfig) -> None:
    from gpt2_ddp.preparation.prepare import prepare

    prepare(config)
    if CHILD not in os.environ:  # a training has started this, and goes on
        from gpt2_ddp.tasks.ending import next_training

        print(next_training(Path(config.folder)))


if __name__ == "__main__":
    run_command(PrepareConfig, main)
