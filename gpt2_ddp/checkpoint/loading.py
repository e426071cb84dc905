"""From the files of a checkpoint into a run. Imported at a resume or a rollback, and by commands."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.checkpoint import DTYPES, OPTIMIZER, Checkpoint
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.distributed.ranks import has_others, on_main
from gpt2_ddp.errors import UserError


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
                    found, before = opened.get_slice(name), self.shapes.get(name)
                    shape, dtype = found.get_shape(), known.get(found.get_dtype())
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


def saved_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a GPT's checkpoint. Raises: UserError if it cannot be loaded, or is another."""
    data = checkpoint.state.record
    file = checkpoint.path / data["tokenizer"]
    tokenizer = load_tokenizer(str(file) if file.is_file() else data["tokenizer"])
    if tokenizer.sha256 != data["tokenizer_sha256"]:
        raise UserError("checkpoint", file, "is not the tokenizer of the run; name another checkpoint")
    return tokenizer


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
    for target in targets.values() if has_others() else ():
        dist.broadcast(target, src=0)


def load_model_state(weights: Mapping[str, Tensor], model: nn.Module, fill: Any = fill) -> None:
    """Loads weights on all ranks, in place. Collective. Raises: UserError, as `fit_weights`.

    Args:
        fill: `fill(targets, values)` copies values of the same names into the targets of all ranks; collective. It
            reads `values` on the ranks that have a part of their own.
    """
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


def load_optimizer_state(state: Any, model: nn.Module, optimizer: Optimizer, fill: Any = fill) -> None:
    """Loads optimizer state, `Tensors` or none, on all ranks; the main process decides what there is. Collective;
    reuses the tensors that are there. `fill`: as of `load_model_state`."""
    parameters = dict(model.named_parameters())

    def check() -> list[tuple[str, list[int], torch.dtype]]:
        shapes = shapes_of(state)
        for key, shape in shapes.items():
            own = getattr(parameters.get(key.partition(".")[2]), "shape", None)
            if own is None or shape not in ([], [*own]):
                hint = (
                    f"{key} has shape {shape}, its parameter {own}; restore the file, or resume from another checkpoint"
                )
                raise UserError("checkpoint", OPTIMIZER, hint)
        return [(key, shape, state.dtypes[key]) for key, shape in shapes.items()]

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
