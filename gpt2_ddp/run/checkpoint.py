"""Checkpoints that verify themselves: `step-XXXXXXXX/` folders written by the main process.

Each holds model.safetensors (plain module names, fp32), optimizer.safetensors, state.json, config.yaml, the tokenizer
where it is a file, and manifest.json with the size and SHA-256 of each of them, and its own. A checkpoint is made in a
hidden folder beside its place, fsynced and renamed, so that it is there whole or not at all; a flipped bit in any file
is found when it is read. Nothing in it is a pickle.
"""

import hashlib
import json
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import free_name, fsync_file, fsync_folder, read_small, sha256_file, write_atomically, writing
from gpt2_ddp.run.snapshot import Snapshot

MODEL, OPTIMIZER, STATE, CONFIG, MANIFEST = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.yaml",
    "manifest.json",
)


class Damaged(Exception):
    """A checkpoint that is not what was written.

    Args:
        file: the file that is wrong.
        reason: what is wrong with it.
    """

    def __init__(self, file: Path, reason: str):
        self.file = file
        self.reason = reason
        super().__init__(f"{file}: {reason}")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were verified, and what its small ones hold: state.json and config.yaml."""

    path: Path
    state: dict[str, Any]
    config: dict[str, Any]

    @property
    def kind(self) -> str:
        """What it is a training of, like `gpt2`; the first releases did not write it down."""
        return self.state.get("kind") or guess_kind(self.config)

    def read(self) -> Snapshot:
        """All of it, weights and moments included."""
        model, optimizer = load_file(self.path / MODEL), load_file(self.path / OPTIMIZER)
        return Snapshot(self.state, yaml.safe_dump(self.config), model, optimizer)


class CheckpointFolder:
    """The checkpoints of one run, as its main process sees them."""

    def __init__(self, folder: Path, keep_last: int = 3):
        self.folder = folder
        self.keep_last = keep_last
        self._verified: dict[Path, dict[str, Any]] = {}  # checked by this process, with their state

    def save(self, snapshot: Snapshot, good: int | None = None) -> Path:
        """Writes the checkpoint of step `snapshot.state["step"]`, durably, and only then removes what is no longer
        kept; before, where the disk has no room for it otherwise. See `prune`.

        Raises:
            UserError: the disk refuses; the checkpoints are as they were, and nothing half made is left.
        """
        place = self._place(snapshot.state)
        temporary, replaced = (place.with_name(f".{place.name}.{end}") for end in ("tmp", "replaced"))
        if _free_bytes(self.folder) < snapshot.bytes:
            self.prune(good, snapshot.state)
        try:
            _write(snapshot, temporary)
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
        self.prune(good)
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

    def peek(self) -> Checkpoint | None:
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
        self.recover()
        found = newest_intact(self.folder, put_aside=True)
        if found is None and any(self.folder.glob("*.corrupt*")):
            cure = "holds checkpoints, but none is intact; restore one from a copy, or choose another run_name"
            raise UserError("run folder", self.folder, cure)
        if found:
            self._verified[found.path] = found.state
        return found

    def newest_until(self, step: int) -> Path | None:
        """The newest intact checkpoint of a step that is not after `step`; its hashes are checked once."""
        return next((place for place, state in reversed(self._intact().items()) if state["step"] <= step), None)

    def remove_after(self, step: int) -> None:
        """Removes the checkpoints of steps after `step`, which the run has gone back to."""
        for place in list_checkpoints(self.folder):
            if int(place.name[5:]) > step:
                self._remove(place)

    def prune(self, good: int | None = None, coming: dict[str, Any] | None = None) -> None:
        """Removes verified checkpoints but the newest `keep_last` and the best; a damaged one is left as it is.

        Args:
            good: the last step that is known to be good: the newest checkpoint until there is kept as well, to go back
                to, and those after it, of which nothing is known yet.
            coming: state of a checkpoint that needs the room, also of those; counted as if it were there already. The
                newest of those that are there stays nevertheless.
        """
        if len(list_checkpoints(self.folder)) + (coming is not None) <= self.keep_last:
            return
        intact = self._intact(warn=True)
        counted = intact | ({self._place(coming): coming} if coming else {})
        scores = [(state.get("val_loss"), place) for place, state in counted.items()]
        scored = [(loss, place) for loss, place in scores if loss is not None and math.isfinite(loss)]
        keep = {*sorted(counted)[-self.keep_last :], *list(intact)[-1:], *([min(scored)[1]] if scored else [])}
        if good is not None:
            until = [place for place, state in intact.items() if state["step"] <= good]
            after = [place for place in intact if place not in until]
            keep |= {*until[-1:], *(after if coming is None else [])}
        for place in sorted(intact.keys() - keep):
            self._remove(place)

    def _intact(self, warn: bool = False) -> dict[Path, dict[str, Any]]:
        """The states of the intact checkpoints, oldest step first; each is verified once."""
        found: dict[Path, dict[str, Any]] = {}
        for place in list_checkpoints(self.folder):
            try:
                found[place] = self._verify(place)
            except Damaged as damage:
                if warn:
                    print(f"warning: {damage}; not counted, not removed", file=sys.stderr)
        return found

    def _remove(self, place: Path) -> None:
        hidden = place.with_name(f".{place.name}.removed")
        with writing(place):
            place.rename(hidden)  # so that a crash halfway leaves nothing that looks like a checkpoint
            shutil.rmtree(hidden)
        self._verified.pop(place, None)

    def _place(self, state: dict[str, Any]) -> Path:
        return self.folder / f"step-{state['step']:08d}"

    def _verify(self, place: Path) -> dict[str, Any]:
        if place not in self._verified:
            self._verified[place] = verify(place).state
        return self._verified[place]


def guess_kind(saved: dict[str, Any]) -> str:
    """The kind of a run whose config.yaml holds `saved`, by a field that no other kind has."""
    marks = (
        ("train", "global_batch_tokens", "gpt2"),
        ("data", "weight", "regression"),
        ("data", "sequences", "transformer"),
    )
    return next((kind for section, field, kind in marks if field in (saved.get(section) or {})), "classifier")


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders `step-XXXXXXXX` in a run's checkpoints folder, oldest step first; damaged or not."""
    return sorted(place for place in folder.glob("step-*") if place.is_dir() and place.name[5:].isdigit())


def newest_intact(
    folder: Path, weights: bool = True, put_aside: bool = False, quiet: bool = False
) -> Checkpoint | None:
    """The newest intact checkpoint in a folder of checkpoints, if there is one; a warning names each damaged one.

    Args:
        weights: whether to hash the large files too.
        put_aside: whether to rename damaged ones to `*.corrupt`. quiet: whether to leave the warnings away.
    """
    for place in reversed(list_checkpoints(folder)):
        try:
            return verify(place, weights)
        except Damaged as damage:
            then = "trying the one before it"
            if put_aside:
                aside = free_name(place.with_name(f"{place.name}.corrupt"))
                with writing(place):
                    place.rename(aside)
                then = f"moved to {aside.name}, {then}"
            if not quiet:
                print(f"warning: {damage}; {then}", file=sys.stderr)
    return None


def verify(checkpoint: Path, weights: bool = True) -> Checkpoint:
    """Checks every file of a checkpoint against its manifest, the sizes alone of weights and moments if so told.

    Raises:
        Damaged: naming the first file that is missing, cut short or changed.
    """
    try:
        manifest = json.loads(read_small(checkpoint / MANIFEST, 2**20))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        sealed = manifest["version"] == 1 or manifest["sha256"] == seal(manifest)  # the first releases did not seal it
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(checkpoint / MANIFEST, f"cannot be read ({error})") from error
    if not sealed:
        raise Damaged(checkpoint / MANIFEST, "its SHA-256 is not the one that was written")
    for name in (MODEL, OPTIMIZER, STATE, CONFIG):
        if name not in files:
            raise Damaged(checkpoint / MANIFEST, f"does not list {name}")
    for name, (size, sha256) in files.items():
        file = checkpoint / name
        try:
            if not file.is_file():
                raise Damaged(file, "is missing")
            if file.stat().st_size != size:
                raise Damaged(file, f"has {file.stat().st_size} bytes instead of {size}")
            if (weights or name not in (MODEL, OPTIMIZER)) and sha256_file(file) != sha256:
                raise Damaged(file, "its SHA-256 is not the one that was written")
        except OSError as error:
            raise Damaged(file, f"cannot be read ({error.strerror})") from error
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    return Checkpoint(checkpoint, state, yaml.safe_load((checkpoint / CONFIG).read_text(encoding="utf-8")) or {})


def find_checkpoint(path: Path, field: str = "checkpoint", weights: bool = True) -> Checkpoint:
    """The checkpoint that a user means: `path` itself, or the newest intact one of the run folder `path`.

    Args:
        field: where the user named it, for messages.
        weights: whether to hash the large files too.

    Raises:
        UserError: when there is none, or the one named is damaged.
    """
    if os.path.isfile(path / MANIFEST) or os.path.isfile(path / MODEL):
        try:
            return verify(path, weights)
        except Damaged as damage:
            raise UserError(field, damage.file, f"{damage.reason}; name another checkpoint") from damage
    if os.path.isdir(path / "checkpoints") and (found := newest_intact(path / "checkpoints", weights)):
        return found
    raise UserError(field, path, "holds no intact checkpoint; name a run folder or a step-XXXXXXXX folder in it")


def _write(snapshot: Snapshot, folder: Path) -> None:
    """Writes and fsyncs the files of a checkpoint, its manifest last."""
    write = {
        MODEL: partial(_save_tensors, snapshot.model),
        OPTIMIZER: partial(_save_tensors, snapshot.optimizer),
        STATE: lambda file: file.write_text(json.dumps(snapshot.state, indent=1), encoding="utf-8"),
        CONFIG: lambda file: file.write_text(snapshot.config, encoding="utf-8"),
        **{file.name: partial(shutil.copyfile, file) for file in snapshot.files},
    }
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    files = {}
    for name in sorted(write):
        file = folder / name
        with writing(file):
            write[name](file)
            fsync_file(file)
            files[name] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    manifest = {"version": 2, "files": files}
    write_atomically(folder / MANIFEST, json.dumps({**manifest, "sha256": seal(manifest)}, indent=1))


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # it tells what the system said in words alone
        if said := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(said[1]), os.strerror(int(said[1]))) from error
        raise


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says, besides this."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _free_bytes(folder: Path) -> int:
    """Room on the folder's disk. A quota may leave less: then the disk refuses in the midst of writing."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(folder).free
