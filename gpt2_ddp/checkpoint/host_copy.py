"""A copy of a snapshot on the host, for a save in the background. Imported by the first one."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.format import Snapshot


def copied(snapshot: Snapshot, memory: dict[str, Tensor]) -> Snapshot:
    """A copy that training does not change. The first allocates `memory`, later ones reuse it."""
    copy = lambda part: {name: _copy(tensor, memory, name) for name, tensor in part.items()}  # noqa: E731
    model, optimizer = map(copy, (snapshot.model, snapshot.optimizer))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # once for all copies
    return replace(snapshot, state=snapshot.state.model_copy(deep=True), model=model, optimizer=optimizer)


def _copy(tensor: Tensor, memory: dict[str, Tensor], name: str) -> Tensor:
    """Starts a copy to the host. From a GPU it goes to pinned memory, at the full speed of the bus."""
    if name not in memory:
        memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.is_cuda:  # exactly these bytes: `pin_memory` would round them up to a power of two
            _pin(memory[name])
    return memory[name].copy_(tensor, non_blocking=tensor.is_cuda)


def _pin(tensor: Tensor) -> None:
    """Pins the tensor's memory while it exists; if the system refuses, copies take longer."""
    runtime: Any = torch.cuda.cudart()
    if tensor.nbytes and int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
        weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr())
