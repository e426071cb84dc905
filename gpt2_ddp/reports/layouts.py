"""Names, shapes and dtypes of a checkpoint's tensors, compared with those that
its configuration makes."""

import math
from collections.abc import Mapping, Set

import torch
from torch import nn

from gpt2_ddp.checkpoint.format import (
    CONFIG,
    MODEL,
    OPTIMIZER,
    STATE,
    TRAINED,
    Checkpoint,
    Tensors,
)
from gpt2_ddp.checkpoint.loading import (
    layout_defect,
    layout_of,
    optimizer_defect,
    split_state,
    weights_defect,
)
from gpt2_ddp.config.jobs import ClassifierConfig, JobConfig, RegressionConfig, TransformerConfig
from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.saved import read_config
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import without_init
from gpt2_ddp.model.optim import build_optimizer, state_names
from gpt2_ddp.tasks.jobs import MLP, Line, TransformerLM, image_model
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.tasks.supervised import build_job_optimizer


def tensor_defects(place: str, checkpoint: Checkpoint, kind: type[Pretraining]) -> list[str]:
    """Why a checkpoint's weights or optimizer state are not those of its configuration. `kind`: the
    class of a GPT's task. A model gets no memory, and its layers are made only if the file has as
    many tensors."""
    try:
        config = read_config(checkpoint.kind, checkpoint.config, f"{place}/{CONFIG}")
    except UserError as error:
        return error.mistakes
    weights = checkpoint.tensors(MODEL)
    model = _make_model(config, checkpoint, weights, kind)
    if isinstance(model, str):
        return [f"{place}/{model}"]
    if model is None:
        return []
    if defect := weights_defect(weights, model):
        return [f"{place}/{MODEL}: {defect}"]
    layouts, trained = split_state(layout_of(checkpoint.tensors(OPTIMIZER)))
    averaged = dict(model.named_parameters()) if config.average else {}
    if defect := layout_defect(trained, layout_of(averaged)):
        return [f"{place}/{OPTIMIZER}: {TRAINED}.{defect}"]
    names = _state_names(config, model, kind)
    shapes = {name: [*parameter.shape] for name, parameter in model.named_parameters()}
    defect = optimizer_defect(layouts, shapes, names)
    state = checkpoint.state
    has_stepped = state.step - state.progress.first_step > state.losses.skipped
    if not defect and (layouts or has_stepped):
        with_state = {name for name, kinds in names.items() if kinds}
        lost = with_state - {key.partition(".")[2] for key in layouts}
        if lost:
            defect = f"the state of {min(lost)} is missing"
    return [f"{place}/{OPTIMIZER}: {defect}"] if defect else []


def _make_model(
    config: RunConfig, checkpoint: Checkpoint, weights: Tensors, kind: type[Pretraining]
) -> nn.Module | str | None:
    """The plain model on the meta device; or why the file cannot have its weights. None for a job
    of one's own, whose model comes with its data."""
    record = checkpoint.state.record
    has_layers = isinstance(config, TrainingConfig | TransformerConfig)
    layers = config.model.n_layer if has_layers else 0
    if layers > len(weights):
        return f"{MODEL}: has {len(weights)} tensors for {layers} layers (model.n_layer)"
    with torch.device("meta"), without_init():
        if isinstance(config, TrainingConfig):
            size = record["vocab_size"]
            if size > sum(map(math.prod, weights.shapes.values())):
                return f"{STATE}: vocab_size is {size}, more than its weights"
            return kind(config).make_model(size, 0)
        if isinstance(config, TransformerConfig):
            return TransformerLM(config)
        if isinstance(config, RegressionConfig):
            return Line()
        if not isinstance(config, ClassifierConfig):
            return None
        if not config.data.images:
            return MLP(config.data.features, config.model.hidden, 2)
        if not record.get("classes") or not record.get("image_shape"):
            return f"{STATE}: has no classes or no image_shape"
        return image_model(config, record)


def _state_names(
    config: RunConfig, model: nn.Module, kind: type[Pretraining]
) -> Mapping[str, Set[str]]:
    """Names of the optimizer state of each parameter; none of a class with an optimizer of its
    own."""
    if isinstance(config, JobConfig):
        optimizer = build_job_optimizer(model, config.optim)
    elif kind.build_optimizer is Pretraining.build_optimizer:
        assert isinstance(config, TrainingConfig), "the other kind"
        optimizer = build_optimizer(model, config.optim)
    else:
        return {}
    state_of = state_names(optimizer)
    return {
        name: state_of[parameter]
        for name, parameter in model.named_parameters()
        if parameter in state_of
    }
