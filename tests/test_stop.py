"""Requests to stop: deadlines, signals that come twice, agreement of the ranks. test_resumed.py stops runs."""

import os
import signal
import time

import pytest
from ranks import in_turn, run_ranks

from gpt2_ddp.distributed import signals
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.training.stop import Interrupted, StopRequest


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
