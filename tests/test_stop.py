"""Stops that come while something long follows a step: heard at once, saved, and what they broke off is done later."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from ranks import run_ranks
from runs import job_config, run_small_job, same, training_config, weights
from runs import rows as all_rows

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.processes import signals
from gpt2_ddp.processes.launch import build_accelerator
from gpt2_ddp.run.stop import GivenUp, StopRequest


def rows(file: Path) -> list[dict]:
    ignored = ("tokens_per_second", "samples_per_second", "mfu", "data_share")
    return [{k: v for k, v in row.items() if k not in ignored} for row in all_rows(file.parent, file.name)]


def train_and_stop(config, during: str, step: int, rank: int) -> tuple[str, int]:
    """Trains; what follows step `step` sends SIGTERM to this process, if it is that rank, when it is halfway `during`
    an evaluation (or its tasks), a sample or a save. Returns the outcome, and how often the rest was polled."""
    from gpt2_ddp.run import checkpoint_folder as checkpoint
    from gpt2_ddp.run import run, stop
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks import pretraining
    from gpt2_ddp.tasks.pretraining import Pretraining

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

    def polled(self):
        now["polls"] += 1
        now["after"] += bool(self.reason)
        if is_there(now["in"]) and not self.reason and now["polls"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        poll(self)

    def built(self):
        now["run"] = self
        build(self)

    build, poll = run.Run.build, stop.StopRequest.poll
    run.Run.build, stop.StopRequest.poll = built, polled
    run.Run.evaluate, run.Run.sample = entering("evaluate", run.Run.evaluate), entering("sample", run.Run.sample)
    pretraining.answer = entering("tasks", pretraining.answer)
    checkpoint.CheckpointFolder.save = entering("save", checkpoint.CheckpointFolder.save)
    outcome = (train(config, Pretraining) if isinstance(config, TrainingConfig) else run_small_job(config)).outcome
    return outcome, now["after"]


CASES = [
    ("tasks", 10, 1),
    ("sample", 10, 1),
    ("save", 10, 0),
    *[
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (("evaluate", 0, 1), ("evaluate", 10, 1), ("evaluate", 20, 0), ("sample", 20, 0))
    ],
]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_ranks(train_and_stop, 2, settings(corpus, folder), "", 0, 0) == [("completed", 0)] * 2
    return folder / "run"


def settings(corpus: Path, folder: Path) -> TrainingConfig:
    changes = {"eval.tokens": None, "eval.batch_size": 4, "tracking.sample_every": 10, "model.dropout": 0.1}
    changes |= {"eval.tasks": ["cloze"], "eval.task_items": 11}
    return training_config(corpus, folder, changes | {"tracking": {"log_every": 1, "sample_every": 10}})


@pytest.mark.parametrize(("during", "step", "rank"), CASES)
def test_what_a_stop_breaks_off_is_done_by_the_resumed_run(corpus, tmp_path, undisturbed, during, step, rank):
    """Two ranks of unequal numbers of batches. One of them is told to stop in the middle: no further step is taken, and
    what came before it is saved. Resumed, the rows, samples and weights are those of a run that was left alone."""
    config = settings(corpus, tmp_path)
    ends = run_ranks(train_and_stop, 2, config, during, step, rank)
    expected = "completed" if (during, step) == ("save", 20) else "stopped"
    assert [outcome for outcome, _ in ends] == [expected] * 2
    assert all(after <= 2 for _, after in ends)  # it does not go on to its end
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"], status["reason"]) == ("stopped", step, status["reason"])
    state = json.loads((tmp_path / f"run/checkpoints/step-{step:08d}/state.json").read_text())
    assert (state["owed"] is None) == (during == "save")
    if during in ("evaluate", "tasks") and step:
        assert not any(row["step"] == step for row in rows(tmp_path / "run/metrics.jsonl"))
    assert [end for end, _ in run_ranks(train_and_stop, 2, config, "", 0, 0)] == ["completed"] * 2
    for file in ("metrics.jsonl", "samples.jsonl"):
        assert rows(tmp_path / "run" / file) == rows(undisturbed / file)
    assert same(weights(tmp_path / "run"), weights(undisturbed))
    for checkpoint in sorted((undisturbed / "checkpoints").iterdir()):
        ours, theirs = (
            json.loads((run / "checkpoints" / checkpoint.name / "state.json").read_text())
            for run in (tmp_path / "run", undisturbed)
        )
        own = {"run_id": "", "metrics_chain": ""}
        assert ours | own == theirs | own


def test_a_stop_in_a_jobs_evaluation_is_heard(tmp_path):
    whole, parts = (job_config("mlp", tmp_path, {"run_name": name}) for name in ("whole", "parts"))
    run_ranks(train_and_stop, 2, whole, "", 0, 0)
    ends = run_ranks(train_and_stop, 2, parts, "evaluate", 10, 1)
    assert [outcome for outcome, _ in ends] == ["stopped"] * 2
    run_ranks(train_and_stop, 2, parts, "", 0, 0)
    assert rows(tmp_path / "parts/metrics.jsonl") == rows(tmp_path / "whole/metrics.jsonl")
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_the_deadline_counts_in_what_a_save_takes(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    stop = StopRequest(build_accelerator("cpu"), time.monotonic(), max_minutes=1)
    try:
        assert not stop.agreed()
        stop.took("step", 5)
        stop.took("save", 30)
        assert not stop.agreed()  # 55 of the 60 seconds
        stop.took("save", 34)
        assert stop.agreed()
        assert stop.reason == "train.max_minutes = 1"
    finally:
        stop.restore_handlers()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 8))
    stop = StopRequest(build_accelerator("cpu"), time.monotonic())
    try:
        stop.poll()
        stop.took("step", 5)
        with pytest.raises(GivenUp):
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


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_twice_is_one_request(first):
    """To every process of a job, and again through the launcher; who interrupts later than that is impatient."""
    assert run_ranks(interrupted, 1, first, 600.0) == [("another rank", False)]
    assert run_ranks(interrupted, 1, first, 0.0) == [("another rank", True)]
