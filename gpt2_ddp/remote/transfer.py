"""The process in which a training reads and writes what is at a URL: `python -m
gpt2_ddp.remote.transfer`.

So the libraries of storages, their threads and their crashes are not in the trainer. Torch is
imported only to restore a run.
"""

import signal
import sys
import threading
from pathlib import Path
from typing import Literal

from gpt2_ddp.config.base import Command
from gpt2_ddp.records.rows import PATIENCE, is_complete
from gpt2_ddp.remote.mirror import Lease, Mirror
from gpt2_ddp.remote.objects import Bucket, fetch_data, reading
from gpt2_ddp.script import run_command


class TransferConfig(Command):
    """What to copy"""

    action: Literal["data", "restore", "mirror"] = "data"
    """data: shards, into the folder; restore: a run, into the folder; mirror: a run, to the URL,
    until the standard input ends"""
    url: str = ""
    folder: str = ""
    lease: str = "{}"
    """of the process that trains, as JSON; for data none"""


def transfer(config: TransferConfig) -> int:
    """The command: copies, and returns its exit code."""
    folder = Path(config.folder)
    ended = threading.Event()

    def see_end() -> None:
        sys.stdin.read()
        if not is_complete(folder):
            signal.alarm(PATIENCE)  # ends this process
        ended.set()

    if config.action == "data":
        fetch_data(folder, config.url)
    elif config.action == "restore":
        with reading(config.url, "checkpoint.mirror") as bucket:
            Mirror(bucket, folder, Lease.model_validate_json(config.lease)).restore()
    else:
        lease = Lease.model_validate_json(config.lease)
        threading.Thread(target=see_end, daemon=True).start()
        return Mirror(Bucket(config.url), folder, lease).copy(ended)
    return 0


if __name__ == "__main__":
    run_command(TransferConfig, transfer)
