"""The sides of `step` do the same work: from equal weights and equal tokens comes an equal loss."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpt2_ddp.benchmark import peers, step
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.transformers_layout import HEAD, to_transformers

IDS, CPU = 257, torch.device("cpu")


class OneStep:
    """As `StepTimer`, for one step."""

    def done(self) -> None:
        raise SystemExit


def a_run_of_one_window(folder: Path) -> tuple[TrainingConfig, GPT]:
    """Wherever a side begins to read, it reads the same; with weights so large that a loss depends on all of them."""
    run = step.short_run(BenchmarkConfig(device="cpu"), str(folder), 1, "no", "off", step.TINY)
    step.random_tokens(Path(run.data.paths[0]), IDS, run.model.block_size + 1)
    torch.manual_seed(1)
    model = GPT(run.model, IDS)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return run, model


def first_step(
    monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module], weights: dict[str, Tensor], side: Callable, *args
) -> tuple[Tensor, Any]:
    """The tokens that a side's model is given first, and what it makes of them with these weights."""
    seen, forward = [], kind.forward

    def noted(model: nn.Module, *args: Any, **options: Any) -> Any:
        left = model.load_state_dict(weights, strict=False)
        assert not left.unexpected_keys
        assert {*left.missing_keys} <= {HEAD}, "tied"
        found = forward(model, *args, **options)
        seen.append((args[0] if args else options["input_ids"], found))
        return found

    monkeypatch.setattr(kind, "forward", noted)
    with suppress(SystemExit):
        side(OneStep(), *args)
    monkeypatch.undo()
    assert len(seen) == 1
    return seen[0]


def test_the_first_losses_are_equal(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    run, model = a_run_of_one_window(tmp_path)
    weights = model.state_dict()
    tokens, ours = first_step(monkeypatch, GPT, weights, step.ours, run)
    bare_tokens, bare = first_step(monkeypatch, GPT, weights, peers.bare, run, IDS, CPU)
    theirs = to_transformers(weights, IDS)
    kind = transformers.GPT2LMHeadModel
    their_tokens, found = first_step(monkeypatch, kind, theirs, peers.transformers, run, IDS, CPU)
    assert torch.equal(tokens, bare_tokens)
    assert torch.equal(tokens, their_tokens)
    torch.testing.assert_close(ours / run.model.block_size, bare, rtol=0, atol=1e-4)
    targets_within = model(tokens[:, :-1], tokens[:, 1:])  # theirs has no target for a window's last token
    torch.testing.assert_close(found.loss, targets_within, rtol=0, atol=1e-4)
    assert bare > 6, "ln 257 is 5.5: what the weights make of it is in it"
