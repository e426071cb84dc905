"""`train.micro_batch_size: auto`: a number by the memory estimate, which a run keeps."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from commands import expect_error
from ranks import run_ranks
from runs import events, rows, train, training_config

from gpt2_ddp.config.saved import with_recorded
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.model.loss import PART
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training import memory as memory_module
from gpt2_ddp.training.memory import (
    CPU_TOKENS,
    KEEP_ROOM,
    ROOM,
    choose_micro_batch,
    divisions,
    estimate,
    keeping_weights,
    largest_micro_batch,
    setting_of,
)


def setting(kind="cuda", processes=1, windows=24, precision="bf16", block_size=32, **train):
    """That of a small GPT, without evaluations and libraries, whose memory depends on nothing."""
    values = {"steps": 1, "global_batch_tokens": windows * block_size} | train
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": block_size}
    config = TrainingConfig.model_validate({"train": values, "model": shape})
    with torch.device("meta"), without_init():
        model = GPT(config.model, 512)
    inputs = setting_of(config, model, kind, processes, precision)
    return replace(inputs, base=0.0, validates=False)


def peak(inputs, size):
    return estimate(replace(inputs, micro_batch=size)).peak


@pytest.mark.parametrize(
    ("processes", "windows", "sizes"),
    [
        (1, 12, [12, 6, 4, 3, 2, 1]),
        (2, 12, [6, 3, 2, 1]),
        (5, 12, [3, 1]),  # padding rows: 5 x 1 x 3
        (16, 12, [1]),  # as many processes as windows are planned
    ],
)
def test_the_divisions_of_a_step(processes, windows, sizes):
    assert [*divisions(setting(processes=processes, windows=windows))] == sizes


@pytest.mark.parametrize("size", [24, 12, 6, 1])
def test_the_largest_micro_batch_leaves_a_tenth_of_a_gpu(size):
    inputs = setting()
    memory = peak(inputs, size) / ROOM
    assert largest_micro_batch(inputs, 1.0001 * memory) == size
    smaller = [0, *(one for one in (1, 2, 3, 4, 6, 8, 12, 24) if one < size)][-1]
    assert largest_micro_batch(inputs, 0.9999 * memory) == smaller


def test_a_cpu_has_a_limit_of_tokens_besides_its_memory():
    inputs = setting("cpu", windows=2048)
    assert largest_micro_batch(inputs, 1e15) * 32 == CPU_TOKENS
    assert largest_micro_batch(inputs, peak(inputs, 8) / ROOM * 1.0001) == 8
    long = setting("cpu", windows=2, block_size=2 * CPU_TOKENS)
    assert largest_micro_batch(long, 1e15) == 1


def test_a_recorded_number_is_kept_while_it_fits():
    """It may take what the choice of a new one leaves free. Nothing larger is chosen."""
    inputs = setting()
    assert choose_micro_batch(inputs, 1.0001 * peak(inputs, 6), 6) == 6
    assert choose_micro_batch(inputs, 0.9999 * peak(inputs, 6), 6) < 6
    assert choose_micro_batch(inputs, 1e15, 6) == 6
    assert choose_micro_batch(inputs, 1e15) == 24
    assert choose_micro_batch(inputs, 0.0) == 1  # the estimate may be wrong
    # 24 windows on 16 processes: at most 2 each
    assert choose_micro_batch(replace(inputs, processes=16), 1e15, 6) == 6


def test_the_loss_in_parts_takes_the_memory_of_a_part():
    """In bf16 training on a CPU, of many logits."""
    inputs = setting("cpu", windows=2048)
    logits = estimate(replace(inputs, micro_batch=2048)).parts["logits"]
    assert logits == 10 * PART + 4 * 512 * 32 + 2 * 2048 * 32 * 32
    plain = estimate(replace(inputs, micro_batch=2048, precision="no")).parts["logits"]
    assert plain == 12 * 2048 * 32 * 512


def test_gathered_weights_are_kept_where_they_fit():
    """Sharded training on GPUs, in three quarters of the memory."""
    inputs = setting(processes=4)
    launch = inputs.config.launch.model_copy(update={"parallel": "fsdp"})
    sharded = replace(inputs, config=inputs.config.model_copy(update={"launch": launch}))
    kept = replace(sharded, keeps_weights=True)
    memory = estimate(kept).peak / KEEP_ROOM
    assert keeping_weights(sharded, 1.0001 * memory) == kept
    assert keeping_weights(sharded, 0.9999 * memory) == sharded
    assert keeping_weights(inputs, 1e15) == inputs
    on_cpu = replace(sharded, kind="cpu")
    assert keeping_weights(on_cpu, 1e15) == on_cpu
    assert estimate(kept).parts["gathered weights"] == 2 * sharded.parameters


AUTO = {"train.micro_batch_size": "auto"}


def numbers_of(run):
    """The number in config.yaml, in the last start row, and in the newest checkpoint."""
    recorded = yaml.safe_load((run / "config.yaml").read_text())["train"]["micro_batch_size"]
    row = events(run, "start")[-1]
    return recorded, row["config"]["train"]["micro_batch_size"], row["micro_batch"]


def set_free(windows):
    """Makes room for micro-batches of so many windows, as if each took a byte and nothing else
    did."""
    memory_module.estimate = lambda inputs: SimpleNamespace(peak=float(inputs.micro_batch))
    memory_module.usable_memory = lambda device: windows / ROOM


@pytest.fixture
def free(monkeypatch):
    """`set_free` for this test."""
    monkeypatch.setattr(memory_module, "estimate", memory_module.estimate)
    monkeypatch.setattr(memory_module, "usable_memory", memory_module.usable_memory)
    return set_free


def test_a_run_records_the_number_and_keeps_it(corpus, tmp_path, free, capsys):
    """On a machine with more memory, too, and in a branch. With less, it is lowered, and a note
    says so."""

    def config_of(steps, **changes):
        more = {"train.steps": steps, "optim.decay_steps": 9, "eval.tokens": 64}
        return training_config(corpus, tmp_path, AUTO | more | changes)

    run = tmp_path / "run"
    free(6)
    train(config_of(2))
    assert numbers_of(run) == (6, 6, 6)
    assert "train.micro_batch_size is 6" in capsys.readouterr().err
    free(99)
    train(config_of(3))
    assert numbers_of(run) == (6, 6, 6)
    assert "micro_batch_size" not in capsys.readouterr().err
    branch = {"run_name": "branch", "train.branch_from": str(run)}
    train(config_of(4, **branch))
    assert numbers_of(tmp_path / "branch") == (6, 6, 6)
    free(2)
    train(config_of(4))
    assert numbers_of(run) == (2, 2, 2)
    assert "was 6, which no longer fits; it is now 2" in capsys.readouterr().err
    assert len(rows(run)) == 5
    train(config_of(5, **{"train.micro_batch_size": 4}))
    assert numbers_of(run) == (4, 4, 4)


def train_with_room(config, windows):
    set_free(windows[int(os.environ["RANK"])])
    return train(config)


def test_ranks_have_the_number_of_the_rank_with_the_least_memory(corpus, tmp_path):
    config = training_config(corpus, tmp_path, AUTO | {"train.steps": 2})
    run_ranks(train_with_room, 2, config, [99, 2])
    assert numbers_of(tmp_path / "run") == (2, 2, 2)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(512, 512)

    def forward(self, tokens, targets, reduction):
        logits = self.table(tokens).flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)


def test_a_model_of_ones_own_needs_a_number(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(Pretraining, "make_model", lambda task, *_: Plain())
    config = training_config(corpus, tmp_path, AUTO)
    expect_error("train.micro_batch_size = auto: needs a GPT; set a number", train, config)


def test_a_text_of_ones_own_that_goes_on_settles_its_number_again():
    """Its other numbers are the run's."""
    config = TrainingConfig.model_validate({"own_text": True})
    saved = {"train": {"micro_batch_size": 12, "steps": 7}, "model": {"n_layer": 3}}
    going_on = with_recorded(config, saved)
    assert (going_on.train.micro_batch_size, going_on.train.steps) == ("auto", 7)
    given = TrainingConfig.model_validate({"own_text": True, "train": {"micro_batch_size": 5}})
    assert with_recorded(given, saved).train.micro_batch_size == 5
