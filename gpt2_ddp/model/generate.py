"""Text generation: ragged batches and a KV cache. A sample depends only on its seed and row."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.model.gpt import GPT

BATCH_ROWS = 32
"""Rows decoded at once, at most. Bounds the cache's memory: 75 MB a row for GPT-2 (124M) at its full context."""


class KVCache:
    """Keys and values of the tokens decoded so far; slot s of a row belongs to its position s.

    Rows may differ in length. Padding comes after a row's last token: the causal mask hides it until tokens
    overwrite it. There are `rows` (B) of `length` slots, at most block_size.
    """

    def __init__(self, model: GPT, rows: int, length: int):
        config, weight = model.config, model.wte.weight
        shape = (config.n_layer, rows, config.key_heads, length, config.n_embd // config.n_head)
        # zeros: masked values are multiplied by 0, and 0 * NaN is NaN
        self.keys = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
        self.values = torch.zeros_like(self.keys)
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=weight.device)
        self.extended = 0  # layers, by the last tokens

    @property
    def is_complete(self) -> bool:
        """Whether all layers have extended it. The attention of a model of one's own may do without a cache."""
        return self.extended == len(self.keys)

    def place(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Sets the next tokens and their positions, int64 [B, t], for all layers. Returns the token before each."""
        self.extended = 0
        self.tokens.scatter_(1, positions, tokens)
        end = int(positions.max()) + 1
        self.slots = positions[:, None, :, None].expand(-1, self.keys.size(2), -1, self.keys.size(4))  # [B, H, t, Q]
        self.mask = torch.arange(end, device=positions.device) <= positions[:, None, :, None]  # [B, 1, t, end]
        return self.tokens.gather(1, (positions - 1).clamp(min=0))

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores [B, H, t, Q]. Returns keys and values [B, H, end, Q], and the attention mask [B, 1, t, end]."""
        self.extended += 1
        keys, values = self.keys[layer].scatter_(2, self.slots, key), self.values[layer].scatter_(2, self.slots, value)
        end = self.mask.size(-1)
        return keys[:, :, :end], values[:, :, :end], self.mask


def decode(model: GPT, tokens: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    """Hidden states [B, t, C], for `GPT.head`, of tokens int64 [B, t] that continue the cache; extends the cache. Their
    positions in the rows are int64 [B, t]; all earlier slots have to be filled. A row is one document, for a model with
    a document mask."""
    x = model.embed(tokens, cache.place(tokens, positions), positions)  # [B, t, C]
    context = model.context(tokens, positions, cache=cache)
    for block in model.h:
        x = block.forward(x, context)  # not compiled, as shapes change with each token
    return x


class Sampling(NamedTuple):
    """Length of the samples, and the distribution that their tokens are drawn from: fields of `GenerateConfig`. `top_p`
    is that of Holtzman et al. (2020). `seed` and a row's index seed its numbers; global generators stay as they are."""

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
    heard: Callable[[int, int], None] = lambda row, token: None,
) -> list[list[int]]:
    """Continues each prompt; a row's result does not depend on the other rows.

    When a row reaches the model's context, its last half is encoded again: positions are learned, so a cache cannot
    be shifted. So each token sees at least block_size / 2 tokens.

    Args:
        model: on any device; its training mode is restored afterwards.
        prompts: token ids. An empty prompt is the start of a document. A long one loses its beginning. A model with a
            document mask sees the last document of each.
        eot: the end-of-text token, which ends a row.
        poll: called before each token; its exceptions end the generation. heard: called with each row and new token.

    Returns:
        The new tokens of each row, without end-of-text.
    """
    training, shape = model.training, (sampling.max_new_tokens, np.float32)
    results: list[list[int]] = [[] for _ in prompts]
    model.eval()
    try:
        for first in range(0, len(prompts), BATCH_ROWS):
            batch = [list(prompt) or [eot] for prompt in prompts[first : first + BATCH_ROWS]]
            seeds = [[sampling.seed, first + row] for row in range(len(batch))]
            uniform = np.stack([np.random.default_rng(seed).random(*shape) for seed in seeds])
            uniform = torch.from_numpy(uniform).to(model.wte.weight.device)
            for row, token in _continue(model, batch, eot, sampling, uniform, poll):
                results[first + row].append(token)
                heard(first + row, token)
        return results
    finally:
        model.train(training)


def _continue(
    model: GPT,
    prompts: list[list[int]],
    eot: int,
    sampling: Sampling,
    uniform: Tensor,
    poll: Callable[[], None],
) -> Iterator[tuple[int, int]]:
    """Rows and new tokens of a batch of non-empty prompts. `uniform`: a number in [0, 1) for each token of each row."""
    block_size = model.config.block_size
    begins = model.eot if model.config.document_mask else None  # first token of a document, whose past is masked
    windows = [last_document(prompt, begins)[-block_size:] for prompt in prompts]  # context of each row
    cache = KVCache(model, len(windows), min(max(map(len, windows)) + sampling.max_new_tokens, block_size))
    running = set(range(len(windows)))
    for numbers in uniform.unbind(1):
        poll()
        full = [row for row, window in enumerate(windows) if len(window) > block_size]
        for row in full:
            windows[row] = windows[row][-max(block_size // 2, 1) :]
        logits = next_logits(model, windows, cache, refill=bool(full) or not cache.is_complete)
        for row, token in enumerate(sample(logits, numbers, sampling).tolist()):
            if token == eot:
                running.discard(row)
            elif row in running:
                if token == begins:
                    windows[row].clear()
                windows[row].append(token)
                yield row, token
        if not running:
            break


def last_document(tokens: list[int], begins: int | None) -> list[int]:
    """The tokens from the last `begins` on; all tokens without one."""
    return tokens[max((place for place, token in enumerate(tokens) if token == begins), default=0) :]


def next_logits(model: GPT, windows: list[list[int]], cache: KVCache, refill: bool) -> Tensor:
    """Logits [B, V] of the token after each window (1 to block_size ids).

    With `refill` the windows are encoded from their beginning; otherwise the cache holds all but their last tokens.
    The last token of a finished row is encoded again, in the same slot.
    """
    device = model.wte.weight.device
    last = torch.tensor([len(window) - 1 for window in windows], device=device)  # [B]
    if not refill:
        tokens = torch.tensor([window[-1:] for window in windows], device=device)  # [B, 1]
        return model.head(decode(model, tokens, last[:, None], cache)[:, 0])
    longest = max(map(len, windows))
    padded = torch.tensor([window + [0] * (longest - len(window)) for window in windows], device=device)  # [B, longest]
    x = decode(model, padded, torch.arange(longest, device=device).expand_as(padded), cache)  # [B, longest, C]
    return model.head(x[torch.arange(len(windows), device=device), last])


def sample(logits: Tensor, uniform: Tensor, sampling: Sampling) -> Tensor:
    """One token per row, int64 [B], drawn from logits [B, V] by inverting their cumulative distribution at `uniform`,
    numbers in [0, 1) [B]. Temperature, top_k and top_p apply in this order."""
    _, temperature, top_k, top_p, _ = sampling
    if temperature == 0:
        return logits.argmax(dim=-1)
    top, ids = logits.float().topk(min(top_k or logits.size(-1), logits.size(-1)))  # [B, k], likeliest first
    share = ((top - top[:, :1]) / max(temperature, 1e-30)).softmax(dim=-1)  # below, fp32 would divide 0 by 0
    total = share.cumsum(dim=-1)
    nucleus = (total - share < top_p).sum(dim=-1, keepdim=True).clamp(min=1)  # [B, 1]: tokens until top_p is reached
    target = uniform[:, None] * total.gather(1, nucleus - 1)
    choice = torch.minimum((total <= target).sum(dim=-1, keepdim=True), nucleus - 1)  # rounding may reach the end
    return ids.gather(1, choice)[:, 0]


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    sampling: Sampling,
    poll: Callable[[], None] = lambda: None,
) -> list[str]:
    """Each prompt and its continuation as one text. Raises: UserError as `Tokenizer.encode`."""
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    new = generate(model, ids, tokenizer.eot, sampling, poll)
    return [tokenizer.decode(prompt + more) for prompt, more in zip(ids, new, strict=True)]
