"""Rows that are written two steps late, as on GPUs: the same rows, and no step waits for its own
numbers."""

import math
import signal
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from ranks import run_ranks, run_until_killed
from runs import (
    all_rows,
    assert_same,
    checkpoint_at,
    events,
    is_intact,
    lasting_state,
    rows,
    train,
    train_with_faults,
    training_config,
)

from gpt2_ddp.tasks.pretraining import Pretraining, make_pretraining
from gpt2_ddp.training import guard as guard_module
from gpt2_ddp.training import loop, run_length, step_rows
from gpt2_ddp.training.optimizer import GuardedOptimizer, lr_at
from gpt2_ddp.training.run_length import Costs, Length, RunLength
from gpt2_ddp.training.throughput import Throughput


def train_late(config, *faults):
    step_rows.LATE_ROWS_ON = ("cpu",)
    return train_with_faults(config, *faults)


def compare(corpus, tmp_path, changes, world=1, outcome="completed", faults=()):
    """Trains with prompt rows and with late ones; the folders of the runs."""
    folders = []
    for name, function in (("prompt", train_with_faults), ("late", train_late)):
        config = training_config(corpus, tmp_path / name, changes)
        assert run_ranks(function, world, config, *faults) == [outcome] * world
        folders.append(tmp_path / name / "run")
        assert is_intact(folders[-1])
    return folders


@pytest.mark.parametrize("world", [1, 2])
def test_late_rows_are_the_prompt_ones(corpus, tmp_path, world):
    """With evaluations, samples and saves in between, ends of epochs, and rows of every second
    step."""
    changes = {"train.steps": 23, "eval.every": 7, "checkpoint.every": 5, "model.n_layer": 1}
    changes |= {"tracking.sample_every": 9, "checkpoint.keep_last": 9}
    for every in (1, 2):
        folder = tmp_path / str(every)
        both = compare(corpus, folder, changes | {"tracking.log_every": every}, world)
        prompt, late = both
        assert_same(late, prompt)
        assert [row["step"] for row in rows(late)] == sorted({row["step"] for row in rows(late)})
        # those before a checkpoint are before it
        order = [[row.get("event", row["step"]) for row in all_rows(run)] for run in both]
        assert order[0] == order[1]
        for step in (5, 10, 15, 20):
            states = [lasting_state(checkpoint_at(run, step)) for run in both]
            assert states[0] == states[1]


def test_a_row_is_written_two_steps_after_its_step(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(step_rows, "LATE_ROWS_ON", ("cpu",))
    changes = {"train.steps": 9, "eval.every": 100, "checkpoint.every": 100}
    changes |= {"tracking.log_every": 3, "train.mixed_precision": "no"}
    config = training_config(corpus, tmp_path, changes)
    written = []
    taken = []
    train_step = loop.train_step

    def noted(trainer):
        result = train_step(trainer)
        taken.append(trainer.run.step)
        return result

    monkeypatch.setattr(loop, "train_step", noted)
    loop.train(
        config,
        make_pretraining,
        lambda row: written.append((row["step"], taken[-1] if taken else 0)),
    )
    # the last one waits for the end
    assert written == [(0, 0), (3, 5), (6, 8), (9, 9)]


def test_no_step_waits_for_its_own_numbers(corpus, tmp_path, monkeypatch):
    """The numbers of a step are read after the work of the next one is in the device's queue."""
    changes = {"train.steps": 9, "eval.every": 100, "checkpoint.every": 100}
    changes |= {"tracking.log_every": 1, "train.mixed_precision": "no"}
    queued = [0]
    optimizer_step = GuardedOptimizer.step

    def counted(*arguments):
        queued[0] += 1
        return optimizer_step(*arguments)

    monkeypatch.setattr(GuardedOptimizer, "step", counted)
    found = []
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(step_rows, "LATE_ROWS_ON", devices)
        queued[0] = 0
        ahead = []

        def copy_to_host(values, ahead=ahead):
            step = queued[0]
            return lambda: ahead.append(queued[0] - step) or values.tolist()

        monkeypatch.setattr(guard_module, "copy_to_host", copy_to_host)
        config = training_config(corpus, tmp_path / str(len(devices)), changes)
        loop.train(config, make_pretraining)
        found.append(ahead)
    assert found == [[0] * 9, [1] * 8 + [0]]  # after the last step there is no other


def test_a_stop_a_rollback_and_a_divergence_write_the_rows_before(corpus, tmp_path):
    changes = {"train.steps": 40, "guard.patience": 3, "checkpoint.every": 5, "eval.every": 40}
    changes |= {"model.n_layer": 1, "tracking.log_every": 2}
    # nine bad steps from position 180 on
    both = compare(corpus, tmp_path, changes, faults=((180, 240),))
    rollbacks = [events(run, "rollback") for run in both]
    assert rollbacks[0] == rollbacks[1] != []
    assert_same(both[1], both[0])
    steps = [row["step"] for row in rows(both[1])]
    assert rollbacks[0][0]["from"] - 2 in steps  # of bad steps, before the rollback


def test_a_run_that_is_stopped_has_all_its_rows(corpus, tmp_path):
    changes = {"train.steps": 12, "eval.every": 100, "checkpoint.every": 100, "model.n_layer": 1}
    config = training_config(corpus, tmp_path, changes)
    stopped = (0, 0), math.nan, 6, signal.SIGTERM
    assert run_ranks(train_late, 1, config, *stopped) == ["stopped"]
    newest = all_rows(tmp_path / "run")[-1]["step"]
    assert [row["step"] for row in rows(tmp_path / "run")] == [*range(newest + 1)]
    assert run_ranks(train_late, 1, config) == ["completed"]
    straight = training_config(corpus, tmp_path / "straight", changes)
    assert run_ranks(train, 1, straight) == ["completed"]
    assert_same(tmp_path / "run", tmp_path / "straight/run")


def test_a_killed_run_lacks_the_rows_of_two_steps_until_it_resumes(corpus, tmp_path):
    """They are of steps after its newest checkpoint, which are trained again."""
    changes = {"train.steps": 12, "eval.every": 100, "checkpoint.every": 5, "model.n_layer": 1}
    config = training_config(corpus, tmp_path, changes)
    run_until_killed(train_late, 1, config, (0, 0), math.nan, 9)
    run = tmp_path / "run"
    assert [row["step"] for row in rows(run)] == [*range(7)]  # of eight
    assert is_intact(run)
    assert run_ranks(train_late, 1, config) == ["completed"]
    straight = training_config(corpus, tmp_path / "straight", changes)
    assert run_ranks(train, 1, straight) == ["completed"]
    assert_same(run, tmp_path / "straight/run")


class Reusing(Pretraining):
    """Returns the same dict in each step, with the values of that step."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.own_settings = {}
        self.own_fields = {}

    def schedule(self, step):
        self.own_settings.update(super().schedule(step))
        return self.own_settings

    def row_fields(self, step):
        self.own_fields["own"] = step
        return self.own_fields


def test_a_row_has_what_the_task_returned_in_its_step(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(step_rows, "LATE_ROWS_ON", ("cpu",))
    changes = {"train.steps": 7, "eval.every": 100, "checkpoint.every": 100}
    changes |= {"train.mixed_precision": "no", "optim.decay_steps": 7}
    config = training_config(corpus, tmp_path, changes)
    loop.train(config, Reusing)
    found = [(row["own"], row["lr"]) for row in rows(tmp_path / "run")[1:]]
    assert found == [(step, lr_at(step, config.optim)) for step in range(1, 8)]


def test_a_length_is_recorded_after_the_rows_before(monkeypatch):
    order = []
    training = MagicMock()
    training.run.log.append.side_effect = lambda row: order.append(row["event"])
    monkeypatch.setattr(run_length, "write_late_rows", lambda given: order.append(given))
    monkeypatch.setattr(run_length, "on_main", lambda function: function())
    length = RunLength.__new__(RunLength)
    vars(length).update(_training=training, _settled_at=None, _minutes=1.0)
    costs = Costs(step_seconds=1, evaluation_seconds=1, save_seconds=1, sample_seconds=1)
    monkeypatch.setattr(length, "_is_timed", lambda: True)
    monkeypatch.setattr(length, "_first_length", lambda: Length(9, 1.0, costs))
    training.run.progress.steps = None
    length.follow()
    assert order == [training, "length"]


def test_the_speed_of_a_late_row_is_that_up_to_its_step(monkeypatch):
    """A GPU completes a step while the host queues the next one."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    task = SimpleNamespace(unit="tokens", flops_per_unit=0, units_per_item=1)
    task.feed = SimpleNamespace(waited=0.0, state=SimpleNamespace(consumed=0))
    throughput = Throughput(task, torch.device("cpu"))

    def step(number, seconds):
        """Queues a step once the one before is complete."""
        task.feed.state.consumed += 10
        clock.now += seconds
        throughput.follow(number)

    def speed(number=None):
        return throughput.read(number)["tokens_per_second"]

    step(1, 0)
    step(2, 2)  # step 1 took 2 s
    step(3, 4)
    assert speed(1) == 5
    step(4, 5)
    assert speed(2) == 2.5
    with throughput.paused():
        clock.now += 100
    step(5, 10)
    assert speed(4) == round(20 / 15, 1)  # steps 3 and 4, without the pause
    task.feed.state.consumed += 10
    clock.now += 3
    assert speed() == round(20 / 3, 1)  # steps 5 and 6, the device is idle
