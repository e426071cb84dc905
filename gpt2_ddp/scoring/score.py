"""Log-likelihoods of a task's continuations: each scored exactly once, and the same for any number of ranks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm

from gpt2_ddp.distributed.ranks import sum_over_ranks
from gpt2_ddp.model.evaluate import IGNORED
from gpt2_ddp.scoring.items import Request


class Answers(NamedTuple):
    """Of each request: its log-likelihood in nats, fp64 [n]; whether greedy decoding would write it, bool [n]."""

    log_likelihoods: np.ndarray
    greedy: np.ndarray


@torch.no_grad()
def answer(
    accelerator: Accelerator,
    model: nn.Module,
    requests: Sequence[Request],
    batch_size: int,
    length: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Answers:
    """Scores all requests, the longest first.

    Batches do not depend on the number of ranks: batch j is rank j mod W's. Short ones are padded with rows that are
    not scored. The softmax is in fp32 over the tokenizer's ids alone, sums are in fp64. Results are gathered once.

    Args:
        model: prepared or plain, on the accelerator's device; `model(x)` -> logits [B, T, vocab_size].
        batch_size: requests per forward pass and rank.
        length: of every row, for a compiled model; None: that of the longest in its batch.
        poll: called before each batch, by all ranks equally often; what it raises ends the scoring.
    """
    order = sorted(range(len(requests)), key=lambda index: -len(requests[index].tokens))
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    found = np.zeros((3, len(requests)))  # log-likelihood, whether greedy, how often scored
    was_training = model.training
    model.eval()
    hidden = None if accelerator.is_main_process else True  # None: where there is no terminal
    of_ranks = range(0, len(batches), accelerator.num_processes)
    try:
        for first in tqdm(of_ranks, "scoring", unit="batch", leave=False, delay=2, disable=hidden):
            poll()
            if first + accelerator.process_index < len(batches):
                batch = batches[first + accelerator.process_index]
                chosen = [requests[index] for index in batch]
                x, y = _rows(chosen, batch_size, length)
                x, y = x.to(accelerator.device), y.to(accelerator.device)
                scored = y != IGNORED
                log_probabilities = torch.log_softmax(model(x)[scored].float(), dim=-1)  # [scored, V]
                best, targets = log_probabilities.argmax(-1), y[scored]
                nats = log_probabilities.gather(-1, targets[:, None])[:, 0].cpu().double().numpy()
                ends = np.cumsum([request.scored for request in chosen])
                begins = np.concatenate([[0], ends[:-1]])
                found[0, batch] = np.add.reduceat(nats, begins)
                found[1, batch] = np.logical_and.reduceat((best == targets).cpu().numpy(), begins)
                found[2, batch] += 1
    finally:
        model.train(was_training)
    if accelerator.num_processes > 1:
        found = sum_over_ranks(accelerator, torch.from_numpy(found).to(accelerator.device)).cpu().numpy()
    assert (found[2] == 1).all(), "each request is scored once"
    return Answers(found[0], found[1] == 1)


def _rows(requests: Sequence[Request], rows: int, length: int | None) -> tuple[Tensor, Tensor]:
    """Inputs and targets int64 [rows, length]; IGNORED where there is nothing to score."""
    width = length or max(len(request.tokens) for request in requests) - 1
    x, y = torch.zeros(rows, width, dtype=torch.int64), torch.full((rows, width), IGNORED)
    for row, (tokens, scored) in enumerate(requests):
        end = len(tokens) - 1
        x[row, :end] = torch.tensor(tokens[:-1])
        y[row, end - scored : end] = torch.tensor(tokens[-scored:])
    return x, y
