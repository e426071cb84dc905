"""A copy of a run at a URL, such as a bucket: kept up to date, restored on a machine without the run.

The rows are copied before the files of a checkpoint, and its manifest last. So a copied checkpoint with a manifest is
whole, and its rows are there. Every object is read back and compared. A lease keeps two machines apart, a lock two
processes of one machine. It is code of a process of its own: the trainer does not import it (`mirror_process`).
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from gpt2_ddp.checkpoint.run_files import CONFIG, METRICS, STATUS
from gpt2_ddp.errors import UserError
from gpt2_ddp.remote import MANIFEST, Bucket, describe

FIELD = "checkpoint.mirror"
RECORDS = (METRICS, CONFIG, STATUS)
LEASE = "lease.json"
EXPIRES = 60.0
"""Seconds after which a lease that its owner has not renewed is over. The machines' clocks may differ by less."""
LOOK = 1.0
"""Seconds between two looks for new checkpoints."""
PAUSE = 30.0
"""Longest pause in seconds after failures. The first pauses are shorter."""
ATTEMPTS = 4
"""Attempts to copy the end of the run, failures just before it included."""


class Mirror:
    """The copy of a run. The process of a killed trainer copies the rest first."""

    def __init__(self, bucket: Bucket, run: Path):
        self._run, self._bucket, self._url = run, bucket, bucket.url
        self._owner = f"{socket.gethostname()}:{run.absolute()}"
        self._status = os.open(run / ".mirror", os.O_RDWR | os.O_CREAT)
        fcntl.lockf(self._status, fcntl.LOCK_EX)

    @cached_property
    def _whole(self) -> dict[str, str]:
        """The SHA-256 of the copied checkpoints' manifests, by name. At the start, the newest is first."""
        return self._bucket.checkpoints()

    def restore(self) -> None:
        """Takes the lease, and the whole checkpoints that are newer than those here, with the records. Raises:
        UserError if the URL has another run, or another machine trains this one; any error of the storage."""
        self._take_lease()
        try:
            if self._whole:
                self._restore()
        except BaseException:
            self._bucket.remove(LEASE)
            raise

    def _restore(self) -> None:
        from gpt2_ddp.checkpoint.intact import CorruptCheckpoint, newest_intact, parse_state, verify  # with torch

        folder = self._run / "checkpoints"
        here = newest_intact(folder, weights=False)
        for name in self._whole:
            if here:
                with suppress(ValueError):
                    there = parse_state(self._bucket.read(f"{name}/state.json") or b"")
                    if there.progress.run_id != here.state.progress.run_id:
                        hint = f"has another run of this name than {self._run}; choose another run_name"
                        raise UserError(FIELD, self._url, hint)
                if here.step >= int(name[5:]):
                    break
            aside = folder / f".{name}.tmp"
            shutil.rmtree(aside, ignore_errors=True)
            self._bucket.get(name, aside)
            try:
                verify(aside)
            except CorruptCheckpoint as damage:
                shutil.rmtree(aside)
                warn(f"{self._url}/{name}: {damage.file.name} {damage.reason}; it is left out")
                continue
            for record in RECORDS:
                if (content := self._bucket.read(record)) is not None:
                    (self._run / record).write_bytes(content)
            shutil.rmtree(folder / name, ignore_errors=True)  # a damaged one
            aside.rename(folder / name)
            print(f"note: restored {name} from {self._url}", file=sys.stderr)

    def copy(self, ended: threading.Event) -> int:
        """Copies until the run has ended; then the rest, and gives the lease back. Returns 1 if that fails."""
        over = threading.Event()
        renewing = threading.Thread(target=self._renew_loop, args=(over,), daemon=True)
        renewing.start()
        failures, is_last, step = 0, False, None
        while True:
            try:
                if is_last:
                    over.set()
                    renewing.join()  # or a late renewal would follow the last status and the end of the lease
                self._copy(is_last)
                step, problem, failures = max(self._whole, default=None), "", 0
            except Exception as error:  # each kind of storage has its own
                problem = describe(error)
                if not failures:
                    warn(f"{self._url} cannot be written ({problem}); the run goes on and tries again")
                failures += 1
            status = {"mirror_step": step and int(step[5:]), "mirror_problem": problem}
            with suppress(OSError):  # the disk may be full for a while
                os.pwrite(self._status, json.dumps(status).ljust(2000).encode(), 0)
            if is_last and (not failures or failures >= ATTEMPTS):
                return int(failures > 0)
            if is_last:
                time.sleep(LOOK)
            else:
                is_last = ended.wait(min(LOOK * 5**failures, PAUSE))

    def _copy(self, is_last: bool) -> None:
        """Copies new checkpoints and the records, and deletes what the run has deleted; in the end also the lease."""
        places = sorted((self._run / "checkpoints").glob("step-*"), reverse=True)
        here = {place.name: content_of(place / MANIFEST) for place in places if place.name[5:].isdigit()}
        hashes = {name: hashlib.sha256(manifest).hexdigest() for name, manifest in here.items() if manifest}
        new = hashes.items() - self._whole.items()
        gone = self._whole.keys() - here.keys()
        if new or gone or is_last:
            self._check_lease()
            for record in RECORDS:
                if (content := content_of(self._run / record)) is not None:
                    self._bucket.write(record, content)
        for name, sha256 in sorted(new, reverse=True):
            manifest = here[name] or b""
            self._whole.pop(name, None)
            self._bucket.remove_all(name)  # a step that was saved again; a part of an earlier attempt
            with suppress(FileNotFoundError):  # deleted by the run meanwhile
                for file, entry in json.loads(manifest)["files"].items():
                    place = self._run / "checkpoints" / name / file
                    self._bucket.put(place, f"{name}/{file}", entry["sha256"])
                self._bucket.write(f"{name}/{MANIFEST}", manifest)
                self._whole[name] = sha256
        has_newest = max(here, default=None) in self._whole  # not if it was deleted meanwhile, or if the folder is lost
        for name in gone if has_newest else ():
            self._bucket.remove_all(name)
            del self._whole[name]
        if is_last:
            self._bucket.remove(LEASE)

    def _take_lease(self) -> None:
        seen = None
        while (lease := self._foreign_lease()) and time.time() - lease["time"] < EXPIRES:
            if seen not in (None, lease["time"]):
                hint = f"{lease['owner']} trains this run now; stop it, or choose another run_name"
                raise UserError(FIELD, self._url, hint)
            if not seen:
                print(f"note: waiting for {lease['owner']}, which trained this run until now", file=sys.stderr)
            seen = lease["time"]
            time.sleep(LOOK)
        self._renew()

    def _foreign_lease(self) -> dict[str, Any] | None:
        """The lease of another machine."""
        lease = json.loads(self._bucket.read(LEASE) or b"null")
        return lease if lease and lease["owner"] != self._owner else None

    def _check_lease(self) -> None:
        """Ends this process with exit code 0, which stops the run, if another machine has the lease."""
        if lease := self._foreign_lease():
            warn(f"{lease['owner']} has begun to train this run; stopping here")
            os._exit(0)

    def _renew(self) -> None:
        """Renews the lease. And shows the state of the run meanwhile."""
        if (content := content_of(self._run / STATUS)) is not None:
            self._bucket.write(STATUS, content)
        self._bucket.write(LEASE, json.dumps({"owner": self._owner, "time": time.time()}).encode())

    def _renew_loop(self, over: threading.Event) -> None:
        while not over.wait(EXPIRES / 4):
            with suppress(Exception):  # the next one may succeed
                self._check_lease()
                self._renew()


def content_of(file: Path) -> bytes | None:
    """The content of a file; None for no file."""
    with suppress(FileNotFoundError):
        return file.read_bytes()
    return None


def warn(text: str) -> None:
    with suppress(BrokenPipeError):  # after the end of a killed trainer, nobody may read
        print(f"warning: {text}", file=sys.stderr, flush=True)
