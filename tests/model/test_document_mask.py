"""Documents of a window do not see each other: gradients,
documents run alone, generation, and whole trainings."""

import pytest
import torch
from close import assert_close, float64
from models import SHAPES, continued, tiny
from runs import complete, rows, training_config

from gpt2_ddp import evaluate
from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.model import gpt
from gpt2_ddp.model.generate import Sampling
from gpt2_ddp.tasks.trained_model import load_model
from gpt2_ddp.training.initial_weights import find_model

EOT = 0
VOCAB = 65
T = 16
WINDOWS = {
    "the rest of one, a whole one, the beginning of one": [
        7,
        9,
        3,
        EOT,
        *range(5, 10),
        EOT,
        *range(1, 7),
    ],
    "end-of-text first and last": [EOT, *range(1, 9), EOT, *range(9, 14), EOT],
    "end-of-text alone": [EOT] * T,
    "no end-of-text": [*range(20, 36)],
}


@pytest.fixture(autouse=True)
def no_dropout_of_pairs(monkeypatch):
    monkeypatch.setattr(gpt, "PAIR_DROPOUT", 0.0)


def masked(document_mask=True, kind="gpt2", **changes):
    shape = SHAPES[kind] | {"n_inner": None}
    return tiny(VOCAB, EOT, document_mask=document_mask, **shape | changes)


def pieces(window, eot=EOT):
    """The documents of a window, the first of which may be the rest of one."""
    begins = sorted({0} | {place for place, token in enumerate(window) if token == eot})
    return [window[a:b] for a, b in zip(begins, [*begins[1:], len(window)], strict=True)]


@torch.no_grad()
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("kind", SHAPES)
@float64()
def test_each_document_is_computed_as_if_alone(kind, name):
    """By the model with the mask, and by the same weights without one."""
    model = masked(kind=kind)
    plain = masked(document_mask=False, kind=kind)
    window = WINDOWS[name]
    windows = torch.tensor([window, WINDOWS["no end-of-text"]])
    logits = model(windows)[0]
    for one in (model, plain):
        alone = torch.cat([one(torch.tensor([piece]))[0] for piece in pieces(window)])
        assert_close(logits, alone)
    assert torch.equal(model(torch.tensor([window])), plain(torch.tensor([window]))) == (
        len(pieces(window)) == 1
    )


WAYS = [
    *((kind, "plain") for kind in SHAPES),
    *(("gpt2", way) for way in ("autocast", "recomputed", "traced")),
]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_the_loss_of_a_token_depends_on_its_own_document_alone(kind, way):
    """The loss at t moves with the embeddings of its own
    document up to t, and of nothing else: exactly."""
    model = masked(kind=kind)
    tokens = torch.tensor([*WINDOWS.values()])
    model.activation_checkpointing = way == "recomputed"
    run = torch.compile(model, dynamic=False, backend="aot_eager") if way == "traced" else model
    added = torch.zeros(*tokens.shape, 32, requires_grad=True)
    model.wte.register_forward_hook(lambda *passed: passed[2] + added)
    document = (tokens == EOT).cumsum(dim=1)
    targets = torch.randint(VOCAB, tokens.shape, generator=torch.Generator().manual_seed(1))
    for t in range(T):
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            loss = run(tokens, targets, reduction="none")[:, t].sum()
        (gradient,) = torch.autograd.grad(loss, added)
        seen = (document == document[:, t : t + 1]) & (torch.arange(T) <= t)
        assert torch.equal(gradient.any(dim=2), seen), t


@torch.no_grad()
def test_generation_sees_what_the_plain_forward_sees():
    """From the start of a document on, and from prompts longer than the context."""
    model = masked(block_size=24).eval()
    model.ln_f.bias.data += model.wte.weight[EOT]  # makes end-of-text likelier
    prompts = [[*range(1, 40), 5], [EOT], [8], [EOT, *range(1, 30)]]
    expected = []
    for prompt in prompts:
        seen = prompt[-24:]
        new = []
        for _ in range(30):
            seen = seen[-12:] if len(seen) > 24 else seen
            new.append(int(model(torch.tensor([seen]))[0, -1].argmax()))
            if new[-1] == EOT:
                break
            seen = [*seen, new[-1]]
        expected.append([token for token in new if token != EOT])
    assert continued(model, prompts, EOT, Sampling(30, temperature=0)) == expected
    assert {len(row) < 30 for row in expected} == {True, False}, [*map(len, expected)]


def test_trained_and_evaluated(short_documents, tmp_path):
    """The recorded val_loss is that of the model with its mask. Another run may begin with its
    weights, without one."""
    changes = {
        "model.document_mask": True,
        "eval.tokens": None,
        "train.steps": 3,
        "model.n_layer": 1,
        "eval.every": 5,
    }
    complete(training_config(short_documents, tmp_path, changes))
    begun = {"model.document_mask": False, "train.init_from": str(tmp_path / "run")}
    assert find_model(training_config(short_documents, tmp_path, changes | begun))
    model, tokenizer = load_model(find_checkpoint(tmp_path / "run"))
    assert model.eot == tokenizer.eot
    assert_close(
        rows(tmp_path / "run")[-1]["val_loss"],
        evaluate(model, tokenizer, short_documents).loss,
        1e-5,
        1,
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_a_mask_of_blocks_is_the_dense_one(kind, monkeypatch):
    """Losses and gradients by FlexAttention's plain form: torch has no backward pass of its kernels
    on CPUs."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(gpt, "MASK_BLOCK", 16)
    generator = torch.Generator().manual_seed(3)
    found = {}
    blocks = []
    build = gpt.document_blocks
    monkeypatch.setattr(
        gpt, "document_blocks", lambda document: blocks.append(1) or build(document)
    )
    tokens = torch.randint(12, (4, 48), generator=generator)  # a document has about 12 tokens
    tokens[0] = 5
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(gpt, "BLOCK_MASKS_ON", devices)
        model = masked(kind=kind, block_size=48)
        run = torch.compile(model, dynamic=False, fullgraph=True, backend="aot_eager")
        loss = run(tokens, tokens.roll(-1, 1), reduction="sum")
        found[devices] = [loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])]
    assert_close(found[("cpu",)], found[()], 1e-5)
    assert len(blocks) == 1


WITHOUT_BLOCKS = {
    "not compiled": ({}, 48),
    "a window of part of a block": ({}, 40),
    "dropout": ({"dropout": 0.1}, 48),
    "dropout of attention weights": ({"attention_dropout": 0.1}, 48),
    "recomputed": ({}, 48),
}


@pytest.mark.parametrize("case", WITHOUT_BLOCKS)
def test_a_dense_mask_where_blocks_cannot_be(case, monkeypatch):
    changes, length = WITHOUT_BLOCKS[case]
    monkeypatch.setattr(gpt, "MASK_BLOCK", 16)
    monkeypatch.setattr(gpt, "BLOCK_MASKS_ON", ("cpu",))
    monkeypatch.setattr(gpt, "document_blocks", None)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: case != "not compiled")
    model = masked(block_size=48, **changes)
    model.activation_checkpointing = case == "recomputed"
    tokens = torch.randint(12, (4, length))
    assert model(tokens, tokens).isfinite()
