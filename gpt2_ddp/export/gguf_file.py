"""GGUF, the file of llama.cpp, whose own converter refuses every BPE that it does not know by its hash.

Names, types and tables are those that it writes for a GPT2LMHeadModel, by its package `gguf`. All tensors are fp32;
llama.cpp's `llama-quantize` makes smaller files of it.
"""

from pathlib import Path
from typing import Any

import numpy as np

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.check import ExportMismatch
from gpt2_ddp.export.tokenizer_files import tokenizer_json
from gpt2_ddp.files import writing
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import FIXED, to_transformers


def write_gguf(model: GPT, tokenizer: Tokenizer, file: Path) -> None:
    """Writes the model and its tokenizer, reads the file, and compares every field and tensor with what was meant.

    Raises:
        UserError: the disk refuses, or llama.cpp has no such tokenizer.
        ExportMismatch: something in the file is not the same.
    """
    fields, tensors = {**_shape(model), **_vocabulary(tokenizer)}, _tensors(model)
    with writing(file):
        _write(fields, tensors, file)
    compare(fields, tensors, file)


def _shape(model: GPT) -> dict[str, Any]:
    from gguf import Keys, LlamaFileType

    config = model.config
    of_gpt2 = {
        Keys.LLM.CONTEXT_LENGTH: config.block_size,
        Keys.LLM.EMBEDDING_LENGTH: config.n_embd,
        Keys.LLM.BLOCK_COUNT: config.n_layer,
        Keys.LLM.FEED_FORWARD_LENGTH: 4 * config.n_embd,
        Keys.Attention.HEAD_COUNT: config.n_head,
        Keys.Attention.LAYERNORM_EPS: FIXED["layer_norm_epsilon"],
    }
    fields = {key.format(arch="gpt2"): value for key, value in of_gpt2.items()}
    return {**fields, Keys.General.FILE_TYPE: int(LlamaFileType.ALL_F32)}


def _vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """What text becomes which id by. Raises: UserError, where llama.cpp cannot encode so."""
    from gguf import Keys, TokenType

    definition = tokenizer_json(tokenizer)
    merges = definition["model"]["merges"] if definition["pre_tokenizer"].get("use_regex") else []
    if not merges:  # `bytes` has none, and llama.cpp insists on some
        hint = "is no byte-level BPE like GPT-2's, and llama.cpp would encode text otherwise; leave --gguf away"
        raise UserError("tokenizer", tokenizer.name, hint)
    token_of_id = {rank: (token, TokenType.NORMAL) for token, rank in definition["model"]["vocab"].items()}
    token_of_id |= {token["id"]: (token["content"], TokenType.CONTROL) for token in definition["added_tokens"]}
    tokens, types = zip(*(token_of_id[rank] for rank in range(tokenizer.vocab_size)), strict=True)
    return {
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: "gpt-2",
        Keys.Tokenizer.LIST: [*tokens],
        Keys.Tokenizer.TOKEN_TYPE: [*map(int, types)],
        Keys.Tokenizer.MERGES: [*map(" ".join, merges)],
        Keys.Tokenizer.BOS_ID: tokenizer.eot,
        Keys.Tokenizer.EOS_ID: tokenizer.eot,
        Keys.Tokenizer.ADD_BOS: False,
    }


def _tensors(model: GPT) -> dict[str, np.ndarray]:
    """By llama.cpp's names, which are made from transformers'; a matrix is [out, in], as in `GPT`."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH.GPT2, model.config.n_layer)
    tensors = {}
    for name, tensor in to_transformers(model.state_dict(), model.vocab_size).items():
        their_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert their_name, f"gguf has a name for {name}"
        is_matrix = ".h." in name and tensor.dim() == 2
        tensors[their_name] = (tensor.T if is_matrix else tensor).float().numpy(force=True)
    return tensors


def _write(fields: dict[str, Any], tensors: dict[str, np.ndarray], file: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(file, "gpt2")
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in fields.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def compare(fields: dict[str, Any], tensors: dict[str, np.ndarray], file: Path) -> None:
    """Raises: ExportMismatch, at the first field or tensor of the file that is not the one given, or is missing."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    for key, value in fields.items():
        field = reader.get_field(key)
        found = field.contents() if field else None
        if found != (float(np.float32(value)) if isinstance(value, float) else value):
            raise ExportMismatch(f"{key} of {file.name} is {str(found)[:80]} instead of {str(value)[:80]}")
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    for name in sorted({*found, *tensors}):
        if name not in found or name not in tensors or not np.array_equal(found[name], tensors[name]):
            raise ExportMismatch(f"{name} of {file.name} is not the model's")
