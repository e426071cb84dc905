"""The schedule, the parameter groups, and the guard against gradients that are not finite."""

import math
from collections.abc import Callable

import pytest
import torch

from gpt2_ddp.config.jobs import JobOptimConfig
from gpt2_ddp.config.training import ModelConfig, OptimConfig
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import RunningStatistics, StepGuard, build_optimizer, lr_at
from gpt2_ddp.tasks.supervised import build_job_optimizer

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


def optimizers() -> dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]:
    """Those that read `found_inf`, and some that do not."""
    return {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
        "adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
        "sgd": lambda parameters: build_job_optimizer(_Holds(parameters), JobOptimConfig(momentum=0.9), 0.1),
        "plain adamw": lambda parameters: torch.optim.AdamW(parameters, fused=False),
        "plain sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        "muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2]),
    }


class _Holds(torch.nn.Module):
    def __init__(self, parameters: list[torch.nn.Parameter]):
        super().__init__()
        self.all = torch.nn.ParameterList(parameters)


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
def test_a_gradient_that_is_not_finite_changes_nothing(name, bad, first):
    """Parameters, moments, step counts are as before, in a first step too; then it goes on as if nothing had been."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.Linear(6, 8)]
    layers[1].load_state_dict(layers[0].state_dict())
    made = [optimizers()[name](list(layer.parameters())) for layer in layers]
    guards = [StepGuard(optimizer) for optimizer in made]

    def step(which: int, number: int, poison: bool = False) -> float:
        layer, optimizer = layers[which], made[which]
        torch.manual_seed(number)
        (layer(torch.randn(4, 6)) ** 2).sum().backward()
        if poison:
            layer.weight.grad[3, 3] = bad
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        flag = guards[which].judge(norm)
        optimizer.step()
        layer.zero_grad()
        return flag.item()

    if not first:
        assert step(0, 1) == step(1, 1) == 0
    before = [p.detach().clone() for p in layers[1].parameters()]
    assert step(1, 2, poison=True) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, layers[1].parameters(), strict=True))
    for number in (3, 4):
        assert step(0, number) == step(1, number) == 0
    for a, b in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(a, b)
        for kind in made[0].state.get(a, {}):
            assert torch.equal(made[0].state[a][kind], made[1].state[b][kind]), kind


@pytest.mark.parametrize("name", ["adamw", "sgd", "plain sgd"])
def test_under_a_loss_scaler_a_norm_that_overflows_skips_too(name):
    """Each gradient is finite, so the scaler finds nothing; the norm of all of them is not."""
    layer = torch.nn.Linear(6, 8)
    optimizer = optimizers()[name](list(layer.parameters()))
    guard, scaler = StepGuard(optimizer), torch.amp.GradScaler("cpu", init_scale=1.0)

    def step(size: float) -> float:
        scaler.scale((layer(torch.ones(4, 6)) * size).sum()).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.get_total_norm([p.grad for p in layer.parameters()])
        assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
        flag = guard.judge(norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return flag.item()

    assert step(1e-3) == 0
    before = [p.detach().clone() for p in layer.parameters()]
    assert step(1e30) == 1
    assert all(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))
    assert step(1e-3) == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, layer.parameters(), strict=True))


def test_the_search_for_a_scale_is_not_bad():
    """An overflow is left out; bad it is only where the scale cannot be lowered. A large norm always is."""
    layer = torch.nn.Linear(2, 2)
    guard = StepGuard(torch.optim.AdamW(layer.parameters(), fused=True), norm_sigmas=3.0)
    norms = RunningStatistics(torch.device("cpu"), [50.0, 1.0, 0.01])
    for norm, scale, skipped, bad in (
        (math.inf, 2.0**16, 1, 0),
        (math.inf, 1.0, 1, 1),
        (9.0, 2.0**16, 1, 1),
        (1.0, 8.0, 0, 0),
    ):
        assert guard.judge(torch.tensor(norm), norms, torch.tensor(scale)).item() == skipped
        assert guard.bad.item() == bad
    assert norms.values[0] == 51
