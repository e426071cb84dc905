"""Converts weights and shape of a GPT to the layout of transformers' GPT-2 and back.

Names differ by a prefix. transformers stores a block's matrices as [in, out] (`Conv1D`), always has biases, and has no
padding rows in its vocabulary. Both tie the head to the embedding.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gpt2_ddp.config.training import ModelConfig

PREFIX = "transformer."
FIXED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""Fields of a config.json that `GPT` fixes, with the defaults of transformers' class."""
EMBEDDINGS = ("wte.weight", "wpe.weight")
HEAD = "lm_head.weight"
MASKS = (".attn.bias", ".attn.masked_bias")
"""Older releases saved the causal mask under these names."""


def transformers_config(config: ModelConfig, vocab_size: int, eot: int) -> dict[str, Any]:
    """The config.json of a GPT2LMHeadModel of this shape. `eot` is the token that begins and ends a document."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": vocab_size,
        "n_positions": config.block_size,
        "n_ctx": config.block_size,  # transformers no longer has it; llama.cpp's converter reads it alone
        "n_embd": config.n_embd,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_inner": None,
        **FIXED,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "bos_token_id": eot,
        "eos_token_id": eot,
        "torch_dtype": "float32",
    }


def to_transformers(state: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors of an equal GPT2LMHeadModel. Missing biases are zeros.

    Args:
        state: weights by name (`GPT.state_dict()`, or a checkpoint's model.safetensors).
        vocab_size: rows of the vocabulary; the padding above them is left out.
    """
    tensors = {}
    for name, weight in state.items():
        tensors[name] = weight[:vocab_size].contiguous() if name == "wte.weight" else _transposed(name, weight)
        bias = name.removesuffix("weight") + "bias"
        if name.endswith(".weight") and name not in EMBEDDINGS and bias not in state:
            tensors[bias] = weight.new_zeros(weight.size(0))
    return {PREFIX + name: tensor for name, tensor in tensors.items()}


def from_transformers(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a `GPT` from the tensors of a GPT2LMHeadModel or GPT2Model, in fp32.

    Args:
        tensors: by name, with or without the prefix.
        like: present weights of the `GPT` (`GPT.state_dict()`), which keep their padding rows. Positions beyond its
            context are left out. If it has no biases, the tensors' biases have to be zero.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, a nonzero bias without place, or an untied head.
    """
    theirs = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if not name.endswith(MASKS)}
    head = theirs.pop(HEAD, None)
    if missing := like.keys() - theirs.keys():
        raise ValueError(f"{min(missing)} is missing")
    if head is not None and not torch.equal(head, theirs["wte.weight"]):
        raise ValueError(f"{HEAD} differs from the embedding, but gpt2_ddp ties the two")
    state = {}
    for name in sorted(theirs):
        tensor = _transposed(name, theirs[name]).float()
        if name not in like:
            if not name.endswith(".bias") or name.removesuffix("bias") + "weight" not in like:
                raise ValueError(f"{name} is unknown")
            if tensor.any():
                raise ValueError(f"{name} is not zero, and model.bias is false")
            continue
        wanted = like[name]
        if name == "wpe.weight":
            tensor = tensor[: wanted.size(0)]
        elif name == "wte.weight" and tensor.shape[1:] == wanted.shape[1:]:
            tensor = torch.cat([tensor, wanted[tensor.size(0) :].float()])
        if tensor.shape != wanted.shape:
            raise ValueError(f"{name} has shape {[*theirs[name].shape]} instead of {[*wanted.shape]}")
        state[name] = tensor.contiguous()
    return state


def _transposed(name: str, tensor: Tensor) -> Tensor:
    """The tensor in the other layout: transposed for a block's matrix, else unchanged."""
    return tensor.T.contiguous() if name.startswith("h.") and tensor.dim() == 2 else tensor
