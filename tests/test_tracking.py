"""Metrics; the run folder's lock and status."""

import errno
import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from disk import refuse
from ranks import run_ranks, start_ranks
from runs import rows, train, training_config

from gpt2_ddp.checkpoint.checkpoint import Snapshot
from gpt2_ddp.checkpoint.run_files import FIRST_CHAIN, METRICS, SAMPLES, next_chain, split_chain
from gpt2_ddp.checkpoint.run_folder import RunFolder
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError


@pytest.mark.parametrize("row_pending", [False, True])
@pytest.mark.parametrize("sample_pending", [False, True])
def test_pending_work_of_a_checkpoint_is_not_there_twice(corpus, tmp_path, row_pending, sample_pending):
    """Its row and sample may have been written since, and then a kill came before the checkpoint was saved anew."""
    run, chains = RunFolder(training_config(corpus, tmp_path)), {}
    for step in (3, 4):
        chains[step - 1] = run.chain
        run.append(METRICS, {"step": step})
        chains[step - 0.5] = run.chain
        run.append_sample({"step": step}, {"event": "sample", "step": step})
        chains[step] = run.chain
    run.cut_rows(4, 0, chains[3 if row_pending else 3.5 if sample_pending else 4])
    left = {name: [row["step"] for row in rows(run.path, name)] for name in (METRICS, SAMPLES)}
    assert left == {METRICS: [3] if row_pending else [3, 4], SAMPLES: [3] if row_pending or sample_pending else [3, 4]}


@pytest.mark.parametrize("row_pending", [False, True])
def test_a_pending_row_is_not_there_twice_where_the_chain_is_damaged(corpus, tmp_path, row_pending):
    run = RunFolder(training_config(corpus, tmp_path))
    for step in (3, 4):
        run.append(METRICS, {"step": step})
    run.cut_rows(4 - row_pending, 0, "f" * 64)
    assert [row["step"] for row in rows(run.path, METRICS)] == ([3] if row_pending else [3, 4])


def test_without_a_checkpoint_no_row_is_kept(corpus, tmp_path):
    """A run that was killed before its first checkpoint starts over."""
    run = RunFolder(training_config(corpus, tmp_path))
    for name in (METRICS, SAMPLES):
        run.append(name, {"step": 0})
    run.cut_rows(0, start={"event": "start", "step": 0})
    start = json.dumps({"event": "start", "step": 0, "samples_sha256": hashlib.sha256().hexdigest()})
    assert split_chain((run.path / METRICS).read_text().rstrip()) == (start, run.chain)
    assert run.chain == next_chain(FIRST_CHAIN, start)
    assert (run.path / SAMPLES).read_text() == ""


def test_rows_do_not_follow_a_planted_link(corpus, tmp_path):
    run = RunFolder(training_config(corpus, tmp_path))
    (tmp_path / "diary").write_text("mine")
    for name, target in ((METRICS, "diary"), (SAMPLES, "nothing")):
        (run.path / name).symlink_to(tmp_path / target)
    run.record_start({"step": 0}, 0, None)
    run.append_sample({"step": 0}, {"event": "sample", "step": 0})
    assert len((run.path / METRICS).read_text().splitlines()) == 2
    assert (tmp_path / "diary").read_text() == "mine"
    assert not (tmp_path / "nothing").exists()


def test_rows_are_cut_behind_the_one_that_a_checkpoint_names(corpus, tmp_path, capsys):
    """Whatever steps they are of; by their steps where that row was altered. The chain goes on from what is left."""
    run, metrics = RunFolder(training_config(corpus, tmp_path)), tmp_path / "run/metrics.jsonl"
    chains = []
    for step in (0, 1, 2, 1, 2, 3):
        run.append(METRICS, {"step": step})
        chains.append(run.chain)
    lines = metrics.read_text().splitlines()
    run.cut_rows(1, 0, chains[3], start={"event": "start", "step": 1})
    assert metrics.read_text().splitlines()[:-1] == lines[:4]
    text, chain = split_chain(metrics.read_text().splitlines()[-1])
    assert chain == run.chain == next_chain(chains[3], text)
    assert capsys.readouterr().err == ""
    run.cut_rows(1, 0, chains[5])
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 1, 1]
    assert (
        "the last row before the checkpoint is missing or changed; rows up to step 1 are kept"
        in capsys.readouterr().err
    )


def test_files_are_cut_back_and_a_torn_line_is_no_damage(corpus, tmp_path, capsys):
    run = RunFolder(training_config(corpus, tmp_path))
    run.append_sample({"step": 1}, {"step": 1})
    chain, sound = run.chain, {name: (run.path / name).read_bytes() for name in (METRICS, SAMPLES)}
    for name in (METRICS, SAMPLES):
        run.append(name, {"step": 2})
        (run.path / name).write_bytes((run.path / name).read_bytes() + b'{"step": 1, "\xc3')
    run.cut_rows(1, 0, chain)
    assert {name: (run.path / name).read_bytes() for name in (METRICS, SAMPLES)} == sound
    assert not list(run.path.glob("*.damaged*"))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [METRICS, SAMPLES])
@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"[1]",
        b"\0" * 20,
        b'{"loss": 1}',
        b'{"step": true}',
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": 1e999}',
        b'{"step": 2, "a": [-Infinity]}',
        b'{"step": 2, "text": "\xff"}',
        b'{"step": 2}{"step": 3}',
    ],
)
def test_a_damaged_file_is_set_aside_and_its_rows_are_kept(corpus, tmp_path, capsys, name, line):
    run, chains = RunFolder(training_config(corpus, tmp_path)), []
    for row in ({"step": 1}, {"event": "x", "step": 3}, {"step": 4}):
        run.append_sample(row, row)
        chains.append(run.chain)
    first, event, last = (run.path / name).read_bytes().splitlines(keepends=True)
    damaged = first + line + b"\n\n" + event + last
    for aside in (f"{name}.damaged", f"{name}.damaged-2"):
        (run.path / name).write_bytes(damaged)
        run.cut_rows(3, 0, chains[1])
        assert (run.path / name).read_bytes() == first + event
        assert (run.path / aside).read_bytes() == damaged
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {run.path / name}: line 2 ")
        assert aside in warning
    run.cut_rows(3, 0, chains[1])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_set_aside(corpus, tmp_path, capsys, make):
    """Without reading it: a FIFO would wait for its writer for ever."""
    run = RunFolder(training_config(corpus, tmp_path))
    make(run.path / METRICS)
    run.cut_rows(3)
    run.append(METRICS, {"step": 4})
    assert split_chain((run.path / METRICS).read_text().rstrip()) == ('{"step": 4}', run.chain)
    assert (run.path / "metrics.jsonl.damaged").exists()
    assert "is not a file; moved to metrics.jsonl.damaged" in capsys.readouterr().err


def test_the_lock_is_gone_with_its_process(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    ((process, _),) = start_ranks(_hold_the_lock, 1, config)
    while not (tmp_path / "run/held").exists():
        time.sleep(0.02)
    with pytest.raises(UserError, match="another trainer"):
        RunFolder(config)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    RunFolder(config)


LOSSES = {
    "lock removed": lambda run: (run / ".lock").unlink(),
    "lock taken": lambda run: ((run / ".lock").unlink(), RunFolder(training_config(run, run.parent))),
    "folder removed": shutil.rmtree,
    "folder renamed": lambda run: run.rename(run.with_name("other")),
    "folder replaced": lambda run: (shutil.rmtree(run), RunFolder(training_config(run, run.parent))),
    "folder a file": lambda run: (shutil.rmtree(run), run.write_text("")),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_trainer_that_lost_its_folder_writes_nothing_more(corpus, tmp_path, loss):
    """Neither rows, status and checkpoints, nor a new folder; it removes nothing of another trainer's."""
    run = RunFolder(training_config(corpus, tmp_path))
    run.write_status("running", 0)
    run.write_heartbeat({"step": 1})
    other = LOSSES[loss](run.path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    snapshot = Snapshot({"step": 2}, "", {}, {})
    run.append(METRICS, {"step": 2})
    for write in (
        lambda: run.write_status("failed", 2),
        lambda: run.checkpoints.save(snapshot),
        lambda: run.checkpoints.prune(),
        lambda: run.checkpoints.recover(),
    ):
        with pytest.raises(UserError, match=rf"run folder = {run.path}: the folder or its .lock was removed"):
            write()
    assert not run.write_heartbeat({"step": 2})
    run.release()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, other


def test_a_disk_that_does_not_answer_is_no_loss(corpus, tmp_path, monkeypatch):
    run = RunFolder(training_config(corpus, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda path: refuse(errno.EIO))
        run.append(METRICS, {"step": 1})
    assert run.write_heartbeat({})
    assert [row["step"] for row in rows(run.path)] == [1]


def lose_the_folder(config: TrainingConfig, loss: str) -> str:
    """Trains steps without rows until the folder is lost in step 3; the user error."""
    from gpt2_ddp.distributed import watchdog
    from gpt2_ddp.training import loop

    watchdog.REPORT_INTERVAL, train_step = 0.1, loop.train_step

    def losing(run):
        if run.step == 2 and run.folder:
            LOSSES[loss](run.folder.path)
        time.sleep(0.01)
        return train_step(run)

    loop.train_step = losing
    try:
        return train(config)
    except UserError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("loss", ["lock removed", "folder removed", "folder replaced"])
def test_a_training_that_lost_its_folder_ends_on_all_ranks(corpus, tmp_path, loss, world):
    """At the next heartbeat, long before its next row."""
    changes = {"train.steps": 10**6, "eval.every": 10**6, "checkpoint.every": 10**6, "tracking.log_every": 10**6}
    found = run_ranks(lose_the_folder, world, training_config(corpus, tmp_path, changes), loss)
    assert len(set(found)) == 1
    assert found[0].startswith(f"run folder = {tmp_path}/run: the folder or its .lock was removed")
    assert not (tmp_path / "run/metrics.jsonl").exists() or loss == "lock removed"


def test_a_full_disk_has_room_for_a_status(corpus, tmp_path, monkeypatch):
    """It is written over the old one, which need not be as long."""
    run, opening = RunFolder(training_config(corpus, tmp_path)), Path.open
    run.write_status("running", 1)

    def full(path: Path, *args, **kwargs):
        return refuse() if path.name == ".status.json.tmp" else opening(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    for state, reason in (("failed", "disk " * 100), ("stopped", "")):
        run.write_status(state, 2, reason)
        assert json.loads((run.path / "status.json").read_text()) == {"state": state, "step": 2, "reason": reason}


def _hold_the_lock(config: TrainingConfig) -> None:
    folder = RunFolder(config)
    (folder.path / "held").touch()
    time.sleep(60)


def test_each_prompt_has_its_sample_and_a_crash_is_recorded(corpus, tmp_path):
    changes = {"tracking.sample_prompt": ["def ", ""], "tracking.sample_every": 2}
    with pytest.raises(Exception, match="out of order"):
        run_ranks(_crash_at_step_6, 1, training_config(corpus, tmp_path, changes))
    samples = rows(tmp_path / "run", SAMPLES)
    assert [(row["step"], row["prompt"]) for row in samples] == [(2, "def "), (2, ""), (4, "def "), (4, "")]
    assert all(row["text"].startswith(row["prompt"]) and len(row["text"]) > 20 for row in samples)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 5)
    assert "out of order" in status["reason"]


def _crash_at_step_6(config: TrainingConfig) -> None:
    from gpt2_ddp.training import loop

    train_step = loop.train_step

    def crashing(run):
        if run.step == 5:
            raise RuntimeError("out of order")
        return train_step(run)

    loop.train_step = crashing
    train(config)


def test_without_the_row_that_a_checkpoint_names_rows_are_cut_by_their_steps(corpus, tmp_path):
    run = RunFolder(training_config(corpus, tmp_path))
    for row in ({"step": 1}, {"step": 3}, {"event": "rollback", "step": 1, "from": 3}, {"step": 2}, {"step": 3}):
        run.append(METRICS, row)
    run.cut_rows(2, 0, "f" * 64)
    assert [json.loads(line)["step"] for line in (run.path / METRICS).read_text().splitlines()] == [1, 2]
