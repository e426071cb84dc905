"""Weights, moments and state of one step: taken from a run, and given back to all of its ranks, in place."""

import weakref
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.errors import UserError
from gpt2_ddp.processes.ranks import on_main


@dataclass(frozen=True)
class Snapshot:
    """Everything that a checkpoint holds; on the main process.

    Args:
        state: what state.json holds; plain JSON values. `moments` is False where the optimizer's were left out.
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

    def without_moments(self) -> "Snapshot":
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


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of the plain module: themselves, which training changes."""
    return dict(model.state_dict())


def moments_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The state of the raw optimizer over the plain module's parameters: itself, which training changes."""
    return {
        f"{kind}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


def put_weights(accelerator: Accelerator, weights: dict[str, Tensor], model: nn.Module) -> None:
    """Gives all ranks the weights that the main process holds; collective, in place.

    Raises:
        UserError: on every rank, as `fit_weights`.
    """
    on_main(accelerator, lambda: fit_weights(weights, model, "of this run"))
    share(accelerator, model.state_dict())


def fit_weights(weights: dict[str, Tensor], model: nn.Module, source: object) -> None:
    """Copies weights, which are `source`'s, into the plain module. Raises: UserError when names or shapes differ."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UserError("checkpoint", source, f"does not fit the model section: {reason}") from error


@torch.no_grad()
def put_moments(accelerator: Accelerator, moments: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> None:
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
    share(accelerator, placed)


@torch.no_grad()
def clear_moments(optimizer: Optimizer) -> None:
    """Gives the optimizer the state of zeros that it began with; in place where there is state already."""
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()


@torch.no_grad()
def share(accelerator: Accelerator, tensors: dict[str, Tensor]) -> None:
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
