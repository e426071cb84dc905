"""Initial weights of a new run (`train.init_from`): those of another run, or of a model of transformers."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt2_ddp.checkpoint.checkpoint import MODEL, TRANSFORMERS, find_checkpoint, fit_weights
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.tokenizer import CHARACTER_OF_BYTE, END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from gpt2_ddp.data.tokenizer_file import LARGEST
from gpt2_ddp.errors import UserError, truncate
from gpt2_ddp.files import read_small
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import (
    BUFFERS,
    CLASSES,
    EMBEDDINGS,
    HEAD,
    PREFIX,
    SHAPE,
    fixed_fields,
    from_transformers,
    shape,
    their_names,
)

FIELD = "train.init_from"
HUB = "hub:"
INDEX, VOCABULARY, MERGES = f"{MODEL}.index.json", "vocab.json", "merges.txt"
NEEDED = [TRANSFORMERS, INDEX, "model*.safetensors", TOKENIZER_FILE, VOCABULARY, MERGES]
"""Patterns of the files to fetch from the Hub."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DEFAULTS = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "rope_theta": 10_000.0}
"""Defaults of transformers' GPT-2, and of rotary positions, for fields that a config.json leaves out."""
OPTIONAL = ("n_kv_head", "n_inner")  # where null stands for what the other fields tell
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of the tanh-GELU, the only activation of `GPT`


def find_initial_weights(config: TrainingConfig) -> Path:
    """Folder of `train.init_from`: a checkpoint, or a transformers model whose config.json fits the model section. It
    reads small files only. Raises: UserError if there is no such folder, or its model does not fit."""
    named = config.train.init_from or ""
    path = _fetch(named, [TRANSFORMERS]) if named.startswith(HUB) else Path(named)
    if not os.path.isfile(path / TRANSFORMERS):
        return find_checkpoint(path, FIELD, weights=False, kind="gpt2").path
    if mistakes := _misfits(named, _read_json(path, TRANSFORMERS), config.model):
        raise UserError.join([line for args in mistakes for line in UserError(*args).mistakes])
    if not named.startswith(HUB):
        _weight_files(path)
    return path


def load_initial_weights(config: TrainingConfig, path: Path, model: GPT, tokenizer: Tokenizer) -> None:
    """Loads the weights of `find_initial_weights` into the plain model; prints a note on omitted parts.
    Raises: UserError for a missing or damaged file, other ids than the data's, or a tensor that does not fit."""
    named = config.train.init_from or ""
    if named.startswith(HUB):
        path = _fetch(named, NEEDED)
    if not os.path.isfile(path / TRANSFORMERS):
        checkpoint = find_checkpoint(path, FIELD)
        data = checkpoint.state.record
        if data.get("tokenizer_sha256", tokenizer.sha256) != tokenizer.sha256:
            hint = f"has another tokenizer ({data['tokenizer']}) than the data"
            raise UserError(FIELD, path, f"{hint} ({tokenizer.name}); prepare the text with that one")
        fit_weights(load_file(path / MODEL), model, path)
        return
    weights = model.state_dict()
    tables = [their_names(name, config.model)[0].removeprefix(PREFIX) for name in EMBEDDINGS if name in weights]
    tensors = _read_tensors(path, tables)
    vocabularies = {tables[0], HEAD} & tensors.keys()
    notes = _check_ids(path, min(tensors[name].size(0) for name in vocabularies), tokenizer)
    for name in vocabularies:
        tensors[name] = tensors[name][: tokenizer.vocab_size]
    zeros = [] if len(tables) > 1 else (~tensors[tables[0]].any(1)).nonzero().flatten().tolist()
    if zeros:
        more = f" and of {len(zeros) - 1:,} more" if len(zeros) > 1 else ""
        notes.append(
            f"the embedding of id {zeros[0]}{more} is zero and stays so, as transformers keeps a pad_token_id's"
        )
    if len(tables) > 1 and (positions := tensors[tables[1]].size(0)) > config.model.block_size:
        notes.append(f"the first {config.model.block_size:,} of its {positions:,} positions are used (block_size)")
    try:
        model.load_state_dict(from_transformers(tensors, config.model, weights))
    except ValueError as error:
        raise UserError(FIELD, path, f"cannot be trained further: {error}") from error
    for note in notes:
        print(f"note: {FIELD} = {truncate(named)}: {note}", file=sys.stderr)


def _fetch(named: str, patterns: list[str]) -> Path:
    """Local folder of these files of `hub:OWNER/NAME`, or of its branch, tag or commit `@…`."""
    import huggingface_hub
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]

    name, _, revision = named.removeprefix(HUB).partition("@")
    try:
        return Path(huggingface_hub.snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError, HTTPError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(FIELD, named, f"cannot be downloaded ({reason}); a folder needs no network") from error


def _read_json(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(read_small(path / name, 2**26))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(FIELD, path / name, f"cannot be read ({error}); save the model again") from error
    if not isinstance(content, dict):
        raise UserError(FIELD, path / name, "contains no fields; save the model again")
    return content


def _misfits(named: str, theirs: dict[str, Any], model: ModelConfig) -> Sequence[tuple[str, object, str]]:
    """Field, value and hint for what a `GPT` does not support of a config.json, or else for where the model section
    differs. (`reorder_and_upcast_attn` only changes the order.)"""
    kind = theirs.get("model_type")
    if kind not in CLASSES:
        return [(FIELD, named, f"is a model of type {kind}; only {', '.join(CLASSES)} are supported")]
    rope = {"rope_type": "default", "rope_theta": theirs.get("rope_theta", DEFAULTS["rope_theta"])}
    rope |= theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}  # the latter is of transformers 4
    theirs = {**DEFAULTS, **theirs, **rope, "rope_parameters": rope}
    found = {name: theirs.get(field) for name, field in SHAPE[kind].items()}
    if unsized := [
        (FIELD, named, f"has {SHAPE[kind][name]}: {json.dumps(value)}, which is not a size; correct its {TRANSFORMERS}")
        for name, value in found.items()
        if not (isinstance(value, int | float) and value > 0) and not (value is None and name in OPTIONAL)
    ]:
        return unsized
    fitting = model.model_copy(update={"architecture": kind, **found})
    fixed = fixed_fields(fitting) | {"quantization_config": None}
    allowed = {"activation_function": TANH_GELUS, "head_dim": (None, fixed.get("head_dim"))}
    choices = [
        (FIELD, named, f"has {field}: {json.dumps(theirs[field])}; only {json.dumps(ours)} is supported")
        for field, ours in fixed.items()
        if theirs.get(field, ours) not in allowed.get(field, (ours,))
    ]
    sizes = {"architecture": kind, **shape(fitting)}
    sizes["block_size"] = min(sizes["block_size"], model.block_size)  # the first positions will do
    own = fitting.model_copy(update={name: getattr(model, name) for name in OPTIONAL})  # null: as in `fitting`
    ours = model.model_dump() | {name: value for name, value in shape(own).items() if name in OPTIONAL}
    return choices or [
        (f"model.{name}", getattr(model, name), f"{named} has {value}; set it to {value}")
        for name, value in sizes.items()
        if value != ours[name]
    ]


def _weight_files(path: Path) -> list[Path]:
    if os.path.isfile(path / INDEX):
        parts = _read_json(path, INDEX).get("weight_map")
        names = sorted({Path(str(name)).name for name in parts.values()}) if isinstance(parts, dict) else []
    else:
        names = [MODEL] if os.path.isfile(path / MODEL) else [file.name for file in path.glob("*.safetensors")]
        names *= len(names) == 1
    if not names and (pickles := sorted(file.name for suffix in PICKLES for file in path.glob(suffix))):
        hint = f"has its weights only as pickles ({pickles[0]}), which may run any code when they are read"
        raise UserError(FIELD, path, f"{hint}; save it again with transformers, as safetensors")
    for name in names or [f"{MODEL} and no {INDEX}"]:
        if not os.path.isfile(path / name):
            raise UserError(FIELD, path, f"has no {name}; save the model again")
    return [path / name for name in names]


def _read_tensors(path: Path, tables: Sequence[str]) -> dict[str, Tensor]:
    """All tensors by name without the prefix; without the buffers of older releases of transformers. `tables`: names
    of the embeddings."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(path):
        try:
            read = load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(FIELD, file, f"is not a complete safetensors file ({error}); download it again") from error
        named = {name.removeprefix(PREFIX): tensor for name, tensor in read.items() if not name.endswith(BUFFERS)}
        if twice := [*named.keys() & tensors.keys()] or [name for name in named if {name, PREFIX + name} <= {*read}]:
            raise UserError(FIELD, file, f"contains {min(twice)} a second time; save the model again")
        tensors |= named
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UserError(FIELD, path, f"{name} has dtype {tensor.dtype}; only fp32, fp16 and bf16 are supported")
        if not tensor.isfinite().all():
            raise UserError(FIELD, path, f"{name} has numbers that are not finite; use another model")
    if missing := [name for name in tables if name not in tensors or tensors[name].dim() != 2]:
        raise UserError(FIELD, path, f"{missing[0]} is missing or not a matrix; save the model again")
    return tensors


def _check_ids(path: Path, rows: int, tokenizer: Tokenizer) -> list[str]:
    """Compares the tokens of all ids, the merges, and the ids of a text of all tokens. Returns notes.
    `rows`: rows of the weights' vocabulary."""
    theirs, size = _read_tokenizer(path), tokenizer.vocab_size
    if rows < size or (theirs is None and rows > size):
        raise UserError(FIELD, path, f"has a vocabulary of {rows:,} ids, the data's tokenizer has {size:,}")
    if theirs is None:
        return [f"it has no {TOKENIZER_FILE}; only the number of ids, {size:,}, was compared"]
    encoding = tokenizer.encoding
    bytewise = b"\xff" in encoding._mergeable_ranks
    ours = {
        rank: "".join(map(CHARACTER_OF_BYTE.__getitem__, token)) if bytewise else token.decode()
        for token, rank in encoding._mergeable_ranks.items()
    }
    special = {rank: token for token, rank in encoding._special_tokens.items()}
    for rank, token in sorted((ours | special).items()):
        if (found := theirs.id_to_token(rank)) != token:
            hint = f"its tokenizer differs: id {rank} is {found!r} there and {token!r} in the data's"
            raise UserError(FIELD, path, f"{hint}; prepare the text with its {TOKENIZER_FILE}")
    text = tokenizer.decode(sorted(ours))
    merges = ["".join(pair) for pair in json.loads(theirs.to_str())["model"].get("merges", [])]
    same_merges = merges == [token for _, token in sorted(ours.items()) if len(token) > 1]
    if not same_merges or theirs.encode(text, add_special_tokens=False).ids != tokenizer.encode(text).tolist():
        hint = "its tokenizer has the ids of the data's, but splits or merges text differently"
        raise UserError(FIELD, path, f"{hint}; prepare the text with its {TOKENIZER_FILE}")
    return [f"the last {rows - size:,} ids of its vocabulary are not in the data's tokenizer"] if rows > size else []


def _read_tokenizer(path: Path) -> Any:
    """Tokenizer of HuggingFace `tokenizers`; None without its files."""
    import tokenizers

    try:
        if os.path.isfile(path / TOKENIZER_FILE):
            return tokenizers.Tokenizer.from_buffer(read_small(path / TOKENIZER_FILE, LARGEST))
        if not (os.path.isfile(path / VOCABULARY) and os.path.isfile(path / MERGES)):
            return None
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(path / VOCABULARY), str(path / MERGES)))
    except Exception as error:  # tokenizers has no narrower one
        raise UserError(FIELD, path, f"its tokenizer cannot be read ({error}); save it again") from error
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
