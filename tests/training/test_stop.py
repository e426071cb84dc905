"""Requests to stop: deadlines, signals that come twice,
agreement of the ranks. test_resumed.py stops runs."""

import os
import signal
import time
from contextlib import contextmanager

import pytest
from ranks import in_turn, run_ranks
from runs import state_of, train_with_faults, training_config

from gpt2_ddp.distributed import signals
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.training import stop as stopping
from gpt2_ddp.training.stop import Interrupted, StopRequest


@contextmanager
def stop_request(**options):
    build_accelerator("cpu", "no")
    stop = StopRequest(time.monotonic(), **options)
    try:
        yield stop
    finally:
        stop.restore_handlers()


def test_the_deadline_reserves_what_a_typical_step_and_save_take(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 100))
    with stop_request(max_minutes=1) as stop:
        record = stop.record_duration
        record("step", 600)  # compiles
        assert stop.reserve == 0
        for seconds in (3, 5, 600, 5):
            record("step", seconds)
        record("save", 2)  # of the weights alone
        record("save", 30)
        record("write", 15)
        assert stop.reserve == 55
        assert not stop.check()  # 55 of the 60 seconds
        record("write", 17)
        assert stop.check()
        assert stop.reason == "train.max_minutes = 1"
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(time.time() + 8))
    with stop_request() as stop:
        stop.poll()
        for _ in range(2):
            stop.record_duration("step", 5)
        with pytest.raises(Interrupted):
            stop.poll()
        assert "Slurm" in stop.reason


def interrupted(first, echo_seconds):
    """What a rank takes for the reason to stop that gets
    `first` and then SIGINT, and whether that one ended it."""
    signals.ECHO_SECONDS = echo_seconds
    with stop_request() as stop:
        stop.request("another rank")  # which is no signal to this one
        try:
            for number in (first, signal.SIGINT):
                os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            return stop.reason, True
        return stop.reason, False


def test_a_signal_that_comes_twice_is_one_request(corpus, tmp_path):
    """To every process of a job, and again through the launcher; who interrupts later than that is
    impatient. And a run stops after the step, also where nothing else follows it."""
    calls = [
        (interrupted, first, echo)
        for first in (signal.SIGINT, signal.SIGTERM)
        for echo in (600.0, 0.0)
    ]
    config = training_config(corpus, tmp_path, {"tracking.log_every": 99})
    calls.append((train_with_faults, config, (0, 0), 1, 3, signal.SIGTERM))
    (found,) = run_ranks(in_turn, 1, *calls)
    assert found == [("another rank", False), ("another rank", True)] * 2 + ["stopped"]
    assert state_of(tmp_path / "run")["progress"]["step"] == 3


def agreed(reasons, elastic=True):
    """Whether the ranks stop, and whether this one's
    launcher has to start it again; `SIGTERM` is a signal."""
    stopping.machines = lambda: 2
    stopping.elastic_nodes = lambda: "1:2" if elastic else ""
    with stop_request() as stop:
        reason = reasons[int(os.environ["RANK"])]
        if reason == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif reason:
            stop.request(reason)
        stop.sync()
        result = stop.is_agreed, stop.is_of_other_machines()
    signals._state.handler = None
    return result


def test_an_elastic_stop_is_of_the_machines_that_were_signalled(monkeypatch):
    cases = [["", "SIGTERM"], ["SIGTERM", "SIGTERM"], ["time", "SIGTERM"], ["time", ""]]
    ranks = run_ranks(in_turn, 2, *[(agreed, case) for case in cases], (agreed, cases[0], False))
    assert ranks[0] == [(True, True), *[(True, False)] * 4]
    assert ranks[1] == [(True, False)] * 5
