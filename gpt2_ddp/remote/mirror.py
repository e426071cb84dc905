"""A copy of a run at a URL, such as a bucket: kept up to date, restored on a machine without the
run.

    restore, before the run starts             copy, while it runs and at its end
    1. take lease.json at the URL              1. look for new folders checkpoints/step-*
    2. newest whole checkpoint  ->  here       2. check the lease
    3. rows, config, status     ->  here       3. rows, config, status   ->  URL
    4. older checkpoints        ->  here       4. files of a checkpoint  ->  URL
                                               5. its manifest.json      ->  URL
                                               6. delete what the run has deleted

The rows are copied before the files of a checkpoint, and its manifest last. So a copied checkpoint
with a manifest is whole, and its rows are there. Every object is read back and compared.

A lease keeps two machines apart: its owner renews it every 15 s. A lock of the file `.mirror` keeps
two processes of one machine apart. All of this runs in a process of its own. The trainer does not
import this module; it starts and watches the process by `mirror_process`.
"""

import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, Field

from gpt2_ddp.distributed.process import Process
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import below, free_name, write_atomically
from gpt2_ddp.records.rows import (
    METRICS,
    RECORDS,
    STATUS,
    ended_status,
    is_event,
    parse_lines,
    read_events,
)
from gpt2_ddp.remote.objects import CHECKPOINT, MANIFEST, Bucket, describe, listed_files, step_of
from gpt2_ddp.state import FIRST_CHAIN

if TYPE_CHECKING:
    from gpt2_ddp.checkpoint.format import Checkpoint

FIELD = "checkpoint.mirror"
LEASE = "lease.json"
OVERTAKEN = "overtaken"
"""End of the name of a checkpoint whose steps another machine has trained, too. It is no defect of
the run."""
EXPIRES = 60.0
"""Seconds after which a lease that its owner has not renewed is over."""
POLL = 1.0
"""Seconds between two looks for new checkpoints."""
PAUSE = 30.0
"""Longest pause in seconds after failures. The first pauses are shorter."""
ATTEMPTS = 4
"""Attempts to copy the end of the run, failures just before it included."""


class Lease(BaseModel):
    """The process that trains a run, and the time when it said so last, by its own clock.
    `mirror_process` makes it."""

    owner: str  # machine and folder, for people: containers of one image may share both
    time: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    id: str = ""  # random
    machine: str = ""
    pid: int = 0
    started: int = 0

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended; False on other machines."""
        return Process(self.owner, self.machine, self.pid, self.started).is_gone


class Mirror:
    """The copy of a run. The process of a killed trainer copies the rest first. `lease`:
    of the trainer."""

    def __init__(self, bucket: Bucket, run: Path, lease: Lease):
        self._run = run
        self._bucket = bucket
        self._url = bucket.url
        self._lease = lease
        self._begun: set[str] = set()  # checkpoints that are there in part, or whole unknown to us
        self._ended = threading.Event()
        self._status = os.open(run / ".mirror", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        fcntl.lockf(self._status, fcntl.LOCK_EX)
        bucket.on_progress = self._touch

    def _touch(self) -> None:
        """Shows the trainer that there is progress: by the time of the file."""
        os.utime(self._status)

    @cached_property
    def _whole(self) -> dict[str, str]:
        """The SHA-256 of the copied checkpoints' manifests, by name. At the start, the
        newest is first."""
        return self._bucket.checkpoints()

    def restore(self) -> None:
        """Takes the lease, and the whole checkpoints that are newer than those here, with the
        records.

        Raises: UserError if the URL has another run, or if another machine trains this one. Also
        if there is a newer state of which nothing is intact. Any error of the storage.
        """
        self._take_lease()
        try:
            if any(name == METRICS or CHECKPOINT.fullmatch(name) for name in self._bucket.names()):
                self._restore()
        except BaseException:
            with suppress(Exception):  # of the storage: the first error counts
                self._give_back()
            raise

    def _restore(self) -> None:
        from gpt2_ddp.checkpoint.verify import newest_intact  # noqa: PLC0415  torch: only to restore

        folder = self._run / "checkpoints"
        newest_here = newest_intact(folder, weights=False)
        if newest_here:
            self._check_is_same_run(newest_here)
        step_here = newest_here.step if newest_here else -1
        is_restored = False  # whether the newest one that is missing here has been restored
        damaged = 0
        for name, sha256 in self._whole.items():  # the newest first
            if not is_restored and step_of(name) <= step_here:
                # What is here is as new. But if newer ones there are damaged, look on: a storage of
                # which nothing is intact is refused, not overwritten.
                if not damaged or self._fetch(name):
                    break
                damaged += 1
                continue
            if is_restored and content_sha256(folder / name / MANIFEST) == sha256:
                continue
            fetched = self._fetch(name)
            if not fetched:
                damaged += 1
                continue
            if not is_restored:
                self._take_records()
                self._set_aside_unrecorded()  # those here
                is_restored = True
            shutil.rmtree(folder / name, ignore_errors=True)  # a damaged one
            fetched.rename(folder / name)
            print(f"note: restored {name} from {self._url}", file=sys.stderr)
        if is_restored:
            self._set_aside_unrecorded()  # those of another machine that the bucket still had
        elif damaged == len(self._whole):
            self._refuse_damage(step_here)

    def _check_is_same_run(self, checkpoint: "Checkpoint") -> None:
        """Raises: UserError if the bucket has another run than the one of a checkpoint here."""
        from gpt2_ddp.checkpoint.verify import parse_state  # noqa: PLC0415  torch: only to restore

        for name in self._whole:
            with suppress(ValueError):
                state = parse_state(self._bucket.read(f"{name}/state.json") or b"")
                if state.progress.run_id != checkpoint.state.progress.run_id:
                    hint = f"has another run of this name than {self._run}; choose another run_name"
                    raise UserError(FIELD, self._url, hint)
                return

    def _fetch(self, name: str) -> Path | None:
        """A hidden folder with the copy of a checkpoint; None, with a warning, if it is damaged."""
        from gpt2_ddp.checkpoint.verify import (  # noqa: PLC0415  torch: only to restore
            CorruptCheckpoint,
            verify,
        )

        aside = self._run / "checkpoints" / f".{name}.tmp"
        if aside.is_symlink():
            aside.unlink()
        shutil.rmtree(aside, ignore_errors=True)
        self._bucket.get_checkpoint(name, aside)
        try:
            verify(aside)
        except CorruptCheckpoint as damage:
            shutil.rmtree(aside)
            warn(f"{self._url}/{name}: {damage.file.name} {damage.reason}; it is left out")
            return None
        return aside

    def _take_records(self) -> None:
        for record in RECORDS:
            if (content := self._bucket.read(record)) is not None:
                write_atomically(self._run / record, [content])

    def _set_aside_unrecorded(self) -> None:
        """Sets the checkpoints aside that the restored rows do not record. A machine went on for a
        while after its last copy, and another one trained the same steps."""
        from gpt2_ddp.checkpoint.format import (  # noqa: PLC0415  torch: only to restore
            list_checkpoints,
        )
        from gpt2_ddp.checkpoint.verify import (  # noqa: PLC0415  torch: only to restore
            CorruptCheckpoint,
            record_defect,
            verify,
        )

        for path in list_checkpoints(self._run / "checkpoints"):
            try:
                checkpoint = verify(path, weights=False)
            except CorruptCheckpoint:  # the start of the run sets it aside
                continue
            chain = checkpoint.state.log.chain
            events, before = read_events(self._run / METRICS, chain)
            defect = record_defect(checkpoint, events, before)
            if not defect and not before and chain != FIRST_CHAIN:
                defect = f"its chain is not in {METRICS}"
            if defect:
                aside = path.rename(free_name(path.with_name(f"{path.name}.{OVERTAKEN}")))
                warn(f"{path}: {defect}, which is from {self._url}; moved to {aside.name}")

    def _refuse_damage(self, step: int) -> None:
        """Raises: UserError if the bucket has, or had, checkpoints after a step, of which none is
        whole. But a machine may have been lost while it copied the first one."""
        from gpt2_ddp.checkpoint.verify import (  # noqa: PLC0415  torch: only to restore
            recorded_checkpoint,
        )

        rows = parse_lines(io.BytesIO(self._bucket.read(METRICS) or b""))
        events = [line.row for line in rows if is_event(line.row)]
        steps = {saved.step for saved in map(recorded_checkpoint, events) if saved}
        steps |= {step_of(name) for name in self._bucket.names() if CHECKPOINT.fullmatch(name)}
        newest = max(steps, default=-1)
        if newest <= step:
            return
        if step < 0 and not self._whole and len(steps) == 1:
            content = f"no whole checkpoint yet, only a part of that of step {newest}"
            warn(f"{self._url} has {content}; the run starts anew")
            return
        problem = f"has a run up to step {newest} or later, of which no checkpoint is intact"
        hint = "restore them from a copy, remove the run there, or choose another run_name"
        raise UserError(FIELD, self._url, f"{problem}; nothing is changed there; {hint}")

    def copy(self, ended: threading.Event) -> int:
        """Copies until the run has ended; then the rest, and gives the lease back. Returns 1 if
        that fails."""
        self._ended = ended
        over = threading.Event()
        renewing = threading.Thread(target=self._renew_loop, args=(over,), daemon=True)
        renewing.start()
        failures = 0
        is_last = False
        newest = None
        while True:
            try:
                if is_last:
                    over.set()
                    # or a late renewal would follow the last status and the end of the lease
                    renewing.join()
                self._copy(is_last)
                newest = max(self._whole, default=None)
                problem = ""
                failures = 0
            except Exception as error:  # each kind of storage has its own
                problem = describe(error)
                if not failures:
                    effect = "the run goes on and tries again"
                    warn(f"{self._url} cannot be written ({problem}); {effect}")
                failures += 1
            self._put_status(newest, problem)
            if not is_last:
                is_last = ended.wait(min(POLL * 5**failures, PAUSE))
            elif not failures or failures >= ATTEMPTS:
                return int(failures > 0)
            else:
                time.sleep(POLL)

    def _put_status(self, newest: str | None, problem: str) -> None:
        """Writes what the trainer adds to status.json: the newest checkpoint that is copied, and
        why the last attempt failed."""
        step = step_of(newest) if newest else None
        status = {"mirror_step": step, "mirror_problem": problem}
        with suppress(OSError):  # the disk may be full for a while
            # in place, padded: the file is the lock, too
            os.pwrite(self._status, json.dumps(status).ljust(2000).encode(), 0)

    @property
    def _checkpoints(self) -> Path:
        return self._run / "checkpoints"

    def _names(self) -> list[str]:
        """The names of the run's checkpoints, the newest first."""
        names = [path.name for path in self._checkpoints.glob("step-*")]
        return sorted((name for name in names if name[5:].isdigit()), reverse=True)

    def _copy(self, is_last: bool) -> None:
        """Copies new checkpoints and the records, and deletes what the run has deleted. The last
        time, gives the lease back."""
        manifests = {
            name: content_of(self._checkpoints / name / MANIFEST) for name in self._names()
        }
        hashes = {
            name: hashlib.sha256(manifest).hexdigest()
            for name, manifest in manifests.items()
            if manifest
        }
        new = hashes.items() - self._whole.items()
        gone = (self._whole.keys() | self._begun) - manifests.keys()
        if new or gone or is_last:
            self._check_lease(hashes)
            contents = {record: content_of(self._run / record) for record in reversed(RECORDS)}
            for record in RECORDS:
                if (content := contents[record]) is not None:
                    self._bucket.write(record, content)
        for name, sha256 in sorted(new, reverse=True):
            manifest = manifests[name] or b""
            self._whole.pop(name, None)
            self._begun.add(name)
            # a step that was saved again; a part of an earlier attempt
            self._bucket.remove_all(name)
            with suppress(FileNotFoundError), ExitStack() as opened:  # deleted by the run before
                # open files stay until they are copied: a run may save and delete faster than that
                files = {
                    file: opened.enter_context(below(self._checkpoints / name, file).open("rb"))
                    for file in listed_files(manifest)
                }
                for file, file_sha256 in listed_files(manifest).items():
                    path = Path(f"/dev/fd/{files[file].fileno()}")
                    self._bucket.put(path, f"{name}/{file}", file_sha256)
                self._bucket.write(f"{name}/{MANIFEST}", manifest)
                self._whole[name] = sha256
                self._begun.discard(name)
            if self._names()[:1] > sorted(manifests)[-1:]:
                break  # a newer one protects more than older ones
        # not if it was deleted meanwhile, or if the folder is lost
        if max(manifests, default=None) in self._whole:
            for name in gone:
                self._bucket.remove_all(name)
                self._whole.pop(name, None)
                self._begun.discard(name)
        if is_last:
            self._give_back()

    def _take_lease(self) -> None:
        """Takes the lease once nobody renews another one. Clocks of machines may differ:
        what counts is whether the lease changes while this process looks. Raises: UserError
        if it does."""
        first: bytes | None = None
        until = 0.0
        unreadable = Lease(owner="a machine whose lease cannot be read", time=time.time())
        while (content := self._bucket.read(LEASE)) is not None:
            lease = parse_lease(content) or unreadable
            if lease.id == self._lease.id or lease.is_gone:
                break
            if first is None:
                first = content
                remaining = EXPIRES - max(time.time() - lease.time, 0)
                # its owner renews it every EXPIRES / 4
                until = time.monotonic() + max(remaining, EXPIRES / 3)
                owner = truncate(lease.owner)
                warn(f"waiting for {owner}, which trained this run until now", "note")
            if content != first:
                hint = f"{lease.owner} trains this run now; stop it, or choose another run_name"
                raise UserError(FIELD, self._url, hint)
            if time.monotonic() > until:
                break
            time.sleep(POLL)
        self._write_lease()
        time.sleep(POLL)
        # of two machines that looked at the same time, the last one has it
        if self._foreign_lease():
            self._take_lease()

    def _foreign_lease(self) -> Lease | None:
        """The lease of another process."""
        lease = parse_lease(self._bucket.read(LEASE))
        return lease if lease and lease.id != self._lease.id else None

    def _check_lease(self, hashes: Mapping[str, str]) -> None:
        """Ends this process if another machine has the lease, or has had it meanwhile. The trainer
        sees that and stops the run.

        If the lease is missing, another machine has had it if the bucket has checkpoints besides
        those with `hashes` of manifests here. The exit code is 0; after the end of the run it is 1,
        since the end is not copied.
        """
        lease = self._foreign_lease()
        if not lease and self._bucket.read(LEASE) is None:
            foreign = self._bucket.checkpoints().items() - self._whole.items() - hashes.items()
            if foreign:
                lease = Lease(owner="another machine")
            else:
                self._renew()
        if lease:
            warn(f"{lease.owner} has begun to train this run; stopping here")
            # any thread calls this: SystemExit would end only that one
            os._exit(int(self._ended.is_set()))

    def _renew(self) -> None:
        """Renews the lease. And shows the state of the run meanwhile; its end is copied with its
        rows."""
        content = content_of(self._run / STATUS)
        if content is not None and not ended_status(self._run):
            self._bucket.write(STATUS, content)
        self._write_lease()

    def _write_lease(self) -> None:
        lease = self._lease.model_copy(update={"time": time.time()})
        self._bucket.write(LEASE, lease.model_dump_json().encode())

    def _give_back(self) -> None:
        """Removes this process's own lease."""
        lease = parse_lease(self._bucket.read(LEASE))
        if lease and lease.id == self._lease.id:
            self._bucket.remove(LEASE)

    def _renew_loop(self, over: threading.Event) -> None:
        while not over.wait(EXPIRES / 4):
            with suppress(Exception):  # the next one may succeed
                if self._foreign_lease():
                    self._check_lease({})
                # otherwise the next copy asks who removed it
                if self._bucket.read(LEASE) is not None:
                    self._renew()


def parse_lease(content: bytes | None) -> Lease | None:
    """The lease in an object; None for none, and for one that cannot be read."""
    with suppress(ValueError):
        return Lease.model_validate_json(content or b"")
    return None


def content_sha256(file: Path) -> str:
    """The SHA-256 of a small file; empty for no file."""
    content = content_of(file)
    return "" if content is None else hashlib.sha256(content).hexdigest()


def content_of(file: Path) -> bytes | None:
    """The content of a file; None for no file."""
    with suppress(FileNotFoundError):
        return file.read_bytes()
    return None


def warn(text: str, kind: str = "warning") -> None:
    """Prints a line to standard error."""
    with suppress(BrokenPipeError):  # after the end of a killed trainer, nobody may read
        print(f"{kind}: {text}", file=sys.stderr, flush=True)
