"""Checkpoints that verify themselves: `step-XXXXXXXX/` folders, of which a run's `Checkpointer` keeps some.

Each holds model.safetensors (plain module names, fp32), optimizer.safetensors, state.json, config.yaml, the tokenizer
where it is a file, and manifest.json with the size and SHA-256 of each of them, and its own; a flipped bit in any file
is found when it is read. Nothing in it is a pickle.
"""

import hashlib
import json
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import free_name, read_small, sha256_file, write_atomically, write_hashed, writing
from gpt2_ddp.project import command_for


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds; on the main process.

    Args:
        state: what state.json holds; plain JSON values. `optimizer_state` is False where the optimizer's were left out.
        config: the run's configuration as YAML.
        model: parameters and buffers by their plain names.
        optimizer: `<kind>.<parameter name>`, such as `exp_avg.h.0.ln_1.weight`.
        files: to be copied into the checkpoint, such as a tokenizer.
    """

    state: dict[str, Any]
    config: str
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    files: tuple[Path, ...] = ()

    @property
    def bytes(self) -> int:
        """Of its tensors: nearly all that it takes on a disk."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.optimizer.values()))

    def without_optimizer(self) -> "Snapshot":
        """Weights alone, for who does not go on from them as if nothing had been; `state` says what is missing."""
        return replace(self, state=self.state | {"moments": False}, optimizer={}) if self.optimizer else self

    def copied(self, memory: dict[str, Tensor]) -> "Snapshot":
        """The same on the host, where training does not change it.

        Args:
            memory: taken again for every copy, and filled by the first one.
        """
        copies = [
            {name: _copy(tensor, memory, name) for name, tensor in part.items()}
            for part in (self.model, self.optimizer)
        ]
        if any(tensor.is_cuda for tensor in self.model.values()):
            torch.cuda.synchronize()  # once for all copies
        return replace(self, state=deepcopy(self.state), model=copies[0], optimizer=copies[1])


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the plain module: themselves, which training changes."""
    return dict(model.state_dict())


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of the raw optimizer over the plain module's parameters: itself, which training changes."""
    return {
        f"{kind}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_model_state(accelerator: Accelerator, weights: dict[str, Tensor], model: nn.Module) -> None:
    """Gives all ranks the weights that the main process holds; collective, in place.

    Raises:
        UserError: on every rank, as `fit_weights`.
    """
    on_main(accelerator, lambda: fit_weights(weights, model, "of this run"))
    broadcast_tensors(accelerator, model.state_dict())


def fit_weights(weights: dict[str, Tensor], model: nn.Module, source: object) -> None:
    """Copies weights, which are `source`'s, into the plain module. Raises: UserError when names or shapes differ."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UserError("checkpoint", source, f"does not fit the model section: {reason}") from error


@torch.no_grad()
def load_optimizer_state(
    accelerator: Accelerator, moments: dict[str, Tensor], model: nn.Module, optimizer: Optimizer
) -> None:
    """Gives all ranks' optimizers the state that the main process holds, over the wire: nodes need not share a disk.
    Collective; in place where there is state already, and nothing else stays."""
    layout = on_main(accelerator, lambda: [(key, value.shape, value.dtype) for key, value in moments.items()])
    parameters = dict(model.named_parameters())
    before = {parameter: dict(optimizer.state.get(parameter, {})) for parameter in parameters.values()}
    optimizer.state.clear()
    placed: dict[str, Tensor] = {}
    for key, shape, dtype in layout:
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        value = before[parameter].get(kind)
        placed[key] = torch.empty(shape, dtype=dtype, device=parameter.device) if value is None else value
        optimizer.state[parameter][kind] = placed[key]
        if accelerator.is_main_process:
            placed[key].copy_(moments[key])
    broadcast_tensors(accelerator, placed)


@torch.no_grad()
def reset_optimizer_state(optimizer: Optimizer) -> None:
    """Gives the optimizer the state of zeros that it began with; in place where there is state already."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


@torch.no_grad()
def broadcast_tensors(accelerator: Accelerator, tensors: dict[str, Tensor]) -> None:
    """Gives every rank the main process's values of these tensors, in place; collective."""
    if accelerator.num_processes > 1:
        for tensor in tensors.values():
            dist.broadcast(tensor, src=0)


def _copy(tensor: Tensor, memory: dict[str, Tensor], name: str) -> Tensor:
    """Starts to copy to the host; what it copies a GPU's memory to is pinned, so that this goes at the bus's speed."""
    if name not in memory:
        memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.is_cuda:  # exactly these bytes: `pin_memory` would round them up to a power of two
            _pin(memory[name])
    return memory[name].copy_(tensor, non_blocking=tensor.is_cuda)


def _pin(tensor: Tensor) -> None:
    """Keeps a tensor's memory from being moved, while it is there; where the system refuses, copies take longer."""
    runtime: Any = torch.cuda.cudart()
    if tensor.nbytes and int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())


FORMAT = 1
"""Of a checkpoint folder. Within it, a field that is missing takes its default, and an unknown one is ignored."""
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


class CorruptCheckpoint(Exception):
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
        """What it is a training of, like `gpt2`."""
        return self.state["kind"]

    def read(self) -> Snapshot:
        """All of it, weights and moments included."""
        model, optimizer = load_file(self.path / MODEL), load_file(self.path / OPTIMIZER)
        return Snapshot(self.state, yaml.safe_dump(self.config), model, optimizer)


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders `step-XXXXXXXX` in a run's checkpoints folder, oldest step first; damaged or not."""
    return sorted(place for place in folder.glob("step-*") if place.is_dir() and place.name[5:].isdigit())


def steps_of(checkpoints: list[Path]) -> list[int]:
    """The steps that folders of checkpoints are named by."""
    return [int(place.name[5:]) for place in checkpoints]


def checkpoint_ref(checkpoint: Path) -> dict[str, Any]:
    """What rows say of a checkpoint: its step, and the SHA-256 of its manifest, which holds those of all files."""
    return {"step": int(checkpoint.name[5:]), "sha256": sha256_file(checkpoint / MANIFEST)}


@contextmanager
def still_there(checkpoint: Checkpoint) -> Iterator[None]:
    """Raises: UserError where a file of a checkpoint, which was verified before, is gone by now."""
    try:
        yield
    except FileNotFoundError as error:
        hint = "is gone; a run that goes on removes old checkpoints: give the same command again"
        raise UserError("checkpoint", checkpoint.path, hint) from error


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
        except CorruptCheckpoint as damage:
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
        CorruptCheckpoint: naming the first file that is missing, cut short or changed.
        UserError: it is of another format.
    """
    try:
        manifest = json.loads(read_small(checkpoint / MANIFEST, 2**20))
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        format, sealed = manifest.get("format"), manifest["sha256"] == seal(manifest)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(checkpoint / MANIFEST, f"cannot be read ({error})") from error
    if not sealed:
        raise CorruptCheckpoint(checkpoint / MANIFEST, "its SHA-256 is not the one that was written")
    if format != FORMAT:
        hint = f"is of format {format}, and this release reads format {FORMAT}; use the release that wrote it"
        raise UserError("checkpoint", checkpoint, hint)
    for name in (MODEL, OPTIMIZER, STATE, CONFIG):
        if name not in files:
            raise CorruptCheckpoint(checkpoint / MANIFEST, f"does not list {name}")
    for name, (size, sha256) in files.items():
        file = checkpoint / name
        try:
            if not file.is_file():
                raise CorruptCheckpoint(file, "is missing")
            if file.stat().st_size != size:
                raise CorruptCheckpoint(file, f"has {file.stat().st_size} bytes instead of {size}")
            if (weights or name not in (MODEL, OPTIMIZER)) and sha256_file(file) != sha256:
                raise CorruptCheckpoint(file, "its SHA-256 is not the one that was written")
        except OSError as error:
            raise CorruptCheckpoint(file, f"cannot be read ({error.strerror})") from error
    state, config = _read_fields(checkpoint / STATE, json.loads), _read_fields(checkpoint / CONFIG, yaml.safe_load)
    if type(state.get("step")) is not int:
        raise CorruptCheckpoint(checkpoint / STATE, "does not say its step")
    return Checkpoint(checkpoint, state, config)


def _read_fields(file: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        fields = parse(file.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CorruptCheckpoint(file, f"cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(fields, dict):
        raise CorruptCheckpoint(file, "holds no fields")
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
        hint = f"is of a {found.kind} run, and one of {kind} is wanted; `{command_for('evaluate')}` scores it"
        raise UserError(field, path, hint)
    return found


def _find(path: Path, field: str, weights: bool) -> Checkpoint:
    if os.path.isfile(path / TRANSFORMERS) and not os.path.isfile(path / MANIFEST):
        raise UserError(field, path, "is a model of transformers; begin a run with it (train.init_from) and name that")
    if os.path.isfile(path / MANIFEST) or os.path.isfile(path / MODEL):
        try:
            return verify(path, weights)
        except CorruptCheckpoint as damage:
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
    manifest = {"format": FORMAT, "files": files}
    write_atomically(folder / MANIFEST, json.dumps({**manifest, "sha256": seal(manifest)}, indent=1))


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
