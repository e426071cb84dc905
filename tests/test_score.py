"""Log-likelihoods: each once and right, whatever the ranks, the batch and the padding."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.scoring import Request, answer
from gpt2_ddp.training.stop import Interrupted

ALONE: Any = SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0, is_main_process=True)
"""An accelerator."""
SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=48)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE, 500)  # 512 rows, of which 12 are padding


def made_requests(count: int) -> list[Request]:
    """Of many lengths, the longest of T + 1 tokens; every third is a copy of the one before. No token is 0."""
    draw = np.random.default_rng(3)
    requests = []
    for number in range(count):
        length = int(draw.integers(2, 50)) if number else 49
        tokens = draw.integers(1, 500, length).tolist()
        requests.append(requests[-1] if number % 3 == 2 else Request(tokens, int(draw.integers(1, length))))
    return requests


def score(cases: list[tuple[int, int, int | None]]) -> list[tuple[np.ndarray, np.ndarray, list[tuple[int, ...]]]]:
    """Answers on this rank for so many requests, by a batch size and a length, and all inputs that went through the
    model here, without their padding."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator, scorer, forward = build_accelerator("cpu", "no"), model().train(), GPT.forward
    found, seen = [], []

    def listening(self, tokens):
        assert not self.training
        seen.extend(tuple(row[: row.count_nonzero()].tolist()) for row in tokens)
        return forward(self, tokens)

    GPT.forward = listening  # pyright: ignore[reportAttributeAccessIssue]
    for count, batch_size, length in cases:
        found.append((*answer(accelerator, scorer, made_requests(count), batch_size, length), list(seen)))
        seen.clear()
        assert scorer.training
    return found


def by_hand(requests: list[Request]) -> list[float]:
    """One at a time, unpadded, the softmax in fp64 over the real ids."""
    scorer, nats = model().eval(), []
    with torch.no_grad():
        for tokens, scored in requests:
            logits = scorer(torch.tensor([tokens[:-1]]))[0, -scored:, :500].double()
            chosen = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[-scored:])[:, None])
            nats.append(chosen.sum().item())
    return nats


CASES = [(37, 4, None), (37, 5, None), (37, 4, SHAPE.block_size), (1, 2, None)]
"""37 requests divide by nothing here; one leaves other ranks without any."""


def test_each_is_scored_once_and_right_on_any_number_of_ranks():
    (alone,) = run_ranks(score, 1, CASES)
    for (count, _, _), (nats, greedy, _) in zip(CASES, alone, strict=True):
        assert nats == pytest.approx(by_hand(made_requests(count)), rel=1e-6)
        assert not greedy.any()
    for ranks in ([alone], run_ranks(score, 3, CASES)):
        for case, (count, batch_size, _) in enumerate(CASES):
            assert all(rank[case][0].tobytes() == alone[case][0].tobytes() for rank in ranks)
            rows = [row for rank in ranks for row in rank[case][2]]
            inputs = [tuple(request.tokens[:-1]) for request in made_requests(count)]
            assert sorted(row for row in rows if row) == sorted(inputs)
            assert len(rows) == -(-count // batch_size) * batch_size


def test_greedy_is_what_greedy_decoding_writes():
    scorer, tokens = model().eval(), [5]
    with torch.no_grad():
        while len(tokens) < 9:
            tokens.append(int(scorer(torch.tensor([tokens]))[0, -1].argmax()))
    other = [*tokens[:-1], (tokens[-1] + 1) % 500]
    requests = [Request(tokens, 8), Request(other, 8), Request(other[:-1], 3), Request([*tokens[:6], 1], 1)]
    assert answer(ALONE, scorer, requests, 3).greedy.tolist() == [True, False, True, False]


def test_a_stop_ends_it_and_the_model_is_left_as_it_was():
    polls = iter([None, None])

    def poll() -> None:
        if next(polls, "stop") == "stop":
            raise Interrupted

    scorer = model().train()
    with pytest.raises(Interrupted):
        answer(ALONE, scorer, made_requests(37), 4, poll=poll)
    assert scorer.training
