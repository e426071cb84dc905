"""The comparison: every way trains the same, and what the table says is what was measured."""

import pytest
import torch
import yaml
from close import assert_close
from commands import expect_error
from ranks import run_ranks
from runs import job_config, training_config

import gpt2_ddp.compare as module
from gpt2_ddp.compare import (
    COLUMNS,
    RunResult,
    as_markdown,
    compare,
    difference,
    measure,
    numbers,
    read_job,
    ways,
)
from gpt2_ddp.config.tools import CompareConfig
from gpt2_ddp.files import read_json


def tiny(corpus, folder):
    return training_config(corpus, folder, {"train.mixed_precision": "no"})


def test_ddp_and_data_parallel_end_with_the_parameters_of_one_process(tmp_path, corpus):
    config = tiny(corpus, tmp_path / "runs")
    runs = {}
    for name, world, steps in (
        ("single", 1, 6),
        ("ddp", 2, 6),
        ("replicas", 1, 6),
        ("shorter", 1, 5),
    ):
        own = config.model_copy(update={"run_name": name})
        runs[name], *others = run_ranks(
            measure, world, own, name == "replicas", steps, tmp_path / name
        )
        assert all(run == runs[name] for run in others)
    single = runs["single"]
    ddp = runs["ddp"]
    assert difference(tmp_path / "ddp", tmp_path / "single") < 1e-5
    assert difference(tmp_path / "replicas", tmp_path / "single") < 1e-5
    assert difference(tmp_path / "shorter", tmp_path / "single") > 1e-4, (
        "a step that was not taken would show"
    )
    assert ddp.parameters == single.parameters
    assert_close(ddp.metrics, single.metrics, 1e-4)
    assert 50e6 < ddp.peak_memory < 2e9


def test_difference(tmp_path):
    torch.save(torch.tensor([3.0, 0.0, 4.0]), tmp_path / "one")
    torch.save(torch.tensor([3.03, 0.0, 3.96]), tmp_path / "other")
    assert_close(difference(tmp_path / "other", tmp_path / "one"), 0.05 / 5, 1e-4)
    assert difference(tmp_path / "one", tmp_path / "one") == 0


def runs(*seconds):
    return [RunResult(s, 300_000_000, {"val_loss": 1.5}, 7) for s in seconds]


def test_the_table():
    single = runs(2.0, 2.2, 3.0)
    double = runs(1.0, 1.3, 1.25)
    rows = [
        {"job": "gpt2", "way": "single", **numbers(single, single, 10, 0.0)},
        {"job": "gpt2", "way": "DDP-2", **numbers(double, single, 10, 3e-7)},
    ]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in as_markdown(rows).splitlines()
    ]
    head, _, *lines = cells
    assert head == COLUMNS
    assert lines[0] == [
        "gpt2",
        "single",
        "2.2 (2–3)",
        "1.00 (1.00–1.00)",
        "300",
        "val_loss 1.5000",
        "0.0e+00",
    ]
    assert lines[1][2:] == ["1.25 (1–1.3)", "2.00 (1.69–2.40)", "300", "val_loss 1.5000", "3.0e-07"]


@pytest.fixture
def no_machine(monkeypatch):
    """No run is real: a step takes 10 ms."""

    def run_way(name, job, way, steps, weights):
        weights.write_bytes(b"")
        return runs(0.01 * steps)[0]

    monkeypatch.setattr(module, "run_way", run_way)
    monkeypatch.setattr(module, "difference", lambda one, other: 0.5)


def test_what_was_measured_stays_when_a_later_job_fails(tmp_path, no_machine, monkeypatch):
    config = CompareConfig(
        jobs=("regression", "transformer"), steps=10, repeats=1, device="cpu", output=str(tmp_path)
    )
    run_way = module.run_way

    def killed(name, *others):
        if name.startswith("transformer"):
            raise KeyboardInterrupt
        return run_way(name, *others)

    monkeypatch.setattr(module, "run_way", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(config)
    found = read_json(tmp_path / "compare.json")
    assert {row["job"] for row in found["rows"]} == {"regression"}
    assert [row["difference"] for row in found["rows"]] == [0.5, 0.5]
    assert "regression" in (tmp_path / "compare.md").read_text()


@pytest.mark.parametrize(("gpus", "missing"), [(0, "DataParallel"), (2, "DDP-4")])
def test_ways_that_are_missing_are_noted(capsys, gpus, missing):
    found = [way.name for way in ways((2, 4), gpus)]
    assert found == [
        name for name in ("single", "DataParallel", "DDP-2", "DDP-4") if name != missing
    ]
    assert f"{missing} is not measured" in capsys.readouterr().err


def test_mistakes(tmp_path, monkeypatch):
    expect_error("jobs = lenet: ", read_job, "lenet", CompareConfig(), "cpu", tmp_path)
    for wrong in (1,), (65,):
        expect_error("processes = ", CompareConfig, processes=wrong)
    expect_error(
        r"--config = no.yaml", read_job, "regression:no.yaml", CompareConfig(), "cpu", tmp_path
    )
    expect_error(r"output = /dev/null/x: ", compare, CompareConfig(output="/dev/null/x"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_error("processes = 2: ", compare, CompareConfig())


def test_a_comparison_is_run_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        module,
        "start_processes",
        lambda function, world, *args: run_ranks(function, world, *args)[0],
    )
    config = job_config("regression", tmp_path / "runs", {"train.mixed_precision": "no"})
    config = config.model_dump(mode="json", exclude={"launch"})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    jobs = (f"regression:{tmp_path}/tiny.yaml",)
    options = {"steps": 5, "repeats": 2, "device": "cpu", "output": str(tmp_path / "out")}
    compare(CompareConfig(jobs=jobs, **options))
    found = capsys.readouterr()
    assert (tmp_path / "out/compare.md").read_text() == found.out
    assert not (tmp_path / "runs").exists()
    rows = read_json(tmp_path / "out/compare.json")["rows"]
    assert [(row["job"], row["way"]) for row in rows] == [("tiny", "single"), ("tiny", "DDP-2")]
    single, ddp = rows
    assert single["difference"] == 0, "a repeat is bitwise the same"
    assert ddp["difference"] < 1e-4
    order = [line.split()[:2] for line in found.err.splitlines() if line.startswith("tiny ")]
    assert order == [["tiny", "single"], ["tiny", "DDP-2"]] * 2
