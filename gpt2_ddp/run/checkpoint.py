"""Checkpoints that verify themselves: `step-XXXXXXXX/` folders, of which a run's `CheckpointFolder` keeps some.

Each holds model.safetensors (plain module names, fp32), optimizer.safetensors, state.json, config.yaml, the tokenizer
where it is a file, and manifest.json with the size and SHA-256 of each of them, and its own; a flipped bit in any file
is found when it is read. Nothing in it is a pickle.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from gpt2_ddp.errors import UserError
from gpt2_ddp.files import free_name, read_small, sha256_file, write_atomically, write_hashed, writing
from gpt2_ddp.project import said
from gpt2_ddp.run.snapshot import Snapshot

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
STATE, CONFIG, MANIFEST = "state.json", "config.yaml", "manifest.json"
TRANSFORMERS = "config.json"
"""What a model of transformers has, and no checkpoint."""

DTYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of numbers in a safetensors file, in the order in which its tensors stand."""


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


def steps_of(checkpoints: list[Path]) -> list[int]:
    """The steps that folders of checkpoints are named by."""
    return [int(place.name[5:]) for place in checkpoints]


def described(checkpoint: Path) -> dict[str, Any]:
    """What rows say of a checkpoint: its step, and the SHA-256 of its manifest, which holds those of all files."""
    return {"step": int(checkpoint.name[5:]), "sha256": sha256_file(checkpoint / MANIFEST)}


@contextmanager
def still_there(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises: UserError where a file of a checkpoint, which was verified before, is gone by now."""
    try:
        yield
    except FileNotFoundError as error:
        cure = "is gone; a run that goes on removes old checkpoints: give the same command again"
        raise UserError("checkpoint", checkpoint.path, cure) from error


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
            if not place.is_dir():  # removed meanwhile by a run that goes on, which has a newer one
                return newest_intact(folder, weights, put_aside, quiet)
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
    state, config = _read_fields(checkpoint / STATE, json.loads), _read_fields(checkpoint / CONFIG, yaml.safe_load)
    if type(state.get("step")) is not int:
        raise Damaged(checkpoint / STATE, "does not say its step")
    return Checkpoint(checkpoint, state, config)


def _read_fields(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        fields = parse(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Damaged(file, f"cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(fields, dict):
        raise Damaged(file, "holds no fields")
    return fields


def find_checkpoint(path: Path, field: str = "checkpoint", weights: bool = True, kind: str = "") -> Checkpoint:
    """The checkpoint that a user means: `path` itself, or the newest intact one of the run folder `path`.

    Args:
        field: where the user named it, for messages.
        weights: whether to hash the large files too.
        kind: what it has to be a training of; empty: anything.

    Raises:
        UserError: when there is none, or the one named is damaged or of another kind.
    """
    found = _find(path, field, weights)
    if kind and found.kind != kind:
        cure = f"is of a {found.kind} run, and one of {kind} is wanted; `{said('evaluate')}` gives such a run's scores"
        raise UserError(field, path, cure)
    return found


def _find(path: Path, field: str, weights: bool) -> Checkpoint:
    if os.path.isfile(path / TRANSFORMERS) and not os.path.isfile(path / MANIFEST):
        raise UserError(field, path, "is a model of transformers; begin a run with it (train.init_from) and name that")
    if os.path.isfile(path / MANIFEST) or os.path.isfile(path / MODEL):
        try:
            return verify(path, weights)
        except Damaged as damage:
            raise UserError(field, damage.file, f"{damage.reason}; name another checkpoint") from damage
    if os.path.isdir(path / "checkpoints") and (found := newest_intact(path / "checkpoints", weights)):
        return found
    raise UserError(field, path, "holds no intact checkpoint; name a run folder or a step-XXXXXXXX folder in it")


def write(snapshot: Snapshot, folder: Path) -> None:
    """Writes and fsyncs the files of a checkpoint, its manifest last."""
    contents = {
        MODEL: as_safetensors(snapshot.model),
        OPTIMIZER: as_safetensors(snapshot.optimizer),
        STATE: [json.dumps(snapshot.state, indent=1).encode()],
        CONFIG: [snapshot.config.encode()],
        **{file.name: (source.read_bytes() for source in [file]) for file in snapshot.files},
    }
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    files = {}
    for name in sorted(contents):
        with writing(folder / name):
            size, sha256 = write_hashed(folder / name, contents[name])
            files[name] = {"bytes": size, "sha256": sha256}
    manifest = {"version": 2, "files": files}
    write_atomically(folder / MANIFEST, json.dumps({**manifest, "sha256": seal(manifest)}, indent=1))


def set_aside(snapshot: Snapshot, folder: Path) -> Snapshot:
    """The same from files in `folder` that have no name, so that they are gone with it, or with the process, however
    that ends. Its tensors take memory only once they are read.

    Raises:
        UserError: as `writing`.
    """

    def written(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        with writing(folder), TemporaryFile(dir=folder) as file:
            file.writelines(as_safetensors(tensors))
            file.flush()
            return load_file(f"/dev/fd/{file.fileno()}")  # mapped, which holds the file when it is closed

    model, optimizer = written(snapshot.model), written(snapshot.optimizer)
    return replace(snapshot, state=deepcopy(snapshot.state), model=model, optimizer=optimizer)


def as_safetensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, the same as the library's own, from the tensors' memory without a copy; of those
    on a device, one at a time is on the host."""
    places = list(DTYPES)
    names = sorted(tensors, key=lambda name: (places.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of what a manifest says, besides this."""
    said = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
