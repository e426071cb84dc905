"""Documents in a window of tokens: how far into its own each position stands, and that it sees nothing of another.

Shapes: B windows of T tokens. A document begins with the end-of-text token; what stands before a window's first one is
the rest of a document that began earlier.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

Mask = Tensor | BlockMask
"""What each position sees: bool, for scaled_dot_product_attention; or, for flex_attention, also in which blocks of
positions none sees any, so that these are not computed."""


def flex_is_there(tokens: Tensor, head_size: int, dropout: float) -> bool:
    """Whether flex_attention can be had: it is of use compiled alone, and has no dropout, and on CPUs no gradient."""
    return torch.compiler.is_compiling() and tokens.is_cuda and head_size >= 16 and not dropout


def within_documents(tokens: Tensor, eot: int, blocks: bool = False) -> tuple[Tensor, Mask]:
    """Positions that begin at 0 in each document, int64 [B, T], and a mask that is causal within each.

    Args:
        tokens: int64 [B, T].
        eot: the token that a document begins with.
        blocks: a BlockMask is wanted; otherwise bool [B, 1, T, T].
    """
    B, T = tokens.shape
    begins, index = tokens == eot, torch.arange(T, device=tokens.device)
    positions = index - (begins * index).cummax(dim=1).values
    document = begins.cumsum(dim=1)  # [B, T], its number in the window
    if blocks:

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (document[b, query] == document[b, key]) & (query >= key)

        return positions, create_block_mask(sees, B, None, T, T, device=tokens.device)
    return positions, (document[:, None, :, None] == document[:, None, None, :]) & (index[:, None] >= index)
