"""Lines of the terminal: short, and without what a
row does not have. One line says what comes next."""

import shlex
import sys
from pathlib import Path

import pytest
from close import assert_close
from commands import SCRIPTS, launch
from runs import open_folder

from gpt2_ddp.config.jobs import RegressionConfig
from gpt2_ddp.distributed import process
from gpt2_ddp.records.metrics import Metrics, describe, time_left
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.tasks import command
from gpt2_ddp.tasks.ending import next_training

ROW = {
    "step": 350,
    "epoch": 0.1234,
    "tokens": 183500800,
    "loss": 3.9,
    "loss_mean": 3.20114,
    "lr": 0.00054,
    "grad_norm": 0.2345,
    "skipped": 0,
    "tokens_per_second": 412345.6,
    "mfu": 0.412,
    "order_digest": "0000",
}


def test_a_line_has_a_tasks_own_numbers():
    own = {
        "letters": 9,
        "letters_per_second": 7,
        "rhymes": 0.123456,
        "count": 12,
        "grad_norm/h.0": 1.0,
        "nan": None,
    }
    assert describe({"step": 0} | own) == ["rhymes 0.1235", "count 12", "7 letters/s"]


def test_rows_go_to_standard_output_and_warnings_to_stderr(tmp_path, capsys):
    folder = open_folder(tmp_path / "run")
    metrics = Metrics(RunLog(folder))
    metrics.log(ROW, 1000)
    metrics.print("warning: late")
    metrics.close()
    folder.release()
    row, errors = capsys.readouterr()
    assert (row.split()[:2], errors) == (["step", "350/1000"], "warning: late\n")


def test_the_time_left_is_that_of_the_steps_left_at_the_row_s_speed():
    assert_close(time_left(ROW, 1350), 1000 * 524_288 / 412_345.6)
    assert time_left(ROW, 350) == 0
    assert time_left({"step": 0, "tokens": 0, "val_loss": 3.0}, 10) is None
    assert time_left({"step": 1, "samples": 4, "samples_per_second": 0.0}, 10) is None, (
        "slower than can be written"
    )


@pytest.mark.parametrize(
    ("folder", "flags"),
    [
        ("data/mine", " --data.path data/mine --run_name mine"),
        ("data/my text", " --data.path 'data/my text'"),
        ("data/stdlib", ""),
    ],
)
def test_after_a_preparation_comes_a_training(folder, flags):
    assert next_training(Path(folder)) == f"next: python scripts/train_gpt2.py{flags}"


def test_a_preparation_ends_with_the_next_command_unless_a_training_has_started_it(tmp_path):
    (tmp_path / "text.txt").write_text("some words\n" * 999)
    words = [
        sys.executable,
        SCRIPTS / "prepare_data.py",
        *shlex.split("--source text.txt --tokenizer bytes --output mine"),
    ]
    first, again, within = (
        launch(words, tmp_path, **env).stdout for env in ({}, {}, {process.CHILD: "1"})
    )
    for printed in (first, again):
        assert printed.count("next: ") == 1
        assert printed.endswith(
            "next: python scripts/train_gpt2.py --data.path mine --run_name mine\n"
        )
    assert "already prepared" in within
    assert "next: " not in within


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_a_small_job_ends_with_its_report_and_the_next_command(monkeypatch, capsys, outcome):
    drawn = []
    monkeypatch.setattr(process, "run_module", lambda *words, **_: drawn.append(words))
    monkeypatch.setattr(command, "run_processes", lambda *_: outcome)
    command.start_job(RegressionConfig(output_dir="out", run_name="line"))
    ended = outcome == "completed"
    assert drawn == [("gpt2_ddp", "report", "out/line")] * ended
    lines = "report: out/line/report.html\nnext: python scripts/evaluate.py out/line\n"
    assert capsys.readouterr().out == lines * ended
