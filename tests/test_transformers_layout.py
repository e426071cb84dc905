"""The layout of transformers' GPT-2: what it computes is the same, and there and back is bitwise."""

import pytest
import torch
from models import random_tokens, tiny

from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import from_transformers, to_transformers

EOT = 64


def exported(model: GPT) -> dict[str, torch.Tensor]:
    return to_transformers(model.state_dict(), model.vocab_size)


@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back_is_bitwise_and_the_padding_stays_ones_own(bias: bool):
    model, other = tiny(bias=bias), GPT(tiny(bias=bias).config, 65)
    padding = other.wte.weight[65:].clone()
    back = from_transformers(exported(model), other.state_dict())
    other.load_state_dict(back)
    for name, weight in model.state_dict().items():
        if name == "wte.weight":
            assert torch.equal(back[name][:65], weight[:65])
            assert torch.equal(back[name][65:], padding)
            assert not torch.equal(padding, weight[65:])
        else:
            assert torch.equal(back[name], weight), name
    other.load_state_dict(back)
    assert torch.equal(other(random_tokens(65)), model(random_tokens(65)))
    assert all(torch.equal(a, b) for a, b in zip(exported(model).values(), exported(other).values(), strict=True))


@pytest.mark.parametrize(
    ("change", "bias", "words"),
    [
        (lambda tensors: tensors["transformer.h.1.ln_2.bias"].fill_(1e-30), False, "h.1.ln_2.bias is not zero"),
        (lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(129, 32)}), True, "wte.weight has"),
        (lambda tensors: tensors.update({"transformer.wpe.weight": torch.zeros(15, 32)}), True, "wpe.weight has"),
    ],
)
def test_what_does_not_fit_is_named(change, bias, words):
    """Others are in test_initial_weights.py."""
    model = tiny(bias=bias)
    tensors = exported(model)
    change(tensors)
    with pytest.raises(ValueError, match=words):
        from_transformers(tensors, model.state_dict())
