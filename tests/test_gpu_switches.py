"""Each way of computing that GPUs may have of their own trains as the usual one does: losses and
gradient norms of 60 steps. With GPU_DEVICE=cpu on a CPU.

    .venv/bin/pytest -m gpu tests/test_gpu_switches.py
"""

import os

import pytest
import torch

from gpt2_ddp.config.training import ModelConfig, OptimConfig
from gpt2_ddp.model import architecture, compiled, gpt, loss
from gpt2_ddp.model import optim as muon
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer

DEVICE = os.environ.get("GPU_DEVICE", "cuda")
STEPS = 60
MICRO_BATCHES = 2
WINDOWS = 6
LENGTH = 256
VOCAB = 1000
EOT = 999
ON = (DEVICE,)
SWITCHES = {
    "loss": [(loss, "FUSED_ON", ON)],
    "loss of capped logits": [(loss, "FUSED_ON", ON)],
    "gelu": [(architecture, "SIGMOID_GELU_ON", ON)],
    "autotune": [(compiled, "AUTOTUNES_POINTWISE", True)],
    "muon": [(muon, "TOGETHER_ON_GPUS", 2**26), (muon, "FOREACH_ON", ON)],
    "documents": [(gpt, "BLOCK_MASKS_ON", ON)],
}
"""Name -> what is set: module, attribute, value."""


def tokens_of(step):
    """Inputs and targets: arithmetic sequences, which are soon learned in part, and an end-of-text
    now and then."""
    generator = torch.Generator().manual_seed(step)
    start, stride = (torch.randint(1, 99, (WINDOWS, 1), generator=generator) for _ in range(2))
    tokens = (start + stride * torch.arange(LENGTH + 1)) % (VOCAB - 1)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.02] = EOT
    tokens = tokens.to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def curve(name):
    """Losses and gradient norms of the steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind = "nanochat" if "capped" in name else "gpt2"
    config = ModelConfig(
        n_layer=2,
        n_head=2,
        n_embd=128,
        block_size=LENGTH,
        architecture=kind,
        document_mask=name == "documents",
    )
    model = GPT(config, VOCAB, EOT).to(DEVICE)
    run = compiled.compiled(model, "model")
    optim = OptimConfig(name="muon" if name == "muon" else "adamw")
    optimizer = build_optimizer(model, optim, bf16=True)
    found = []
    for step in range(STEPS):
        total = 0
        for micro in range(MICRO_BATCHES):
            with torch.autocast(DEVICE, torch.bfloat16):
                scored = run(*tokens_of(step * MICRO_BATCHES + micro), reduction="sum")
            (scored / (MICRO_BATCHES * WINDOWS * LENGTH)).backward()
            total = total + scored.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(torch.stack([total / (MICRO_BATCHES * WINDOWS * LENGTH), norm]))
    return torch.stack(found).cpu().T


@pytest.mark.gpu
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_trains_as_the_usual_way_does(name, monkeypatch):
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.exit("no CUDA device here; GPU_DEVICE=cpu tries it", 2)
    if DEVICE == "cpu" and name == "documents":
        pytest.skip("FlexAttention has no backward pass on CPUs")
    # monkeypatch would hide it afterwards
    with torch._inductor.config.patch(max_autotune_pointwise=False):
        usual, norms = curve(name)
        for module, attribute, value in SWITCHES[name]:
            monkeypatch.setattr(module, attribute, value)
        losses, own_norms = curve(name)
    loss_error = (losses / usual - 1).abs().max()
    norm_errors = (own_norms / norms - 1).abs()
    errors = (
        f"losses {loss_error:.2e} at most; norms {norm_errors.median():.2e}, at most "
        f"{norm_errors.max():.2e}"
    )
    print(f"{name}: loss {usual[0]:.3f} to {usual[-1]:.3f}; apart: {errors}")
    assert usual[-1] < usual[0] - 0.5, "nothing was learned"
    assert loss_error < 0.003
    assert norm_errors[:10].max() < 0.01  # the same weights, nearly
    assert norm_errors.median() < 0.01  # one step of a fast descent multiplies a difference
