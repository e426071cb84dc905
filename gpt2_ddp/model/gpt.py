"""GPT-2 (Radford et al., 2019): pre-LayerNorm blocks, learned positions, tanh-GELU, a head tied to the embedding.

Parameters have the names of OpenAI's and HuggingFace's GPT-2 (`h.0.attn.c_attn.weight`); layers are `nn.Linear`.
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
    from gpt2_ddp.model.generate import KVCache

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of this many rows: faster matrix multiplication in the head."""
GPU_LOSS_CHUNK = 8192
"""`train.loss_chunk: auto` on GPUs, in tokens: fills the device; GPT-2's logits take about 1 GB in bf16."""


def resolve_loss_chunk(chunk: int | Literal["auto"] | None, device_type: str) -> int | None:
    """`train.loss_chunk` with `auto` resolved: tokens per chunk, or None for all tokens at once."""
    return chunk if chunk != "auto" else GPU_LOSS_CHUNK if device_type == "cuda" else None


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.layer = layer
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, mask: "Mask | None" = None, cache: "KVCache | None" = None) -> Tensor:
        """x: [B, T, C] -> [B, T, C]. Attention is causal without a mask. With a cache, x continues its tokens."""
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
    """Two linear layers with a tanh-GELU in between."""

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

    def forward(self, x: Tensor, mask: "Mask | None" = None, cache: "KVCache | None" = None) -> Tensor:
        """x: [B, T, C] -> [B, T, C]."""
        x = x + self.attn(self.ln_1(x), mask, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model.

    Args:
        config: shape of the model.
        vocab_size: ids of the data; the embedding's padding rows above them are never predicted.
        eot: id of end-of-text, the first token of a document; a `document_mask` needs it.

    Attributes:
        activation_checkpointing: recomputes each block's activations in the backward pass.
        loss_chunk: tokens per chunk of the loss (`model.chunked_loss`); None: all at once.
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
        # the head's bias: gives the padding probability 0 within the matrix multiplication
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
        """Next-token loss, or logits without targets.

        Args:
            tokens: int64 [B, T], T <= block_size.
            targets: int64 [B, T]; -100 is not scored.
            reduction: `mean` (over scored targets), `sum` or `none`, as in `F.cross_entropy`.

        Returns:
            Cross-entropy in nats: fp32 scalar, or [B, T] with reduction `none`. Logits: [B, T, vocab_size].
        """
        positions, mask = self._positions(tokens)
        x = self.wte(tokens) + positions  # [B, T, C]
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
        """The loss of hidden states [B, T, C], as `forward` returns it."""
        if self.loss_chunk and targets.numel() > self.loss_chunk:
            from gpt2_ddp.model.chunked_loss import chunked_loss

            rows = self.ln_f(x).flatten(0, 1)
            head = self.wte.weight, self.padding_mask
            loss = chunked_loss(rows, *head, targets.flatten(), self.loss_chunk, reduction)
        else:
            loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten(), reduction=reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def compile_blocks(self) -> None:
        """Compiles each block, and the head with the loss, in place. So DDP all-reduces a block's gradients during the
        backward pass of the blocks below."""
        for block in self.h:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)
        self.compiles_blocks = True

    def _positions(self, tokens: Tensor) -> "tuple[Tensor, Mask | None]":
        """Position embeddings [T, C] or [B, T, C], and the attention mask; None: causal."""
        if not self.config.document_mask:
            return self.wpe.weight[: tokens.size(1)], None
        from gpt2_ddp.model.documents import flex_is_there, within_documents

        assert self.eot is not None, "a document mask needs the id of end-of-text"
        head_size, dropout = self.config.n_embd // self.config.n_head, self.config.dropout if self.training else 0.0
        positions, mask = within_documents(tokens, self.eot, blocks=flex_is_there(tokens, head_size, dropout))
        return self.wpe(positions), mask

    def head(self, x: Tensor) -> Tensor:
        """Final LayerNorm and the tied head: [..., C] -> logits [..., V], -inf in the padding."""
        return F.linear(self.ln_f(x), self.wte.weight, self.padding_mask)

    def num_parameters(self) -> int:
        """Parameters without position embeddings (nanoGPT's count): 123.7M for GPT-2 (124M), padding included."""
        return sum(parameter.numel() for parameter in self.parameters()) - self.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6·N + 12·L·H·Q·T (PaLM, appendix B; nanoGPT's N). Masked
        attention counts in full."""
        config = self.config
        return 6 * self.num_parameters() + 12 * config.n_layer * config.n_embd * config.block_size


class without_init(TorchFunctionMode):
    """Context in which modules are made without initial weights, which are loaded or received afterwards. It saves
    1.4 s of CPU time for GPT-2 (124M)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skips calls of `torch.nn.init`."""
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))
