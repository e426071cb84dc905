"""What status.json says of a run, while it runs and after; and what is made of it."""

import json
import math
import os
import time

import pytest
from commands import expect_error, held
from ranks import run_ranks
from runs import open_folder, status

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.status import describe, health, show_status

NOW = 1_000_000.0


def write(folder, **values):
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps(values))
    return folder


def facts(**changes):
    """The status of a running run, a heartbeat of this process at NOW, with `changes`."""
    usual = {
        "step": 7,
        "stage": "data",
        **this_process()._asdict(),
        "heartbeat": NOW,
        "progress": NOW,
        "limit": 120.0,
    }
    return {"state": "running", "reason": ""} | usual | changes


def test_what_a_trainer_writes(tmp_path, monkeypatch):
    """By whom and where it runs, and how it ended, which stays."""
    folder = open_folder(tmp_path / "run")
    log = RunLog(folder)
    file = tmp_path / "run/status.json"
    log.write_heartbeat(facts())
    assert not file.exists(), "it has not begun"
    log.write_status("running", 3)
    first = status(file.parent)
    assert (first["pid"], first["host"]) == (os.getpid(), os.uname().nodename)
    assert abs(first["heartbeat"] - time.time()) < 60
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: pytest.fail("a heartbeat waits for a disk"))
        log.write_heartbeat(facts())
    assert status(file.parent) == facts()
    log.write_status("completed", 9)
    assert file.read_text() == '{"state": "completed", "step": 9, "reason": ""}\n'
    os.utime(file, (1, 1))
    log.write_heartbeat(facts())
    log.write_failure(9, "rank 1 is late")
    log.write_status("completed", 9)
    assert file.stat().st_mtime == 1
    log.write_status("stopped", 9)
    assert status(file.parent)["state"] == "stopped"
    folder.release()


HEALTH = [
    ({}, 5, "running"),
    ({"heartbeat": 1000119.0}, 119, "running"),
    ({"heartbeat": 1000121.0}, 121, "stalled"),
    ({"stage": "save", "limit": 500.0, "heartbeat": 1000400.0}, 400, "running"),
    (
        {"heartbeat": 1000500.0, "progress": 1000500.0, "host": "far"},
        0,
        "running",
    ),  # its clock is ahead
    ({}, 91, "stalled"),  # the whole process stands still
    ({"started": 1}, 5, "dead"),  # another process has its number now
    ({"host": "far", "machine": "m"}, 89, "running"),
    ({"host": "far", "machine": "m"}, 91, "dead"),
    ({"state": "stopped", "reason": "x\nFile"}, 60, "stopped"),
]
"""What differs from the status of a running run, the time since NOW, and the state."""


@pytest.mark.parametrize(("changes", "age", "state"), HEALTH)
def test_health(tmp_path, changes, age, state):
    folder = write(tmp_path / "run", **facts(**changes))
    os.utime(folder / "status.json", (NOW, NOW))
    found = health(folder, NOW + age)
    assert found[:3] == (state, 7, age)
    if state == "stopped":
        assert found.detail == "x"
    else:
        assert f"on {facts(**changes)['host']}" in found.detail
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (record,) = read_runs([folder])  # today
    assert record.status["state"] in (state, "stalled", "dead")


def test_a_clock_that_is_ahead_gives_no_negative_time(tmp_path, monkeypatch, capsys):
    """Of another machine, or of the disk."""
    running = write(
        tmp_path / "running",
        **facts(host="far", machine="m", heartbeat=NOW + 50, progress=NOW + 50),
    )
    ended = write(tmp_path / "ended", state="completed", step=7, reason="")
    os.utime(ended / "status.json", (NOW + 50, NOW + 50))
    monkeypatch.setattr(time, "time", lambda: NOW)
    show_status(load(StatusConfig, [str(running), str(ended)]))
    shown = capsys.readouterr().out
    assert shown.count("0:00:00 ago") == 2
    assert "last heartbeat 0 s ago" in shown


ROWS = """
{"event": "start", "step": 0, "steps": null}
{"step": 10, "tokens": 100, "loss_mean": 5.25, "tokens_per_second": 2.0}
{"event": "length", "step": 10, "steps": 40}
{"event": "checkpoint", "step": 10}
{"step": 20, "tokens": 200, "loss_mean": 5.0, "val_loss": 4.5, "tokens_per_second": 4.0}
{"event": "sample", "step": 20, "text": "x"}
{"step": 21, "lo"""


def test_total_losses_and_what_comes_next(tmp_path):
    """Of a running run the time left, of a dead one
    where it resumes; rows of strangers harm none."""
    folder = write(tmp_path / "run", **facts(step=21))
    (folder / "metrics.jsonl").write_text(ROWS.lstrip())
    alive = describe(folder, NOW + 1)
    assert "step         21/40" in alive
    assert "loss_mean 5.0000  val_loss 4.5000  0:00:50 left" in alive  # 20 steps of 10 tokens
    assert "resumes" not in alive
    write(folder, **facts(step=21, started=1))
    assert "dead" in (dead := describe(folder, NOW + 1))
    assert ("resumes from step 10" in dead, "left" in dead) == (True, False), (
        "of a copy, by its rows"
    )
    (folder / "checkpoints").mkdir()
    assert "no checkpoint" in describe(folder, NOW + 1)
    for name in ("step-00000010", "step-00000020", ".step-00000021", "step-00000020.corrupt"):
        (folder / f"checkpoints/{name}").mkdir()
        (folder / f"checkpoints/{name}/manifest.json").write_text("{}")
    assert "resumes from step 20" in describe(folder, NOW + 1)
    write(folder, **facts())
    assert "step         20/40" in describe(folder, NOW + 1), (
        "by a row that is newer than the status"
    )
    for row in (
        '"tokens_per_second": "x"',
        '"samples_per_second": 1.0',
        '"loss_mean": []',
        '"tokens_per_second": 1e-320',
    ):
        (folder / "metrics.jsonl").write_text(
            f'{{"event": "start", "step": 0, "steps": 40}}\n{{"step": 20, {row}}}\n'
        )
        assert "step         20/40" in describe(folder, NOW + 1)


BEATS = [
    {"progress": -math.inf},
    {"heartbeat": math.nan},
    {"limit": 1e300},
    {"step": "x"},
    {"pid": {}},
]


def test_a_locked_folder_and_damaged_files(tmp_path):
    folder = write(tmp_path / "run", state="stopped", step=4, reason="SIGTERM")
    with held(folder / ".lock"):
        assert run_ranks(health, 1, folder)[0].state == "starting"
    assert health(folder).state == "stopped"
    strange = [json.dumps(facts(**beat)) for beat in BEATS]
    strange += [f'{{"state": "running", "step": {number}}}' for number in ("1e999", "1" * 400)]
    for text in ("", "[]", *strange, "[" * 9999):
        (folder / "status.json").write_text(text)
        assert health(folder).state == "unknown"


def test_a_line_for_each_run(tmp_path, capsys, monkeypatch):
    """A strange one hides no other and reaches no terminal."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", state="\x1b]0;x\x07", step=3, reason="\x1b[2J\ud800\nmore")
    write(tmp_path / "b", **facts(stage="\x9b31m", host="\x1b[1m"))
    write(tmp_path / "c", state="completed", step=1200, reason="")
    (tmp_path / "compare").mkdir()
    write(tmp_path / "\x1b[5md", state="stopped", step=4, reason="")

    def shown(*runs):
        assert show_status(load(StatusConfig, runs)) == 0
        lines = capsys.readouterr().out.split("\n")[:-1]
        assert all(line.isprintable() for line in lines)
        return lines

    lines = shown("a", "b", "c", "compare", "\x1b[5md")
    assert (len(lines), r"\x1b[2J\ud800" in lines[0], "more" in lines[0]) == (4, True, False)
    assert [line.split()[1] for line in lines[1:]] == ["stalled", "completed", "stopped"]
    for wrong in ([str(tmp_path)], []):
        expect_error("runs = ", show_status, load(StatusConfig, wrong))
    (tmp_path / "runs").symlink_to(tmp_path)
    assert [line.split()[0] for line in shown()][1:] == ["runs/a", "runs/b", "runs/c"]
