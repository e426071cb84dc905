"""The process that mirrors a run, as the trainer sees it: started, watched, and waited for in the
end.

    trainer, main process                      process (remote/transfer.py, remote/mirror.py)
    open_mirror: --action=restore, waits   ->  restores what is newer at the URL, and ends
    MirrorProcess: --action=mirror         ->  copies while the run runs
    writes checkpoints and rows            ->  finds them in the run folder
    status(), at each heartbeat            <-  writes .mirror, at each progress
    close(): closes the standard input     ->  copies the rest, gives the lease back, ends
    waits; kills it without progress

The standard input also ends after `kill -9` of the trainer. Signals do not end the process: they
are blocked. An exit code of 0 before the end means that another machine has the lease.
"""

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from subprocess import PIPE, TimeoutExpired
from typing import Any

from gpt2_ddp.distributed.environment import STOPPED, record_exit
from gpt2_ddp.distributed.process import run_module, start_module, this_process
from gpt2_ddp.distributed.ranks import LONGEST, on_main
from gpt2_ddp.distributed.signals import SIGNALS
from gpt2_ddp.distributed.watchdog import FIRST_TIMEOUT, Watchdog
from gpt2_ddp.errors import is_main_process
from gpt2_ddp.files import read_json
from gpt2_ddp.records.rows import PATIENCE, is_complete

RESTART = 60.0
"""Least seconds from a start of the process to the next one, after a crash."""
SILENCE = 180.0
"""Seconds without progress after which the process is killed at the end of the run. A part of an
object may have 100 MB."""
FIRST_NOTE = 10.0
"""Seconds until a line says what the end of the run waits for."""
NOTES = 30.0
"""Seconds between two of these lines."""
FAILED = 1
"""Exit code of the process if the storage failed to the last."""


class MirrorProcess:
    """The process.

    Args:
        command: the words that start it, without its action.
        wait_longer: called while its end is waited for.
    """

    def __init__(
        self, command: list[str], run: Path, wait_longer: Callable[[], object] = lambda: None
    ):
        self._command = command
        self._run = run
        self._wait_longer = wait_longer
        self._start()

    def _start(self) -> None:
        self._begun = time.monotonic()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # of the process, too
        self._process = start_module(*self._command, "--action=mirror", stdin=PIPE)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def status(self) -> dict[str, Any]:
        """The newest step that is there, and why the last attempt to copy failed, for status.json.
        Stops the run if another machine has begun to train it: then the process has ended with 0.
        Starts it again if it has crashed."""
        code = self._process.poll()
        if code == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        elif code and time.monotonic() > self._begun + RESTART:
            self._start()
        return self._read_status()

    def _read_status(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return read_json(self._run / ".mirror")
        return {}

    def close(self) -> bool:
        """Ends the process, which first copies the rest: for at most 20 s, unless the run is
        complete. Starts it again, once, if it has crashed or makes no progress. Returns whether all
        is there; prints a warning if not."""
        is_taken = self._process.poll() == 0  # another machine has the lease
        code = self._finish()
        if code not in (0, FAILED, -signal.SIGALRM):
            note = f"the process that copies the run ended with {code}; it is started again"
            print(f"note: {note}", file=sys.stderr)
            self._start()
            code = self._finish()
        if code == 0 and not is_taken:
            return True
        problem = self._read_status().get("mirror_problem")
        if not problem:
            problem = f"the process that copies it ended with {code}"
        lacks = f"checkpoint.mirror lacks the end of the run ({problem})"
        print(f"warning: {lacks}; the same command copies it", file=sys.stderr)
        return False

    def _finish(self) -> int:
        """Lets the process copy the rest, and returns its exit code. Prints what is waited for.
        Kills the process if it makes no progress."""
        assert self._process.stdin
        self._process.stdin.close()
        self._wait_longer()
        begun = time.monotonic()
        progressed = begun
        before = self._progress()
        note = begun + FIRST_NOTE
        limit = SILENCE if is_complete(self._run) else PATIENCE + FIRST_NOTE
        while (code := self._process.poll()) is None:
            with suppress(TimeoutExpired):
                self._process.wait(0.5)
            now = time.monotonic()
            if (progress := self._progress()) != before:
                before = progress
                progressed = now
                self._wait_longer()
            if now > note:
                self._print_note(now - progressed)
                note = now + NOTES
            if now > progressed + limit:
                self._process.kill()
        return code

    def _progress(self) -> int:
        """Another number after each progress of the process."""
        with suppress(OSError):
            return (self._run / ".mirror").stat().st_mtime_ns
        return 0

    def _print_note(self, silence: float) -> None:
        step = self._read_status().get("mirror_step")
        content = "no checkpoint yet" if step is None else f"the checkpoint of step {step}"
        if silence > FIRST_NOTE:
            content += f"; no progress for {silence:.0f} s"
        url_flag = next(word for word in self._command if word.startswith("--url="))
        url = url_flag.removeprefix("--url=")
        print(f"note: waiting for the copy of the run's end: {url} has {content}", file=sys.stderr)

    def end(self, *error: object) -> None:
        """`close`, as the end of a `with`. Raises: SystemExit 75 if a complete run is not there as
        a whole: the same command copies the rest."""
        if not self.close() and error == (None, None, None) and is_complete(self._run):
            raise SystemExit(record_exit(STOPPED))


def open_mirror(
    url: str, run: Path, watchdog: Watchdog, closing: ExitStack
) -> Callable[[], dict[str, Any]]:
    """Restores what is newer at the URL than here, and copies the run to it until `closing`, on the
    main process. Returns the mirror's `status`. Collective.

    Raises: UserError, on every rank, if the URL cannot be read, has another run or a damaged one,
    or another machine trains this one.
    """
    watchdog.heartbeat("restoring", timeout=LONGEST.total_seconds())
    process = this_process()
    # the fields of `mirror.Lease`, which the trainer does not import
    lease = {
        "owner": f"{process.host}:{run.absolute()}",
        "id": uuid.uuid4().hex,
        "machine": process.machine,
        "pid": process.pid,
        "started": process.started,
    }
    command = [
        "gpt2_ddp.remote.transfer",
        f"--url={url.rstrip('/')}/{run.name}",
        f"--folder={run}",
        f"--lease={json.dumps(lease)}",
    ]
    on_main(lambda: run_module(*command, "--action=restore"))
    if not is_main_process():
        return dict
    wait_longer = partial(watchdog.heartbeat, "copying to the mirror", timeout=FIRST_TIMEOUT)
    mirror = MirrorProcess(command, run, wait_longer)
    closing.push(mirror.end)
    return mirror.status
