"""A copy of a run at a URL, such as a bucket: kept up to date in the background, restored on a machine without the run.

The rows are copied before the files of a checkpoint, and its manifest last. So a copied checkpoint with a manifest is
whole, and its rows are there. Every object is read back and compared. A lease keeps two machines apart.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.checkpoint import MANIFEST, STATE, Checkpoint, list_checkpoints
from gpt2_ddp.checkpoint.intact import CorruptCheckpoint, newest_intact, parse_state, verify
from gpt2_ddp.checkpoint.run_files import CONFIG, METRICS, STATUS
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.distributed.ranks import LONGEST, on_main
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json, sha256_file
from gpt2_ddp.remote import Bucket, describe, reading

FIELD = "checkpoint.mirror"
RECORDS = (METRICS, CONFIG, STATUS)
LEASE = "lease.json"
EXPIRES = 60.0
"""Seconds after which a lease that its owner has not renewed is over. The machines' clocks may differ by less."""
LOOK = 1.0
"""Seconds between two looks for new checkpoints."""
PATIENCE = 20.0
"""Longest wait in seconds when the run is stopped."""
RETRIES = (1.0, 5.0, 30.0)
"""Seconds before the next attempt after one, two and more failures in a row."""


class Mirror:
    """The copy of a run, which its main process starts."""

    def __init__(self, url: str, run: Path):
        self._run, self._url = run, f"{url.rstrip('/')}/{run.name}"
        self._owner = f"{socket.gethostname()}:{run.absolute()}"
        self._whole: dict[str, str] = {}  # manifests of the copied checkpoints, by name
        self._problem = ""  # of the newest attempt
        self._is_lost = False  # the lease, to another machine
        self._end = threading.Event()
        self._threads = [threading.Thread(target=loop, daemon=True) for loop in (self._copy_loop, self._lease_loop)]

    def start(self) -> None:
        """Takes the lease, restores what is newer there than here, and begins to copy. Raises: UserError if the URL
        cannot be read, has another run, or another machine trains this one."""
        self._bucket = Bucket(self._url, FIELD)
        with reading(self._url, FIELD):
            self._take_lease()
            try:
                self._whole = self._bucket.checkpoints()
                self._restore()
            except BaseException:
                self._bucket.remove(LEASE)
                raise
        for thread in self._threads:
            thread.start()

    def status(self) -> dict[str, Any]:
        """The newest step that is there, and why the last attempt to copy failed, for status.json."""
        steps = [int(name[5:]) for name in list(self._whole)]
        return {"mirror_step": max(steps, default=None), "mirror_problem": self._problem}

    def close(self) -> None:
        """Copies what is left, and gives the lease back. Gives up after `PATIENCE`, unless the run is complete."""
        copying = self._threads[0]
        if self._is_lost or not copying.is_alive():
            return
        self._end.set()
        copying.join(None if self._is_complete() else PATIENCE)
        if copying.is_alive() or self._problem:
            problem = self._problem or f"it takes more than {PATIENCE:g} s"
            warn(f"{self._url} lacks the end of the run: {problem}; the same command copies it")

    def _is_complete(self) -> bool:
        with suppress(OSError, ValueError):
            return read_json(self._run / STATUS).get("state") == "completed"
        return False

    def _restore(self) -> None:
        """Takes the whole checkpoints that are newer than those here, and with the first of them the records."""
        here = newest_intact(self._run / "checkpoints", weights=False)
        restored: list[str] = []
        for name in self._whole:
            if here:
                self._check_same_run(here, name)
                if here.step >= int(name[5:]):
                    break
            if self._fetch(name, with_records=not restored):
                restored.append(name)
        if restored:
            print(f"note: restored {', '.join(restored)} from {self._url}", file=sys.stderr)

    def _fetch(self, name: str, with_records: bool) -> bool:
        """Copies a checkpoint from there, unless it is damaged; before it is in place, maybe the records."""
        place = self._run / "checkpoints" / name
        aside = place.with_name(f".{name}.tmp")
        shutil.rmtree(aside, ignore_errors=True)
        self._bucket.get(name, aside)
        try:
            verify(aside)
        except CorruptCheckpoint as damage:
            shutil.rmtree(aside)
            warn(f"{self._url}/{name}: {damage.file.name} {damage.reason}; it is left out")
            return False
        for record in RECORDS if with_records else ():
            if (content := self._bucket.read(record)) is not None:
                (self._run / record).write_bytes(content)
        shutil.rmtree(place, ignore_errors=True)  # a damaged one
        aside.rename(place)
        return True

    def _check_same_run(self, here: Checkpoint, name: str) -> None:
        with suppress(ValueError):
            there = parse_state(self._bucket.read(f"{name}/{STATE}") or b"")
            if there.progress.run_id != here.state.progress.run_id:
                hint = f"has another run of this name than {self._run}; choose another run_name"
                raise UserError(FIELD, self._url, hint)

    def _copy_loop(self) -> None:
        failures = 0
        while not self._is_lost:
            is_last = self._end.is_set()
            try:
                self._copy(is_last)
                self._problem, failures = "", 0
            except Exception as error:  # each kind of storage has its own
                self._problem = describe(error)
                if not failures:
                    warn(f"{self._url} cannot be written ({self._problem}); the run goes on and tries again")
                failures += 1
            if is_last and (not failures or failures > len(RETRIES)):
                return
            self._end.wait(RETRIES[min(failures, len(RETRIES)) - 1] if failures else LOOK)
            if failures and self._end.is_set():
                time.sleep(LOOK)

    def _copy(self, is_last: bool) -> None:
        """Copies new checkpoints and the records, and deletes what the run has deleted; in the end also the lease."""
        here = {place.name: place for place in reversed(list_checkpoints(self._run / "checkpoints"))}
        new = dict(self._new(here))
        gone = self._whole.keys() - here.keys()
        if is_last:
            self._threads[1].join()  # or a late renewal would follow the last status and the end of the lease
        if new or gone or is_last:
            if not self._keeps_lease():
                return
            for record in RECORDS:
                if (self._run / record).is_file():
                    self._bucket.write(record, (self._run / record).read_bytes())
        for name, manifest in new.items():
            self._whole.pop(name, None)
            self._bucket.remove_all(name)  # a step that was saved again; a part of an earlier attempt
            with suppress(FileNotFoundError):  # deleted by the run meanwhile
                for file, entry in json.loads(manifest)["files"].items():
                    self._bucket.put(here[name] / file, f"{name}/{file}", entry["sha256"])
                self._bucket.write(f"{name}/{MANIFEST}", manifest)
                self._whole[name] = hashlib.sha256(manifest).hexdigest()
        has_newest = max(here, default=None) in self._whole  # not if it was deleted meanwhile, or if the folder is lost
        for name in gone if has_newest else ():
            self._bucket.remove_all(name)
            del self._whole[name]
        if is_last:
            self._bucket.remove(LEASE)

    def _new(self, here: dict[str, Path]) -> Iterator[tuple[str, bytes]]:
        """Names and manifests of the checkpoints that are not there."""
        for name, place in here.items():
            with suppress(FileNotFoundError):
                if sha256_file(place / MANIFEST) != self._whole.get(name):
                    yield name, (place / MANIFEST).read_bytes()

    def _take_lease(self) -> None:
        seen = None
        while (lease := self._lease()) and lease["owner"] != self._owner and time.time() - lease["time"] < EXPIRES:
            if seen not in (None, lease["time"]):
                hint = f"{lease['owner']} trains this run now; stop it, or choose another run_name"
                raise UserError(FIELD, self._url, hint)
            if not seen:
                print(f"note: waiting for {lease['owner']}, which trained this run until now", file=sys.stderr)
            seen = lease["time"]
            time.sleep(LOOK)
        self._renew()

    def _lease(self) -> dict[str, Any] | None:
        return json.loads(self._bucket.read(LEASE) or b"null")

    def _renew(self) -> None:
        """Renews the lease. And shows the state of the run meanwhile."""
        with suppress(FileNotFoundError):
            self._bucket.write(STATUS, (self._run / STATUS).read_bytes())
        self._bucket.write(LEASE, json.dumps({"owner": self._owner, "time": time.time()}).encode())

    def _lease_loop(self) -> None:
        while not self._end.wait(EXPIRES / 4):
            with suppress(Exception):  # the next one may succeed
                if self._keeps_lease():
                    self._renew()

    def _keeps_lease(self) -> bool:
        """Whether no other machine has the lease. Otherwise stops the run, which writes nothing more there."""
        lease = self._lease()
        if lease and lease["owner"] != self._owner and not self._is_lost:
            self._is_lost = True
            self._end.set()
            warn(f"{lease['owner']} has begun to train this run; stopping here")
            os.kill(os.getpid(), signal.SIGTERM)
        return not self._is_lost


def open_mirror(config: KeepConfig, run: Path, watchdog: Watchdog, closing: ExitStack) -> Callable[[], dict[str, Any]]:
    """Starts the mirror on the main process, and closes it with the stack; returns its `status`. What was newer there
    is here now. Collective."""
    mirror = Mirror(str(config.mirror), run)
    watchdog.heartbeat("restoring", timeout=LONGEST.total_seconds())
    on_main(mirror.start)
    closing.callback(mirror.close)
    return mirror.status


def warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
