"""Generation: the KV cache against the plain forward
pass, independence of rows, sampling, and the script."""

import shutil
from dataclasses import replace

import models
import numpy as np
import pytest
import torch
from commands import expect_error
from golden_runs import GOLDEN
from models import continued
from runs import checkpoint_at

from gpt2_ddp.checkpoint.verify import find_checkpoint
from gpt2_ddp.config.tools import GenerateConfig
from gpt2_ddp.model.architecture import Attention, Context
from gpt2_ddp.model.generate import BATCH_ROWS, Sampling, sample
from gpt2_ddp.tasks.trained_model import generate_text, load_model, load_weights

EOT = 0
PROMPTS = [[5, 9, 3], [11], [EOT], [7, 7, 2, 30, 41, 8, 19, 64, 23]]


def tiny(vocab_size=65, **changes):
    return models.tiny(vocab_size, **{"block_size": 64, **changes}).eval()


@torch.no_grad()
def plain_greedy(model, prompt, count):
    """What greedy decoding should yield, from whole forward passes."""
    window = prompt
    result = []
    for _ in range(count):
        if len(window) > model.config.block_size:
            window = window[-model.config.block_size // 2 :]
        token = int(model(torch.tensor([window]))[0, -1].argmax())
        window = [*window, token]
        result = [*result, token]
    return result


@pytest.mark.parametrize("block_size", [64, 16])
def test_greedy_continues_as_the_plain_forward_says(block_size):
    """Beyond the block, the last half of the context is kept."""
    model = tiny(block_size=block_size)
    results = continued(model, PROMPTS, -1, Sampling(40, temperature=0))
    assert results == [plain_greedy(model, prompt, 40) for prompt in PROMPTS]
    assert len({tuple(result) for result in results}) == len(PROMPTS)


@pytest.mark.parametrize("layers", [{0}, {0, 1}])
def test_attention_without_a_cache_is_encoded_anew(monkeypatch, layers):
    """That of a model of one's own may ignore the cache, in one layer or all."""
    attend = Attention.forward

    def forward(self, x, context=Context()):  # noqa: B008
        return attend(self, x, context._replace(cache=None) if self.layer in layers else context)

    monkeypatch.setattr(Attention, "forward", forward)
    model = tiny(n_layer=2)
    assert continued(model, [[1, 2, 3]], 64, Sampling(12, 0))[0] == plain_greedy(
        model, [1, 2, 3], 12
    )


def test_more_rows_than_a_batch():
    model = tiny()
    prompts = [[1 + index] for index in range(BATCH_ROWS + 3)]
    results = continued(model, prompts, 7, Sampling(5, seed=4))
    assert continued(model, [[60], *prompts[1:]], 7, Sampling(5, seed=4))[1:] == results[1:]
    same = continued(model, [[1]] * (2 * BATCH_ROWS), -1, Sampling(20, top_k=None))
    # no two rows share their random numbers
    assert len({tuple(result) for result in same}) == len(same)


@pytest.mark.parametrize(
    ("block_size", "prompt", "same"),
    [
        (16, [*range(1, 41)], [*range(25, 41)]),
        (64, [], [EOT]),
        (1, [3, 5], [5]),
        (2, [3, 4, 5], [4, 5]),
    ],
)
def test_a_long_prompt_loses_its_beginning_and_an_empty_one_starts_a_document(
    block_size, prompt, same
):
    model = tiny(block_size=block_size)
    found, other = (
        continued(model, [row], -1 if prompt else EOT, Sampling(10, seed=3))
        for row in (prompt, same)
    )
    assert found == other
    assert len(found[0]) == 10 or not prompt


def test_each_row_stops_at_its_end_of_text():
    model = tiny()
    endless = continued(model, PROMPTS, -1, Sampling(30, temperature=1.5, top_k=None))
    eot = endless[0][12]
    results = continued(model, PROMPTS, eot, Sampling(30, temperature=1.5, top_k=None))
    assert results == [row[: row.index(eot)] if eot in row else row for row in endless]
    assert len({len(row) for row in results}) > 1


def test_global_generators_and_the_training_mode_are_left_alone():
    model = tiny(dropout=0.5).train()
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = continued(model, PROMPTS, EOT, Sampling(10))
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert continued(model.eval(), PROMPTS, EOT, Sampling(10)) == first  # dropout was off
    assert not model.training


def draw(logits, count=40_000, **options):
    """Shares of each token in `count` samples."""
    uniform = torch.from_numpy(np.random.default_rng(7).random(count, np.float32))
    settings = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | options
    drawn = sample(torch.tensor(logits).expand(count, -1), uniform, Sampling(**settings))
    return torch.bincount(drawn, minlength=len(logits)) / count


LOGITS = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3]).log().tolist()


SHARES = [
    ({}, [0.05, 0.4, 0.15, 0.1, 0.3]),
    ({"top_k": 100}, [0.05, 0.4, 0.15, 0.1, 0.3]),
    ({"temperature": 0.5}, [0.0025, 0.16, 0.0225, 0.01, 0.09]),
    ({"temperature": 2.0}, [0.22360679775, 0.632455532, 0.3872983346, 0.316227766, 0.5477225575]),
    ({"top_k": 1}, [0, 1, 0, 0, 0]),
    ({"top_p": 0.01}, [0, 1, 0, 0, 0]),
    ({"temperature": 1e-30}, [0, 1, 0, 0, 0]),
    ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ({"top_k": 2}, [0, 0.4, 0, 0, 0.3]),
    ({"top_p": 0.69}, [0, 0.4, 0, 0, 0.3]),
    ({"top_p": 0.71}, [0, 0.4, 0.15, 0, 0.3]),
    ({"top_k": 3, "top_p": 0.8}, [0, 0.4, 0, 0, 0.3]),
]
"""Options, and what each token's share is proportional
to. Of the three likeliest, two hold 82 %."""


@pytest.mark.parametrize(("options", "shares"), SHARES)
def test_sampling_distribution(options, shares):
    drawn = draw(LOGITS, **options)
    expected = torch.tensor(shares, dtype=torch.float32)
    expected /= expected.sum()
    assert not drawn[expected == 0].any()
    standard_error = (expected * (1 - expected) / 40_000).sqrt().clamp(min=1e-9)
    assert ((drawn - expected).abs() / standard_error).max() < 4.5


def test_the_edges_of_sampling():
    """Tokens without probability are never drawn; the least options draw the likeliest token."""
    logits = torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]])
    uniform = torch.tensor([0.0, 1 - 2**-24])
    assert sample(
        logits.expand(2, -1), uniform, Sampling(temperature=1.0, top_k=None)
    ).tolist() == [2, 1]
    logits = torch.tensor([[1.0, 3.0, 2.0], [-1e5, -3e5, -2e5]])
    for options in ({"temperature": 1e-300}, {"temperature": 1e-45}, {"top_p": 1e-320}):
        assert sample(
            logits, torch.tensor([0.9, 0.5]), Sampling(top_k=None, **options)
        ).tolist() == [1, 0], options


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A recorded run folder."""
    return shutil.copytree(GOLDEN / "gpt2_run", tmp_path_factory.mktemp("run") / "run")


def test_a_checkpoint_with_what_no_training_writes(checkpoint, tmp_path):
    found = find_checkpoint(checkpoint, kind="gpt2")
    for model in ({"block_size": None}, {"n_layer": 0}):
        strange = replace(found, config=found.config | {"model": found.config["model"] | model})
        expect_error(r"config.yaml: model\.\w+ = ", load_model, strange)
    task = found.state.task.model_copy(update={"tokenizer_sha256": "0" * 64})
    other = replace(found, state=found.state.model_copy(update={"task": task}))
    expect_error("^checkpoint = .*tokenizer.json: ", load_model, other)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    expect_error("^checkpoint = ", load_weights, replace(found, path=tmp_path), tiny())


def test_run_prints_every_sample(checkpoint, capsys):
    prompts = {"prompts": ("def main", "return"), "num_samples": 2, "max_new_tokens": 12}
    config = GenerateConfig(checkpoint=str(checkpoint), device="cpu", **prompts)
    assert generate_text(config) == 0
    first = capsys.readouterr()
    samples = first.out.split("-" * 80 + "\n")
    assert [sample[:3] for sample in samples] == ["def", "def", "ret", "ret"]
    assert len(set(samples)) == 4
    generate_text(config)
    assert capsys.readouterr().out == first.out
    generate_text(
        config.model_copy(update={"seed": 1, "checkpoint": str(checkpoint_at(checkpoint, 10))})
    )
    assert capsys.readouterr().out != first.out


def test_a_single_sample_is_printed_in_whole_characters(checkpoint, capsys, monkeypatch):
    model, tokenizer = load_model(find_checkpoint(checkpoint))
    text = "año 日本 🙂🙃 \N{REPLACEMENT CHARACTER} x"
    pieces = []
    # cut off in a character
    ids = [*tokenizer.encode(text).tolist(), *tokenizer.encode("🙂")[:1].tolist()]

    def generate(model, rows, eot, sampling):
        for token in ids:
            yield 0, token
            pieces.append(capsys.readouterr().out)
            assert text.startswith("".join(pieces)), "nothing that is written is taken back"

    monkeypatch.setattr("gpt2_ddp.tasks.trained_model.generate", generate)
    monkeypatch.setattr(
        "gpt2_ddp.tasks.trained_model.load_model", lambda *given: (model, tokenizer)
    )
    generate_text(GenerateConfig(checkpoint=str(checkpoint), device="cpu"))
    assert "".join(pieces) == text
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"
    assert len({*pieces}) > 6


@pytest.mark.parametrize("samples", [1, 2])
def test_a_stop_leaves_what_was_written(checkpoint, monkeypatch, capsys, samples):
    config = GenerateConfig(
        checkpoint=str(checkpoint), prompts=("def",), num_samples=samples, device="cpu"
    )
    generate_text(config.model_copy(update={"max_new_tokens": 5}))
    whole = capsys.readouterr().out
    left = [*range(5)]
    monkeypatch.setattr(
        "gpt2_ddp.model.generate.sample", lambda *args: (left.pop(), sample(*args))[1]
    )
    with pytest.raises(IndexError):
        generate_text(config.model_copy(update={"max_new_tokens": 50}))
    assert capsys.readouterr().out == whole
