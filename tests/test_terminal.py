"""Lines of the terminal: short, and without what a row does not have."""

import io
import json
import sys

import pytest
from close import assert_close
from runs import open_folder
from tqdm import tqdm

from gpt2_ddp.checkpoint.metrics import LongStage, Metrics, bar_format, describe, time_left
from gpt2_ddp.checkpoint.run_folder import RunLog

ROW = json.loads("""{"step": 350, "epoch": 0.1234, "tokens": 183500800, "loss": 3.9, "loss_mean": 3.20114, "lr": 5.4e-4,
"grad_norm": 0.2345, "skipped": 0, "tokens_per_second": 412345.6, "mfu": 0.412, "order_digest": "0000"}""")


def test_a_line_has_a_tasks_own_numbers():
    own = {"letters": 9, "letters_per_second": 7, "rhymes": 0.123456, "count": 12, "grad_norm/h.0": 1.0, "nan": None}
    assert describe({"step": 0} | own) == ["rhymes 0.1235", "count 12", "7 letters/s"]


@pytest.mark.parametrize(("columns", "figures"), [(40, 1), (80, 3), (120, 5)])
def test_the_bar_shows_whole_figures_first_and_the_bar_in_the_room_left(columns, figures):
    shown = tqdm.format_meter(350, 700, 10.0, ncols=columns, bar_format=bar_format(ROW, 700, columns))
    assert sum(part in shown for part in describe(ROW)) == figures
    assert (len(shown) <= columns, "█" in shown) == (True, columns == 120)


def test_rows_go_to_standard_output_and_warnings_to_stderr(tmp_path, capsys):
    folder = open_folder(tmp_path / "run")
    metrics = Metrics(RunLog(folder), 0, 1000)
    metrics.log(ROW)
    metrics.print("warning: late")
    metrics.close()
    folder.release()
    row, errors = capsys.readouterr()
    assert (row.split()[:2], errors) == (["step", "350/1000"], "warning: late\n")


class OutStream(io.StringIO):
    """Standard output in a notebook."""

    __module__ = "ipykernel.iostream"


def test_a_notebook_shows_one_line_that_changes_and_a_line_for_each_evaluation(tmp_path, monkeypatch):
    folder, shown = open_folder(tmp_path / "run"), OutStream()
    monkeypatch.setattr(sys, "stdout", shown)
    metrics = Metrics(RunLog(folder), 0, 10)
    for step in (1, 2, 3):
        metrics.log(ROW | {"step": step} | ({"val_loss": 3.0} if step == 2 else {}))
    metrics.close()
    folder.release()
    evaluation, bar = [line.split("\r")[-1].split() for line in shown.getvalue().strip("\n").split("\n")]
    assert (evaluation[:2], bar[0]) == (["step", "2/10"], "3/10")


def test_the_time_left_is_that_of_the_steps_left_at_the_row_s_speed():
    assert_close(time_left(ROW, 1350), 1000 * 524_288 / 412_345.6)
    assert time_left(ROW, 350) == 0
    assert time_left({"step": 0, "tokens": 0, "val_loss": 3.0}, 10) is None
    assert time_left({"step": 1, "samples": 4, "samples_per_second": 0.0}, 10) is None, "slower than can be written"


def test_a_stage_that_lasts_is_printed_with_its_time_at_growing_intervals(monkeypatch, capsys):
    """After 5 s and three times its longest before; then each time after twice as long."""
    stages = LongStage()

    def lines(stage, step, times):
        for seconds in times:
            monkeypatch.setattr("gpt2_ddp.checkpoint.metrics.time.monotonic", lambda seconds=seconds: seconds)
            stages.report({"stage": stage, "step": step})
        return capsys.readouterr().err.splitlines()

    told = [f"evaluate at step 0: {seconds} s so far" for seconds in (5, 10, 20)]
    assert lines("evaluate", 0, range(1000, 1025)) == told
    assert lines("step", 1, range(1025, 1030)) == []
    assert lines("evaluate", 9, range(1030, 1104)) == [], "as long as it took before, times three"
    assert lines("evaluate", 9, range(1104, 1108)) == ["evaluate at step 9: 1 min 15 s so far"]
