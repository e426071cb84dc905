"""Initial weights of a new run (`train.init_from`): those of a checkpoint.

A model that transformers reads becomes a checkpoint first: import_hf.py, a process of its own,
writes it into the user's cache.
"""

import os
from collections import ChainMap
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL
from typing import TypeVar

from torch import Tensor

from gpt2_ddp.checkpoint.format import MODEL, Checkpoint
from gpt2_ddp.checkpoint.loading import fit_weights, saved_tokenizer
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.base import shown
from gpt2_ddp.config.own_settings import OWN, OwnConfig, recorded_settings
from gpt2_ddp.config.saved import complete, differences
from gpt2_ddp.config.training import WEIGHT_FIELDS, ModelConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.process import run_module
from gpt2_ddp.distributed.ranks import LONGEST, on_main
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.files import local_copy, no_such_folder
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.state import GPTData

ConfigT = TypeVar("ConfigT", bound=TrainingConfig)

FIELD = "train.init_from"
HUB = "hub:"
ON_THE_HUB = f"a model on the Hub is {HUB}OWNER/NAME, like {HUB}openai-community/gpt2"
POSITIONS = "wpe.weight"
TRANSFORMERS = "config.json"  # a file of transformers' models that no checkpoint has


def settle_model(config: ConfigT, saved: Checkpoint | None, watchdog: Watchdog) -> ConfigT:
    """The configuration whose inherited fields of the model section, and settings of the same class
    of one's own, are those of `saved`, the checkpoint to resume, or else of `train.init_from`.
    Collective. Raises: UserError, as `find_model`."""

    def settled() -> tuple[ModelConfig, OwnConfig]:
        source = saved or find_source(config)
        has_class = bool(saved) or _class_of(source) == (config.task or "").rpartition(":")[2]
        recorded = recorded_settings(source.config) if has_class else {}
        own = OwnConfig.model_validate(recorded | config.own.given)
        return config.with_model(_model_of(source)).model, own

    watchdog.heartbeat("importing", timeout=LONGEST.total_seconds())
    model, own = on_main(settled)
    if config.inherited and not saved:
        size = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide"
        shape = f"{model.architecture}, {size}, context {model.block_size}"
        print_line(f"note: model from {config.train.init_from}: {shape}")
    if own != config.own and not saved:
        values = [f"{name} {shown(value)}" for name, value in own.given.items()]
        print_line(f"note: settings from {config.train.init_from}: {', '.join(values)}")
    return config.model_copy(update={"model": model, OWN: own})


def _class_of(checkpoint: Checkpoint) -> str | None:
    """The name of the class of one's own that a checkpoint records; None without one."""
    task = checkpoint.state.task
    return task.code.name.rpartition(":")[2] if isinstance(task, GPTData) and task.code else None


def find_model(config: TrainingConfig) -> ModelConfig:
    """The model section of `train.init_from`. Raises: UserError, as `find_source`."""
    return _model_of(find_source(config))


def find_source(config: TrainingConfig) -> Checkpoint:
    """The checkpoint of `train.init_from`, not hashed; imports a transformers model, and reads only
    small files of a run. Raises: UserError if there is no such model, if `GPT` does not support it,
    or if given fields differ."""
    source = config.train.init_from or ""
    checkpoint_path = _checkpoint_path(config)
    is_run = checkpoint_path == Path(source)
    if is_run and (hint := no_such_folder(source)):
        raise UserError(FIELD, source, f"{hint}; {ON_THE_HUB}")
    if not is_run:
        run_module("gpt2_ddp", "import_hf", "--source", source, stdout=DEVNULL)
    checkpoint = find_checkpoint(checkpoint_path, FIELD, weights=False, kind="gpt2")
    model = _model_of(checkpoint)
    given = WEIGHT_FIELDS & config.model.model_fields_set
    if is_run and ARCHITECTURES[model.architecture].rotary:  # rotary positions may change
        given -= {"block_size", "rope_theta"}
    names = tuple(f"model.{field}" for field in given)
    mistakes = [
        str(UserError(name, now, f"{source} has {before}; set it to {before}"))
        for name, now, before in differences(config, checkpoint.config, names)
        if name != "model.block_size" or now > before
    ]
    if mistakes:
        raise UserError.join(mistakes)
    return checkpoint


def load_initial_weights(
    config: TrainingConfig, model: GPT, tokenizer: Tokenizer
) -> Iterator[tuple[str, Tensor]]:
    """Loads the weights of `train.init_from` into the plain model: of positions, those of the
    context. Returns their names and values, for a model on the meta device. Raises: UserError for a
    missing or damaged file, another tokenizer than the data's, or a tensor that does not fit."""
    checkpoint = find_checkpoint(_checkpoint_path(config), FIELD, weights=False)
    before = saved_tokenizer(checkpoint)
    if (before.tokens, before.eot) != (tokenizer.tokens, tokenizer.eot):
        other = f"another tokenizer ({before.name}) than the data ({tokenizer.name})"
        hint = f"has {other}; prepare the text with that one"
        raise UserError(FIELD, checkpoint.path, hint)
    checkpoint = find_checkpoint(checkpoint.path, FIELD)  # hashes
    tensors = checkpoint.tensors(MODEL)
    weights: Mapping[str, Tensor] = tensors
    if POSITIONS in tensors:  # a shorter context has fewer of them
        shorter = {POSITIONS: tensors[POSITIONS][: config.model.block_size]}
        weights = ChainMap(shorter, tensors)  # pyright: ignore[reportArgumentType]  only read
    fit_weights(weights, model, checkpoint.path)  # changes nothing on the meta device
    return iter(weights.items())


def import_place(source: str) -> Path:
    """The checkpoint in the user's cache that import_hf.py makes of a transformers model. Raises:
    UserError."""
    name = source if source.startswith(HUB) else os.path.realpath(source)
    try:
        return Path(local_copy(name), "checkpoints/step-00000000")
    except ValueError as error:
        raise UserError(FIELD, source, f"is no name of a model on the Hub ({error})") from error


def _checkpoint_path(config: TrainingConfig) -> Path:
    """The run or the checkpoint that `train.init_from` names or, of a transformers model, its
    import."""
    source = config.train.init_from or ""
    is_run = not source.startswith(HUB) and not os.path.isfile(Path(source, TRANSFORMERS))
    return Path(source) if is_run else import_place(source)


def _model_of(checkpoint: Checkpoint) -> ModelConfig:
    return TrainingConfig.model_validate(complete(TrainingConfig, checkpoint.config)).model
