"""The tensors of a checkpoint: weights and optimizer state, from a run to a safetensors file, and back."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import _TYPES
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.distributed.ranks import is_main, on_main, world_size
from gpt2_ddp.errors import UserError

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

_ORDER = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
DTYPES = {_TYPES[name]: name for name in _ORDER}  # names of dtypes in a safetensors file, in the order of its tensors


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """State of the plain optimizer by `<kind>.<parameter name>`; training changes it."""
    return {
        f"{kind}.{name}": value.detach()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state.get(parameter, {}).items()
    }


@torch.no_grad()
def fill(targets: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copies the main process's `values` into the `targets` of all ranks, by their names; collective."""
    for name, target in targets.items():
        if is_main():
            target.copy_(values[name])
        if world_size() > 1:
            dist.broadcast(target, src=0)


def load_model_state(weights: dict[str, Tensor], model: nn.Module, fill: Callable[..., None] = fill) -> None:
    """Loads the main process's weights on all ranks, in place. `fill`: that of sharded tensors, for these. Collective.
    Raises: UserError, as `fit_weights`."""
    on_main(lambda: check_weights(weights, model, "of this run"))
    fill(model.state_dict(), weights)


def fit_weights(weights: dict[str, Tensor], model: nn.Module, source: object) -> None:
    """Copies the weights of `source` into the plain module. Raises: UserError if names or shapes differ."""
    check_weights(weights, model, source)
    model.load_state_dict(weights)


def check_weights(weights: dict[str, Tensor], model: nn.Module, source: object) -> None:
    """Raises: UserError if names or shapes of the weights of `source` are not the module's."""
    found, own = ({name: list(value.shape) for name, value in some.items()} for some in (weights, model.state_dict()))
    for name in sorted({*found, *own}):
        if found.get(name) != own.get(name):
            reason = f"{name} has shape {found.get(name)}, in the model {own.get(name)}"
            raise UserError("checkpoint", source, f"does not fit the model section: {reason}")


def load_optimizer_state(
    state: dict[str, Tensor], model: nn.Module, optimizer: Optimizer, fill: Callable[..., None] = fill
) -> None:
    """Loads the main process's optimizer state on all ranks. Collective; reuses the tensors that are there."""
    parameters = dict(model.named_parameters())

    def check() -> list[tuple[str, torch.Size, torch.dtype]]:
        if wrong := misfit({name: value.shape for name, value in state.items()}, model):
            raise UserError("checkpoint", OPTIMIZER, f"{wrong}; restore the file, or resume from another checkpoint")
        return [(key, value.shape, value.dtype) for key, value in state.items()]

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
