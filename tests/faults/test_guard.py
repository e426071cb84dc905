"""Steps that go wrong: left out, gone back from, and never called a completed run; all ranks decide alike."""

import math
import signal
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from close import assert_close, distance
from ranks import run_ranks
from runs import (
    events,
    is_intact,
    job_config,
    newest_checkpoint,
    said,
    saved_steps,
    state_of,
    status,
    train,
    train_with_faults,
    training_config,
    untimed,
)

from gpt2_ddp.checkpoint.run_files import valid_rows
from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.state import GuardState, Losses, LossSum, Progress
from gpt2_ddp.training.guard import LATE, Guard, Verdict
from gpt2_ddp.training.meters import StepSums
from gpt2_ddp.training.optimizer import RunningStatistics
from gpt2_ddp.training.run import Trainer

POISON = (12 * 9, 12 * 14)
"""Positions of steps 10 to 14: on them, the last rank's gradient is not finite."""
ALL = (0, 10**9)
GUARD = {"guard": {"patience": 3}, "train.steps": 20, "eval.every": 20}


def returns(run: Path) -> list[tuple]:
    """Of each rollback: the step that it returns to, the one it comes from, and the positions that it skips."""
    return [(row["step"], row["from"], row["skipped_range"]) for row in events(run, "rollback")]


def test_a_run_whose_every_gradient_is_nan_has_diverged(corpus, tmp_path):
    config = training_config(corpus, tmp_path, GUARD)
    assert run_ranks(train_with_faults, 2, config, ALL) == ["diverged"] * 2
    assert status(tmp_path / "run")["state"] == "diverged"
    assert "3 bad steps in a row up to step 3: its gradient norm is not finite" in status(tmp_path / "run")["reason"]
    assert "after 3 rollbacks" in status(tmp_path / "run")["reason"]
    assert returns(tmp_path / "run") == [(0, 5, [0, 12 * 5 * i]) for i in (1, 2, 3)]


def test_a_job_that_diverges_stops_and_does_not_go_back(tmp_path):
    config = job_config("regression", tmp_path, {"guard": {"patience": 4}, "train.epochs": 4})
    ((outcome, _, errors),) = run_ranks(said, 1, train_with_faults, config, (12 * 20, 10**9))
    assert outcome == "diverged"
    assert errors.count("is bad: its gradient norm is not finite") == 1
    assert status(tmp_path / "run")["state"] == "diverged"
    assert not returns(tmp_path / "run")
    assert int(newest_checkpoint(tmp_path / "run").name[5:]) == 18


def test_a_short_run_that_nothing_has_changed_is_not_completed(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 4})
    assert run_ranks(train_with_faults, 1, config, ALL) == ["diverged"]
    assert saved_steps(tmp_path / "run") == [0], "the one to go back to"


def test_poisoned_data_are_passed_over(corpus, tmp_path, capsys):
    """The run goes back to step 5, passes over the poison, and ends as good as a clean one; a record that is altered
    is a defect. tests/test_resumed.py stops and kills such a run."""
    one, other = (training_config(corpus, tmp_path / name, GUARD | {"eval.tokens": None}) for name in ("bad", "clean"))
    assert run_ranks(train_with_faults, 2, one, POISON, math.inf) == ["completed"] * 2
    run_ranks(train, 2, other)
    run = tmp_path / "bad/run"
    assert returns(run) == [(5, 14, [12 * 5, 12 * 14])]
    ours, theirs = (valid_rows(untimed(tmp_path / name / "run"))[-1] for name in ("bad", "clean"))
    assert ours["step"] == theirs["step"] == 20
    assert distance(ours["val_loss"], theirs["val_loss"]) < 0.02
    assert ours["skipped"] == 0  # those of the stretch that does not stand

    assert is_intact(run)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().replace(f"[{12 * 5}, {12 * 14}]", f"[{12 * 5}, {12 * 15}]"))
    assert not is_intact(run)
    assert "defect  metrics.jsonl, line" in capsys.readouterr().out


def test_an_epoch_whose_end_is_skipped_leaves_no_losses_to_the_next():
    feed, zero = SimpleNamespace(), torch.tensor(0.0)
    parts: dict[str, Any] = dict.fromkeys([field.name for field in fields(Trainer)])
    parts |= {"progress": Progress(), "task": SimpleNamespace(feed=feed), "losses": Losses(), "sums": StepSums()}
    run = Trainer(**parts | {"optimizer": SimpleNamespace(bad=zero), "guard": Guard(GuardConfig())})
    for feed.skipped_end in (False, False, True):
        run.record_step({"loss": torch.tensor(1.0)}, 12, zero, zero)
    run.flush()
    assert (run.losses.epoch, run.losses.since_row) == (LossSum(1, 12, 12), LossSum(3, 36, 36))


def test_the_start_is_there_to_go_back_to_after_a_stop(corpus, tmp_path):
    """Stopped among the bad steps that the run begins with: the resumed run goes back to the beginning too."""
    config, run = training_config(corpus, tmp_path, GUARD | {"train.steps": 8}), tmp_path / "run"
    bad = (0, 12 * 5)
    assert run_ranks(train_with_faults, 1, config, bad, math.nan, 4, signal.SIGTERM) == ["stopped"]
    assert saved_steps(run) == [0, 4]
    assert run_ranks(train_with_faults, 1, config, bad) == ["completed"]
    assert returns(run) == [(0, 5, [0, 12 * 5])]


def test_a_spike_before_and_after_a_resume_is_judged_alike(corpus, tmp_path):
    """Its norm is more than ten standard deviations above the mean; the statistics are in the checkpoint."""
    changes = GUARD | {"guard": {"norm_sigmas": 10.0}, "train.steps": 29, "eval.every": 29}
    config, spikes = training_config(corpus, tmp_path, changes), (12 * 25, 12 * 28)  # steps 26 to 28
    assert run_ranks(train_with_faults, 2, config, spikes, 1e4, 26, signal.SIGTERM) == ["stopped"] * 2
    assert run_ranks(train_with_faults, 2, config, spikes, 1e4) == ["completed"] * 2
    assert [row["skipped"] for row in untimed(tmp_path / "run")[25:]] == [0, 1, 2, 3, 3]
    assert state_of(tmp_path / "run")["losses"]["skipped"] == 3


@pytest.mark.slow
def test_losses_out_of_the_ordinary_are_bad_on_any_number_of_processes(corpus, tmp_path):
    """A learning rate that is too high from step 28 on: found at the same step by 1 and 3 ranks."""
    found = []
    for world in (1, 3):
        changes = GUARD | {"guard": {"loss_sigmas": 6.0, "patience": 3}, "train.steps": 40}
        config = training_config(corpus, tmp_path / str(world), changes | {"optim.grad_clip": 0.0})
        run_ranks(explode, world, config)
        found.append(returns(tmp_path / str(world) / "run"))
    assert found[0] == found[1]
    assert found[0][0][0] == 25


def explode(config: TrainingConfig) -> str:
    from gpt2_ddp.tasks import pretraining

    pretraining.lr_at = lambda step, optim: 3e-3 if step < 28 else 3.0
    return train(config)


def test_the_checkpoint_to_go_back_to_is_kept(corpus, tmp_path):
    """keep_last 1 and a checkpoint in every step: what was saved in the bad stretch does not push it out."""
    config = training_config(corpus, tmp_path, GUARD | {"checkpoint.every": 1, "checkpoint.keep_last": 1})
    assert run_ranks(train_with_faults, 1, config, (POISON[0], 10**9)) == ["diverged"]
    assert saved_steps(tmp_path / "run") == [0, 9], "the best, and the good one"


def test_a_new_run_saves_its_start_once(corpus, tmp_path):
    """Also where its evaluation is the best so far: a kill between two saves of one step would leave one unrecorded."""
    train(training_config(corpus, tmp_path, {"train.steps": 2, "eval.patience": 5}))
    assert [row["step"] for row in events(tmp_path / "run", "checkpoint")] == [0, 2]


@pytest.mark.parametrize("values", [[5.0, 6.0, 4.0, 5.5], list(range(300))])
def test_running_statistics(values):
    """Mean and variance of all values while they are few, of about the last hundred later; skips do not count."""
    statistics = RunningStatistics()
    assert statistics.state_dict() == (0, 0, 0)
    for count, value in enumerate(values, 1):
        statistics.add(torch.tensor(float(value)), torch.tensor(True))
        statistics.add(torch.tensor(math.nan), torch.tensor(False))
        statistics.add(math.nan, False)
        assert math.isfinite(statistics.limit(3.0)) == (count >= 20)
    state = count, mean, variance = statistics.state_dict()
    assert RunningStatistics(state=state).state_dict() == state
    assert count == len(values)
    if len(values) < 100:
        exact = torch.tensor(values, dtype=torch.float64)
        assert_close(mean, exact.mean().item())
        assert_close(variance, exact.var(correction=0).item())
    else:
        assert_close(mean, 206.63199390546913)  # by hand, in plain floats
        assert_close(statistics.limit(2.0).item(), mean + 2 * math.sqrt(variance))


LOSSES = [*(5.0 + i % 3 / 100 for i in range(30)), 9.0, math.nan, -1e9, 5.0, 5.01, 5.02, 9.5, 5.0, 5.0]
"""Of steps 1 to 39; the gradient of step 33 is bad."""


def judgements(cut: int = 0) -> list[tuple]:
    """Each step of `LOSSES`: the step judged then, its verdict and the guard's state. After step `cut`, another guard
    resumes from its state."""
    config = GuardConfig(loss_sigmas=6.0, patience=3)
    guard, found = Guard(config), []
    for step, loss in enumerate(LOSSES, 1):
        guard.add(step, loss, step == 33)
        verdict = guard.judge(step)
        found.append((guard.judged, verdict, guard.first_bad, guard.last_good, guard.losses.state_dict()[0]))
        if step == cut:
            state = GuardState.model_validate_json(guard.state_dict().model_dump_json())
            guard = Guard(config)
            guard.load_state_dict(state)
            assert str(guard.state_dict()) == str(state)
    return found


def test_each_step_is_judged_two_steps_late():
    found = judgements()
    assert found[0] == found[1] == (0, Verdict.OK, None, 0, 0)
    assert found[2] == (1, Verdict.OK, None, 1, 1)
    assert found[31] == (30, Verdict.OK, None, 30, 30)
    assert found[32] == (31, Verdict.BAD, 31, 30, 30)
    assert found[33] == (32, Verdict.BAD, 31, 30, 30)
    assert found[34] == (33, Verdict.DIVERGED, 31, 30, 30)
    assert found[35] == (34, Verdict.OK, None, 34, 31)
    assert [verdict for _, verdict, *_ in found[36:]] == [Verdict.OK, Verdict.OK, Verdict.BAD]


@pytest.mark.parametrize("cut", [1, 2, 29, 32, 33, 35, 36])
def test_a_resumed_guard_judges_alike(cut):
    assert judgements(cut) == judgements()


def test_a_loss_that_is_not_finite_is_judged_bad_without_a_limit():
    guard = Guard(GuardConfig(loss_sigmas=None))
    guard.add(1, math.nan, bad=False)
    assert (guard.judge(1 + LATE), guard.problem) == (Verdict.BAD, "its loss is not finite")


def test_a_guard_without_a_bad_step_knows_where_the_run_began():
    """The beginning of a branch can be gone back to, though it is in a stretch of bad steps already."""
    guard = Guard(GuardConfig(), first_step=7)
    assert (guard.last_good, guard.judged, guard.bad_steps) == (7, 0, 0)
    for begins, good in ((7, 8), (10, 10)):
        guard = Guard(GuardConfig(), begins)
        guard.load_state_dict(GuardState(judged=11, first_bad=9))
        assert guard.last_good == good
