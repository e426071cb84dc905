"""Weights and shape of a GPT in the layout of transformers' class of the same architecture.

transformers' GPT-2 has the same names behind a prefix; it stores a block's matrices as [in, out]
(`Conv1D`) and always has biases. The other classes have names of their own, and a matrix for each
part of `c_attn` and of a gated `c_fc`. No class has padding rows in its vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.architecture import ARCHITECTURES, RMS_EPSILON, mlp_width
from gpt2_ddp.model.gpt import GPT

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
}
PREFIX = "transformer."  # of GPT-2
HEAD = "lm_head.weight"
LLAMA_SHAPE = {
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "block_size": "max_position_embeddings",
    "rope_theta": "rope_theta",
}
GPT2_SHAPE = {name: name for name in ("n_layer", "n_head", "n_embd", "n_inner")} | {
    "block_size": "n_positions"
}
SHAPE = {name: GPT2_SHAPE if name == "gpt2" else LLAMA_SHAPE for name in CLASSES}
"""Field of the model section -> field of a config.json."""
NAMES = {
    "wte": ["model.embed_tokens"],
    "ln_f": ["model.norm"],
    "lm_head": ["lm_head"],
    "ln_1": ["input_layernorm"],
    "ln_2": ["post_attention_layernorm"],
    "attn.c_attn": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attn.q_norm": ["self_attn.q_norm"],
    "attn.k_norm": ["self_attn.k_norm"],
    "attn.c_proj": ["self_attn.o_proj"],
    "mlp.c_fc": ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.c_proj": ["mlp.down_proj"],
}
"""Our module -> the other classes' modules, whose matrices stand one below the other in ours."""
NANOCHAT = NAMES | {"mlp.c_fc": ["mlp.fc1"], "mlp.c_proj": ["mlp.fc2"]}


def shape(config: ModelConfig) -> dict[str, Any]:
    """The fields of the model section that stand in a config.json, too, without null."""
    values = config.model_dump() | {"n_kv_head": config.key_heads, "n_inner": mlp_width(config)}
    return {name: values[name] for name in SHAPE[config.architecture]}


def fixed_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config.json that follow from architecture and shape, with the defaults of
    transformers' class."""
    kind = ARCHITECTURES[config.architecture]
    if config.architecture == "gpt2":
        return {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "tie_word_embeddings": kind.tied,
        }
    return {
        "head_dim": config.n_embd // config.n_head,
        "hidden_act": "silu" if kind.gated else "relu2",
        "rms_norm_eps": RMS_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "final_logit_softcapping": kind.soft_cap,
        "tie_word_embeddings": kind.tied,
    }


def transformers_config(config: ModelConfig, vocab_size: int, eot: int) -> dict[str, Any]:
    """The config.json of transformers' class of this shape. `eot` is the token that begins and ends
    a document."""
    values = shape(config)
    dropouts = (
        ("resid_pdrop", "embd_pdrop", "attn_pdrop")
        if config.architecture == "gpt2"
        else ("attention_dropout",)
    )
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": vocab_size,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "pad_token_id": None,  # its embedding would have no gradient
        "torch_dtype": "float32",
        **{theirs: values[name] for name, theirs in SHAPE[config.architecture].items()},
        **fixed_fields(config),
        **dict.fromkeys(dropouts, config.dropout),
    }


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Names in transformers' class of the tensors that stand one below the other in our tensor
    `name`."""
    if config.architecture == "gpt2":
        return [PREFIX + name]
    layer, module, end = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(\w+)", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    block = f"model.layers.{layer}." if layer else ""
    return [
        f"{block}{part}.{end}"
        for part in (NANOCHAT if config.architecture == "nanochat" else NAMES)[module]
    ]


def to_transformers(state: Mapping[str, Tensor], model: GPT) -> dict[str, Tensor]:
    """The tensors of an equal model of transformers' class, as views: of weights, or gradients, by
    name. The rows of the vocabulary that are padding are left out."""
    config = model.config
    views = {}
    keys = config.n_embd // config.n_head * config.key_heads
    for name, weight in state.items():
        theirs = their_names(name, config)
        rows = weight[: model.vocab_size] if name in ("wte.weight", HEAD) else weight
        sizes = [config.n_embd, keys, keys] if len(theirs) == 3 else len(rows) // len(theirs)
        is_transposed = (
            config.architecture == "gpt2" and name.startswith("h.") and weight.dim() == 2
        )
        for their_name, part in zip(theirs, rows.split(sizes), strict=True):
            views[their_name] = part.T if is_transposed else part
    return views
