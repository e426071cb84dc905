"""Document mask: positions and attention masks that separate the documents of a window.

Shapes: B windows of T tokens. A document begins with end-of-text. Tokens before a window's first end-of-text belong to
a document that began earlier.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mask = Tensor | BlockMask
"""Attention mask: bool for scaled_dot_product_attention; BlockMask for flex_attention, which skips empty blocks."""


def flex_is_there(tokens: Tensor, head_size: int, dropout: float) -> bool:
    """Whether to use flex_attention: fast only if compiled; no dropout; no gradient on CPUs."""
    return torch.compiler.is_compiling() and tokens.is_cuda and head_size >= 16 and not dropout


def within_documents(tokens: Tensor, eot: int, blocks: bool = False) -> tuple[Tensor, Mask]:
    """Positions within each document, int64 [B, T], and the causal mask within each: a BlockMask with `blocks`, else
    bool [B, 1, T, T]. The tokens are int64 [B, T]; `eot` is the first one of a document."""
    B, T = tokens.shape
    begins, index = tokens == eot, torch.arange(T, device=tokens.device)
    positions = index - (begins * index).cummax(dim=1).values
    document = begins.cumsum(dim=1)  # [B, T], index in the window
    if blocks:

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (document[b, query] == document[b, key]) & (query >= key)

        return positions, create_block_mask(sees, B, None, T, T, device=tokens.device)
    return positions, (document[:, None, :, None] == document[:, None, None, :]) & (index[:, None] >= index)
