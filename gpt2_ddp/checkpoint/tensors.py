"""The tensors of a checkpoint, weights and optimizer state, and the safetensors files that have them.

A file is whole, or there is one for each rank that shares a model: `model-00002-of-00004.safetensors` has the rows that
the second of four ranks holds, of each tensor that is divided. The first file also has the tensors that are not.
"""

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

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
    """Those of the names that are the file or its parts, in order; none unless they are all parts of one file."""
    stem, _, ending = file.partition(".")
    pattern = re.compile(rf"{stem}(-\d{{5}}-of-\d{{5}})?\.{ending}")
    found = sorted(filter(pattern.fullmatch, names))
    return found if found == [part_name(file, number, len(found)) for number in range(len(found))] else []


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of the plain optimizer by `<kind>.<parameter name>`; training changes it."""
    return {
        f"{kind}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def as_safetensors(tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, equal to the library's. Copies one tensor at a time, from a device only."""
    places, end = list(DTYPES), 0
    names = sorted(tensors, key=lambda name: (places.index(tensors[name].dtype), name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name in names:
        tensor = tensors[name]
        place, end = [end, end + tensor.nbytes], end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
