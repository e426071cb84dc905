"""Trackers: each row of metrics.jsonl once, whatever was killed in between."""

import json
import os
import signal
import sqlite3
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from ranks import RankError, run_ranks
from runs import open_folder, rows, said, state_of, train, training_config

from gpt2_ddp.records.rows import METRICS, field_of, valid_rows
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.records.trackers import START, Trackers
from gpt2_ddp.state import LogEnd, Progress


def train_and_die(config, home, kill_at=None):
    """Trains. At a step, once its row is in metrics.jsonl and before a tracker has it, the process
    is killed, and what it started."""
    os.environ.update(HOME=str(home), TRACKIO_DIR=str(home / "trackio"))
    append = RunLog.append

    def killing(self, row):
        append(self, row)
        if row["step"] == kill_at:
            for child in psutil.Process().children(recursive=True):
                child.kill()  # wandb writes its files in another process
            os.kill(os.getpid(), signal.SIGKILL)

    RunLog.append = killing
    return train(config)


def collected(points):
    """By the name of a number: steps and values, in the order in which a reader sees them."""
    found = {}
    for name, step, value in points:
        found.setdefault(name, []).append((step, value))
    return found


def in_metrics(run):
    return collected(
        (name, row["step"], value)
        for row in valid_rows(json.loads(line) for line in (run / METRICS).read_text().splitlines())
        for name, value in row.items()
        if isinstance(value, int | float) and name != "step"
    )


def in_tensorboard(run):
    """Every point of every file."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return collected(
        (value.tag, event.step, value.simple_value)
        for file in (run / "gpt2_ddp").glob("events*")
        for event in LegacyEventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.HasField("simple_value")
    )


def in_wandb(run):
    """The run's only file: after 7 bytes LevelDB's log, records in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.glob(f"wandb/offline-run-*-{run_id(run)}/*.wandb")
    points = []
    data = file.read_bytes()
    offset = 7
    message = b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the rest of a block that has no room for a header
            offset += 32768 - offset % 32768
            continue
        length = int.from_bytes(data[offset + 4 : offset + 6], "little")
        kind = data[offset + 6]
        message = message + data[offset + 7 : offset + 7 + length]
        offset = offset + 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            history = Record.FromString(message).history
            message = b""
            for item in history.item:
                points.append(
                    (
                        item.key or "/".join(item.nested_key),
                        history.step.num,
                        json.loads(item.value_json),
                    )
                )
    return collected(point for point in points if not point[0].startswith("_"))


def in_trackio(home, run):
    (file,) = (home / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        question = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id"
        rows = database.execute(question, (f"run-{run_id(run)}",)).fetchall()
    return collected(
        (name, step, value) for step, text in rows for name, value in json.loads(text).items()
    )


def run_id(run):
    return state_of(run)["progress"]["run_id"]


def comparable(points):
    """Points without the values of what is measured."""
    return {
        name: [step for step, _ in values] if field_of(name).kind == "measured" else values
        for name, values in points.items()
    }


def in_float32(points):
    return {
        name: [(step, np.float32(value).item()) for step, value in values]
        for name, values in points.items()
    }


def test_tensorboard_holds_the_rows_that_stand(corpus, tmp_path):
    """After a start that is killed, one from a checkpoint before what it wrote, and a rollback."""
    config = training_config(corpus, tmp_path, {"tracking.log_with": "tensorboard"})
    log = RunLog(open_folder(tmp_path / "run"))
    ends = {-1: LogEnd()}

    def start(at, *steps, loss):
        log.resume(ends[at], Progress())
        trackers = Trackers(lambda _, action: action(), config, "id", log.path)
        for step in steps:
            log.append(
                row := {"step": step, "loss": loss + step, "order_digest": "no number", "mfu": None}
            )
            trackers.log(row)
            ends[step] = log.end()

    def held(*points):
        assert in_tensorboard(log.path) == in_metrics(log.path) == {"loss": [*points]}

    log.append({"event": "other", "step": 7, "at": 3})
    start(-1, 0, 10, 20, loss=0.5)
    start(-1, 0, 10, 20, 30, 40, loss=0.25)
    start(20, 30, 60, loss=0.125)  # log_every was 10 and is 30: 40 is not trained to a row again
    stand = [(0, 0.25), (10, 10.25), (20, 20.25), (30, 30.125), (60, 60.125)]
    held(*stand)
    start(60, 70, 80, loss=0)
    log.append({"event": "rollback", "step": 65})
    ends[65] = log.end()
    start(65, 70, loss=1)
    held(*stand, (70, 71))


def test_rows_without_a_step_are_not_sent(tmp_path, monkeypatch):
    """A received run may have any."""
    sent = []
    monkeypatch.setitem(
        START, "wandb", lambda *_: (SimpleNamespace(log=lambda row, step: sent.append(step)), -1)
    )
    lines = [
        "{}",
        '{"loss": 1}',
        '{"step": "2"}',
        '{"step": true}',
        '{"step": null}',
        '{"step": 3}',
    ]
    (tmp_path / METRICS).write_text("".join(f"{line}\n" for line in lines))
    config = SimpleNamespace(tracking=SimpleNamespace(log_with=["wandb"]))
    Trackers(lambda _, action: action(), config, "id", tmp_path)  # pyright: ignore
    assert sent == [3]


def train_with_a_failing(config):
    """Trains while wandb's tracker raises, and samples; the outcome and the outputs."""
    from gpt2_ddp.tasks.pretraining import Pretraining

    def fail(*args, **kwargs):
        raise ConnectionError("the server\nis gone")

    broken = SimpleNamespace(log=fail, finish=fail)
    START["wandb"] = lambda *_: (broken, -1)
    Pretraining.sample = fail  # pyright: ignore
    return said(train, config)


def test_what_fails_is_told_once_and_the_training_and_other_trackers_are_the_same(corpus, tmp_path):
    tracking = {"tracking.log_with": ["wandb", "tensorboard"], "tracking.sample_every": 2}
    config = training_config(corpus, tmp_path, tracking | {"train.steps": 6, "eval.every": 3})
    ((outcome, _, errors),) = run_ranks(train_with_a_failing, 1, config)
    warnings = [line for line in errors.splitlines() if line.startswith("warning:")]
    assert (outcome, len(warnings)) == ("completed", 2)
    for what in ("sample", "wandb tracker"):
        assert any(
            f"the {what} failed (ConnectionError: the server is gone)" in line for line in warnings
        )
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(7))
    assert in_tensorboard(tmp_path / "run") == in_float32(in_metrics(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/step-00000006").is_dir()


@pytest.mark.slow
def test_no_row_is_missing_or_there_twice_after_kills(corpus, tmp_path, monkeypatch):
    """With all three trackers. Before the first checkpoint and after it: trackers that write late
    lack rows from before it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracking = {"log_with": ["tensorboard", "wandb", "trackio"], "log_every": 1}
    changes = {"tracking": tracking, "train.steps": 12, "checkpoint.every": 7, "eval.every": 4}
    config = training_config(corpus, tmp_path, changes)
    run = tmp_path / "run"
    for step in (3, 9):
        with pytest.raises(RankError, match="died"):
            run_ranks(train_and_die, 1, config, tmp_path, step)
    assert run_ranks(train_and_die, 1, config, tmp_path) == ["completed"]
    wanted = in_metrics(run)
    assert (wanted["tokens"][-1][0], in_tensorboard(run)) == (
        config.train.steps,
        in_float32(wanted),
    )
    # before the last checkpoint and the end
    chain = json.loads((run / METRICS).read_text().splitlines()[-3])["chain"]
    for found in (in_wandb(run), in_trackio(tmp_path, run)):
        assert found.pop("chain")[-1] == (config.train.steps, chain)
        assert comparable(found) == comparable(wanted)
