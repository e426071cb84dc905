"""Groups of seeds: means and differences as scipy has them, what does not compare, and how all of it is shown."""

import json
import math
from pathlib import Path

import matplotlib.collections
import numpy as np
import pytest
from close import assert_close
from test_report import HOSTILE, START, Page, make_run, metrics

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
            rows = [row | {"loss": 3 + row["step"] / 9 * seed} for row in metrics(20)]
            for row in rows:
                row |= {"val_loss": row["val_loss"] + 5, "val_bits_per_byte": 3.0} if "val_loss" in row else {}
            if loss is None:
                rows = [{name: row[name] for name in row if "val_" not in name} for row in rows]
            else:
                rows[5] |= {"val_loss": 0.1, "val_bits_per_byte": 0.1, "val_tokens": 5}
                rows[10] |= {"val_loss": loss - 0.5, "val_bits_per_byte": (loss - 0.5) / 3}
                rows[-1] |= {"val_loss": loss, "val_bits_per_byte": loss / 3} | last
            if "tokenizer" in last:
                rows.insert(0, START | {"tokenizer_sha256": last["tokenizer"]})
            self.paths.append(make_run(self.folder / f"run{len(self.paths)}", rows, seed, lr, state))

    def content(self) -> list[dict]:
        return content(group_runs(read_runs(self.paths)))


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


def test_means_are_scipys(runs: Runs) -> None:
    stats = pytest.importorskip("scipy.stats")
    runs.add(ONE)
    (group,) = runs.content()
    values = np.array([*ONE.values()])
    for score, scale in (("val_loss", 1), ("val_bits_per_byte", 3)):
        for kind, less in (("last", 0), ("best", 0.5)):
            wanted = (values - less) / scale
            found = group["mean"][f"{kind}_{score}"], group["sd"][f"{kind}_{score}"]
            assert_close(found, (wanted.mean(), stats.tstd(wanted)))


@pytest.mark.parametrize(("other", "shared"), [
    (TWO, [1, 2, 3]), ({2: 3.2, 3: 3.5, 9: 1.0}, [2, 3]),  # a loss of another seed does not count
    ({3: 3.1, 4: 3.5, 5: 3.3, 6: 3.6}, []), ({7: 3.5, 8: 3.3}, []),
])  # fmt: skip
def test_differences_are_scipys(other: dict, shared: list) -> None:
    stats = pytest.importorskip("scipy.stats")
    found = compare(ONE, other)
    a, b = (np.array([each[seed] for seed in shared or each]) for each in (ONE, other))
    theirs = stats.ttest_rel(b, a) if shared else stats.ttest_ind(b, a, equal_var=False)
    assert (found.paired, found.n) == (bool(shared), len(shared) or None)
    assert_close(found.difference, b.mean() - a.mean())
    assert_close(found.difference / found.standard_error, theirs.statistic)
    assert found.differs == (abs(theirs.statistic) > 2)
    assert ("does not differ by" in found.text) == (not found.differs)


def test_one_run_has_no_spread(runs: Runs) -> None:
    runs.add({1: 3.0})
    runs.add({1: 3.5, 2: 3.25}, lr=2e-3)
    runs.add({2: 4.0}, lr=3e-3)
    groups = runs.content()
    assert [group["sd"][METRIC] is None for group in groups] == [True, False, True]
    assert [len(group["remarks"]) for group in groups] == [1, 0, 1]
    for group, difference in zip(groups[1:], (0.375, 1.0), strict=True):
        found = group["differences"][METRIC]
        assert (found["difference"], found["standard_error"], found["differs"]) == (difference, None, None)
    assert compare({1: 3.5, 2: 3.25}, {2: 4.0}).standard_error is None


def test_left_out_runs_are_named(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO, lr=2e-3)
    runs.add({1: 3.24}, lr=2e-3)  # equal seeds count as one
    for state in ("diverged", "failed", "stopped"):
        runs.add({4: 9.0}, lr=2e-3, state=state)
    runs.add({5: math.nan}, lr=2e-3)
    runs.add({6: None, 7: None}, lr=3e-3)
    first, second, third = runs.content()
    assert_close(second["mean"][METRIC], np.mean([3.23, 3.21, 3.30]))
    assert [second[key] for key in ("completed", "n")] == [5, 3]
    assert second["differences"][METRIC]["n"] == 3
    assert third["differences"][METRIC]["difference"] is None
    lines = "\n".join(describe(group_runs(read_runs(runs.paths))))
    for number, why in {7: "diverged", 8: "failed", 9: "stopped", 10: "no finite val_loss", 11: "no finite"}.items():
        assert f"run{number}: {why}" in lines
    assert "seed 1: 2 runs" in lines
    assert ("3 of 3" in lines, "5 of 8" in lines, "2 of 2" in lines) == (True,) * 3
    assert f"{first['mean'][METRIC]:.4f} ± {first['sd'][METRIC]:.2g}" in lines


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
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + "extra: .nan\n")
    assert report(ReportConfig(runs=tuple(map(str, runs.paths)), output=str(runs.folder / "x.json"))) == 0
    assert sorted(file.name for file in runs.folder.glob("x.*")) == ["x.html", "x.json", "x.png"]
    text = (runs.folder / "x.json").read_text()
    assert "NaN" not in text
    found = json.loads(text)["groups"]
    assert found == runs.content()
    assert [(group["n"], group["completed"], len(group["runs"])) for group in found] == [(3, 3, 3), (0, 0, 2)]
    assert found[0]["runs"][0].items() >= {"seed": 1, "state": "completed", METRIC: 3.31}.items()


def test_picture_and_page(runs: Runs, tmp_path: Path) -> None:
    runs.add(ONE)
    runs.add({1: 3.0}, lr=2e-3)
    runs.add({4: 9.0}, state="diverged")
    for path, name in zip(runs.paths, [HOSTILE, HOSTILE, HOSTILE, "one", HOSTILE], strict=True):
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + f"extra: {json.dumps(name)}\n")
    page = Page(write_report(runs.paths, tmp_path / "out"))
    assert "script" not in page.tags
    assert f"optim.lr=0.001, extra={HOSTILE}" in page.text
    figure = draw(read_runs(runs.paths))
    looks = [(line.get_label(), line.get_color(), line.get_linestyle()) for line in figure.legends[0].get_lines()]
    assert looks[1:] == [("run4 (diverged)", "C0", ":"), ("optim.lr=0.002, extra=one", "C1", "-")]
    loss = figure.axes[0]
    mean = loss.lines[1]  # after the legend's
    assert_close(mean.get_ydata(), 3 + mean.get_xdata() / 9 * 2)
    tops = [band.get_paths()[0].vertices[:, 1].max() for band in loss.collections]
    assert isinstance(loss.collections[0], matplotlib.collections.PolyCollection)
    assert_close(max(tops), 3 + 200 / 9 * 3)
