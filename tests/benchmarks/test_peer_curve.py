"""benchmarks.peer_curve: nanoGPT's model on the windows of a run of ours."""

import json

import torch
from close import assert_close
from commands import expect_error, expect_field
from ranks import run_ranks
from runs import rows, train, training_config

from benchmarks import peer_curve
from benchmarks.peer_curve import PeerCurveConfig, compare_curves
from gpt2_ddp.config.cli import dump
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer

STEPS = 4
CHANGES = {"train.steps": STEPS, "eval.every": 9}


class Ours(GPT):
    """Our model in nanoGPT's clothes."""

    def __init__(self, config, vocab_size):
        torch.manual_seed(config.seed)
        super().__init__(config.model, vocab_size)
        self.optim = config.optim

    def forward(self, tokens, targets=None, reduction="mean"):
        return super().forward(tokens), super().forward(tokens, targets)

    def configure_optimizers(self, *_):
        return build_optimizer(self, self.optim, False)


def test_the_curve_of_our_own_model_is_our_own(corpus, tmp_path, monkeypatch):
    """So windows, their order, the learning rates and clipping are those of the run."""
    config = training_config(corpus, tmp_path, CHANGES)
    run_ranks(train, 1, config)
    run = tmp_path / "run"
    (tmp_path / "model.py").touch()
    monkeypatch.setattr(peer_curve, "nanogpt_model", lambda config, corpus: Ours(config, 512))
    output = tmp_path / "nanogpt.jsonl"
    settings = PeerCurveConfig(run=str(run), nanogpt=str(tmp_path), output=str(output))
    found = compare_curves(settings)
    ours = {row["step"]: row for row in rows(run) if "loss" in row}
    theirs = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["step"] for row in theirs] == [*range(1, STEPS + 1)]
    for row in theirs:
        expected = ours[row["step"]]
        for name in ("loss", "grad_norm"):
            assert_close(row[name], expected[name], 1e-5)
    assert found["step"] == STEPS
    assert_close(found["nanogpt"], found["ours"], 1e-5)
    assert_close(found["nanogpt_val_loss"], found["val_loss"], 1e-5)


def test_a_checkout_that_is_missing(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 1})
    run_ranks(train, 1, config)
    settings = PeerCurveConfig(run=str(tmp_path / "run"), nanogpt=str(tmp_path))
    expect_field("nanogpt", str(tmp_path), compare_curves, settings)


def test_a_run_that_cannot_be_followed(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 1})
    run_ranks(train, 1, config)
    run = tmp_path / "run"
    settings = PeerCurveConfig(run=str(run), nanogpt=str(tmp_path))
    two = {"data.path": [str(corpus), str(tmp_path)], "data.weights": [1, 1], "train.steps": 1}
    (run / "config.yaml").write_text(dump(training_config(corpus, tmp_path, two)))
    expect_error("run = .*mixes folders", compare_curves, settings)
    (run / "metrics.jsonl").write_text("")
    expect_error("run = .*has no row of a step", compare_curves, settings)
