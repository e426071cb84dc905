"""Groups of seeds: means and differences as scipy has them, what does not compare, and how all of it is shown."""

import json
import math
from pathlib import Path

import matplotlib.collections
import numpy as np
import pytest
from close import assert_close
from test_report import HOSTILE, Page, make_run, metrics, points, undrawn  # noqa: F401, no figure is drawn here

from gpt2_ddp.config.tools import ReportConfig
from gpt2_ddp.reports.groups import Group, compare, content, describe, group_runs, table
from gpt2_ddp.reports.picture import COLORS, draw
from gpt2_ddp.reports.report import report, write_report
from gpt2_ddp.reports.runs import RunRecord, read_runs

ONE, TWO = {1: 3.31, 2: 3.27, 3: 3.42}, {1: 3.22, 2: 3.21, 3: 3.30}
METRIC = "last_val_loss"


class Runs:
    """Run folders in a folder: `add` makes one, `groups` reads all."""

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
            self.paths.append(make_run(self.folder / f"run{len(self.paths)}-seed{seed}", rows, seed, lr))
            (self.paths[-1] / "status.json").write_text(json.dumps({"state": state}))

    def read(self) -> list[RunRecord]:
        return read_runs(self.paths)

    def groups(self) -> list[Group]:
        return group_runs(self.read())


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path / "runs")


def arrays(*groups: dict) -> list[np.ndarray]:
    return [np.array([*losses.values()]) for losses in groups]


def test_means_are_scipys(runs: Runs) -> None:
    stats = pytest.importorskip("scipy.stats")
    runs.add(ONE)
    (group,) = runs.groups()
    for score, losses in {
        METRIC: ONE,
        "best_val_loss": {seed: loss - 0.5 for seed, loss in ONE.items()},
        "last_val_bits_per_byte": {seed: loss / 3 for seed, loss in ONE.items()},
        "best_val_bits_per_byte": {seed: (loss - 0.5) / 3 for seed, loss in ONE.items()},
    }.items():
        (values,) = arrays(losses)
        assert_close(group.mean(score), (values.mean(), stats.tstd(values)))
    assert group.heading == "run0"


@pytest.mark.parametrize(("other", "shared"), [
    (TWO, [1, 2, 3]), ({2: 3.2, 3: 3.5, 9: 1.0}, [2, 3]),  # a loss of another seed does not count
    ({3: 3.1, 4: 3.5, 5: 3.3, 6: 3.6}, []), ({7: 3.5, 8: 3.3}, []),
])  # fmt: skip
def test_differences_are_scipys(runs: Runs, other: dict, shared: list) -> None:
    stats = pytest.importorskip("scipy.stats")
    runs.add(ONE)
    runs.add(other, lr=2e-3)
    found = compare(*runs.groups(), METRIC)
    a, b = arrays({seed: ONE[seed] for seed in shared} or ONE, {seed: other[seed] for seed in shared} or other)
    theirs = stats.ttest_rel(b, a) if shared else stats.ttest_ind(b, a, equal_var=False)
    assert (found.paired, found.n) == (bool(shared), len(shared) or None)
    assert_close(found.difference, b.mean() - a.mean())
    assert_close(found.difference / found.standard_error, theirs.statistic)
    if shared:
        assert_close(found.standard_error, stats.sem(b - a))
    assert found.differs == (abs(theirs.statistic) > 2)
    assert (f"paired, {len(shared)} seeds" if shared else "unpaired") in found.text
    assert ("does not differ by" if abs(theirs.statistic) <= 2 else "): differs by") in found.text


def test_one_run_has_no_spread(runs: Runs) -> None:
    runs.add({1: 3.0})
    runs.add({1: 3.5, 2: 3.25}, lr=2e-3)
    runs.add({2: 4.0}, lr=3e-3)
    groups = runs.groups()
    assert [group.mean(METRIC)[1] is None for group in groups] == [True, False, True]
    assert [group.remarks() for group in groups] == [["one run: no spread"], [], ["one run: no spread"]]
    for other, difference in zip(groups[1:], (0.375, 1.0), strict=True):
        found = compare(groups[0], other, METRIC)
        assert (found.difference, found.standard_error, found.differs) == (difference, None, None)
        assert "one run: no spread" in found.text
        assert "differ" not in found.text
    assert compare(groups[1], groups[2], METRIC).standard_error is None


def test_left_out_runs_are_named(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO, lr=2e-3)
    for state in ("diverged", "failed", "stopped"):
        runs.add({4: 9.0}, lr=2e-3, state=state)
    runs.add({5: math.nan}, lr=2e-3)
    runs.add({6: None, 7: None}, lr=3e-3)
    groups = runs.groups()
    assert_close(groups[1].mean(METRIC)[0], np.mean([*TWO.values()]))
    states = ["run6-seed4: diverged", "run7-seed4: failed", "run8-seed4: stopped", "run9-seed5: no finite val_loss"]
    assert groups[1].remarks() == [f"{state}, not in the means" for state in states]
    assert [row["completed"] for row, _, _ in table(groups)] == ["3 of 3", "4 of 7", "2 of 2"]
    lines = "\n".join(describe(groups))
    assert all(run.name in lines for group in groups[1:] for run in group.runs if run not in group.scored)
    assert compare(groups[0], groups[2], METRIC).difference is None
    assert compare(groups[2], groups[0], METRIC).text.endswith("in the first group")


def test_equal_seeds_count_as_one(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO, lr=2e-3)
    runs.add({1: 3.24}, lr=2e-3)
    first, other = runs.groups()
    assert_close(other.values(METRIC), {"1": 3.23, "2": 3.21, "3": 3.30})
    assert other.remarks() == ["seed 1: 2 runs count as one"]
    assert compare(first, other, METRIC).n == 3


def test_other_tokens_do_not_compare(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO, lr=2e-3, val_tokens=512)
    runs.add({1: 3.0}, lr=3e-3)
    runs.add({2: 3.0}, lr=3e-3, val_tokens=512)
    first, other, mixed = runs.groups()
    for found in (compare(first, other, METRIC), compare(first, other, "last_val_bits_per_byte")):
        assert (found.difference, found.text) == (None, "not compared: evaluations of 512 and 999 tokens")
    assert mixed.mean(METRIC) == (None, None)
    assert mixed.remarks() == ["not compared: evaluations of 512 and 999 tokens"]


def test_other_tokenizers_compare_by_bytes(runs: Runs) -> None:
    runs.add(ONE)
    runs.add(TWO, lr=2e-3)
    for number, path in enumerate(runs.paths):
        start = {"event": "start", "step": 0, "tokenizer_sha256": str(number // 3)}
        (path / "metrics.jsonl").write_text(f"{json.dumps(start)}\n{(path / 'metrics.jsonl').read_text()}")
    groups = runs.groups()
    assert compare(*groups, METRIC).text == "not compared: the tokenizers differ"
    assert compare(*groups, "last_val_bits_per_byte").n == 3


def test_headings_are_the_fields_that_differ(runs: Runs) -> None:
    runs.add(dict.fromkeys(range(7), 3.0))
    texts = ["lr: 1\n  y: null", "lr: 1\n  y: null", "lr: 1", "lr: 1.0", "lr: null", None, None]
    for number, (path, text) in enumerate(zip(runs.paths, texts, strict=True)):
        config = f"seed: {number}\nrun_name: r{number}\neval:\n  tokens: 5\noptim:\n  {text}\n"
        (path / "config.yaml").write_text("{" if text is None else config)
    groups = runs.groups()
    assert [(group.heading, group.fields) for group in groups] == [
        ("optim.lr=1, optim.y=null", {"optim.lr": 1, "optim.y": None}),
        ("optim.lr=1, optim.y missing", {"optim.lr": 1}),
        ("optim.lr=1.0, optim.y missing", {"optim.lr": 1.0}),
        ("optim.lr=null, optim.y missing", {"optim.lr": None}),
        ("run5-seed5", {}),
        ("run6-seed6", {}),
    ]
    assert [len(group.runs) for group in groups] == [2, 1, 1, 1, 1, 1]
    assert group_runs(runs.read()[1:3])[1].heading == "optim.y missing"


def test_json_has_no_nan(runs: Runs) -> None:
    runs.add(ONE)
    runs.add({5: math.nan, 6: math.inf}, lr=2e-3, state="diverged")
    for path in runs.paths[3:]:
        (path / "config.yaml").write_text((path / "config.yaml").read_text() + "extra: .nan\n")
    assert report(ReportConfig(runs=tuple(map(str, runs.paths)), output=str(runs.folder / "x.json"))) == 0
    assert sorted(file.name for file in runs.folder.glob("x.*")) == ["x.html", "x.json", "x.png"]

    def refuse(name: str) -> None:
        raise AssertionError(name)

    found = json.loads((runs.folder / "x.json").read_text(), parse_constant=refuse)["groups"]
    assert found == content(runs.groups())
    assert [(group["n"], group["completed"], len(group["runs"])) for group in found] == [(3, 3, 3), (0, 0, 2)]
    assert found[0]["runs"][0].items() >= {"seed": 1, "state": "completed", METRIC: 3.31}.items()
    assert found[1]["differences"][METRIC]["differs"] is None
    assert found[1]["mean"][METRIC] is None
    write_report(runs.paths[:1], runs.folder / "single.json")
    assert json.loads((runs.folder / "single.json").read_text())["groups"][0]["n"] == 1


def test_picture_and_page(runs: Runs, tmp_path: Path) -> None:
    runs.add(ONE)
    runs.add({1: 3.0}, lr=2e-3)
    runs.add({4: 9.0}, state="diverged")
    for path, name in zip(runs.paths, [HOSTILE, HOSTILE, HOSTILE, "one", HOSTILE], strict=True):
        config = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(config + f"extra: {json.dumps(name)}\n")
    page = Page(write_report(runs.paths, tmp_path / "out"))
    assert page.tags.count("script") == 2
    means, others = page.tables[1:3]
    first, second = f"optim.lr=0.001, extra={HOSTILE}", "optim.lr=0.002, extra=one"
    assert means[second][:2] == ["1 of 1", "1"]
    drawn = points(tmp_path / "out/report.html")
    names = [curve["name"] for curve in drawn["runs"]]
    assert names[1:] == ["run4-seed4 (diverged)", second]
    assert [curve["color"] for curve in drawn["runs"]] == [COLORS[0], COLORS[0], COLORS[1]]
    assert (list(means)[1:], list(others)[1:]) == ([first, second], [first, second])
    picture = draw(runs.read(), "steps")
    mean = next(trace for trace in picture.traces if (trace.curve, trace.label) == (0, "train"))
    assert_close(mean.values, [3 + step / 9 * 2 for step in mean.steps], 1e-12)
    (band,) = [
        each.get_paths()[0].vertices for each in mean.panel.collections
        if isinstance(each, matplotlib.collections.PolyCollection) and each.get_alpha() == 0.2
        and len(each.get_paths()[0].vertices) > 2 * len(mean.steps)
    ]  # fmt: skip
    assert_close(max(band[:, 1]), max(mean.values) + 200 / 9)
