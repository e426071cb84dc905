"""Each architecture against transformers' class with the same weights, and what all of them share."""

import pytest
import torch
import torch.nn.functional as F
from models import random_tokens
from torch import nn

from gpt2_ddp.config.training import ModelConfig, OptimConfig, TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.generate import Sampling, generate
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer, muon_matrices
from gpt2_ddp.model.transformers_layout import CLASSES, from_transformers, to_transformers, transformers_config

VOCABULARY = 300
KINDS = [("gpt2", None), ("llama", None), ("llama", 2), ("qwen3", 2), ("nanochat", 2), ("nanochat", None)]
each = pytest.mark.parametrize(("kind", "key_heads"), KINDS)


def make(kind: str, key_heads: int | None = None, scale: float = 5.0, **changes) -> GPT:
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


def reference(model: GPT) -> nn.Module:
    """transformers' model with the weights of `model`."""
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, CLASSES[model.config.architecture])
    fields = transformers_config(model.config, VOCABULARY, VOCABULARY - 1)
    del fields["architectures"]
    theirs = kind(kind.config_class(**fields))
    tensors = to_transformers(model.state_dict(), model.config, VOCABULARY)
    missing, unexpected = theirs.load_state_dict(tensors, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    return theirs.eval()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def their_loss(theirs: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(theirs(tokens).logits.flatten(0, 1), targets.flatten())


@each
def test_logits_and_gradients_are_those_of_transformers(kind, key_heads):
    model = make(kind, key_heads)
    theirs, tokens = reference(model), random_tokens(VOCABULARY, length=33)
    tokens, targets = tokens[:, :-1], tokens[:, 1:]
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    model(tokens, targets).backward()
    their_loss(theirs, tokens, targets).backward()
    found, known = to_transformers(gradients(model), model.config, VOCABULARY), gradients(theirs)
    assert known.keys() == found.keys()
    for name, gradient in known.items():
        if not name.endswith("c_attn.bias"):  # that of the keys is 0 in exact arithmetic
            assert (found[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@each
def test_fifty_steps_end_where_those_of_transformers_do(kind, key_heads):
    model = make(kind, key_heads, scale=1.0)
    theirs = reference(model).train()
    config = OptimConfig(lr=1e-3, weight_decay=0.0)
    ours = build_optimizer(model, config)
    other = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=config.betas, eps=config.eps, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        tokens = torch.randint(0, VOCABULARY // 8, (4, 33), generator=generator)
        losses = model(tokens[:, :-1], tokens[:, 1:]), their_loss(theirs, tokens[:, :-1], tokens[:, 1:])
        for loss, optimizer in zip(losses, (ours, other), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert abs(losses[0].item() - losses[1].item()) <= 1e-4
    assert model(tokens[:, :-1], tokens[:, 1:]) < 4, "the model learns that an eighth of the vocabulary occurs"  # pyright: ignore


@each
def test_there_and_back_is_bitwise(kind, key_heads):
    model = make(kind, key_heads)
    state = model.state_dict()
    back = from_transformers(to_transformers(state, model.config, VOCABULARY), model.config, state)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], weight) for name, weight in state.items())


@each
def test_generation_with_a_cache_writes_what_transformers_writes(kind, key_heads):
    model = make(kind, key_heads)
    prompt, new = [1, 2, 3], 20
    rows = generate(model, [prompt, [7]], VOCABULARY - 1, Sampling(new, temperature=0.0))
    settings = {"do_sample": False, "max_new_tokens": new, "suppress_tokens": [VOCABULARY - 1], "pad_token_id": 0}
    written = reference(model).generate(torch.tensor([prompt]), **settings)  # pyright: ignore[reportCallIssue]
    assert rows[0] == written[0, len(prompt) :].tolist()


@each
def test_the_chunked_loss_is_the_loss(kind, key_heads):
    model, tokens = make(kind, key_heads), random_tokens(VOCABULARY, length=33)
    found = []
    for model.loss_chunk in (None, 16):
        model.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *gradients(model).values()])
    for whole, chunked in zip(*found, strict=True):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)


@each
def test_flops_count_every_matrix_product_once(kind, key_heads):
    """By torch's own counter, of a step without attention's scores."""
    from torch.utils.flop_counter import FlopCounterMode

    model, tokens = make(kind, key_heads), random_tokens(VOCABULARY, length=33)
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    counted = sum(count for name, count in counter.get_flop_counts()["Global"].items() if "mm" in str(name))
    scores = 12 * 3 * 64 * 32 * tokens[:, :-1].numel()
    ours = model.flops_per_token() * tokens[:, :-1].numel() - scores
    small = 6 * sum(p.numel() for p in model.parameters() if p.dim() == 1) * tokens[:, :-1].numel()
    assert ours - small == pytest.approx(counted, rel=1e-6)


@each
def test_muon_has_the_matrices_of_the_blocks(kind, key_heads):
    model = make(kind, key_heads)
    assert len(muon_matrices(model, OptimConfig(name="muon"))) == 3 * 4


@pytest.mark.parametrize(
    ("changes", "mistake"),
    [
        ({"n_kv_head": 3}, "model.n_kv_head = 3: should divide model.n_head (4), or be it for gpt2"),
        ({"architecture": "llama", "n_kv_head": 3}, "model.n_kv_head = 3: should divide model.n_head (4)"),
        (
            {"architecture": "llama", "n_embd": 12},
            "model.n_embd = 12: should be a multiple of 2 model.n_head (8), like 8",
        ),
        ({"architecture": "mamba"}, "model.architecture = mamba"),
    ],
)
def test_shapes_that_do_not_fit_are_named(changes, mistake):
    model = {"n_head": 4, "n_embd": 64, "block_size": 32} | changes
    with pytest.raises(UserError) as error:
        TrainingConfig.model_validate({"model": model, "train": {"steps": 1, "global_batch_tokens": 32}})
    assert mistake in str(error.value)
