"""Each architecture against transformers' class with
the same weights, and what all of them share."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from close import assert_close, float64
from models import in_transformers, random_tokens

from gpt2_ddp.config.training import LEARNED_POSITIONS, ModelConfig
from gpt2_ddp.export.transformers_layout import LAYOUTS, to_transformers
from gpt2_ddp.model import architecture
from gpt2_ddp.model.architecture import ARCHITECTURES, causal_attention
from gpt2_ddp.model.generate import empty_cache, next_logits
from gpt2_ddp.model.gpt import GPT, count_parameters
from gpt2_ddp.model.optim import muon_matrices

VOCABULARY = 300
ALL = [(name, None) for name in ARCHITECTURES]
ALL += [(name, 2) for name, kind in ARCHITECTURES.items() if kind.rotary]
"""Each architecture, and its heads of keys."""
of_transformers = pytest.mark.parametrize(
    ("kind", "key_heads"), [case for case in ALL if case[0] in LAYOUTS]
)
each = pytest.mark.parametrize(("kind", "key_heads"), ALL)


def make(kind, key_heads=None, scale=5.0, **changes):
    """A small model whose every weight matters."""
    torch.manual_seed(0)
    shape = {"n_layer": 3, "n_head": 4, "n_embd": 64, "block_size": 32} | changes
    model = GPT(ModelConfig(architecture=kind, n_kv_head=key_heads, **shape), VOCABULARY)  # pyright: ignore
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(scale)
    return model


def gradients(model):
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_every_architecture_of_the_configuration_is_registered():
    field = ModelConfig.model_fields["architecture"]
    assert get_args(field.annotation) == tuple(ARCHITECTURES)
    learned = {name for name, kind in ARCHITECTURES.items() if not kind.rotary}
    assert learned == LEARNED_POSITIONS


@pytest.mark.parametrize(
    ("shape", "length"),
    [
        ({}, 32),
        ({"n_layer": 1, "n_head": 6, "n_embd": 96}, 7),
        ({}, 1),
        ({"tie_word_embeddings": True}, 7),
        ({"tie_word_embeddings": False}, 7),
    ],
)
@of_transformers
@float64()
def test_logits_and_gradients_are_those_of_transformers(kind, key_heads, shape, length):
    model = make(kind, key_heads, **shape)
    theirs = in_transformers(model)
    tokens = random_tokens(VOCABULARY, length=length + 1)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    assert_close(model(tokens), theirs(tokens).logits)
    model(tokens, targets).backward()
    F.cross_entropy(theirs(tokens).logits.mT, targets).backward()
    assert_close(to_transformers(gradients(model), model), gradients(theirs))


def test_the_head_is_the_embedding_where_the_field_or_the_architecture_says_so():
    tied = {kind: make(kind).lm_head is None for kind in ARCHITECTURES}
    assert tied == {kind: kind == "gpt2" for kind in ARCHITECTURES}
    for kind in ARCHITECTURES:
        for value in (True, False):
            assert (make(kind, tie_word_embeddings=value).lm_head is None) is value


@pytest.mark.parametrize("key_heads", [4, 2])
def test_short_attention_by_products_is_that_of_torch(key_heads, monkeypatch):
    torch.manual_seed(0)
    shapes = [(2, heads, 64, 16) for heads in (4, key_heads, key_heads)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    theirs = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    found = causal_attention(*inputs)
    assert_close(found, theirs)
    noise = torch.randn_like(found)
    assert_close(*(torch.autograd.grad(y, inputs, noise) for y in (found, theirs)))
    used = []
    monkeypatch.setattr(
        architecture, "causal_attention", lambda *parts: used.append(len(parts)) or parts[0]
    )
    model = make("gpt2", block_size=257)
    tokens = torch.zeros(1, 257, dtype=torch.int64)
    others = [(257, "bf16", True), (32, "bf16", True), (64, "bf16", False), (64, "no", True)]
    for length, dtype, trains in [(64, "bf16", True), (256, "bf16", True), *others]:
        with (
            torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"),
            torch.set_grad_enabled(trains),
        ):
            model(tokens[:, :length])
    assert len(used) == 2 * 3, "training on 64 to 256 tokens in bf16 only, in each layer"


@each
def test_flops_count_every_matrix_product_once_and_muon_has_the_matrices_of_the_blocks(
    kind, key_heads
):
    """By torch's own counter, of a step without attention's scores."""
    from torch.utils.flop_counter import FlopCounterMode

    model = make(kind, key_heads)
    tokens = random_tokens(VOCABULARY, length=33)
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    counted = sum(
        count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name)
    )
    no_products = 12 * 3 * 64 * 32 + 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert (model.flops_per_token() - no_products) * tokens[:, 1:].numel() == counted
    assert len(muon_matrices(model)) == 3 * 4
    assert count_parameters(model.config, VOCABULARY) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@torch.no_grad()
@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@float64()
def test_cached_logits_are_those_of_the_whole_forward(kind, key_heads, dtype):
    model = make(kind, key_heads, scale=1.0).to(dtype).eval()
    tokens = random_tokens(VOCABULARY, length=32)
    cache = empty_cache(model, len(tokens), 32)
    found = [next_logits(model, tokens[:, :length], cache) for length in range(20, 33)]
    near = 1e-9 if dtype == torch.float64 else 0.2
    assert_close(torch.stack(found, dim=1)[..., :VOCABULARY], model(tokens)[:, 19:], near)
