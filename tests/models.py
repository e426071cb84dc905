"""Small models for the tests, transformers' models of
the same weights, and changes of what those save."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.export.transformers_layout import CLASSES, to_transformers, transformers_config
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.generate import generate
from gpt2_ddp.model.gpt import GPT

TINY = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=16)
OTHERS = {"n_kv_head": 1, "n_inner": 48, "rope_theta": 500.0}
SHAPES = {kind: {"architecture": kind, **OTHERS} for kind in ARCHITECTURES}
SHAPES["gpt2"] = {"n_inner": 48}
"""What a model has of each architecture, other than the defaults."""


def tiny(vocab_size=65, eot=None, **changes):
    """A small model whose every weight differs from its
    initial value, LayerNorms and biases included."""
    torch.manual_seed(0)
    model = GPT(TINY.model_copy(update=changes), vocab_size, eot)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def random_tokens(vocab_size, rows=3, length=16):
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def continued(model, prompts, eot, sampling):
    """The new tokens of each row."""
    rows = [[] for _ in prompts]
    for row, token in generate(model, prompts, eot, sampling):
        rows[row].append(token)
    return rows


def in_transformers(model, eot=0):
    """transformers' model with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, CLASSES[model.config.architecture])
    fields = transformers_config(model.config, model.vocab_size, eot)
    del fields["architectures"]
    theirs = kind(kind.config_class(**fields))
    tensors = to_transformers(model.state_dict(), model)
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    return theirs.eval()


def edit_json(name, *gone, **changes):
    """Changes fields of a file in a folder."""

    def edit(folder):
        values = {**json.loads((folder / name).read_text()), **changes}
        (folder / name).write_text(
            json.dumps({key: value for key, value in values.items() if key not in gone})
        )

    return edit


def edit_weights(change):
    """Changes a folder's model.safetensors."""

    def edit(folder):
        changed = change(load_file(folder / "model.safetensors"))
        save_file(
            {name: value.clone() for name, value in changed.items()}, folder / "model.safetensors"
        )

    return edit
