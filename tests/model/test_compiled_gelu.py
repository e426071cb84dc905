"""GELU by a sigmoid, in compiled code: values and gradients of the tanh's, and nothing more is
kept."""

import pytest
import torch
from close import assert_close

from gpt2_ddp.model import architecture
from gpt2_ddp.model.architecture import gelu


def run_compiled(monkeypatch, devices, dtype):
    """Output and gradient of compiled GELU between two products, and the bytes that are saved for
    the backward pass."""
    torch._dynamo.reset()
    monkeypatch.setattr(architecture, "SIGMOID_GELU_ON", devices)
    torch.manual_seed(0)
    weight = (torch.randn(64, 64) / 4).to(dtype)
    x = (3 * torch.randn(32, 64)).to(dtype).requires_grad_()
    names = []
    sizes = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return torch._inductor.compile(graph, inputs)

    run = torch.compile(
        lambda x: gelu(x @ weight) @ weight, dynamic=False, fullgraph=True, backend=backend
    )
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.nbytes) or t, lambda t: t
    ):
        y = run(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert any("sigmoid" in name for name in names) == bool(devices)
    return y.detach(), gradient, sum(sizes)


@pytest.mark.slow  # by inductor, which fails where `make test-kinds` emulates old processors
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_gelu_by_a_sigmoid_is_the_tanh_approximation(monkeypatch, dtype, tolerance):
    plain, ours = (run_compiled(monkeypatch, devices, dtype) for devices in ((), ("cpu",)))
    assert_close(ours[:2], plain[:2], tolerance)
    assert ours[2] == plain[2]  # GELU's input, in the dtype of the products


def test_only_compiled_code_has_it(monkeypatch):
    monkeypatch.setattr(architecture, "SIGMOID_GELU_ON", ("cpu",))
    x = torch.randn(9)
    assert torch.equal(gelu(x), torch.nn.functional.gelu(x, approximate="tanh"))
    x = torch.tensor([-1e6, -100.0, 100.0, 1e6], requires_grad=True)  # no NaN where exp overflows
    torch._dynamo.reset()
    y = torch.compile(gelu, backend="aot_eager")(x)
    y.sum().backward()
    assert torch.equal(y.abs(), torch.tensor([0.0, 0.0, 100.0, 1e6]))
    assert x.grad is not None
    assert torch.equal(x.grad.abs(), torch.tensor([0.0, 0.0, 1.0, 1.0])), x.grad
