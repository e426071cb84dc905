"""A run that was killed, anywhere and often, is intact
by `verify_run`: before it goes on, and at its end."""

import math
import os
import random
import re
import shutil
import signal
from pathlib import Path

import pytest
from disk import interpose
from ranks import run_ranks, run_until_killed, start_ranks
from runs import complete, is_intact, train_with_faults, training_config

SAVED = {
    "checkpoint": {"every": 3, "keep_last": 2},
    "eval.every": 6,
    "tracking": {"log_every": 2, "sample_every": 6},
}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [pytest.param((0, 0), marks=pytest.mark.soak), (12 * 9, 12 * 14)])
def test_killed_ten_times_on_changing_numbers_of_processes(corpus, tmp_path, bad):
    """The last rank is killed at a step, and the others are;
    with and without data that the run goes back from."""
    rng = random.Random(1337)
    changes = {
        "guard": {"patience": 3},
        "model.dropout": 0.1,
        "train.steps": 90,
        "optim.decay_steps": 90,
    }
    config = training_config(corpus, tmp_path, SAVED | changes)
    for kill in range(10):
        run_until_killed(
            train_with_faults, (1, 2, 3)[kill % 3], config, bad, math.inf, rng.randrange(2, 12)
        )
        assert is_intact(tmp_path / "run"), kill
    complete(config, 1, bad, math.inf)
    assert is_intact(tmp_path / "run")


def train_until(config, place):
    """Trains, and is killed before the first operation on
    a file that is `place`; those that came before it."""
    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.training import loop

    told = []

    def tell(operation, name):
        begins = f"{operation} {re.sub('step-[0-9]+', 'step-N', name)} "
        told.append(f"{begins}{sum(line.startswith(begins) for line in told)}")
        if told[-1] == place:
            os.kill(os.getpid(), signal.SIGKILL)

    interpose(Path(config.output_dir) / config.run_name, tell)
    loop.train(config, Pretraining)
    return told


@pytest.mark.soak
def test_killed_at_every_operation_on_its_files(corpus, tmp_path):
    """Each row, file of a checkpoint, rename and removal of a run's second half."""
    halfway = training_config(
        corpus, tmp_path / "halfway", SAVED | {"train.steps": 4, "optim.decay_steps": 8}
    )
    run_ranks(train_until, 1, halfway, "")
    config = training_config(
        corpus, tmp_path / "runs", SAVED | {"train.steps": 8, "optim.decay_steps": 8}
    )

    def begin():
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        shutil.copytree(tmp_path / "halfway", tmp_path / "runs")

    begin()
    (places,) = run_ranks(train_until, 1, config, "")
    print(len(places), "places")
    for place in places:
        begin()
        ((process, _),) = start_ranks(train_until, 1, config, place)
        process.join()
        assert process.exitcode == -signal.SIGKILL, place
        assert is_intact(tmp_path / "runs/run"), place
        run_ranks(train_until, 1, config, "")
        assert is_intact(tmp_path / "runs/run"), place
