"""The checkpoints of a run: which of them are kept, and what a crash between two of them leaves.

A checkpoint is made in a hidden folder beside its place, fsynced and renamed, so that it is there whole or not at all.
"""

import math
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from gpt2_ddp.checkpoint.checkpoint import (
    Checkpoint,
    CorruptCheckpoint,
    Snapshot,
    checkpoint_ref,
    list_checkpoints,
    newest_intact,
    steps_of,
    verify,
    write,
)
from gpt2_ddp.distributed.environment import spare_core
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import fsync_folder, writing


def should_save_async(wish: bool | str, size: int, device: str, workers: int) -> bool:
    """Whether checkpoints are written behind the training.

    Args:
        wish: `checkpoint.background`.
        size: bytes of the copy that they are written from.
        device: that is trained on: cpu, cuda or mps. workers: of the loader.
    """
    if not isinstance(wish, bool):
        return spare_core(device, torch.get_num_threads(), workers) and psutil.virtual_memory().available > 1.25 * size
    return wish


class Background:
    """Does what it is given beside the thread that gives it; what that raises is raised where it is waited for.

    Attributes:
        limit: seconds that the present work, or the last one, may take.
        failed: whether the work has raised something that nobody has been told yet.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._begun = self._ended = self.limit = 0.0
        self.failed = False

    def start(self, work: Callable[[], object], limit: float) -> None:
        """Begins the work, which is to take no longer than `limit` seconds; waits for what is being done still."""
        self.wait()
        self._begun, self._ended, self.limit = time.monotonic(), 0.0, limit
        self._thread = threading.Thread(target=self._do, args=(work,), name="background", daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # whatever it is, it is raised by `wait`
            self._error, self.failed = error, True
        self._ended = time.monotonic()

    @property
    def seconds(self) -> float:
        """What the work takes, up to now, or took; 0 where there was none."""
        return (self._ended or time.monotonic()) - self._begun if self._begun else 0.0

    @property
    def is_working(self) -> bool:
        """Whether something is being done."""
        return bool(self._begun) and not self._ended

    @property
    def is_late(self) -> bool:
        """Whether that goes on for longer than it was to take."""
        return self.is_working and self.seconds > self.limit

    def join(self) -> None:
        """Waits until nothing is being done."""
        if self._thread:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """The same. Raises: what the work raised, once."""
        self.join()
        error, self._error, self.failed = self._error, None, False
        if error:
            raise error


class CheckpointFolder:
    """The checkpoints of one run, as its main process sees them.

    Args:
        hold: whether the run is held (`RunFolder`), so that what is found broken may be put right.
    """

    def __init__(self, folder: Path, keep_last: int = 3, hold: bool = True):
        self.folder = folder
        self.keep_last = keep_last
        self._hold = hold
        self._verified: dict[Path, dict[str, Any]] = {}  # checked by this process, with their state

    def save(
        self, snapshot: Snapshot, good: int | None = None, record: Callable[[dict[str, Any]], None] = lambda saved: None
    ) -> Path:
        """Writes the checkpoint of step `snapshot.state["step"]`, durably, and only then removes what is no longer
        kept; before, where the disk has no room for it otherwise. See `prune`.

        Args:
            record: is told in between which one is there (`checkpoint_ref`), and the steps of those that are kept; and
                of these before some are removed to make room.

        Raises:
            UserError: the disk refuses; the checkpoints are as they were, and nothing half made is left.
        """
        place = self.place(snapshot.state["step"])
        temporary, replaced = (place.with_name(f".{place.name}.{end}") for end in ("tmp", "replaced"))
        if _free_bytes(self.folder) < snapshot.bytes:
            keep = self._to_keep(good, snapshot.state)
            record({"event": "room", "step": snapshot.state["step"], "kept": steps_of(keep)})
            self._delete_except(keep)
        try:
            write(snapshot, temporary)
            with writing(place):
                if place.exists():  # this step again: the old one goes when the new one is there
                    place.rename(replaced)
                temporary.rename(place)
                fsync_folder(self.folder)
                if replaced.exists():
                    shutil.rmtree(replaced)
        except UserError:
            with suppress(UserError):  # what cannot be removed now is by the next start
                self.recover()
            raise
        self._verified[place] = snapshot.state
        keep = self._to_keep(good)
        record({"event": "checkpoint", **checkpoint_ref(place), "kept": steps_of(keep)})
        self._delete_except(keep)
        return place

    def recover(self) -> None:
        """Puts right what a save left that was killed or refused: of a checkpoint between its old and its new form the
        new one, which is whole by then, gets the name; what is half made or half removed goes."""
        with writing(self.folder):
            for replaced in self.folder.glob(".step-*.replaced"):
                place = replaced.with_name(replaced.name[1 : -len(".replaced")])
                temporary = replaced.with_suffix(".tmp")
                if not place.exists():
                    (temporary if temporary.exists() else replaced).rename(place)
            for leftover in self.folder.glob(".step-*"):
                shutil.rmtree(leftover)

    def latest_metadata(self) -> Checkpoint | None:
        """The newest checkpoint whose small files are right, without looking at its weights: what a run may decide by
        before it does anything long."""
        return newest_intact(self.folder, weights=False, quiet=True)

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint whose hashes are right; None when there is none at all. Removes what a killed process
        left half made or half removed.

        A damaged one on the way is renamed to `*.corrupt`, with a warning on stderr that names file and reason.

        Raises:
            UserError: when checkpoints exist, but none is intact.
        """
        if self._hold:
            self.recover()
        found = newest_intact(self.folder, put_aside=self._hold)
        if found is None and (list_checkpoints(self.folder) or any(self.folder.glob("*.corrupt*"))):
            hint = "holds checkpoints, but none is intact; restore one from a copy, or choose another run_name"
            raise UserError("run folder", self.folder, hint)
        if found:
            self._verified[found.path] = found.state
        return found

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step is, or would be."""
        return self.folder / f"step-{step:08d}"

    def newest_until(self, step: int) -> Path | None:
        """The newest intact checkpoint of a step that is not after `step`; its hashes are checked once."""
        return next((place for place, state in reversed(self._intact().items()) if state["step"] <= step), None)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of steps after `step`, which the run has gone back to."""
        self._delete_except([place for place in list_checkpoints(self.folder) if int(place.name[5:]) <= step])

    def prune(self, good: int | None = None) -> None:
        """Removes verified checkpoints but the newest `keep_last` and the best; a damaged one is left as it is.

        Args:
            good: the last step that is known to be good: the newest checkpoint until there is kept as well, to go back
                to, and those after it, of which nothing is known yet.
        """
        self._delete_except(self._to_keep(good))

    def _to_keep(self, good: int | None = None, coming: dict[str, Any] | None = None) -> list[Path]:
        """Of the checkpoints that are there, those that `prune` leaves.

        Args:
            coming: state of a checkpoint that needs the room, also of those; counted as if it were there already. The
                newest of those that are there stays nevertheless.
        """
        there = list_checkpoints(self.folder)
        if len(there) + (coming is not None) <= self.keep_last:
            return there
        intact = self._intact(warn=True)
        counted = intact | ({self.place(coming["step"]): coming} if coming else {})
        best: dict[Any, tuple[float, Path]] = {}  # by what it scored: losses over other tokens do not compare
        for place, state in counted.items():
            loss, tokens = state.get("val_loss"), (state.get("metrics") or {}).get("val_tokens")
            if loss is not None and math.isfinite(loss):
                best[tokens] = min(best.get(tokens, (loss, place)), (loss, place))
        keep = {*sorted(counted)[-self.keep_last :], *list(intact)[-1:], *(place for _, place in best.values())}
        if good is not None:
            until = [place for place, state in intact.items() if state["step"] <= good]
            after = [place for place in intact if place not in until]
            keep |= {*until[-1:], *(after if coming is None else [])}
        return [place for place in there if place in keep or place not in intact]

    def _delete_except(self, keep: list[Path]) -> None:
        for place in list_checkpoints(self.folder):
            if place not in keep:
                hidden = place.with_name(f".{place.name}.removed")
                with writing(place):
                    place.rename(hidden)  # so that a crash halfway leaves nothing that looks like a checkpoint
                    shutil.rmtree(hidden)
                self._verified.pop(place, None)

    def _intact(self, warn: bool = False) -> dict[Path, dict[str, Any]]:
        """The states of the intact checkpoints, oldest step first; each is verified once."""
        found: dict[Path, dict[str, Any]] = {}
        for place in list_checkpoints(self.folder):
            try:
                found[place] = self._verified.get(place) or verify(place).state
            except CorruptCheckpoint as damage:
                if warn:
                    print(f"warning: {damage}; not counted, not removed", file=sys.stderr)
        self._verified |= found
        return found


def _free_bytes(folder: Path) -> int:
    """Room on the folder's disk. A quota may leave less: then the disk refuses in the midst of writing."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free
