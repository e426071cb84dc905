"""Who is to blame, judged from recorded signs of
life; and what the watch itself counts and tells."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from close import assert_close, distance
from ranks import run_ranks, wait_until

from gpt2_ddp.distributed import peers, signals
from gpt2_ddp.distributed import watchdog as watching
from gpt2_ddp.distributed.peers import GRACE, Observed, PeerWatchdog, judge
from gpt2_ddp.distributed.process import Process, this_process
from gpt2_ddp.distributed.ranks import COLLECTIVE
from gpt2_ddp.distributed.watchdog import (
    AFTERMATH,
    FIRST_TIMEOUT,
    HEARTBEAT_INTERVAL,
    SILENCE,
    TIMEOUT,
    Heartbeat,
    Watchdog,
    stack_of,
)
from gpt2_ddp.errors import UserError

HOSTS = [Process(f"host{rank // 2}", "", 100 + rank, 1) for rank in range(4)]


def seen(*signs, silent=None):
    """Ranks that wait in the backward pass of step 7,
    but for what `signs` says of the first ones."""
    usual = {"stage": "forward/backward", "step": 7, "progress": [50, 2], "limit": 120.0}
    beats = [
        Heartbeat(HOSTS[rank], rank, **(usual | (signs[rank] if rank < len(signs) else {})))
        for rank in range(4)
    ]
    return [Observed(beat, (silent or {}).get(rank, 0.3)) for rank, beat in enumerate(beats)]


LOST = {"end": "lost", "error": "RuntimeError: gloo"}
FAILED = {"end": "failed", "error": "ValueError: a bad sector", "stage": "data"}
FAILURE = "rank 1 on host0: ValueError: a bad sector (at data, step 7)"
ACCUSED = [
    ([], {}, ""),
    (4 * [{"idle": 119}], {}, ""),
    (3 * [{"idle": 130}] + [{"idle": 119}], {}, ""),
    (
        [{"idle": 1000, "progress": [51, 2]}, {"idle": 3}, {"idle": 999, "progress": [51, 2]}],
        {},
        "",
    ),
    ([{"stage": "save", "idle": 900, "limit": 1000}] + 3 * [{"step": 8, "idle": 899}], {}, ""),
    ([{"idle": 130}] + 3 * [{"idle": 130, "progress": [51, 2]}], {2: 100}, ""),
    ([{"end": "left"}], {0: 1000}, ""),
    ([LOST | {"idle": 130}] + 3 * [{"idle": 130}], {}, ""),
    ([LOST], {3: 4.9}, ""),
    ([LOST], {3: 5.1}, "rank 3 on host1: no heartbeat for"),
    (
        2 * [{"idle": 119, "progress": [51, 2]}]
        + [
            {"stage": "data", "progress": [50, 1], "idle": 121, "stack": "  File x"},
            {"idle": 119, "progress": [51, 2]},
        ],
        {},
        "rank 2 on host1: no progress for 121 s at data, step 7\n  File x",
    ),
    (
        [{"stage": "sample", "progress": [50, 9], "idle": 121}]
        + 3 * [{"step": 8, "progress": [50, 1], "idle": 125}],
        {},
        "rank 0 on host0: no progress for 121 s at sample, step 7",
    ),
    (
        [
            {"idle": 125, "progress": [51, 2]},
            {"idle": 119, "progress": [51, 2]},
            {"idle": 124},
            {"idle": 119, "progress": [51, 2]},
        ],
        {},
        "rank 2 on host1: no progress for 124 s at forward/backward, step 7",
    ),
    (
        3 * [{"stage": "evaluate", "progress": [50, 30], "idle": 122}]
        + [{"stage": "evaluate", "progress": [50, 29], "idle": 122}],
        {},
        "rank 3 on host1: no progress for 122 s at evaluate, step 7",
    ),
    (4 * [{"stage": "preparing data", "idle": 5, "limit": 600000}], {3: 119}, ""),
    (
        4 * [{"stage": "preparing data", "idle": 5, "limit": 600000}],
        {3: 121},
        "rank 3 on host1: no heartbeat for 121 s; last stage: preparing data, ste",
    ),
    ([FAILED], {0: 1.9}, ""),
    ([FAILED], {3: 200}, ""),
    ([LOST, FAILED, {"end": "lost"}], {1: 2.1, 3: 60}, FAILURE),
    ([{}, FAILED | {"idle": 5.1}], {}, FAILURE),
    ([{}, {"end": "refused", "error": "UserError: a: b", "idle": 4.9}], {1: 1.9}, ""),
    (
        [LOST, {"end": "refused", "error": "UserError: a: b"}],
        {1: 2.1},
        "rank 1 on host0: UserError: a: b",
    ),
    (
        [{}, {"end": "refused", "error": "UserError: a: b", "idle": 5.1}],
        {},
        "rank 1 on host0: UserError: a: b",
    ),
]
"""What the first ranks say, seconds that a rank is silent, and the beginning of the verdict.

No verdict: they make progress, are within their limits, or announced a save; a silent rank is heard
before one that seems behind is judged; the others have time to say why a collective failed. Accused
is who is behind: in another stage, in the step before, with fewer collectives, less far. An
announcement excuses no silence; what a rank raised is the reason, if the others had time to raise
it: GRACE, or AFTERMATH."""


@pytest.mark.parametrize(("signs", "silent", "reason"), ACCUSED)
def test_who_is_accused(signs, silent, reason):
    verdict = judge(seen(*signs, silent=silent), 120)
    assert verdict is None if not reason else verdict and verdict.reason.startswith(reason)


def test_a_rank_that_is_gone_is_named():
    process = this_process()._replace(host="host0", started=1)  # its number is another's by now
    gone = Observed(Heartbeat(process, 1, stage="data", step=7), GRACE + 0.1)
    first, _, *others = seen()
    verdict = judge([first, gone, *others], 120)
    assert verdict.reason.startswith(
        "rank 1 on host0: ended without an error message; last stage: data, step 7;"
    )


def test_all_that_stand_still_or_are_silent_are_named():
    for ranks, stuck, named in (
        (seen(*[{"idle": 121.0}] * 4), [], [0, 1, 2, 3]),
        (seen(silent={2: 121.0, 3: 121.0}), HOSTS[2:], [2, 3]),
    ):
        verdict = judge(ranks, 120)
        assert verdict.stuck == stuck
        accused = [f"rank {rank} on {HOSTS[rank].host}" for rank in named]
        assert [line.split(":")[0] for line in verdict.reason.splitlines()] == accused
    assert judge(seen(silent={3: SILENCE - 0.1}), 1) is None, (
        "a library that loads may silence a live process"
    )


def test_others_judge_nothing_but_the_silence_of_rank_0():
    """They know nothing of the further ranks, for one of which rank 0 may be waiting."""
    first, second = seen({"idle": 500.0}, {"idle": 500.0})[:2]
    assert judge([first, second], 120, silence_only=True) is None
    assert judge([first._replace(silent=121.0), second], 120, silence_only=True)


def test_a_process_that_ended_is_gone_and_its_number_may_be_anothers():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = this_process()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    other = one._replace(pid=child.pid, started=int(fields[19]))
    assert not one.is_gone
    assert not other.is_gone
    other._replace(started=other.started - 1).kill()
    other._replace(machine="elsewhere").kill()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.5)
    assert other._replace(started=other.started - 1).is_gone
    assert not other._replace(machine="elsewhere", started=1).is_gone, "nothing is known of it"
    other.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.is_gone, "it waits to be reaped"
    child.wait()


class Clock:
    """`time.monotonic` of the watch, which these tests turn by hand."""

    def __init__(self, watch):
        self.now = 0.0
        self.watch = watch
        self.watch._woke = 0.0

    def silent(self):
        """Seconds since the one other rank's heartbeat, as they are judged."""
        judged = []
        self.patch.setattr(peers, "judge", lambda seen, *_, **__: judged.extend(seen))
        self.watch._judge()
        return judged[1].silent

    def pass_by(self, seconds, asleep=False):
        for _ in range(1 if asleep else round(seconds / HEARTBEAT_INTERVAL)):
            self.now += seconds if asleep else HEARTBEAT_INTERVAL
            self.watch._observe()
        return self.watch.beat


@pytest.fixture
def clock(monkeypatch):
    """Of a watch whose threads are not started: of a lone process or, with the heartbeat of another
    rank, of that one's peer."""

    def make(patience=None, compiles=False, other=None, rank=0):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda thread: None)
            patch.setattr(dist.HashStore, "clone", lambda store: store, raising=False)
            watch = Watchdog(patience)
            if other:
                watch = PeerWatchdog(rank, 2, patience, dist.HashStore())
        clock = Clock(watch)
        if other:
            watch.seen = {other.rank: (other, 0.0)}
        clock.patch = monkeypatch
        if compiles:
            clock.watch.first_limit = FIRST_TIMEOUT
        monkeypatch.setattr(watching.time, "monotonic", lambda: clock.now)
        return clock

    return make


def test_patience_follows_the_slowest_stage_of_this_run_and_is_two_minutes_at_least(clock):
    time = clock()
    for step in range(1, 9):
        time.watch.heartbeat("step", step)
        time.pass_by(2)
    assert time.pass_by(1).limit == TIMEOUT
    time = clock()
    watch = time.watch
    watch.heartbeat("step", 1)
    assert time.pass_by(173).limit == FIRST_TIMEOUT, "nothing is known of a step's length yet"
    watch.heartbeat("step", 2)
    assert distance(time.pass_by(1).limit, 1730) < 0.01
    watch.heartbeat("save", 2, timeout=500)
    assert_close(time.pass_by(400).limit, FIRST_TIMEOUT + 500)
    watch.heartbeat("step", 3)
    assert distance(time.pass_by(1).limit, 1730) < 0.01, (
        "what was announced says nothing of other stages"
    )


def test_patience_as_configured_holds_from_the_first_step_on_unless_graphs_are_compiled(clock):
    for compiles, limit in (False, 7 + SILENCE), (True, FIRST_TIMEOUT):
        time = clock(patience=7, compiles=compiles)
        time.watch.heartbeat("step", 1)
        assert time.pass_by(1).limit == limit
        time.watch.heartbeat("step", 2)
        time.pass_by(30)
        time.watch.heartbeat("step", 3)
        assert time.pass_by(1).limit == 7
        time.watch.heartbeat("save", timeout=100)
        assert time.pass_by(1).limit == limit + 100
        time.watch.progress()
        assert time.pass_by(1).limit == limit


def test_idleness_is_counted_from_the_last_progress_and_shows_the_stack(clock):
    time = clock()
    time.watch.heartbeat("data", 2)
    time.watch.heartbeat("data", 3)
    time.pass_by(HEARTBEAT_INTERVAL)
    sign = time.pass_by(6)
    assert (sign.stage, sign.step, sign.progress, sign.idle) == ("data", 3, [0, 1], 6)
    assert "test_idleness_is_counted" in sign.stack
    time.watch.progress()
    sign = time.pass_by(HEARTBEAT_INTERVAL)
    assert (sign.progress, sign.idle, sign.stack) == ([0, 2], 0, "")


def test_the_stack_of_a_thread_that_goes_on_meanwhile_is_of_one_moment():
    """Frames that are made one by one would show two: the line of `outer` in the second call, and
    `inner`."""
    first = threading.Lock()
    second = threading.Lock()
    went_on = threading.Event()

    def inner():
        first.acquire()

    def outer():
        inner()
        went_on.set()
        second.acquire()

    def go_on(phase, _):
        if not went_on.is_set():
            first.release()
            went_on.wait(10)

    first.acquire()
    second.acquire()
    thread = threading.Thread(target=outer)
    usual = gc.get_threshold()
    thread.start()
    wait_until(lambda: "in inner" in stack_of(thread.ident))
    before = re.findall("line .* in outer", stack_of(thread.ident))
    gc.callbacks.append(go_on)
    gc.set_threshold(1)
    try:
        stack = stack_of(thread.ident)
    finally:
        gc.set_threshold(*usual)
        gc.callbacks.remove(go_on)
        second.release()
        thread.join()
    assert went_on.is_set()
    assert (re.findall("line .* in outer", stack) == before) == ("in inner" in stack)


def test_one_that_was_suspended_forgets_what_it_saw(clock):
    time = clock(other=Heartbeat(HOSTS[1], 1, turn=5))
    time.watch.heartbeat("data", 3)
    time.pass_by(HEARTBEAT_INTERVAL)
    time.pass_by(100)
    assert time.silent() == 100.5
    sign = time.pass_by(10_000, asleep=True)
    assert (sign.idle, time.silent()) == (0, 0.0)
    time.pass_by(4.0, asleep=True)
    assert time.silent() == 2 * HEARTBEAT_INTERVAL, "a short sleep is not counted either"


def test_where_a_launchers_store_ends_silence_counts_once_a_collective_fails(clock):
    """The launcher alone may have ended, or its machine."""
    time = clock(other=Heartbeat(HOSTS[0], 0, turn=5), rank=1)
    time.watch.is_cut_off = True
    time.pass_by(100)
    assert time.silent() <= HEARTBEAT_INTERVAL
    before = time.silent()
    time.watch.end("lost", "RuntimeError: gloo")
    time.pass_by(4)
    assert time.silent() == before + 4.0


def test_rank_0_speaks_first_of_what_another_raised(clock):
    time = clock(other=Heartbeat(HOSTS[0], 0), rank=1)
    time.watch.failed(ValueError("x"))
    time.pass_by(HEARTBEAT_INTERVAL)
    time.pass_by(AFTERMATH + HEARTBEAT_INTERVAL)
    assert time.watch._judge() is None
    time.pass_by(GRACE)
    verdict = time.watch._judge()
    assert not verdict.stuck
    assert verdict.reason.startswith("rank 1 ")
    assert verdict.reason.endswith(": ValueError: x (at starting)"), "no step has begun"


def test_a_rank_that_a_signal_stopped_stops_the_others(clock, monkeypatch):
    """It had nothing to save: no verdict, and no failure. Rank 0 passes it on."""
    time = clock(other=Heartbeat(HOSTS[1], 1, turn=5, end="stopped"))
    sent = []
    time.pass_by(1000)
    monkeypatch.setattr(
        peers.os, "kill", lambda *signalled: (sent.append(signalled), time.watch.ended.set())
    )
    monkeypatch.setattr(watching, "HEARTBEAT_INTERVAL", 0.01)
    time.watch._watch()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert time.watch.outgoing().end == "stopped"
    assert time.watch._judge() is None


def test_a_rank_that_a_signal_ends_by_force_says_so_to_the_others(clock):
    """Its main thread waits in a collective, as for rank
    0's data. Or rank 0 would ask whether it was killed."""
    time = clock(other=Heartbeat(HOSTS[1], 1))
    delivered = []
    time.watch._wait = lambda _: delivered.append(time.watch.outgoing().end)
    signals._state.announce()
    assert delivered == ["stopped"]


@pytest.mark.parametrize("how", ["left", "stopped"])
def test_a_rank_calls_the_store_no_more_once_rank_0_may_end(monkeypatch, how):
    """Rank 0 serves it, and ends when it reads the heartbeat.
    torch prints a C++ stack for a call after that."""
    calls = []
    theirs = json.dumps(Heartbeat(HOSTS[0], 0, end="stopped" if how == "stopped" else "")).encode()
    store = SimpleNamespace(clone=lambda: store, compare_set=lambda *_: b"")
    store.set = lambda key, value: calls.append(Heartbeat(*json.loads(value)))
    store.multi_get = lambda keys: calls.append(None) or [b"", theirs]
    monkeypatch.setattr(peers, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(peers.os, "kill", lambda *_: None)
    watch = PeerWatchdog(1, 2, None, store)  # pyright: ignore[reportArgumentType]
    if how == "left":
        watch.ended.set()
    watch._wake.set()
    watch._exchange.join(60)
    assert not watch._exchange.is_alive()
    assert calls[-1].end == how
    watch.close()


def test_somebody_in_a_debugger_may_stand_still(clock):
    time = clock()
    time.watch.heartbeat("data", 3)
    exec(compile("time.pass_by(1000)", "/usr/lib/python3/bdb.py", "exec"))
    assert time.watch.beat.idle < 2 * HEARTBEAT_INTERVAL


def test_an_error_that_comes_after_a_long_wait_is_news(clock):
    """Or the others would not be left the time to raise the same."""
    time = clock(other=Heartbeat(HOSTS[1], 1))
    time.watch.heartbeat("preparing data", 0, timeout=10_000)
    time.pass_by(1000)
    time.watch.failed(UserError("data.path", "x", "is empty"))
    assert time.watch.outgoing().idle == 0
    time.pass_by(1 + HEARTBEAT_INTERVAL)
    sign = time.watch.outgoing()
    assert (sign.error, sign.stage, sign.idle) == (
        "UserError: data.path = x: is empty",
        "preparing data",
        1,
    )


def test_the_store_of_a_launcher_that_has_ended_is_not_used(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.HashStore()
    monkeypatch.setattr(dist.HashStore, "clone", lambda store: store, raising=False)
    watch = PeerWatchdog(1, 2, None, store)
    wait_until(lambda: watch._sent is not None and store.num_keys() == 3)
    monkeypatch.setattr(peers.os, "getppid", lambda: 1)
    bounded = []  # as ranks that stand still are not judged any more
    monkeypatch.setattr(peers, "WATCHED", [SimpleNamespace(set_timeout=bounded.append)])
    monkeypatch.setattr(
        watch, "_exchange_once", lambda outgoing: pytest.fail("torch would print a C++ stack")
    )
    watch._wake.set()
    watch._exchange.join(60)
    assert watch.is_cut_off
    assert bounded == [COLLECTIVE]
    watch.close()


def two_watches():
    """Two runs in turn of one world: what rank 0 has heard of rank 1 by the end of each."""
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    found = []
    for number in range(2):
        watch = PeerWatchdog(accelerator.process_index, 2, None)
        watch.heartbeat(f"stage {number}", 5 + number)
        before = watch._collectives()
        accelerator.wait_for_everyone()
        assert watch._collectives() > before
        if accelerator.is_main_process:
            wait_until(lambda: watch.seen[1][0].stage == f"stage {number}", 20)  # noqa: B023
        accelerator.wait_for_everyone()
        watch.close()
        found += [(sign.stage, sign.step, sign.end == "left") for sign, _ in watch.seen.values()]
    assert not [thread.name for thread in threading.enumerate() if thread.name == "watch"]
    accelerator.end_training()
    return found


def test_signs_of_life_arrive():
    heard = run_ranks(two_watches, 2)[0]
    assert heard == [("stage 0", 5, True), ("stage 1", 6, True)]
