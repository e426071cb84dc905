"""Evaluation: every target once, whatever the ranks and the batch."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from close import assert_close, float64, in_float64
from commands import expect_error
from ranks import run_ranks
from runs import gpt_state, resolved, training_config

from gpt2_ddp.checkpoint.format import Checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.evaluation.evaluate import EvalSet, evaluate
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.preparation.encode import write_manifest
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint
from gpt2_ddp.tasks.pretraining import Pretraining

SHAPE = ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=48)


def model():
    torch.manual_seed(0)
    return GPT(SHAPE, 512)


def score(corpus, cases):
    """Evaluates on this rank by each batch size, number of tokens, limit, which cuts the stream's
    length: for splits with fewer batches than ranks; and stride."""
    from gpt2_ddp.distributed.launch import build_accelerator

    class Cut(TokenStream):
        def __len__(self):
            return Cut.limit or super().__len__()

    accelerator = build_accelerator("cpu", "no")
    found = []
    token_bytes = load_tokenizer(str(corpus / "tokenizer.json")).token_bytes()
    prepared = accelerator.prepare_model(model(), evaluation_mode=True)
    for batch_size, tokens, limit, *stride in cases:
        Cut.limit = limit
        stream = Cut(corpus, read_manifest(corpus), "val")
        data = EvalSet(stream, SHAPE.block_size, tokens, token_bytes, *stride)
        result = evaluate(accelerator, prepared, data, batch_size)
        found.append((result.nll, result.tokens, result.bytes))
    return found


def validation_tokens(corpus):
    stream = TokenStream(corpus, read_manifest(corpus), "val")
    return torch.from_numpy(stream.read(np.array([0]), len(stream))[0].astype(np.int64))


def by_hand(corpus):
    """One sequence at a time, in fp64 sums; the tail alone."""
    tokens = validation_tokens(corpus)
    scorer = model().eval()
    nll = 0.0
    count = 0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, SHAPE.block_size):
            row = tokens[start : start + SHAPE.block_size + 1]
            logits = scorer(row[None, :-1]).double()
            nll += torch.nn.functional.cross_entropy(logits[0], row[1:], reduction="sum").item()
            count += len(row) - 1
    text = load_tokenizer(str(corpus / "tokenizer.json")).decode(
        tokens[tokens != read_manifest(corpus).eot].tolist()
    )
    return nll, count, len(text.encode())


@float64()
def test_every_target_once_for_all_ranks_and_batches(corpus):
    expected_nll, expected_tokens, expected_bytes = by_hand(corpus)
    assert expected_tokens == read_manifest(corpus).tokens("val") - 1
    assert expected_tokens % SHAPE.block_size, "the corpus should have a tail"
    (alone,) = run_ranks(in_float64, 1, score, corpus, [(size, None, None) for size in (1, 7, 64)])
    limits = [2, 48, 49, 50, 97]  # which leave ranks without batches
    cases = [
        (4, None, None),
        (16, None, None),
        (4, 480, None),
        *[(4, None, limit) for limit in limits],
    ]
    ranks = run_ranks(in_float64, 3, score, corpus, cases, timeout=60)
    found = [*alone, *[rank[case] for rank in ranks for case in (0, 1)]]
    assert {(tokens, spelled) for _, tokens, spelled in found} == {
        (expected_tokens, expected_bytes)
    }
    losses = [nll / tokens for nll, tokens, _ in found]
    assert_close(losses, [expected_nll / expected_tokens] * len(losses))
    assert ranks[0] == ranks[1] == ranks[2]
    assert [tokens for _, tokens, _ in ranks[0][2:]] == [480, *[limit - 1 for limit in limits]]


def by_hand_with_context(tokens, stride):
    """As transformers' page on the perplexity of fixed-length models: one window after another,
    whose targets up to the end of the window before are left out. Losses in nats, one for each
    target."""
    scorer = model().eval()
    losses = []
    for start in range(0, len(tokens), stride):
        row = tokens[start : start + SHAPE.block_size + 1]
        new = min(start + SHAPE.block_size, len(tokens) - 1) - len(losses)
        with torch.no_grad():
            logits = scorer(row[None, :-1]).double()[0]
        losses += torch.nn.functional.cross_entropy(logits[-new:], row[-new:], reduction="none")
        if len(losses) == len(tokens) - 1:
            break
    return torch.stack(losses)


@float64()
def test_with_context_every_target_once_on_several_ranks(corpus):
    """For strides that divide the context or not, and streams of a few tokens more or less than a
    window. A stride of a whole window is the same as none."""
    tokens = validation_tokens(corpus)
    limits = [2, 48, 49, 50, 64, 65, 66, 97]
    cases = [(4, None, None, stride) for stride in (12, 17, 47)]
    cases += [(4, None, limit, 16) for limit in limits] + [(4, None, 60, 1)]
    cases += [(4, None, None, 48), (4, None, None), (4, 480, None, 48), (4, 480, None)]
    ranks = run_ranks(in_float64, 2, score, corpus, cases, timeout=60)
    assert ranks[0] == ranks[1]
    *found, whole, usual, some, usual_some = ranks[0]
    assert whole == usual
    assert some == usual_some
    token_bytes = load_tokenizer(str(corpus / "tokenizer.json")).token_bytes()
    for (_, _, limit, stride), (nll, count, spelled) in zip(cases, found, strict=False):
        text = tokens[:limit]
        right = by_hand_with_context(text, stride)
        assert count == len(right) == len(text) - 1
        assert spelled == token_bytes[text[1:]].sum()
        assert_close(nll, right.sum().item(), says=(limit, stride))


@float64()
def test_some_of_the_targets_with_context(corpus):
    """In whole windows, evenly spread: all targets of the first, `stride` of the others."""
    tokens = validation_tokens(corpus)
    losses = by_hand_with_context(tokens, 12)
    n_windows = 1 + (len(tokens) - 1 - 48) // 12
    cases = [(4, n, None, 12) for n in (1, 48, 49, 480, 10**9)]
    (found,) = run_ranks(in_float64, 1, score, corpus, cases)
    for windows, (nll, count, _) in zip((1, 1, 2, 37), found, strict=False):
        chosen = [k * n_windows // windows for k in range(1, windows)]
        scored = [*range(48), *[48 + 12 * k - 12 + i for k in chosen for i in range(12)]]
        assert count == len(scored)
        assert_close(nll, losses[scored].sum().item(), says=windows)
    assert found[-1][1] == len(losses)


def test_a_stride_from_the_command(trained, corpus, tmp_path, capsys):
    """The line names it, also for several folders; a wrong one is an error of one line."""
    shutil.copytree(corpus, tmp_path / "other")
    asked = {"checkpoint": str(trained), "device": "cpu", "mixed_precision": "no"}
    scores = []
    folders = (str(trained.parent / "data"), str(tmp_path / "other"))
    for fields in ({}, {"stride": 8}, {"stride": 8, "data": folders}):
        assert evaluate_checkpoint(EvaluateConfig(**asked, **fields)) == 0
        scores.append(capsys.readouterr().out)
    assert "stride" not in scores[0]
    assert scores[1].endswith(" bytes), stride 8\n")
    loss = re.compile("val loss ([0-9.]+)")
    assert loss.findall(scores[1]) != loss.findall(scores[0])
    assert loss.findall(scores[2]) == loss.findall(scores[1]) * 2
    assert scores[2].count("stride 8") == 2
    hint = r"should be at most the model's block_size \(32\)"
    expect_error(f"^stride = 33: {hint}", evaluate_checkpoint, EvaluateConfig(**asked, stride=33))
    tasks = EvaluateConfig(**asked, stride=8, tasks=("hellaswag",))
    expect_error("^stride = 8: is for the loss of a split", evaluate_checkpoint, tasks)
    for wrong in ("0", "-1", "x"):
        expect_error("^stride = ", load, EvaluateConfig, ["--stride", wrong])


# How many tokens


def test_automatic_is_a_share_of_what_is_trained_between_two(tmp_path):
    for every, windows, scored in ((100, 16, 96), (1, 1, 16), (31, 9, 17)):
        changes = {"eval": {"every": every}, "train.global_batch_tokens": windows * 32}
        assert training_config(tmp_path, tmp_path, changes).auto_eval_tokens == scored * 32


@pytest.mark.parametrize(
    "config", sorted(Path("configs").glob("gpt2_*.yaml")), ids=lambda file: file.stem
)
def test_evaluations_take_a_twentieth_of_a_shipped_run_at_most(config):
    """A forward pass is a third of a step."""
    config = load(TrainingConfig, ["--config", str(config)])
    tokens = config.eval.tokens
    steps = config.train.steps or 1100
    every = config.eval.every
    assert tokens is not None, "all of a corpus of any size"
    tokens = config.auto_eval_tokens if tokens == "auto" else tokens
    evaluations = 1 + -(-steps // every)
    assert evaluations * tokens / 3 <= 0.05 * steps * config.train.global_batch_tokens


def settled(config, recorded="new"):
    """`eval.tokens` that a run takes, a new one or one whose config.yaml holds `recorded`."""
    saved = Checkpoint(
        Path("saved"), gpt_state(5), {"eval": {"tokens": recorded}, "optim": {"decay_steps": 9}}
    )
    return resolved(config, None if recorded == "new" else saved).eval.tokens


def test_a_run_keeps_the_number_that_it_was_started_with(corpus, tmp_path):
    """Where nothing else is asked for."""
    batch = {"train.global_batch_tokens": 24 * 32}
    auto, all_, some = (
        training_config(corpus, tmp_path, batch | {"eval": {"tokens": n}})
        for n in ("auto", None, 900)
    )
    assert settled(auto) == 250 * 24 * 6 // 100 * 32
    assert settled(auto, 777) == 777
    assert settled(auto, None) is None
    assert settled(all_, 777) is None
    assert settled(some, None) == 900


@pytest.mark.parametrize("version", [2, 3])
def test_a_tokenizer_that_has_seen_the_validation_text(trained, tmp_path, capsys, version):
    """Evaluations and trainings say so once, of all folders together. Nothing else changes."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        shutil.copytree(trained.parent / "data", folder)
        manifest = replace(read_manifest(folder), version=version, recipe={"tokenizer": "bpe"})
        write_manifest(folder, manifest)
    names = f"prepared {folders[0]} {folders[1]}, and trained the tokenizer on the validation text"
    for split in ("val", "train"):
        asked = {
            "checkpoint": str(trained),
            "data": (*map(str, folders),),
            "device": "cpu",
            "split": split,
        }
        assert evaluate_checkpoint(EvaluateConfig(tokens=480, **asked)) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "earlier release" in line]
        assert len(notes) == (version == 2 and split == "val")
        assert all(line.startswith("note: ") and names in line for line in notes)
    config = training_config(folders[0], tmp_path)
    Pretraining(config, Accelerator(cpu=True), None).open_data()
    notes = [line for line in capsys.readouterr().err.splitlines() if "earlier release" in line]
    assert len(notes) == (version == 2)
    assert read_manifest(folders[0]).hash == read_manifest(trained.parent / "data").hash
