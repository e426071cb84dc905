"""The schedule, the parameter groups, Muon, and an optimizer whose bad steps change nothing."""

import math
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from close import assert_close, float64
from commands import expect_error
from runs import same
from torch import nn

from gpt2_ddp.checkpoint.format import optimizer_state
from gpt2_ddp.checkpoint.loading import load_optimizer_state
from gpt2_ddp.config.jobs import JobOptimConfig
from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.config.training import EarlierEnd, ModelConfig, OptimConfig, TrainingConfig
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.model import optim
from gpt2_ddp.model import optim as muon
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import (
    MOMENTUM,
    OPTIMIZERS,
    build_optimizer,
    muon_matrices,
    orthogonal,
    state_names,
)
from gpt2_ddp.tasks.supervised import build_job_optimizer
from gpt2_ddp.training.ddp import Replicated
from gpt2_ddp.training.guard import Guard
from gpt2_ddp.training.memory import setting_of
from gpt2_ddp.training.optimizer import (
    GuardedOptimizer,
    lr_at,
    named_losses,
    set_values,
)

TINY = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=4)


def guarded(optimizer, scaler=None):
    """A guarded optimizer of one process on the CPU, with this loss scaler."""
    accelerator = build_accelerator("cpu", "no")
    accelerator.scaler = scaler
    accelerator.unscale_gradients = lambda prepared: scaler.unscale_(optimizer)
    prepared = AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)
    return GuardedOptimizer(prepared, Replicated(accelerator))


def take_step(optimizer, norm, guard=None, lr=1e-3):
    """Takes a step; whether it was skipped, and whether it was bad."""
    guard = guard or Guard(GuardConfig())
    skip = guard.judge_gradient(norm)
    bad = optimizer.step({"lr": lr}, norm, skip)
    assert guard.config.sigmas or guard.norms is None, "norms are kept where they have a limit"
    return skip.item(), bad.item()


RATES = [
    (
        "cosine",
        10,
        110,
        0.1,
        {1: 0.1, 5: 0.5, 10: 1, 35: 0.8681980515339464, 60: 0.55, 110: 0.1, 10000: 0.1},
    ),
    ("cosine", 10, 11, 0.1, {10: 1, 11: 0.1}),
    ("cosine", 50, 20, 0.1, {20: 0.4, 51: 0.1}),
    ("wsd", 10, 100, 0, {5: 0.5, 10: 1, 45: 1, 79: 1, 80: 1, 90: 0.5, 95: 0.25, 100: 0, 101: 0}),
    ("constant", 0, 9, 0.1, {1: 1, 1000000: 1}),
]
"""Schedule, end of the warm-up and of the decay, least rate; steps and their rates."""


@pytest.mark.parametrize(("schedule", "warmup", "decay", "least", "rates"), RATES)
def test_rates_of_a_schedule(schedule, warmup, decay, least, rates):
    """A warm-up may be longer than the run."""
    values = {"schedule": schedule, "warmup_steps": warmup, "decay_steps": decay}
    values |= {"lr": 1.0, "min_lr": float(least), "decay_fraction": 0.2}
    config = OptimConfig.model_construct(**OptimConfig().model_dump() | values)
    assert_close([lr_at(step, config) for step in rates], [*rates.values()])


STRETCHED = [
    (
        "wsd",
        1.0,
        85,
        ["60:110"],
        {10: 1, 60: 0.5, 70: 0.3, 85: 0, 90: 0},  # faster
    ),
    (
        "wsd",
        1.0,
        210,
        ["60:110", "135:160"],  # 60 to 160 is 0.5 to 0; a quarter is left at 135, hence an eighth
        {60: 0.5, 110: 0.25, 135: 0.125, 172: 0.125 * 38 / 75, 210: 0},
    ),
    ("cosine", 0.2, 85, ["60:110"], {35: 0.8535533905932737, 60: 0.5, 85: 0}),
    ("wsd", 0.5, 70, ["40:110"], {30: 1, 40: 1, 55: 0.5, 70: 0}),  # before the decay to 110
]
"""Schedule, decay_fraction, decay_steps, earlier ends; steps and their rates."""


@pytest.mark.parametrize(("schedule", "fraction", "end", "earlier", "rates"), STRETCHED)
def test_a_new_end_spreads_the_rest_of_the_decay(schedule, fraction, end, earlier, rates):
    """The same as if the ends were set one after another, each at its step."""
    values = {"schedule": schedule, "decay_fraction": fraction, "lr": 1.0, "min_lr": 0.0}
    values |= {"warmup_steps": 10}
    config = OptimConfig(**values, decay_steps=end, earlier_ends=earlier)
    assert_close([lr_at(step, config) for step in rates], [*rates.values()])
    first, *others = [*config.earlier_ends, EarlierEnd(at_step=10**6, decay_steps=end)]
    step = first.at_step
    grown = OptimConfig(**values, decay_steps=first.decay_steps)
    for other in others:
        changed = grown.ending_at(other.decay_steps, step)
        assert all(lr_at(past, changed) == lr_at(past, grown) for past in range(1, step + 1))
        step = other.at_step
        grown = changed
    assert grown == config
    assert config.decay_begins == (40 if fraction == 0.5 else 10)


def test_a_new_end_after_a_return_to_an_earlier_step():
    """The ends that were chosen after it are gone."""
    config = OptimConfig(warmup_steps=10, decay_steps=85, earlier_ends=["40:110", "60:90"])
    back = config.ending_at(70, 50)
    assert back.earlier_ends == OptimConfig(earlier_ends=["40:110", "50:90"]).earlier_ends
    assert all(lr_at(step, back) == lr_at(step, config) for step in range(1, 51))
    assert config.ending_at(85, 5).earlier_ends == ()


def test_an_end_that_no_step_depends_on_leaves_no_trace():
    """In the constant part of wsd, and in the warm-up."""
    config = OptimConfig(schedule="wsd", warmup_steps=10, decay_steps=100, decay_fraction=0.2)
    for step, end in ((79, 200), (80, 101), (10, 11), (5, 50)):
        assert config.ending_at(end, step).earlier_ends == ()
    constant = config.model_copy(update={"schedule": "constant"})
    assert constant.ending_at(50, 40).earlier_ends == ()
    for step, end in ((81, 200), (79, 90)):
        assert config.ending_at(end, step).earlier_ends == (
            EarlierEnd(at_step=step, decay_steps=100),
        )


class Experts(nn.Module):
    """A model without blocks; `tied`: its head is its embedding."""

    def __init__(self, tied=False):
        super().__init__()
        self.tokens = nn.Embedding(100, 8)
        self.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, 100)
        self.conv = nn.Conv1d(8, 8, 3, groups=8)
        self.norm = nn.LayerNorm(8)
        for name, shape in (("experts", (4, 8, 6)), ("bias", (4, 8)), ("positions", (5, 8))):
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        if tied:
            self.head.weight = self.tokens.weight

    def parameter_roles(self):
        return {self.positions: "embedding"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_groups_of_a_model_follow_from_the_roles_of_its_trained_parameters(tied):
    model = Experts(tied)
    model.norm.requires_grad_(False)
    optimizer = build_optimizer(model, OptimConfig(name="muon", embedding_lr=0.02))
    names = {parameter: name for name, parameter in model.named_parameters()}
    head = "tokens.weight" if tied else "head.weight"
    assert [{names[p] for p in group["params"]} for group in optimizer.param_groups] == [
        {"conv.weight", head},
        {"bias", "conv.bias", "first.bias", "head.bias"},
        {"positions", "tokens.weight"} - {head},
        {"experts", "first.weight"},
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0, 0.1, 0.1]


SETTINGS = ("name", "lr", "weight_decay", "momentum")
GROUPS = [
    ("decayed", 0.002, 0.3, None),
    ("vector", 0.002, 0.0, None),
    ("embedding", 0.008, 0.3, None),
    ("muon", 0.5, 0.7, 0.8),
]


def test_a_schedule_sets_the_groups_that_have_a_setting():
    """A group's own value wins over that of all, whatever the order; vectors never decay."""
    config = OptimConfig(name="muon", lr=1e-3, muon_lr=0.02, embedding_lr=4e-3)
    groups = build_optimizer(Experts(False), config).param_groups
    set_values(
        groups,
        {
            "muon_lr": 0.5,
            "lr": 2e-3,
            "weight_decay": 0.3,
            "momentum": 0.8,
            "muon_weight_decay": 0.7,
        },
    )
    assert [tuple(group.get(key) for key in SETTINGS) for group in groups] == GROUPS
    expect_error("vector_momentum", set_values, groups, {"lr": 1e-3, "vector_momentum": 0.5})


@pytest.mark.parametrize(("field", "value"), [("name", "muon"), ("embedding_lr", 0.02)])
def test_a_setting_of_a_group_that_no_parameter_is_in(field, value):
    expect_error(
        f"optim.{field} = {value}", build_optimizer, nn.Linear(8, 8), OptimConfig(**{field: value})
    )


@pytest.mark.parametrize("shape", [(8, 6), (5, 12)])
@float64(torch.bfloat16)
def test_muon_steps_each_matrix_of_a_stack(shape):
    torch.manual_seed(0)
    values, gradients = torch.randn(2, 4, *shape)
    alone = [*map(nn.Parameter, values)]
    stack = nn.Parameter(values.unflatten(0, (2, 2)).clone())
    stack.grad = gradients.view_as(stack)
    for one, gradient in zip(alone, gradients, strict=True):
        one.grad = gradient
    group = {
        "momentum": 0.9,
        "weight_decay": 0.1,
        "dtype": torch.float32,
        "sent_dtype": torch.float32,
    }
    for parameters in ([stack], alone):
        muon.MuonAdamW([group | {"params": parameters}], lr=1.0).step()
    assert_close(stack.flatten(0, 1), torch.stack(alone))


@float64(torch.bfloat16)
def test_a_plain_loop_with_torchs_muon_is_the_same():
    """Twenty steps: every loss, and every weight in the end.
    Muon steps the largest matrix first, and no embedding."""
    config = OptimConfig(name="muon", lr=4e-3, muon_lr=0.02, weight_decay=0.2)
    torch.manual_seed(0)
    ours = GPT(TINY, 100)
    plain = deepcopy(ours)
    optimizer = guarded(build_optimizer(ours, config, bf16=True))
    matrices = muon_matrices(plain)
    assert [tuple(p.shape) for p in matrices] == [(32, 8), (8, 32), (24, 8), (8, 8)]
    embeddings = [plain.wte.weight, plain.wpe.weight]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    groups = [{"params": embeddings, "weight_decay": 0.2}, {"params": vectors, "weight_decay": 0.0}]
    theirs = [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]
    theirs += [torch.optim.Muon(matrices, weight_decay=0.2, momentum=MOMENTUM)]
    for step in range(1, 21):
        tokens = torch.randint(100, (4, 5))
        losses = [model(tokens[:, :-1], tokens[:, 1:]) for model in (ours, plain)]
        assert_close(*losses, says=step)
        optimizer.backward(losses[0] + losses[1])
        share = step / 20
        take_step(optimizer, nn.utils.clip_grad_norm_(ours.parameters(), 1.0), lr=4e-3 * share)
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for one in theirs:
            for group in one.param_groups:
                group["lr"] = (0.02 if "momentum" in group else 4e-3) * share
            one.step()
            one.zero_grad()
    assert_close(dict(ours.named_parameters()), dict(plain.named_parameters()))


@pytest.mark.parametrize("decades", [0, 3, 6])
@pytest.mark.parametrize("shape", [(48, 48), (144, 48), (48, 192)])
def test_the_fp32_iteration_rounds_less_than_sending_in_bf16_does(shape, decades):
    """Also where singular values span many decades, and squares of the least are lost."""
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape).double(), full_matrices=False)
    matrix = (u @ torch.logspace(0, -decades, 48).double().diag() @ v)[None]
    exact = orthogonal(matrix, torch.float64)

    def error(found):
        return (found.double() - exact).norm() / exact.norm()

    assert error(orthogonal(matrix.float(), torch.float32)) < 5e-4 < error(exact.bfloat16())
    assert not orthogonal(torch.zeros(2, *shape), torch.float32).any()


def test_matrices_of_one_shape_are_orthogonalized_together(monkeypatch):
    monkeypatch.setattr(muon, "TOGETHER", 3 * 8)
    wide = torch.zeros(2, 4)
    tall = torch.zeros(4, 2)
    square = torch.zeros(6, 6)
    matrices = [wide, tall, wide, wide, wide, square, tall]
    assert [*muon.batches(matrices, range(7), torch.bfloat16)] == [[0, 2, 3], [4], [1, 6], [5]]
    # of this rank, and alone
    assert [*muon.batches(matrices, range(2, 6, 2), torch.float32)] == [[2], [4]]


def test_gpus_orthogonalize_more_matrices_together(monkeypatch):
    monkeypatch.setattr(muon, "TOGETHER_ON_GPUS", 3 * 8)
    monkeypatch.setattr(muon, "TOGETHER", 8)
    on = {gpu: SimpleNamespace(shape=torch.Size((2, 4)), is_cuda=gpu) for gpu in (False, True)}
    sizes = {
        gpu: [len(batch) for batch in muon.batches([on[gpu]] * 4, range(4), torch.bfloat16)]
        for gpu in on
    }
    assert sizes == {True: [3, 1], False: [1, 1, 1, 1]}


def muon_run(devices, bad_step=2, dtype=torch.bfloat16):
    """Parameters and momentum after four steps, the gradient of one of which is not finite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6), nn.Linear(6, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "FOREACH_ON", devices)
        optimizer = build_optimizer(model, OptimConfig(name="muon"), bf16=True)
        for group in optimizer.param_groups:
            group["dtype"] = dtype
        for step in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape)
            optimizer.found_inf = torch.tensor(float(step == bad_step))
            if step == bad_step:
                before = deepcopy([*model.parameters()])
                model[0].weight.grad[1, 1] = math.nan
            optimizer.step()
            if step == bad_step:
                assert all(
                    torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
                )
    states = [
        state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state
    ]
    return [p.detach() for p in model.parameters()], states


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_operations_of_all_matrices_step_as_those_of_each(dtype):
    assert_close(muon_run(("cpu",), dtype=dtype), muon_run((), dtype=dtype), 1e-3)


@pytest.mark.parametrize(("has", "bf16"), [(True, True), (True, False), (False, True)])
def test_muon_computes_and_sends_bf16_in_a_bf16_run(has, bf16, monkeypatch):
    """It computes in bf16 where the device has that. The step
    of a zero matrix is its update, which bf16 holds exactly."""
    seen = set()
    monkeypatch.setattr(optim, "multiplies_bf16", lambda device: has)
    monkeypatch.setattr(
        muon, "orthogonal", lambda matrix, dtype: seen.add(dtype) or orthogonal(matrix, dtype)
    )
    model = small_model()
    optimizer = build_optimizer(model, OptimConfig(name="muon"), bf16)
    optimizer.param_groups[-1]["lr"] = 1.0
    matrix = next(model.parameters())
    matrix.data.zero_()
    matrix.grad = torch.randn(6, 6)
    optimizer.step()
    assert seen == {torch.bfloat16 if has and bf16 else torch.float32}
    assert matrix.abs().max() > 0.1
    assert torch.equal(matrix, matrix.bfloat16().float()) == bf16


def build_named(name, model):
    return build_optimizer(model, OptimConfig(name=name))


BUILDERS = {
    "sgd": lambda model: build_job_optimizer(model, JobOptimConfig(lr=0.1, momentum=0.9)),
    "plain adamw": lambda model: torch.optim.AdamW(model.parameters(), fused=False),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
} | {name: partial(build_named, name) for name in OPTIMIZERS}
"""Optimizers that read `found_inf`, and some that do not."""


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 8))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("bad", "first"), [(math.nan, True), (math.inf, False)])
def test_a_gradient_that_is_not_finite_changes_nothing(name, bad, first):
    """Parameters, optimizer state and step counts are as before, after a first step too. Later
    steps are as if this one had never been."""
    spared = small_model()
    hit = small_model()
    optimizers = {model: guarded(BUILDERS[name](model)) for model in (spared, hit)}

    def step_of(model, number, poison=False):
        torch.manual_seed(number)
        optimizer = optimizers[model]
        optimizer.backward((model(torch.randn(4, 6)) ** 2).sum())
        if poison:
            next(model.parameters()).grad[3, 3] = bad
        return take_step(optimizer, nn.utils.clip_grad_norm_(model.parameters(), 1.0))[0]

    if not first:
        assert step_of(spared, 1) == step_of(hit, 1) == 0
    before = deepcopy(hit.state_dict())
    assert step_of(hit, 2, poison=True) == 1
    assert same(before, hit.state_dict())
    for number in (3, 4):
        assert step_of(spared, number) == step_of(hit, number) == 0
    assert same(spared.state_dict(), hit.state_dict())
    states = [optimizer_state(model, optimizer.plain) for model, optimizer in optimizers.items()]
    assert same(*states)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "sgd", "plain sgd"])
def test_under_a_loss_scaler_a_norm_that_overflows_skips_too(name):
    """Each gradient is finite, so the scaler finds nothing; the norm of all of them is not."""
    model = small_model()
    optimizer = guarded(BUILDERS[name](model), torch.amp.GradScaler("cpu", init_scale=1.0))
    waits = not getattr(optimizer.plain, "_step_supports_amp_scaling", False)
    is_fused = all(group.get("fused") for group in optimizer.plain.param_groups)
    assert waits != is_fused  # a step would wait for the device
    assert waits or name != "plain sgd"

    def step_of(size):
        optimizer.backward((model(torch.ones(4, 6)) * size).sum())
        return take_step(optimizer, nn.utils.clip_grad_norm_(model.parameters(), math.inf))[0]

    assert step_of(1e-3) == 0
    before = deepcopy(model.state_dict())
    assert step_of(1e30) == 1
    assert same(before, model.state_dict())
    assert step_of(1e-3) == 0
    assert not same(before, model.state_dict())


def test_the_search_for_a_scale_is_not_bad():
    """An overflow is left out; bad it is only where the
    scale cannot be lowered. A large norm always is."""
    scaler = torch.amp.GradScaler("cpu")
    layer = nn.Linear(2, 2)
    optimizer = guarded(torch.optim.AdamW(layer.parameters(), fused=True), scaler)
    guard = Guard(GuardConfig(sigmas=3.0))
    guard.norms.load_state_dict((150.0, 1.0, 0.01))
    for norm, scale, skipped, bad in (
        (math.inf, 9.0, 1, 0),
        (math.inf, 1.0, 1, 1),
        (9.0, 9.0, 1, 1),
        (1.0, 9.0, 0, 0),
    ):
        optimizer.backward(layer(torch.ones(1, 2)).sum())
        scaler.update(scale)
        assert take_step(optimizer, torch.tensor(norm), guard) == (skipped, bad)
    assert guard.norms.state_dict()[0] == 151


def test_every_optimizer_of_the_configuration_is_registered():
    field = OptimConfig.model_fields["name"]
    assert get_args(field.annotation) == tuple(OPTIMIZERS)
    assert {*OptimConfig.only_for.values()} <= {*OPTIMIZERS}


@pytest.mark.parametrize("embedding_lr", [None, 0.02])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_keeps_the_state_that_its_entry_declares(name, embedding_lr):
    """So verify_run.py knows what is missing, resumes refuse what is unknown, and plan.py counts
    the bytes."""
    optim = {"name": name, "embedding_lr": embedding_lr}
    config = TrainingConfig(train={"steps": 1}, optim=optim)
    model = GPT(TINY, 100)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = {parameter: set(state) for parameter, state in optimizer.state.items()}
    assert state_names(optimizer) == kept
    assert kept.keys() == {*model.parameters()}
    numbers = 0
    for parameter, state in optimizer.state.items():
        for kind, value in state.items():
            shape = () if kind == "step" else parameter.shape
            assert (value.shape, value.dtype) == (shape, torch.float32), kind
            numbers += value.numel() * (kind != "step")
    assert setting_of(config, model, "cpu", 1, "no").state == numbers


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_with_loaded_state_steps_as_the_saved_one(name):
    saved, loaded = small_model(), small_model()
    optimizers = {model: build_named(name, model) for model in (saved, loaded)}

    def step(model):
        torch.manual_seed(1)
        optimizers[model].zero_grad()
        (model(torch.randn(4, 6)) ** 2).sum().backward()
        optimizers[model].step()

    step(saved)
    loaded.load_state_dict(saved.state_dict())
    load_optimizer_state(optimizer_state(saved, optimizers[saved]), loaded, optimizers[loaded])
    step(saved)
    step(loaded)
    assert same(saved.state_dict(), loaded.state_dict())
    states = [optimizer_state(model, optimizer) for model, optimizer in optimizers.items()]
    assert same(*states)


def test_a_loss_alone_and_one_with_others_have_names():
    loss = torch.ones(())
    assert named_losses(loss) == {"loss": loss}
    assert named_losses((loss, {"balance": -loss})) == {"loss": loss, "balance": -loss}
