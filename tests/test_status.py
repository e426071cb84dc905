"""What status.json says of a run, while it runs and after; and what is made of it."""

import json
import math
import os
import time
from pathlib import Path

import commands
import pytest
from runs import open_folder

from gpt2_ddp.checkpoint.run_folder import RunLog
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import StatusConfig
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.status import SILENT, health, show_status

NOW = 1_000_000.0


@pytest.fixture
def held(tmp_path):
    """The records of a run as its trainer has them."""
    folder = open_folder(tmp_path / "run")
    yield RunLog(folder)
    folder.release()


def facts(**changes: object) -> dict:
    """A heartbeat of this process at NOW, with `changes`."""
    usual = {"step": 7, "stage": "data", **this_process()._asdict(), "heartbeat": NOW, "progress": NOW, "limit": 120.0}
    return usual | changes


def write(folder: Path, **status: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "status.json").write_text(json.dumps(status))
    return folder


def running(folder: Path, **changes: object) -> Path:
    return write(folder, **({"state": "running", "reason": ""} | facts(**changes)))


def test_a_running_run_says_by_whom_and_where_it_is(held, monkeypatch):
    file = held.path / "status.json"
    held.write_heartbeat(facts())
    assert not file.exists(), "it has not begun"
    held.write_status("running", 3)
    first = json.loads(file.read_text())
    assert (first["pid"], first["host"]) == (os.getpid(), os.uname().nodename)
    assert abs(first["heartbeat"] - time.time()) < 60
    monkeypatch.setattr(os, "fsync", lambda descriptor: pytest.fail("a heartbeat waits for a disk"))
    held.write_heartbeat(facts())
    assert json.loads(file.read_text()) == {"state": "running", "reason": "", **facts()}


def test_how_it_ended_stays(held):
    held.write_status("running", 3)
    held.write_status("completed", 9)
    file = held.path / "status.json"
    assert file.read_text() == '{"state": "completed", "step": 9, "reason": ""}\n'
    os.utime(file, (1, 1))
    held.write_heartbeat(facts())
    held.write_failure(9, "rank 1 is late")
    held.write_status("completed", 9)
    assert file.stat().st_mtime == 1
    held.write_status("stopped", 9)
    held.write_failure(9, "rank 1 is late")
    assert json.loads(file.read_text())["state"] == "stopped"


@pytest.mark.parametrize(("changes", "age", "state"), [
    ({}, 5, "running"), ({"heartbeat": NOW + 119}, 119, "running"), ({"heartbeat": NOW + 121}, 121, "stalled"),
    ({"stage": "save", "limit": 500.0, "heartbeat": NOW + 400}, 400, "running"),
    ({}, SILENT + 1, "stalled"),  # the whole process stands still
    ({"started": 1}, 5, "dead"),  # another process has its number now
    ({"host": "far", "machine": "m"}, SILENT - 1, "running"), ({"host": "far", "machine": "m"}, SILENT + 1, "dead"),
])  # fmt: skip
def test_health_of_a_running_run(tmp_path, changes, age, state):
    found = health(running(tmp_path / "run", **changes), NOW + age)
    assert found[:3] == (state, 7, age)
    assert f"on {changes.get('host', os.uname().nodename)}" in found.detail


def test_a_run_that_has_ended(tmp_path):
    for state in ("completed", "stopped", "failed", "diverged"):
        folder = write(tmp_path / state, state=state, step=9, reason=f"{state}: because\n  File x")
        os.utime(folder / "status.json", (NOW, NOW))
        assert health(folder, NOW + 60) == (state, 9, 60, f"{state}: because")


def test_a_locked_folder_and_damaged_files(tmp_path):
    folder = write(tmp_path / "run", state="stopped", step=4, reason="SIGTERM")
    with commands.held(folder / ".lock"):
        assert health(folder).state == "starting"
    assert health(folder).state == "stopped"
    beats = ({"progress": -math.inf}, {"heartbeat": math.nan}, {"limit": 1e300})
    strange = ('"step": 4, "reason": ""', '"step": "x"', '"pid": {}', '"step": 1e999', f'"step": {"1" * 400}')
    strange = [f'{{"state": "running", {text}}}' for text in strange]
    strange += [json.dumps(facts(state="running", **beat)) for beat in beats]
    for text in ("", "{", "[]", "null", *strange, "[" * 9999):
        (folder / "status.json").write_text(text)
        assert health(folder).state == "unknown"


def shown(capsys: pytest.CaptureFixture, *runs: str) -> list[list[str]]:
    """The words of each line."""
    assert show_status(load(StatusConfig, runs)) == 0
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    return [line.split() for line in lines]


def test_a_line_for_each_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [str(running(tmp_path / "one")), str(write(tmp_path / "another", state="completed", step=1200, reason=""))]
    assert [line[:4] for line in shown(capsys, *runs)] == [
        [runs[0], "stalled", "step", "7"],
        [runs[1], "completed", "step", "1200"],
    ]
    (tmp_path / "compare").mkdir()
    assert [line[1] for line in shown(capsys, "compare", runs[1])] == ["no", "completed"]
    for wrong in ([str(tmp_path)], []):
        commands.expect_error("runs = ", show_status, load(StatusConfig, wrong))
    (tmp_path / "runs").symlink_to(tmp_path)
    assert [line[0] for line in shown(capsys)] == ["runs/another", "runs/one"]


def test_a_report_does_not_take_a_dead_run_for_a_running_one(tmp_path):
    folder = running(tmp_path / "run", started=1)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (record,) = read_runs([folder])
    assert (record.status["state"], "is gone" in record.status["reason"]) == ("dead", True)


def test_a_strange_run_hides_no_other_and_reaches_no_terminal(tmp_path, capsys):
    runs = [
        write(tmp_path / "a", reason="\x1b[2J\ud800\nmore", state="\x1b]0;x\x07", step=3),
        running(tmp_path / "b", stage="\x9b31m", host="\x1b[1m"),
        write(tmp_path / "c", state="running", progress=-math.inf),
        write(tmp_path / "\x1b[5md", state="stopped", step=4, reason=""),
    ]
    lines = shown(capsys, *map(str, runs))
    assert len(lines) == 4
    assert (r"\x1b[2J\ud800" in lines[0], "more" in lines[0], lines[2][1]) == (True, False, "unknown")
