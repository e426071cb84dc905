"""The contenders of `step` do the same work: from
equal weights and equal tokens comes an equal loss."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from close import assert_close

from benchmarks import step
from benchmarks.config import BenchmarkConfig
from gpt2_ddp.export.transformers_layout import HEAD, to_transformers
from gpt2_ddp.model.gpt import GPT

# whose step is bookkeeping
TINY = {"model.n_layer": 1, "model.n_head": 2, "model.n_embd": 32, "model.block_size": 32}
IDS = 257
CPU = torch.device("cpu")


def end():
    raise SystemExit


def a_run_of_one_window(folder):
    """The shard has one window, so all contenders read the
    same; large weights make the loss depend on all of them."""
    run = step.short_run(BenchmarkConfig(device="cpu"), folder, 1, "no", "off", TINY)
    step.random_tokens(Path(run.data.paths[0]), "bytes", run.model.block_size + 1)
    torch.manual_seed(1)
    model = GPT(run.model, IDS)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return run, model


def first_step(monkeypatch, kind, weights, contender, *args):
    """The tokens that a contender's model is given first,
    and what it makes of them with these weights."""
    seen = []
    forward = kind.forward

    def noted(model, *args, **options):
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert {*left.missing_keys} <= {HEAD}, "tied"
        found = forward(model, *args, **options)
        seen.append((args[0] if args else options["input_ids"], found))
        return found

    monkeypatch.setattr(kind, "forward", noted)
    with suppress(SystemExit):
        contender(end, *args)
    monkeypatch.undo()
    assert len(seen) == 1
    return seen[0]


def test_the_first_losses_are_equal(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    run, model = a_run_of_one_window(tmp_path)
    weights = model.state_dict()
    tokens, ours = first_step(monkeypatch, GPT, weights, step.ours, run)
    bare_tokens, bare = first_step(monkeypatch, GPT, weights, step.bare, run, CPU)
    theirs = to_transformers(weights, model)
    kind = transformers.GPT2LMHeadModel
    their_tokens, found = first_step(monkeypatch, kind, theirs, step.hugging_face, run, CPU)
    assert tokens.tolist() == bare_tokens.tolist() == their_tokens.tolist()
    assert_close(ours / run.model.block_size, bare, 1e-4)
    # theirs has no target for a window's last token
    targets_within = model(tokens[:, :-1], tokens[:, 1:])
    assert_close(found.loss, targets_within, 1e-4)
    assert bare > 6, "ln 257 is 5.5: what the weights make of it is in it"
