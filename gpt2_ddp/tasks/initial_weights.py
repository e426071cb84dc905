"""Initial weights of a new run (`train.init_from`): those of another run, or of a model that transformers reads."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.checkpoint import CONFIG, MODEL, TRANSFORMERS, find_checkpoint, fit_weights
from gpt2_ddp.config.hints import complete
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.alphabet import CHARACTER_OF_BYTE
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE, Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import (
    CLASSES,
    HEAD,
    SHAPE,
    fixed_fields,
    from_transformers,
    resolved,
    their_names,
)

FIELD, HUB = "train.init_from", "hub:"
NEEDED = [TRANSFORMERS, "model*.safetensors", f"{MODEL}.index.json", TOKENIZER_FILE]  # to fetch from the Hub
OPTIONAL = ("n_kv_head", "n_inner")  # null: follows from other fields
SIZES = ("architecture", "n_layer", "n_head", "n_embd", *OPTIONAL)  # decide on names and shapes of the weights
GPT2_SIZES = ("block_size", "bias")
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of the tanh-GELU, the only activation of `GPT`
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # saved by older releases of transformers

Mistake = tuple[str, object, str]  # field, value, hint


def find_initial_weights(config: TrainingConfig) -> Path:
    """Folder of `train.init_from`: a checkpoint or a transformers model, whose configuration fits the model section. It
    reads small files only. Raises: UserError if there is no such folder, or its model does not fit."""
    named = config.train.init_from or ""
    path = _fetch(named, [TRANSFORMERS]) if named.startswith(HUB) else Path(named)
    if os.path.isfile(path / TRANSFORMERS):
        misfits = _misfits(named, path, config.model)
    else:
        found = find_checkpoint(path, FIELD, weights=False, kind="gpt2")
        path = found.path
        with _reading(path, f"its {CONFIG} cannot be read"):
            theirs = ModelConfig.model_validate(complete(TrainingConfig, found.config)[0]["model"])
        misfits = _differences(named, theirs, config.model, SIZES + GPT2_SIZES * (theirs.architecture == "gpt2"))
    if misfits:
        raise UserError.join([str(UserError(*misfit)) for misfit in misfits])
    return path


def load_initial_weights(config: TrainingConfig, path: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Loads the weights of `find_initial_weights` into the plain model: the ids of the data, and the positions of the
    context. Raises: UserError for a missing or damaged file, other ids than the data's, or a tensor that does not fit.
    """
    named = config.train.init_from or ""
    if named.startswith(HUB):
        path = _fetch(named, NEEDED)
    if not os.path.isfile(path / TRANSFORMERS):
        data = find_checkpoint(path, FIELD, weights=False).state.record
        if data.get("tokenizer_sha256", tokenizer.sha256) != tokenizer.sha256:
            hint = f"has another tokenizer ({data['tokenizer']}) than the data ({tokenizer.name})"
            raise UserError(FIELD, path, f"{hint}; prepare the text with that one")
        find_checkpoint(path, FIELD)  # hashes
        fit_weights(load_file(path / MODEL), model, path)
        return
    theirs = _load(path, CLASSES[config.model.architecture])
    _check_ids(path, theirs.config.vocab_size, tokenizer)
    tensors, (table,) = theirs.state_dict(), their_names("wte.weight", config.model)
    for name in (table, HEAD):
        tensors[name] = tensors[name][: tokenizer.vocab_size]
    try:
        model.load_state_dict(from_transformers(tensors, config.model, model.state_dict()))
    except ValueError as error:
        raise UserError(FIELD, path, f"cannot be trained further: {error}") from error


@contextmanager
def _reading(source: object, problem: str = "transformers cannot read it", hint: str = "replace it") -> Iterator[None]:
    """Raises: UserError for any error inside."""
    try:
        yield
    except Exception as error:  # transformers and tokenizers raise any
        raise UserError(FIELD, source, f"{problem} ({type(error).__name__}: {error}); {hint}") from error


def _fetch(named: str, patterns: list[str]) -> Path:
    """Local folder of these files of `hub:OWNER/NAME`, or of its branch, tag or commit `@…`."""
    import huggingface_hub

    name, _, revision = named.removeprefix(HUB).partition("@")
    with _reading(named, "cannot be downloaded", "a folder needs no network"):
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))


def _misfits(named: str, path: Path, model: ModelConfig) -> Sequence[Mistake]:
    """Field, value and hint for what a `GPT` does not support of the config.json, or else for where the model section
    differs. (`reorder_and_upcast_attn` only changes the order.)"""
    with _reading(path, "transformers (the extra `export`) cannot read it"):
        import transformers

        fields, _ = transformers.PretrainedConfig.get_config_dict(path, local_files_only=True)
        kind = str(fields.get("model_type"))
    if kind not in CLASSES:
        return [(FIELD, named, f"is a model of type {kind}; only {', '.join(CLASSES)} are supported")]
    with _reading(path):
        theirs = getattr(transformers, CLASSES[kind]).config_class.from_dict(fields).to_dict()
        theirs |= theirs.get("rope_parameters") or {}
        found = {name: theirs[field] for name, field in SHAPE[kind].items()}
        fitting = ModelConfig.model_validate({"architecture": kind, **found})
    choices = [
        (FIELD, named, f"has {field}: {json.dumps(theirs[field])}; only {json.dumps(ours)} is supported")
        for field, ours in (fixed_fields(fitting) | {"quantization_config": None}).items()
        if theirs.get(field, ours) not in (TANH_GELUS if field == "activation_function" else (ours,))
    ]
    fitting = fitting.model_copy(update={"block_size": min(fitting.block_size, model.block_size)})
    return choices or _differences(named, fitting, model, ("architecture", *SHAPE[kind]))


def _differences(named: str, theirs: ModelConfig, ours: ModelConfig, names: Iterable[str]) -> list[Mistake]:
    """Field, value and hint for each of these fields in which the model section differs."""
    given, needed = ours.model_dump(), resolved(theirs)
    nulls = resolved(theirs.model_copy(update=dict.fromkeys(OPTIONAL)))
    return [
        (f"model.{name}", given[name], f"{named} has {needed[name]}; set it to {needed[name]}")
        for name in names
        if needed[name] != (nulls[name] if given[name] is None else given[name])
    ]


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
    """Compares the tokens of all ids, the merges, and the ids of a text of all tokens. `rows`: rows of the weights'
    vocabulary. Raises: UserError for a difference."""
    import tokenizers

    size = tokenizer.vocab_size
    with _reading(path, f"its {TOKENIZER_FILE} cannot be read", "save its fast tokenizer there"):
        theirs = tokenizers.Tokenizer.from_file(str(path / TOKENIZER_FILE))
    if rows < size:
        raise UserError(FIELD, path, f"has a vocabulary of {rows:,} ids, the data's tokenizer has {size:,}")
    encoding, tokens = tokenizer.encoding, dict[int, str]()
    for token, rank in encoding._mergeable_ranks.items():
        tokens[rank] = token.decode() if tokenizer.characters else "".join(CHARACTER_OF_BYTE[byte] for byte in token)
    text, merged = tokenizer.decode(sorted(tokens)), [token for _, token in sorted(tokens.items()) if len(token) > 1]
    merges = ["".join(pair) for pair in json.loads(theirs.to_str())["model"].get("merges", [])]
    tokens |= {rank: token for token, rank in encoding._special_tokens.items()}
    is_equal = merges == merged and all(theirs.id_to_token(rank) == token for rank, token in tokens.items())
    if not is_equal or theirs.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
        raise UserError(FIELD, path, f"its tokenizer differs; prepare the text with its {TOKENIZER_FILE}")
