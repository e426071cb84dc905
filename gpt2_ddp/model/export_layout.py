"""Names of the parts of a model in the files of other programs: transformers, and llama.cpp's GGUF.

`Architecture.export` is the layout of one architecture. The package `export` reads and writes them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class ExportLayout(NamedTuple):
    """An architecture in transformers, where `model_type` is the architecture's name, and in GGUF.

    Attributes:
        class_name: transformers' class.
        shape: field of the model section -> field of config.json.
        fixed: further fields of config.json, each with the only value that `GPT` computes.
            `transformers_layout.fixed_fields` adds those that follow from the shape.
        dropouts: fields of config.json that have `model.dropout`.
        attention_dropout: the one for attention weights.
        modules: our module -> transformers' modules, whose matrices stand one below the other in
            ours. A module of a block has its name within the block.
        blocks: transformers' list of blocks.
        transposes: whether transformers stores the matrices of blocks as [in, out] (`Conv1D`).
        gguf: llama.cpp's architecture; None: llama.cpp does not compute the same.
        gguf_rotates_neighbours: whether the two features that are rotated together are neighbours
            in a GGUF. In ours they are half a head apart.
    """

    class_name: str
    shape: Mapping[str, str]
    fixed: Mapping[str, object]
    dropouts: Sequence[str]
    attention_dropout: str
    modules: Mapping[str, Sequence[str]]
    blocks: str
    transposes: bool = False
    gguf: str | None = None
    gguf_rotates_neighbours: bool = False


GPT2_EXPORT = ExportLayout(
    class_name="GPT2LMHeadModel",
    shape={
        "n_layer": "n_layer",
        "n_head": "n_head",
        "n_embd": "n_embd",
        "n_inner": "n_inner",
        "block_size": "n_positions",
    },
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    dropouts=("resid_pdrop", "embd_pdrop"),
    attention_dropout="attn_pdrop",
    modules={
        "wte": ["transformer.wte"],
        "wpe": ["transformer.wpe"],
        "ln_f": ["transformer.ln_f"],
        "lm_head": ["lm_head"],
        "ln_1": ["ln_1"],
        "ln_2": ["ln_2"],
        "attn.c_attn": ["attn.c_attn"],
        "attn.c_proj": ["attn.c_proj"],
        "mlp.c_fc": ["mlp.c_fc"],
        "mlp.c_proj": ["mlp.c_proj"],
    },
    blocks="transformer.h",
    transposes=True,
    gguf="gpt2",
)
"""GPT-2, with biases. transformers has OpenAI's names and orientation."""


LLAMA_EXPORT = ExportLayout(
    class_name="LlamaForCausalLM",
    shape={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "block_size": "max_position_embeddings",
        "rope_theta": "rope_theta",
    },
    fixed={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,  # RMS_EPSILON
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "final_logit_softcapping": None,
    },
    dropouts=(),
    attention_dropout="attention_dropout",
    modules={
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
    },
    blocks="model.layers",
)
"""Llama in transformers. Most later classes have these names; `_replace` gives what differs."""
