"""The checkpoints of a run: found, read, saved in the background or not, and deleted.

Each checkpoint is complete or absent, whenever the process is killed. A save has this order:

    save        waits for the save before, and copies the snapshot if it goes to the background
    _prepare    makes .step-00000200.tmp/                            main process
    _write      writes the files of a part into it                   each rank with a part
    _complete   metrics.jsonl to disk, then manifest.json,           first part's rank, from here on
                then the name step-00000200/
    _write      appends the row `checkpoint` to metrics.jsonl
    _delete_except   renames step-00000100/ to .step-00000100.removed/, and deletes it

Hidden folders are partial: the next start deletes them (`verify.recover`). A kill before
the row leaves a checkpoint without one, which a start accepts if no later event
contradicts it (`verify.record_defect`).
"""

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
from typing import Any, NamedTuple, Protocol, SupportsInt, cast

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
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.distributed.environment import free_memory, processes_here
from gpt2_ddp.distributed.ranks import from_main, gather, on_every_rank, runs_on_main
from gpt2_ddp.distributed.watchdog import TIMEOUT
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_path, writing
from gpt2_ddp.records.rows import METRICS
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.state import State

SLOW_DISK = 20e6  # bytes per second of the slowest disk for checkpoints, in timeouts


def should_save_async(background: bool | str, size: int, spare_core: bool) -> bool:
    """Whether a checkpoint is saved in the background, by `checkpoint.background`; auto needs a
    spare core, and memory for `size` more bytes."""
    if isinstance(background, bool):
        return background
    return spare_core and free_memory() > 1.25 * size


class Background:
    """One task at a time in a thread; `wait` raises its error.

    A thread is enough: hashing, writing and fsync release Python's lock. It sees the copied memory
    without a pipe, and it ends with the process.

    Attributes:
        begun, ended: `time.monotonic()` of the newest start and of the newest end.
        timeout: allowed seconds of the current or last task.
        is_working: whether a task has begun and not ended.
        error: of the task, until `wait` raises it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.begun = 0.0
        self.ended = 0.0
        self.timeout = 0.0
        self.is_working = False
        self.error: BaseException | None = None

    def start(self, task: Callable[[], object], timeout: float) -> None:
        """Waits for the previous task, and starts this one."""
        self.wait()
        self.begun = time.monotonic()
        self.timeout = timeout
        self.is_working = True
        self._thread = threading.Thread(
            target=self._run, args=(task,), name="background", daemon=True
        )
        self._thread.start()

    def _run(self, task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # `wait` raises it, in the thread that trains
            self.error = error
        self.ended = time.monotonic()
        # last: who sees the end also sees the error
        self.is_working = False

    @property
    def seconds(self) -> float:
        """Since the start of the current task."""
        return time.monotonic() - self.begun

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


class Examined(NamedTuple):
    """A checkpoint that this process has written or read."""

    state: State | None  # None if it is damaged
    is_hashed: bool  # the large files, too


class CheckpointStore:
    """The checkpoints of one run, on every rank. The ranks with a part of their own read and write
    it; the main process does all else. Methods are collective, but where they say otherwise, and
    raise UserError on every rank.

    Args:
        log: where events are recorded.
        keep: the settings `checkpoint`: which checkpoints are kept, and how they are written.
        patience: allowed seconds of a background save, besides those for its size.
    """

    def __init__(self, folder: RunFolder, log: RunLog, keep: KeepConfig, patience: float = TIMEOUT):
        self.folder = folder.checkpoints
        self._run_folder = folder
        self._log = log
        self._keep = keep
        self._patience = patience
        self._processes = processes_here()
        self.background = Background()
        self._memory: dict[str, Tensor] = {}  # reused by the copies of background saves
        # hashing a large checkpoint takes minutes, so each is hashed once in a process
        self._examined: dict[Path, Examined] = {}

    @runs_on_main
    def newest(self, until: float = math.inf, weights: bool = True) -> Checkpoint | None:
        """The newest intact checkpoint up to a step that the run recorded; None if there is none.
        Repairs the folder. Hashes all files, and sets others aside, with a warning; without
        `weights`, only looks at the small files.
        Raises: UserError if checkpoints of any step were wanted and exist, and none is such."""
        self._recover()
        if not any(self.folder.glob("step-*")):
            return None
        put_aside = weights and self._run_folder.wants_lock
        checkpoint = newest_intact(self.folder, weights, put_aside, until)
        if checkpoint and weights:
            self._examined[checkpoint.path] = Examined(checkpoint.state, is_hashed=True)
            if until == math.inf and self._run_folder.wants_lock:
                self._warn_of_missing(checkpoint.step)
        elif weights and until == math.inf:
            problem = "has checkpoints, but none is intact"
            hint = "restore one from a copy, or choose another run_name"
            raise UserError("run folder", self.folder, f"{problem}; {hint}")
        return checkpoint

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
        # the first copy allocates memory; the processes of this machine share what is free
        more = snapshot.part_bytes - sum(tensor.nbytes for tensor in self._memory.values())
        here = more * min(snapshot.part.count, self._processes)
        if wait or not from_main(should_save_async(self._keep.background, here, spare_core)):
            on_every_rank(lambda: self._write(snapshot, last_good))
        elif snapshot.part.is_own:
            copy = copied(snapshot, self._memory)
            timeout = self._patience + snapshot.bytes / SLOW_DISK
            self.background.start(lambda: self._write(copy, last_good), timeout)

    def wait(self) -> None:
        """Waits for the background save. Raises: UserError if it failed, or if the run
        folder is gone."""

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
        path = self.place(snapshot.state.step)
        part = snapshot.part
        if not part.is_own:
            return
        try:
            parts = gather(lambda: write_part(snapshot, _hidden(path, "tmp")), part.group)
            if part.number:
                return
            self._complete(path, ChainMap(*parts), snapshot.format)
        except UserError:
            if part.number == 0:
                with suppress(UserError):  # the next start deletes any rest
                    self._recover()
            raise
        # Only the main process comes here, and the checkpoint is complete. What else happens to a
        # complete one, such as a copy to another folder, belongs here: before its row, so that a
        # kill in between leaves nothing that a row promises.
        self._examined[path] = Examined(snapshot.state, is_hashed=True)
        keep = self._to_keep(last_good)
        # `kept` is recorded before the others are deleted: what the rows keep is never missing
        self._log.append({"event": "checkpoint", **checkpoint_ref(path), "kept": steps_of(keep)})
        self._delete_except(keep)

    def _complete(self, path: Path, files: Mapping[str, dict[str, Any]], format: int) -> None:
        """Writes the manifest, and gives the folder its name."""
        # state.json has the chain of the last row: were that row lost in a crash of the machine,
        # the resumed run would take its rows for damaged
        self._log.sync()
        temporary = _hidden(path, "tmp")
        replaced = _hidden(path, "replaced")
        write_manifest(files, temporary, format)
        with writing(path):
            if path.exists():  # a step saved again: deleted once the new one is in place
                path.rename(replaced)
            temporary.rename(path)
            # a name is on disk once its folder is
            fsync_path(self.folder)
            if replaced.exists():
                shutil.rmtree(replaced)

    def _recover(self) -> None:
        """Repairs the folder after a killed or failed save. A process that only
        looks changes nothing."""
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
        checkpoints = list_checkpoints(self.folder)
        rejected = sorted(file.name for file in self.folder.glob("step-*.rejected*"))
        listing: dict[str, Any] = {
            "checkpoint": checkpoint_ref(checkpoints[-1]) if checkpoints else None,
            "kept": steps_of(checkpoints),
        }
        if rejected:
            listing["rejected"] = rejected
        return listing

    @runs_on_main
    def remove_after(self, step: int) -> None:
        """Deletes the checkpoints of later steps, after a rollback."""
        checkpoints = list_checkpoints(self.folder)
        self._delete_except([path for path in checkpoints if step_of(path) <= step])

    @runs_on_main
    def prune(self, last_good: float = math.inf) -> None:
        """Deletes intact checkpoints except the newest `keep_last`, the best, and those that a
        rollback may need: the newest up to `last_good`, and all later ones. Deletes that of the
        first step once a later one is good."""
        self._delete_except(self._to_keep(last_good))

    def _to_keep(self, last_good: float) -> list[Path]:
        """The checkpoints that `prune` keeps. All are hashed before one is deleted; what is damaged
        stays, and does not count."""
        checkpoints = list_checkpoints(self.folder)
        keep = checkpoints
        # first by the small files: mostly nothing is deleted, and then nothing need be hashed
        for weights in (False, True):
            states = {path: self._state_of(path, weights) for path in checkpoints}
            intact = {state.step: state for state in states.values() if state}
            steps = steps_to_keep(intact, self._keep.keep_last, last_good)
            keep = [path for path, state in states.items() if not state or state.step in steps]
            if keep == checkpoints:
                break
        return keep

    def _state_of(self, path: Path, weights: bool) -> State | None:
        """The state of a checkpoint, which another process may have written, read once; None, with
        a warning, if it is damaged or unreadable. Hashes the large files too if `weights`, once."""
        state, is_hashed = self._examined.get(path, (None, False))
        if not is_hashed and (weights or not state):
            try:
                state = verify_recorded(path, weights).state
                is_hashed = weights
            except (CorruptCheckpoint, UserError) as damage:
                state = None
                is_hashed = True
                print(f"warning: {damage}; the checkpoint is kept and not counted", file=sys.stderr)
            self._examined[path] = Examined(state, is_hashed)
        return state

    def _delete_except(self, keep: list[Path]) -> None:
        removed = [path for path in list_checkpoints(self.folder) if path not in keep]
        if not removed:
            return
        self._log.sync()  # the rows of what was saved, and of what is kept
        hidden = [_hidden(path, "removed") for path in removed]
        with writing(self.folder):
            for path, hidden_path in zip(removed, hidden, strict=True):
                path.rename(hidden_path)
            # after a crash, a partial folder must not look like a checkpoint
            fsync_path(self.folder)
            for hidden_path in hidden:
                shutil.rmtree(hidden_path)


def _hidden(path: Path, end: str) -> Path:
    """The name of a checkpoint's folder while it is written, replaced or deleted."""
    return path.with_name(f".{path.name}.{end}")


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
    scored: list[tuple[float, int, float | None]] = []
    for step, state in intact.items():
        loss = state.progress.val_loss
        if loss is not None and math.isfinite(loss):
            scored.append((loss, step, state.progress.scores.get("val_tokens")))
    # the lowest loss comes last
    best = {tokens: step for _, step, tokens in sorted(scored, reverse=True)}
    return keep | {*good[-1:], *steps[len(good) :], *best.values()}


def copied(snapshot: Snapshot, memory: dict[str, Tensor]) -> Snapshot:
    """A copy that training does not change. The first allocates `memory`, later ones reuse it."""

    def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _copy(tensor, memory, name) for name, tensor in tensors.items()}

    model = copies(snapshot.model)
    optimizer = copies(snapshot.optimizer)
    state = snapshot.state.model_copy(deep=True)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # once for all copies
    return replace(snapshot, state=state, model=model, optimizer=optimizer)


def _copy(tensor: Tensor, memory: dict[str, Tensor], name: str) -> Tensor:
    """Starts a copy to the host. From a GPU it goes to pinned memory, at the full speed
    of the bus."""
    if name not in memory:
        memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        # exactly these bytes: `pin_memory` would round them up to a power of two
        if tensor.is_cuda:
            _pin(memory[name])
    return memory[name].copy_(tensor, non_blocking=tensor.is_cuda)


class _CudaRuntime(Protocol):
    """The functions of CUDA's runtime that `_pin` calls. PyTorch has no types for them."""

    def cudaHostRegister(self, address: int, size: int, flags: int) -> SupportsInt: ...
    def cudaHostUnregister(self, address: int) -> object: ...


def _pin(tensor: Tensor) -> None:
    """Pins the tensor's memory while it exists; if the system refuses, copies take longer."""
    runtime = cast(_CudaRuntime, torch.cuda.cudart())
    address = tensor.data_ptr()
    if tensor.nbytes and int(runtime.cudaHostRegister(address, tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, address)
