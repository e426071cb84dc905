"""Reports of runs as they are found on disk: torn, strange, several, short and long. Groups of
seeds: means and differences are scipy's."""

import json
import math
import re
import sys
from html import escape

import numpy as np
import pytest
from close import assert_close
from commands import expect_error, launch
from report_runs import BATCH, HOSTILE, START, make_run, metrics, page_of, write_rows

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.files import read_json
from gpt2_ddp.reports.groups import compare, content, critical_value, describe, group_runs
from gpt2_ddp.reports.picture import draw
from gpt2_ddp.reports.report import report, write_report
from gpt2_ddp.reports.runs import read_runs


@pytest.fixture
def unpainted(monkeypatch):
    """Pages without a picture: to paint one takes half a second."""
    monkeypatch.setattr("gpt2_ddp.reports.report.as_png", lambda figure: b"")


CELLS = {
    "state": ["stopped: SIGTERM"],
    "step": ["300"],
    "tokens": ["153,600"],
    "loss_mean": ["3.2"],
    "val_loss": ["3"],
    "val_bits_per_byte": ["1.25"],
    "best val_loss": ["2 at step 200"],
    "tokens_per_second": ["256"],
    "rhymes": ["0.125 at step 250"],
    "optim.lr": ["0.001"],
    "order_digest": ["e1" + "0" * 62],
    "command": ["train_gpt2.py --seed 7"],
    "versions": ["torch 2"],
}


def test_values_are_the_files_own(tmp_path):
    found = metrics(30)
    # not the best: it scored fewer tokens than the last
    found[10] |= {"val_loss": 1.0, "val_tokens": 50}
    for number, bad in ((5, None), (15, -math.inf), (29, math.nan)):  # not the best either
        found[number] |= {"loss": bad, "grad_norm": bad, "val_loss": bad, "mfu": None}
    found[25]["rhymes"] = 0.125
    run = make_run(tmp_path / "run", [START, *found])
    page = page_of(run)
    for label, cells in CELLS.items():
        assert page.rows[label] == cells
    assert "the last sample" in page.text
    assert (run / "report.png").read_bytes().startswith(b"\x89PNG")
    # no temporary left
    assert sorted(file.name for file in run.glob("*report*")) == ["report.html", "report.png"]
    assert not re.search("<(link|iframe|img)", page.source)
    assert not re.search(r"(href=\"|url\(|src=\")|@import", page.source)
    assert page_of(run).source == page.source  # the same metrics give the same bytes


def test_user_text_is_escaped(tmp_path):
    names = ("a<b>&$x$ $\\foo$", "other", "again")
    run, other, again = (make_run(tmp_path / name, metrics(3)) for name in names)
    write_rows(run, metrics(3), [{"step": 9, "text": HOSTILE + "\ud800", "prompt": HOSTILE}])
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": HOSTILE}))
    for seed, place in enumerate((run, again)):  # a group
        (place / "config.yaml").write_text(json.dumps({"seed": seed, "optim": {"lr": HOSTILE}}))
    page = page_of(run, other, run, again)
    assert "<script>alert" not in page.source
    assert (page.rows[""], page.rows["optim.lr"]) == ([*names], [HOSTILE, "0.001", HOSTILE])
    assert page.source.count(f"<td>{escape(HOSTILE)}</td>") >= 4
    assert page.rows["state"][0] == f"failed: {HOSTILE}"
    assert escape(HOSTILE) in page.source


@pytest.mark.parametrize(
    "rows",
    [
        metrics(0),
        [{"step": i, "loss": 1.0 - i / 10} for i in range(11)],
        [{"step": 3, "loss": None}],
    ],
)
def test_rows_that_hold_little(tmp_path, rows):
    assert page_of(make_run(tmp_path / "run", rows)).rows["step"] == [str(rows[-1]["step"])]


def test_long_runs_make_small_pages(tmp_path):
    run = make_run(tmp_path / "run", metrics(5000, every=1))
    write_rows(
        run, metrics(5000, every=1), [{"step": step, "text": "x" * 9000} for step in range(50)]
    )
    page = page_of(run)
    assert len(page.source) < 400_000
    assert re.findall(r"<summary>step (\d+)<", page.source) == [
        str(step) for step in range(49, 37, -1)
    ]


def test_mistakes_and_where_the_page_is(tmp_path, capsys, unpainted):
    run, other, torn = (
        make_run(tmp_path / name, metrics(3)) for name in ("runs/good", "other", "torn")
    )
    (torn / "metrics.jsonl").write_text('{"step": 0')
    for wrong in ([run.parent / "nothing"], [run, run.parent], [torn]):
        expect_error(f"runs = {wrong[-1]}", write_report, wrong, tmp_path)
    expect_error("runs = ", ReportConfig, runs=())
    expect_error("output = .*/metrics.jsonl", write_report, [run], run / "metrics.jsonl")
    assert not (tmp_path / "report.html").exists()
    for runs in ([run], [run, other]):
        assert report(ReportConfig(runs=tuple(map(str, runs)))) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n{run / 'comparison.html'}\n"


def test_a_small_job_counts_samples(tmp_path, unpainted):
    rows = [
        {"step": step, "samples": 12 * step, "samples_per_second": 500.0, "loss": 2.0 / step}
        for step in (1, 2, 3)
    ]
    job = make_run(tmp_path / "job", rows)
    gpt = make_run(tmp_path / "gpt", metrics(3))
    page = page_of(job, gpt)
    assert "python scripts/explain.py A B" in page.text
    assert "explain.py" not in page_of(job).text
    assert (page.rows["samples"], page.rows["samples_per_second"]) == (["36", "–"], ["500", "–"])


def test_curves_are_the_rows(tmp_path):
    rows = metrics(30)
    rows[7] |= {"grad_norm": None}
    loss, *panels = draw(read_runs([make_run(tmp_path / "run", rows)])).axes
    lines = [loss.lines[1], *(panel.lines[0] for panel in panels)]
    for metric, line in zip(("loss", "lr", "grad_norm", "tokens_per_second"), lines, strict=True):
        logged = np.array([(row["step"], row[metric]) for row in rows if metric in row], float)
        assert np.array_equal(np.isnan(line.get_ydata()), np.isnan(logged[:, 1]))
        assert_close(np.nan_to_num(line.get_xydata()), np.nan_to_num(logged))


def test_loss_is_the_mean_since_the_row_before(tmp_path):
    rows = metrics(4)
    rows[2] |= {"loss_mean": 5.5}
    rows[3] |= {"loss_mean": 5.0, "loss": None}
    rows[4] |= {"loss_mean": None}
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert np.array_equal(run.series("loss_mean")[1], [9.0, 5.5, math.nan, 4.5], equal_nan=True)


def test_tokenizers_that_differ(tmp_path, unpainted):
    one, other, same = (
        make_run(tmp_path / name, [START | {"tokenizer_sha256": name[-1]}, *metrics(10)])
        for name in ("1", "2", "3/1")
    )
    never = make_run(tmp_path / "never", [{"step": 10, "loss": 1.0}])
    loss = draw(read_runs([one, other, never])).axes[0]
    assert {*np.concatenate([line.get_ydata() for line in loss.lines])} == {1.25}
    page = page_of(one, same, never)
    title = draw(read_runs([one, same, never])).axes[0].get_title("left")
    assert "nats per token" in title  # what is not known is not another
    assert page.rows[""] == ["1", "3/1", "never"]


def test_what_a_run_is_drawn_along(tmp_path):
    rows = metrics(3)
    doubled = [row | {"tokens": 2 * row["tokens"]} for row in rows]
    all_rows = [
        rows,
        rows,
        doubled,
        [{"step": 1, "loss": 1.0}],
        [{"step": 1, "loss": 1.0, "tokens": math.inf}],
    ]
    run, *others = [make_run(tmp_path / str(number), rows) for number, rows in enumerate(all_rows)]
    for other, label in zip(others, ("step", "tokens", "step", "step"), strict=True):
        loss = draw(read_runs([run, other])).axes[0]
        assert (loss.get_xlabel(), loss.dataLim.x1) == (
            label,
            60 * BATCH if label == "tokens" else 30,
        )


def test_events_are_no_rows(tmp_path):
    rows = metrics(30)[21:]
    rows.insert(0, {"event": "branch", "step": 200, "of": "runs/x"})
    rows.insert(4, {"event": "start", "step": 230})
    rows.insert(6, {"event": "rollback", "step": 230})
    rows.append({"event": "of the future", "step": 300})
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert [row["step"] for row in run.rows] == [210, 220, 230, *range(250, 301, 10)]


DEEP = "[" * 400 + "]" * 400
STRANGE = [
    ("metrics.jsonl", '{"step": 40, "loss": 1.2'),
    *(("metrics.jsonl", f'{{"step": 50, "loss": {value}}}') for value in ("1" * 400, DEEP)),
    *(
        ("metrics.jsonl", f'{{"step": {step}, "loss": 1}}')
        for step in ("NaN", "-1", "1e300", "1e-320")
    ),
    ("metrics.jsonl", f'{{"event": "sample", "step": 50, "text": "x", "prompt": {DEEP}}}'),
    *(("config.yaml", text) for text in ("model: [", "seed: " + DEEP[300:-300] * 2, "seed: *x")),
    ("status.json", f'{{"state": {DEEP}}}'),
]


def test_strange_content_is_left_out_and_said(tmp_path):
    run = make_run(tmp_path / "run", metrics(4))
    for name, line in STRANGE:
        before = (run / name).read_text()
        (run / name).write_text(f"{before}{line}\n" if name.endswith(".jsonl") else line)
        (note,) = read_runs([run])[0].notes
        assert note.startswith(f"{name}: unreadable"), line
        (run / name).write_text(before)
    (run / "status.json").unlink()
    assert "run: status.json: missing" in page_of(run).text
    (run / "status.json").write_text('{"state": "running", "step": 1e999}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("""{"step": 50, "event": "branch", "tokens": "text"}
{"step": 50, "loss": 1e308, "lr": "x", "tokens": Infinity, "tokens_per_second": 1e-320}
{"step": 60, "val_loss": -1e308, "loss": 1e-300, "grad_norm": 1e308, "mfu": []}
""")
        file.writelines(
            f'{{"step": 60, "event": "length"{more}}}\n'
            for more in ("", ', "steps": 4', ', "steps": []')
        )
    assert "unreadable lines" not in page_of(run).text


def test_a_report_needs_neither_torch_nor_a_display(tmp_path):
    source = (
        "import sys; from gpt2_ddp.reports.report import *; write_report([Path(sys.argv[1])], "
        "Path(sys.argv[1]))"
    )
    source += "; sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", source, make_run(tmp_path / "run", metrics(3))]
    assert launch(words, DISPLAY="", MPLBACKEND="").returncode == 0


# Groups of seeds


ONE = {1: 3.31, 2: 3.27, 3: 3.42}
TWO = {1: 3.22, 2: 3.21, 3: 3.30}


class Runs:
    """Run folders in a folder: `add` makes some, `content` reads all."""

    def __init__(self, folder):
        self.folder = folder
        self.paths = []

    def add(self, losses, lr=1e-3, state="completed", **last):
        """Runs with these seeds and last losses."""
        for seed, loss in losses.items():
            rows = [
                {"step": step, "tokens": step, "loss": 3 + step / 9 * seed}
                for step in range(0, 201, 10)
            ]
            if loss is not None:
                rows[5] |= {"val_loss": 0.1, "val_bits_per_byte": 0.1, "val_tokens": 5}
                rows[-1] |= {
                    "val_loss": loss,
                    "val_bits_per_byte": loss / 3,
                    "val_tokens": 999,
                } | last
            if "tokenizer" in last:
                rows.insert(0, START | {"tokenizer_sha256": last["tokenizer"]})
            self.paths.append(
                make_run(
                    self.folder / f"run{len(self.paths)}",
                    rows,
                    state,
                    seed=seed,
                    **{"optim.lr": lr},
                )
            )

    def content(self):
        return content(group_runs(read_runs(self.paths)))


@pytest.fixture
def runs(tmp_path):
    return Runs(tmp_path / "runs")


# a loss of another seed does not count
@pytest.mark.parametrize("other", [TWO, {2: 3.2, 3: 3.5, 9: 1.0}])
def test_differences_are_scipys(other):
    stats = pytest.importorskip("scipy.stats")
    found = compare(ONE, other)
    shared = ONE.keys() & other.keys()
    a, b = ([each[seed] for seed in shared] for each in (ONE, other))
    test = stats.ttest_rel(b, a)
    assert_close(
        (found.difference, found.difference / found.standard_error),
        (np.mean(b) - np.mean(a), test[0]),
    )
    assert (found.n, found.differs) == (len(shared), test[1] < 0.05)
    assert_close(found.interval, test.confidence_interval())
    assert_close(compare(ONE, other, 7).interval, test.confidence_interval(1 - 0.05 / 7))
    for level, freedom in ((0.95, 9), (0.99, 4)):
        assert_close(critical_value(level, freedom), stats.t.ppf((1 + level) / 2, freedom))


def test_left_out_runs_are_named(runs):
    runs.add(ONE)
    runs.add(TWO | {4: 3.1}, lr=2e-3)
    runs.add({1: 3.24}, lr=2e-3)  # equal seeds count as one
    for state in ("diverged", "failed", "stopped"):
        runs.add({4: 9.0}, lr=2e-3, state=state)
    runs.add({5: math.nan}, lr=2e-3)
    runs.add({6: None, 7: None}, lr=3e-3)
    runs.add({2: 4.0}, lr=4e-3)
    runs.add({9: 4.0}, lr=5e-3)
    first, second, _, single, _ = groups = runs.content()
    losses = np.array([*ONE.values()])
    assert_close((first["mean"], first["sd"]), (losses.mean(), losses.std(ddof=1)))
    assert_close(second["mean"], np.mean([3.23, 3.21, 3.30, 3.1]))
    assert (second["completed"], second["n"], second["difference"]["n"]) == (6, 4, 3)
    assert (single["sd"], single["difference"]["standard_error"]) == (None, None)
    differences = [group["difference"]["difference"] for group in groups[2:]]
    assert_close(differences.pop(1), 4 - ONE[2])
    assert differences == [None, None]
    lines = "\n".join(describe(group_runs(read_runs(runs.paths))))
    for remark in (
        "run8: diverged",
        "run9: failed",
        "run10: stopped",
        "run11: no finite",
        "run12: no finite",
    ):
        assert remark in lines


def test_what_does_not_compare(runs):
    runs.add(ONE)
    runs.add(TWO, lr=2e-3, val_tokens=512)
    runs.add({1: 3.0}, lr=3e-3)
    runs.add({2: 3.0}, lr=3e-3, val_tokens=512)
    _, second, mixed = runs.content()
    assert (second["difference"]["difference"], mixed["mean"]) == (None, None)


def test_bits_per_byte_compare_where_the_tokenizers_differ(runs):
    runs.add(ONE, tokenizer="1")
    runs.add(TWO, lr=2e-3, tokenizer="2")
    first, second = runs.content()
    losses = np.array([*ONE.values()]) / 3
    assert_close((first["mean"], first["sd"]), (losses.mean(), losses.std(ddof=1)))
    assert (second["score"], second["difference"]["n"]) == ("val_bits_per_byte", 3)


HEADINGS = [
    ("optim.lr=1, optim.y=null", {"optim.lr": 1, "optim.y": None}, 2),
    ("optim.lr=1", {"optim.lr": 1}, 1),
    ("optim.lr=1.0", {"optim.lr": 1.0}, 1),
    ("run4", {}, 1),
]


def test_headings_are_the_fields_that_differ(runs):
    runs.add(dict.fromkeys(range(5), 3.0))
    for number, (path, text) in enumerate(
        zip(runs.paths, ["1, y: null", "1, y: null", "1", "1.0", "{"], strict=True)
    ):
        (path / "config.yaml").write_text(
            f"seed: {number}\nrun_name: r{number}\ntokens: 5\noptim: {{lr: {text}}}"
        )
    found = [(group["heading"], group["fields"], len(group["runs"])) for group in runs.content()]
    assert found == HEADINGS


def test_where_files_are_is_no_difference(runs):
    """Mirrors and recipes never are, and the folder
    of the data is none if the data are the same."""
    runs.add({1: 3.0, 2: 3.1, 3: 3.2})
    for number, (path, data) in enumerate(zip(runs.paths, "aab", strict=True)):
        text = f"data: {{path: [data/{number}], prepare: {number}.yaml}}\ncheckpoint: {{mirror: file:///x/{number}}}\n"
        (path / "config.yaml").write_text(text)
        (path / "metrics.jsonl").write_text(
            f'{json.dumps(START | {"data_manifest": data})}\n{{"step": 1, "loss": 1}}\n'
        )
    pair = runs.paths[:2]
    alone = runs.paths[1:]
    assert [group.heading for group in group_runs(read_runs(pair))] == ["run0"]
    assert [group.heading for group in group_runs(read_runs(alone))] == [
        f"data.path=['data/{n}']" for n in (1, 2)
    ]


LABELS = [
    ("x/one, three, two, 1 more", 44, "x/one, three, two, 1 more: optim.lr=0.1 …"),
    ("x/one, three, two, 1 more", 27, "x/one, three, two, 1 more …"),
    ("x/one, three, two, 1 more", 90, "x/one, three, two, 1 more: optim.lr=0.1, model.n_embd=64"),
]


def test_a_legend_has_names_and_then_whole_fields(runs):
    runs.add(dict.fromkeys(range(4), 3.0), lr=0.1)
    runs.add({0: 3.0}, lr=0.2)
    found = read_runs(runs.paths)
    first, other = group_runs(found)
    assert [first.names, other.names] == ["run0, run1, run2, 1 more", "run4"], (
        "too little is common"
    )
    texts = [text.get_text() for text in draw(found).legends[0].get_texts()]
    assert texts == [f"{first.names}: optim.lr=0.1", "run4: optim.lr=0.2"]
    assert describe([first, other])[2].strip() == first.label(128)
    first.fields["model.n_embd"] = 64
    for run, name in zip(first.runs, ("x/one", "three", "two", "four"), strict=True):
        object.__setattr__(run, "name", name)
    for names, most, label in LABELS:
        assert (first.names, first.label(most)) == (names, label)
        assert len(label) <= most
    for number, run in enumerate(first.runs):
        object.__setattr__(run, "name", f"web-lr_0.1-seed_{number}")
    assert first.label(72) == "web-lr_0.1-seed_* (4 runs): optim.lr=0.1, model.n_embd=64"


def test_memory_is_in_gigabytes_and_values_come_before_samples(tmp_path, unpainted):
    found = metrics(30)
    for number, row in enumerate(found[1:]):
        row["memory"] = 2.5e9 + number
    run = make_run(tmp_path / "run", [START, *found])
    page = page_of(run)
    assert page.rows["memory"] == ["2.5 GB"]
    parts = ("best val_loss", "the last sample", "train_gpt2.py --seed")
    places = [page.text.rindex(part) for part in parts]
    assert places == sorted(places)
    (panel,) = (axes for axes in draw(read_runs([run])).axes if "(GB)" in axes.get_title("left"))
    assert_close(panel.lines[0].get_ydata(), 2.5 + np.arange(30) / 1e9)
    assert panel.get_ylim()[1] > 2.6, "the curve is below the frame"


def test_json_has_no_nan(runs, unpainted):
    runs.add({1: 3.25})
    runs.add({5: math.nan, 6: math.inf}, lr=2e-3, state="diverged")
    output = runs.folder / "x.json"
    assert report(ReportConfig(runs=tuple(map(str, runs.paths)), output=str(output))) == 0
    assert sorted(file.name for file in runs.folder.glob("x.*")) == ["x.html", "x.json", "x.png"]
    assert "NaN" not in output.read_text()
    found = read_json(output)["groups"]
    assert found == runs.content()
    assert [(group["n"], group["completed"], len(group["runs"])) for group in found] == [
        (1, 1, 1),
        (0, 0, 2),
    ]


def test_a_group_has_a_colour(runs):
    runs.add({1: 3.31, 2: 3.27})
    runs.add({1: 3.0}, lr=2e-3)
    figure = draw(read_runs(runs.paths))
    assert [line.get_color() for line in figure.legends[0].get_lines()] == ["C0", "C1"]
    # after the legend's
    assert [line.get_color() for line in figure.axes[0].lines[1:4]] == ["C0", "C0", "C1"]
