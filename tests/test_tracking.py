"""Metrics, throughput and trackers; the run folder's lock and status."""

import json
import math
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import training_config
from ranks import run_ranks, start_ranks

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.run.folder import METRICS, SAMPLES, RunFolder
from gpt2_ddp.run.tracking import Throughput, peak_flops


class Clock:
    """In the place of time.perf_counter; it moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def fake_task(unit: str = "tokens", flops_per_unit: int = 100) -> SimpleNamespace:
    return SimpleNamespace(unit=unit, flops_per_unit=flops_per_unit, feed=SimpleNamespace(waited=3.0))


CPU = SimpleNamespace(device=torch.device("cpu"), num_processes=2)


def test_throughput_counts_training_alone(monkeypatch):
    clock, task = Clock(monkeypatch), fake_task()
    throughput = Throughput(task, CPU)
    clock.now += 1
    task.feed.waited += 0.25
    with throughput.paused():
        clock.now += 30
    throughput.add(600)
    clock.now += 1
    throughput.add(400)
    assert throughput.read() == {"tokens_per_second": 500.0, "mfu": None, "data_share": 0.125}
    clock.now += 4  # a reading begins where the last one ended
    throughput.add(10)
    assert throughput.read() == {"tokens_per_second": 2.5, "mfu": None, "data_share": 0.0}
    clock.now += 4
    task.feed.waited += 0.75
    throughput.add(90)


def test_throughput_begins_with_a_restart(monkeypatch):
    """What happened before it is in no reading."""
    clock, task = Clock(monkeypatch), fake_task("samples", 0)
    throughput = Throughput(task, CPU)
    clock.now += 50
    task.feed.waited += 50
    throughput.add(7)
    throughput.restart()
    clock.now += 2
    throughput.add(8)
    assert throughput.read() == {"samples_per_second": 4.0, "data_share": 0.0}
    clock.now += 2


def test_mfu_is_that_of_all_devices(monkeypatch):
    """1,000 tokens a second of 100 FLOPs each, on two devices of a million."""
    monkeypatch.setattr("gpt2_ddp.run.tracking.peak_flops", lambda device: 1e6)
    clock = Clock(monkeypatch)
    throughput = Throughput(fake_task(), CPU)
    clock.now += 2
    throughput.add(2000)
    assert throughput.read()["mfu"] == pytest.approx(1000 * 100 / 2e6)


def test_mfu_is_not_given_where_the_peak_is_not_known():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H200", 989e12), ("?", None)],
)
def test_the_peak_of_a_device_is_found_by_its_name(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_metrics_are_cut_back_and_a_torn_line_is_dropped(corpus, tmp_path):
    run = RunFolder(training_config(corpus, tmp_path))
    for step in range(5):
        run.append(METRICS, {"step": step})
    metrics = run.path / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write('{"step": 1, "lo')
    run.cut_metrics(3)
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [0, 1, 2, 3]


def test_a_torn_line_is_no_damage(corpus, tmp_path, capsys):
    run = RunFolder(training_config(corpus, tmp_path))
    for name in (METRICS, SAMPLES):
        run.append(name, {"step": 1})
        (run.path / name).write_bytes((run.path / name).read_bytes() + b'{"step": 2, "\xc3')
    run.cut_metrics(9)
    assert [(run.path / name).read_text() for name in (METRICS, SAMPLES)] == ['{"step": 1}\n'] * 2
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
    run = RunFolder(training_config(corpus, tmp_path))
    damaged = b'{"step": 1}\n' + line + b'\n\n{"event": "x", "step": 3}\n{"step": 4}\n'
    for aside in (f"{name}.damaged", f"{name}.damaged-2"):
        (run.path / name).write_bytes(damaged)
        run.cut_metrics(3)
        assert (run.path / name).read_text() == '{"step": 1}\n{"event": "x", "step": 3}\n'
        assert (run.path / aside).read_bytes() == damaged
        (warning,) = capsys.readouterr().err.splitlines()
        assert warning.startswith(f"warning: {run.path / name}: line 2 ")
        assert aside in warning
    run.cut_metrics(3)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_set_aside(corpus, tmp_path, capsys, make):
    """Without reading it: a FIFO would wait for its writer for ever."""
    run = RunFolder(training_config(corpus, tmp_path))
    make(run.path / METRICS)
    run.cut_metrics(3)
    run.append(METRICS, {"step": 4})
    assert (run.path / METRICS).read_text() == '{"step": 4}\n'
    assert (run.path / "metrics.jsonl.damaged").exists()
    assert "is no file; set aside as metrics.jsonl.damaged" in capsys.readouterr().err


def test_the_lock_is_gone_with_its_process(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    ((process, _),) = start_ranks(_hold_the_lock, 1, config)
    while not (tmp_path / "run/held").exists():
        time.sleep(0.01)
    with pytest.raises(UserError, match="another trainer"):
        RunFolder(config)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    RunFolder(config)


def _hold_the_lock(config: TrainingConfig) -> None:
    folder = RunFolder(config)
    (folder.path / "held").touch()
    time.sleep(60)


def _train(config: TrainingConfig, home: Path) -> str:
    os.environ.update(HOME=str(home), WANDB_DIR=str(home), TRACKIO_DIR=str(home / "trackio"))
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    return train(config, Pretraining).outcome


def test_tensorboard_gets_the_rows(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    changes = {"tracking.log_with": "tensorboard", "train.steps": 6, "eval.every": 3}
    run_ranks(_train, 1, training_config(corpus, tmp_path, changes), tmp_path)
    (folder,) = {file.parent for file in (tmp_path / "run/gpt2_ddp").glob("events*")}
    events = EventAccumulator(str(folder)).Reload()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 7))
    assert [event.value for event in events.Scalars("loss")] == pytest.approx([row["loss"] for row in rows[1:]])
    assert [event.step for event in events.Scalars("val_loss")] == [0, 3, 6]


@pytest.mark.slow
def test_wandb_logs_offline_without_a_login_and_keeps_its_run(corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    changes = {"tracking.log_with": "wandb", "train.steps": 5}
    run_ranks(_train, 1, training_config(corpus, tmp_path, changes), tmp_path)
    run_ranks(_train, 1, training_config(corpus, tmp_path, {**changes, "train.steps": 8}), tmp_path)
    runs = [folder for folder in (tmp_path / "run/wandb").glob("offline-run-*") if folder.is_dir()]
    ids = {folder.name.rsplit("-", 1)[1] for folder in runs}
    assert len(runs) == 2
    assert len(ids) == 1, "the resumed run should go on with the same wandb run"
    state = json.loads((tmp_path / "run/checkpoints/step-00000008/state.json").read_text())
    assert state["run_id"] in ids
    steps = [step for folder in sorted(runs) for step in _wandb_steps(folder)]
    assert steps == list(range(9))


def _wandb_steps(folder: Path) -> list[int]:
    """The steps of an offline run's history, read from its log: LevelDB's format, records in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = next(folder.glob("*.wandb")).read_bytes()
    steps, offset, message = [], 7, b""
    while offset + 7 <= len(data):
        if 32768 - offset % 32768 < 7:  # the rest of a block that has no room for a header
            offset += 32768 - offset % 32768
            continue
        length, kind = int.from_bytes(data[offset + 4 : offset + 6], "little"), data[offset + 6]
        message += data[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            record = Record.FromString(message)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
            message = b""
    return steps


@pytest.mark.slow
def test_trackio_gets_the_rows(corpus, tmp_path):
    changes = {"tracking.log_with": "trackio", "train.steps": 3}
    assert run_ranks(_train, 1, training_config(corpus, tmp_path, changes), tmp_path) == ["completed"]
    assert any((tmp_path / "trackio").rglob("*.db"))


def test_a_crash_is_recorded_and_the_same_command_goes_on(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    with pytest.raises(Exception, match="out of order"):
        run_ranks(_crash_at_step_8, 1, config)
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["state"], status["step"]) == ("failed", 7)
    assert "out of order" in status["reason"]
    assert run_ranks(_train, 1, config, tmp_path) == ["completed"]
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(21))
    assert all(math.isfinite(row["loss"]) for row in rows[1:])


def _crash_at_step_8(config: TrainingConfig) -> None:
    from gpt2_ddp.run import loop
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    train_step = loop.train_step

    def crashing(run):
        if run.step == 7:
            raise RuntimeError("out of order")
        return train_step(run)

    loop.train_step = crashing
    train(config, Pretraining)
