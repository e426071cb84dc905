"""Properties of the model that training relies on. test_architecture.py compares it with
transformers' models."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from close import assert_close, distance, float64
from models import random_tokens, tiny
from torch.nn.functional import cross_entropy

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.gpt import GPT, VOCAB_MULTIPLE


def test_padding_is_never_predicted_and_gets_no_gradient():
    model = tiny(vocab_size=65)
    assert model.wte.weight.size(0) == VOCAB_MULTIPLE
    logits = model.head(torch.randn(4, 32))
    assert (logits[:, 65:] == -math.inf).all()
    assert logits[:, :65].isfinite().all()
    model(random_tokens(65), random_tokens(65)).backward()
    assert not model.wte.weight.grad[65:].any()
    assert model.wte.weight.grad[:65].any(dim=1).all()
    unpadded = tiny(vocab_size=256)
    assert (unpadded.padding_mask, unpadded(random_tokens(256)).shape) == (None, (3, 16, 256))


@float64()
def test_reductions_agree_and_ignored_targets_are_not_scored():
    model = tiny()
    tokens = random_tokens(65)
    targets = random_tokens(65, length=17)[:, 1:]
    logits = model(tokens)
    masked = targets.clone()
    masked[0, 3:] = masked[2] = -100
    for right in (targets, masked):
        assert_close(model(tokens, right), cross_entropy(logits.mT, right))
        for reduction in ("none", "sum"):
            found = model(tokens, right, reduction=reduction)
            assert_close(found, cross_entropy(logits.mT, right, reduction=reduction))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activation_checkpointing_changes_no_gradient(architecture, dropout):
    def gradients(activation_checkpointing):
        model = tiny(architecture=architecture, dropout=dropout)
        model.activation_checkpointing = activation_checkpointing
        torch.manual_seed(5)
        loss = model(random_tokens(65), random_tokens(65))
        return torch.autograd.grad(loss, list(model.parameters()))

    plain = gradients(False)
    recomputed = gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize(
    ("dropout", "attention_dropout", "drawn"),
    [(0.0, None, 0), (0.2, None, 3), (0.2, 0.0, 2), (0.0, 0.2, 1)],
)
def test_attention_weights_have_a_dropout_of_their_own(
    dropout, attention_dropout, drawn, monkeypatch
):
    """Of embeddings and residual branches it is another."""
    places = set()
    plain_dropout, plain_attention = F.dropout, F.scaled_dot_product_attention

    def dropped(x, p=0.5, training=True):
        if p and training:
            places.add(sys._getframe(1).f_code.co_qualname.split(".")[0])
        return plain_dropout(x, p, training)

    def attended(*tensors, dropout_p=0.0, **options):
        if dropout_p:
            places.add("weights")
        return plain_attention(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(F, "dropout", dropped)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attended)
    model = tiny(dropout=dropout, attention_dropout=attention_dropout)
    model(random_tokens(65), random_tokens(65))
    assert ("weights" in places) == (drawn in (1, 3))
    assert ({"Attention", "MLP"} <= places) == (drawn in (2, 3))
    places.clear()
    model.eval()(random_tokens(65), random_tokens(65))
    assert not places


def test_initial_weights():
    torch.manual_seed(0)
    model = GPT(ModelConfig(n_layer=8, n_head=4, n_embd=256, block_size=256), 4096)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "ln_" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            std = 0.02 / 4 if name.endswith("c_proj.weight") else 0.02
            assert distance(parameter.std(), std) < 0.02, name
            assert abs(parameter.mean().item()) < 5 * std / math.sqrt(parameter.numel()), name
    loss = model(random_tokens(4096), random_tokens(4096, length=19)[:, 3:])
    assert abs(loss.item() - math.log(4096)) < 0.2


@pytest.mark.parametrize(
    ("layers", "width", "published"), [(12, 768, 124_439_808), (48, 1600, 1_557_611_200)]
)
def test_parameter_counts_of_the_published_models(layers, width, published):
    with torch.device("meta"):
        model = GPT(ModelConfig(n_layer=layers, n_head=width // 64, n_embd=width), 50257)
    padding = (model.wte.weight.size(0) - 50257) * width
    assert model.num_parameters() - padding + 1024 * width == published
