"""The tensors of a checkpoint, compared with a model and an optimizer, and loaded into them."""

from collections.abc import Callable, Mapping, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gpt2_ddp.checkpoint.format import OPTIMIZER, TRAINED, Checkpoint, Tensors
from gpt2_ddp.data.tokenizer import Tokenizer, load_tokenizer
from gpt2_ddp.distributed.ranks import has_others, on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.optim import state_names

Fill = Callable[[dict[str, Tensor], Mapping[str, Tensor]], None]
"""(targets, values) -> None: copies values of the same names into the targets of all ranks. It is
collective, and reads the values on the ranks that have a part of their own. `fill` is for targets
that each rank has whole."""
Layout = tuple[list[int], torch.dtype]
"""Shape and dtype of a tensor."""


def saved_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a GPT's checkpoint. Raises: UserError if it cannot be loaded,
    or is another."""
    data = checkpoint.state.record
    file = checkpoint.path / data["tokenizer"]
    tokenizer = load_tokenizer(str(file) if file.is_file() else data["tokenizer"])
    if tokenizer.sha256 != data["tokenizer_sha256"]:
        raise UserError(
            "checkpoint", file, "is not the tokenizer of the run; name another checkpoint"
        )
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


def load_model_state(weights: Mapping[str, Tensor], model: nn.Module, fill: Fill = fill) -> None:
    """Loads weights on all ranks, in place. Collective. Raises: UserError, as `fit_weights`."""
    on_main(lambda: check_weights(weights, model, "of this run"))
    fill(model.state_dict(), weights)


@torch.no_grad()
def fit_weights(weights: Mapping[str, Tensor], model: nn.Module, source: object) -> None:
    """Copies the weights of `source` into the plain module. Raises: UserError if names
    or shapes differ."""
    check_weights(weights, model, source)
    for name, target in model.state_dict().items():
        target.copy_(weights[name])


def check_weights(weights: Mapping[str, Tensor], model: nn.Module, source: object) -> None:
    """Raises: UserError if names, shapes or dtypes of the weights of `source` are
    not the module's."""
    if reason := weights_defect(weights, model):
        raise UserError("checkpoint", source, f"does not fit the model section: {reason}")


def weights_defect(weights: Mapping[str, Tensor], model: nn.Module) -> str:
    """The first tensor whose shape or dtype is not that of the plain module; empty if all fit."""
    return layout_defect(layout_of(weights), layout_of(model.state_dict()))


def layout_defect(saved: Mapping[str, Layout], right: Mapping[str, Layout]) -> str:
    """The first tensor whose layout is not the model's; empty if all fit."""
    for name in sorted({*saved, *right}):
        saved_layout = saved.get(name)
        right_layout = right.get(name)
        if saved_layout != right_layout:
            shapes = f"{_as_text(saved_layout)}, in the model {_as_text(right_layout)}"
            return f"{name} has shape {shapes}"
    return ""


def layout_of(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """Shapes and dtypes of tensors by their names."""
    if isinstance(tensors, Tensors):
        return {name: (shape, tensors.dtypes[name]) for name, shape in tensors.shapes.items()}
    return {name: ([*tensor.shape], tensor.dtype) for name, tensor in tensors.items()}


def split_state(
    layouts: Mapping[str, Layout],
) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """The layouts in OPTIMIZER: of the optimizer state, by `<kind>.<parameter name>`; and of the
    trained weights, by parameter name."""
    prefix = f"{TRAINED}."
    trained = {
        name.removeprefix(prefix): layout
        for name, layout in layouts.items()
        if name.startswith(prefix)
    }
    state = {name: layout for name, layout in layouts.items() if not name.startswith(prefix)}
    return state, trained


def _as_text(layout: Layout | None) -> str:
    """A layout as text, without the usual dtype."""
    if layout is None:
        return "None"
    shape, dtype = layout
    if dtype == torch.float32:
        return f"{shape}"
    return f"{shape} of {_name_of(dtype)}"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_optimizer_state(
    state: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer, fill: Fill = fill
) -> None:
    """Loads the optimizer state in OPTIMIZER, `Tensors` or none, on all ranks; the main process
    decides what there is. Collective; reuses the tensors that are there. Raises: UserError for
    state that the optimizer cannot have written."""
    parameters = dict(model.named_parameters())

    def check() -> list[tuple[str, list[int], torch.dtype]]:
        layouts, _ = split_state(layout_of(state))
        shapes = {name: [*parameter.shape] for name, parameter in parameters.items()}
        state_of = state_names(optimizer)
        names = {name: state_of[p] for name, p in parameters.items() if p in state_of}
        if defect := optimizer_defect(layouts, shapes, names):
            hint = "restore the file, or resume from another checkpoint"
            raise UserError("checkpoint", OPTIMIZER, f"{defect}; {hint}")
        return [(key, shape, dtype) for key, (shape, dtype) in layouts.items()]

    layout = on_main(check)
    before = {parameter: optimizer.state.pop(parameter, {}) for parameter in parameters.values()}
    loaded: dict[str, Tensor] = {}
    for key, shape, dtype in layout:
        kind, name = key.split(".", 1)
        parameter = parameters[name]
        value = before[parameter].get(kind)
        if value is None:
            # like the parameter, of which this rank may have a part; numbers are whole
            like = parameter if shape else torch.empty((), device=parameter.device)
            value = torch.empty_like(like, dtype=dtype)
        optimizer.state[parameter][kind] = loaded[key] = value.detach()
    fill(loaded, state)


def load_trained_weights(state: Mapping[str, Tensor], model: nn.Module, fill: Fill = fill) -> None:
    """Loads the trained weights in OPTIMIZER into the parameters of all ranks. It has none where
    MODEL has them; then the parameters stay. Collective. Raises: UserError for other tensors than
    the parameters."""
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def check() -> bool:
        _, trained = split_state(layout_of(state))
        if trained and (defect := layout_defect(trained, layout_of(parameters))):
            hint = "restore the file, or resume from another checkpoint"
            raise UserError("checkpoint", OPTIMIZER, f"{TRAINED}.{defect}; {hint}")
        return bool(trained)

    if on_main(check):
        fill({f"{TRAINED}.{name}": weight for name, weight in parameters.items()}, state)


def optimizer_defect(
    layouts: Mapping[str, Layout], shapes: Mapping[str, list[int]], names: Mapping[str, Set[str]]
) -> str:
    """Why tensors are no state that an optimizer wrote; empty if they are.

    Args:
        layouts: of the tensors `<kind>.<parameter name>`.
        shapes: of the parameters.
        names: the kinds that each parameter with state has, as far as they are known.
    """
    saved: dict[str, set[str]] = {}
    for key, (shape, dtype) in layouts.items():
        kind, _, name = key.partition(".")
        of_parameter = shapes.get(name)
        # `step` is a number; of an optimizer of somebody's own, any state may be one
        allowed = [[], of_parameter]
        if name in names:
            allowed = [[] if kind == "step" else of_parameter]
        if of_parameter is None or shape not in allowed:
            return f"{key} has shape {shape}, its parameter {of_parameter}"
        if name in names and dtype != torch.float32:
            return f"{key} has the type {_name_of(dtype)} instead of float32"
        saved.setdefault(name, set()).add(kind)
    for name in saved.keys() & names.keys():
        for kind in sorted(saved[name] ^ names[name]):
            problem = "missing" if kind in names[name] else "unknown to the optimizer"
            return f"{kind}.{name} is {problem}"
    return ""
