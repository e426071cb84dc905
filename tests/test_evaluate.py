"""Evaluation: every target once, whatever the ranks and the batch."""

import math

import numpy as np
import pytest
import torch
from ranks import run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.data.shards import TokenStream, read_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.model.evaluate import Evaluation
from gpt2_ddp.model.gpt import GPT

SHAPE = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=48)


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(SHAPE, 512)


def score(corpus, batch_size: int, tokens: int | None = None, limit: int | None = None) -> tuple[float, int, int]:
    """Evaluates on this rank; `limit` cuts the stream's length, for splits with fewer batches than ranks."""
    from gpt2_ddp.model.evaluate import evaluate
    from gpt2_ddp.processes.launch import build_accelerator

    class Cut(TokenStream):
        def __len__(self) -> int:
            return limit or super().__len__()

    accelerator = build_accelerator("cpu", "no")
    stream = Cut(corpus, read_manifest(corpus), "val")
    token_bytes = load_tokenizer(str(corpus / "tokenizer.json")).token_bytes()
    prepared = accelerator.prepare_model(model(), evaluation_mode=True)
    result = evaluate(accelerator, prepared, stream, SHAPE.block_size, batch_size, tokens, token_bytes)
    return result.nll, result.tokens, result.bytes


def by_hand(corpus) -> tuple[float, int, int]:
    """One sequence at a time, in fp64 sums; the tail alone."""
    stream = TokenStream(corpus, read_manifest(corpus), "val")
    tokens = torch.from_numpy(stream.read(np.array([0]), len(stream))[0].astype(np.int64))
    scorer, nll, count = model().eval(), 0.0, 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, SHAPE.block_size):
            row = tokens[start : start + SHAPE.block_size + 1]
            logits = scorer(row[None, :-1]).double()
            nll += torch.nn.functional.cross_entropy(logits[0], row[1:], reduction="sum").item()
            count += len(row) - 1
    text = load_tokenizer(str(corpus / "tokenizer.json")).decode(tokens[tokens != read_manifest(corpus).eot].tolist())
    return nll, count, len(text.encode())


def test_every_target_once_for_all_ranks_and_batches(corpus):
    expected_nll, expected_tokens, expected_bytes = by_hand(corpus)
    assert expected_tokens == read_manifest(corpus).tokens("val") - 1
    assert expected_tokens % SHAPE.block_size, "the corpus should have a tail"
    found = []
    for world, batch_size in ((1, 1), (1, 7), (1, 64), (2, 1), (2, 5), (3, 4), (3, 16)):
        for nll, tokens, spelled in run_ranks(score, world, corpus, batch_size):
            assert (tokens, spelled) == (expected_tokens, expected_bytes)
            found.append(nll / tokens)
    assert max(found) - min(found) <= 1e-9 * min(found)
    assert found[0] == pytest.approx(expected_nll / expected_tokens, rel=1e-6)


@pytest.mark.parametrize("limit", [2, 48, 49, 50, 97])
def test_ranks_without_batches_do_not_hang(corpus, limit):
    results = run_ranks(score, 3, corpus, 4, None, limit, timeout=60)
    assert {tokens for _, tokens, _ in results} == {limit - 1}
    assert len({nll for nll, _, _ in results}) == 1


def test_a_part_is_spread_over_the_split(corpus):
    from gpt2_ddp.model.evaluate import _chosen_windows

    assert _chosen_windows(1000 * 10 + 1, 10, 100).tolist() == [0, 100, 200, 300, 400, 500, 600, 700, 800, 900]
    assert _chosen_windows(25, 10, None).tolist() == [0, 1, 2]
    assert _chosen_windows(25, 10, 24).tolist() == [0, 1, 2]
    assert _chosen_windows(25, 10, 11).tolist() == [0, 1]
    assert _chosen_windows(5, 10, 2).tolist() == [0]
    ((_, tokens, _),) = run_ranks(score, 1, corpus, 4, 480)
    assert tokens == 480


def test_derived_numbers():
    result = Evaluation(nll=200.0, tokens=100, bytes=300)
    assert result.loss == 2.0
    assert result.perplexity == pytest.approx(math.e**2)
    assert result.bits_per_byte == pytest.approx(200 / math.log(2) / 300)
    assert math.isnan(Evaluation(1.0, 1, 0).bits_per_byte)
