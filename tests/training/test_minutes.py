"""Runs whose length is a time (`train.minutes`). What
steps take, and the clock, are values that a test sets."""

import math
import os
from pathlib import Path

import pytest
from ranks import RankError, run_ranks, run_until_killed
from runs import (
    assert_same,
    events,
    is_intact,
    said,
    saved_steps,
    train,
    train_all,
    training_config,
)

from gpt2_ddp.config.cli import load, read_yaml, resolve
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training import run_length as minutes
from gpt2_ddp.training.loop import train as train_task
from gpt2_ddp.training.stop import StopRequest

SECONDS = {"first step": 60.0, "step": 2.0, "evaluation": 40.0, "save": 3.0}
CHANGES = {
    "model.n_layer": 1,
    "train.steps": None,
    "train.minutes": 1.5,
    "optim.warmup_steps": 12,
    "checkpoint": {"every": 4, "background": False},
    "eval": {"every": 8, "tokens": 768},
    "tracking": {"log_every": 3},
}
STEPS = 8 + 8
"""At step 8, 60 of 90 s are over. An evaluation has the tokens of two steps: the time of one, as it
is forward. The last one takes 2 s and the last checkpoint 3 s. In the 25 s between, each step takes
2 s + 2 s / 8 + 3 s / 4."""
RESUMED_STEPS = 8 + 12
"""A resumed process has saved no checkpoint yet: it has 28 s, and a step takes 2 s + 2 s / 8."""


def by_the_clock(configs, dies_at=0):
    """Trains all; a step takes two seconds. Other ranks
    have another clock: the main process's counts."""
    factor = 100 if int(os.environ.get("RANK", "0")) else 1
    minutes.passed_since = lambda begun: 60.0 * factor
    StopRequest.typical = lambda stop, what: factor * SECONDS[what] if stop._seconds[what] else 0.0
    return train_all(configs, (0, 0), math.nan, dies_at)


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_run_of_minutes_is_the_run_of_as_many_steps(corpus, tmp_path, parallel):
    """Also killed before and after the number is known."""
    changes = CHANGES | {"launch.parallel": parallel}
    timed, killed = (
        training_config(corpus, tmp_path / name, changes) for name in ("timed", "killed")
    )
    for dies_at in (7, 8):  # after the checkpoints of step 4, without the number, and 8, with it
        run_until_killed(by_the_clock, 2, [killed], dies_at)
    lengths = {
        f"{steps}": {"train.steps": steps, "train.minutes": None}
        for steps in (STEPS, RESUMED_STEPS)
    }
    known = [
        training_config(corpus, tmp_path / name, changes | length)
        for name, length in lengths.items()
    ]
    assert run_ranks(by_the_clock, 2, [timed, killed, *known]) == [["completed"] * 4] * 2
    for config, whole in zip((timed, killed), known, strict=True):
        run = Path(config.output_dir, "run")
        (event,) = events(run, "length")
        assert event["steps"] == whole.train.steps
        assert is_intact(run)
        assert_same(run, Path(whole.output_dir, "run"))
        saved = read_yaml(str(run / "config.yaml"))
        assert saved["train"] == whole.model_dump(mode="json")["train"]
    records = read_runs([tmp_path / "timed/run", tmp_path / "killed/run"])
    assert len(group_runs(records)) == 1, "seeds of equal minutes are compared"


def test_saves_of_the_best_count(corpus, tmp_path):
    """With `eval.patience` each evaluation may save, too. At step 8, 25 s are left for steps. Each
    takes 2 s + 2 s / 6; of 12 steps 3 save for 3 s, and with patience 4."""
    changes = CHANGES | {"eval": {"every": 6, "tokens": 768}}
    plain, patient = (
        training_config(corpus, tmp_path / str(patience), changes | {"eval.patience": patience})
        for patience in (None, 9)
    )
    assert run_ranks(by_the_clock, 1, [plain, patient]) == [["completed"] * 2]
    found = [events(tmp_path / name / "run", "length")[0] for name in ("None", "9")]
    assert [event["steps"] for event in found] == [8 + 8, 8 + 7]


@pytest.mark.slow
def test_steps_before_the_number_are_trained_again(corpus, tmp_path):
    """From one checkpoint without the number to another."""
    config = training_config(corpus, tmp_path, CHANGES)
    run_until_killed(by_the_clock, 1, [config], 7)
    assert is_intact(tmp_path / "run", replay="0:4")


def test_a_resumed_run_keeps_its_steps(corpus, tmp_path):
    changes = {"optim.warmup_steps": 12, "train.steps": 14}
    train(training_config(corpus, tmp_path, changes))
    more = training_config(corpus, tmp_path, changes | {"train.steps": None, "train.minutes": 1})
    _, _, errors = said(train, more)
    assert "train.minutes" in errors
    assert saved_steps(tmp_path / "run")[-1] == 14


def test_too_short_a_time_is_a_mistake_that_a_longer_one_mends(corpus, tmp_path):
    with pytest.raises(RankError, match=r"train\.minutes = 0\.5"):
        run_ranks(
            by_the_clock, 1, [training_config(corpus, tmp_path, CHANGES | {"train.minutes": 0.5})]
        )
    assert run_ranks(by_the_clock, 1, [training_config(corpus, tmp_path, CHANGES)]) == [
        ["completed"]
    ]
    assert is_intact(tmp_path / "run")


class OwnSchedule(Pretraining):
    def schedule(self, step):
        return {"lr": 1e-3 / self.total_steps(None)}


def test_a_schedule_of_ones_own_needs_the_number(corpus, tmp_path):
    with pytest.raises(UserError, match=r"train\.minutes"):
        train_task(training_config(corpus, tmp_path, CHANGES), OwnSchedule)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ("--train.minutes 5 --train.steps 100", "train.minutes"),
        ("--train.minutes 5 --train.epochs 2", "train.minutes"),
        ("--train.epochs 5 --train.steps 100", "train.epochs"),
        ("--train.minutes 0", "train.minutes"),
        ("--train.minutes inf", "train.minutes"),
        ("--train.minutes 5 --optim.warmup_steps 11", "optim.warmup_steps"),
        ("--train.minutes 5 --optim.decay_steps 100", "optim.decay_steps"),
        ("--train.minutes 5 --train.branch_from runs/a", "train.branch_from"),
    ],
)
def test_mistakes(flags, field):
    with pytest.raises(UserError) as error:
        load(TrainingConfig, flags.split(), training_default)
    assert str(error.value).startswith(field)


def test_a_later_length_replaces_an_earlier_one(tmp_path):
    """A flag that of a file, and a file that of the preset."""
    file = tmp_path / "own.yaml"
    file.write_text("train: {epochs: 2}")
    given = ["configs/gpt2_stdlib.yaml", str(file)]
    for files, length in (((), (700, None, None)), (given, (None, 2, None))):
        train = resolve(TrainingConfig, files, {}, training_default).train
        assert (train.steps, train.epochs, train.minutes) == length
        train = resolve(TrainingConfig, files, {"train.minutes": "0.5"}, training_default).train
        assert (train.steps, train.epochs, train.minutes) == (None, None, 0.5)
