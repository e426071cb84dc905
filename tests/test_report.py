"""Reports of runs as they are found on disk: complete, torn, strange, several, very short and very long."""

import base64
import hashlib
import io
import json
import math
import os
import re
import time
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from close import distance
from commands import expect_error
from matplotlib.text import Text
from safetensors.numpy import save_file

from gpt2_ddp.checkpoint.run_files import valid_rows
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.config.training import ModelConfig, OptimConfig, TrainConfig, TrainingConfig
from gpt2_ddp.reports import report as page_module
from gpt2_ddp.reports.picture import COLORS, MAX_POINTS, Picture, as_png, draw, share_tokens, short_names, thin
from gpt2_ddp.reports.report import choose_axis, report, write_report
from gpt2_ddp.reports.runs import read_runs

BATCH = 512
SCORED = {"val_tokens": 999, "val_bits_per_byte": 1.25}
START = {"event": "start", "step": 0, "command": "train_gpt2.py --seed 7", "commit": "c0ffee-dirty", "processes": 2}
START |= {"device": "cpu", "hardware": "a CPU, 2 cores, 8 GiB", "versions": {"torch": "2", "python": "3"}}
HOSTILE = '</pre><script>alert("x")</script> & $\\foo$'


def metrics(n_rows: int, every: int = 10) -> list[dict]:
    """The step-0 evaluation and n_rows logged steps; every fifth is evaluated, the fourth row is the best."""
    rows: list[dict] = [{"step": 0, "tokens": 0, "val_loss": 9.0, **SCORED}]
    for i in range(1, n_rows + 1):
        step = i * every
        row = {"step": step, "tokens": step * BATCH, "loss": 3 + 6 / i, "lr": 1e-3, "grad_norm": 1 / i}
        row |= {"tokens_per_second": 256.0, "mfu": 0.25, "skipped": i // 10, "order_digest": f"{i:064x}"[::-1]}
        rows.append(row | ({"val_loss": 2 + abs(i - 20) / 10, **SCORED} if i % 5 == 0 else {}))
    return rows


def make_run(folder: Path, rows: list[dict], seed: int = 7, lr: float = 1e-3) -> Path:
    folder.mkdir(parents=True)
    model = ModelConfig(n_layer=2, n_head=2, n_embd=32, block_size=64)
    train = TrainConfig(steps=300, global_batch_tokens=BATCH)
    config = TrainingConfig(run_name="r", seed=seed, model=model, train=train, optim=OptimConfig(lr=lr))
    (folder / "config.yaml").write_text(dump(config))
    (folder / "status.json").write_text(json.dumps({"state": "stopped", "step": 300, "reason": "SIGTERM"}))
    (folder / "samples.jsonl").write_text(json.dumps({"step": 300, "text": "the last sample"}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not drawn, but in tests that use `drawn`: `svg` is the text in them."""
    if "drawn" in request.fixturenames:
        return
    words = lambda picture: " ".join(text.get_text() for text in picture.figure.findobj(Text))  # noqa: E731
    monkeypatch.setattr(Picture, "svg", lambda picture: escape(words(picture)))
    monkeypatch.setattr("gpt2_ddp.reports.report.as_png", lambda figure: b"png")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `new/folder` with a report of a run of 30 rows, one of whose gradient norms is not finite."""
    folder = tmp_path_factory.mktemp("drawn")
    write_report([make_run(folder / "run", drawn_rows())], folder / "new/folder")
    return folder / "new/folder"


def drawn_rows() -> list[dict]:
    rows = [row | {"tokens_per_second": 100.0 * i} if i else row for i, row in enumerate(metrics(30))]
    rows[7] |= {"grad_norm": None}
    return rows


class Page(HTMLParser):
    """Tables as {first cell: other cells}, the text outside them, tag names and fetchable attributes."""

    def __init__(self, file: Path):
        super().__init__()
        self.tables, self.tags, self.links, self.text, self.in_cell = [], [], [], "", False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag == "table":
            self.tables.append({})
        elif tag == "tr":
            self.row: list[str] = []
        elif tag in ("th", "td"):
            self.row.append("")
        self.in_cell = tag in ("th", "td")

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False
        if tag == "tr":
            self.tables[-1][self.row[0]] = self.row[1:]

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.row[-1] += data


def points(file: Path) -> dict:
    """What the page's script reads."""
    return json.loads(re.findall(r'id="points">(.*?)</script>', file.read_text(encoding="utf-8"))[0])


def test_values_are_the_files_own(tmp_path: Path) -> None:
    found = [row | {"loss_mean": 3.25} if row["step"] == 300 else row for row in metrics(30)]
    found[10] |= {"val_loss": 1.0, "val_tokens": 50}  # not the best: it scored fewer tokens than the last
    found = [row | {"depth": 2.5} | ({"rhymes": 0.125} if "val_loss" in row else {}) for row in found]
    run = make_run(tmp_path / "run", [START, *found])
    weights = {"wte.weight": np.zeros((128, 32)), "wpe.weight": np.zeros((64, 32)), "ln_f.bias": np.zeros(32)}
    checkpoint = run / "checkpoints" / "step-00000300"
    checkpoint.mkdir(parents=True)
    save_file(weights, checkpoint / "model.safetensors")
    assert write_report([run], run) == run / "report.html"
    summary, evaluation, origin, configuration = Page(run / "report.html").tables
    assert {**origin, **configuration}.items() >= {
        "command": ["train_gpt2.py --seed 7"], "commit": ["c0ffee-dirty"], "hardware": ["a CPU, 2 cores, 8 GiB"],
        "processes and device": ["2 x cpu"], "versions": ["torch 2, python 3"], "train.steps": ["300"],
    }.items()  # fmt: skip
    assert {label: cell for label, (cell,) in summary.items() if label} == {
        "state": "stopped: SIGTERM", "steps": "300", "tokens": f"{300 * BATCH:,}", "skipped steps": "3",
        "last train loss (loss_mean)": "3.2500 at step 300",
        "last validation loss": f"3.0000 at step 300 (perplexity {math.exp(3):.2f}, 1.2500 bits per byte)",
        "best validation loss": f"2.0000 at step 200 (perplexity {math.exp(2):.2f}, 1.2500 bits per byte)",
        "tokens per second (median)": "256", "MFU (median)": "25.0%", "time in training steps": "10 min 00 s",
        "parameters": f"{(128 + 64) * 32 + 32:,}", "architecture": "gpt2",
        "n_layer / n_head / n_embd / block_size": "2 / 2 / 32 / 64", "global batch (tokens)": "512",
        "learning rate": "0.001", "seed": "7", "order digest": f"{30:064x}"[::-1],
    }  # fmt: skip
    wanted = {"validation loss (nats per token)": ["3.0000"], "bits per token": [f"{3 / math.log(2):.4f}"]}
    wanted |= {"bits per byte": ["1.2500"], "tokens scored": ["999"], "rhymes": ["0.1250"]}
    assert evaluation.items() >= wanted.items()
    assert "depth" not in evaluation, "a number of each row is no score"
    assert "the last sample" in Page(run / "report.html").text
    assert "Not in this report" not in Page(run / "report.html").text
    assert (run / "report.png").read_bytes() == b"png"
    assert sorted(file.name for file in run.glob("*report*")) == ["report.html", "report.png"]  # no temporary left


def test_page_needs_nothing_from_outside(drawn: Path) -> None:
    page = Page(drawn / "report.html")
    assert (drawn / "report.png").read_bytes().startswith(b"\x89PNG")
    assert page.tags.count("svg") == 1 + 4, "the drawing, and one for each panel"
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert all(link.startswith("#") for link in page.links)
    text = (drawn / "report.html").read_text()
    assert not re.search(r"url\((?!#)|@import", text)
    names = re.findall(r' id="([^"]*)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]*)', text)) <= set(names)
    _, script = re.findall("<script[^>]*>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'\"" in text


def test_user_text_is_escaped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a<b>&$x$ $\\foo$", metrics(3))
    (run / "samples.jsonl").write_text(json.dumps({"step": 9, "text": HOSTILE + "\ud800"}) + "\n")
    (run / "status.json").write_text(json.dumps({"state": "failed", "reason": HOSTILE}))
    (run / "config.yaml").write_text(json.dumps({"seed": HOSTILE, "optim": {"lr": HOSTILE}}))
    other = make_run(tmp_path / "other", metrics(3))
    page = Page(write_report([run, other], tmp_path))
    assert page.tags.count("script") == 2  # ours: the values and what shows them
    assert "b" not in page.tags
    assert points(tmp_path / "report.html")["runs"][0]["name"] == run.name
    # `<!--<script>` would hide the end of the element
    assert "a\\u003cb>&$x$" in (tmp_path / "report.html").read_text()
    assert page.text.count(HOSTILE) == 8  # reason, learning rate and seed, again as differences and settings, sample
    assert page.tables[0][""] == ["a<b>&$x$ $\\foo$", "other"]


def test_several_runs_and_what_differs(tmp_path: Path) -> None:
    changes = {"a": (1, 1e-3), "b": (1, 3e-4), "c": (2, 1e-3)}
    runs = [make_run(tmp_path / name / "run", metrics(20), *change) for name, change in changes.items()]
    page = Page(write_report([*runs, runs[0]], tmp_path))
    summary, _, _, differences, *_ = page.tables
    assert summary[""] == ["a/run", "b/run", "c/run"]
    assert differences == {"": summary[""], "seed": ["1", "1", "2"], "optim.lr": ["0.001", "0.0003", "0.001"]}
    assert all(f"{name}, 256/s, MFU 25.0%" in page.text for name in summary[""])


def test_missing_files_are_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics(3))
    (run / "config.yaml").write_text("model: [")
    (run / "status.json").unlink()
    (run / "samples.jsonl").unlink()
    page = Page(write_report([run], run))
    assert page.tables[0].items() >= {"steps": ["30"], "state": ["–"], "seed": ["–"]}.items()
    assert "run: status.json: missing" in page.text


@pytest.mark.parametrize("bad", [None, math.inf])
def test_numbers_that_are_not_finite(tmp_path: Path, bad: float | None) -> None:
    rows = metrics(30)
    rows[12] |= {"loss": bad, "grad_norm": bad}
    rows[30] |= {"loss": bad, "val_loss": bad}
    run = make_run(tmp_path / "run", [row | {"mfu": None} for row in rows])
    page = Page(write_report([run], run))
    shown = {"last train loss (loss_mean)": ["not finite at step 300"], "MFU (median)": ["–"]}
    assert page.tables[0].items() >= shown.items()
    assert page.tables[0]["best validation loss"][0].startswith("2.0000 at step 200")
    assert "not a finite number" in page.text  # crosses in the figure, with their key
    assert "MFU " not in page.text.replace("MFU (median)", "")


@pytest.mark.parametrize(("rows", "loss", "not_logged"), [
    (metrics(0), "–", True), (metrics(1), "9.0000 at step 10", False),
    # of another trainer; it ends at 0, which has no logarithm
    ([{"step": i, "loss": 1.0 - i / 10} for i in range(11)], "0.0000 at step 10", True),
])  # fmt: skip
def test_rows_that_hold_little(tmp_path: Path, rows: list[dict], loss: str, not_logged: bool) -> None:
    page = Page(write_report([make_run(tmp_path / "run", rows)], tmp_path))
    assert page.tables[0]["last train loss (loss_mean)"] == [loss]
    assert ("not logged" in page.text) == not_logged


@pytest.mark.usefixtures("drawn")
def test_long_runs_make_small_pages(tmp_path: Path) -> None:
    rows = metrics(20_000, every=1)
    noise = np.random.default_rng(0).lognormal(size=(20_000, 3)).tolist()
    for row, values in zip(rows[1:], noise, strict=True):
        row |= dict(zip(("loss", "grad_norm", "tokens_per_second"), values, strict=True))
    runs = read_runs([make_run(tmp_path / "run", rows)])
    assert len(page_module.page(runs, draw(runs, "steps"))) < 400_000


def test_thinning_keeps_the_extremes() -> None:
    values = np.random.default_rng(0).normal(size=20_000)
    values[[5000, 6000, 7000]] = 9, -9, np.nan
    steps, kept = thin((np.arange(20_000.0), values), MAX_POINTS // 3)
    assert len(kept) <= MAX_POINTS + 2
    assert {0, 5000, 6000, 7000, 19_999} <= set(steps)
    assert np.array_equal(kept, values[steps.astype(int)], equal_nan=True)
    parts = np.array_split(np.arange(20_000), MAX_POINTS // 3)
    assert all({np.nanargmin(values[part]), np.nanargmax(values[part])} <= set((steps - part[0]).astype(int))
               for part in parts[:50])  # fmt: skip


@pytest.mark.usefixtures("drawn")
def test_same_metrics_same_bytes(tmp_path: Path) -> None:
    runs = read_runs([make_run(tmp_path / "run", metrics(5))])
    one, other = draw(runs, "steps"), draw(runs, "steps")
    assert (one.svg(), as_png(one.figure)) == (other.svg(), as_png(other.figure))


def test_mistakes_name_folder_and_cure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = make_run(tmp_path / "runs" / "good", metrics(3))
    like = "; .*like .*/runs/good"
    expect_error(rf"runs = .*/nothing: no such folder{like}", write_report, [run.parent / "nothing"], tmp_path)
    expect_error(rf"runs = .*/runs: has no metrics.jsonl{like}", write_report, [run, run.parent], tmp_path)
    expect_error("name at least one", report, ReportConfig(runs=()))
    expect_error(r"output = .*/metrics.jsonl: cannot be written", write_report, [run], run / "metrics.jsonl")
    (torn := make_run(tmp_path / "torn", []) / "metrics.jsonl").write_text('{"step": 0')
    expect_error("no complete row", write_report, [torn.parent], tmp_path)
    assert not (tmp_path / "report.html").exists()
    assert report(ReportConfig(runs=(str(run),))) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    own = (run / "report.html").read_bytes()
    assert report(ReportConfig(runs=(str(run), str(make_run(tmp_path / "other", metrics(3)))))) == 0
    assert capsys.readouterr().out == f"{run / 'comparison.html'}\n"
    assert (run / "report.html").read_bytes() == own


def test_a_small_job_counts_samples(tmp_path: Path) -> None:
    job = make_run(tmp_path / "job", [])
    rows = [{"step": step, "samples": 12 * step, "samples_per_second": 500.0, "loss": 2.0 / step} for step in (1, 2, 3)]
    rows[-1] |= {"val_loss": 0.5, "val_accuracy": 0.75, "val_samples": 31}
    (job / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = Page(write_report([job], job))
    assert page.tables[0].items() >= {"samples": ["36"], "samples per second (median)": ["500"]}.items()
    assert page.tables[1]["validation accuracy"] == ["0.7500"]
    assert "perplexity" not in page.text
    assert "Throughput (samples per second)" in page.text
    both = Page(write_report([job, make_run(tmp_path / "gpt", metrics(3))], tmp_path / "both"))
    assert (both.tables[0]["samples"], both.tables[0]["tokens"][0]) == (["36", "–"], "–")


@pytest.mark.usefixtures("drawn")
def test_runs_that_coincide_are_all_visible(tmp_path: Path) -> None:
    lengths = [30, 60, 30, 30, 10, 30, 30]
    picture = draw(read_runs([make_run(tmp_path / f"run{i}", metrics(n)) for i, n in enumerate(lengths)]), "steps")
    left, top, right, bottom = [round(edge * 130 / 72) for edge in list(picture.panels().values())[1]]
    pixels = matplotlib.image.imread(io.BytesIO(as_png(picture.figure)))[top:bottom, left:right, :3]
    colors = [matplotlib.colors.to_rgb(color) for color in COLORS[: len(lengths)]]
    places = [np.nonzero((abs(pixels - color) < 0.01).all(2).any(0))[0] for color in colors]
    half = (right - left) / 2
    for number, columns in enumerate(places):
        assert len(columns) > half / 21 / 3, f"run{number} is hidden"  # a third of a seventh of its third or half
    assert len(places[1][places[1] > 0.6 * 2 * half]) > 0.3 * 2 * half  # alone there, so it is unbroken
    assert places[4].max() < 0.3 * 2 * half


@pytest.mark.parametrize("axis", ["steps", "tokens", "time"])
def test_values_under_the_pointer(drawn: Path, axis: str, tmp_path: Path) -> None:
    rows, found = drawn_rows(), points(write_report([drawn.parents[1] / "run"], tmp_path, axis))
    seconds = {10 * i: total for i, total in enumerate(np.cumsum([0, *(51.2 / i for i in range(1, 31))]))}
    along = {"steps": lambda step: step, "tokens": lambda step: step * BATCH, "time": seconds.get}[axis]
    lines = {(line["panel"], line["label"]): line for line in found["lines"]}
    for (panel, label), metric in {(0, "train"): "loss", (0, "validation"): "val_loss", (1, ""): "lr",
                                   (2, ""): "grad_norm", (3, ""): "tokens_per_second"}.items():  # fmt: skip
        line = lines[panel, label]
        logged = {row["step"]: row[metric] for row in rows if metric in row}
        assert line["step"] == list(logged)
        pairs = list(zip(line["value"], logged.values(), strict=True))
        assert all(value is None for pair in pairs if None in pair for value in pair)
        assert all(distance(*pair) < 1e-4 for pair in pairs if None not in pair)
        left, _, right, _ = found["panels"][panel]
        share = np.array([along(step) for step in logged]) / along(300)
        places = left + (right - left) * (0.02 + share) / 1.04
        assert distance(line["x"], places, 1) < 0.2
    assert lines[2, ""]["value"].count(None) == 1


def test_loss_is_the_mean_since_the_row_before(tmp_path: Path) -> None:
    rows = metrics(4)
    rows[2] |= {"loss_mean": 5.5}
    rows[3] |= {"loss_mean": 5.0, "loss": None}
    rows[4] |= {"loss_mean": None}
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert np.array_equal(run.series("loss_mean")[1], [9.0, 5.5, math.nan, 4.5], equal_nan=True)
    assert run.last("loss") == rows[4] | {"loss_mean": 4.5}


def test_tokenizers_that_differ(tmp_path: Path) -> None:
    one, other, same = (
        make_run(tmp_path / name, [START | {"tokenizer_sha256": sha256 * 64}, *metrics(10)])
        for name, sha256 in (("one", "1"), ("other", "2"), ("same", "1"))
    )
    never = make_run(tmp_path / "never", [{"step": 10, "loss": 1.0}])
    picture = draw(read_runs([one, other, never]), "steps")
    loss, *_ = picture.figure.axes
    legend = loss.get_legend()
    assert loss.get_title("left") == "Validation loss (bits per byte, log scale)"
    assert legend
    assert {"token, and the runs' tokenizers differ", "not evaluated: never"} < {t.get_text() for t in legend.texts}
    shown = [trace for trace in picture.traces if trace.panel is loss]
    assert {trace.label for trace in shown} == {"validation"}
    assert all(set(trace.values) == {1.25} for trace in shown)
    assert share_tokens(read_runs([one, same, never])), "what is not known is not another"


def test_what_a_run_is_drawn_along(tmp_path: Path) -> None:
    run, other = make_run(tmp_path / "run", metrics(3)), make_run(tmp_path / "other", metrics(3))
    twice = make_run(tmp_path / "twice", [row | {"tokens": 2 * row["tokens"]} for row in metrics(3)])
    foreign = make_run(tmp_path / "foreign", [{"step": 1, "loss": 1.0}])
    assert choose_axis(read_runs([run, other]), "auto") == "steps"
    assert choose_axis(read_runs([run, twice]), "auto") == "tokens"
    assert choose_axis(read_runs([run, foreign]), "auto") == "steps"
    expect_error(r"axis = time: the rows of foreign lack it", write_report, [run, foreign], tmp_path, "time")
    assert "time in training steps (s)" in Page(write_report([run], tmp_path, "time")).text


def test_events_are_no_rows(tmp_path: Path) -> None:
    rows = [row for row in metrics(30) if row["step"] > 200]
    rows.insert(0, {"event": "branch", "step": 200, "of": "runs/x"})
    rows.insert(4, {"event": "start", "step": 230})
    rows.insert(6, {"event": "rollback", "step": 230})
    rows[-4]["not_finite"] = 2
    rows += [{"event": "end", "step": 300}, {"event": "of the future", "step": 300}]
    (run,) = read_runs([make_run(tmp_path / "run", rows)])
    assert [row["step"] for row in run.rows] == [210, 220, 230, *range(250, 301, 10)]
    assert run.clock[1][-1] == 100 * BATCH / 256
    legend = draw([run], "time").figure.axes[0].get_legend()
    assert legend
    assert {"resumed", "rollback to this step", "not a finite number"} < {text.get_text() for text in legend.texts}


def test_samples_step_by_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics(3))
    rows = [{"step": step, "prompt": prompt, "text": f"{prompt}{step} {'x' * 9000}"}
            for step in range(0, 50_000, 100) for prompt in ("<i>", "two\n")]  # fmt: skip
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = write_report([run], tmp_path)
    text = file.read_text()
    steps = [int(step.replace(",", "")) for step in re.findall(r"<summary>step ([\d,]+)</summary>", text)]
    assert len(steps) == 12
    assert (steps[0], steps[-1]) == (49_900, 0)
    assert re.findall(r"<details( open)?>", text) == [" open", *[""] * 12], "of each step, and the configuration"
    assert "<b>&quot;&lt;i&gt;&quot;</b><pre>&lt;i&gt;49900 " in text
    assert "<b>&quot;two\\n&quot;</b>" in text
    assert file.stat().st_size < 400_000


def test_names_fit_into_a_legend() -> None:
    long = ["a" * 40 + str(number) + "b" * 40 for number in range(2)]
    assert short_names(["run", *long]) == ["run", *(f"{'a' * 13} ... {'b' * 13} ({number})" for number in (2, 3))]


HUGE, DEEP = "1" * 400, "[" * 400 + "]" * 400
CLASSES = '{"step": 30, "classes": ["a", "b"], "confusion": %s}'
STRANGE = [
    ("metrics.jsonl", '{"step": 40, "loss": 1.2'),
    *(("metrics.jsonl", f'{{"step": 50, "loss": {value}}}') for value in (HUGE, DEEP)),
    *(("metrics.jsonl", f'{{"step": {step}, "loss": 1}}') for step in ("NaN", "-1", "1e300", "1e-320")),
    ("samples.jsonl", f'{{"step": 50, "text": "x", "prompt": {DEEP}}}'),
    *(("config.yaml", text) for text in ("model: [", "seed: " + DEEP[300:-300] * 2, "seed: !!timestamp 2024-99-01",
                                         "seed: !!float 1" + ":1" * 999 + ".5", "a: &a [1]\nb: [*a, *a]")),
    ("status.json", f'{{"state": {DEEP}}}'),
    ("classes.json", '{"step": 30, "classes": ["a", ["b"]], "confusion": [{"0": 1}, {}]}'),
    *(("classes.json", CLASSES % counts)
      for counts in ('[{"0": 1}, 1.5]', '[{"0": "x"}, {}]', '[{"0": 1}, {"2": 1}]', '[{"0": 1}]')),
]  # fmt: skip


def test_strange_content_is_left_out_and_said(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics(4))
    (run / "evaluations/step-00000030").mkdir(parents=True)
    assert read_runs([run])[0].notes == []
    for file, line in STRANGE:
        path = run / ("evaluations/step-00000030" if file == "classes.json" else ".") / file
        before = path.read_text() if path.exists() else ""
        is_line = file.endswith("jsonl")
        path.write_text(f"{before if is_line else ''}{line}\n")
        note = f"{file}: {'1 unreadable line omitted' if is_line else 'unreadable'}"
        assert read_runs([run])[0].notes == [note], line
        path.write_text(before) if before else path.unlink()
    (run / "config.yaml").write_text("seed: 2024-99-01")
    (run / "status.json").write_text('{"state": "running", "step": 1e999}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write("""{"step": 50, "event": "branch", "tokens": "text"}
{"step": 50, "loss": 1e308, "lr": "x", "tokens": Infinity, "tokens_per_second": 1e-320}
{"step": 60, "val_loss": -1e308, "loss": 1e-300, "grad_norm": 1e308, "mfu": []}
""")
    for axis in ("steps", "tokens", "time"):
        assert "Not in this report" not in Page(write_report([run], run, axis)).text


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics(4))
    step = run / "checkpoints/step-00000030"
    step.mkdir(parents=True)
    for name in ("model.safetensors", "state.json"):
        os.mkfifo(step / name)
    assert Page(write_report([run], run)).tables[0]["parameters"] == ["–"]


def test_many_rollbacks_take_no_long_time() -> None:
    rows = [{"step": step} for step in range(20_000)] + [{"event": "rollback", "step": 10_000}] * 20_000
    begun = time.process_time()
    assert valid_rows(rows) == rows[:10_001]
    assert time.process_time() - begun < 1
