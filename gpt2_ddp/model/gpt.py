"""The language model of each architecture: GPT-2 (Radford et al., 2019), Llama, Qwen3 and nanochat.

Parameters have the names of OpenAI's and HuggingFace's GPT-2 (`h.0.attn.c_attn.weight`); layers are
`nn.Linear`. `GPT.forward` is the way of a batch: `embed`, the blocks of `h`, then `loss` or `head`.

Shapes: B sequences, T tokens, C = n_embd, V = padded vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.architecture import ARCHITECTURES, Block, Context, is_tied, make_norm, rotation
from gpt2_ddp.model.fp8 import fp8_loss
from gpt2_ddp.model.loss import fuses_loss, one_pass_loss, trains_in_bf16
from gpt2_ddp.model.optim import Role, roles
from gpt2_ddp.model.step_casts import in_half

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

VOCAB_MULTIPLE = 128
"""The embedding is padded to a multiple of this many rows: faster matrix multiplication in the
head."""
PAIR_HASH = 92_821
"""Prime factor of the first token in the hash of a pair."""
PAIR_DROPOUT = 0.3
"""Dropout of the embeddings of pairs, which would overfit a text in its second epoch
(docs/speedrun.md)."""
LOSS_CHUNK = 8192
"""Tokens per chunk of the loss on GPUs: GPT-2's logits take about 1 GB in bf16."""


BLOCK_MASKS_ON: tuple[str, ...] = ()
"""Types of devices on which a model that is compiled as a whole masks documents by FlexAttention,
without a [T, T] mask in memory."""
MASK_BLOCK = 128
"""Tokens in a block of FlexAttention's mask. A block that no token sees takes no time."""


def document_blocks(document: Tensor) -> "BlockMask":
    """FlexAttention's causal mask within documents, whose indices are int64 [B, T]."""
    # imports Dynamo
    from torch.nn.attention.flex_attention import create_block_mask  # noqa: PLC0415

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[b, query] == document[b, key])

    B, T = document.shape
    return create_block_mask(sees, B, None, T, T, device=document.device, BLOCK_SIZE=MASK_BLOCK)


def loss_chunk(x: Tensor) -> int:
    """Tokens per chunk of the loss of these hidden states; 0: all at once. A compiled loss keeps no
    logits in fp32, so chunks would save little."""
    return LOSS_CHUNK if x.is_cuda and not torch.compiler.is_compiling() else 0


class GPT(nn.Module):
    """The language model.

    Args:
        config: shape of the model.
        vocab_size: ids of the data; the embedding's padding rows above them are never predicted.
        eot: id of end-of-text, the first token of a document; a `document_mask` needs it.
        activation_checkpointing: recomputes each block's activations in the backward pass.
        fp8_head: multiplies in fp8 in the head, in bf16 training; evaluations stay in bf16.
    """

    padding_mask: Tensor | None
    half_head: Tensor | None = None
    """Copy of the head's weight (`step_casts`)."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        eot: int | None = None,
        activation_checkpointing: bool = False,
        fp8_head: bool = False,
    ):
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.eot = eot
        self.activation_checkpointing = activation_checkpointing
        self.fp8_head = fp8_head
        self.compiles_blocks = False
        padded = math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        kind = ARCHITECTURES[config.architecture]
        self.soft_cap = kind.soft_cap
        self.wte = nn.Embedding(padded, config.n_embd)
        self.wpe = None if kind.rotary else nn.Embedding(config.block_size, config.n_embd)
        self.pairs = nn.Embedding(kind.pairs, config.n_embd) if kind.pairs else None
        keys = config.n_embd // config.n_head * config.key_heads
        self.values = nn.ModuleList(
            nn.Embedding(padded, keys) for _ in range(config.n_layer * kind.values)
        )
        self.embedding_norm = kind.embedding_norm(config.n_embd) if kind.embedding_norm else None
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head = None if is_tied(config) else nn.Linear(config.n_embd, padded, bias=False)
        # the head's bias: gives the padding probability 0 within the matrix multiplication; no
        # checkpoint has it, so it is on the CPU even if the model is made on the meta device
        mask = torch.zeros(padded, device="cpu")
        mask[vocab_size:] = -math.inf
        self.register_buffer(
            "padding_mask", mask if padded > vocab_size else None, persistent=False
        )
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, parameter in self.named_parameters():
            # the residual stream sums 2 * n_layer of these (GPT-2, section 2.3)
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """Next-token loss, or logits without targets.

        Args:
            tokens: int64 [B, T], T <= block_size.
            targets: int64 [B, T]; -100 is not scored.
            reduction: `mean` (over scored targets), `sum` or `none`, as in `F.cross_entropy`.

        Returns:
            Cross-entropy in nats: fp32 scalar, or [B, T] with reduction `none`. Logits: [B, T,
            vocab_size].
        """
        # [T]; causal
        positions = torch.arange(tokens.size(1), device=tokens.device)
        mask = None
        if self.config.document_mask:
            positions, mask = self._within_documents(tokens)
        x = self.embed(tokens, F.pad(tokens[:, :-1], (1, 0)), positions)  # [B, T, C]
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.bfloat16:
            x = x.bfloat16()  # the residual stream, as with sharded weights: half the bytes
        x = F.dropout(x, self.config.dropout, self.training)
        context = self.context(tokens, positions, mask)
        for layer, block in enumerate(self.h):
            if self.activation_checkpointing and self.training:
                x = checkpoint(block, x, context.of(layer), use_reentrant=False)
            else:
                x = block(x, context.of(layer))
        if targets is None:
            return self.head(x)[..., : self.vocab_size]
        return self.loss(x, targets, reduction)

    def loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """The loss of hidden states [B, T, C], as `forward` returns it."""
        rows = self.ln_f(x).flatten(0, 1)
        goals = targets.flatten()
        weight = self.head_weight
        in_fp8 = self.fp8_head and trains_in_bf16(rows, reduction)
        if in_fp8 or fuses_loss(rows, weight, reduction):
            in_one_pass = one_pass_loss
            if in_fp8:
                in_one_pass = fp8_loss
            else:
                weight = in_half(weight, self.half_head)
            loss = in_one_pass(rows, weight, goals, self.vocab_size, self.soft_cap)
            return loss / (goals >= 0).sum() if reduction == "mean" else loss

        def score(rows: Tensor, goals: Tensor, kind: str) -> Tensor:
            return F.cross_entropy(self._logits(rows), goals, reduction=kind)

        chunk = loss_chunk(rows)
        if chunk and len(rows) > chunk:  # the backward pass computes each chunk's logits again
            chunks = zip(rows.split(chunk), goals.split(chunk), strict=True)
            again = partial(checkpoint, score, use_reentrant=False, preserve_rng_state=False)
            loss = torch.cat([again(*chunk, "none") for chunk in chunks])
            if reduction != "none":
                loss = loss.sum() / ((goals >= 0).sum() if reduction == "mean" else 1)
        else:
            loss = score(rows, goals, reduction)
        return loss.view_as(targets) if reduction == "none" else loss

    def compile_blocks(self) -> None:
        """Compiles each block, and the head with the loss, in place. So DDP all-reduces a block's
        gradients during the backward pass of the blocks below."""
        for block in self.h:
            block.compile(dynamic=False)
        self.loss = torch.compile(self.loss, dynamic=False)
        self.compiles_blocks = True

    def context(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: "Tensor | BlockMask | None" = None,
        cache: Tensor | None = None,
    ) -> Context:
        """What the blocks know of tokens int64 [B, T] at positions [T] or [B, T]."""
        rotated = rotation(self.config, positions) if self.wpe is None else None
        return Context(rotated, mask, cache, [table(tokens) for table in self.values])

    def embed(self, tokens: Tensor, before: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, T, C] of tokens int64 [B, T] at positions [T] or [B, T]. Some
        architectures add those of pairs with the tokens `before` [B, T], which do not count at
        position 0. Without positions, an embedding of zeros (transformers' for `pad_token_id`) has
        no gradient: that of RMSNorm would be in the thousands."""
        if self.wpe is None:
            x = self.wte(tokens)
            x = torch.where(x.any(-1, keepdim=True), x, x.detach())
        else:  # [T]: the first ones, whose gradient needs no gather
            learned = (
                self.wpe.weight[: tokens.size(1)] if positions.dim() == 1 else self.wpe(positions)
            )
            x = self.wte(tokens) + learned
        if self.pairs is not None:
            pairs = (positions > 0) * (PAIR_HASH * before + tokens) % self.pairs.num_embeddings
            x = x + F.dropout(self.pairs(pairs), PAIR_DROPOUT, self.training)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def _within_documents(self, tokens: Tensor) -> "tuple[Tensor, Tensor | BlockMask]":
        """Positions within documents, int64 [B, T], and the causal mask within each: bool [B, 1, T,
        T] or its blocks. A document begins with end-of-text. Tokens before a window's first one
        belong to a document that began earlier."""
        assert self.eot is not None, "a document mask needs the id of end-of-text"
        begins = tokens == self.eot
        index = torch.arange(tokens.size(1), device=tokens.device)
        positions = index - (begins * index).cummax(dim=1).values
        document = begins.cumsum(dim=1)  # [B, T], index in the window
        if self._masks_blocks(tokens):
            return positions, document_blocks(document)
        mask = (document[:, None, :, None] == document[:, None, None, :]) & (
            index[:, None] >= index
        )
        return positions, mask

    def _masks_blocks(self, tokens: Tensor) -> bool:
        """Whether the attention mask of int64 [B, T] is one of blocks: in compiled training without
        dropout of attention weights."""
        is_whole = tokens.size(1) % MASK_BLOCK == 0 and not self.activation_checkpointing
        drops = self.training and self.config.weights_dropout
        is_compiling = torch.compiler.is_compiling() and not drops
        return tokens.device.type in BLOCK_MASKS_ON and is_compiling and is_whole

    def _logits(self, x: Tensor) -> Tensor:
        """Head without its norm: [..., C] -> [..., V]."""
        weight = in_half(self.head_weight, self.half_head)
        bias = self.padding_mask
        if self.soft_cap is None:
            return F.linear(x, weight, bias)
        share = torch.tanh(F.linear(x / self.soft_cap, weight).float())
        return torch.add(share.new_zeros(()) if bias is None else bias, share, alpha=self.soft_cap)

    @property
    def head_weight(self) -> Tensor:
        """The weight [V, C] of the head, which may be the embedding's."""
        return (self.lm_head or self.wte).weight

    def head(self, x: Tensor) -> Tensor:
        """Final norm and head: [..., C] -> logits [..., V], -inf in the padding."""
        return self._logits(self.ln_f(x))

    def parameter_roles(self) -> dict[Tensor, Role]:
        """The head's role, which may be the embedding."""
        return {self.head_weight: "head"}

    def num_parameters(self) -> int:
        """Parameters of matrix products and norms, without embeddings that are only looked up
        (nanoGPT's count): 123.7M for GPT-2 (124M), with padding."""
        return sum(
            parameter.numel() for parameter, role in roles(self).items() if role != "embedding"
        )

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6·N + 12·L·H·Q·T (PaLM, appendix B;
        nanoGPT's N). Masked attention counts in full."""
        config = self.config
        return 6 * self.num_parameters() + 12 * config.n_layer * config.n_embd * config.block_size


def count_parameters(config: ModelConfig, vocab_size: int) -> int:
    """Parameters of a `GPT`, without making it: each layer adds equally many."""
    with torch.device("meta"), without_init():
        models = [
            GPT(config.model_copy(update={"n_layer": layers}), vocab_size) for layers in (1, 2)
        ]
    one, two = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    return one + (config.n_layer - 1) * (two - one)


class without_init(TorchFunctionMode):
    """Context in which modules are made without initial weights, which are loaded or received
    afterwards. It saves 1.4 s of CPU time for GPT-2 (124M)."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Skips calls of `torch.nn.init`."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
