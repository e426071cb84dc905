"""The step's choices: a loss in chunks, and what torch.compile is asked for."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from close import assert_close, float64
from commands import expect_field
from models import random_tokens
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model import compiled as compiling
from gpt2_ddp.model import gpt as gpt_module
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.compiled import check_compiler, compiled, missing_compiler, resolve_compile
from gpt2_ddp.model.gpt import GPT

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def gpt(vocab_size=301, **changes):
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, **changes), vocab_size)


def batch():
    inputs, targets = random_tokens(301, 12).chunk(2)
    targets[0, :5] = -100
    return inputs, targets


def loss_and_gradients(model, reduction, half):
    """The loss, and all gradients of 0.3 times it, of two micro-batches that are summed."""
    model.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(*batch(), reduction=reduction)
        (0.3 * loss.sum()).backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.filterwarnings("error")
def test_a_loss_in_chunks_is_the_whole_one(monkeypatch, kind, reduction, half):
    if not half:  # a backward pass that computes logits again leaves `float64`
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with nullcontext() if half else float64():  # of which autocast changes nothing
        model = gpt(architecture=kind).eval()  # no dropout of pairs
        loss, gradients = loss_and_gradients(model, reduction, half)
        for chunk in (1, 20, 95):
            monkeypatch.setattr(gpt_module, "loss_chunk", lambda x, chunk=chunk: chunk)
            own, its = loss_and_gradients(model, reduction, half)
            assert own.dtype == loss.dtype == torch.get_default_dtype()
            assert_close((own, its), (loss, gradients), 0.3 if half else 1e-9)


def test_the_residual_stream_is_in_bf16_if_the_training_is():
    model = gpt()
    seen = []
    model.h[-1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    for dtype in (torch.bfloat16, torch.float16):  # whose largest number is 65,504
        with torch.autocast("cpu", dtype):
            model(*batch())
    model(*batch())
    assert seen == [torch.bfloat16, torch.float32, torch.float32]


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.bytes = max(
            self.bytes, *(getattr(tensor, "nbytes", 0) for tensor in tree_leaves(result)), 0
        )
        return result


@pytest.mark.parametrize("trains", [True, False])
def test_logits_are_never_whole(monkeypatch, trains):
    model = gpt()
    sizes = []
    for chunk in (0, 8):
        monkeypatch.setattr(gpt_module, "loss_chunk", lambda x, chunk=chunk: chunk)
        with Largest() as largest, torch.set_grad_enabled(trains):
            loss = model(*batch(), reduction="sum" if trains else "none")
            if trains:
                loss.backward()
        sizes.append(largest.bytes)
    assert sizes[0] == 4 * 6 * 16 * 384
    assert sizes[1] == max(4 * 384 * 32, 6 * 16 * 128 * 4)  # the head's gradient, or an activation


def on(device, processes=1):
    return SimpleNamespace(device=device, num_processes=processes)


def test_what_is_compiled(monkeypatch):
    """auto: a GPT on GPUs, by blocks where there are several; never a small job."""
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: None)
    monkeypatch.setattr(compiling, "failing_compiler", lambda: None)
    model = gpt()
    auto = partial(resolve_compile, None)
    assert auto(model, on(CUDA)) == ("model", None)
    assert auto(model, on(CUDA, 2)) == ("blocks", None)
    assert auto(torch.nn.Linear(1, 1), on(CUDA)) == ("off", None)
    assert auto(model, on(CPU)) == ("off", None)
    assert auto(model, on(CPU), 19.9) == ("off", None)
    assert auto(model, on(CPU), 20) == ("model", None)
    assert resolve_compile("off", model, on(CPU), 20) == ("off", None)
    assert resolve_compile("blocks", model, on(CUDA)) == ("blocks", None)
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: "Triton")
    assert auto(model, on(CUDA)) == ("off", "Triton")
    assert auto(model, on(CPU)) == ("off", None)
    assert auto(model, on(CPU), 20) == ("off", "Triton")


def test_a_compiler_that_fails_is_no_compiler(monkeypatch):
    """A laptop's compiler may be there and lack OpenMP or headers."""
    monkeypatch.setattr(compiling, "missing_compiler", lambda device: None)

    def broken(function):
        def run(x):
            raise RuntimeError("omp.h is missing")

        return run

    monkeypatch.setattr(torch, "compile", broken)
    words = "a compiler that works (RuntimeError)"
    assert resolve_compile(None, gpt(), on(CPU), 20) == ("off", words)
    # a resume may be on another machine
    assert resolve_compile("model", gpt(), on(CPU)) == ("off", words)


def test_ddp_cuts_no_compiled_block():
    """Dynamo cuts what it compiles below DDP at the bounds of DDP's buckets: a whole model needs
    that for its overlap, a block is all-reduced while the next one computes."""
    for how, cuts in (("model", True), ("blocks", False)):
        # monkeypatch would hide the setting afterwards
        with torch._dynamo.config.patch(optimize_ddp=True):
            compiled(gpt(), how)
            assert torch._dynamo.config.optimize_ddp is cuts


def test_measured_kernels_are_for_runs_that_need_no_equal_bits(monkeypatch):
    """Inductor's measurement may choose another order of sums in a resumed run."""
    with torch._inductor.config.patch(max_autotune_pointwise=False):
        for wanted, deterministic in ((True, False), (True, True), (False, False)):
            monkeypatch.setattr(compiling, "AUTOTUNES_POINTWISE", wanted)
            monkeypatch.setattr(
                torch, "are_deterministic_algorithms_enabled", lambda on=deterministic: on
            )
            compiled(gpt(), "model")
            assert torch._inductor.config.max_autotune_pointwise is (wanted and not deterministic)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for how in ("model", "blocks"):
        assert missing_compiler(CPU) == "a compiler, which is no-such-compiler"
        expect_field("train.compile", how, check_compiler, how, CPU)
    check_compiler("auto", CPU)
    check_compiler("off", CPU)
