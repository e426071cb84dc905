"""Reports of runs as they are found on disk: complete, torn, strange, several, very short and very long."""

import json
import math
import os
import re
import subprocess
import sys
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from close import assert_close
from commands import expect_error
from runs import training_config

from gpt2_ddp.checkpoint.run_files import valid_rows
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.reports.picture import draw, thin
from gpt2_ddp.reports.report import report, write_report
from gpt2_ddp.reports.runs import read_runs

BATCH = 512
SCORED = {"val_tokens": 999, "val_bits_per_byte": 1.25}
START = {"event": "start", "step": 0, "command": "train_gpt2.py --seed 7", "versions": {"torch": "2"}}
HOSTILE = '</pre><script>alert("x")</script> & $\\foo$'


def metrics(n_rows: int, every: int = 10) -> list[dict]:
    """The step-0 evaluation and n_rows logged steps; every fifth is evaluated, the row of step 200 is the best."""
    rows: list[dict] = [{"step": 0, "tokens": 0, "val_loss": 9.0, **SCORED}]
    for i in range(1, n_rows + 1):
        step = i * every
        row = {"step": step, "tokens": step * BATCH, "loss": 3 + 6 / i, "lr": 1e-3, "grad_norm": 1 / i}
        row |= {"tokens_per_second": 256.0, "mfu": 0.25, "order_digest": f"{i:064x}"[::-1]}
        rows.append(row | ({"val_loss": 2 + abs(i - 20) / 10, **SCORED} if i % 5 == 0 else {}))
    return rows


def write_rows(run: Path, rows: list[dict], file: str = "metrics.jsonl") -> None:
    (run / file).write_text("\n".join([*map(json.dumps, rows), ""]))


def make_run(folder: Path, rows: list[dict], seed: int = 7, lr: float = 1e-3, state: str = "stopped") -> Path:
    folder.mkdir(parents=True)
    config = training_config(Path("data"), folder, {"seed": seed, "optim.lr": lr, "train.steps": 300})
    (folder / "config.yaml").write_text(dump(config))
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 300, "reason": "SIGTERM"}))
    write_rows(folder, [{"step": 300, "text": "the last sample"}], "samples.jsonl")
    write_rows(folder, rows)
    return folder


class Page(HTMLParser):
    """A page's text, tag names, and all rows of its tables by their first cell."""

    def __init__(self, file: Path):
        super().__init__()
        self.rows, self.tags, self.text, self.row = {}, [], "", [""]
        self.source = file.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.row = []
        elif tag in ("th", "td"):
            self.row.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "tr":
            self.rows.setdefault(self.row[0], self.row[1:])

    def handle_data(self, data: str) -> None:
        self.text += data
        self.row[-1] += data


def page_of(*runs: Path, axis: str = "auto") -> Page:
    return Page(write_report([*runs], runs[0], axis))


def texts(*runs: Path) -> str:
    """All that is written in the figure."""
    return "\n".join(re.findall(r"<text[^>]*>([^<]*)</text>", page_of(*runs).source))


def test_values_are_the_files_own(tmp_path: Path) -> None:
    found = metrics(30)
    found[10] |= {"val_loss": 1.0, "val_tokens": 50}  # not the best: it scored fewer tokens than the last
    found[25]["rhymes"] = 0.125
    run = make_run(tmp_path / "run", [START, *found])
    page = page_of(run)
    wanted = {
        "state": "stopped: SIGTERM", "step": "300", "tokens": f"{300 * BATCH:,}", "loss_mean": "3.2",
        "val_loss": "3", "val_bits_per_byte": "1.25", "perplexity of val_loss": f"{math.exp(3):.5g}",
        "best val_loss": "2 at step 200", "tokens_per_second (median)": "256", "mfu (median)": "0.25",
        "time in training steps": "10 min 00 s", "rhymes": "0.125 at step 250", "optim.lr": "0.001", "seed": "7",
        "order_digest": f"{30:064x}"[::-1], "command": "train_gpt2.py --seed 7", "versions": "torch 2",
    }  # fmt: skip
    assert {label: page.rows[label] for label in wanted} == {label: [cell] for label, cell in wanted.items()}
    assert "the last sample" in page.text
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in run.glob("*report*")) == ["report.html", "report.png"]  # no temporary left
    assert not {"script", "link", "img", "iframe"} & {*page.tags}
    assert not re.search(r"(href=\"|url\()(?!#)|@import", page.source)
    assert page_of(run).source == page.source, "the same metrics give the same bytes"


def test_user_text_is_escaped(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "a<b>&$x$ $\\foo$", metrics(3)), make_run(tmp_path / "other", metrics(3), lr=0.5)
    write_rows(run, [{"step": 9, "text": HOSTILE + "\ud800", "prompt": HOSTILE}], "samples.jsonl")
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": HOSTILE}))
    (run / "config.yaml").write_text(json.dumps({"seed": HOSTILE, "optim": {"lr": HOSTILE}}))
    page = page_of(run, other, run)
    assert "script" not in page.tags
    assert (page.rows[""], page.rows["optim.lr"]) == ([run.name, "other"], [HOSTILE, "0.5"])
    assert page.rows["state"][0] == f"failed: {HOSTILE}"
    assert escape(HOSTILE) in page.source


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name / "run", metrics(20), seed) for name, seed in (("a", 1), ("b", 2))]
    rows = page_of(*runs).rows
    assert (rows[""], rows["seed"]) == (["a/run", "b/run"], ["1", "2"])
    assert "b/run" in texts(*runs)


@pytest.mark.parametrize(("bad", "shown"), [(None, "nan"), (math.inf, "inf")])
def test_numbers_that_are_not_finite(tmp_path: Path, bad: float | None, shown: str) -> None:
    rows = metrics(30)
    for row in (rows[12], rows[30]):
        row |= {"loss": bad, "grad_norm": bad, "val_loss": bad, "mfu": None}
    run = make_run(tmp_path / "run", rows)
    found = page_of(run).rows
    assert (found["best val_loss"], found["loss_mean"]) == (["2 at step 200"], [shown])
    assert "not a finite number" in texts(run), "the key of crosses in the figure"


@pytest.mark.parametrize("rows", [
    metrics(0), metrics(1), [{"step": i, "loss": 1.0 - i / 10} for i in range(11)], [{"step": 3, "loss": None}],
])  # fmt: skip
def test_rows_that_hold_little(tmp_path: Path, rows: list[dict]) -> None:
    assert page_of(make_run(tmp_path / "run", rows)).rows["step"] == [str(rows[-1]["step"])]


def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    rows = metrics(20_000, every=1)
    for row, value in zip(rows, np.random.default_rng(0).lognormal(size=20_001).tolist(), strict=True):
        row |= {"loss": value, "grad_norm": value, "tokens_per_second": value}
    run = make_run(tmp_path / "run", rows)
    write_rows(run, [{"step": step, "prompt": "<i>", "text": "x" * 9000} for step in range(50)], "samples.jsonl")
    page = page_of(run)
    assert len(page.source) < 400_000
    assert re.findall(r"<summary>step (\d+)<", page.source) == [str(step) for step in range(49, 37, -1)]
    assert "<b>&quot;&lt;i&gt;&quot;</b><pre>xx" in page.source


def test_thinning_keeps_the_extremes() -> None:
    values = np.random.default_rng(0).normal(size=20_000)
    values[7000] = np.nan
    kept = {*thin(values, 600).tolist()}
    assert len(kept) <= 1802
    assert {0, 7000, 19_999} <= kept
    for part in np.array_split(np.arange(20_000), 600):
        assert {part[np.nanargmin(values[part])], part[np.nanargmax(values[part])]} <= kept
    assert [*thin(values[:7], 3)] == [*range(7)]


def test_mistakes_and_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run, other, torn = (make_run(tmp_path / name, metrics(3)) for name in ("runs/good", "other", "torn"))
    (torn / "metrics.jsonl").write_text('{"step": 0')
    for wrong in ([run.parent / "nothing"], [run, run.parent], [torn]):
        expect_error(f"runs = {wrong[-1]}", write_report, wrong, tmp_path)
    expect_error("runs = ", report, ReportConfig(runs=()))
    expect_error("output = .*/metrics.jsonl", write_report, [run], run / "metrics.jsonl")
    assert not (tmp_path / "report.html").exists()
    for runs in ([run], [run, other]):
        assert report(ReportConfig(runs=tuple(map(str, runs)))) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{run / 'comparison.html'}\n"


def test_a_small_job_counts_samples(tmp_path: Path) -> None:
    rows = [{"step": step, "samples": 12 * step, "samples_per_second": 500.0, "loss": 2.0 / step} for step in (1, 2, 3)]
    rows[-1] |= {"val_loss": 0.5, "val_accuracy": 0.75, "val_samples": 31}
    job, gpt = make_run(tmp_path / "job", rows), make_run(tmp_path / "gpt", metrics(3))
    page = page_of(job, gpt)
    wanted = {"samples": "36", "samples_per_second (median)": "500", "val_accuracy": "0.75"}
    assert {label: page.rows[label] for label in wanted} == {label: [cell, "–"] for label, cell in wanted.items()}
    assert "Throughput (samples per second)" in texts(job)


@pytest.mark.parametrize("axis", ["steps", "tokens", "time"])
def test_curves_are_the_rows(tmp_path: Path, axis: str) -> None:
    rows = metrics(30)
    rows[7] |= {"grad_norm": None}
    along = {"steps": 1, "tokens": BATCH, "time": BATCH / 256 / 60}[axis]
    loss, lr, norm, speed = draw(read_runs([make_run(tmp_path / "run", rows)]), axis).axes
    drawn = {"loss": loss.lines[1], "lr": lr.lines[0], "grad_norm": norm.lines[0], "tokens_per_second": speed.lines[0]}
    for metric, line in drawn.items():
        logged = np.array([(row["step"] * along, row[metric]) for row in rows if metric in row], float)
        assert np.array_equal(np.isnan(line.get_ydata()), np.isnan(logged[:, 1]))
        assert_close(np.nan_to_num(line.get_xydata()), np.nan_to_num(logged))


def test_loss_is_the_mean_since_the_row_before(tmp_path: Path) -> None:
    rows = metrics(4)
    rows[2] |= {"loss_mean": 5.5}
    rows[3] |= {"loss_mean": 5.0, "loss": None}
    rows[4] |= {"loss_mean": None}
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert np.array_equal(run.series("loss_mean")[1], [9.0, 5.5, math.nan, 4.5], equal_nan=True)


def test_tokenizers_that_differ(tmp_path: Path) -> None:
    one, other, same = (
        make_run(tmp_path / name, [START | {"tokenizer_sha256": name[-1]}, *metrics(10)]) for name in ("1", "2", "3/1")
    )
    never = make_run(tmp_path / "never", [{"step": 10, "loss": 1.0}])
    loss = draw(read_runs([one, other, never])).axes[0]
    assert {*np.concatenate([line.get_ydata() for line in loss.lines])} == {1.25}
    assert "nats per token" in texts(one, same, never), "what is not known is not another"


def test_what_a_run_is_drawn_along(tmp_path: Path) -> None:
    rows = metrics(3)
    all_rows = [rows, rows, [row | {"tokens": 2 * row["tokens"]} for row in rows], [{"step": 1, "loss": 1.0}]]
    run, *others = [make_run(tmp_path / str(number), rows) for number, rows in enumerate(all_rows)]
    for other, label in zip(others, ("step", "tokens", "step"), strict=True):
        assert draw(read_runs([run, other])).axes[0].get_xlabel() == label
    expect_error(f"axis = time: .*{others[-1].name}", write_report, [run, others[-1]], tmp_path, "time")


def test_events_are_no_rows(tmp_path: Path) -> None:
    rows = metrics(30)[21:]
    rows.insert(0, {"event": "branch", "step": 200, "of": "runs/x"})
    rows.insert(4, {"event": "start", "step": 230})
    rows.insert(6, {"event": "rollback", "step": 230})
    rows[-4]["not_finite"] = 2
    rows.append({"event": "of the future", "step": 300})
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert [row["step"] for row in run.rows] == [210, 220, 230, *range(250, 301, 10)]
    assert_close(run.clock[1][-1], 100 * BATCH / 256)
    legend = str(draw([run], "time").axes[0].get_legend().texts)  # pyright: ignore[reportOptionalMemberAccess]
    assert all(key in legend for key in ("resumed", "rollback to this step", "not a finite number"))


HUGE, DEEP = "1" * 400, "[" * 400 + "]" * 400
CLASSES = '{"step": 30, "classes": ["a", "b"], "confusion": %s}'
STRANGE = [
    ("metrics.jsonl", '{"step": 40, "loss": 1.2'),
    *(("metrics.jsonl", f'{{"step": 50, "loss": {value}}}') for value in (HUGE, DEEP)),
    *(("metrics.jsonl", f'{{"step": {step}, "loss": 1}}') for step in ("NaN", "-1", "1e300", "1e-320")),
    ("samples.jsonl", f'{{"step": 50, "text": "x", "prompt": {DEEP}}}'),
    *(("config.yaml", text) for text in ("model: [", "seed: " + DEEP[300:-300] * 2, "seed: !!timestamp 2024-99-01")),
    ("status.json", f'{{"state": {DEEP}}}'),
    *(("classes.json", CLASSES % counts)
      for counts in ('[{"0": 1}, 1.5]', '[{"0": "x"}, {}]', '[{"0": 1}, {"2": 1}]', '[{"0": 1}]')),
]  # fmt: skip


def test_strange_content_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics(4))
    classes = run / "evaluations/step-00000030/classes.json"
    classes.parent.mkdir(parents=True)
    for name, line in STRANGE:
        path = classes if name == classes.name else run / name
        before = path.read_text() if path.exists() else ""
        path.write_text(f"{before}{line}\n" if path.suffix == ".jsonl" else line)
        (note,) = read_runs([run])[0].notes
        assert note.startswith(f"{name}: unreadable"), line
        path.write_text(before)
        classes.unlink(missing_ok=True)
    assert read_runs([run])[0].notes == []
    (run / "status.json").unlink()
    os.mkfifo(classes)
    assert "run: status.json: missing" in page_of(run).text
    (run / "status.json").write_text('{"state": "running", "step": 1e999}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("""{"step": 50, "event": "branch", "tokens": "text"}
{"step": 50, "loss": 1e308, "lr": "x", "tokens": Infinity, "tokens_per_second": 1e-320}
{"step": 60, "val_loss": -1e308, "loss": 1e-300, "grad_norm": 1e308, "mfu": []}
""")
    for axis in ("steps", "tokens", "time"):
        assert "unreadable lines" not in page_of(run, axis=axis).text


def test_a_report_needs_neither_torch_nor_a_display(tmp_path: Path) -> None:
    source = "import sys; from gpt2_ddp.reports.report import *; write_report([Path(sys.argv[1])], Path(sys.argv[1]))"
    source += "; sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", source, make_run(tmp_path / "run", metrics(3))]
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "MPLBACKEND")}
    subprocess.run(words, env=environment, check=True)


def test_many_rollbacks_take_no_long_time() -> None:
    rows = [{"step": step} for step in range(20_000)] + [{"event": "rollback", "step": 10_000}] * 20_000
    assert valid_rows(rows) == rows[:10_001]
