"""The files of a checkpoint, written and read.

    step-00000100/
        model.safetensors       plain module names, fp32
        optimizer.safetensors   optimizer state; the trained weights, if the model is their average
        state.json
        config.yaml
        tokenizer.json          if there is one
        manifest.json           size and SHA-256 of every file, itself included

No file is a pickle. `checkpoint.store` writes the folders whole; `checkpoint.verify` finds and
verifies them.

The tensors of a file are whole, or there is a file for each rank that shares a model. In that case,
`model-00002-of-00004.safetensors` has the rows that the second of four ranks holds, of each tensor
that is divided. The first also has the tensors that are not.
"""

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.files import sha256_file, write_atomically, write_hashed, writing
from gpt2_ddp.state import State

FORMATS = (1, 2)
"""Formats of a checkpoint folder that are read here. Format 2 has the files of format 1, and a
configuration with a field that older releases would ignore: data.shift_windows."""
STATE = "state.json"
CONFIG = "config.yaml"
MANIFEST = "manifest.json"
FOLDER = re.compile("step-([0-9]{8}|[1-9][0-9]{8,})")
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
TRAINED = "trained_weights"
"""Kind of the tensors `<kind>.<parameter name>` of OPTIMIZER that are no optimizer state: the
trained weights, in a checkpoint whose MODEL has their average."""
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
"""Names of dtypes in a safetensors file, in the order of its tensors."""
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint's tensors that a rank has: its number, from 0, and the `count` of
    parts.

    Attributes:
        is_own: whether this rank reads and writes the part; otherwise another rank with the same
            part does.
        group: the ranks that do, in the order of their parts; None for a single one.
    """

    number: int = 0
    count: int = 1
    is_own: bool = True
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Snapshot:
    """What a rank has of the content of a checkpoint: its part of the tensors, and the rest."""

    state: State
    config: str  # the run's configuration as YAML
    model: dict[str, Tensor]  # parameters and buffers by their plain names
    # by `<kind>.<parameter name>`, such as `exp_avg.h.0.ln_1.weight`; one kind is TRAINED
    optimizer: dict[str, Tensor]
    # more content by name, such as a tokenizer
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    part: Part = field(default_factory=Part)
    format: int = FORMATS[0]

    @property
    def part_bytes(self) -> int:
        """Bytes of this part's tensors."""
        return sum(tensor.nbytes for tensor in (*self.model.values(), *self.optimizer.values()))

    @property
    def bytes(self) -> int:
        """Bytes of all parts' tensors, nearly all of the checkpoint; the parts are about equal."""
        return self.part_bytes * self.part.count


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, with the content of state.json and config.yaml."""

    path: Path
    state: State
    config: dict[str, Any]
    # size and SHA-256 of each, by its name
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])

    @property
    def kind(self) -> str:
        """The kind of its run, like `gpt2`."""
        return self.state.kind

    @property
    def step(self) -> int:
        return self.state.step

    def tensors(self, file: str) -> "Tensors":
        """The tensors of `MODEL` or `OPTIMIZER`, to be read. Raises: as `Tensors`."""
        return Tensors([self.path / name for name in part_names(file, self.files)])

    def sha256(self, file: str) -> list[str]:
        """SHA-256 of the file `MODEL` or `OPTIMIZER`, or of each of its parts, in hex."""
        return [self.files[name][1] for name in part_names(file, self.files)]


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders `step-XXXXXXXX` in a checkpoints folder, oldest step first,
    corrupt ones included."""
    paths = (path for path in folder.glob("step-*") if FOLDER.fullmatch(path.name))
    return sorted(filter(Path.is_dir, paths), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name."""
    return int(checkpoint.name[5:])


def steps_of(checkpoints: list[Path]) -> list[int]:
    """The steps in the names of checkpoints."""
    return [step_of(checkpoint) for checkpoint in checkpoints]


def checkpoint_ref(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's step and the SHA-256 of its manifest, for rows."""
    return {"step": step_of(checkpoint), "sha256": sha256_file(checkpoint / MANIFEST)}


def write_part(snapshot: Snapshot, folder: Path) -> dict[str, dict[str, Any]]:
    """Writes and fsyncs a part's files of a checkpoint into its folder; the first part's
    have all but the tensors, too. Returns the files' entries in the manifest. Raises:
    UserError, as `files.writing`."""
    number = snapshot.part.number
    count = snapshot.part.count
    contents: dict[str, Iterable[Any]] = {
        part_name(MODEL, number, count): as_safetensors(snapshot.model),
        part_name(OPTIMIZER, number, count): as_safetensors(snapshot.optimizer),
    }
    if number == 0:
        contents |= {STATE: [snapshot.state.to_json().encode()], CONFIG: [snapshot.config.encode()]}
        contents |= {name: [content] for name, content in snapshot.files.items()}
    files: dict[str, dict[str, Any]] = {}
    for name in sorted(contents):
        with writing(folder / name):
            size, sha256 = write_hashed(folder / name, contents[name])
            files[name] = {"bytes": size, "sha256": sha256}
    return files


def write_manifest(
    files: Mapping[str, dict[str, Any]], folder: Path, format: int = FORMATS[0]
) -> None:
    """Writes the manifest of a checkpoint, whose other files are on disk. Raises:
    UserError, as `files.writing`."""
    manifest = {"format": format, "files": {name: files[name] for name in sorted(files)}}
    sealed = {**manifest, "sha256": seal(manifest)}
    write_atomically(folder / MANIFEST, json.dumps(sealed, indent=1))


def seal(manifest: dict[str, Any]) -> str:
    """SHA-256 of a manifest without its own `sha256`."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def part_name(file: str, number: int, count: int) -> str:
    """Name of the file with a part's tensors, by that of a file with all."""
    stem, _, ending = file.partition(".")
    if count == 1:
        return file
    return f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}"


def part_names(file: str, names: Collection[str]) -> list[str]:
    """Those of the names that are the file or its parts, in order; none unless they are all parts
    of one file."""
    stem, _, ending = file.partition(".")
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{ending}")
    parts = sorted(filter(pattern.fullmatch, names))
    whole = [part_name(file, number, len(parts)) for number in range(len(parts))]
    return parts if parts == whole else []


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of the plain optimizer by `<kind>.<parameter name>`; training changes it."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        of_parameter: dict[str, Tensor] = optimizer.state.get(parameter, {})
        for kind, value in of_parameter.items():
            tensors[f"{kind}.{name}"] = value.detach()
    return tensors


def as_safetensors(
    tensors: dict[str, Tensor], metadata: dict[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, equal to the library's. Copies one tensor at a time, from a
    device only."""
    dtypes = list(DTYPES)
    end = 0
    names = sorted(tensors, key=lambda name: (dtypes.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name in names:
        tensor = tensors[name]
        begin = end
        end += tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


class _Slice(Protocol):
    """A tensor of a safetensors file, not yet read."""

    def get_shape(self) -> list[int]: ...
    def get_dtype(self) -> str: ...
    def __getitem__(self, rows: slice) -> Tensor: ...


class _OpenFile(Protocol):
    """A safetensors file. The library has no types."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


def _open(file: Path) -> AbstractContextManager[_OpenFile]:
    return cast(AbstractContextManager[_OpenFile], safe_open(file, "pt"))


class Tensors(Mapping[str, Tensor]):
    """The tensors in a file, or in files of its parts. Each is read when it is asked for: one at a
    time needs memory.
    Raises: OSError; SafetensorError for files that do not belong together.

    Attributes:
        shapes: of the whole tensors, by their names.
        dtypes: likewise.
    """

    def __init__(self, files: Sequence[Path]):
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        # the files with a tensor, and how many rows each has
        self._rows: dict[str, list[tuple[Path, int]]] = {}
        for file in files:
            with _open(file) as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    self._add(file, name, opened.get_slice(name))

    def _add(self, file: Path, name: str, part: _Slice) -> None:
        """Adds the rows that a file has of a tensor to those of the files before."""
        before = self.shapes.get(name)
        shape = part.get_shape()
        dtype = DTYPES_BY_NAME.get(part.get_dtype())
        fits = before is None or (shape and before[1:] == shape[1:] and dtype == self.dtypes[name])
        if dtype is None or not fits:
            raise SafetensorError(f"{name} has a part of another kind in {file.name}")
        rows = shape[0] if shape else 1
        self.shapes[name] = [before[0] + rows, *shape[1:]] if before else shape
        self.dtypes[name] = dtype
        self._rows.setdefault(name, []).append((file, rows))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, name: str) -> Tensor:
        files = self._rows[name]
        if len(files) > 1:
            return self.rows(name, 0, self.shapes[name][0])
        with _open(files[0][0]) as opened:
            return opened.get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, of which it has at least one."""
        parts: list[Tensor] = []
        first = 0
        for file, rows in self._rows[name]:
            begin = max(start - first, 0)
            end = min(stop - first, rows)
            if begin < end:
                with _open(file) as opened:
                    parts.append(opened.get_slice(name)[begin:end])
            first += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)
