"""What differs between the architectures, in one table, and the parts that they are built from.

Shapes: B sequences, T tokens, C = n_embd, H = n_head query heads, K = n_kv_head key heads, Q = C //
H, I = MLP width.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.export_layout import GPT2_EXPORT, LLAMA_EXPORT, ExportLayout
from gpt2_ddp.model.step_casts import Linear

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Norm = Callable[[int], nn.Module]
Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, fp32 [T, 1, Q / 2] or [B, T, 1, Q / 2]."""


SIGMOID_GELU_ON: tuple[str, ...] = ()
"""Types of devices on which compiled code computes GELU by a sigmoid: the tanh of GPUs' library
takes longer."""


def gelu(x: Tensor) -> Tensor:
    """GELU, tanh approximation (Hendrycks and Gimpel, 2016): [..., I] -> [..., I]. x·(1 + tanh u)/2
    is x·σ(2u)."""
    if torch.compiler.is_compiling() and x.device.type in SIGMOID_GELU_ON:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # within a kernel only
        twice = math.sqrt(8 / math.pi) * wide * (1 + 0.044715 * wide * wide)  # 2u
        return (wide * torch.sigmoid(twice)).to(x.dtype)
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer, 2020) of gate and value: [..., 2I] -> [..., I]."""
    gate, value = x.chunk(2, dim=-1)
    return F.silu(gate) * value


def relu2(x: Tensor) -> Tensor:
    """Squared ReLU (So et al., 2021): [..., I] -> [..., I]."""
    return F.relu(x).square()


RMS_EPSILON = 1e-6


class RMSNorm(nn.RMSNorm):
    """RMSNorm (Zhang and Sennrich, 2019). Casts its weights to the dtype of the input, because
    torch's kernel needs one dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., C] -> [..., C]."""
        weight = None if self.weight is None else self.weight.type_as(x)
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)


rms_norm = partial(RMSNorm, eps=RMS_EPSILON)
plain_rms_norm = partial(rms_norm, elementwise_affine=False)


class Architecture(NamedTuple):
    """An architecture of ARCHITECTURES.

    Attributes:
        activation: of the MLP.
        gated: whether the activation takes gate and value.
        norm: of a block's input, of the MLP's input and of the head's input; None: LayerNorm, and
            biases.
        rotary: rotary positions (Su et al., 2021): 1 or -1, the direction of rotation; 0: learned
            positions, `config.training.LEARNED_POSITIONS`.
        query_norm: of queries and keys (Henry et al., 2020), before the rotation; None: none.
        rotated_norm: the same after the rotation.
        embedding_norm: of the embeddings; None: none.
        tied: whether the head is the embedding, unless `model.tie_word_embeddings` says it.
        soft_cap: of logits, `cap · tanh(logits / cap)` (Gemma 2, 2024); None: none.
        pairs: rows of an embedding of each token with the one before, hashed (Huang et al., 2025);
            0: none.
        values: whether each layer adds an embedding of the token to its values (Zhou et al., 2024;
            modded-nanogpt).
        export: its layout in transformers and llama.cpp; None: it cannot be exported.
    """

    activation: Callable[[Tensor], Tensor]
    gated: bool = False
    norm: Norm | None = None
    rotary: int = 0
    query_norm: Norm | None = None
    rotated_norm: Norm | None = None
    embedding_norm: Norm | None = None
    tied: bool = False
    soft_cap: float | None = None
    pairs: int = 0
    values: bool = False
    export: ExportLayout | None = None


GPT2 = Architecture(activation=gelu, tied=True, export=GPT2_EXPORT)
LLAMA = Architecture(
    activation=swiglu,
    gated=True,
    norm=rms_norm,
    rotary=1,
    export=LLAMA_EXPORT._replace(gguf="llama", gguf_rotates_neighbours=True),
)
QWEN3 = LLAMA._replace(
    query_norm=rms_norm,
    export=LLAMA_EXPORT._replace(class_name="Qwen3ForCausalLM", gguf="qwen3"),
)
NANOCHAT = Architecture(
    activation=relu2,
    norm=plain_rms_norm,
    rotary=-1,
    rotated_norm=plain_rms_norm,
    embedding_norm=plain_rms_norm,
    soft_cap=15.0,
    export=LLAMA_EXPORT._replace(
        class_name="NanoChatForCausalLM",
        fixed={**LLAMA_EXPORT.fixed, "hidden_act": "relu2", "final_logit_softcapping": 15.0},
        modules={**LLAMA_EXPORT.modules, "mlp.c_fc": ["mlp.fc1"], "mlp.c_proj": ["mlp.fc2"]},
    ),
)
SPEEDRUN = NANOCHAT._replace(pairs=32_768, values=True, export=None)
ARCHITECTURES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "nanochat": NANOCHAT,
    "speedrun": SPEEDRUN,
}
"""The architectures by `model.architecture`."""


def is_tied(config: ModelConfig) -> bool:
    """Whether the head is the embedding."""
    if config.tie_word_embeddings is None:
        return ARCHITECTURES[config.architecture].tied
    return config.tie_word_embeddings


class Context(NamedTuple):
    """What the blocks know of the tokens.

    Attributes:
        rotation: of their positions.
        mask: of attention, bool [B, 1, T, T] or its blocks; None: causal.
        cache: keys and values of the S tokens so far, [L, 2, B, K, S, Q]; the layers write those of
            the last T.
        values: value embeddings [B, T, K·Q] of each layer; for a block, of its own layer alone.
    """

    rotation: Rotation | None = None
    mask: "Tensor | BlockMask | None" = None
    cache: Tensor | None = None
    values: Sequence[Tensor] = ()

    def of(self, layer: int) -> "Context":
        """What the block of this layer knows. It has no number to look up, which would compile a
        graph of its own for each block."""
        return self._replace(values=self.values[layer : layer + 1]) if self.values else self


def rotation(config: ModelConfig, positions: Tensor) -> Rotation:
    """Cosines and sines of int64 positions [T] or [B, T]."""
    size = config.n_embd // config.n_head
    # [Q / 2]
    frequencies = config.rope_theta ** (
        -torch.arange(0, size, 2, device=positions.device).float() / size
    )
    angles = positions[..., None, None].float() * frequencies  # [T, 1, Q / 2] or [B, T, 1, Q / 2]
    return angles.cos(), ARCHITECTURES[config.architecture].rotary * angles.sin()


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates pairs of features of x [B, T, H, Q] by the angles of their positions."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


SHORT = range(64, 257)
"""Contexts in tokens whose attention matrix is built in bf16 training on CPUs: at 128, the backward
pass of torch's kernel takes three times as long. Shorter contexts keep the bits of earlier
releases."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q·kᵀ / √Q)·v over the past, by matrix products: [B, H, T, Q], 2 x [B, K, T, Q] -> [B,
    H, T, Q]."""
    (B, H, T, Q), groups = q.shape, q.size(1) // k.size(1)
    k, v = (x.repeat_interleave(groups, dim=1) if groups > 1 else x for x in (k, v))
    q, k, v = (x.reshape(B * H, T, Q) for x in (q, k, v))
    later = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    share = torch.baddbmm(later, q, k.mT, alpha=1 / math.sqrt(Q)).softmax(-1)  # [B·H, T, T]
    return (share @ v).view(B, H, T, Q)


class Attention(nn.Module):
    """Causal self-attention. Several query heads may share a key head (Ainslie et al., 2023)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        kind = ARCHITECTURES[config.architecture]
        size = config.n_embd // config.n_head
        self.sizes = [config.n_embd, config.key_heads * size, config.key_heads * size]
        self.head_size = size
        self.dropout = config.dropout
        self.weights_dropout = config.weights_dropout
        self.layer = layer
        self.shares_keys = config.key_heads < config.n_head
        self.c_attn = Linear(config.n_embd, sum(self.sizes), bias=kind.norm is None)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=kind.norm is None)
        norm = kind.query_norm or kind.rotated_norm
        self.q_norm, self.k_norm = (norm(size), norm(size)) if norm else (None, None)
        self.rotates_first = kind.rotated_norm is not None

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        """x: [B, T, C] -> [B, T, C]. With earlier tokens in the cache, x is the next token."""
        B, T, C = x.shape
        rotation, mask, cache, values = context
        q, k, v = self.c_attn(x).split(self.sizes, dim=2)  # [B, T, C], 2 x [B, T, K·Q]
        if values:
            v = v + values[0].type_as(v)
        q, k, v = (y.view(B, T, -1, self.head_size) for y in (q, k, v))  # [B, T, H or K, Q]
        if rotation:
            q = self._rotated(q.float(), self.q_norm, rotation).type_as(v)
            k = self._rotated(k.float(), self.k_norm, rotation).type_as(v)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))  # [B, H or K, T, Q]
        if cache is not None:
            cache[self.layer, ..., -T:, :] = torch.stack((k, v))
            k, v = cache[self.layer]  # 2 x [B, K, S, Q]
        dropout = self.weights_dropout if self.training else 0.0
        is_short = (
            q.device.type == "cpu"
            and q.dtype == torch.bfloat16
            and T in SHORT
            and torch.is_grad_enabled()
        )
        if mask is None and not dropout and is_short:
            y = causal_attention(q, k, v)
        elif mask is not None and not isinstance(mask, Tensor):
            # imports Dynamo
            from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415

            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=self.shares_keys)
            assert isinstance(y, Tensor)
        else:
            y = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=mask is None and T > 1,
                enable_gqa=self.shares_keys,
            )
        y = y.transpose(1, 2).reshape(B, T, C)  # [B, H, T, Q] -> [B, T, C]
        return F.dropout(self.c_proj(y), self.dropout, self.training)

    def _rotated(self, x: Tensor, norm: nn.Module | None, rotation: Rotation) -> Tensor:
        """Queries or keys in fp32 [B, T, H, Q], normalized and rotated in the architecture's
        order."""
        if norm is None:
            return rotate(x, rotation)
        return norm(rotate(x, rotation)) if self.rotates_first else rotate(norm(x), rotation)


def mlp_width(config: ModelConfig) -> int:
    """I of the MLP: `model.n_inner`, or 4·C; with a gate 8/3·C, which has as many parameters,
    rounded up to 64s."""
    gated = ARCHITECTURES[config.architecture].gated
    return config.n_inner or (
        math.ceil(8 * config.n_embd / 192) * 64 if gated else 4 * config.n_embd
    )


class MLP(nn.Module):
    """Two linear layers with the architecture's activation in between."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        kind = ARCHITECTURES[config.architecture]
        self.dropout = config.dropout
        self.activation = kind.activation
        width = mlp_width(config)
        self.c_fc = Linear(config.n_embd, width * (1 + kind.gated), bias=kind.norm is None)
        self.c_proj = Linear(width, config.n_embd, bias=kind.norm is None)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, C] -> [B, T, C]."""
        x = self.activation(self.c_fc(x))  # [B, T, I]
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: Context = Context()) -> Tensor:  # noqa: B008
        """x: [B, T, C] -> [B, T, C]."""
        x = x + self.attn(self.ln_1(x), context)
        return x + self.mlp(self.ln_2(x))


def make_norm(config: ModelConfig) -> nn.Module:
    """The architecture's norm of [..., C]."""
    norm = ARCHITECTURES[config.architecture].norm
    return norm(config.n_embd) if norm else nn.LayerNorm(config.n_embd)
