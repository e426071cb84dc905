"""Initial weights of a new run (`train.init_from`): those of another run, or of a model that transformers reads."""

import json
import os
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2_ddp.checkpoint.checkpoint import CONFIG, MODEL, Checkpoint
from gpt2_ddp.checkpoint.intact import find_checkpoint
from gpt2_ddp.checkpoint.loading import fit_weights
from gpt2_ddp.config.hints import complete
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer
from gpt2_ddp.distributed.ranks import on_main
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import CLASSES, SHAPE, fixed_fields, load_transformers, resolved

FIELD, HUB = "train.init_from", "hub:"
POSITIONS = "wpe.weight"
TRANSFORMERS = "config.json"  # a file of transformers' models that no checkpoint has
NEEDED = [TRANSFORMERS, "model*.safetensors", f"{MODEL}.index.json", TOKENIZER_FILE]  # to fetch from the Hub
OPTIONAL = ("n_kv_head", "n_inner")  # null: follows from other fields
SIZES = ("architecture", "n_layer", "n_head", "n_embd", *OPTIONAL)  # decide on names and shapes of the weights
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of the tanh-GELU, the only activation of `GPT`
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # saved by older releases of transformers


def settle_model(config: Any, saved: Checkpoint | None, note: Callable[[str], None]) -> Any:
    """The configuration whose inherited fields of the model section are those of `saved`, the checkpoint to resume, or
    else of `train.init_from`. Collective. Raises: UserError, as `find_model`."""

    def settled() -> ModelConfig:
        return config.with_model(_model_of(saved) if saved else find_model(config)).model

    model = on_main(settled)
    if config.inherited and not saved:
        shape = f"{model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, context {model.block_size}"
        note(f"note: model from {config.train.init_from}: {model.architecture}, {shape}")
    return config.model_copy(update={"model": model})


def find_model(config: TrainingConfig) -> ModelConfig:
    """The model section of `train.init_from`, a run or a transformers model. It reads small files only. Raises:
    UserError if there is no such folder, if `GPT` does not support its model, or if given fields differ."""
    named = config.train.init_from or ""
    path = _folder(named, [TRANSFORMERS])
    if os.path.isfile(path / TRANSFORMERS):
        theirs = _read_config(named, path)
        names = ("architecture", *SHAPE[theirs.architecture])
    else:
        theirs = _model_of(find_checkpoint(path, FIELD, weights=False, kind="gpt2"))
        names = SIZES + ("block_size",) * (theirs.architecture == "gpt2")
    if differing := [*_differences(named, theirs, config.model, names)]:
        raise UserError.join(differing)
    return theirs


def load_initial_weights(
    config: TrainingConfig, model: GPT, tokenizer: Tokenizer, initial: Iterable[tuple[str, Tensor]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Loads the weights of `train.init_from` into the plain model: the ids of the data, and the positions of the
    context. Returns their names and values, for a model on the meta device that would have `initial` ones. Raises:
    UserError for a missing or damaged file, other ids than the data's, or a tensor that does not fit.
    """
    path = _folder(config.train.init_from or "", NEEDED)
    if not os.path.isfile(path / TRANSFORMERS):
        found = find_checkpoint(path, FIELD, weights=False)
        data = found.state.record
        if data.get("tokenizer_sha256", tokenizer.sha256) != tokenizer.sha256:
            hint = f"has another tokenizer ({data['tokenizer']}) than the data ({tokenizer.name})"
            raise UserError(FIELD, path, f"{hint}; prepare the text with that one")
        found = find_checkpoint(found.path, FIELD)  # hashes
        weights: Any = found.tensors(MODEL)
        shorter = {POSITIONS: weights[POSITIONS][: config.model.block_size]} if POSITIONS in weights else {}
        weights = ChainMap(shorter, weights)
        fit_weights(weights, model, found.path)  # changes nothing on the meta device
    else:
        theirs = _load(path, CLASSES[config.model.architecture])
        _check_ids(path, theirs.config.vocab_size, tokenizer)
        weights = dict(initial)
        model.load_state_dict(weights, strict=False, assign=True)
        try:
            load_transformers(theirs.state_dict(), model)
        except ValueError as error:
            raise UserError(FIELD, path, f"cannot be trained further: {error}") from error
    return iter(weights.items())


@contextmanager
def _reading(source: object, problem: str = "transformers cannot read it", hint: str = "replace it") -> Iterator[None]:
    """Raises: UserError for any error inside."""
    try:
        yield
    except Exception as error:  # transformers and tokenizers raise any
        raise UserError(FIELD, source, f"{problem} ({type(error).__name__}: {error}); {hint}") from error


def _folder(named: str, patterns: list[str]) -> Path:
    """Local folder: `named`, or of these files of `hub:OWNER/NAME`, or of its branch, tag or commit `@…`."""
    if not named.startswith(HUB):
        return Path(named)
    import huggingface_hub

    name, _, revision = named.removeprefix(HUB).partition("@")
    with _reading(named, "cannot be downloaded", "a folder needs no network"):
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))


def _model_of(checkpoint: Checkpoint) -> ModelConfig:
    with _reading(checkpoint.path, f"its {CONFIG} cannot be read"):
        return ModelConfig.model_validate(complete(TrainingConfig, checkpoint.config)["model"])


def _read_config(named: str, path: Path) -> ModelConfig:
    """The model section of a config.json. Raises: UserError, which names all that a `GPT` does not support.
    (`reorder_and_upcast_attn` only changes the order.)"""
    with _reading(path, "transformers (the extra `export`) cannot read it"):
        import transformers

        fields, _ = transformers.PretrainedConfig.get_config_dict(path, local_files_only=True)
        kind = str(fields.get("model_type"))
    if kind not in CLASSES:
        raise UserError(FIELD, named, f"is a model of type {kind}; only {', '.join(CLASSES)} are supported")
    with _reading(path):
        theirs = getattr(transformers, CLASSES[kind]).config_class.from_dict(fields).to_dict()
        theirs |= theirs.get("rope_parameters") or {}
        found = {name: theirs[field] for name, field in SHAPE[kind].items()}
        fitting = ModelConfig.model_validate({"architecture": kind, **found})
    choices = [
        str(UserError(FIELD, named, f"has {field}: {json.dumps(theirs[field])}; only {json.dumps(ours)} is supported"))
        for field, ours in (fixed_fields(fitting) | {"quantization_config": None}).items()
        if theirs.get(field, ours) not in (TANH_GELUS if field == "activation_function" else (ours,))
    ]
    if choices:
        raise UserError.join(choices)
    return fitting


def _differences(named: str, theirs: ModelConfig, ours: ModelConfig, names: Iterable[str]) -> Iterator[str]:
    """A user error for each of these fields that is given and differs, or exceeds their context."""
    needed = resolved(theirs) | {"block_size": min(ours.block_size, theirs.block_size)}
    nulls = resolved(theirs.model_copy(update=dict.fromkeys(OPTIONAL)))
    for name in names:
        given = getattr(ours, name)
        if name in ours.model_fields_set and needed[name] != (nulls[name] if given is None else given):
            yield str(UserError(f"model.{name}", given, f"{named} has {needed[name]}; set it to {needed[name]}"))


def _load(path: Path, name: str) -> Any:
    """The model of transformers' class `name` in fp32, with all tensors of the folder and no others."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # eager: a config.json may name another implementation, even one of the Hub
    options = {"local_files_only": True, "use_safetensors": True, "attn_implementation": "eager"}
    options |= {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with _reading(path):
        theirs, found = getattr(transformers, name).from_pretrained(path, **options)
    unfit = [f"{name} is missing" for name in found["missing_keys"]]
    unfit += [f"{name} is unknown" for name in found["unexpected_keys"] if not name.endswith(BUFFERS)]
    unfit += [f"{name} has shape {[*has]} instead of {[*wants]}" for name, has, wants in found["mismatched_keys"]]
    unfit += [f"{name} is not finite" for name, value in theirs.state_dict().items() if not value.isfinite().all()]
    if unfit:
        raise UserError(FIELD, path, f"has other weights than its {TRANSFORMERS}: {'; '.join(sorted(unfit))}")
    return theirs


def _check_ids(path: Path, rows: int, tokenizer: Tokenizer) -> None:
    """Compares the tokens of all ids. `rows`: rows of the weights' vocabulary. Raises: UserError for a difference."""
    size = tokenizer.vocab_size
    with _reading(path, f"its {TOKENIZER_FILE} cannot be read", "save its fast tokenizer there"):
        theirs = load_tokenizer(str(path / TOKENIZER_FILE))
    if rows < size:
        raise UserError(FIELD, path, f"has a vocabulary of {rows:,} ids, the data's tokenizer has {size:,}")
    if (theirs.tokens, theirs.eot) != (tokenizer.tokens, tokenizer.eot):
        raise UserError(FIELD, path, f"its tokenizer differs; prepare the text with its {TOKENIZER_FILE}")
