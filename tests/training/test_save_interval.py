"""Checkpoints by `checkpoint.seconds`. What work takes, and the clock, are values that a test
sets; the slow test kills real processes."""

import os
import random
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from close import assert_close
from ranks import run_ranks, run_until_killed, start_ranks, wait_until
from runs import (
    assert_same,
    events,
    is_intact,
    saved_steps,
    train,
    train_all,
    training_config,
)

from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.state import Pending
from gpt2_ddp.training import loop, save_interval
from gpt2_ddp.training.save_interval import SaveCost, SaveInterval, describe, settle_interval
from gpt2_ddp.training.start import Trainer
from gpt2_ddp.training.stop import StopRequest

KEEP = KeepConfig(seconds=60)


@pytest.mark.parametrize(
    ("cost", "step", "seconds", "lost", "told"),
    [
        # on disk 2 s after its state: the next one begins 58 s after this one
        ((1.0, 2.0), 0.5, 58, 60, "checkpoint.seconds = 60: a checkpoint every 114 steps (58 s),"),
        # 3 s are 2.5 % of 120
        ((3.0, 3.0), 0.5, 120, 123, "up to 123 s may be lost: a checkpoint costs 3 s of training"),
        # one is written at a time
        ((0.1, 40.0), 0.5, 40, 80, "up to 80 s may be lost: a checkpoint is on disk after 40 s"),
        ((0.1, 1.0), 90, 90, 91, "up to 91 s may be lost: a step takes 90 s; a checkpoint every 1"),
    ],
)
def test_the_longest_interval_that_keeps_the_promise(cost, step, seconds, lost, told):
    interval = settle_interval(KEEP, SaveCost(*cost), step)
    assert_close(interval.seconds, seconds)
    assert_close(interval.lost_seconds, lost)
    assert interval.share <= KEEP.overhead * (1 + 1e-9)
    assert told in describe(KEEP, interval)


class Simulated:
    """A run without a model. A kill may come at any time: `worst` is the most that one costs."""

    def __init__(self, monkeypatch, keep, save=1.0, write=0.0, slower=1.0, pace=lambda now: 1.0):
        self.now = 0.0
        self.save = save  # what training waits for
        self.write = write  # by the background, after it
        self.slower = slower  # how many times as long a step beside it takes
        self.pace = pace
        self.rows = []
        self.lines = []
        self.saves = []  # steps
        self.worst = 0.0
        self.on_disk = [(0.0, 0.0)]  # when: the time of the state
        self.begun = self.ended = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(save_interval, "time", clock)
        self.stop = StopRequest(0.0)
        self.stop.restore_handlers()
        log = SimpleNamespace(append=self.rows.append)
        self.interval = SaveInterval(keep, self.stop, self, log, self.lines.append)

    @property
    def is_working(self):
        return self.now < self.ended

    def pass_by(self, seconds):
        self.now += seconds
        whole = [state for when, state in self.on_disk if when <= self.now]
        self.worst = max(self.worst, self.now - max(whole))

    def train(self, steps, evaluates=0, takes=0.0):
        for step in range(1, steps + 1):
            begun = self.now
            self.pass_by(self.pace(self.now) * (self.slower if self.is_working else 1))
            self.interval.forecast(step)
            self.stop.check()
            self.stop.record_duration("step", self.now - begun)
            pending = Pending(evaluate=bool(evaluates) and step % evaluates == 0)
            if self.interval.must_precede(pending):
                self.save_now(step)
            if pending.evaluate:
                self.pass_by(takes)
                self.stop.record_duration("evaluation", takes)
            elif self.interval.is_due(step):
                self.save_now(step)
        return self

    def save_now(self, step):
        begun = self.now
        self.interval.begin_save()
        self.pass_by(max(self.ended - self.now, 0.0))
        self.pass_by(self.save)
        self.begun = self.now
        self.ended = self.now + self.write
        self.on_disk.append((self.ended, begun))
        self.saves.append(step)
        self.interval.end_save(step)
        self.stop.sync()


@pytest.mark.parametrize(("save", "write"), [(1.0, 0.0), (0.2, 5.0), (0.2, 25.0)])
def test_a_kill_at_any_time_costs_the_seconds_at_most_and_a_step(monkeypatch, save, write):
    run = Simulated(monkeypatch, KeepConfig(seconds=60), save, write).train(2000)
    assert 50 < run.worst <= 60 + 1
    assert run.save * len(run.saves) <= 0.025 * run.now
    (row,) = run.rows
    assert_close(row["written_seconds"], save + write)
    assert_close(row["lost_seconds"], 60)
    assert row["every"] == int(60 - 2 * save - write)
    assert len(run.lines) == 1


def test_a_machine_that_becomes_slower_saves_after_fewer_steps(monkeypatch):
    """In time: the number of the main process is of this step."""
    keep = KeepConfig(seconds=60)
    run = Simulated(monkeypatch, keep, pace=lambda now: 1.0 if now < 500 else 4.0).train(600)
    assert run.worst <= 60 + 2 * 4
    gaps = [after - before for before, after in zip(run.saves, run.saves[1:], strict=False)]
    assert gaps[2] == 58
    assert gaps[-1] in (14, 15)


def test_steps_that_a_save_slows_down_are_part_of_what_it_costs(monkeypatch):
    """10 s of steps twice as long: 5 s of training. That is 2.5 % of 200 s."""
    run = Simulated(monkeypatch, KeepConfig(seconds=60), 0.0, 10.0, slower=2.0).train(2000)
    assert_close(run.rows[-1]["save_seconds"], 5.0)
    assert_close(run.rows[-1]["every_seconds"], 200.0)
    assert run.lines[-1].startswith("warning: checkpoint.seconds = 60 cannot be kept, up to 210 s")
    assert run.worst <= 210 + 2


def test_the_overhead_holds_where_the_seconds_cannot(monkeypatch):
    run = Simulated(monkeypatch, KeepConfig(seconds=60, overhead=0.01), 2.0).train(3000)
    assert run.worst <= 202 + 1
    assert 2.0 * len(run.saves[1:]) <= 0.01 * run.now
    assert "checkpoint.overhead is 0.01" in run.lines[0]


def test_an_evaluation_that_would_make_a_save_late_comes_after_it(monkeypatch):
    """It takes 30 of 60 s; the first one's duration is not known before."""
    run = Simulated(monkeypatch, KeepConfig(seconds=60), 0.1).train(400, 40, 30.0)
    assert run.worst <= 60 + 1
    assert 120 in run.saves


SECONDS = {"train_step": 2.0, "save": 1.0, "evaluate": 12.0}
CHANGES = {
    "train.steps": 40,
    "optim.decay_steps": 40,
    "model.dropout": 0.1,
    "eval.every": 18,
    "eval.tokens": 768,
    "checkpoint.every": 30,
    "checkpoint.background": False,
    "checkpoint.keep_last": 99,
    "tracking.log_every": 3,
}
BY_SECONDS = {"checkpoint.seconds": 21, "checkpoint.overhead": 0.2}


OFTEN = [4, 13, 18, 27, 30, 36, 40]
"""Before the first save is timed, half of the 21 s; then 20 s: nine steps and a save. Steps 18 and
36 are saved twice: before their evaluations, which would come too late after them, and after them,
as the best."""


def by_the_clock(configs, dies_at=0):
    """Trains all, by a clock that work moves on. The other ranks' clock is another one."""
    clock = SimpleNamespace(now=0.0)
    factor = 100 if int(os.environ.get("RANK", "0")) else 1
    save_interval.time = SimpleNamespace(monotonic=lambda: clock.now * factor)

    def moves(owner, name):
        function = getattr(owner, name)

        def call(*args, **options):
            clock.now += SECONDS[name]
            return function(*args, **options)

        setattr(owner, name, call)

    @contextmanager
    def timed(stop, what):
        begun = clock.now
        yield
        stop.record_duration(what, (clock.now - begun) * factor)

    moves(loop, "train_step")
    moves(CheckpointStore, "save")
    moves(Trainer, "evaluate")
    StopRequest.timed = timed
    return train_all(configs, (0, 0), 1.0, dies_at)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}),
        (2, {"optim.average": 0.1}),
        pytest.param(2, {"launch.parallel": "fsdp"}, marks=pytest.mark.slow),
    ],
)
def test_when_checkpoints_are_saved_changes_nothing_else(corpus, tmp_path, world, changes):
    """Also of a run that is killed twice."""
    plain, often, killed = (
        training_config(corpus, tmp_path / name, CHANGES | changes | more)
        for name, more in (("plain", {}), ("often", BY_SECONDS), ("killed", BY_SECONDS))
    )
    for dies_at in (9, 13):
        run_until_killed(by_the_clock, world, [killed], dies_at, timeout=300)
    outcomes = run_ranks(by_the_clock, world, [plain, often, killed], timeout=300)
    assert outcomes == [["completed"] * 3] * world
    assert saved_steps(tmp_path / "plain/run") == [30, 40]
    assert saved_steps(tmp_path / "often/run") == OFTEN
    for name in ("often", "killed"):
        run = tmp_path / name / "run"
        assert is_intact(run)
        assert_same(run, tmp_path / "plain/run")
        (event,) = events(run, "interval")[-1:]
        assert (event["every"], event["lost_seconds"]) == (9, 21)


@pytest.mark.slow
def test_killed_at_random_times(corpus, tmp_path):
    """Real clocks and saves in the background, on one and two processes. Which checkpoint a kill
    leaves depends on the machine; whatever it leaves is whole, and the run ends."""
    changes = CHANGES | {"train.steps": 300, "optim.decay_steps": 300, "checkpoint.every": 1000}
    changes |= {"eval.every": 100}
    by_seconds = {"checkpoint.seconds": 1, "checkpoint.overhead": 0.5}
    by_seconds["checkpoint.background"] = True
    killed = training_config(corpus, tmp_path / "killed", changes | by_seconds)
    run = tmp_path / "killed/run"
    rng = random.Random(1337)
    for kill in range(4):
        before = saved_steps(run)
        started = start_ranks(train, 1 + kill % 2, killed)
        # a further one is on disk, so there is something to lose
        wait_until(lambda before=before: saved_steps(run)[-1:] > before[-1:], 300, started[0][0])
        time.sleep(rng.uniform(0, 1))
        for process, _ in started:
            process.kill()
            process.join()
        assert is_intact(run), kill
    assert run_ranks(train, 1, killed, timeout=300) == ["completed"]
    assert events(run, "interval")
    assert is_intact(run)
