"""The process that mirrors a run, as the trainer sees it: started, watched, and waited for in the end.

The end of its standard input is the end of the run, also after `kill -9` of the trainer. Signals do not end
it: they are blocked. Its status is in the file `.mirror` of the run folder.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from gpt2_ddp.distributed.process import run_module, start_module
from gpt2_ddp.distributed.ranks import LONGEST, on_main
from gpt2_ddp.distributed.signals import SIGNALS
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.files import read_json

RESTART = 60.0
"""Least seconds from a start of the process to the next one, after a crash."""


class MirrorProcess:
    """The process. `command`: the words that start it."""

    def __init__(self, command: list[str], run: Path):
        self._command, self._run = command, run
        self._start()

    def _start(self) -> None:
        self._begun = time.monotonic()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of the process, too
        self._process = start_module(*self._command, "--action=mirror", stdin=PIPE)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def status(self) -> dict[str, Any]:
        """The newest step that is there, and why the last attempt to copy failed, for status.json. Stops the run if
        another machine has begun to train it: then the process has ended with 0. Starts it again if it has crashed."""
        code = self._process.poll()
        if code == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        elif code and time.monotonic() > self._begun + RESTART:
            self._start()
        with suppress(OSError, ValueError):
            return read_json(self._run / ".mirror")
        return {}

    def close(self) -> None:
        """Ends the process, which first copies the rest, for at most 20 s unless the run is complete."""
        assert self._process.stdin
        self._process.stdin.close()
        if self._process.wait():
            print("warning: checkpoint.mirror lacks the end of the run; the same command copies it", file=sys.stderr)


def open_mirror(url: str, run: Path, watchdog: Watchdog, closing: ExitStack) -> Callable[[], dict[str, Any]]:
    """Restores what is newer at the URL than here, and copies the run to it until `closing`, on the main process.
    Returns the mirror's `status`. Collective. Raises: UserError, on every rank, if the URL cannot be read, has another
    run, or another machine trains this one."""
    watchdog.heartbeat("restoring", timeout=LONGEST.total_seconds())
    command = ["gpt2_ddp.transfer", f"--url={url.rstrip('/')}/{run.name}", f"--folder={run}"]
    on_main(lambda: run_module(*command, "--action=restore"))
    if not is_main_process():
        return dict
    mirror = MirrorProcess(command, run)
    closing.callback(mirror.close)
    return mirror.status
