"""The files of an export: weights and tokenizer for transformers, and GGUF, the file of llama.cpp.

llama.cpp's own converter rejects every BPE with an unknown hash. Names, types and tables of the
GGUF are equal to those that it writes for transformers' class, with its package `gguf`. All tensors
are fp32; llama.cpp's `llama-quantize` makes smaller files of it.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpt2_ddp.checkpoint.format import as_safetensors
from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.tokenizer import BYTES, TOKENIZER_FILE, Tokenizer
from gpt2_ddp.data.tokenizer_file import CHARACTER_OF_BYTE, END_OF_TEXT, GPT2_PATTERN
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.transformers_layout import (
    fixed_fields,
    layout_of,
    shape,
    to_transformers,
    transformers_config,
)
from gpt2_ddp.files import write_hashed, writing
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output import write_json


def write_model(model: GPT, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes config.json and model.safetensors."""
    write_json(
        folder / "config.json", transformers_config(model.config, model.vocab_size, tokenizer.eot)
    )
    file = folder / "model.safetensors"
    with writing(file):
        tensors = to_transformers(model.state_dict(), model)
        write_hashed(file, as_safetensors(tensors, {"format": "pt"}))


def write_tokenizer(
    tokenizer: Tokenizer, definition: bytes | None, context: int, folder: Path
) -> None:
    """Writes tokenizer.json, which the library `tokenizers` runs, and tokenizer_config.json.

    Args:
        definition: the tokenizer's tokenizer.json; None makes one from tiktoken's tables.
        context: tokens that the model sees.
    """
    (folder / TOKENIZER_FILE).write_bytes(
        definition or json.dumps(tokenizer_json(tokenizer)).encode()
    )
    config = {
        # by name: otherwise transformers uses GPT-2's class, which ignores the file's pre-tokenizer
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",  # a batch of prompts continues at their ends
        # a literal end-of-text in a text is text, here as in training
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    write_json(folder / "tokenizer_config.json", config)


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The definition of a byte-level BPE for HuggingFace `tokenizers`, with the ids that tiktoken
    gives."""
    ranks = tokenizer.tokens
    pattern = tokenizer.pattern
    bpe: Any = tokenizers.Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix=""))
    bpe.decoder = decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=pattern == GPT2_PATTERN
    )
    if pattern != GPT2_PATTERN and tokenizer.name != BYTES:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern.replace("}+", "}")), "isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence([split, bpe.pre_tokenizer])
    # the library's own way to set the tables allows no gaps between ids
    definition = json.loads(bpe.to_str())
    tokens = sorted(ranks, key=ranks.__getitem__)
    definition["model"] |= {
        "vocab": {_characters(token): ranks[token] for token in tokens},
        "merges": [
            [_characters(half) for half in _halves(token, ranks)]
            for token in tokens
            if len(token) > 1
        ],
    }
    added = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    specials = sorted((rank, token) for token, rank in tokenizer.specials.items())
    definition["added_tokens"] = [
        {"id": rank, "content": token, **added} for rank, token in specials
    ]
    return definition


def _characters(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _halves(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens that were merged to this one: the result of the earlier merges on its
    bytes."""
    parts = [token[index : index + 1] for index in range(len(token))]
    while len(parts) > 2:
        merges = [ranks.get(first + second, len(ranks)) for first, second in pairwise(parts)]
        first = merges.index(min(merges))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts


def write_gguf(model: GPT, tokenizer: Tokenizer, file: Path) -> None:
    """Writes the model and its tokenizer. Raises: UserError if writing fails, or llama.cpp has no
    such tokenizer."""
    from gguf import GGUFWriter  # noqa: PLC0415  optional

    fields = _fields(model, tokenizer)
    tensors = _tensors(model)
    writer = GGUFWriter(file, llama_cpp_name(model.config))
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in fields.items():
        adders.get(type(value), writer.add_array)(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(tensor))
    with writing(file):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def llama_cpp_name(config: ModelConfig) -> str:
    """llama.cpp's name of a model's architecture, which it has."""
    name = layout_of(config).gguf
    assert name, f"llama.cpp has no {config.architecture}"
    return name


def _fields(model: GPT, tokenizer: Tokenizer) -> dict[str, Any]:
    """Shape and tokenizer, by key. Raises: UserError if llama.cpp has no such tokenizer."""
    from gguf import Keys, LlamaFileType, TokenType  # noqa: PLC0415  optional

    config = model.config
    definition = tokenizer_json(tokenizer)
    merges = definition["model"]["merges"] if definition["pre_tokenizer"].get("use_regex") else []
    if not merges:  # `bytes` has none, but llama.cpp requires some
        reason = "is not a byte-level BPE like GPT-2's, so llama.cpp would encode text differently"
        raise UserError("tokenizer", tokenizer.name, f"{reason}; remove --gguf")
    values = shape(config) | fixed_fields(config)
    of_some = {  # architectures
        Keys.Attention.LAYERNORM_EPS: "layer_norm_epsilon",
        Keys.Attention.LAYERNORM_RMS_EPS: "rms_norm_eps",
        Keys.Attention.HEAD_COUNT_KV: "n_kv_head",
        Keys.Attention.KEY_LENGTH: "head_dim",
        Keys.Attention.VALUE_LENGTH: "head_dim",
        Keys.Rope.DIMENSION_COUNT: "head_dim",
        Keys.Rope.FREQ_BASE: "rope_theta",
    }
    token_of_id = {
        rank: (token, TokenType.NORMAL) for token, rank in definition["model"]["vocab"].items()
    }
    token_of_id |= {
        token["id"]: (token["content"], TokenType.CONTROL) for token in definition["added_tokens"]
    }
    tokens, types = zip(*(token_of_id[rank] for rank in range(tokenizer.vocab_size)), strict=True)
    fields = {
        Keys.LLM.VOCAB_SIZE: model.vocab_size,
        Keys.LLM.CONTEXT_LENGTH: config.block_size,
        Keys.LLM.EMBEDDING_LENGTH: config.n_embd,
        Keys.LLM.BLOCK_COUNT: config.n_layer,
        Keys.LLM.FEED_FORWARD_LENGTH: values["n_inner"],
        Keys.Attention.HEAD_COUNT: config.n_head,
        **{key: values[name] for key, name in of_some.items() if name in values},
        Keys.General.FILE_TYPE: int(LlamaFileType.ALL_F32),
        Keys.Tokenizer.MODEL: "gpt2",
        Keys.Tokenizer.PRE: "gpt-2",
        Keys.Tokenizer.LIST: [*tokens],
        Keys.Tokenizer.TOKEN_TYPE: [*map(int, types)],
        Keys.Tokenizer.MERGES: [*map(" ".join, merges)],
        Keys.Tokenizer.BOS_ID: tokenizer.eot,
        Keys.Tokenizer.EOS_ID: tokenizer.eot,
        Keys.Tokenizer.ADD_BOS: False,
    }
    name = llama_cpp_name(config)
    return {key.format(arch=name): value for key, value in fields.items()}


def _tensors(model: GPT) -> dict[str, np.ndarray]:
    """By llama.cpp's names, which are made from transformers'; a matrix is [out, in], as in
    `GPT`."""
    from gguf import MODEL_ARCH, get_tensor_name_map  # noqa: PLC0415  optional

    config = model.config
    layout = layout_of(config)
    names = get_tensor_name_map(MODEL_ARCH[llama_cpp_name(config).upper()], config.n_layer)
    heads = {"attn_q.weight": config.n_head, "attn_k.weight": config.key_heads}
    tensors = {}
    for name, tensor in to_transformers(model.state_dict(), model).items():
        their_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert their_name, f"gguf has a name for {name}"
        if layout.transposes and name.startswith(layout.blocks) and tensor.dim() == 2:
            tensor = tensor.T
        rotated = heads.get(their_name.split(".", 2)[-1])  # blk.0.attn_q.weight
        if rotated and layout.gguf_rotates_neighbours:
            # as `LlamaModel.permute` of llama.cpp's converter
            halves = tensor.view(rotated, 2, -1, config.n_embd)
            tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[their_name] = tensor.float().numpy(force=True)
    return tensors
