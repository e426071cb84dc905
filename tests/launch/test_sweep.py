"""A sweep: its runs, their order and names, what stops
and resumes them, and what it says of those that fail."""

import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, SCRIPTS, expect_error, stopped_and_killed

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.signals import Stopped
from gpt2_ddp.files import read_json
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.sweep import members as members_module
from gpt2_ddp.training import own_text

sys.path.insert(0, str(SCRIPTS))
import sweep

RATES = ["--seeds", "1", "2", "3", "--vary", "optim.lr=0.02,0.03"]
TRAINING = (
    "--model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32 --train.steps 60"
    " --train.device cpu"
    " --train.global_batch_tokens 256 --optim.warmup_steps 1 --optim.min_lr 0 --eval.every 20"
    " --eval.tokens 256"
    " --checkpoint.every 5 --checkpoint.background false --tracking.log_every 5"
)


def members(*words):
    return sweep.find_members(load(sweep.SweepConfig, words, sweep.training_default), list(words))


def test_each_combination_of_values_and_seeds_is_a_run_of_ordinary_flags():
    words = [
        "--train.steps",
        "9",
        *RATES,
        "optim.betas=[0.9,0.95],[0.8,0.9]",
        "--run_name",
        "a",
        "--output_dir",
        "b/c",
    ]
    found = members(*words)
    assert len(found) == 12
    own = (
        "--run_name a-lr_0.02-betas__0.9_0.95_-seed_2 --seed 2 --optim.lr 0.02"
        " --optim.betas [0.9,0.95]"
    )
    assert " ".join(found[1].flags) == f"--train.steps 9 --output_dir b/c {own}"
    (alone,) = members("--seed", "7", "--at_once", "3", "--dry_run")
    assert alone.flags == ["--run_name", "stdlib-seed_7", "--seed", "7"]


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--vary", "optim.lr"], "vary = optim.lr"),
        (["--vary", "seed=1,2"], "vary = seed=1,2"),
        (["--vary", "optim.lr=0.01,-1"], "optim.lr = -1"),
        (["--seeds", "-1"], "seed = -1"),
    ],
)
def test_a_mistake_ends_it_before_the_first_run(words, field):
    expect_error(field, members, *words)


@pytest.mark.parametrize(
    "plant", [lambda log: log.symlink_to(log.with_name("diary")), os.mkfifo, Path.mkdir]
)
def test_a_planted_log_is_not_written(tmp_path, plant):
    """A received folder of runs may have a link, a
    pipe or a folder in the place of a run's output."""
    (tmp_path / "diary").touch()
    (member,) = members("--output_dir", str(tmp_path), "--seeds", "1")
    members_module.check_log(member)
    plant(Path(f"{member.folder}.log"))
    expect_error(r"seed_1\.log", members_module.check_log, member)


class Stub:
    """A process that ends after some polls, or only by a signal."""

    def __init__(self, member, code, polls=1):
        Path(f"{member.folder}.log").write_text("step 1\nerror: something\n")
        self.returncode = code
        self._polls = polls
        self.signals = []

    def poll(self):
        self._polls -= 1
        return self.returncode if self._polls < 0 else None

    def send_signal(self, number):
        self.signals.append(number)
        self.returncode = 75
        self._polls = 0


@pytest.fixture
def three(tmp_path, monkeypatch):
    monkeypatch.setattr(members_module, "POLL_SECONDS", 0)
    return members("--run_name", "a", "--output_dir", str(tmp_path), "--seeds", "1", "2", "3")


def lines_of(capsys):
    return [
        line.rpartition("/a-")[2]
        for line in capsys.readouterr().out.splitlines()
        if "starts" not in line
    ]


def test_a_run_that_fails_ends_alone(three, monkeypatch, capsys):
    codes = iter((0, 2, 3))
    monkeypatch.setattr(members_module, "start", lambda member, *_: Stub(member, next(codes)))
    ends = members_module.train_all(three, 1, [])
    assert lines_of(capsys) == [
        "seed_1 is complete",
        "seed_2 failed: error: something",
        "seed_3 diverged",
    ]
    assert [*ends] == [member.folder for member in three[1:]]


def test_a_refused_run_fails_the_sweep_and_what_it_had_before_is_not_compared(
    three, tmp_path, capsys
):
    for member in three[:2]:
        shutil.copytree(ROOT / "tests/golden/gpt2_run", member.folder)
        (member.folder / "status.json").write_text(
            '{"state": "completed", "step": 8, "reason": ""}'
        )
    ends = {member.folder: "failed: error: something" for member in three[1:]}
    assert sweep.compare(three, ends, tmp_path / "a-sweep.json") == 1
    output = capsys.readouterr().out
    assert [folder for folder in ends if f"{folder} failed: " not in output] == []
    (group,) = read_json(tmp_path / "a-sweep.json")["groups"]
    assert [run["name"] for run in group["runs"]] == ["a-seed_1"]
    assert sweep.compare(three[:1], {}, tmp_path / "a-sweep.json") == 0
    assert "explain.py" not in capsys.readouterr().out
    assert sweep.compare(three[:2], {}, tmp_path / "a-sweep.json") == 0
    assert capsys.readouterr().out.endswith("? python scripts/explain.py A B\n")


def test_a_signal_stops_the_runs_and_begins_no_other(three, monkeypatch, capsys):
    started = []

    def start(member, *_):
        started.append(Stub(member, 0, math.inf))
        if len(started) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(members_module, "start", start)
    with pytest.raises(Stopped, match="SIGTERM"):
        members_module.train_all(three, 2, [])
    assert [process.signals for process in started] == [[signal.SIGTERM]] * 2
    assert lines_of(capsys) == ["seed_1 stopped", "seed_2 stopped"]


def test_a_run_that_another_process_trains_has_its_turn_after_that(three, monkeypatch, capsys):
    locked = [True, True, False, False, False]
    monkeypatch.setattr(
        members_module, "is_locked", lambda folder: folder.name == "a-seed_1" and locked.pop(0)
    )
    monkeypatch.setattr(members_module, "start", lambda member, *_: Stub(member, 0))
    members_module.train_all(three, 1, [])
    assert lines_of(capsys) == ["seed_2 is complete", "seed_3 is complete", "seed_1 is complete"]


def test_runs_at_a_time_share_the_gpus_or_the_cores(three, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: options["env"])
    monkeypatch.setattr(members_module, "usable_cores", lambda: 9)
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    assert [
        members_module.start(three[0], slot, 3, ["3", "5"])["CUDA_VISIBLE_DEVICES"]
        for slot in range(3)
    ] == ["3", "5", "3"]
    assert "OMP_NUM_THREADS" not in members_module.start(three[0], 0, 1, [])
    assert members_module.start(three[0], 1, 2, [])["OMP_NUM_THREADS"] == "4"


@pytest.mark.slow
def test_a_sweep_that_is_stopped_and_killed_is_resumed_by_the_same_command(corpus, tmp_path):
    words = f"{TRAINING} --data.path {corpus} --output_dir {tmp_path} --run_name a --at_once 2"
    command = [
        sys.executable,
        SCRIPTS / "sweep.py",
        "--seeds",
        "1",
        "2",
        *RATES[4:],
        *words.split(),
    ]
    stopped_and_killed(command, lambda: random.uniform(0, 6))
    runs = [
        Path(tmp_path, f"a-lr_{rate}-seed_{seed}") for rate in ("0.02", "0.03") for seed in (1, 2)
    ]
    for run, record in zip(runs, read_runs(runs), strict=True):
        assert [row["step"] for row in record.rows] == [0, *range(5, 61, 5)]
        assert verify_run(VerifyConfig(run=str(run))) == 0
    assert [len(group["runs"]) for group in read_json(tmp_path / "a-sweep.json")["groups"]] == [
        2,
        2,
    ]


def test_runs_of_a_text_of_one_s_own_differ_in_what_is_varied_alone(corpus, tmp_path, monkeypatch):
    """One measurement of the machine serves all; a sweep that goes on has the numbers of its first
    run, although the machine is faster now."""
    speeds = iter([1e9, 1e15])
    monkeypatch.setattr(own_text, "measure_speed", lambda device, dtype: next(speeds))
    words = (
        f"--data.path {corpus} --output_dir {tmp_path} --train.minutes 1 --seeds 1"
        " --train.mixed_precision no --vary model.n_layer=1,2"
    ).split()
    first, second = sweep.settled(members(*words), 1)
    assert (first.config.model.n_layer, second.config.model.n_layer) == (1, 2)
    assert first.config.model.n_embd == second.config.model.n_embd
    assert load(TrainingConfig, first.flags, sweep.training_default).train == first.config.train
    first.folder.mkdir()
    (first.folder / "config.yaml").write_text(dump(first.config))
    assert sweep.settled(members(*words), 1)[1].config == second.config
