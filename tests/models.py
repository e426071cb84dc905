"""Small models for the tests."""

import torch

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.model.gpt import GPT

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)


def tiny(vocab_size: int = 65, eot: int | None = None, **changes) -> GPT:
    """A small model whose every weight differs from its initial value, LayerNorms and biases included."""
    torch.manual_seed(0)
    model = GPT(TINY.model_copy(update=changes), vocab_size, eot)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def random_tokens(vocab_size: int, rows: int = 3, length: int = 16) -> torch.Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))
