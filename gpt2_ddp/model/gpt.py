"""GPT-2 (Radford et al., 2019): pre-LayerNorm blocks, learned positions, tanh-GELU, a head tied to the embedding.

Parameters carry the names of OpenAI's and HuggingFace's GPT-2 (`h.0.attn.c_attn.weight`), as plain linear layers.
Shapes: B sequences, T tokens, C = n_embd, H = n_head, Q = C // H, V = padded vocabulary.
"""

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gpt2_ddp.config.training import ModelConfig

if TYPE_CHECKING:
    from gpt2_ddp.model.documents import Mask

VOCAB_MULTIPLE = 128
"""The embedding's rows are padded to a multiple of this, which keeps the head's matrix multiplication on fast paths."""
GPU_LOSS_CHUNK = 8192
"""`train.loss_chunk: auto` on GPUs, in tokens: fills the device; GPT-2's logits take about 1 GB in bf16."""


def resolve_loss_chunk(chunk: int | Literal["auto"] | None, device_type: str) -> int | None:
    """`train.loss_chunk` with `auto` resolved: tokens per chunk, or None for all tokens at once."""
    return chunk if chunk != "auto" else GPU_LOSS_CHUNK if device_type == "cuda" else None


class KVCache:
    """Keys and values of the tokens decoded so far; slot s of a row holds those of its position s.

    Rows may differ in length: a shorter row's padding lies after its last token, where the causal mask hides it until
    real tokens overwrite it.

    Args:
        model: the model that will decode with it; gives shapes, device and dtype.
        rows: B.
        length: slots per row, at most block_size.
    """

    def __init__(self, model: "GPT", rows: int, length: int):
        config, weight = model.config, model.wte.weight
        shape = (config.n_layer, rows, config.n_head, length, config.n_embd // config.n_head)
        # Zeros: what the mask hides still meets a weight of 0, and 0 * NaN would not be 0.
        self.keys = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.values = torch.zeros_like(self.keys)

    def place(self, positions: Tensor) -> None:
        """Says where the next tokens go, once for all layers: int64 [B, t]."""
        end = int(positions.max()) + 1
        self.slots = positions[:, None, :, None].expand(-1, self.keys.size(2), -1, self.keys.size(4))  # [B, H, t, Q]
        self.mask = torch.arange(end, device=positions.device) <= positions[:, None, :, None]  # [B, 1, t, end]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores [B, H, t, Q]; returns keys and values [B, H, end, Q] and which of them a query sees [B, 1, t, end]."""
        keys, values = self.keys[layer].scatter_(2, self.slots, key), self.values[layer].scatter_(2, self.slots, value)
        end = self.mask.size(-1)
        return keys[:, :, :end], values[:, :, :end], self.mask


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.layer = layer
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, mask: "Mask | None" = None, cache: KVCache | None = None) -> Tensor:
        """x: [B, T, C] -> [B, T, C]. With a cache, x continues what it holds. Without a mask, each position sees
        all that stands before it."""
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # 3 x [B, T, C]
        q, k, v = (y.view(B, T, self.n_head, -1).transpose(1, 2) for y in (q, k, v))  # [B, H, T, Q]
        if cache is not None:
            k, v, mask = cache.extend(self.layer, k, v)  # 2 x [B, H, S, Q], [B, 1, T, S]
        dropout = self.dropout if self.training else 0.0
        if mask is None or isinstance(mask, Tensor):
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
        else:
            from torch.nn.attention.flex_attention import flex_attention

            y = flex_attention(q, k, v, block_mask=mask)
        y = y.transpose(1, 2).reshape(B, T, C)  # [B, H, T, Q] -> [B, T, C]
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two linear layers with a tanh-GELU between."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, C] -> [B, T, C]."""
        x = F.gelu(self.c_fc(x), approximate="tanh")  # [B, T, 4C]
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, mask: "Mask | None" = None, cache: KVCache | None = None) -> Tensor:
        """x: [B, T, C] -> [B, T, C]."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model.

    Args:
        config: its shape.
        vocab_size: tokens the data can hold; ids of the padding rows above it are never predicted.
        eot: the token that documents begin with, which a model with a `document_mask` computes with.

    Attributes:
        activation_checkpointing: each block's activations are recomputed in the backward pass.
        loss_chunk: tokens whose logits a loss has at a time; None: all.
    """

    padding_mask: Tensor | None

    def __init__(self, config: ModelConfig, vocab_size: int, eot: int | None = None):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.eot = eot
        self.activation_checkpointing = self.compiles_blocks = False
        self.loss_chunk: int | None = None
        padded = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.wte = nn.Embedding(padded, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        # Added as the head's bias, inside its matrix multiplication: the padding gets probability 0 at no extra pass.
        mask = torch.zeros(padded).index_fill_(0, torch.arange(vocab_size, padded), -math.inf)
        self.register_buffer("padding_mask", mask if padded > vocab_size else None, persistent=False)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual stream sums 2 * n_layer of these (GPT-2, section 2.3)
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Next-token loss, or logits.

        Args:
            tokens: int64 [B, T], T <= block_size.
            targets: int64 [B, T]; -100 is not scored. The logits then never leave the model.
            reduction: `mean` (over scored targets), `sum` or `none`, as in `F.cross_entropy`.

        Returns:
            With targets, the cross-entropy in nats: fp32 scalar, or [B, T] with reduction `none`. Without, the
            logits [B, T, vocab_size].
        """
        places, mask = self._places(tokens)
        x = self.wte(tokens) + places  # [B, T, C]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        if targets is None:
            return self.head(x)[..., : self.vocab_size]
        return self.loss(x, targets, reduction)

    def loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Of hidden states [B, T, C], as `forward` returns it."""
        if self.loss_chunk and targets.numel() > self.loss_chunk:
            from gpt2_ddp.model.chunked_loss import chunked_loss

            rows = self.ln_f(x).flatten(0, 1)
            head = self.wte.weight, self.padding_mask
            loss = chunked_loss(rows, *head, targets.flatten(), self.loss_chunk, reduction)
        else:
            loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def compile_blocks(self) -> None:
        """Compiles each block, and the head with its loss, by itself and in place, so that a block's gradients are
        ready, and on their way to the other ranks, before the backward pass has come to the block below."""
        for block in self.h:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)
        self.compiles_blocks = True

    def _places(self, tokens: Tensor) -> "tuple[Tensor, Mask | None]":
        """Position embeddings, [T, C] or [B, T, C], and what each position sees."""
        if not self.config.document_mask:
            return self.wpe.weight[: tokens.size(1)], None
        from gpt2_ddp.model.documents import flex_is_there, within_documents

        assert self.eot is not None, "a model with a document mask is made with the token that documents begin with"
        head_size, dropout = self.config.n_embd // self.config.n_head, self.config.dropout if self.training else 0.0
        positions, mask = within_documents(tokens, self.eot, blocks=flex_is_there(tokens, head_size, dropout))
        return self.wpe(positions), mask

    def decode(self, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        """Hidden states [B, t, C], for `head`, of tokens that continue those in the cache, which is extended. A row is
        one document, for a model with a document mask.

        Args:
            tokens: int64 [B, t].
            positions: int64 [B, t]: where in their rows they stand; all slots before must be filled.
            cache: keys and values of what comes before.
        """
        cache.place(positions)
        x = self.wte(tokens) + self.wpe(positions)  # [B, t, C]
        for block in self.h:
            x = block.forward(x, cache=cache)  # never compiled: its shapes change with each token
        return x

    def head(self, x: Tensor) -> Tensor:
        """Final LayerNorm and the tied head: [..., C] -> logits [..., V], -inf in the padding."""
        return F.linear(self.ln_f(x), self.wte.weight, self.padding_mask)

    def num_parameters(self) -> int:
        """Parameters without the position embeddings (nanoGPT's count): 123.7M for GPT-2 (124M), padding included."""
        return sum(parameter.numel() for parameter in self.parameters()) - self.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6·N + 12·L·H·Q·T (PaLM, appendix B; nanoGPT's N), whatever a
        mask hides."""
        config = self.config
        return 6 * self.num_parameters() + 12 * config.n_layer * config.n_embd * config.block_size


class without_init(TorchFunctionMode):
    """A model that is made inside has whatever its memory held: for weights that are read next, or come over the wire.
    Filling GPT-2's 124M takes 1.4 s of CPU time, and 1558M twelve times as long."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Passes over `torch.nn.init`."""
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
