"""Weights and shape of a GPT in the layout of transformers' class of the same architecture.

`ExportLayout` has the names of each architecture. No class has padding rows in its vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.architecture import ARCHITECTURES, is_tied, mlp_width
from gpt2_ddp.model.export_layout import ExportLayout
from gpt2_ddp.model.gpt import GPT

HEAD = "lm_head.weight"
LAYOUTS = {name: kind.export for name, kind in ARCHITECTURES.items() if kind.export is not None}
"""The architectures that transformers has, and their layouts."""
LLAMA_CPP = {name: layout for name, layout in LAYOUTS.items() if layout.gguf is not None}
"""The architectures that llama.cpp has, too."""


def layout_of(config: ModelConfig) -> ExportLayout:
    """The layout of a model's architecture, which has one."""
    return LAYOUTS[config.architecture]


def shape(config: ModelConfig) -> dict[str, Any]:
    """The fields of the model section that stand in a config.json, too, without null."""
    values = config.model_dump() | {"n_kv_head": config.key_heads, "n_inner": mlp_width(config)}
    return {name: values[name] for name in layout_of(config).shape}


def fixed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json that follow from architecture and shape, with the defaults of
    transformers' class."""
    kind = ARCHITECTURES[config.architecture]
    fields: dict[str, Any] = {}
    if kind.rotary:
        fields["head_dim"] = config.n_embd // config.n_head
    fields |= layout_of(config).fixed
    if kind.rotary:
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    fields["tie_word_embeddings"] = is_tied(config)
    return fields


def transformers_config(config: ModelConfig, vocab_size: int, eot: int) -> dict[str, Any]:
    """The config.json of transformers' class of this shape. `eot` is the token that begins and ends
    a document."""
    layout = layout_of(config)
    values = shape(config)
    return {
        "architectures": [layout.class_name],
        "model_type": config.architecture,
        "vocab_size": vocab_size,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": None,  # its embedding would have no gradient
        "torch_dtype": "float32",
        **{theirs: values[name] for name, theirs in layout.shape.items()},
        **fixed_fields(config),
        **dict.fromkeys(layout.dropouts, config.dropout),
        layout.attention_dropout: config.weights_dropout,
    }


def their_names(name: str, layout: ExportLayout) -> list[str]:
    """Names in transformers' class of the tensors that stand one below the other in our tensor
    `name`, such as `h.0.attn.c_attn.weight`."""
    parts = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(\w+)", name)
    assert parts, f"{name} is no tensor of a GPT"
    layer, module, end = parts.groups()
    block = f"{layout.blocks}.{layer}." if layer else ""
    return [f"{block}{theirs}.{end}" for theirs in layout.modules[module]]


def to_transformers(state: Mapping[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """The tensors of an equal model of transformers' class, as views: of weights, or gradients, by
    name. The rows of the vocabulary that are padding are left out."""
    config = model.config
    layout = layout_of(config)
    views = {}
    keys = config.n_embd // config.n_head * config.key_heads
    for name, weight in state.items():
        theirs = their_names(name, layout)
        rows = weight[: model.vocab_size] if name in ("wte.weight", HEAD) else weight
        # queries, keys and values; or gate and value
        sizes = [config.n_embd, keys, keys] if len(theirs) == 3 else len(rows) // len(theirs)
        is_transposed = layout.transposes and name.startswith("h.") and weight.dim() == 2
        for their_name, part in zip(theirs, rows.split(sizes), strict=True):
            views[their_name] = part.T if is_transposed else part
    return views
