"""Groups of seeds: means and differences as scipy has them, what does not compare, and how all of it is shown."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from close import assert_close
from test_report import HOSTILE, START, Page, make_run

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.reports.groups import compare, content, describe, group_runs
from gpt2_ddp.reports.picture import draw
from gpt2_ddp.reports.report import report, write_report
from gpt2_ddp.reports.runs import read_runs

ONE, TWO = {1: 3.31, 2: 3.27, 3: 3.42}, {1: 3.22, 2: 3.21, 3: 3.30}
METRIC = "last_val_loss"


class Runs:
    """Run folders in a folder: `add` makes some, `content` reads all."""

    def __init__(self, folder: Path):
        self.folder, self.paths = folder, []

    def add(self, losses: dict[int, float | None], lr: float = 1e-3, state: str = "completed", **last) -> None:
        """Runs with these seeds and last losses; their best loss is 0.5 lower, and a lower one scored other tokens."""
        for seed, loss in losses.items():
            rows = [{"step": step, "tokens": step, "loss": 3 + step / 9 * seed} for step in range(0, 201, 10)]
            if loss is not None:
                rows[5] |= {"val_loss": 0.1, "val_bits_per_byte": 0.1, "val_tokens": 5}
                for row, score in ((rows[10], loss - 0.5), (rows[-1], loss)):
                    row |= {"val_loss": score, "val_bits_per_byte": score / 3, "val_tokens": 999}
                rows[-1] |= last
            if "tokenizer" in last:
                rows.insert(0, START | {"tokenizer_sha256": last["tokenizer"]})
            self.paths.append(make_run(self.folder / f"run{len(self.paths)}", rows, seed, lr, state))

    def content(self) -> list[dict]:
        return content(group_runs(read_runs(self.paths)))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


@pytest.mark.parametrize(("other", "shared"), [
    (TWO, [1, 2, 3]), ({2: 3.2, 3: 3.5, 9: 1.0}, [2, 3]),  # a loss of another seed does not count
    ({3: 3.1, 4: 3.5, 5: 3.3, 6: 3.6}, []), ({7: 3.45, 8: 3.47}, []),
])  # fmt: skip
def test_differences_are_scipys(other: dict, shared: list) -> None:
    stats = pytest.importorskip("scipy.stats")
    found = compare(ONE, other)
    a, b = ([each[seed] for seed in shared or each] for each in (ONE, other))
    theirs = stats.ttest_rel(b, a) if shared else stats.ttest_ind(b, a, equal_var=False)
    assert (found.paired, found.n) == (bool(shared), len(shared) or None)
    assert_close((found.difference, found.difference / found.standard_error), (np.mean(b) - np.mean(a), theirs[0]))
    assert found.differs == (abs(theirs[0]) > 2)


def test_one_run_has_no_spread(runs: Runs) -> None:
    for lr, losses in enumerate(({1: 3.0}, {1: 3.5, 2: 3.25}, {2: 4.0}), 1):
        runs.add(losses, lr=lr)
    groups = runs.content()
    assert [(group["sd"][METRIC] is None, len(group["remarks"])) for group in groups] == [
        (True, 1),
        (False, 0),
        (True, 1),
    ]
    found = [[*group["differences"][METRIC].values()][1:3] for group in groups[1:]]
    assert found == [[0.375, None], [1.0, None]]
    assert compare({1: 3.5, 2: 3.25}, {2: 4.0}).standard_error is None


def test_left_out_runs_are_named(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO | {4: 3.1}, lr=2e-3)
    runs.add({1: 3.24}, lr=2e-3)  # equal seeds count as one
    for state in ("diverged", "failed", "stopped"):
        runs.add({4: 9.0}, lr=2e-3, state=state)
    runs.add({5: math.nan}, lr=2e-3)
    runs.add({6: None, 7: None}, lr=3e-3)
    first, second, third = runs.content()
    losses = np.array([*ONE.values()])
    for score, wanted in (("last_val_loss", losses), ("best_val_bits_per_byte", (losses - 0.5) / 3)):
        assert_close((first["mean"][score], first["sd"][score]), (wanted.mean(), wanted.std(ddof=1)))
    assert_close(second["mean"][METRIC], np.mean([3.23, 3.21, 3.30, 3.1]))
    assert (second["completed"], second["n"], second["differences"][METRIC]["n"]) == (6, 4, 3)
    assert third["differences"][METRIC]["difference"] is None
    lines = "\n".join(describe(group_runs(read_runs(runs.paths))))
    for remark in (
        "seed 1: 2",
        "run8: diverged",
        "run9: failed",
        "run10: stopped",
        "run11: no finite",
        "run12: no finite",
    ):
        assert remark in lines


@pytest.mark.parametrize(("first", "other", "bytes_compare"), [
    ({}, {"val_tokens": 512}, False), ({"tokenizer": "1"}, {"tokenizer": "2"}, True),
])  # fmt: skip
def test_what_does_not_compare(runs: Runs, first: dict, other: dict, bytes_compare: bool) -> None:
    runs.add(ONE, **first)
    runs.add(TWO, lr=2e-3, **other)
    runs.add({1: 3.0}, lr=3e-3, **first)
    runs.add({2: 3.0}, lr=3e-3, **other)
    _, second, mixed = runs.content()
    assert second["differences"][METRIC]["difference"] is None
    assert "not compared" in second["differences"][METRIC]["text"]
    assert (second["differences"]["last_val_bits_per_byte"]["n"] == 3) == bytes_compare
    assert mixed["mean"][METRIC] is None
    assert (mixed["mean"]["last_val_bits_per_byte"] is not None) == bytes_compare


def test_headings_are_the_fields_that_differ(runs: Runs) -> None:
    runs.add(dict.fromkeys(range(7), 3.0))
    texts = ["lr: 1\n  y: null", "lr: 1\n  y: null", "lr: 1", "lr: 1.0", "lr: null", None, None]
    for number, (path, text) in enumerate(zip(runs.paths, texts, strict=True)):
        config = f"seed: {number}\nrun_name: r{number}\neval:\n  tokens: 5\noptim:\n  {text}\n"
        (path / "config.yaml").write_text("{" if text is None else config)
    assert [(group["heading"], group["fields"], len(group["runs"])) for group in runs.content()] == [
        ("optim.lr=1, optim.y=null", {"optim.lr": 1, "optim.y": None}, 2),
        ("optim.lr=1, optim.y missing", {"optim.lr": 1}, 1),
        ("optim.lr=1.0, optim.y missing", {"optim.lr": 1.0}, 1),
        ("optim.lr=null, optim.y missing", {"optim.lr": None}, 1),
        ("run5", {}, 1),
        ("run6", {}, 1),
    ]


def test_json_has_no_nan(runs: Runs) -> None:
    runs.add(ONE)
    runs.add({5: math.nan, 6: math.inf}, lr=2e-3, state="diverged")
    for path in runs.paths[3:]:
        with (path / "config.yaml").open("a") as file:
            file.write("extra: .nan\n")
    output = runs.folder / "x.json"
    assert report(ReportConfig(runs=tuple(map(str, runs.paths)), output=str(output))) == 0
    assert sorted(file.name for file in runs.folder.glob("x.*")) == ["x.html", "x.json", "x.png"]
    assert "NaN" not in output.read_text()
    found = json.loads(output.read_text())["groups"]
    assert found == runs.content()
    assert [(group["n"], group["completed"], len(group["runs"])) for group in found] == [(3, 3, 3), (0, 0, 2)]
    assert found[0]["runs"][0].items() >= {"seed": 1, "state": "completed", METRIC: 3.31}.items()


def test_picture_and_page(runs: Runs, tmp_path: Path) -> None:
    runs.add(ONE)
    runs.add({1: 3.0}, lr=2e-3)
    runs.add({4: 9.0}, state="diverged")
    for path in runs.paths:
        with (path / "config.yaml").open("a") as file:
            file.write(f"extra: {json.dumps(HOSTILE if path != runs.paths[3] else 'one')}\n")
    page = Page(write_report(runs.paths, tmp_path / "out"))
    assert "script" not in page.tags
    assert f"optim.lr=0.001, extra={HOSTILE}" in page.text
    figure = draw(read_runs(runs.paths))
    looks = [(line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()]
    assert looks[1:] == [("C0", ":"), ("C1", "-")], "the run that diverged, and the other group"
    loss = figure.axes[0]
    mean = loss.lines[1]  # after the legend's
    assert_close(mean.get_ydata(), 3 + mean.get_xdata() / 9 * 2)
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in loss.collections]
    assert_close(max(tops), 3 + 200 / 9 * 3)
