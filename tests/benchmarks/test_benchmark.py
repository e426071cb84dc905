"""benchmarks: tables, turns and user errors on made-up
contenders; and, slowly, real ones on a tiny model."""

import pytest
import torch
from ranks import forked_ranks, run_ranks
from runs import started
from test_gpu import TINY_PRESET

from benchmarks import checkpoint, step
from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Case, run_benchmarks
from gpt2_ddp.files import read_json
from gpt2_ddp.training.loop import train_step


def test_ratios_are_of_one_turn_and_say_how_many_times_better_ours_is():
    rates = Case("a", "tokens/s", {OURS: [2.0, 6.0, 9.0], "baseline": [1.0, 2.0, 9.0]})
    seconds = Case(
        "b", "s", {OURS: [2.0, 6.0, 9.0], "baseline": [1.0, 2.0, 9.0]}, more_is_better=False
    )
    assert (rates.ratios("baseline"), seconds.ratios("baseline")) == ([2, 3, 1], [1 / 2, 1 / 3, 1])
    assert "2.000 (1.000–3.000)" in [*rates.lines()][1]


def test_the_json_holds_what_it_takes_to_read_the_figures(tmp_path, monkeypatch):
    cases = [Case("a", "s", {OURS: [1.0], "b": [2.0]}, False)]
    monkeypatch.setattr(checkpoint, "measure", lambda config: cases)
    assert run_benchmarks(
        BenchmarkConfig(only=("checkpoint",), output=str(tmp_path), repeats=3)
    ) == [cases]
    found = read_json(tmp_path / "checkpoint.json")
    assert (found["cases"][0]["figures"], found["settings"]["repeats"]) == (
        {OURS: [1], "b": [2]},
        3,
    )
    assert found["machine"]["torch_version"] in torch.__version__
    assert {"commit", "command"} <= found.keys()


def checkpoints(folder):
    """What each contender of `checkpoint` resumes is what it saved, whatever was trained since."""
    config = BenchmarkConfig(device="cpu", preset=str(folder / "tiny.yaml"))
    settings = step.short_run(config, folder, 1, "no", "off", checkpoint.CHANGES)
    step.random_tokens(folder / "random")
    with started(settings) as training:

        def state():
            snapshot = training.trainer.snapshot()
            return {
                name: value.clone() for name, value in (snapshot.model | snapshot.optimizer).items()
            }

        for name, (save, resume) in checkpoint.contenders(training, folder / "all.pt").items():
            found = {}

            def save_noted(save=save, found=found):
                found.update(state())
                save()

            def resume_changed(resume=resume, found=found):
                train_step(training.trainer)
                assert not any(torch.equal(value, found[name]) for name, value in state().items())
                resume()

            still, durable, *_ = checkpoint.turn(training, save_noted, resume_changed)
            assert all(torch.equal(value, found[name]) for name, value in state().items()), name
            assert (durable > still) == ("background" in name), name


def test_what_a_contender_resumes_is_what_it_saved(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY_PRESET)
    run_ranks(checkpoints, 1, tmp_path)


NANOGPT = """
from dataclasses import dataclass

from torch import nn, optim


@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool = True


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)

    def configure_optimizers(self, weight_decay, lr, betas, kind):
        return optim.AdamW(self.parameters(), lr, betas, weight_decay=weight_decay)

    def forward(self, tokens, targets):
        logits = self.wte(tokens) @ self.wte.weight.T
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""
"""What a checkout's model.py has."""


@pytest.mark.slow
def test_a_tiny_step_of_every_contender(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(NANOGPT)
    monkeypatch.setattr(
        "gpt2_ddp.distributed.spawn.start_ranks", forked_ranks
    )  # fresh ones would import torch for seconds
    preset = tmp_path / "tiny.yaml"
    preset.write_text(TINY_PRESET)
    short = {
        "block_size": 32,
        "precision": ("no",),
        "repeats": 1,
        "steps": 3,
        "output": str(tmp_path / "out"),
    }
    short["nanogpt"] = str(tmp_path)
    (cases,) = run_benchmarks(
        BenchmarkConfig(only=("step",), device="cpu", preset=str(preset), **short)
    )
    rate, memory = cases
    assert rate.figures.keys() == {OURS, step.BARE, "transformers, Accelerate", "nanoGPT"}
    assert all(100 < mebibytes < 4000 for (mebibytes,) in memory.figures.values())
    assert read_json(tmp_path / "out/step.json")["cases"][0]["figures"] == rate.figures
