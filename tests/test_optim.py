"""The schedule, the parameter groups, and the guard against gradients that are not finite."""

import math

import pytest
import torch

from gpt2_ddp.config.training import ModelConfig, OptimConfig
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer, lr_at, skip_if_not_finite

TINY = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=4)


def test_cosine_schedule():
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=10, decay_steps=110)
    assert [lr_at(step, config) for step in (1, 5, 10)] == [0.1, 0.5, 1.0]
    assert lr_at(60, config) == pytest.approx(0.55)
    assert lr_at(35, config) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr_at(110, config) == lr_at(10_000, config) == pytest.approx(0.1)


def test_warmup_stable_decay():
    config = OptimConfig(schedule="wsd", lr=1.0, min_lr=0.0, warmup_steps=10, decay_steps=100, decay_fraction=0.2)
    assert lr_at(5, config) == 0.5
    assert {lr_at(step, config) for step in range(10, 81)} == {1.0}
    assert lr_at(90, config) == pytest.approx(0.5)
    assert lr_at(100, config) == lr_at(101, config) == 0.0


def test_constant_and_no_warmup():
    config = OptimConfig(schedule="constant", lr=1.0, warmup_steps=0)
    assert {lr_at(step, config) for step in (1, 10**6)} == {1.0}


def test_warmup_longer_than_the_run_ends_at_min_lr():
    config = OptimConfig.model_construct(lr=1.0, min_lr=0.1, warmup_steps=50, decay_steps=20, schedule="cosine")
    assert lr_at(20, config) == pytest.approx(0.4)
    assert lr_at(51, config) == pytest.approx(0.1)


def test_only_matrices_and_embeddings_decay():
    model = GPT(TINY, 100)
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.0 if "ln_" in name or name.endswith("bias") else 0.1), name
    assert len(decay) == len(list(model.parameters()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    model = GPT(TINY, 100)
    optimizer = build_optimizer(model, OptimConfig())

    def step(poison: bool) -> float:
        tokens = torch.arange(8).view(2, 4)
        model(tokens, tokens).backward()
        if poison:
            model.wte.weight.grad[3, 3] = bad
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        flag = skip_if_not_finite(optimizer, norm)
        optimizer.step()
        optimizer.zero_grad()
        return flag.item()

    def everything():
        state = [value.clone() for p in model.parameters() for value in optimizer.state[p].values()]
        return [p.detach().clone() for p in model.parameters()] + state

    assert step(poison=False) == 0
    before = everything()
    assert step(poison=True) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))  # Adam's step count, too
    assert step(poison=False) == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(), strict=True) if a.numel() > 8)
