"""The tensors of a checkpoint: weights and optimizer state, from a run to safetensors files, and back.

A file is whole, or there is one for each rank that shares a model: `model-00002-of-00004.safetensors` has the rows that
the second of four ranks holds, of each tensor that is divided. The first file also has the tensors that are not.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.distributed.ranks import on_main, world_size
from gpt2_ddp.errors import UserError

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
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


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint's tensors that a rank has: its number, from 0, and the `count` of parts.

    Attributes:
        is_own: whether this rank reads and writes the part; otherwise another rank with the same part does.
        group: the ranks that do, in the order of their parts; None for a single one.
    """

    number: int = 0
    count: int = 1
    is_own: bool = True
    group: dist.ProcessGroup | None = None


def part_name(file: str, number: int, count: int) -> str:
    """Name of the file with a part's tensors, by that of a file with all."""
    stem, _, ending = file.partition(".")
    return file if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{ending}"


def part_names(file: str, names: Collection[str]) -> list[str]:
    """Those of the names that are the file or its parts, in order; none if one of the parts is missing."""
    stem, _, ending = file.partition(".")
    pattern = re.compile(rf"{stem}-\d{{5}}-of-(\d{{5}})\.{ending}")
    counts = {int(found[1]) for name in names if (found := pattern.fullmatch(name))}
    for count in (1, *counts):
        wanted = [part_name(file, number, count) for number in range(count)]
        if {*wanted} <= {*names}:
            return wanted
    return []


class Tensors(Mapping[str, Tensor]):
    """The tensors in a file, or in files of its parts. Each is read when it is asked for: one at a time needs memory.
    Raises: OSError; SafetensorError for files that do not belong together.

    Attributes:
        shapes, dtypes: of the whole tensors, by their names.
    """

    def __init__(self, files: Sequence[Path]):
        self.shapes: dict[str, list[int]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._rows: dict[str, list[tuple[Path, int]]] = {}  # the files with a tensor, and how many rows each has
        known = {name: dtype for dtype, name in DTYPES.items()}
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    found = opened.get_slice(name)
                    self._add(name, file, found.get_shape(), known.get(found.get_dtype()))

    def _add(self, name: str, file: Path, shape: list[int], dtype: torch.dtype | None) -> None:
        before = self.shapes.get(name)
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
        with safe_open(files[0][0], "pt") as opened:
            return opened.get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, of which it has at least one."""
        parts, first = [], 0
        for file, rows in self._rows[name]:
            begin, end = max(start - first, 0), min(stop - first, rows)
            if begin < end:
                with safe_open(file, "pt") as opened:
                    parts.append(opened.get_slice(name)[begin:end])
            first += rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)


Fill = Callable[[dict[str, Tensor], Mapping[str, Tensor]], None]
"""`fill(targets, values)` copies values of the same names into the targets of all ranks; collective. `values` are read
on the ranks that have a part of their own."""


@torch.no_grad()
def fill(targets: dict[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Fills targets that each rank has whole with the main process's `values`. Collective."""

    def read() -> None:
        for name, target in targets.items():
            target.copy_(values[name])

    on_main(read)
    broadcast(targets)


@torch.no_grad()
def broadcast(targets: Mapping[str, Tensor]) -> None:
    """Copies the main process's targets into those of the other ranks. Collective."""
    for target in targets.values() if world_size() > 1 else ():
        dist.broadcast(target, src=0)


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of the plain optimizer by `<kind>.<parameter name>`; training changes it."""
    return {
        f"{kind}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def load_model_state(weights: Mapping[str, Tensor], model: nn.Module, fill: Fill = fill) -> None:
    """Loads weights on all ranks, in place. `fill`: that of sharded tensors, for these. Collective. Raises: UserError,
    as `fit_weights`."""
    on_main(lambda: check_weights(weights, model, "of this run"))
    fill(model.state_dict(), weights)


@torch.no_grad()
def fit_weights(weights: Mapping[str, Tensor], model: nn.Module, source: object) -> None:
    """Copies the weights of `source` into the plain module. Raises: UserError if names or shapes differ."""
    check_weights(weights, model, source)
    for name, target in model.state_dict().items():
        target.copy_(weights[name])


def check_weights(weights: Mapping[str, Tensor], model: nn.Module, source: object) -> None:
    """Raises: UserError if names or shapes of the weights of `source` are not the module's."""
    found, own = shapes_of(weights), shapes_of(model.state_dict())
    for name in sorted({*found, *own}):
        if found.get(name) != own.get(name):
            reason = f"{name} has shape {found.get(name)}, in the model {own.get(name)}"
            raise UserError("checkpoint", source, f"does not fit the model section: {reason}")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shapes of tensors by their names."""
    return tensors.shapes if isinstance(tensors, Tensors) else {name: [*one.shape] for name, one in tensors.items()}


def load_optimizer_state(
    state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, fill: Fill = fill
) -> None:
    """Loads optimizer state on all ranks; the main process decides what there is. Collective; reuses the tensors that
    are there."""
    parameters = dict(model.named_parameters())

    def check() -> list[tuple[str, list[int], torch.dtype]]:
        shapes = shapes_of(state)
        if wrong := misfit(shapes, model):
            raise UserError("checkpoint", OPTIMIZER, f"{wrong}; restore the file, or resume from another checkpoint")
        dtypes = state.dtypes if isinstance(state, Tensors) else {name: one.dtype for name, one in state.items()}
        return [(key, shape, dtypes[key]) for key, shape in shapes.items()]

    layout = on_main(check)
    before = {parameter: optimizer.state.pop(parameter, {}) for parameter in parameters.values()}
    loaded: dict[str, Tensor] = {}
    for key, shape, dtype in layout:
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        value = before[parameter].get(kind)
        if value is None:
            value = torch.empty_like(parameter if shape else torch.empty((), device=parameter.device), dtype=dtype)
        optimizer.state[parameter][kind] = loaded[key] = value.detach()
    fill(loaded, state)


def misfit(shapes: Mapping[str, Sequence[int]], model: nn.Module) -> str:
    """Why tensors of these shapes are no optimizer state of the model; empty if they are, or if there are none. Two
    parameters have the same kinds of tensors or, in other groups, no common one."""
    parameters, kinds = {name: list(value.shape) for name, value in model.named_parameters()}, {}
    for key, shape in shapes.items():
        kind, _, name = key.partition(".")
        if name not in parameters or list(shape) not in ([], parameters[name]):
            return f"{key} has shape {list(shape)}, its parameter {parameters.get(name)}"
        kinds.setdefault(name, set()).add(kind)
    for name in parameters if shapes else ():
        own = kinds.get(name, set())
        if not own or any(other & own and not other <= own for other in kinds.values()):
            return f"{name} has the optimizer state {', '.join(sorted(own)) or 'none'}, unlike other parameters"
    return ""


def as_safetensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, equal to the library's. Copies one tensor at a time, from a device only."""
    places, end = list(DTYPES), 0
    names = sorted(tensors, key=lambda name: (places.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for tensor, name in ((tensors[name], name) for name in names):
        place, end = [end, end + tensor.nbytes], end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
