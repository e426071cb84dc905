"""Runs whose length is a time (`train.minutes`). What work takes, and the clock, are values that a
test sets."""

import math
import os
import shutil
from collections import defaultdict, deque
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from close import assert_close
from commands import expect_error
from ranks import RankError, run_ranks, run_until_killed
from runs import (
    all_rows,
    assert_same,
    events,
    expect_defect,
    forge,
    is_intact,
    said,
    saved_steps,
    train,
    train_all,
    training_config,
)

from gpt2_ddp.config.cli import load, read_yaml, resolve
from gpt2_ddp.config.saved import check_resumable
from gpt2_ddp.config.training import TrainingConfig, training_default
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.status import describe
from gpt2_ddp.state import Pending, Progress
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training import run_length
from gpt2_ddp.training.loop import train as train_task
from gpt2_ddp.training.optimizer import lr_at
from gpt2_ddp.training.run_length import REST, RunLength
from gpt2_ddp.training.stop import KEPT, StopRequest

SECONDS = {
    "first step": 6.0,
    "step": 2.0,
    "first evaluation": 34.0,
    "evaluation": 2.0,
    "save": 3.0,
}
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
"""At step 8, 60 of 90 s are over: an evaluation, which compiles, eight steps and two saves. An
evaluation has the tokens of two steps: the time of one, as it is forward. The evaluation and the
save of step 8 take 5 s. In 25 s fit eight steps, an evaluation and two saves."""
RESUMED_STEPS = 8 + 33
"""A resumed process has neither evaluated nor saved. At step 8, 12 of 90 s are over for it. The
evaluation takes 2 s, 33 steps and five evaluations 76 s. Saves are left out, as none was timed."""


class Machine:
    """A clock that work moves on. `slower`: seconds of a run, and how many times as long everything
    takes from then on."""

    def __init__(self, slower=((0.0, 1.0),)):
        self.now = 0.0
        self.slower = slower
        self.took = 0.0  # the present run until now
        self.factor = 100 if int(os.environ.get("RANK", "0")) else 1  # the main process counts

    def monotonic(self):
        return self.now * self.factor

    def work(self, stop, what):
        """Some work of a run."""
        first = f"first {what}"
        is_first = first in SECONDS and not stop._seconds[first]
        if not any(stop._seconds.values()):
            self.took = 0.0
        seconds = SECONDS.get(first if is_first else what, 0.0)
        seconds *= next(times for since, times in reversed(self.slower) if self.took >= since)
        self.now += seconds
        self.took += seconds
        stop.record_duration(what, seconds * self.factor)


def by_the_clock(configs, dies_at=0, slower=((0.0, 1.0),), bad=(0, 0)):
    """Trains all. Other ranks have another clock: the main process's counts. Gradients at the
    positions `bad` are NaN."""
    machine = Machine(slower)

    @contextmanager
    def timed(stop, what):
        yield
        machine.work(stop, what)

    run_length.time = machine
    StopRequest.timed = timed
    return train_all(configs, bad, math.nan, dies_at)


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
    """With `eval.patience` each evaluation may save, too. After the save of step 8, 23 s are left,
    in which fit 5 steps, 3 evaluations and 2 saves. With patience, two more saves leave 17 s, in
    which fit 3 steps, 2 evaluations and 2 saves: without the one of step 9, 4 steps would."""
    changes = CHANGES | {"eval": {"every": 3, "tokens": 768}}
    plain, patient = (
        training_config(corpus, tmp_path / str(patience), changes | {"eval.patience": patience})
        for patience in (None, 9)
    )
    assert run_ranks(by_the_clock, 1, [plain, patient]) == [["completed"] * 2]
    found = [events(tmp_path / name / "run", "length")[0] for name in ("None", "9")]
    assert [event["steps"] for event in found] == [8 + 5, 8 + 3]


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


BUSY = {
    "train.minutes": 5,
    "optim.min_lr": 0.0,
    "optim.schedule": "wsd",
    "optim.decay_fraction": 1,
    "checkpoint": {"every": 16, "background": False, "keep_last": 9},
    "eval": {"every": 32, "tokens": 768},
    "tracking": {"log_every": 1},
}
SLOWER = ((0.0, 1.0), (110.0, 2.0), (200.0, 0.5))
"""The machine becomes busy after 110 s, and idle after 200."""


@pytest.fixture(scope="module")
def busy(corpus, tmp_path_factory):
    """A run of two ranks whose length was settled several times."""
    folder = tmp_path_factory.mktemp("busy")
    config = training_config(corpus, folder, CHANGES | BUSY)
    assert run_ranks(by_the_clock, 2, [config], 0, SLOWER) == [["completed"]] * 2
    return folder / "run"


def test_a_length_is_settled_again(busy, capsys):
    """The rates are those of a schedule whose end moves; the records know it."""
    found = events(busy, "length")
    assert len(found) > 2
    first, second, *_ = [event["steps"] for event in found]
    assert second < first < found[-1]["steps"]
    steps = [row for row in all_rows(busy) if "event" not in row][1:]
    end = found[-1]["steps"]
    assert [row["step"] for row in steps] == [*range(1, end + 1)]
    # by hand: at each settling, what is left is spread over the steps to the next end
    lengths = {event["step"]: event["steps"] for event in found}
    rate = 0.003
    for row in steps:
        step = row["step"]
        if step <= 12:
            expected = 0.003 * step / 12
        else:
            newest = max(number for number in lengths if number < step)
            begin = max(newest, 12)
            if step == begin + 1:
                left = rate
            expected = left * (1 - (step - begin) / (lengths[newest] - begin))
        assert_close(row["lr"], expected)
        rate = row["lr"]
    assert rate == 0.0
    settings = read_yaml(str(busy / "config.yaml"))
    assert settings["train"]["steps"] == settings["optim"]["decay_steps"] == end
    assert len(settings["optim"]["earlier_ends"]) == len(found) - 1
    assert f"step {end:>6}/{end}" in describe(busy).replace(
        "  ", " "
    ) or f"{end}/{end}" in describe(busy)
    assert is_intact(busy)


@pytest.mark.parametrize("steps_after", [0, 1])
def test_a_killed_run_goes_on_with_the_ends_of_its_checkpoint(corpus, tmp_path, busy, steps_after):
    """Killed between a settling and the next checkpoint, and after this. It is the run of this
    schedule, bit for bit."""
    first, second, *_ = events(busy, "length")
    checkpoint = -(-second["step"] // 16) * 16  # the next one
    config = training_config(corpus, tmp_path, CHANGES | BUSY)
    run_until_killed(by_the_clock, 1, [config], checkpoint + steps_after, SLOWER)
    length = first["steps"]
    ends = []
    if steps_after:
        length = second["steps"]
        ends = [{"at_step": second["step"], "decay_steps": first["steps"]}]
    schedule = {"optim.decay_steps": length, "optim.earlier_ends": ends}
    steps = {"train.steps": length, "train.minutes": None, "run_name": "known"}
    known = training_config(corpus, tmp_path, CHANGES | BUSY | schedule | steps)
    assert run_ranks(by_the_clock, 1, [config, known]) == [["completed"] * 2]
    run = tmp_path / "run"
    settings = read_yaml(str(run / "config.yaml"))
    assert settings["optim"] == known.model_dump(mode="json")["optim"]
    assert settings["train"]["steps"] == length
    assert is_intact(run)
    assert_same(run, tmp_path / "known")


def test_a_rollback_before_a_settling(corpus, tmp_path, busy):
    """The steps before it are taken again with the end that they had."""
    second = events(busy, "length")[1]["step"]
    bad = (12 * (second + 1), 12 * (second + 3))  # the two steps after the next one
    guard = {"guard.patience": 2}
    config = training_config(corpus, tmp_path, CHANGES | BUSY | guard)
    assert run_ranks(by_the_clock, 1, [config], 0, SLOWER, bad) == [["completed"]]
    run = tmp_path / "run"
    (rollback,) = events(run, "rollback")
    assert rollback["step"] < second < rollback["from"]
    assert is_intact(run)


def test_a_settling_that_is_forged_is_found(busy, tmp_path, capsys):
    """Of another number; with another rate; at another step."""

    def settling(rows):
        return [row for row in rows if row.get("event") == "length"][1]

    def change_number(rows):
        settling(rows)["steps"] += 1

    def change_rate(rows):
        settling(rows)["config"]["optim"]["weight_decay"] = 0.2

    def change_step(rows):
        settling(rows)["config"]["optim"]["earlier_ends"][0]["at_step"] -= 1

    for number, edit in enumerate((change_number, change_rate, change_step)):
        run = tmp_path / str(number) / "run"
        shutil.copytree(busy, run)
        forge(run, edit)
        line = 1 + next(
            index for index, row in enumerate(all_rows(run)) if row == settling(all_rows(run))
        )
        expect_defect(run, capsys, f"metrics.jsonl, line {line}: the length ")


def test_flags_and_files_of_a_run_that_was_settled_again(busy, tmp_path):
    """A new end replaces all ends of a file. A resumed run has those of its checkpoint."""
    file = str(busy / "config.yaml")
    settings = read_yaml(file)
    ends = settings["optim"]["earlier_ends"]
    given = load(TrainingConfig, ["--config", file])
    assert given.model_dump(mode="json")["optim"] == settings["optim"]
    flags = ["--config", file, "--optim.decay_steps"]
    assert load(TrainingConfig, [*flags, "500"]).optim.earlier_ends == ()
    step = ends[-1]["at_step"]
    open_end = load(TrainingConfig, [*flags, "null"])
    for config in (given, open_end):
        check_resumable(config, "gpt2", settings, step)
    other = load(TrainingConfig, [*flags, str(settings["optim"]["decay_steps"])])
    expect_error("optim.earlier_ends = ", check_resumable, other, "gpt2", settings, step)
    # an older checkpoint resumes with the newest config.yaml
    before = deepcopy(settings)
    end = before["optim"]["earlier_ends"].pop()
    before["optim"]["decay_steps"] = end["decay_steps"]
    check_resumable(given, "gpt2", before, step)
    expect_error("optim.", check_resumable, given, "gpt2", before, step + 1)


@pytest.mark.parametrize("ends", ["5:9 5:20", "9:9", "30:40", "9:20 8:20", "5:6 7:9 8:8"])
def test_ends_in_a_wrong_order(ends):
    flags = "--train.steps 30 --optim.warmup_steps 2 --optim.decay_steps 30 --optim.earlier_ends "
    with pytest.raises(UserError) as error:
        load(TrainingConfig, (flags + ends).split(), training_default)
    assert str(error.value).startswith("optim.earlier_ends")


def test_steps_around_a_settling_are_trained_again(busy):
    """The next checkpoint has the ends of all steps before it."""
    step = events(busy, "length")[1]["step"]
    begin = step // 16 * 16
    assert step > begin, "the settling is between two checkpoints"
    assert is_intact(busy, replay=f"{begin}:{begin + 16}")


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


# Settled again


class Simulated:
    """A run without a model: what `RunLength` reads and changes. `pace`: what a step takes, by the
    seconds since the start. Evaluations and saves take as many times as much as `COSTS` says."""

    def __init__(self, config, pace):
        self.config = config
        self.step = 0
        self.progress = Progress(scores={"val_tokens": 6.0 * TOKENS})
        feed = SimpleNamespace(step_size=config.global_batch_windows)
        self.task = SimpleNamespace(
            feed=feed, units_per_item=config.model.block_size, set_steps=self.set_steps
        )
        self.log = SimpleNamespace(append=lambda row: self.rows.append(row), write_config=id)
        self.rows = []
        self.configs = []
        self.stop = StopRequest.__new__(StopRequest)
        self.stop._seconds = defaultdict(lambda: deque(maxlen=KEPT))
        self.stop.is_agreed = False
        self.metrics = SimpleNamespace(print=id)
        self.interval = None
        self.late_rows = []
        self.run = self
        self.now = 0.0
        self.pace = pace

    def set_steps(self, steps, step):
        self.config = self.config.with_steps(steps, step)
        self.configs.append(self.config)

    def work(self, what):
        seconds = self.pace(self.now) * COSTS[what]
        self.now += seconds
        self.stop.record_duration(what, seconds)

    def train(self):
        """Returns the seconds that the run took."""
        config = self.config
        length = RunLength(self)
        self.work("evaluation")
        self.work("save")
        while self.step != self.progress.steps:
            self.step += 1
            self.work("step")
            last = self.step == self.progress.steps
            evaluates, saves = (
                last or self.step % every == 0
                for every in (config.eval.every, config.checkpoint.every)
            )
            self.progress.pending = Pending(evaluate=evaluates, save=saves)
            length.follow()
            if evaluates:
                self.work("evaluation")
            if self.progress.pending.save:
                self.work("save")
        return self.now


MINUTES = 5
TOKENS = 16 * 1024
COSTS = {"step": 1.0, "evaluation": 3.0, "save": 2.0}
SCHEDULES = {
    "linear": {"schedule": "wsd", "decay_fraction": 1.0},
    "cosine": {"schedule": "cosine"},
    "wsd": {"schedule": "wsd", "decay_fraction": 0.3},
    "constant": {"schedule": "constant"},
}


def noise(now):
    """From 0 to 1, by the bits of a time."""
    return int(now * 1e6) * 2654435761 % 2**32 / 2**32


PACES = {
    "steady": lambda now: 1,
    "noisy": lambda now: 0.9 + 0.2 * noise(now),
    "slower": lambda now: 1 + (now > 100),
    "faster": lambda now: 1 - 0.5 * (now > 100),
    "much slower": lambda now: 1 + 3 * (now > 200),
    "slower late": lambda now: 1 + (now > 270),
    "faster late": lambda now: 1 - 0.5 * (now > 250),
    "slower and slower": lambda now: 1 + now / 100,
    "busy for a while": lambda now: 1 + (60 < now < 150),
    "busy now and then": lambda now: 1 + 2 * (int(now / 20) % 2),
    "a long pause": lambda now: 100 if 150 < now < 151 else 1,
}
"""How many times as long everything takes, by the seconds since the start."""


def simulated(pace, monkeypatch, step=0.3, **optim):
    """A run on a machine of this pace, and what it took. `step`: seconds of a step at first."""
    config = TrainingConfig.model_validate(
        {
            "optim": {"lr": 1.0, "min_lr": 0.0, "warmup_steps": 60, **optim},
            "train": {"minutes": MINUTES, "global_batch_tokens": TOKENS},
            "eval": {"every": 50},
            "checkpoint": {"every": 200},
        }
    )
    run = Simulated(config, lambda now: step * PACES[pace](now))
    monkeypatch.setattr(run_length, "time", SimpleNamespace(monotonic=lambda: run.now))
    return run, run.train()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pace", PACES)
def test_a_run_ends_in_time_whatever_the_machine_does(pace, schedule, monkeypatch):
    run, took = simulated(pace, monkeypatch, **SCHEDULES[schedule])
    assert abs(took / (60 * MINUTES) - 1) < 0.05
    if pace in ("steady", "noisy"):
        assert len(run.rows) == 1
    else:
        assert len(run.rows) > 1
    assert [row["steps"] for row in run.rows] == [config.train.steps for config in run.configs]
    optim = run.config.optim
    assert optim.decay_steps == run.step
    rates = [lr_at(step, optim) for step in range(60, run.step + 1)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == (1.0 if schedule == "constant" else 0.0)
    # each length leaves the rates of the past, and the next rate does not jump
    for row, before, after in zip(run.rows[1:], run.configs, run.configs[1:], strict=False):
        step = row["step"]
        past = [
            [lr_at(number, config.optim) for number in range(1, step + 1)]
            for config in (before, after)
        ]
        assert past[0] == past[1]
        left = after.train.steps - step
        drop = past[1][-1] - lr_at(step + 1, after.optim)
        assert drop <= 2.2 * past[1][-1] / left + 1e-9


def test_the_time_is_over(monkeypatch):
    """A machine that comes to a halt: what is left of the decay takes few steps."""
    PACES["halt"] = lambda now: 20 if now > 295 else 1
    run, took = simulated("halt", monkeypatch, **SCHEDULES["linear"])
    assert took < 1.25 * 60 * MINUTES
    *_, before, end = (row["steps"] for row in run.rows)
    assert end < before
    assert end - run.rows[-1]["step"] <= REST * 60 * MINUTES / 0.3


FEW_STEPS = ("steady", "slower", "faster", "much slower", "slower late", "faster late")


@pytest.mark.parametrize("pace", FEW_STEPS)
def test_a_run_of_few_steps_ends_in_time(pace, monkeypatch):
    """Of 170 steps: a change is seen after some steps, each of which is half a percent."""
    _, took = simulated(pace, monkeypatch, step=1.6, warmup_steps=20, **SCHEDULES["linear"])
    assert abs(took / (60 * MINUTES) - 1) < 0.05
