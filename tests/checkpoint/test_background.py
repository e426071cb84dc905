"""Checkpoints in the background: as safe as others; a failed save ends all ranks alike."""

import errno
import os
import threading
from unittest.mock import MagicMock

import pytest
import torch
from disk import refuse
from ranks import run_ranks, start_ranks, wait_until
from runs import (
    all_rows,
    before_each_step,
    checkpoint_at,
    is_intact,
    open_store,
    same,
    saved_steps,
    state_after,
    status,
    train_with_faults,
    training_config,
    weights,
)

from gpt2_ddp.checkpoint import store
from gpt2_ddp.checkpoint.format import MODEL, Snapshot
from gpt2_ddp.checkpoint.store import Background, should_save_async
from gpt2_ddp.distributed.environment import spare_core, usable_cores
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.loop import poll_save

STEPS = {
    "train.steps": 10,
    "optim.decay_steps": 10,
    "checkpoint.every": 4,
    "eval.every": 100,
    "guard.patience": 3,
}


def test_one_piece_of_work_at_a_time_and_what_it_raises_is_raised_once():
    behind = Background()
    gate = threading.Event()
    done = []
    assert not behind.is_working
    behind.start(lambda: (gate.wait(), done.append(1)), timeout=0.0)
    assert behind.is_working
    assert not done
    gate.set()
    behind.start(lambda: (done.append(2), refuse()), timeout=60.0)
    assert done[:1] == [1]
    behind.join()
    assert (done, behind.is_working) == ([1, 2], False)
    with pytest.raises(OSError, match="No space"):
        behind.wait()
    behind.wait()


def test_after_each_step_an_overdue_save_is_waited_for():
    """The watchdog still applies, and ends a run whose save hangs."""
    run = MagicMock()
    stop = MagicMock()
    gate = threading.Event()
    run.store.background = Background()
    run.log.is_gone = False
    behind = run.store.background
    told = stop.record_duration
    run.watchdog.heartbeat = lambda stage: gate.set()
    behind.start(gate.wait, timeout=60.0)
    poll_save(run, stop)
    assert told.call_args.args[0] == "write"
    assert behind.is_working
    behind.timeout = 0.0
    poll_save(run, stop)
    assert not behind.is_working
    assert told.call_args.args[1] > 0
    stop.request.assert_not_called()
    run.log.is_gone = True
    poll_save(run, stop)
    stop.request.assert_called_once()


def test_auto_is_where_a_core_and_the_memory_are_free(monkeypatch):
    cores = usable_cores()
    assert not spare_core("cpu", cores)
    assert spare_core("cuda", cores) == (cores > 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    assert not spare_core("cpu", 1)
    monkeypatch.setattr(store, "free_memory", lambda: 1251)
    assert should_save_async("auto", 1000, True)
    assert not should_save_async("auto", 1000, False)
    assert not should_save_async("auto", 1001, True)
    assert should_save_async(True, 2**60, False)
    assert not should_save_async(False, 0, True)


def test_memory_is_asked_for_what_is_not_copied_yet(tmp_path, monkeypatch):
    """The first checkpoint may have weights alone, later
    ones an optimizer state of twice the size, too."""
    asked = []
    monkeypatch.setattr(
        store, "should_save_async", lambda background, size, spare: not asked.append(size)
    )
    checkpoints = open_store(tmp_path / "run", keep_last=1)
    weights = {"a": torch.zeros(25)}
    moments = {"exp_avg.a": torch.zeros(25), "exp_avg_sq.a": torch.zeros(25)}
    for step, optimizer in enumerate(({}, moments, moments)):
        checkpoints.save(Snapshot(state_after(step), "", weights, optimizer))
    checkpoints.wait()
    assert asked == [100, 200, 0]
    assert saved_steps(tmp_path / "run") == [2]  # in the background as well


def train(config, held=0, then="", number=0, bad=(0, 0)):
    """Trains. The checkpoint of step `held` is written and then waits, before it gets its name,
    until somebody waits for it; `number` is the error that it gets then. With step `held` + 2 on
    its way, `then` comes: "kill", "stop", or "fail" (the error). Gradients of the data at positions
    in `bad` are not finite.

    Returns:
        outcome or mistake, and the step that was come to.
    """
    from gpt2_ddp.files import writing

    write = store.write_manifest
    join = Background.join
    gate = threading.Event()
    at = [0]

    def holding(files, folder, *format):
        write(files, folder, *format)
        if held and folder.name == f".step-{held:08d}.tmp":
            assert gate.wait(60)
            if number:
                with writing(folder):
                    refuse(number)

    def opening(background):
        if at[0] > held:  # and not the wait before the save itself
            gate.set()
        join(background)

    def happen(run):
        at[0] = run.step + 1
        if held and run.step == held + 1:
            if then == "kill":
                wait_until((run.folder.checkpoints / f".step-{held:08d}.tmp/manifest.json").exists)
                os._exit(9)
            if then == "stop":
                os.kill(os.getpid(), 15)
            if then == "fail" and run.log.is_main:
                gate.set()
                wait_until(lambda: run.store.background.error)

    store.write_manifest = holding
    Background.join = opening  # pyright: ignore
    before_each_step(happen)
    try:
        return train_with_faults(config, bad), at[0]
    except UserError as error:
        return str(error), at[0]


def order_of(run):
    """Rows of metrics.jsonl in their order: what each is, and its step."""
    return [(row.get("event", "row"), row["step"]) for row in all_rows(run)]


def configured(corpus, folder, **more):
    return training_config(corpus, folder, STEPS | {"checkpoint.background": True} | more)


@pytest.fixture(scope="module")
def behind(corpus, tmp_path_factory):
    """A whole run without a checkpoint of its first step,
    whose checkpoint of step 4 was held for two steps."""
    folder = tmp_path_factory.mktemp("behind")
    assert run_ranks(train, 1, configured(corpus, folder), 4) == [("completed", 10)]
    return folder / "run"


def test_training_goes_on_meanwhile_and_the_rows_tell(corpus, tmp_path, behind):
    """The row of a checkpoint comes when it is there: behind those of later steps, before the next
    one's. What is saved is what a training saves that stands still for its checkpoints."""
    order = order_of(behind)
    assert order.index(("row", 8)) < order.index(("checkpoint", 4)) < order.index(("checkpoint", 8))
    assert saved_steps(behind) == [4, 8, 10]
    assert is_intact(behind)
    run_ranks(train, 1, configured(corpus, tmp_path, **{"checkpoint.background": False}))
    for step in (4, 8, 10):
        one, other = (checkpoint_at(run, step) / MODEL for run in (behind, tmp_path / "run"))
        assert one.read_bytes() == other.read_bytes()


def test_killed_meanwhile_those_before_are_left(corpus, tmp_path, behind):
    config = configured(corpus, tmp_path)
    run = tmp_path / "run"
    ((process, _),) = start_ranks(train, 1, config, 8, "kill")
    process.join(60)
    assert process.exitcode == 9
    assert saved_steps(run) == [0, 4]
    assert ("row", 9) in order_of(run)
    assert is_intact(run)
    assert run_ranks(train, 1, config) == [("completed", 10)]
    assert same(weights(run), weights(behind))
    assert not list((run / "checkpoints").glob(".*"))
    assert is_intact(run)


def test_a_stop_is_told_when_all_is_saved(corpus, tmp_path):
    assert run_ranks(train, 1, configured(corpus, tmp_path), 4, "stop")[0][0] == "stopped"
    assert order_of(tmp_path / "run")[-3:] == [("checkpoint", 4), ("checkpoint", 6), ("end", 6)]


def test_an_error_is_told_at_the_next_step_by_all_ranks(corpus, tmp_path):
    found = run_ranks(train, 2, configured(corpus, tmp_path), 4, "fail", errno.ENOSPC)
    (said,) = {said for said, _ in found}
    assert "cannot be written (No space left on device)" in said
    assert all(step <= 7 for _, step in found)
    assert status(tmp_path / "run")["state"] == "failed"


def test_a_run_that_diverges_waits_before_it_looks_at_its_checkpoints(corpus, tmp_path):
    """The held one is of the step before the bad stretch, to
    which the run goes back before the next save is due."""
    config = configured(corpus, tmp_path, **{"train.steps": 12, "guard.patience": 1})
    assert run_ranks(train, 1, config, 4, "", 0, (48, 84)) == [("completed", 12)]
    order = order_of(tmp_path / "run")
    assert order.index(("checkpoint", 4)) < order.index(("rollback", 4))
