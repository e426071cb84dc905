"""`train.fp8_head`: the head's products in fp8, emulated on CPUs by fp32 products of the same fp8
numbers; test_gpu.py compares the kernel with that."""

import math

import pytest
import torch
from close import assert_close, distance
from commands import expect_error, expect_field
from ranks import run_ranks
from runs import rows, train, training_config
from test_one_pass_loss import PADDED, VOCAB, batch, loss_and_gradients, model_of, saved

from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.model import fp8
from gpt2_ddp.model.fp8 import check_fp8, fixed_scale, fp8_loss, scale_of, to_fp8
from gpt2_ddp.plan.plan import fp8_mistakes

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
HALF_STEP = {E4M3: 2.0**-4, E5M2: 2.0**-3}
"""Largest relative error of a rounding."""


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(fp8, "EMULATED_ON", ("cpu",))


def head(width=64, tokens=96):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator, requires_grad=True)
    weight = torch.randn(PADDED, width, generator=generator)
    weight = (0.3 * weight).requires_grad_()
    targets = torch.randint(VOCAB, (tokens,), generator=generator)
    targets[:5] = -100
    return x, weight, targets


def exact(x, weight, targets, soft_cap):
    """The loss and its gradients in float64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    logits = x @ weight[:VOCAB].mT
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1e-30, 0.9999, 1.0, 448.0, 448.00006, 7e4, 3e30])
def test_a_scale_is_the_smallest_power_of_two_that_fits(dtype, largest):
    scale = scale_of(torch.tensor(largest), dtype)
    assert scale.dtype == torch.float32
    assert math.frexp(scale.item())[0] == 0.5  # a power of two
    top = torch.finfo(dtype).max
    assert largest / scale <= top * (1 + 1e-6)
    assert largest / (scale / 2) > top * (1 - 1e-6)
    assert fixed_scale(largest, dtype) in (scale, 2 * scale)  # for what is not exact in fp32
    x = torch.tensor([largest, -largest, largest / 3, 0.0])
    rounded = to_fp8(x, dtype)
    values = rounded.values.double() * rounded.scale.double()
    assert ((values - x.double()).abs() <= HALF_STEP[dtype] * x.abs()).all()


def test_zeros_and_what_is_not_finite():
    zeros = to_fp8(torch.zeros(3))
    assert not (zeros.values.float() * zeros.scale).any()
    for bad in (math.nan, math.inf, -math.inf):
        rounded = to_fp8(torch.tensor([1.0, bad]))
        assert (rounded.values.float() * rounded.scale).isnan().any(), "a guard has to see it"


def test_a_scale_rounds_nothing():
    """Numbers times a power of two have the same digits in fp8."""
    x = torch.randn(1000)
    plain = to_fp8(x)
    for factor in (2.0**-40, 2.0**40):
        scaled = to_fp8(factor * x)
        assert torch.equal(scaled.values.view(torch.uint8), plain.values.view(torch.uint8))
        assert scaled.scale == factor * plain.scale


@pytest.mark.parametrize("soft_cap", [None, 15.0])
def test_loss_and_gradients_are_near_the_exact_ones(soft_cap):
    x, weight, targets = head()
    loss, of_x, of_weight = exact(x, weight, targets, soft_cap)
    own = fp8_loss(x, weight, targets, VOCAB, soft_cap)
    assert own.dtype == torch.float32
    (0.5 * own).backward()
    assert weight.grad.dtype == torch.float32
    # sums of roundings of up to 6 % each, of both signs; their size is that of the numbers
    assert_close(own, loss, 0.04)
    for gradient, right in ((x.grad, of_x), (weight.grad, of_weight)):
        error = (2 * gradient.double() - right).norm() / right.norm()
        assert 1e-3 < error < 0.08
        assert torch.cosine_similarity(gradient.double().flatten(), right.flatten(), 0) > 0.996
    assert not x.grad[:5].any()
    assert not weight.grad[VOCAB:].any()  # the padding has probability 0


def test_what_fp8_represents_is_computed_exactly():
    """Small integers and equal logits: nothing is rounded but the gradient of the logits."""
    x = torch.ones(16, 16, requires_grad=True)
    weight = torch.ones(128, 16, requires_grad=True)
    targets = torch.arange(16)
    loss = fp8_loss(x, weight, targets, 128, None)
    assert_close(loss, 16 * math.log(128), 1e-6)
    loss.backward()
    # 1/128 is exact, 127/128 becomes 1
    expected = torch.full((128, 16), 16 / 128)
    expected[:16] = 15 / 128 - 1
    assert_close(weight.grad, expected, 1e-6)
    assert_close(x.grad, torch.full((16, 16), 127 / 128 - 1), 1e-6)


@pytest.mark.parametrize("chunk", [16, 32, 80])
def test_chunks_are_the_whole(monkeypatch, chunk):
    x, weight, targets = head()
    whole = fp8_loss(x, weight, targets, VOCAB, None)
    gradients = torch.autograd.grad(whole, (x, weight))
    monkeypatch.setattr(fp8, "CHUNK", chunk)
    parts = fp8_loss(x, weight, targets, VOCAB, None)
    own = torch.autograd.grad(parts, (x, weight))
    assert_close(parts, whole, 2e-6)
    assert torch.equal(own[0], gradients[0])
    assert_close(own[1], gradients[1], 2e-6)


@pytest.mark.parametrize("how", ["plain", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gpt2", "nanochat"])
def test_a_model_keeps_no_logits_and_adds_the_gradients_of_micro_batches(kind, how):
    torch._dynamo.reset()
    tokens = batch()[0].numel()
    plain = model_of(kind)
    model = model_of(kind, fp8_head=True)
    run = torch.compile(model, dynamic=False, fullgraph=True) if how == "model" else model
    with torch.autocast("cpu", torch.bfloat16):
        right = loss_and_gradients(plain, plain, "sum")
        found = loss_and_gradients(model, run, "sum")
        sizes = saved(lambda: run(*batch(), reduction="sum"))
        (0.3 * run(*batch(), reduction="sum")).backward()
    assert tokens * PADDED not in sizes, sizes
    twice = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert_close(twice, 2 * found[1], 1e-6)
    assert_close(found[0], right[0], 0.01)
    assert 0 < (found[1] - right[1]).norm() / right[1].norm() < 0.1
    assert not torch.equal(found[0], right[0])


USED = {"sum": True, "mean": True, "none": False}


@pytest.mark.parametrize("reduction", USED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_evaluations_and_other_precisions_are_as_without_it(reduction, dtype):
    plain = model_of()
    model = model_of(fp8_head=True)
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        one, other = (each(*batch(), reduction=reduction) for each in (model, plain))
        is_used = USED[reduction] and dtype is torch.bfloat16
        assert torch.equal(one, other) is not is_used
        with torch.no_grad():
            one, other = (each(*batch(), reduction=reduction) for each in (model, plain))
            assert torch.equal(one, other)
            assert torch.equal(model(batch()[0]), plain(batch()[0]))


def train_in_fp8(config):
    fp8.EMULATED_ON = ("cpu",)
    return train(config)


def test_ranks_and_accumulation_train_the_same(corpus, tmp_path):
    """Scales of powers of two do not depend on how a step is divided, but for numbers that are too
    small for fp8."""
    changes = {"train.steps": 4, "train.mixed_precision": "bf16", "train.fp8_head": True}
    changes |= {"model.n_layer": 1, "eval.every": 4}
    found = []
    for name, world, size in (("whole", 1, 12), ("parts", 1, 3), ("ranks", 2, 3)):
        config = training_config(
            corpus, tmp_path / name, changes | {"train.micro_batch_size": size}
        )
        assert run_ranks(train_in_fp8, world, config) == ["completed"] * world
        found.append([row["loss"] for row in rows(tmp_path / name / "run") if "loss" in row])
    plain = training_config(corpus, tmp_path / "plain", changes | {"train.fp8_head": False})
    assert run_ranks(train, 1, plain) == ["completed"]
    bf16 = [row["loss"] for row in rows(tmp_path / "plain/run") if "loss" in row]
    for losses in found:
        assert_close(losses, found[0], 4e-3)
        assert 0 < distance(losses, bf16) < 0.02
    # a resume keeps it
    changed = training_config(corpus, tmp_path / "whole", changes | {"train.fp8_head": False})
    expect_error("train.fp8_head = False: the run was started with True", train, changed)


def gpu(monkeypatch, capability, hip=None):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    return torch.device("cuda")


def test_refusals(monkeypatch):
    monkeypatch.setattr(fp8, "EMULATED_ON", ())

    def refused(words, device, precision="bf16"):
        expect_error(f"train.fp8_head = true: .*{words}", check_fp8, device, precision)

    refused("needs a GPU of compute capability 8.9 or more, not cpu", torch.device("cpu"))
    refused("8.9 or more, not mps", torch.device("mps"))
    refused("NVIDIA X has 8.6", gpu(monkeypatch, (8, 6)))
    refused("by NVIDIA, not NVIDIA X", gpu(monkeypatch, (9, 4), hip="6.0"))
    for capability in ((8, 9), (9, 0), (12, 0)):
        device = gpu(monkeypatch, capability)
        check_fp8(device, "bf16")
        refused("bf16, which is no", device, "no")


def settings(**changes):
    return TrainingConfig.model_validate({"train": {"steps": 9, "fp8_head": True}} | changes)


def test_sizes_and_precision_are_checked_with_the_configuration():
    settings()
    no = {"steps": 9, "fp8_head": True, "mixed_precision": "no"}
    expect_field("train.fp8_head", True, settings, train=no)
    narrow = {"n_embd": 24, "n_head": 2}
    expect_field("model.n_embd", 24, settings, model=narrow)
    short = {"steps": 9, "fp8_head": True, "global_batch_tokens": 80}
    expect_field("model.block_size", 8, settings, model={"block_size": 8}, train=short)


def test_a_training_and_a_plan_are_refused_where_fp8_is_missing(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr(fp8, "EMULATED_ON", ())
    changes = {"train.fp8_head": True, "train.mixed_precision": "auto"}
    config = training_config(corpus, tmp_path, changes)
    expect_error("train.fp8_head = true: needs a GPU", train, config)
    assert not (tmp_path / "run").exists()
    plan = PlanConfig.model_validate({"train": {"steps": 9, "fp8_head": True}})
    assert not fp8_mistakes(plan, "NVIDIA H100 80GB HBM3")
    assert not fp8_mistakes(plan, "a GPU that is in no table")
    (mistake,) = fp8_mistakes(plan, "NVIDIA A100-SXM4-80GB")
    assert mistake.startswith("train.fp8_head = true: needs a GPU with fp8, not NVIDIA A100")
