"""A run's report beside what a ladder has foretold: its band, and its newest evaluation."""

import re

import numpy as np
import pytest
from close import assert_close
from ladders import CURVE, make_ladder
from report_runs import BATCH, make_run

from gpt2_ddp.reports.chart import Chart, Curve
from gpt2_ddp.reports.curves import EXPECTED, Curves
from gpt2_ddp.reports.expected import band, expected_text, standing
from gpt2_ddp.reports.headline import facts
from gpt2_ddp.reports.picture import COLORS
from gpt2_ddp.reports.report import page
from gpt2_ddp.reports.runs import read_runs

STEPS = 4000
TOKENS = STEPS * BATCH
PARAMETERS = 1_000_000
NATS = 1.9
"""Validation loss in nats per token, for each bit per byte."""


def rows_of(factor, steps=STEPS, total=STEPS, **fields):
    """Rows of a run up to a step, whose evaluations are so many times the expected ones."""
    ladder = make_ladder()
    expectation = ladder.expectation(PARAMETERS, TOKENS)
    forecast = {"bits_per_byte": 1.4, "ladder": expectation.record() | fields}
    rows = [{"event": "start", "step": 0, "steps": total, "forecast": forecast}]
    rows.append({"step": 0, "tokens": 0, "val_loss": 9.0, "val_bits_per_byte": 4.0})
    end = expectation.at_end(total * BATCH) or expectation.at_end(TOKENS)
    for share, ratio in (*CURVE, (1.0, 1.0)):
        step = round(share * total)
        bits = factor * ratio * end.bits
        row = {"step": step, "tokens": step * BATCH, "loss": NATS * bits}
        row |= {"val_loss": NATS * bits, "val_bits_per_byte": bits, "val_tokens": 50_000}
        if step <= steps:
            rows.append(row)
    return rows


def run_of(folder, *arguments, **fields):
    (run,) = read_runs([make_run(folder / "run", rows_of(*arguments, **fields))])
    return run


@pytest.mark.parametrize(
    ("factor", "word"), [(1.0, "within"), (1.005, "within"), (1.08, "above"), (0.9, "below")]
)
@pytest.mark.parametrize("steps", [1000, 3000, STEPS])
def test_where_the_newest_evaluation_is(tmp_path, factor, word, steps):
    run = run_of(tmp_path, factor, steps)
    found, text = standing(run)
    assert found == word
    assert f"at step {steps:,}, by the ladder " in text
    assert ("worth a look" in text) == (word == "above")
    assert (found, text) in [*facts(run)]
    assert "validation tokens" not in text


def test_evaluations_of_other_tokens_are_named(tmp_path):
    _, text = standing(run_of(tmp_path, 1.0, val_tokens=7))
    assert text.endswith("of 50000 validation tokens, the ladder's of 7)")


def test_a_run_that_became_longer_is_compared_with_a_longer_one(tmp_path):
    """By train.minutes, or a resume: the interval is that of the tokens that it will have."""
    run = run_of(tmp_path, 1.0, 2 * STEPS, 2 * STEPS)
    assert standing(run)[0] == "within"
    expected = make_ladder().expect(PARAMETERS, 2 * TOKENS)
    shown = [float(number) for number in re.findall(r"\d\.\d+", expected_text(run))]
    assert_close(shown, [*expected], 5e-3)
    assert make_ladder().expect(PARAMETERS, TOKENS).low > expected.high
    far = run_of(tmp_path / "far", 1.0, 50 * STEPS, 50 * STEPS)
    assert standing(far) is None
    assert expected_text(far) == "expected about 1.4"


def test_the_band_is_drawn_in_nats(tmp_path):
    run = run_of(tmp_path, 1.0, 3000)
    drawn = band(run)
    assert drawn.steps[-1] == STEPS
    assert drawn.steps[0] >= 0.2 * STEPS
    end = make_ladder().expect(PARAMETERS, TOKENS)
    assert_close([drawn.low[-1] / NATS, drawn.high[-1] / NATS], [end.low, end.high], 1.2e-2)
    assert (np.diff(drawn.low) < 0).all()
    assert (drawn.low < drawn.high).all()
    chart = Curves([run]).loss()
    (area,) = chart.bands
    assert area.label == EXPECTED
    html = chart.html(COLORS, 1000)
    path = re.search(r'<path class="band"[^>]* d="M([^"]*)z"><title>', html)[1]
    assert len(path.split("L")) == 2 * len(drawn.steps)
    source = page([run])
    assert source.count(EXPECTED) == 2, "the band and the legend"


def test_several_runs_and_runs_without_a_ladder_have_no_band(tmp_path):
    first = run_of(tmp_path / "a", 1.0)
    second = run_of(tmp_path / "b", 1.0)
    assert Curves([first, second]).loss().bands == []
    rows = rows_of(1.0)
    rows[0]["forecast"].pop("ladder")
    (plain,) = read_runs([make_run(tmp_path / "plain", rows)])
    assert band(plain) is None
    assert standing(plain) is None
    assert expected_text(plain) == "expected about 1.4"
    del rows[0]["forecast"]
    (silent,) = read_runs([make_run(tmp_path / "silent", rows)])
    assert expected_text(silent) == ""
    assert EXPECTED not in page([silent])


def test_a_chart_may_have_a_logarithmic_axis_of_tokens(tmp_path):
    x = np.array([1e5, 1e6, 1e7])
    chart = Chart("t", [Curve("c", (x, x), 0)], "tokens", is_log_x=True)
    along, _ = chart.scales()
    assert_close(along.fractions(x), [0.0, 0.5, 1.0])
    path = re.search(r'class="line"[^>]* d="M([^"]*)"', chart.html(COLORS, 100))[1]
    assert [point.split(",")[0] for point in path.replace("h0", "").split("L")] == [
        "0.0",
        "500.0",
        "1000.0",
    ]
