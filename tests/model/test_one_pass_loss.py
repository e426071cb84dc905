"""The loss and its gradient in one pass over the logits: as the plain loss's, plain and compiled,
and nothing large is kept for the backward pass."""

from functools import partial

import pytest
import torch
from close import assert_close, float64
from models import random_tokens
from ranks import in_turn, run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model import gpt as gpt_module
from gpt2_ddp.model import loss as loss_module
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.loss import one_pass_loss

VOCAB = 301
PADDED = 384
KINDS = ["gpt2", "llama", "nanochat", "speedrun"]


def model_of(kind="gpt2", width=32, fp8_head=False):
    torch.manual_seed(0)
    config = ModelConfig(n_layer=1, n_head=2, n_embd=width, block_size=16, architecture=kind)
    return GPT(config, VOCAB, fp8_head=fp8_head).eval()  # no dropout of pairs


def batch():
    tokens, targets = random_tokens(VOCAB, 12).chunk(2)
    targets[0, :5] = targets[3] = -100
    return tokens, targets


def loss_and_gradients(model, run, reduction):
    model.zero_grad()
    loss = run(*batch(), reduction=reduction)
    (0.3 * loss).backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


def switch(monkeypatch, on):
    monkeypatch.setattr(gpt_module, "fuses_loss", lambda x, weight, reduction: on)


@pytest.mark.parametrize("rows", ["whole", 1, 3, 1000])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
@float64()
def test_the_loss_and_its_gradients_are_the_plain_ones(monkeypatch, kind, reduction, rows):
    """Also of the norm and of a head with a soft cap; some targets are not scored. Whole, as in
    compiled code, and in parts of so many rows."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    if rows == "whole":
        monkeypatch.setattr(loss_module, "_LossInParts", loss_module._OnePassLoss)
    else:
        monkeypatch.setattr(loss_module, "PART", rows * PADDED)
    model = model_of(kind)
    switch(monkeypatch, False)
    plain = loss_and_gradients(model, model, reduction)
    switch(monkeypatch, True)
    fused = loss_and_gradients(model, model, reduction)
    assert fused[0].dtype == torch.float64
    assert_close(fused, plain, 1e-12)
    assert not model.wte.weight.grad[VOCAB:].any()  # the padding has probability 0
    assert not (model.lm_head or model.wte).weight.grad[VOCAB:].any()


def test_padding_has_probability_0_whatever_its_logits_are():
    x = torch.randn(5, 8)
    weight = torch.randn(PADDED, 8, requires_grad=True)
    with torch.no_grad():
        weight[VOCAB:] *= 1000
    targets = torch.tensor([0, 300, -100, 7, 7])
    loss = one_pass_loss(x, weight, targets, VOCAB, None)
    logits = x @ weight[:VOCAB].T
    assert_close(loss, torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    loss.backward()
    assert not weight.grad[VOCAB:].any()


@pytest.mark.parametrize(
    ("width", "is_bf16", "reduction", "in_parts"),
    [(1000, True, "sum", True), (1000, True, "none", False), (1000, False, "sum", False),
     (1, True, "sum", False)],
)  # fmt: skip
def test_parts_are_for_many_logits_in_bf16_training_on_a_cpu(
    monkeypatch, width, is_bf16, reduction, in_parts
):
    monkeypatch.setattr(loss_module, "MOST_LOGITS", 5000)
    rows = torch.zeros(6, 8)
    weight = torch.zeros(width, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
        assert loss_module.fuses_loss(rows, weight, reduction) is in_parts
        with torch.no_grad():
            assert not loss_module.fuses_loss(rows, weight, reduction)


def saved(run):
    """The sizes of what is saved for the backward pass."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t
    ):
        run()
    return sizes


# inductor's code for processors without AVX2 does not compile, which `make test-kinds` stands for
BY_INDUCTOR = [pytest.param(how, marks=pytest.mark.slow) for how in ("model", "blocks")]


@pytest.mark.parametrize("how", ["plain", *BY_INDUCTOR])
def test_no_logits_are_kept_and_a_compiled_loss_is_the_plain_one(monkeypatch, how):
    """Compiled by inductor, whose partitioner decides what is kept. In bf16, as on GPUs."""
    torch._dynamo.reset()
    tokens = batch()[0].numel()
    found = {}
    for on in (False, True):
        switch(monkeypatch, on)
        model = model_of()
        run = torch.compile(model, dynamic=False, fullgraph=True) if how == "model" else model
        if how == "blocks":
            model.compile_blocks()
        with torch.autocast("cpu", torch.bfloat16):
            found[on] = loss_and_gradients(model, run, "sum")
            sizes = saved(lambda run=run: run(*batch(), reduction="sum"))
        assert on == (tokens * PADDED not in sizes), sizes
        assert not on or max(sizes) <= PADDED * 32
        if on:  # a second micro-batch adds its gradients
            with torch.autocast("cpu", torch.bfloat16):
                (0.3 * run(*batch(), reduction="sum")).backward()
            assert_close(
                torch.cat([p.grad.flatten() for p in model.parameters()]), 2 * found[on][1], 1e-6
            )
    # one rounding to bf16 is 0.004; the first test here compares the arithmetic in float64
    assert_close(found[True][0], found[False][0], 1e-2)
    assert_close(found[True][1], found[False][1], 5e-2)
    assert_close(found[True][1].norm(), found[False][1].norm(), 1e-2)


WHERE = {
    "compiled bf16 training": (True, "sum", torch.bfloat16, True),
    "a mean": (True, "mean", torch.bfloat16, True),
    "not compiled": (False, "sum", torch.bfloat16, True),
    "fp16": (True, "sum", torch.float16, True),
    "fp32": (True, "sum", None, True),
    "a loss of each token": (True, "none", torch.bfloat16, True),
    "an evaluation": (True, "sum", torch.bfloat16, False),
}


@pytest.mark.parametrize("case", WHERE)
def test_where_it_is_used(monkeypatch, case):
    compiles, reduction, dtype, trains = WHERE[case]
    torch._dynamo.reset()
    for devices in (("cpu",), ("cuda",), ()):
        monkeypatch.setattr(loss_module, "FUSED_ON", devices)
        used = []
        monkeypatch.setattr(
            gpt_module,
            "one_pass_loss",
            lambda *args, used=used: used.append(1) or one_pass_loss(*args),
        )
        model = model_of()
        run = torch.compile(model, backend="eager") if compiles else model
        with (
            torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None),
            torch.set_grad_enabled(trains),
        ):
            run(*batch(), reduction=reduction)
        assert len(used) == (
            devices == ("cpu",) and case in ("compiled bf16 training", "a mean")
        ), devices


def rows_of_a_training(config, devices):
    """Trains with compiled blocks; the losses and gradient norms of its rows, on the main
    process."""
    from accelerate import Accelerator

    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.training.loop import train

    loss_module.FUSED_ON = devices
    torch._dynamo.reset()
    Accelerator.end_training = lambda self: None  # which would disconnect ranks that train again
    if not isinstance(torch.compile, partial):
        torch.compile = partial(torch.compile, backend="aot_eager")
    calls = []
    rows = []
    gpt_module.one_pass_loss = lambda *args: calls.append(1) or one_pass_loss(*args)
    train(
        config,
        Pretraining,
        lambda row: rows.append([row[name] for name in ("loss", "grad_norm") if name in row]),
    )
    assert bool(calls) == bool(devices)
    return [row for row in rows if len(row) == 2]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "how"), [(1, "model"), (2, "blocks")])
def test_trainings_on_several_ranks_are_as_with_the_plain_loss(tiny_config, world, how):
    """DDP all-reduces the gradients in the last of several micro-batches."""
    changes = {
        "train.compile": how,
        "train.mixed_precision": "bf16",
        "train.micro_batch_size": 1,
        "train.steps": 3,
    }
    changes |= {"tracking.log_every": 1, "model.n_layer": 1}
    runs = [tiny_config(changes | {"run_name": name}) for name in ("plain", "fused")]
    found = run_ranks(
        in_turn, world, (rows_of_a_training, runs[0], ()), (rows_of_a_training, runs[1], ("cpu",))
    )
    plain, fused = found[0]
    assert len(plain) == 3, found
    # losses of a few steps in bf16, whose roundings differ
    assert_close(fused, plain, 4e-3)
