"""Converts weights and shape of a GPT to the layout of transformers' class of the same architecture and back.

transformers' GPT-2 has the same names behind a prefix; it stores a block's matrices as [in, out] (`Conv1D`) and always
has biases. The other classes have names of their own, and a matrix for each part of `c_attn` and of a gated `c_fc`.
No class has padding rows in its vocabulary.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.architecture import ARCHITECTURES, RMS_EPSILON, mlp_width

CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "nanochat": "NanoChatForCausalLM",
}
PREFIX = "transformer."  # of GPT-2
FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Fields of a GPT-2's config.json that `GPT` fixes, with the defaults of transformers' class."""
EMBEDDINGS = ("wte.weight", "wpe.weight")
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")
"""Older releases saved the causal mask under these names."""
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


def transformers_config(config: ModelConfig, vocab_size: int, eot: int) -> dict[str, Any]:
    """The config.json of transformers' class of this shape. `eot` is the token that begins and ends a document."""
    common = {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": vocab_size,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": "float32",
    }
    if config.architecture != "gpt2":
        kind = ARCHITECTURES[config.architecture]
        return common | {
            "hidden_size": config.n_embd,
            "intermediate_size": mlp_width(config),
            "num_hidden_layers": config.n_layer,
            "num_attention_heads": config.n_head,
            "num_key_value_heads": config.key_heads,
            "head_dim": config.n_embd // config.n_head,
            "max_position_embeddings": config.block_size,
            "hidden_act": "silu" if kind.gated else "relu2",
            "rms_norm_eps": RMS_EPSILON,
            "rope_theta": config.rope_theta,  # of transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "attention_bias": False,
            "attention_dropout": config.dropout,
            "final_logit_softcapping": kind.soft_cap,
            "tie_word_embeddings": kind.tied,
            "pad_token_id": None,  # its embedding would have no gradient
        }
    return common | {
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # transformers no longer has it; llama.cpp's converter reads it alone
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": config.n_inner,
        **FIXED,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    }


def their_names(name: str, config: ModelConfig) -> list[str]:
    """Names in transformers' class of the tensors that stand one below the other in our tensor `name`."""
    if config.architecture == "gpt2":
        return [PREFIX + name]
    layer, module, end = re.fullmatch(r"(?:h\.(\d+)\.)?(.+)\.(\w+)", name).groups()  # pyright: ignore[reportOptionalMemberAccess]
    block = f"model.layers.{layer}." if layer else ""
    return [f"{block}{part}.{end}" for part in (NANOCHAT if config.architecture == "nanochat" else NAMES)[module]]


def to_transformers(state: Mapping[str, Tensor], config: ModelConfig, vocab_size: int) -> dict[str, Tensor]:
    """The tensors of an equal model of transformers' class. GPT-2's missing biases are zeros.

    Args:
        state: weights by name (`GPT.state_dict()`, or a checkpoint's model.safetensors).
        vocab_size: rows of the vocabulary; the padding above them is left out.
    """
    gpt2, tensors = config.architecture == "gpt2", {}
    for name, weight in state.items():
        theirs = their_names(name, config)
        if name in ("wte.weight", HEAD):
            weight = weight[:vocab_size]
        rows = config.n_embd // config.n_head * config.key_heads
        sizes = [weight.size(0) - 2 * rows, rows, rows] if len(theirs) == 3 else weight.size(0) // len(theirs)
        for their_name, part in zip(theirs, weight.split(sizes), strict=True):
            tensors[their_name] = _transposed(name, part).contiguous() if gpt2 else part.contiguous()
        bias = name.removesuffix("weight") + "bias"
        if gpt2 and name.endswith(".weight") and name not in EMBEDDINGS and bias not in state:
            tensors[PREFIX + bias] = weight.new_zeros(weight.size(0))
    return tensors


def from_transformers(
    tensors: Mapping[str, Tensor], config: ModelConfig, like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The weights of a `GPT` from the tensors of transformers' class, in fp32.

    Args:
        tensors: by name; those of a GPT-2 with or without the prefix.
        like: present weights of the `GPT` (`GPT.state_dict()`), which keep their padding rows. Positions beyond its
            context are left out. If a GPT-2 has no biases, the tensors' biases have to be zero.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, a nonzero bias without place, or an untied head.
    """
    gpt2, prefix = config.architecture == "gpt2", PREFIX if config.architecture == "gpt2" else ""
    theirs = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    head = theirs.pop(HEAD, None) if gpt2 else None
    names = {name: [part.removeprefix(prefix) for part in their_names(name, config)] for name in like}
    if missing := {part for parts in names.values() for part in parts} - theirs.keys():
        raise ValueError(f"{min(missing)} is missing")
    if head is not None and not torch.equal(head, theirs["wte.weight"]):
        raise ValueError(f"{HEAD} is not the embedding, and here the head is tied to it")
    for name in sorted(theirs.keys() - {part for parts in names.values() for part in parts}):
        if not gpt2 or not name.endswith(".bias") or name.removesuffix("bias") + "weight" not in like:
            raise ValueError(f"{name} is one too many")
        if theirs[name].any():
            raise ValueError(f"{name} is not zero, and model.bias is false")
    state = {}
    for name, wanted in like.items():
        parts = [_transposed(name, theirs[part]) if gpt2 else theirs[part] for part in names[name]]
        fitting = [part for part in parts if part.shape[1:] == wanted.shape[1:]]
        tensor = torch.cat(fitting).float() if fitting else parts[0]
        if name == "wpe.weight":
            tensor = tensor[: wanted.size(0)]
        elif name in ("wte.weight", HEAD) and fitting:
            tensor = torch.cat([tensor, wanted[tensor.size(0) :].float()])
        if tensor.shape != wanted.shape:
            shapes = [[*theirs[part].shape] for part in names[name]]
            raise ValueError(f"{names[name][0]} has the shape {shapes[0]}, which does not fit {[*wanted.shape]}")
        state[name] = tensor.contiguous()
    return state


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """The tensor in the other layout: transposed for a block's matrix, else unchanged."""
    return tensor.T.contiguous() if name.startswith("h.") and tensor.dim() == 2 else tensor
