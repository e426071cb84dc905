"""Metrics; the run folder's lock and status."""

import errno
import os
import re
import shutil
import time

import pytest
from commands import expect_error
from disk import refuse
from ranks import RankError, in_turn, run_ranks
from runs import (
    before_each_step,
    events,
    open_folder,
    open_store,
    rows,
    state_after,
    status,
    train,
    training_config,
)

from gpt2_ddp.checkpoint.format import Snapshot
from gpt2_ddp.records.rows import METRICS, chain_of, split_chain
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.state import LogEnd, Pending, Progress


@pytest.fixture
def log(tmp_path):
    return RunLog(open_folder(tmp_path / "run"))


def content(log):
    return (log.path / METRICS).read_bytes()


def test_rows_are_cut_where_those_of_the_checkpoint_end(log, capsys):
    """Whatever steps they are of, also before pending work,
    and after a kill that tore a line. The chain continues."""
    ends = []
    for step in (3, 4, 3, 5):
        log.append({"step": step})
        ends.append((log.end(), content(log)))
        log.append({"event": "sample", "step": step, "text": "é"})
        ends.append((log.end(), content(log)))
    with (log.path / METRICS).open("ab") as file:
        file.write(b'{"step": 1, "\xc3')
    for end, before in reversed(ends):
        log.resume(end, Progress(step=1))
        assert (content(log), log.end()) == (before, end)
    log.append({"step": 6})
    assert chain_of(log.path / METRICS, (log.path / METRICS).stat().st_size) == log.end().chain
    assert not list(log.path.glob("*.damaged*"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("target", ["diary", "nothing"])
def test_rows_do_not_follow_a_planted_link(tmp_path, log, target):
    (tmp_path / "diary").write_text("mine")
    (log.path / METRICS).symlink_to(tmp_path / target)
    log.resume(LogEnd(), Progress(), {"step": 0})
    log.append({"step": 1})
    assert len((log.path / METRICS).read_text().splitlines()) == 2
    assert (tmp_path / "diary").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


LINES = [b"[1]", b"\0" * 20, b'{"step": true}', b'{"step": 2, "loss": NaN}', b"", b'{"step": 4}']
LINES += [
    b'{"step": 2, "a": [-Infinity]}',
    b'{"step": 2, "text": "\xff"}',
    b'{"step": 2}{"step": 3}',
]
DAMAGES = [
    lambda first, event, last, line=line: first + line + b"\n\n" + event + last for line in LINES
]
DAMAGES += [
    lambda first, event, last: first + event[:-1],  # a file that is shorter
    lambda first, event, last: first,
    lambda first, event, last: first.replace(b"1", b"0", 1) + event,
    lambda first, event, last: event + first + last,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_set_aside_and_its_rows_are_kept(log, capsys, damage):
    """By their steps."""
    ends = []
    for row in ({"step": 1}, {"event": "x", "step": 3}, {"step": 4}):
        log.append(row)
        ends.append(log.end())
    lines = content(log).splitlines(keepends=True)
    damaged = damage(*lines)
    kept = [
        line
        for line in damaged.splitlines(keepends=True)
        if line in lines[:2] or line.startswith(b'{"step": 0')
    ]
    (log.path / METRICS).write_bytes(damaged)
    log.resume(ends[1], Progress(step=3))
    assert content(log) == b"".join(kept)
    assert capsys.readouterr().err.startswith(f"warning: {log.path / METRICS}: ")
    assert (log.path / f"{METRICS}.damaged").read_bytes() == damaged
    log.append({"step": 4})
    assert split_chain((log.path / METRICS).read_text().splitlines()[-1]) == (
        '{"step": 4}',
        log.end().chain,
    )


def test_a_pending_row_is_not_there_twice_in_a_repaired_file(log):
    for step in (3, 4):
        log.append({"step": step})
    log.resume(LogEnd(chain="f" * 64), Progress(step=4, pending=Pending(row={"step": 4})))
    assert [row["step"] for row in rows(log.path)] == [3]


def test_what_is_no_file_is_replaced_or_named(log):
    """Without reading it: a FIFO would wait for its writer for ever."""
    os.mkfifo(log.path / METRICS)
    log.resume(LogEnd(), Progress(step=3))
    log.append({"step": 4})
    assert [row["step"] for row in rows(log.path)] == [4]
    (log.path / METRICS).unlink()
    (log.path / METRICS).mkdir()
    expect_error("file = .*jsonl: cannot be written", log.resume, LogEnd(), Progress(step=3))


LOSSES = {
    "lock removed": lambda run: (run / ".lock").unlink(),
    "folder replaced": lambda run: (shutil.rmtree(run), run.mkdir(), (run / ".lock").touch()),
    "rows removed": lambda run: (run / METRICS).unlink(),
    "rows truncated": lambda run: os.truncate(run / METRICS, 9),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_trainer_that_lost_its_folder_or_rows_writes_nothing_more(tmp_path, loss):
    """It removes nothing, also of another trainer. Where
    it has its folder, it records that it failed."""
    store = open_store(tmp_path / "run", keep_last=1)
    folder = store._run_folder
    log = store._log
    log.append({"step": 1})
    store.save(Snapshot(state_after(1), "", {}, {}))
    log.write_status("running", 0)
    log.write_heartbeat({"step": 1})
    LOSSES[loss](log.path)
    is_gone = loss in ("lock removed", "folder replaced")

    def times():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = times()
    log.append({"step": 2})
    writes = [
        lambda: log.write_status("completed", 2),
        lambda: store.save(Snapshot(state_after(2), "", {}, {})),
    ]
    writes += [store.wait, *[lambda: store.remove_after(0)] * (loss != "folder replaced")]
    writes += [lambda: log.resume(LogEnd(), Progress()), store.newest] if is_gone else []
    for write in writes:
        expect_error(f"run folder = {log.path}: " if is_gone else "file = .*jsonl", write)
    assert times() == before
    log.write_heartbeat({"step": 2})
    assert log.is_gone
    if is_gone:
        folder.release()
        assert times() == before
    else:
        log.write_failure(2, "why")
        assert status(log.path)["state"] == "failed"


def lose_the_folder(config, loss):
    """Trains steps until the folder is lost in step 3; the user error."""
    from gpt2_ddp.distributed import watchdog

    def lose(run):
        if run.step == 2 and run.log.is_main:
            LOSSES[loss](run.folder.path)
        time.sleep(0.01)

    watchdog.REPORT_INTERVAL = 0.1
    before_each_step(lose)
    return in_turn((train, config))[0]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["lock removed", "folder replaced", "rows removed"])
def test_a_training_that_lost_its_folder_ends_on_all_ranks(corpus, tmp_path, loss):
    """At the next heartbeat, long before its next row; where rows were lost, after the next one."""
    changes = dict.fromkeys(("train.steps", "eval.every", "checkpoint.every"), 10**6)
    changes["tracking.log_every"] = 1 if loss == "rows removed" else 10**6
    found = run_ranks(lose_the_folder, 2, training_config(corpus, tmp_path, changes), loss)
    assert len(set(found)) == 1
    assert re.match(f"(run folder|file) = {tmp_path}/run(/{METRICS})?: ", found[0])
    assert not (tmp_path / "run/metrics.jsonl").exists() or loss == "lock removed"


def test_a_disk_that_does_not_answer_is_no_loss(log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda path: refuse(errno.EIO))
        log.append({"step": 1})
    log.write_heartbeat({})
    assert not log.is_gone
    assert [row["step"] for row in rows(log.path)] == [1]


def crash_at_step_6(config):
    def crash(run):
        if run.step == 5:
            raise RuntimeError("out of order")

    before_each_step(crash)
    train(config)


def test_each_prompt_has_its_sample_and_a_crash_is_recorded(corpus, tmp_path):
    changes = {"tracking.sample_prompt": ["def ", ""], "tracking.sample_every": 2}
    with pytest.raises(RankError, match="out of order"):
        run_ranks(crash_at_step_6, 1, training_config(corpus, tmp_path, changes))
    samples = events(tmp_path / "run", "sample")
    assert [(row["step"], row["prompt"]) for row in samples] == [
        (2, "def "),
        (2, ""),
        (4, "def "),
        (4, ""),
    ]
    assert all(row["text"].startswith(row["prompt"]) and len(row["text"]) > 20 for row in samples)
    failed = status(tmp_path / "run")
    assert (failed["state"], failed["step"], "out of order" in failed["reason"]) == (
        "failed",
        5,
        True,
    )
