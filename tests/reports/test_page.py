"""The page of a report: its first lines, curves equal to the rows, marks, tables, settings; small
for large runs, safe for a stranger's."""

import json
import math
import os
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

import numpy as np
import pytest
from close import assert_close
from report_runs import HOSTILE, START, make_run, metrics, page_of
from safetensors.numpy import save_file

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.reports import report, runs, status
from gpt2_ddp.reports.chart import BOX, Chart, Curve, Mark, Scale, merged, short, thin
from gpt2_ddp.reports.curves import Curves
from gpt2_ddp.reports.groups import group_runs
from gpt2_ddp.reports.headline import count_parameters, facts, next_step, training_seconds
from gpt2_ddp.reports.history import happenings
from gpt2_ddp.reports.picture import COLORS
from gpt2_ddp.reports.report import page
from gpt2_ddp.reports.runs import read_runs
from gpt2_ddp.reports.settings import changed_settings, shipped
from gpt2_ddp.reports.several import groups_of, overview
from gpt2_ddp.reports.tables import Table
from gpt2_ddp.reports.values import count_text, duration_text

LIMIT = 300_000
"""Most bytes of a page."""


@pytest.fixture(autouse=True)
def unpainted(monkeypatch):
    """No pictures: to paint one takes half a second."""
    monkeypatch.setattr("gpt2_ddp.reports.report.as_png", lambda figure: b"")
    monkeypatch.setattr("gpt2_ddp.reports.report.draw", lambda runs: None)


class Parsed(HTMLParser):
    """A page as a browser reads it: its tags with their attributes, and the text of scripts."""

    def __init__(self, source):
        super().__init__()
        self.tags = []
        self.scripts = []
        self.feed(source)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script" and self.cdata_elem:
            self.scripts.append((self.tags[-1][1].get("type"), data))


def drawn(html, up, along):
    """The points of each path of a chart, in the units of its axes; None before a gap."""
    paths = re.findall(r'<path class="(line|faint|points|undone)"[^>]* d="([^"]*)"', html)
    found = []
    for _, path in paths:
        points = []
        for command, x, y in re.findall(r"([ML])([-\d.]+),([-\d.]+)", path):
            x_value = along.low + float(x) / BOX * (along.high - along.low)
            fraction = 1 - float(y) / BOX
            if up.is_log:
                y_value = up.low * (up.high / up.low) ** fraction
            else:
                y_value = up.low + fraction * (up.high - up.low)
            points.append((command, x_value, y_value))
        found.append(points)
    return found


@pytest.mark.parametrize("metric", ["loss", "lr", "grad_norm", "tokens_per_second"])
def test_points_are_the_rows(tmp_path, metric):
    rows = metrics(30)
    rows[7] |= {"grad_norm": None, "loss": math.inf}
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    curves = Curves([run])
    charts = [curves.loss(), *curves.others()]
    chart = charts[["loss", "lr", "grad_norm", "tokens_per_second"].index(metric)]
    html = chart.html(COLORS, 1000)
    along, up = chart.scales()
    logged = [(row["step"], row[metric]) for row in rows if metric in row]
    finite = [(x, y) for x, y in logged if y is not None and math.isfinite(y)]
    points = drawn(html, up, along)[0]
    assert_close(np.array(points)[:, 1:].astype(float), np.array(finite), 2e-3)
    gaps = [number for number, (command, *_) in enumerate(points) if command == "M"]
    assert gaps == ([0, 6] if metric in ("loss", "grad_norm") else [0])
    data = json.loads(re.search(r'application/json">(.*?)</script>', html)[1])
    shown = data["curves"][0]
    assert shown["x"] == [x for x, _ in logged]
    expected = [y if y is not None and math.isfinite(y) else None for _, y in logged]
    assert shown["y"] == [y if y is None else float(f"{y:.6g}") for y in expected]


def test_thinned_curves_keep_ends_extremes_and_gaps():
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[54_321] = 77.0
    y[12_345] = -77.0
    y[70_000] = math.nan
    kept_x, kept_y = thin((x, y), 200)
    assert len(kept_x) <= 5 * 201
    assert (np.diff(kept_x) > 0).all()
    assert {0.0, 12_345.0, 54_321.0, 70_000.0, 99_999.0} <= {*kept_x.tolist()}
    assert np.array_equal(kept_y, y[kept_x.astype(int)], equal_nan=True)
    for part in np.array_split(np.arange(100_000), 50):
        inside = kept_y[(kept_x >= part[0]) & (kept_x <= part[-1])]
        assert np.nanmax(inside) > np.nanmax(y[part]) - 0.03
    chart = Chart("t", [Curve("c", (x, y), 0, "points")], "step")
    assert 'class="dots"' not in chart.html(COLORS, 200), "a line of dots is a band"
    dots = Chart("t", [Curve("c", (x[:5], y[:5]), 0, "dots")], "step").html(COLORS, 200)
    assert dots.count("<path") == 2, "a dot and its rim, without a line"
    few = (x[:800], y[:800])
    assert thin(few, 200) is few


def write(folder, rows):
    """Replaces the rows of a run; many at once."""
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_pages_of_large_runs_are_small(tmp_path):
    rows = metrics(100_000, every=1)
    rows[50_001]["loss"] = 1234.5
    sample = {"event": "sample", "text": "<&'\"é" * 3000, "prompt": "\"'" * 9000}
    rows += [{**sample, "step": step} for step in range(100) for _ in range(20)]
    run = make_run(tmp_path / "run", metrics(1))
    write(run, rows)
    source = page_of(run).source
    assert len(source.encode()) < LIMIT
    assert "1234.5" in source, "an extreme is kept"
    assert "Older samples are in" in source


def test_pages_of_many_runs_are_small(tmp_path):
    for count, length in ((12, 5000), (100, 200)):
        names = [f"{count}/run{number}" for number in range(count)]
        runs = [make_run(tmp_path / name, metrics(1), seed=i) for i, name in enumerate(names)]
        for run in runs:
            write(run, metrics(length, every=1))
        assert len(page_of(*runs).source.encode()) < LIMIT


HOSTILE_ROWS = [
    START | {"command": f"x --own.{HOSTILE} '", "kind": HOSTILE, "commit": [HOSTILE]},
    {"event": "branch", "step": 10, "parent": HOSTILE},
    {"step": 20, "loss": 1.5, HOSTILE: 1.0, "val_loss": 2.0, "skipped": 3, "tokens": 5},
    {"step": 30, "loss": 1.25, HOSTILE: 2.0, "val_loss": 2.5, "tokens": 9},
    {"event": "rollback", "step": 20, "from": HOSTILE},
    {"event": "sample", "step": 20, "text": HOSTILE, "prompt": HOSTILE},
    {"event": "end", "step": 20, "steps": HOSTILE},
]


TAGS = {
    *("html", "head", "meta", "title", "style", "body", "script", "header", "h1", "h2", "p", "div"),
    *("span", "b", "small", "code", "pre", "ul", "li", "details", "summary", "figure"),
    *("figcaption", "table", "thead", "tbody", "tr", "th", "td"),
    *("svg", "g", "line", "path", "circle", "text"),
}


def hostile_run(folder):
    run = make_run(folder, HOSTILE_ROWS)
    (run / "status.json").write_text(json.dumps({"state": HOSTILE, "reason": HOSTILE}))
    (run / "config.yaml").write_text(
        json.dumps({"optim": {"lr": HOSTILE, HOSTILE: 1}, "seed": HOSTILE, "{{script}}": HOSTILE})
    )
    (run / "compressors.json").write_text(json.dumps({"bits_per_byte": {HOSTILE: 1.5}}))
    return run


def test_a_browser_runs_the_pages_own_script_alone(tmp_path):
    runs = [
        hostile_run(tmp_path / "a'\"<img src=x onerror=alert(1)>"),
        make_run(tmp_path / "b", metrics(9)),
    ]
    for shown in ([runs[0]], runs):
        source = page(read_runs(shown))
        parsed = Parsed(source)
        assert {tag for tag, _ in parsed.tags} <= TAGS
        attributes = {name for _, given in parsed.tags for name in given}
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")]
        data = [text for kind, text in parsed.scripts if kind]
        assert all(json.loads(text)["curves"] for text in data)
        (script,) = (text for kind, text in parsed.scripts if not kind)
        digest = b64encode(sha256(script.encode()).digest()).decode()
        (policy,) = (given["content"] for _, given in parsed.tags if "Policy" in str(given))
        assert f"script-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'")
        assert "<script>alert" not in source
        assert "<img" not in source


EVENTS = [
    START,
    *({"step": step, "loss": 3.0, "skipped": 0} for step in range(1, 41)),
    {"event": "start", "step": 40, "checkpoint": {}},
    {"step": 41, "loss": 3.0, "skipped": 0},
    {"step": 45, "loss": 3.0, "skipped": 2},
    *({"step": step, "loss": 9.0 + step, "skipped": 4} for step in range(46, 50)),
    {"event": "rollback", "step": 45, "from": 50},
    {"step": 46, "loss": 3.0, "skipped": 2},
    {"step": 50, "loss": None},
    {"step": 100, "loss": 2.0, "skipped": 2},
]
HAPPENED = [
    ("resumed", 40, "at step 40"),
    ("rolled back", 45, "from step 50 to step 45"),
    ("bad steps", 45, "2 in steps 42 to 45"),
    ("bad steps", 50, "no finite loss at step 50"),
]


def test_marks_are_what_happened(tmp_path):
    branch = {"event": "branch", "step": 5, "parent": "runs/x/checkpoints/step-00000005"}
    folder = make_run(tmp_path / "run", [EVENTS[0], branch, *EVENTS[1:]])
    (run,) = read_runs([folder])
    found = happenings(run)
    text = "at step 5 from runs/x/checkpoints/step-00000005"
    assert found[0] == ("branched", 5, text)
    assert found[1:] == HAPPENED
    chart = Curves([run]).loss()
    assert [(mark.kind, mark.x, mark.text) for mark in chart.marks] == [
        (kind, step, f"{kind} {text}") for kind, step, text in found
    ]
    (undone,) = (curve for curve in chart.curves if curve.style == "undone")
    assert undone.points[0].tolist() == [46, 47, 48, 49]
    assert undone.points[1].tolist() == [55, 56, 57, 58]
    _, up = chart.scales()
    assert up.high < 4, "what was undone does not press the curve down"
    source = page_of(folder).source
    for kind, _, text in HAPPENED:
        assert f"<title>{kind} {text}</title>" in source
        assert f'class="mark {kind.replace(" ", "-")}"' in source
    positions = re.findall(r'class="mark resumed"><title>[^<]*</title><line x1="([\d.]+)%"', source)
    assert positions == ["40.00"]


def test_marks_that_cover_each_other_are_one():
    marks = [Mark("resumed", x, f"at {x}", 0) for x in (100, 105, 109, 500)]
    other = Mark("resumed", 101, "of another run", 1)
    outside = Mark("resumed", 2000, "beyond", 0)
    found = merged([*marks, other, outside], Scale(0, 1000))
    assert [mark.text for mark in found] == [
        "at 100, and 2 more up to 109",
        "of another run",
        "at 500",
    ]


def test_the_first_line(tmp_path):
    rows = [START | {"steps": 400}, *metrics(30)]
    for number, row in enumerate(rows[2:]):
        row["memory"] = 2.5e9 + 1e7 * (number == 5)
    folder = make_run(tmp_path / "run", rows)
    saved = folder / "checkpoints/step-00000300"
    saved.mkdir(parents=True)
    save_file({"a": np.zeros((7, 3), np.float32)}, saved / "model-00001-of-00002.safetensors")
    save_file({"a": np.zeros((5, 3), np.float32)}, saved / "model-00002-of-00002.safetensors")
    (run,) = read_runs([folder])
    assert count_parameters(folder) == 36
    assert training_seconds(run) == 300 * 512 / 256
    assert [" ".join(fact) for fact in facts(run)] == [
        "300 of 400 steps",
        "36 parameters",
        "153,600 tokens",
        "10 min 0 s of training",
        "256 tokens/s",
        "2.51 GB memory",
        "3 validation loss (best 2 at step 200)",
        "1.250 bits per byte (best step)",
    ]
    rows[0]["forecast"] = {"bits_per_byte": 1.34}
    (foretold,) = read_runs([make_run(tmp_path / "foretold", rows)])
    assert "bits per byte (best step, expected about 1.3)" in [fact[1] for fact in facts(foretold)]
    (saved / "model-00002-of-00002.safetensors").write_bytes(b"\xff" * 20)
    assert count_parameters(folder) == 0
    assert [count_text(n) for n in (999, 1_234_567, 2.5e9)] == ["999", "1.23 M", "2.5 B"]
    assert [duration_text(s) for s in (5, 61, 7300, 90000)] == [
        "5 s",
        "1 min 1 s",
        "2 h 1 min",
        "1 d 1 h",
    ]


@pytest.mark.parametrize(
    ("state", "text", "command"),
    [
        ("completed", "Try the model:", "scripts/generate.py"),
        ("stopped", "The same command resumes", "python train_gpt2.py --seed 7"),
        ("failed", "The same command resumes", "python train_gpt2.py --seed 7"),
        ("diverged", "did not recover", "scripts/verify_run.py"),
        ("of the future", "unknown", "scripts/status.py"),
    ],
)
def test_what_to_do_next(tmp_path, state, text, command):
    (run,) = read_runs([make_run(tmp_path / "run", [START, *metrics(3)], state)])
    found = next_step(run)
    assert text in found[0]
    assert command in found[1]


def test_a_running_page_reloads_and_says_how_old_its_last_row_is(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "run", metrics(3))
    states = ["running", "stalled", "completed"]
    monkeypatch.setattr(runs, "health", lambda _: status.Health(states[0], 30, 1.0, "at forward"))
    (folder / "status.json").write_text('{"state": "running", "step": 30}')
    os.utime(folder / "metrics.jsonl", (1_700_000_000, 1_700_000_000))
    source = page_of(folder).source
    assert '<meta http-equiv="refresh" content="30">' in source
    assert '<time datetime="2023-11-14T22:13:20Z">2023-11-14 22:13:20 UTC</time>' in source
    slept = []
    pages = []

    def sleep(seconds):
        slept.append(seconds)
        pages.append((folder / "report.html").read_text())
        states.pop(0)

    monkeypatch.setattr(report.time, "sleep", sleep)
    assert report.report(ReportConfig(runs=(str(folder),), every=12.5)) == 0
    assert slept == [12.5, 12.5]
    assert all('content="12.5"' in text for text in pages)
    assert 'http-equiv="refresh"' not in (folder / "report.html").read_text()
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"


def test_settings_that_differ_come_first(tmp_path):
    command = "train_gpt2.py --config /elsewhere/configs/gpt2_stdlib.yaml"
    start = START | {"kind": "gpt2", "command": command}
    folder = make_run(tmp_path / "run", [start, *metrics(3)], **{"optim.lr": 0.02})
    (run,) = read_runs([folder])
    files, changes = changed_settings(run)
    assert files == ["configs/gpt2_stdlib.yaml"]
    by_name = {change.name: change for change in changes}
    lr = by_name["optim.lr"]
    assert (lr.value, lr.preset, lr.is_presets) == (0.02, 0.02, True)
    assert by_name["seed"][1:] == (7, 1337, 1337)
    assert "guard.patience" not in by_name, "a default"
    kinds = [change.is_presets for change in changes]
    assert kinds == sorted(kinds)
    text = page_of(folder).text
    assert "Settings that differ from configs/gpt2_stdlib.yaml and the defaults" in text
    assert text.index("Settings that differ") < text.index("Start and all settings")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("configs/gpt2_stdlib.yaml", "configs/gpt2_stdlib.yaml"),
        ("/a/configs/jobs/regression.yaml", "configs/jobs/regression.yaml"),
        ("configs/../README.md", ""),
        ("/etc/passwd", ""),
        ("configs", ""),
        ("configs/none.yaml", ""),
    ],
)
def test_only_shipped_presets_are_read(path, name):
    assert shipped(path) == name


def test_tables_to_copy():
    table = Table(["run", "a_b"], [["x|y*", r"1 ± 2 \ 50 % $ & # <b> ~^"], ["}{", "–\nz"]])
    header, rule, first, second = table.markdown().split("\n")
    assert header.startswith(r"| run    | a\_b")
    assert {*rule} == {"|", " ", "-"}
    assert first == r"| x\|y\* | 1 ± 2 \\ 50 % \$ \& \# \<b\> \~^ |"
    assert second.startswith(r"| \}\{   | – z ")
    lines = table.latex().split("\n")
    assert lines[:4] == [r"\begin{tabular}{ll}", r"\toprule", r"run & a\_b \\", r"\midrule"]
    assert lines[4] == (
        r"x\textbar{}y* & 1 $\pm$ 2 \textbackslash{} 50 \% \$ \& \# \textless{}b\textgreater{}"
        r" \textasciitilde{}\textasciicircum{} \\"
    )
    assert lines[5:] == [r"\}\{ & -- z \\", r"\bottomrule", r"\end{tabular}"]
    assert "&lt;b&gt;" in table.html()


def make_sweep(folder):
    """Two rates with three seeds each."""
    runs = []
    for lr in (1e-3, 2e-3):
        for seed in (1, 2, 3):
            rows = metrics(5)
            rows[-1] |= {"val_loss": 3.0 + seed / 10 - 100 * lr, "val_bits_per_byte": 1.0}
            name = f"sweep-lr_{lr}-seed_{seed}"
            runs.append(make_run(folder / name, rows, "completed", seed=seed, **{"optim.lr": lr}))
    return runs


def test_seeds_are_error_bars(tmp_path):
    folders = make_sweep(tmp_path)
    groups = group_runs(read_runs(folders))
    html = groups_of(groups)
    first, second = re.findall(r'<svg class="errors".*?</svg>', html)
    means = [3.1, 3.0]
    low, high = 2.9, 3.2
    room = 0.06 * (high - low)
    for svg, mean in ((first, means[0]), (second, means[1])):

        def x(value):
            return 100 * (value - low + room) / (high - low + 2 * room)

        dots = [*map(float, re.findall(r'cx="([\d.]+)%"', svg))]
        assert_close(np.array(dots), np.array([x(mean + d) for d in (-0.1, 0, 0.1)]), 1e-2)
        bar = re.search(r'class="bar" x1="([\d.]+)%" x2="([\d.]+)%"', svg)
        ends = np.array([*map(float, bar.groups())])
        assert_close(ends, np.array([x(mean - 0.1), x(mean + 0.1)]), 1e-2)
    source = page_of(*folders).source
    assert r"3.0000 $\pm$ 0.1" in source
    assert "optim.lr" in source
    found = [" ".join(fact) for fact in overview(groups)]
    assert found[:2] == ["6 runs: 6 completed", "2 groups that differ in more than their seed"]
    assert found[2].endswith("lowest last validation loss (optim.lr=0.002, 3 seeds)")


def test_axes_have_round_numbers():
    assert [text for _, text in Scale(0, 2317).ticks(6)] == ["0", "500", "1000", "1500", "2000"]
    assert [text for _, text in Scale(2.3, 8.4, True).ticks(7)] == ["3", "4", "5", "6", "7", "8"]
    assert [text for _, text in Scale(1e-3, 50, True).ticks(5)][1:3] == ["0.01", "0.1"]
    wide = [text for _, text in Scale(4e5, 2.5e7, True).ticks(6)]
    assert wide == ["500k", "1M", "2M", "5M", "10M", "20M"]
    texts = [short(value) for value in (15_000, 2.5e6, 1e9, 0.001, 0.00025)]
    assert texts == ["15k", "2.5M", "1B", "0.001", "2.5e-4"]
    fractions = np.array([fraction for fraction, _ in Scale(1, 16, True).ticks(5)])
    assert ((fractions >= 0) & (fractions <= 1)).all()


def test_extreme_values_make_a_chart():
    x = np.arange(4.0)
    for values in ([0.0] * 4, [math.nan] * 4, [3e38, -3e38, 1e-300, 0], [1e-300, 3e38, 1, 1]):
        for is_log in (False, True):
            chart = Chart("t", [Curve("c", (x, np.array(values)), 0)], "step", is_log=is_log)
            html = chart.html(COLORS, 10)
            assert "nan" not in html
            assert "inf" not in html
