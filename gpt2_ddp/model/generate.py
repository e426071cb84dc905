"""Text generation: batches of rows and a cache of keys and values. A sample depends only on its
seed and row."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.model.gpt import GPT

BATCH_ROWS = 32
"""Rows decoded at once, at most. Bounds the cache's memory: 75 MB a row for GPT-2 (124M) at its
full context."""


class Sampling(NamedTuple):
    """Length of the samples, and the distribution that their tokens are drawn from: fields of
    `GenerateConfig`.

    Attributes:
        top_p: as by Holtzman et al. (2020).
        seed: seeds the numbers of a row, together with its index. Global generators stay as they
            are.
    """

    max_new_tokens: int = 256
    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float = 1.0
    seed: int = 0


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    eot: int,
    sampling: Sampling,
    poll: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Continues each prompt: its row, and a new token; a row's tokens do not depend on the other
    rows.

    The rows of a batch have equal lengths: a row whose prompt is longer than the shortest takes its
    next token from there. At the model's context, the last half of each row is encoded again:
    positions are learned, so a cache cannot be shifted. So each token sees at least block_size / 2
    tokens.

    Args:
        model: on any device; its training mode is restored afterwards.
        prompts: token ids of one document. An empty prompt is its start. A long one loses its
            beginning.
        eot: the end-of-text token, which ends a row, and is left out.
        poll: called before each token; its exceptions end the generation.
    """
    training = model.training
    model.eval()
    try:
        for first in range(0, len(prompts), BATCH_ROWS):
            batch = prompts[first : first + BATCH_ROWS]
            draws = [
                np.random.default_rng([sampling.seed, first + row]) for row in range(len(batch))
            ]
            for row, token in _continue(model, batch, eot, sampling, draws, poll):
                yield first + row, token
    finally:
        model.train(training)


def _continue(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    eot: int,
    sampling: Sampling,
    draws: Sequence[np.random.Generator],
    poll: Callable[[], None],
) -> Iterator[tuple[int, int]]:
    """Rows and new tokens of a batch. `draws`: the random numbers of each row."""
    size = model.config.block_size
    device = model.wte.weight.device
    given = [([*prompt] or [eot])[-size:] for prompt in prompts]
    shortest = min(map(len, given))
    rows = torch.tensor([prompt[:shortest] for prompt in given], device=device)  # [B, n]
    prompted = [iter(prompt[shortest:]) for prompt in given]
    left = [sampling.max_new_tokens] * len(given)
    longest = max(map(len, given)) + sampling.max_new_tokens
    cache = empty_cache(model, len(given), min(longest, size))
    while any(left):
        poll()
        if rows.size(1) > size:
            rows = rows[:, -max(size // 2, 1) :]
            cache.fill_(math.nan)
        given_tokens = [next(tokens, None) for tokens in prompted]  # None: the prompt is over
        numbers = [
            draw.random(dtype=np.float32) if token is None else 0.0
            for draw, token in zip(draws, given_tokens, strict=True)
        ]
        logits = next_logits(model, rows, cache)
        drawn = sample(logits, torch.tensor(numbers, device=device), sampling).tolist()
        tokens = [
            new if token is None else token for new, token in zip(drawn, given_tokens, strict=True)
        ]
        rows = torch.cat((rows, torch.tensor(tokens, device=device)[:, None]), dim=1)
        for row, token in enumerate(tokens):
            if given_tokens[row] is None and left[row]:
                if token == eot:
                    left[row] = 0
                else:
                    left[row] -= 1
                    yield row, token


def empty_cache(model: GPT, rows: int, length: int) -> Tensor:
    """The cache of a `Context` for so many rows and tokens: NaN, until the layers write to it."""
    config = model.config
    shape = config.n_layer, 2, rows, config.key_heads, length, config.n_embd // config.n_head
    return model.wte.weight.new_full(shape, math.nan)


def next_logits(model: GPT, rows: Tensor, cache: Tensor) -> Tensor:
    """Logits [B, V] of the token after each row, int64 [B, n]; n up to block_size. The cache is
    empty, or has all tokens but the last. It is filled again if attention of one's own leaves out a
    layer."""
    cache = cache[..., : rows.size(1), :]
    begin = 0 if cache[..., 0, 0].isnan().any() else rows.size(1) - 1
    tokens = rows[:, begin:]
    before = F.pad(rows, (1, 0))[:, begin:-1]
    positions = torch.arange(begin, rows.size(1), device=rows.device)[None]  # [1, t]
    x = model.embed(tokens, before, positions)
    context = model.context(tokens, positions, cache=cache)
    for layer, block in enumerate(model.h):
        # not compiled, as shapes change with each token
        x = block.forward(x, context.of(layer))
    return model.head(x[:, -1])


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """One token per row, int64 [B], drawn from logits [B, V] by inverting their cumulative
    distribution at `uniform`, numbers in [0, 1) [B]. Temperature, top_k and top_p apply in this
    order."""
    _, temperature, top_k, top_p, _ = sampling
    if temperature == 0:
        return logits.argmax(dim=-1)
    # [B, k], likeliest first
    top, ids = logits.float().topk(min(top_k or logits.size(-1), logits.size(-1)))
    # below, fp32 would divide 0 by 0
    share = ((top - top[:, :1]) / max(temperature, 1e-30)).softmax(dim=-1)
    total = share.cumsum(dim=-1)
    # [B, 1]: tokens until top_p is reached
    nucleus = (total - share < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    target = uniform[:, None] * total.gather(1, nucleus - 1)
    # rounding may reach the end
    choice = torch.minimum((total <= target).sum(dim=-1, keepdim=True), nucleus - 1)
    return ids.gather(1, choice)[:, 0]


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    poll: Callable[[], None] = lambda: None,
) -> list[str]:
    """Each prompt and its continuation as one text. Raises: UserError as `Tokenizer.encode`."""
    rows = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    for row, token in generate(model, [*map(tuple, rows)], tokenizer.eot, sampling, poll):
        rows[row].append(token)
    return [*map(tokenizer.decode, rows)]
