"""The checkpoints of a run: found, read, saved in the background or not, and deleted. Each is
complete or absent."""

import math
import shutil
import sys
import threading
import time
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.format import (
    Checkpoint,
    Snapshot,
    checkpoint_ref,
    list_checkpoints,
    step_of,
    steps_of,
    write_manifest,
    write_part,
)
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, newest_intact, recover, verify_recorded
from gpt2_ddp.distributed.environment import free_memory, processes_here
from gpt2_ddp.distributed.ranks import from_main, gather, on_every_rank, runs_on_main
from gpt2_ddp.distributed.watchdog import TIMEOUT
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_path, writing
from gpt2_ddp.records.rows import METRICS
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.state import State

SLOW_DISK = 20e6  # bytes per second of the slowest disk for checkpoints, in timeouts


def should_save_async(wish: bool | str, size: int, spare_core: bool) -> bool:
    """Whether a checkpoint is saved in the background; auto needs a spare core, and memory for
    `size` more bytes."""
    return wish if isinstance(wish, bool) else spare_core and free_memory() > 1.25 * size


class Background:
    """One task at a time in a thread; `wait` raises its error. A thread is enough: hashing, writing
    and fsync release Python's lock, and a thread sees the copied memory and ends with the
    process."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._begun = self.timeout = 0.0  # `timeout`: allowed seconds of the current or last task
        self.is_working = False
        self.error: BaseException | None = None  # of the task; `wait` has not yet raised it

    def start(self, task: Callable[[], object], timeout: float) -> None:
        """Waits for the previous task, and starts this one."""
        self.wait()
        self._begun = time.monotonic()
        self.timeout = timeout
        self.is_working = True
        self._thread = threading.Thread(
            target=self._run, args=(task,), name="background", daemon=True
        )
        self._thread.start()

    def _run(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # `wait` raises it
            self.error = error
        self.is_working = False

    @property
    def seconds(self) -> float:
        """Since the start of the current task."""
        return time.monotonic() - self._begun

    def join(self) -> None:
        """Waits until nothing is written any more."""
        if self._thread:
            self._thread.join()

    def wait(self) -> None:
        """Waits until the task has ended, and raises its error, once."""
        self.join()
        error = self.error
        self.error = None
        if error:
            raise error


class CheckpointStore:
    """The checkpoints of one run, on every rank. The ranks with a part of their own read and write
    it; the main process does all else. Methods are collective, but where they say otherwise, and
    raise UserError on every rank. Events are recorded in `log`.

    Args:
        keep_last: checkpoints to keep. wish: `checkpoint.background`.
        patience: allowed seconds of a background save, besides those for its size.
    """

    def __init__(
        self,
        folder: RunFolder,
        log: RunLog,
        keep_last: int = 3,
        wish: bool | str = False,
        patience: float = TIMEOUT,
    ):
        self.folder = folder.checkpoints
        self._run_folder = folder
        self._log = log
        self._keep_last = keep_last
        self._wish = wish
        self._patience = patience
        self.background, self._processes = Background(), processes_here()
        self._memory: dict[str, Tensor] = {}  # reused by the copies of background saves
        # of checkpoints written or read: the state, None of a damaged one; whether the large files
        # were hashed, too
        self._known: dict[Path, tuple[State | None, bool]] = {}

    @runs_on_main
    def newest(self, until: float = math.inf, weights: bool = True) -> Checkpoint | None:
        """The newest intact checkpoint up to a step that the run recorded; None if there is none.
        Repairs the folder. Hashes all files, and sets others aside, with a warning; without
        `weights`, only looks at the small files.
        Raises: UserError if checkpoints of any step were wanted and exist, and none is such."""
        self._recover()
        if not any(self.folder.glob("step-*")):
            return None
        found = newest_intact(self.folder, weights, weights and self._run_folder.wants_lock, until)
        if found and weights:
            self._known[found.path] = found.state, True
            if until == math.inf and self._run_folder.wants_lock:
                self._warn_of_missing(found.step)
        elif weights and until == math.inf:
            hint = "has checkpoints, but none is intact; restore one from a copy, or choose another run_name"
            raise UserError("run folder", self.folder, hint)
        return found

    def _warn_of_missing(self, step: int) -> None:
        """Prints a warning if the rows record a newer checkpoint than that of `step`, and it is
        gone. (One that was set aside has its own warning.)"""
        newest = self._log.newest_checkpoint()
        if newest > step and not any(self.folder.glob(f"step-{newest:08d}*")):
            recorded = f"the checkpoint of step {newest}, which {METRICS} records, is gone"
            print(f"warning: {recorded}; the run resumes from step {step}", file=sys.stderr)

    def save(
        self,
        snapshot: Snapshot,
        last_good: float = math.inf,
        wait: bool = False,
        spare_core: bool = True,
    ) -> None:
        """Saves the checkpoint of step `snapshot.state.step` durably, then prunes (`prune`). Each
        rank writes its part. In the background, of a copy, if `should_save_async` and not `wait`;
        it is on disk once `wait` returns. Raises: UserError if writing failed; then no partial
        checkpoint is left, and the kept checkpoints are unchanged."""
        self.wait()
        self._prepare(snapshot.state.step)
        more = snapshot.part_bytes - sum(tensor.nbytes for tensor in self._memory.values())
        here = more * min(snapshot.part.count, self._processes)
        if wait or not from_main(should_save_async(self._wish, here, spare_core)):
            on_every_rank(lambda: self._write(snapshot, last_good))
        elif snapshot.part.is_own:
            copy = copied(snapshot, self._memory)
            self.background.start(
                lambda: self._write(copy, last_good), self._patience + snapshot.bytes / SLOW_DISK
            )

    def wait(self) -> None:
        """Waits for the background save. Raises: UserError if it failed, or if the run folder is
        gone."""

        def done() -> None:
            self._log.check()
            self.background.wait()

        on_every_rank(done)

    @runs_on_main
    def _prepare(self, step: int) -> None:
        """Makes the folder that the ranks write to."""
        temporary = _hidden(self.place(step), "tmp")
        with writing(temporary):
            temporary.mkdir()

    def _write(self, snapshot: Snapshot, last_good: float) -> None:
        """Writes this rank's part, if it is its own. The first part's rank completes the checkpoint
        once all parts are on disk. Not collective: the ranks with a part call it, in any thread."""
        place = self.place(snapshot.state.step)
        part = snapshot.part
        if not part.is_own:
            return
        try:
            parts = gather(lambda: write_part(snapshot, _hidden(place, "tmp")), part.group)
            if part.number:
                return
            self._complete(place, ChainMap(*parts))
        except UserError:
            if part.number == 0:
                with suppress(UserError):  # the next start deletes any rest
                    self._recover()
            raise
        self._known[place] = snapshot.state, True
        keep = self._to_keep(last_good)
        self._log.append({"event": "checkpoint", **checkpoint_ref(place), "kept": steps_of(keep)})
        self._delete_except(keep)

    def _complete(self, place: Path, files: Mapping[str, dict[str, Any]]) -> None:
        """Writes the manifest, and gives the folder its name."""
        self._log.sync()
        temporary = _hidden(place, "tmp")
        replaced = _hidden(place, "replaced")
        write_manifest(files, temporary)
        with writing(place):
            if place.exists():  # a step saved again: deleted once the new one is in place
                place.rename(replaced)
            temporary.rename(place)
            fsync_path(self.folder)
            if replaced.exists():
                shutil.rmtree(replaced)

    def _recover(self) -> None:
        """Repairs the folder after a killed or failed save. A process that only looks changes
        nothing."""
        if not self._run_folder.wants_lock:
            return
        self._run_folder.check_lock()
        if any(self.folder.glob(".step-*")):
            recover(self.folder)

    def place(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def listing(self) -> dict[str, Any]:
        """The newest checkpoint, the steps of all, and folders of rejected ones, as rows have them.
        Not collective."""
        there = list_checkpoints(self.folder)
        rejected = [file.name for file in self.folder.glob("step-*.rejected*")]
        listing = {
            "checkpoint": checkpoint_ref(there[-1]) if there else None,
            "kept": steps_of(there),
        }
        return listing | ({"rejected": sorted(rejected)} if rejected else {})

    @runs_on_main
    def remove_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, after a rollback."""
        self._delete_except(
            [place for place in list_checkpoints(self.folder) if step_of(place) <= step]
        )

    @runs_on_main
    def prune(self, last_good: float = math.inf) -> None:
        """Deletes intact checkpoints except the newest `keep_last`, the best, and those that a
        rollback may need: the newest up to `last_good`, and all later ones. Deletes that of the
        first step once a later one is good."""
        self._delete_except(self._to_keep(last_good))

    def _to_keep(self, last_good: float) -> list[Path]:
        """The checkpoints that `prune` keeps. All are hashed before one is deleted; what is damaged
        stays, and does not count."""
        there = list_checkpoints(self.folder)
        keep = there
        for weights in (False, True):
            states = {place: self._look(place, weights) for place in there}
            steps = steps_to_keep(
                {state.step: state for state in states.values() if state},
                self._keep_last,
                last_good,
            )
            keep = [place for place, state in states.items() if not state or state.step in steps]
            if keep == there:
                break
        return keep

    def _look(self, place: Path, weights: bool) -> State | None:
        """The state of a checkpoint, which another process may have written, read once; None, with
        a warning, if it is damaged or unreadable. Hashes the large files too if `weights`, once."""
        state, is_hashed = self._known.get(place, (None, False))
        if not is_hashed and (weights or not state):
            try:
                state = verify_recorded(place, weights).state
                is_hashed = weights
            except (CorruptCheckpoint, UserError) as damage:
                state = None
                is_hashed = True
                print(f"warning: {damage}; the checkpoint is kept and not counted", file=sys.stderr)
            self._known[place] = state, is_hashed
        return state

    def _delete_except(self, keep: list[Path]) -> None:
        if not (leaving := [place for place in list_checkpoints(self.folder) if place not in keep]):
            return
        self._log.sync()  # the rows of what was saved, and of what is kept
        hidden = [_hidden(place, "removed") for place in leaving]
        with writing(self.folder):
            for place, other in zip(leaving, hidden, strict=True):
                place.rename(other)
            # after a crash, a partial folder must not look like a checkpoint
            fsync_path(self.folder)
            for other in hidden:
                shutil.rmtree(other)


def _hidden(place: Path, end: str) -> Path:
    """The name of a checkpoint's folder while it is written, replaced or deleted."""
    return place.with_name(f".{place.name}.{end}")


def steps_to_keep(intact: dict[int, State], keep_last: int, last_good: float) -> set[int]:
    """The steps whose checkpoints are kept, of those that are `intact`, by ascending step. Kept are
    the newest `keep_last`, and the best of each number of tokens scored (losses over other tokens
    do not compare). A rollback may need the newest up to `last_good` and all later ones; the first
    step's goes once a later one is good."""
    steps = [*intact]
    good = [step for step in intact if step <= last_good]
    keep = {*steps[-keep_last:]}
    if len(good) > 1:
        keep -= {state.progress.first_step for state in intact.values()}
    scored = [
        (loss, step, state.progress.scores.get("val_tokens"))
        for step, state in intact.items()
        if (loss := state.progress.val_loss) is not None and math.isfinite(loss)
    ]
    # the lowest loss comes last
    best = {tokens: step for _, step, tokens in sorted(scored, reverse=True)}
    return keep | {*good[-1:], *steps[len(good) :], *best.values()}


def copied(snapshot: Snapshot, memory: dict[str, Tensor]) -> Snapshot:
    """A copy that training does not change. The first allocates `memory`, later ones reuse it."""
    copy = lambda part: {name: _copy(tensor, memory, name) for name, tensor in part.items()}  # noqa: E731
    model, optimizer = map(copy, (snapshot.model, snapshot.optimizer))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # once for all copies
    return replace(
        snapshot, state=snapshot.state.model_copy(deep=True), model=model, optimizer=optimizer
    )


def _copy(tensor: Tensor, memory: dict[str, Tensor], name: str) -> Tensor:
    """Starts a copy to the host. From a GPU it goes to pinned memory, at the full speed of the
    bus."""
    if name not in memory:
        memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        # exactly these bytes: `pin_memory` would round them up to a power of two
        if tensor.is_cuda:
            _pin(memory[name])
    return memory[name].copy_(tensor, non_blocking=tensor.is_cuda)


def _pin(tensor: Tensor) -> None:
    """Pins the tensor's memory while it exists; if the system refuses, copies take longer."""
    runtime: Any = torch.cuda.cudart()
    if tensor.nbytes and int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
