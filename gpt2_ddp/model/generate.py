"""Text from a model: ragged batches, a KV cache, and samples that depend on nothing but their seed and row."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gpt2_ddp.data.tokenizer import Tokenizer
from gpt2_ddp.model.gpt import GPT, KVCache

BATCH_ROWS = 32
"""Rows decoded at once, at most: bounds the cache's memory (75 MB a row for GPT-2 124M at its full context)."""


@torch.inference_mode()
def generate(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eot: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    top_p: float = 1.0,
    seed: int = 0,
    poll: Callable[[], None] = lambda: None,
    heard: Callable[[int, int], None] = lambda row, token: None,
) -> list[list[int]]:
    """Continues each prompt; a row's result does not depend on the other rows.

    A row that outgrows the model's context goes on from the last half of it, encoded anew: positions are learned, so a
    cache cannot be shifted. This happens once in block_size / 2 tokens, and each token sees at least as many.

    Args:
        model: on any device; its training mode is restored afterwards.
        prompts: token ids; an empty prompt is the start of a document, a too long one loses its beginning. A model with
            a document mask sees the last document of each.
        max_new_tokens: tokens to add to each prompt, at most.
        eot: the end-of-text token, which ends a row.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens; None: all.
        top_p: sample among the likeliest tokens that hold this share of the probability (Holtzman et al., 2020).
        seed: with the row's index, fixes its random numbers; global generators are neither read nor changed.
        poll: called for each token; what it raises ends the generation.
        heard: is given each row's new tokens as they come.

    Returns:
        The new tokens of each row, end-of-text left out.
    """
    draw = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)
    training = model.training
    model.eval()
    try:
        results = []
        for first in range(0, len(prompts), BATCH_ROWS):
            batch = [list(prompt) or [eot] for prompt in prompts[first : first + BATCH_ROWS]]
            rows = range(first, first + len(batch))
            uniform = np.stack([np.random.default_rng([seed, row]).random(max_new_tokens, np.float32) for row in rows])
            uniform = torch.from_numpy(uniform).to(model.wte.weight.device)
            hear = lambda row, token, first=first: heard(first + row, token)  # noqa: E731
            results += _continue(model, batch, eot, uniform, draw, poll, hear)
        return results
    finally:
        model.train(training)


def _continue(
    model: GPT,
    prompts: list[list[int]],
    eot: int,
    uniform: Tensor,
    draw: Callable[[Tensor, Tensor], Tensor],
    poll: Callable[[], None],
    heard: Callable[[int, int], None],
) -> list[list[int]]:
    """`generate` for one batch of non-empty prompts; `uniform` holds its random numbers [B, max_new_tokens]."""
    block_size, steps = model.config.block_size, uniform.size(1)
    begins = model.eot if model.config.document_mask else None  # a document, which sees nothing before it
    windows = [last_document(prompt, begins)[-block_size:] for prompt in prompts]  # what each row sees
    cache = KVCache(model, len(windows), min(max(map(len, windows)) + steps, block_size))
    results: list[list[int]] = [[] for _ in windows]
    running = set(range(len(windows)))
    for step in range(steps):
        poll()
        full = [row for row, window in enumerate(windows) if len(window) > block_size]
        for row in full:
            windows[row] = windows[row][-max(block_size // 2, 1) :]
        logits = next_logits(model, windows, cache, refill=step == 0 or bool(full))
        for row, token in enumerate(draw(logits, uniform[:, step]).tolist()):
            if token == eot:
                running.discard(row)
            elif row in running:
                results[row].append(token)
                if token == begins:
                    windows[row].clear()
                windows[row].append(token)
                heard(row, token)
        if not running:
            break
    return results


def last_document(tokens: list[int], begins: int | None) -> list[int]:
    """The tokens from the last `begins` on; all of them where there is none."""
    return tokens[max((place for place, token in enumerate(tokens) if token == begins), default=0) :]


def next_logits(model: GPT, windows: list[list[int]], cache: KVCache, refill: bool) -> Tensor:
    """Logits [B, V] of the token after each window (1 to block_size ids).

    With `refill` the windows are encoded from their beginning; otherwise the cache holds all but their last tokens.
    A finished row's last token is simply encoded again, in the same place.
    """
    device = model.wte.weight.device
    last = torch.tensor([len(window) - 1 for window in windows], device=device)  # [B]
    if not refill:
        tokens = torch.tensor([window[-1:] for window in windows], device=device)  # [B, 1]
        return model.head(model.decode(tokens, last[:, None], cache)[:, 0])
    longest = max(map(len, windows))
    padded = torch.tensor([window + [0] * (longest - len(window)) for window in windows], device=device)  # [B, longest]
    x = model.decode(padded, torch.arange(longest, device=device).expand_as(padded), cache)  # [B, longest, C]
    return model.head(x[torch.arange(len(windows), device=device), last])


def sample(logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float) -> Tensor:
    """Draws one token per row by inverting its cumulative distribution.

    Args:
        logits: [B, V].
        uniform: random numbers in [0, 1), one per row [B].
        temperature, top_k, top_p: as in `generate`, applied in this order.

    Returns:
        int64 [B].
    """
    if temperature == 0:
        return logits.argmax(dim=-1)
    top, ids = logits.float().topk(min(top_k or logits.size(-1), logits.size(-1)))  # [B, k], likeliest first
    share = ((top - top[:, :1]) / temperature).softmax(dim=-1)
    total = share.cumsum(dim=-1)
    nucleus = (total - share < top_p).sum(dim=-1, keepdim=True)  # [B, 1]: tokens until top_p is reached, at least one
    target = uniform[:, None] * total.gather(1, nucleus - 1)
    choice = torch.minimum((total <= target).sum(dim=-1, keepdim=True), nucleus - 1)  # rounding may reach the end
    return ids.gather(1, choice)[:, 0]


class TextStream:
    """Text out of tokens that come one by one: what ends in the middle of a character waits for the rest of it.

    Args:
        write: takes the pieces; together they are what all the tokens decode to at once.
    """

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]):
        self._tokenizer, self._write = tokenizer, write
        self._waiting: list[int] = []

    def add(self, token: int) -> None:
        """Writes the text of the tokens since the last piece, unless it ends in U+FFFD: half of a character."""
        self._waiting.append(token)
        if not self._tokenizer.decode(self._waiting).endswith("\N{REPLACEMENT CHARACTER}"):
            self.end()

    def end(self) -> None:
        """Writes what still waits."""
        self._write(self._tokenizer.decode(self._waiting))
        self._waiting = []


def sample_texts(
    model: GPT,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    seed: int,
    poll: Callable[[], None] = lambda: None,
) -> list[str]:
    """Each prompt and its continuation as one text, sampled as `generate` does by default."""
    ids = [tokenizer.encode(prompt).tolist() for prompt in prompts]
    new = generate(model, ids, max_new_tokens, tokenizer.eot, seed=seed, poll=poll)
    return [tokenizer.decode(prompt + more) for prompt, more in zip(ids, new, strict=True)]
