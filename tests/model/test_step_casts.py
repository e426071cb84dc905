"""Weights that are cast to half precision once a step: counted, and bitwise what autocast computes
in each micro-batch."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from models import random_tokens
from ranks import run_ranks
from runs import assert_same, rows, train, training_config
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model import step_casts
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.compiled import compiled
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.step_casts import StepCasts, dtype_of_casts
from gpt2_ddp.training import start

VOCAB = 301
MICRO_BATCHES = 4


def model_of(kind="gpt2", recomputes=False):
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, architecture=kind)
    return GPT(config, VOCAB, activation_checkpointing=recomputes)


class Casts(TorchDispatchMode):
    """Counts the casts of matrices to bf16, and copies of lists of tensors."""

    def __init__(self):
        super().__init__()
        self.matrices = 0
        self.lists = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter):
            self.matrices += args[0].dim() == 2 and result.dtype is torch.bfloat16
        self.lists += function is torch.ops.aten._foreach_copy_.default
        return result


def compute(model, run, casts):
    """Loss and gradients of a step."""
    model.zero_grad()
    losses = []
    torch.manual_seed(1)  # of the dropout of pairs
    with casts.in_use() if casts else nullcontext():
        for part in random_tokens(VOCAB, 3 * MICRO_BATCHES).chunk(MICRO_BATCHES):
            with torch.autocast("cpu", torch.bfloat16):
                loss = run(part[:, :-1], part[:, 1:], reduction="sum")
            (0.3 * loss).backward()
            losses.append(loss.detach())
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return torch.stack(losses), gradients


def step(model, run, casts):
    """Loss and gradients of a step; what a `Casts` counts."""
    with Casts() as count:
        return *compute(model, run, casts), count


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_step_casts_each_matrix_once_and_computes_the_same_bits(kind, recomputes):
    model = model_of(kind, recomputes)
    losses, gradients, usual = step(model, model, None)
    casts = StepCasts(model, torch.bfloat16)
    own_losses, own_gradients, count = step(model, model, casts)
    assert torch.equal(own_losses, losses)
    assert torch.equal(own_gradients, gradients)
    products = 4 * model.config.n_layer + 1
    # recomputed blocks cast theirs again
    times = MICRO_BATCHES * (2 if recomputes else 1)
    assert usual.matrices == times * (products - 1) + MICRO_BATCHES
    assert (usual.lists, count.matrices, count.lists) == (0, 0, 1)
    # weights have changed, as by an optimizer or a rollback
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    expected = step(model, model, None)
    found = step(model, model, casts)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], losses)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["model", "blocks"])
def test_a_compiled_step_computes_the_same(how):
    found = []
    for is_on in (False, True):
        torch._dynamo.reset()
        model = model_of()
        run = model
        if how == "model":
            run = torch.compile(model, dynamic=False, fullgraph=True)
        else:
            model.compile_blocks()
        casts = StepCasts(model, torch.bfloat16) if is_on else None
        compute(model, run, casts)
        found.append(compute(model, run, casts))  # the compiled code again
    assert torch.equal(found[1][0], found[0][0])
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize("how", ["model", "blocks"])
def test_a_compiled_model_has_one_graph_for_training_and_one_for_evaluations(how, monkeypatch):
    """Also with an evaluation before the first step. Dynamo's graphs, without inductor."""
    torch._dynamo.reset()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", partial(compiler, backend="eager"))
    model = model_of()
    run = compiled(model, how)
    casts = StepCasts(model, torch.bfloat16)
    graphs = []

    def evaluate():
        model.eval()
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            tokens = random_tokens(VOCAB, 3)
            run(tokens[:, :-1], tokens[:, 1:], reduction="none")
        model.train()

    for work in (evaluate, lambda: compute(model, run, casts)) * 2:
        before = counters["stats"]["unique_graphs"]
        work()
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert min(graphs[:2]) > 0
    assert graphs[2:] == [0, 0]


def test_outside_of_a_step_there_are_no_copies():
    model = model_of()
    casts = StepCasts(model, torch.bfloat16)

    def fail():
        with casts.in_use():
            assert model.h[0].mlp.c_fc.half_weight is not None
            raise ValueError("in a step")

    with pytest.raises(ValueError, match="in a step"):
        fail()
    assert model.h[0].mlp.c_fc.half_weight is None
    assert model.half_head is None
    assert [*model.state_dict()] == [*model_of().state_dict()]
    with StepCasts(model, None).in_use():
        assert model.half_head is None


def test_where_weights_are_cast_once(monkeypatch):
    assert dtype_of_casts("cuda", "bf16") is None  # until a GPU has measured it
    monkeypatch.setattr(step_casts, "CASTS_ONCE_ON", ("cuda",))
    assert dtype_of_casts("cuda", "bf16") is torch.bfloat16
    assert dtype_of_casts("cuda", "fp16") is torch.float16
    assert dtype_of_casts("cuda", "no") is None
    assert dtype_of_casts("cpu", "bf16") is None


def train_with(devices, config, casts_once):
    """Trains; whether steps had copies."""
    step_casts.CASTS_ONCE_ON = devices
    dtypes = []
    make = start.StepCasts
    start.StepCasts = lambda model, dtype: dtypes.append(dtype) or make(model, dtype)
    assert train(config) == "completed"
    start.StepCasts = make
    assert (dtypes == [torch.bfloat16]) is casts_once, dtypes


@pytest.mark.parametrize("world", [1, 2])
def test_trainings_are_bitwise_those_without(corpus, tmp_path, world):
    """With an average of the weights, which evaluations exchange, and dropout."""
    changes = {"train.steps": 6, "train.mixed_precision": "bf16", "eval.every": 3}
    changes |= {"optim.average": 0.1, "model.dropout": 0.1, "model.n_layer": 1}
    for name, devices in (("plain", ()), ("once", ("cpu",))):
        config = training_config(corpus, tmp_path / name, changes)
        run_ranks(train_with, world, devices, config, bool(devices))
    assert len(rows(tmp_path / "plain/run")) == 7
    assert_same(tmp_path / "once/run", tmp_path / "plain/run")
    whole = training_config(
        corpus, tmp_path / "whole", changes | {"train.micro_batch_size": 12 // world}
    )
    run_ranks(train_with, world, ("cpu",), whole, False)  # one micro-batch casts once anyway
