"""Initial weights of a new run (`train.init_from`): those of a checkpoint. A model that
transformers reads becomes one
first: import_hf.py, a process of its own, writes it into the user's cache."""

import os
from collections import ChainMap
from collections.abc import Iterator
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from torch import Tensor

from gpt2_ddp.checkpoint.format import MODEL, Checkpoint
from gpt2_ddp.checkpoint.loading import fit_weights, saved_tokenizer
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.saved import complete, differences
from gpt2_ddp.config.training import WEIGHT_FIELDS, ModelConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.distributed.process import run_module
from gpt2_ddp.distributed.ranks import LONGEST, on_main
from gpt2_ddp.distributed.watchdog import Watchdog
from gpt2_ddp.errors import UserError, print_line
from gpt2_ddp.files import local_copy, no_such_folder
from gpt2_ddp.model.gpt import GPT

FIELD = "train.init_from"
HUB = "hub:"
ON_THE_HUB = f"a model on the Hub is {HUB}OWNER/NAME, like {HUB}openai-community/gpt2"
POSITIONS = "wpe.weight"
TRANSFORMERS = "config.json"  # a file of transformers' models that no checkpoint has


def settle_model(
    config: TrainingConfig, saved: Checkpoint | None, watchdog: Watchdog
) -> TrainingConfig:
    """The configuration whose inherited fields of the model section are those of `saved`, the
    checkpoint to resume, or else of `train.init_from`. Collective. Raises: UserError, as
    `find_model`."""

    def settled() -> ModelConfig:
        return config.with_model(_model_of(saved) if saved else find_model(config)).model

    watchdog.heartbeat("importing", timeout=LONGEST.total_seconds())
    model = on_main(settled)
    if config.inherited and not saved:
        shape = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, context {model.block_size}"
        print_line(f"note: model from {config.train.init_from}: {model.architecture}, {shape}")
    return config.model_copy(update={"model": model})


def find_model(config: TrainingConfig) -> ModelConfig:
    """The model section of `train.init_from`; imports a transformers model, and reads only small
    files of a run.
    Raises: UserError if there is no such model, if `GPT` does not support it, or if given fields
    differ."""
    named = config.train.init_from or ""
    place = _place(config)
    is_run = place == Path(named)
    if is_run and (hint := no_such_folder(named)):
        raise UserError(FIELD, named, f"{hint}; {ON_THE_HUB}")
    if not is_run:
        run_module("gpt2_ddp", "import_hf", "--source", named, stdout=DEVNULL)
    found = find_checkpoint(place, FIELD, weights=False, kind="gpt2")
    theirs = _model_of(found)
    given = WEIGHT_FIELDS & config.model.model_fields_set
    if is_run and theirs.architecture != "gpt2":  # rotary positions may change
        given -= {"block_size", "rope_theta"}
    mistakes = [
        str(UserError(name, now, f"{named} has {before}; set it to {before}"))
        for name, now, before in differences(
            config, found.config, tuple(f"model.{field}" for field in given)
        )
        if name != "model.block_size" or now > before
    ]
    if mistakes:
        raise UserError.join(mistakes)
    return theirs


def load_initial_weights(
    config: TrainingConfig, model: GPT, tokenizer: Tokenizer
) -> Iterator[tuple[str, Tensor]]:
    """Loads the weights of `train.init_from` into the plain model: of positions, those of the
    context. Returns their names and values, for a model on the meta device. Raises: UserError for a
    missing or damaged file, another tokenizer than the data's, or a tensor that does not fit."""
    found = find_checkpoint(_place(config), FIELD, weights=False)
    theirs = saved_tokenizer(found)
    if (theirs.tokens, theirs.eot) != (tokenizer.tokens, tokenizer.eot):
        hint = f"has another tokenizer ({theirs.name}) than the data ({tokenizer.name}); prepare the text with that one"
        raise UserError(FIELD, found.path, hint)
    found = find_checkpoint(found.path, FIELD)  # hashes
    weights: Any = found.tensors(MODEL)
    shorter = (
        {POSITIONS: weights[POSITIONS][: config.model.block_size]} if POSITIONS in weights else {}
    )
    weights = ChainMap(shorter, weights)
    fit_weights(weights, model, found.path)  # changes nothing on the meta device
    return iter(weights.items())


def import_place(source: str) -> Path:
    """The checkpoint in the user's cache that import_hf.py makes of a transformers model. Raises:
    UserError."""
    name = source if source.startswith(HUB) else os.path.realpath(source)
    try:
        return Path(local_copy(name), "checkpoints/step-00000000")
    except ValueError as error:
        raise UserError(FIELD, source, f"is no name of a model on the Hub ({error})") from error


def _place(config: TrainingConfig) -> Path:
    """The run or the checkpoint that `train.init_from` names or, of a transformers model, its
    import."""
    named = config.train.init_from or ""
    is_run = not named.startswith(HUB) and not os.path.isfile(Path(named, TRANSFORMERS))
    return Path(named) if is_run else import_place(named)


def _model_of(checkpoint: Checkpoint) -> ModelConfig:
    return TrainingConfig.model_validate(complete(TrainingConfig, checkpoint.config)).model
