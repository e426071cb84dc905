"""Properties of the model that training relies on. tests/test_architecture.py compares it with transformers' models."""

import math

import pytest
import torch
from close import assert_close, distance, float64
from models import random_tokens, tiny

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.gpt import GPT, VOCAB_MULTIPLE

SIZES = {
    "124M": (ModelConfig(n_layer=12, n_head=12, n_embd=768), 124_439_808),
    "350M": (ModelConfig(n_layer=24, n_head=16, n_embd=1024), 354_823_168),
    "774M": (ModelConfig(n_layer=36, n_head=20, n_embd=1280), 774_030_080),
    "1558M": (ModelConfig(n_layer=48, n_head=25, n_embd=1600), 1_557_611_200),
}


def test_padding_is_never_predicted_and_gets_no_gradient():
    model = tiny(vocab_size=65)
    assert model.wte.weight.size(0) == VOCAB_MULTIPLE
    logits = model.head(torch.randn(4, 32))
    assert torch.equal(logits[:, 65:], torch.full((4, 63), -math.inf))
    assert logits[:, :65].isfinite().all()
    model(random_tokens(65), random_tokens(65)).backward()
    assert torch.equal(model.wte.weight.grad[65:], torch.zeros(63, 32))
    assert model.wte.weight.grad[:65].abs().sum(dim=1).min() > 0
    unpadded = tiny(vocab_size=256)
    assert (unpadded.padding_mask, unpadded.wte.weight.size(0)) == (None, 256)
    assert unpadded(random_tokens(256)).shape == (3, 16, 256)


@float64()
def test_reductions_agree_and_ignored_targets_are_not_scored():
    model, tokens, targets = tiny(), random_tokens(65), random_tokens(65, length=17)[:, 1:]
    each = model(tokens, targets, reduction="none")
    assert each.shape == targets.shape
    assert_close(model(tokens, targets, reduction="sum"), each.sum())
    assert_close(model(tokens, targets), each.mean())
    probabilities = model(tokens).log_softmax(dim=-1)
    assert_close(each, -probabilities.gather(2, targets[..., None])[..., 0])
    ignored = torch.zeros_like(targets, dtype=torch.bool)
    ignored[0, 3:] = ignored[2, :] = True
    masked = targets.masked_fill(ignored, -100)
    assert_close(model(tokens, masked, reduction="none"), each.masked_fill(ignored, 0.0))
    assert_close(model(tokens, masked), each[~ignored].mean())


def test_without_biases():
    assert not [name for name, _ in tiny(bias=False).named_parameters() if name.endswith("bias")]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("architecture", ["gpt2", "llama", "nanochat"])
def test_activation_checkpointing_changes_no_gradient(architecture, dropout):
    def gradients(activation_checkpointing: bool) -> tuple[torch.Tensor, ...]:
        model = tiny(architecture=architecture, dropout=dropout)
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(5)
        loss = model(random_tokens(65), random_tokens(65))
        return torch.autograd.grad(loss, list(model.parameters()))

    plain, recomputed = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_initial_weights():
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=8, n_head=4, n_embd=256, block_size=256), 4096)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert distance(parameter.std(), std) < 0.02, name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
    loss = model(random_tokens(4096), random_tokens(4096, length=19)[:, 3:])
    assert abs(loss.item() - math.log(4096)) < 0.2


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_of_the_published_models(size):
    config, published = SIZES[size]
    with torch.device("meta"):
        model = GPT(config, 50257)
    padding = (model.wte.weight.size(0) - 50257) * config.n_embd
    positions = 1024 * config.n_embd
    assert model.num_parameters() - padding + positions == published
    if size == "124M":
        assert model.flops_per_token() == 6 * 123_689_472 + 12 * 12 * 768 * 1024 == 855_383_040
