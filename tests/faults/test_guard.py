"""Steps that go wrong: left out, gone back from, and
never called a completed run; all ranks decide alike."""

import math
import signal

import pytest
import torch
from close import assert_close, distance
from ranks import run_ranks
from runs import (
    all_rows,
    change,
    complete,
    events,
    is_intact,
    job_config,
    said,
    saved_steps,
    state_of,
    status,
    train,
    train_with_faults,
    training_config,
    untimed,
)

from gpt2_ddp.config.run import GuardConfig
from gpt2_ddp.state import Best, GuardState
from gpt2_ddp.training.guard import (
    LATE,
    LONG,
    WARM_UP,
    Guard,
    RunningStatistics,
    StepTensors,
    Verdict,
)

POISON = (12 * 9, 12 * 14)
"""Positions of steps 10 to 14: on them, the last rank's gradient is not finite."""
ALL = (0, 10**9)
GUARD = {"guard": {"patience": 3}, "train.steps": 20, "eval.every": 20}


def returns(run):
    """Of each rollback: the step that it returns to, the
    one it comes from, and the positions that it skips."""
    return [(row["step"], row["from"], row["skipped_range"]) for row in events(run, "rollback")]


def test_a_run_whose_every_gradient_is_nan_has_diverged(tiny_config, tmp_path):
    run = tmp_path / "runs/run"
    config = tiny_config(GUARD)
    assert run_ranks(train_with_faults, 2, config, ALL) == ["diverged"] * 2
    assert status(run)["state"] == "diverged"
    assert "gradient norm is not finite" in status(run)["reason"]
    assert returns(run) == [(0, 5, [0, 12 * 5 * i]) for i in (1, 2, 3)]


def test_a_job_that_diverges_stops_and_does_not_go_back(tmp_path):
    run = tmp_path / "run"
    config = job_config("regression", tmp_path, {"guard": {"patience": 4}, "train.epochs": 4})
    ((outcome, _, errors),) = run_ranks(said, 1, train_with_faults, config, (12 * 20, 10**9))
    assert outcome == status(run)["state"] == "diverged"
    assert errors.count("gradient norm is not finite") == 1
    assert not returns(run)
    assert saved_steps(run)[-1] == 18


def test_a_short_run_that_nothing_has_changed_is_not_completed(tiny_config, tmp_path):
    config = tiny_config({"train.steps": 4})
    assert run_ranks(train_with_faults, 1, config, ALL) == ["diverged"]
    assert saved_steps(tmp_path / "runs/run") == [0]  # the one to go back to


def test_poisoned_data_are_passed_over(corpus, tmp_path):
    """The run goes back to step 5, passes over the poison, and ends as good as a clean one; a
    record that is altered is a defect. test_resumed.py stops and kills such a run."""
    one, other = (
        training_config(corpus, tmp_path / name, GUARD | {"eval.tokens": 2048})
        for name in ("bad", "clean")
    )
    complete(one, 2, POISON, math.inf)
    complete(other, 2)
    run = tmp_path / "bad/run"
    assert returns(run) == [(5, 14, [12 * 5, 12 * 14])]
    ours = untimed(run)[-1]
    theirs = untimed(tmp_path / "clean/run")[-1]
    assert ours["step"] == theirs["step"] == 20
    assert distance(ours["val_loss"], theirs["val_loss"]) < 0.02
    assert ours["skipped"] == 0  # those of the stretch that does not stand
    assert "not_finite" not in theirs

    assert is_intact(run)
    change(run / "metrics.jsonl", f"[{12 * 5}, {12 * 14}]", f"[{12 * 5}, {12 * 15}]")
    assert not is_intact(run)


def test_an_epoch_whose_end_is_skipped_leaves_no_losses_to_the_next():
    guard = Guard(GuardConfig())
    for step in (1, 2, 3):
        if step == 3:
            assert guard.end_epoch() == 1 / 12
        guard.add(step, 12, numbers_of_a_step(1.0))
    guard.flush()
    assert (guard.losses.epoch, guard.losses.since_row) == ((1, 12, 12), (3, 36, 36))


def numbers_of_a_step(loss, bad=False):
    """What a guard takes of a step that is skipped if its gradient is bad."""
    bad, norm, loss = (torch.tensor(float(value)) for value in (bad, 0.1, loss))
    return StepTensors(bad, bad, norm, {"loss": loss})


def test_the_start_is_there_to_go_back_to_after_a_stop(tiny_config, tmp_path):
    """Stopped among the bad steps that the run begins with:
    the resumed run goes back to the beginning too."""
    config = tiny_config(GUARD | {"train.steps": 8})
    run = tmp_path / "runs/run"
    bad = (0, 12 * 5)
    assert run_ranks(train_with_faults, 1, config, bad, math.nan, 4, signal.SIGTERM) == ["stopped"]
    assert saved_steps(run) == [0, 4]
    complete(config, 1, bad)
    assert returns(run) == [(0, 5, [0, 12 * 5])]


def test_a_spike_before_and_after_a_resume_is_judged_alike(tiny_config, tmp_path):
    """Its norm is more than ten standard deviations above
    the mean; the statistics are in the checkpoint."""
    last = {"train.steps": 109, "eval.every": 109, "checkpoint.every": 109, "model.n_layer": 1}
    changes = GUARD | {"guard": {"sigmas": 10.0}} | last
    config = tiny_config(changes)
    spikes = (12 * 105, 12 * 108)  # steps 106 to 108
    outcomes = run_ranks(train_with_faults, 2, config, spikes, 1e4, 106, signal.SIGTERM)
    assert outcomes == ["stopped"] * 2
    complete(config, 2, spikes, 1e4)
    assert [row["skipped"] for row in untimed(tmp_path / "runs/run")[105:]] == [0, 1, 2, 3, 3]
    assert state_of(tmp_path / "runs/run")["losses"]["skipped"] == 3


@pytest.mark.slow
def test_losses_out_of_the_ordinary_are_bad_on_any_number_of_processes(corpus, tmp_path):
    """A learning rate that is too high from step 108
    on: found at the same step by 1 and 3 ranks."""
    changes = GUARD | {
        "guard": {"sigmas": 6.0, "patience": 3},
        "train.steps": 120,
        "optim.grad_clip": 0.0,
    }
    for world in (1, 3):
        run_ranks(explode, world, training_config(corpus, tmp_path / str(world), changes), 108)
    one, three = (returns(tmp_path / world / "run") for world in "13")
    assert one == three
    assert one[0][0] == 105


def explode(config, begins=28):
    """Trains with a learning rate a thousand times as high from a step on."""
    from gpt2_ddp.tasks import pretraining

    pretraining.lr_at = lambda step, optim: 3e-3 if step < begins else 3.0
    return train(config)


def test_a_learning_rate_times_a_thousand_at_once_is_no_completed_run(tiny_config, tmp_path):
    """By default. An evaluation tells it, at the same step on all ranks; also the last one."""
    config = tiny_config({"train.steps": 40, "eval.every": 10, "optim.grad_clip": 0.0})
    run = tmp_path / "runs/run"
    assert run_ranks(explode, 2, config) == ["diverged"] * 2
    assert status(run)["state"] == "diverged"
    assert "the validation loss of step" in status(run)["reason"]
    assert [(step, begins) for step, begins, _ in returns(run)] == [(25, 30)] * 3
    assert saved_steps(run)[-1] == 25
    assert all(row["tokens_per_second"] > 0 for row in all_rows(run) if "tokens_per_second" in row)


def test_the_checkpoint_to_go_back_to_is_kept(tiny_config, tmp_path):
    """keep_last 1 and a checkpoint in every step: what
    was saved in the bad stretch does not push it out."""
    config = tiny_config(GUARD | {"checkpoint.every": 1, "checkpoint.keep_last": 1})
    assert run_ranks(train_with_faults, 1, config, (POISON[0], 10**9)) == ["diverged"]
    assert saved_steps(tmp_path / "runs/run") == [0, 9]  # the best, and the good one


def test_checkpoints_of_bad_steps_go_with_the_rollback(tiny_config, tmp_path):
    """Stopped after the first step behind it, the 15th
    that it takes: a resume must not begin at a bad one."""
    config = tiny_config(GUARD | {"checkpoint.every": 1})
    assert run_ranks(train_with_faults, 1, config, POISON, math.nan, 15, signal.SIGTERM) == [
        "stopped"
    ]
    assert returns(tmp_path / "runs/run") == [(9, 14, [12 * 9, 12 * 14])]
    assert saved_steps(tmp_path / "runs/run")[-1] == 10


def test_a_new_run_saves_its_start_once(tiny_config, tmp_path):
    """Also where its evaluation is the best so far: a kill between two saves of one step would
    leave one unrecorded."""
    train(tiny_config({"train.steps": 2, "eval.patience": 5}))
    assert [row["step"] for row in events(tmp_path / "runs/run", "checkpoint")] == [0, 2]


def test_running_statistics():
    """Mean and variance of all values while they are few,
    of about the last hundred later; skips do not count."""
    statistics = RunningStatistics()
    for count in range(300):
        assert statistics.state_dict()[0] == count
        assert math.isfinite(statistics.limit(3.0)) == (count >= WARM_UP)
        if count in (1, 50):
            exact = torch.arange(count).double()
            assert_close(statistics.state_dict()[1:], (exact.mean(), exact.var(correction=0)))
        statistics.add(torch.tensor(float(count)), torch.tensor(True))
        statistics.add(torch.tensor(math.nan), torch.tensor(False))
        statistics.add(math.nan, False)
    state = _, mean, variance = statistics.state_dict()
    again = RunningStatistics()
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert_close(mean, 206.63199390546913)  # by hand, in plain floats
    assert_close(statistics.limit(2.0).item(), mean + 2 * math.sqrt(variance))


EARLY = [
    2.9,
    2.8,
    2.5,
    2.3,
    1.9,
    1.6,
    1.2,
    *([1.05, 0.94, 0.81, 0.7, 1.19] * 10),
    27.55,
    0.6,
    0.7,
    8.18,
]
"""Gradient norms of the first steps of a clean training (docs/reliability.md)."""


def test_no_limit_before_the_statistics_have_their_window():
    guard = Guard(GuardConfig(sigmas=6.0))
    skipped = [guard.judge_gradient(torch.tensor(norm)).item() for norm in EARLY]
    assert not any(skipped)
    usual = [guard.judge_gradient(torch.tensor(1 + k % 9 / 9)).item() for k in range(400)]
    assert not any(usual)
    assert guard.judge_gradient(torch.tensor(27.55)) == 1


LOSSES = [
    *(5.0 + i % 3 / 100 for i in range(110)),
    9.0,
    math.nan,
    -1e9,
    5.0,
    5.01,
    5.02,
    9.5,
    5.0,
    5.0,
]
"""Of steps 1 to 119; the gradient of step 113 is bad."""


def judgements(cut=0):
    """Each step of `LOSSES`: the step judged then, its verdict and the guard's state. After step
    `cut`, another guard resumes from its state."""
    config = GuardConfig(sigmas=6.0, patience=3)
    guard = Guard(config)
    found = []
    for step, loss in enumerate(LOSSES, 1):
        guard.add(step, 1, numbers_of_a_step(loss, step == 113))
        verdict = guard.judge(step)
        found.append(
            (
                guard.judged,
                verdict,
                guard.first_bad,
                guard.last_good,
                guard.ordinary.state_dict()[0],
            )
        )
        if step == cut:
            guard.flush()
            state = GuardState.model_validate_json(guard.state_dict().model_dump_json())
            guard = Guard(config)
            guard.load_state_dict(state)
            assert str(guard.state_dict()) == str(state)
    return found


def test_each_step_is_judged_two_steps_late():
    found = judgements()
    ok = Verdict.OK
    assert found[:3] == [(0, ok, None, 0, 0), (0, ok, None, 0, 0), (1, ok, None, 1, 1)]
    assert found[111] == (110, ok, None, 110, 110)
    bad = [(step, Verdict.BAD, 111, 110, 110) for step in (111, 112)]
    assert found[112:116] == [
        *bad,
        (113, Verdict.DIVERGED, 111, 110, 110),
        (114, ok, None, 114, 111),
    ]
    assert [verdict for _, verdict, *_ in found[116:]] == [ok, ok, Verdict.BAD]


@pytest.mark.parametrize("cut", [1, 2, 109, 112, 113, 115, 116])
def test_a_resumed_guard_judges_alike(cut):
    assert judgements(cut) == judgements()


def test_a_loss_that_is_not_finite_is_judged_bad_without_a_limit():
    guard = Guard(GuardConfig(sigmas=None))
    guard.add(1, 1, numbers_of_a_step(math.nan))
    guard.flush()
    assert (guard.judge(1 + LATE), guard.problem) == (Verdict.BAD, "its loss is not finite")


def test_a_guard_without_a_bad_step_knows_where_the_run_began():
    """The beginning of a branch can be gone back to,
    though it is in a stretch of bad steps already."""
    assert Guard(GuardConfig(), first_step=7).last_good == 7
    for begins, good in ((7, 8), (10, 10)):
        guard = Guard(GuardConfig(), begins)
        guard.load_state_dict(GuardState(judged=11, first_bad=9))
        assert guard.last_good == good


# Slow climbs


def first_divergence(losses, config=None, cut=0, phases=()):
    """The step after which a guard calls these losses a divergence; None if it does not. Another
    guard resumes from its state after step `cut`."""
    guard = Guard(config or GuardConfig())
    for step, loss in enumerate(losses, 1):
        guard.add(step, 1, numbers_of_a_step(loss))
        if guard.judge(step, sum(begins <= step for begins in phases)) is Verdict.DIVERGED:
            return step
        if step == cut:
            guard.flush()
            state = GuardState.model_validate_json(guard.state_dict().model_dump_json())
            guard = Guard(guard.config)
            guard.load_state_dict(state)
    return None


def falling(steps, start=10.0, end=5.0, noise=0.05):
    """Losses that fall from `start` to `end`, with some noise."""
    generator = torch.Generator().manual_seed(steps)
    noises = torch.randn(steps, generator=generator).tolist()
    return [
        end + (start - end) * math.exp(-5 * k / steps) + noise * noises[k] for k in range(steps)
    ]


def climbing(rate, steps, start=5.0):
    return [start * rate**k for k in range(1, steps + 1)]


@pytest.mark.parametrize("sigmas", [None, 6.0])
def test_a_climb_of_one_percent_a_step_is_noticed(sigmas):
    """Statistics follow it: `sigmas` alone never calls a loss of it bad."""
    losses = falling(300) + climbing(1.01, 300)
    assert first_divergence(losses, GuardConfig(sigmas=sigmas)) == 342 + (LONG - 1) + LATE
    assert first_divergence(losses, GuardConfig(sigmas=sigmas, climb=None)) is None


@pytest.mark.parametrize("cut", [2, 4, 5, 24, 299, 342, 380, 441])
def test_a_resumed_guard_notices_it_at_the_same_step(cut):
    assert first_divergence(falling(300) + climbing(1.01, 300), cut=cut) == 342 + (LONG - 1) + LATE


CLEAN = {
    "falls": falling(1000),
    "falls in noise": falling(1000, noise=2.0),
    "is noise around zero": falling(1000, 0.1, 0.0, noise=1.0),
    "starts with a bump": [10.8, 10.9, 11.5, *(12.5 for _ in range(150)), *falling(300)],
    "has spikes": [
        loss * (1e4 if step % 90 == 50 else 1) for step, loss in enumerate(falling(1000))
    ],
    "recovers from a bump": falling(300) + [20.0] * 90 + falling(300, 7.0),
    "fits all points": falling(500, 1.0, 1e-9, noise=0) + falling(500, 1e-7, 1e-7, noise=1e-8),
    "is negative": falling(1000, -1.0, -9.0),
}


@pytest.mark.parametrize("losses", CLEAN.values(), ids=CLEAN)
def test_a_clean_loss_is_no_climb(losses):
    assert first_divergence(losses) is None


def test_other_data_have_other_losses():
    """A phase of a mixture that begins with a loss far above that of the phase before."""
    losses = falling(300, end=1.0) + falling(200, 9.0, 7.0)
    assert first_divergence(losses, phases=(301,)) is None
    assert first_divergence(losses) is not None


def judged_evaluation(losses, val_loss, best=5.0):
    guard = Guard(GuardConfig())
    for step, loss in enumerate(losses, 1):
        guard.add(step, 1, numbers_of_a_step(loss))
        guard.judge(step)
    return guard.judge_evaluation(val_loss, Best(val_loss=best)) is Verdict.DIVERGED


def test_a_validation_loss_far_above_the_best_is_a_divergence_unless_the_model_overfits():
    assert judged_evaluation([*falling(100), 49.0], 49.0)
    assert not judged_evaluation([*falling(100), 49.0], 6.0)
    assert not judged_evaluation(falling(100, end=0.01), 49.0)
    assert not judged_evaluation([*falling(100), 49.0], None)
    assert not judged_evaluation([], 49.0)
