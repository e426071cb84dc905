"""Lines of the terminal: short, and without what a row does not have."""

import json

from close import assert_close
from runs import open_folder

from gpt2_ddp.checkpoint.metrics import Metrics, describe, time_left
from gpt2_ddp.checkpoint.run_folder import RunLog

ROW = json.loads("""{"step": 350, "epoch": 0.1234, "tokens": 183500800, "loss": 3.9, "loss_mean": 3.20114, "lr": 5.4e-4,
"grad_norm": 0.2345, "skipped": 0, "tokens_per_second": 412345.6, "mfu": 0.412, "order_digest": "0000"}""")


def test_a_line_has_a_tasks_own_numbers():
    own = {"letters": 9, "letters_per_second": 7, "rhymes": 0.123456, "count": 12, "grad_norm/h.0": 1.0, "nan": None}
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
    assert time_left({"step": 1, "samples": 4, "samples_per_second": 0.0}, 10) is None, "slower than can be written"
