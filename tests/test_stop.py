"""Stops that come while something long follows a step: heard at once, saved, and what they broke off is done later."""

import json
import os
import signal
import time

import pytest
from hellaswag import items_file
from ranks import in_turn, run_ranks
from runs import assert_same, job_config, lasting_state, state_of, train, training_config, untimed

from gpt2_ddp.distributed import signals
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.training.stop import Interrupted, StopRequest


def train_and_stop(config, during: str, step: int, rank: int) -> tuple[str, int]:
    """Trains; what follows step `step` sends SIGTERM to this process, if it is that rank, when it is halfway `during`
    an evaluation (or its tasks), a sample or a save. Returns the outcome, and how often the rest was polled."""
    from gpt2_ddp import scoring
    from gpt2_ddp.checkpoint import store
    from gpt2_ddp.training import run, stop

    now = {"run": None, "in": "", "polls": 0, "after": 0}

    def is_there(place: str) -> bool:
        own = now["run"]
        return during == place and own.step == step and own.accelerator.process_index == rank

    def entering(place: str, method):
        def entered(self, *arguments):
            now["in"], now["polls"] = place, 0
            if place == "save" and is_there(place):
                os.kill(os.getpid(), signal.SIGTERM)
            return method(self, *arguments)

        return entered

    def polled(self, done=False):
        now["polls"] += 1
        now["after"] += bool(self.reason)
        if is_there(now["in"]) and not self.reason and now["polls"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        poll(self, done)

    def built(self):
        now["run"] = self
        build(self)

    build, poll = run.Run.build, stop.StopRequest.poll
    run.Run.build, stop.StopRequest.poll = built, polled
    run.Run.evaluate, run.Run.sample = entering("evaluate", run.Run.evaluate), entering("sample", run.Run.sample)
    scoring.answer = entering("tasks", scoring.answer)
    store.CheckpointStore.save = entering("save", store.CheckpointStore.save)
    return train(config), now["after"]


STOPS = [("evaluate", 0, 1), ("tasks", 5, 1), ("save", 8, 0), ("sample", 5, 0), ("evaluate", 10, 0)]
"""What each start of the run is stopped in, behind which step, and the rank that receives the signal."""


@pytest.mark.parametrize(
    ("stops", "parallel"),
    [
        (STOPS[1::2], "ddp"),
        pytest.param(STOPS[::2], "ddp", marks=pytest.mark.slow),
        pytest.param(sorted(STOPS, key=lambda stop: stop[1]), "fsdp", marks=pytest.mark.slow),
    ],
)
def test_what_a_stop_breaks_off_is_done_by_the_resumed_run(corpus, tmp_path, stops, parallel):
    """Two ranks of unequal numbers of batches. One of them is told to stop in the middle: no further step is taken, and
    what came before it is saved. Resumed, the rows, samples and weights are those of a run that was left alone."""
    changes = {"eval": {"every": 5, "tokens": None, "batch_size": 4, "tasks": [items_file(tmp_path)], "task_items": 11}}
    changes |= {"tracking": {"log_every": 1, "sample_every": 5}, "model.dropout": 0.1}
    changes |= {"launch.parallel": parallel}
    changes |= {"checkpoint": {"every": 4, "background": False, "keep_last": 9}}
    whole, config = (training_config(corpus, tmp_path / name, changes) for name in ("whole", "parts"))
    assert run_ranks(train_and_stop, 2, whole, "", 0, 0) == [("completed", 0)] * 2
    run, undisturbed = tmp_path / "parts/run", tmp_path / "whole/run"
    for during, step, rank in stops:
        ends = run_ranks(train_and_stop, 2, config, during, step, rank)
        assert [outcome for outcome, _ in ends] == ["stopped"] * 2
        assert all(after <= 2 for _, after in ends)  # it does not go on to its end
        status = json.loads((run / "status.json").read_text())
        assert (status["state"], status["step"]) == ("stopped", step)
        assert any(state_of(run)["progress"]["pending"].values()) == (during != "save")
        if during in ("evaluate", "tasks") and step:
            assert not any(row["step"] == step for row in untimed(run))
    assert [end for end, _ in run_ranks(train_and_stop, 2, config, "", 0, 0)] == ["completed"] * 2
    assert_same(run, undisturbed)
    assert untimed(run, "samples.jsonl") == untimed(undisturbed, "samples.jsonl")
    for checkpoint in (undisturbed / "checkpoints").iterdir():
        assert lasting_state(checkpoint) == lasting_state(run / "checkpoints" / checkpoint.name)


def test_a_stop_in_a_jobs_evaluation_is_heard(tmp_path, trained_job):
    config = job_config("regression", tmp_path, {"train.epochs": 2})
    assert run_ranks(train_and_stop, 1, config, "evaluate", 9, 0)[0][0] == "stopped"
    assert any(state_of(tmp_path / "run")["progress"]["pending"].values())
    run_ranks(train, 1, config)
    assert_same(tmp_path / "run", trained_job)


def test_the_deadline_reserves_what_a_typical_step_and_save_take(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    stop = StopRequest(build_accelerator("cpu"), time.monotonic(), max_minutes=1)
    try:
        stop.record_duration("step", 600)  # compiles
        assert stop.reserve == 0
        for seconds in (3, 5, 600, 5):
            stop.record_duration("step", seconds)
        stop.record_duration("save", 2)  # of the weights alone
        stop.record_duration("save", 30)
        assert stop.reserve == 55
        for seconds in (1, 15):
            stop.record_duration("write", seconds)
        assert not stop.check()  # 55 of the 60 seconds
        stop.record_duration("write", 17)
        assert stop.check()
        assert stop.reason == "train.max_minutes = 1"
    finally:
        stop.restore_handlers()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 8))
    stop = StopRequest(build_accelerator("cpu"), time.monotonic())
    try:
        stop.poll()
        for _ in range(2):
            stop.record_duration("step", 5)
        with pytest.raises(Interrupted):
            stop.poll()
        assert stop.reason == "the Slurm job's time limit"
    finally:
        stop.restore_handlers()


def interrupted(first: int, echo_seconds: float) -> tuple[str, bool]:
    """What a rank takes for the reason to stop that gets `first` and then SIGINT, and whether that one ended it."""
    signals.ECHO_SECONDS = echo_seconds
    stop = StopRequest(build_accelerator("cpu", "no"), time.monotonic())
    try:
        stop.request("another rank")  # which is no signal to this one
        for number in (first, signal.SIGINT):
            os.kill(os.getpid(), number)
    except KeyboardInterrupt:
        return stop.reason, True
    finally:
        stop.restore_handlers()
    return stop.reason, False


def test_a_signal_that_comes_twice_is_one_request():
    """To every process of a job, and again through the launcher; who interrupts later than that is impatient."""
    calls = [(interrupted, first, echo) for first in (signal.SIGINT, signal.SIGTERM) for echo in (600.0, 0.0)]
    assert run_ranks(in_turn, 1, *calls) == [[("another rank", False), ("another rank", True)] * 2]


def agreed(reasons: list[str], elastic: bool = True) -> tuple[bool, bool]:
    """Whether the ranks stop, and whether this one's launcher has to start it again; `SIGTERM` is a signal."""
    accelerator = build_accelerator("cpu", "no")
    stop = StopRequest(accelerator, time.monotonic(), by_machine=elastic)
    reason = reasons[accelerator.process_index]
    if reason == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    elif reason:
        stop.request(reason)
    stop.sync()
    result = stop.is_agreed, stop.is_of_other_machines()
    stop.restore_handlers()
    signals._state.saved = False
    return result


def test_an_elastic_stop_is_of_the_machines_that_were_signalled(monkeypatch):
    cases = [["", "SIGTERM"], ["SIGTERM", "SIGTERM"], ["time", "SIGTERM"], ["time", ""]]
    ranks = run_ranks(in_turn, 2, *[(agreed, case) for case in cases], (agreed, cases[0], False))
    assert ranks[0] == [(True, True), *[(True, False)] * 4]
    assert ranks[1] == [(True, False)] * 5
