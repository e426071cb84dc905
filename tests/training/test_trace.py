"""Traces of steps and snapshots of memory: what viewers need is there, the training is the same,
and the range may lie anywhere."""

import gzip
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from commands import expect_error
from runs import assert_same, complete, events, train, training_config
from torch.autograd import DeviceType

from gpt2_ddp.training import loop
from gpt2_ddp.training.trace import most_expensive

EXACT = {"train.mixed_precision": "no"}


def traced(corpus, folder, steps, **changes):
    changes = EXACT | {"tracking.profile_steps": steps} | changes
    return training_config(corpus, folder, changes)


def files(run):
    return sorted(file.name for file in run.glob("*trace*"))


def step_names(found):
    names = [event["name"] for event in found if event["name"].startswith("ProfilerStep")]
    return sorted(names)


def test_a_trace_has_what_perfetto_reads_and_the_training_is_the_same(corpus, tmp_path, capsys):
    """Perfetto's format: https://perfetto.dev/docs/getting-started/other-formats, JSON."""
    assert train(training_config(corpus, tmp_path / "plain", EXACT)) == "completed"
    capsys.readouterr()
    assert train(traced(corpus, tmp_path, (4, 6))) == "completed"
    printed = capsys.readouterr().out
    run = tmp_path / "run"
    assert_same(tmp_path / "plain/run", run)
    assert files(run) == ["trace-4-6.json.gz", "trace-4-6.txt"]
    assert f"trace of steps 4 to 6: {run / 'trace-4-6.json.gz'}" in printed
    assert "note: tracking.profile_steps" not in printed
    with gzip.open(run / "trace-4-6.json.gz", "rt") as stream:
        content = json.load(stream)
    found = content["traceEvents"]
    for event in found:
        assert {"ph", "name", "pid"} <= event.keys(), event
        if event["ph"] == "X":
            assert isinstance(event["ts"], int | float)
            assert event["dur"] >= 0
            assert "tid" in event
    starts, ends = ({e["id"] for e in found if e["ph"] == phase} for phase in "sf")
    assert starts == ends, "each arrow from the forward to the backward pass has both ends"
    assert step_names(found) == [f"ProfilerStep#{step}" for step in (4, 5, 6)]
    operators = [event for event in found if event.get("cat") == "cpu_op"]
    assert any("Input Dims" in event["args"] for event in operators)
    table = (run / "trace-4-6.txt").read_text().splitlines()
    assert len(table) == 12, "a header, ten operations, and the others"
    assert table[0].split() == ["share", "ms", "a", "step", "calls", "a", "step", "operation"]
    shares = [float(line.split("%")[0]) for line in table[1:]]
    assert shares[:10] == sorted(shares[:10], reverse=True)
    assert "aten::" in table[1]
    assert table[1] in printed


def test_a_range_that_ends_after_the_run_and_a_resume_within_it(corpus, tmp_path, capsys):
    """What is trained of it is recorded; a resume after it says that nothing is."""
    run = tmp_path / "run"
    for steps, note, expected in (
        (5, "goes from step 1 to 5: steps 4 to 5 are recorded", (4, 5)),
        (8, "goes from step 6 to 8: steps 6 to 7 are recorded", (6, 7)),
        (10, "goes from step 9 to 10: none is recorded", None),
    ):
        before = files(run)
        config = traced(corpus, tmp_path, (4, 7), **{"train.steps": steps, "optim.decay_steps": 10})
        assert train(config) == "completed"
        assert f"note: tracking.profile_steps = 4 7, and this training {note}\n" in (
            capsys.readouterr().out
        )
        made = [] if expected is None else ["trace-{}-{}.json.gz".format(*expected)]
        assert [name for name in files(run) if name not in before and name.endswith("gz")] == made


def test_a_rollback_that_leaves_the_range_ends_the_trace(corpus, tmp_path):
    """The steps that are taken again are not recorded again."""
    config = traced(
        corpus,
        tmp_path,
        (7, 12),
        **{"guard.patience": 1, "train.global_batch_tokens": 96, "train.steps": 14},
    )
    complete(config, 1, (21, 24), float("inf"))
    run = tmp_path / "run"
    (rollback,) = events(run, "rollback")
    assert rollback["step"] == 5
    last = rollback["from"]
    assert files(run) == [f"trace-7-{last}.json.gz", f"trace-7-{last}.txt"]
    content = json.loads(gzip.decompress((run / f"trace-7-{last}.json.gz").read_bytes()))
    recorded = {f"ProfilerStep#{step}" for step in range(7, last + 1)}
    assert {*step_names(content["traceEvents"])} == recorded


def test_rank_0_of_several_writes(corpus, tmp_path):
    complete(traced(corpus, tmp_path, (2, 3)), 2)
    assert files(tmp_path / "run") == ["trace-2-3.json.gz", "trace-2-3.txt"]
    content = json.loads(gzip.decompress((tmp_path / "run/trace-2-3.json.gz").read_bytes()))
    assert content["distributedInfo"]["rank"] == 0
    assert any("all_reduce" in event["name"] for event in content["traceEvents"])


def test_a_failed_write_is_a_warning_and_a_failed_step_ends_the_recording(
    corpus, tmp_path, monkeypatch, capsys
):
    profiler = "torch.profiler.profile.export_chrome_trace"
    with monkeypatch.context() as patch:
        patch.setattr(profiler, MagicMock(side_effect=OSError("No space left on device")))
        assert train(traced(corpus, tmp_path, (2, 3))) == "completed"
    warning = "warning: the trace failed (OSError: No space left on device); the training continues"
    assert warning in capsys.readouterr().err
    assert files(tmp_path / "run") == []
    step = loop.train_step

    def fail(trainer):
        if trainer.run.step == 2:
            raise RuntimeError("by a test")
        return step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", fail)
        with pytest.raises(RuntimeError, match="by a test"):
            train(traced(corpus, tmp_path / "fails", (2, 5)))
    assert train(traced(corpus, tmp_path / "next", (2, 2))) == "completed"
    assert files(tmp_path / "next/run") == ["trace-2-2.json.gz", "trace-2-2.txt"]


@pytest.mark.parametrize("wrong", ["5", "5 4", "0 3", "1 2 3", "1 101", "a b"])
def test_a_wrong_range_is_refused(wrong, corpus, tmp_path):
    expect_error("tracking.profile_steps", traced, corpus, tmp_path, wrong.split())


def test_the_most_expensive_operations_by_hand():
    def average(key, cpu, device, kind=DeviceType.CPU, named=False):
        return SimpleNamespace(
            key=key,
            count=4,
            device_type=kind,
            is_user_annotation=named,
            self_cpu_time_total=cpu,
            self_device_time_total=device,
        )

    averages = [average(f"aten::op{n}", 100.0, 50.0) for n in range(11)]
    averages += [average("aten::mm", 900.0, 7.0), average("ProfilerStep#3", 5e6, 5e6)]
    averages += [average("Optimizer.step", 1e6, 1e6, named=True)]
    averages += [average("gemm", 0.0, 3000.0, DeviceType.CUDA)]
    averages += [average("Optimizer.step", 0.0, 9e9, DeviceType.CUDA, named=True)]
    cpu = [line.split() for line in most_expensive(averages, DeviceType.CPU, 2).splitlines()]
    assert cpu[1] == ["45.0%", "0.450", "2.0", "aten::mm"]
    assert cpu[2] == ["5.0%", "0.050", "2.0", "aten::op0"]
    assert cpu[-1] == ["10.0%", "0.100", "2", "others"]
    assert len(cpu) == 12
    gpu = most_expensive(averages, DeviceType.CUDA, 2).splitlines()
    assert [line.split() for line in gpu[1:]] == [["100.0%", "1.500", "2.0", "gemm"]]


def test_too_little_gpu_memory_leaves_a_snapshot(corpus, tmp_path, monkeypatch):
    """Where CUDA is in use; recording is off. A snapshot that cannot be written is left out."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    history = MagicMock()
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", history)
    out_of_memory = MagicMock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(loop, "train_step", out_of_memory)

    def dump(file):
        with open(file, "w") as stream:
            stream.write("snapshot")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    file = tmp_path / "run/out-of-memory-rank0.pickle"
    config = training_config(corpus, tmp_path, EXACT)
    expect_error(f"memory; {file} shows what was in it; ", train, config)
    assert file.read_text() == "snapshot"
    history.assert_not_called()
    failure = MagicMock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", failure)
    expect_error("the GPU's memory; ", train, config)
