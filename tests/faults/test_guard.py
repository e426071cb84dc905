"""Steps that go wrong: left out, gone back from, and never called a completed run; all ranks decide alike."""

import contextlib
import io
import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import small_jobs
import torch
from conftest import training_config
from ranks import run_ranks, start_ranks
from small_jobs import job_config, newest_checkpoint, run_small_job, same, weights

from gpt2_ddp.config.cli import dump, load
from gpt2_ddp.config.jobs import JobConfig, RegressionConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.run.checkpoint import list_checkpoints
from gpt2_ddp.run.rows import standing

POISON = (24 * 9, 24 * 14)
"""Positions of steps 10 to 14: on them, the last rank's gradient is not finite."""

GUARD = {"guard": {"patience": 3}, "train.steps": 30, "eval.every": 30, "optim.decay_steps": 30}


def rows(run: Path) -> list[dict]:
    timings = ("tokens_per_second", "mfu", "data_share")
    return [{k: v for k, v in row.items() if k not in timings} for row in small_jobs.rows(run)]


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def train(
    config: TrainingConfig | JobConfig,
    factor: Callable[[int, int], float],
    dies_at: int = 0,
    sent: int = signal.SIGKILL,
) -> str:
    """Trains with the last rank's gradient multiplied by `factor(first position, step)` of each step; on that rank, the
    `dies_at`-th step that this process takes begins with the signal `sent`."""
    from gpt2_ddp.run import loop
    from gpt2_ddp.tasks.pretraining import Pretraining

    step, taken, gpt = loop.train_step, [], isinstance(config, TrainingConfig)

    def train_step(run):
        taken.append(run.step)
        last = run.accelerator.process_index == run.accelerator.num_processes - 1
        if last and len(taken) == dies_at:
            os.kill(os.getpid(), sent)
        times = factor(int(run.task.feed.take(run.task.feed.position)[0]), run.step + 1) if last else 1.0
        handle = next(run.task.model.parameters()).register_hook(lambda gradient: gradient * times)
        try:
            return step(run)
        finally:
            handle.remove()

    loop.train_step = train_step
    return loop.train(config, Pretraining).outcome if gpt else run_small_job(config).outcome


def clean(position: int, step: int) -> float:
    return 1.0


def always_bad(position: int, step: int) -> float:
    return math.nan


def poisoned(position: int, step: int) -> float:
    return math.inf if POISON[0] <= position < POISON[1] else 1.0


def late_poison(position: int, step: int) -> float:
    return math.nan if position >= 24 * 9 else 1.0


def poisoned_from_the_start(position: int, step: int) -> float:
    return math.nan if position < 24 * 5 else 1.0


def spike(position: int, step: int) -> float:
    return 1e4 if step == 26 else 1.0


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_whose_every_gradient_is_nan_has_diverged(corpus, tmp_path, world):
    config = training_config(corpus, tmp_path, GUARD)
    assert run_ranks(train, world, config, always_bad) == ["diverged"] * world
    assert status(tmp_path / "run")["state"] == "diverged"
    assert "3 bad steps in a row up to step 3: its gradient is not finite" in status(tmp_path / "run")["reason"]
    assert "after 3 rollbacks" in status(tmp_path / "run")["reason"]
    found = [row for row in rows(tmp_path / "run") if "event" in row]
    assert [(row["step"], row["from"], row["passed"]) for row in found] == [
        (0, 5, [0, 24 * (5 + 5 * i)]) for i in range(3)
    ]


def heard(config: JobConfig, factor: Callable[[int, int], float]) -> tuple[str, str]:
    """The outcome of a training, and what it says on stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return train(config, factor), said.getvalue()


def test_a_job_that_diverges_stops_and_does_not_go_back(tmp_path):
    config = job_config("regression", tmp_path, {"guard": {"patience": 4}})
    ((outcome, said),) = run_ranks(heard, 1, config, late_poison)
    assert outcome == "diverged"
    assert said.count("warning: step 21 is bad: its gradient is not finite") == 1
    assert status(tmp_path / "run")["state"] == "diverged"
    assert not any("event" in row for row in rows(tmp_path / "run"))
    assert int(newest_checkpoint(tmp_path / "run").name[5:]) <= 20


def test_a_short_run_that_nothing_has_changed_is_not_completed(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 4})
    assert run_ranks(train, 1, config, always_bad) == ["diverged"]
    assert not list_checkpoints(tmp_path / "run/checkpoints")


def test_trained_on_all_the_same_a_bad_gradient_ruins_the_run(corpus, tmp_path):
    config = training_config(corpus, tmp_path, GUARD | {"guard": {"patience": 50, "skip": False}, "train.steps": 12})
    assert run_ranks(train, 1, config, poisoned) == ["diverged"]
    assert "not finite" in status(tmp_path / "run")["reason"]


@pytest.mark.parametrize(
    "world",
    [pytest.param(world, marks=pytest.mark.slow if world == 2 else pytest.mark.soak) for world in (1, 2, 3)],
)
def test_poisoned_data_are_passed_over(corpus, tmp_path, world, capsys):
    """The run goes back to step 5 or to its beginning, passes over the poison, and ends as good as a clean one. Killed
    in the bad stretch, behind the rollback, and stopped there, it decides and trains the same."""
    whole, parts, other = (
        training_config(
            corpus, tmp_path, GUARD | {"run_name": name, "eval.tokens": None, "model.dropout": 0.1, **changes}
        )
        for name, changes in (("whole", {}), ("parts", {}), ("clean", {}))
    )
    assert run_ranks(train, world, whole, poisoned) == ["completed"] * world
    (event,) = [row for row in rows(tmp_path / "whole") if "event" in row]
    assert (event["step"], event["from"], event["passed"]) == (5, 14, [24 * 5, 24 * 14])

    for dies_at, number in ((12, signal.SIGKILL), (9, signal.SIGTERM), (13, signal.SIGKILL)):
        started = start_ranks(train, world, parts, poisoned, dies_at, number)
        started[-1][0].join(60)
        for process, _ in started:
            process.join(0 if number == signal.SIGKILL else 60)
            process.kill()
            process.join()
    assert run_ranks(train, world, parts, poisoned) == ["completed"] * world
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))

    run_ranks(train, world, other, clean)
    ours, theirs = (standing(rows(tmp_path / name))[-1] for name in ("whole", "clean"))
    assert ours["step"] == theirs["step"] == 30
    assert ours["val_loss"] == pytest.approx(theirs["val_loss"], rel=0.02)
    assert ours["skipped"] == 0  # those of the stretch that does not stand

    assert verify_run(VerifyConfig(run=str(tmp_path / "parts"))) == 0
    file = tmp_path / "parts/metrics.jsonl"
    file.write_text(file.read_text().replace(f'"passed": [{24 * 5}, {24 * 14}]', f'"passed": [{24 * 5}, {24 * 15}]'))
    assert verify_run(VerifyConfig(run=str(tmp_path / "parts"))) == 1
    assert "defect  metrics.jsonl, line" in capsys.readouterr().out


def test_the_start_is_there_to_go_back_to_after_a_stop(corpus, tmp_path):
    """Stopped among the bad steps that the run begins with: the resumed run goes back to the beginning too."""
    whole, parts = (training_config(corpus, tmp_path, GUARD | {"run_name": name}) for name in ("whole", "parts"))
    assert run_ranks(train, 1, whole, poisoned_from_the_start) == ["completed"]
    assert run_ranks(train, 1, parts, poisoned_from_the_start, 4, signal.SIGTERM) == ["stopped"]
    assert [place.name for place in list_checkpoints(tmp_path / "parts/checkpoints")] == [
        "step-00000000",
        "step-00000004",
    ]
    assert run_ranks(train, 1, parts, poisoned_from_the_start) == ["completed"]
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    (event,) = [row for row in rows(tmp_path / "whole") if "event" in row]
    assert (event["step"], event["from"]) == (0, 5)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.parametrize("stop_at", [27, pytest.param(25, marks=pytest.mark.slow)])
def test_a_spike_before_and_after_a_resume_is_judged_alike(corpus, tmp_path, stop_at):
    """Its norm is more than ten standard deviations above the mean; the statistics are in the checkpoint."""
    changes = GUARD | {"guard": {"norm_sigmas": 10.0}}
    whole, parts = (training_config(corpus, tmp_path, changes | {"run_name": name}) for name in ("whole", "parts"))
    assert run_ranks(train, 2, whole, spike) == ["completed"] * 2
    assert [row["skipped"] for row in rows(tmp_path / "whole")[25:28]] == [0, 1, 1]
    assert run_ranks(train, 2, parts, spike, stop_at, signal.SIGTERM) == ["stopped"] * 2
    assert run_ranks(train, 2, parts, spike) == ["completed"] * 2
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_losses_out_of_the_ordinary_are_bad_on_any_number_of_processes(corpus, tmp_path):
    """A learning rate that is too high from step 24 on: found at the same step by 1, 2 and 4 ranks."""
    from gpt2_ddp.run import loop  # noqa: F401

    found = []
    for world in (1, 2, 4):
        changes = GUARD | {"guard": {"loss_sigmas": 6.0, "patience": 3, "rollbacks": 1}, "train.steps": 40}
        config = training_config(corpus, tmp_path / str(world), changes | {"optim.grad_clip": 0.0})
        run_ranks(explode, world, config)
        found.append([(row["step"], row["from"]) for row in rows(tmp_path / str(world) / "run") if "event" in row])
    assert found[0] == found[1] == found[2]
    assert found[0][0][0] == 25


def explode(config: TrainingConfig) -> str:
    from gpt2_ddp.tasks import pretraining

    pretraining.lr_at = lambda step, optim: 3e-3 if step < 28 else 3.0
    return train(config, clean)


def test_the_checkpoint_to_go_back_to_is_kept(corpus, tmp_path):
    """keep_last 1 and a checkpoint in every step: what was saved in the bad stretch does not push it out."""
    changes = GUARD | {"checkpoint.every": 1, "checkpoint.keep_last": 1, "guard": {"patience": 3, "rollbacks": 0}}
    config = training_config(corpus, tmp_path, changes)
    assert run_ranks(train, 1, config, poisoned) == ["diverged"]
    kept = [int(place.name[5:]) for place in list_checkpoints(tmp_path / "run/checkpoints")]
    assert kept == [9]


def test_the_presets_set_limits():
    for preset in ("124m", "350m", "774m", "1558m"):
        guard = load(TrainingConfig, ["--config", f"configs/gpt2_{preset}.yaml"]).guard
        assert guard.norm_sigmas
        assert guard.loss_sigmas
    assert "rollbacks" in dump(TrainingConfig.model_construct())
    assert "rollbacks" not in dump(RegressionConfig())


@pytest.mark.parametrize("values", [[5.0, 6.0, 4.0, 5.5], list(range(300))])
def test_running_statistics(values):
    """Mean and variance of all values while they are few, of about the last hundred later; skips do not count."""
    from gpt2_ddp.model.optim import NormStatistics, RunningStatistics

    statistics, on_host = NormStatistics(torch.device("cpu")), RunningStatistics()
    for value in values:
        statistics.add(torch.tensor(float(value)), torch.tensor(True))
        statistics.add(torch.tensor(math.nan), torch.tensor(False))
        on_host.add(float(value))
    count, mean, variance = statistics.read()
    assert list(on_host.values) == [count, mean, variance]
    assert on_host.limit(3.0) == statistics.limit(3.0).item()
    assert count == len(values)
    if len(values) < 100:
        exact = torch.tensor(values, dtype=torch.float64)
        assert mean == pytest.approx(exact.mean().item())
        assert variance == pytest.approx(exact.var(correction=0).item())
        assert statistics.limit(3.0).item() == math.inf
    else:
        assert 190 < mean < 215
        assert statistics.limit(2.0).item() == pytest.approx(mean + 2 * math.sqrt(variance))


LOSSES = [*(5.0 + i % 3 / 100 for i in range(30)), 9.0, math.nan, -1e9, 5.0, 5.01, 5.02, 9.5, 5.0, 5.0]
"""Of steps 1 to 39; the gradient of step 33 is bad."""


def judgements(cut: int = 0) -> list[tuple]:
    """What a guard knows after each step of `LOSSES`; after step `cut`, another one resumes from its state."""
    from types import SimpleNamespace

    from gpt2_ddp.config.run import GuardConfig
    from gpt2_ddp.processes.agreement import Agreement
    from gpt2_ddp.run.guard import Guard
    from gpt2_ddp.run.stop import CARRIED

    class Stop:
        def __init__(self):
            self.carried, self.agreement = [0] * CARRIED, Agreement(accelerator, CARRIED)

        def agreed(self, carry):
            sums = self.agreement.exchange(carry)
            self.carried = [a + b for a, b in zip(self.carried, sums, strict=True)]

    place = {"device": torch.device("cpu"), "is_main_process": True, "num_processes": 1}
    accelerator = SimpleNamespace(**place, reduce=lambda value, reduction: value)
    config = GuardConfig(loss_sigmas=6.0, patience=3)
    guard, stop, found = Guard(config, accelerator), Stop(), []
    for step, loss in enumerate(LOSSES, 1):
        guard.note(torch.tensor(loss), torch.tensor(float(step == 33)))
        bad = guard.review(step, stop)
        found.append((guard.judged, bad, guard.first_bad, guard.diverged, guard.good, guard.losses.values[0]))
        if step == cut:
            state = json.loads(json.dumps(guard.state()))
            guard, stop = Guard(config, accelerator), Stop()
            guard.load_state(state)
            assert guard.state() == state
    return found


def test_each_step_is_judged_two_steps_late():
    found = judgements()
    assert found[0] == found[1] == (0, False, None, False, 0, 0)
    assert found[2] == (1, False, None, False, 1, 1)
    assert found[31] == (30, False, None, False, 30, 30)
    assert found[32] == (31, True, 31, False, 30, 30)
    assert found[33] == (32, True, 31, False, 30, 30)
    assert found[34] == (33, True, 31, True, 30, 30)
    assert found[35] == (34, False, None, False, 34, 31)
    assert [bad for _, bad, *_ in found[36:]] == [False, False, True]


@pytest.mark.parametrize("cut", [1, 2, 29, 32, 33, 35, 36])
def test_a_resumed_guard_judges_alike(cut):
    assert judgements(cut) == judgements()


def test_a_guard_without_a_bad_step_knows_where_the_run_began():
    from types import SimpleNamespace

    from gpt2_ddp.config.run import GuardConfig
    from gpt2_ddp.run.guard import LARGEST, Guard, _Numbers

    place = {"device": torch.device("cpu"), "is_main_process": True}
    guard = Guard(GuardConfig(), SimpleNamespace(**place))
    guard.load_state({}, begins=7)
    assert (guard.good, guard.judged, guard.bad_steps) == (7, 0, 0)
    guard.load_state({"judged": 9, "first_bad": 9}, begins=7)
    assert guard.good == 8
    assert _Numbers().integers() == [0, 0, 0, 0]
    assert _Numbers(torch.tensor([0.5, 1.0])).integers() == [1, 2**31, False, 1]
    assert _Numbers(torch.tensor([-1e30, 0.0])).integers() == [1, -LARGEST * 2**32, False, 0]
    assert _Numbers(torch.tensor([math.inf, 0.0])).integers() == [1, 0, True, 0]
