"""benchmark.py: its tables, turns and user errors on made-up contenders; and, slowly, real ones on a tiny model."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import expect_error
from ranks import forked_ranks, run_ranks
from test_gpu import TINY_PRESET

import gpt2_ddp
from benchmarks import checkpoint, harness, prepare, roofline, step
from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Case, interleave, run_benchmarks
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_step
from gpt2_ddp.training.run import Run


def test_ratios_are_of_one_turn_and_say_how_many_times_better_ours_is():
    rates = Case("a", "tokens/s", {OURS: [2.0, 6.0, 9.0], "baseline": [1.0, 2.0, 9.0]})
    seconds = Case("b", "s", {OURS: [2.0, 6.0, 9.0], "baseline": [1.0, 2.0, 9.0]}, more_is_better=False)
    assert (rates.ratios("baseline"), seconds.ratios("baseline")) == ([2, 3, 1], [1 / 2, 1 / 3, 1])
    assert [*rates.lines()][1] == ["a", "tokens/s", "baseline", "2", "2.000 (1.000–3.000)"]
    alone = Case("c", "GB/s", {"cpu": [1.0]})
    assert [*alone.lines()] == [["c", "GB/s", "cpu", "1", ""]]


def test_contenders_take_turns_and_warm_up_does_not_count():
    seen: list[str] = []

    def contender(name: str):
        return lambda: seen.append(name) or float(len(seen))

    assert interleave({"a": contender("a"), "b": contender("b")}, repeats=2) == {"a": [3, 5], "b": [4, 6]}
    assert seen == ["a", "b"] * 3


def test_the_json_holds_what_it_takes_to_read_the_figures(tmp_path, monkeypatch):
    table = [Case("a", "s", {OURS: [1.0], "b": [2.0]}, False)], ["n"]
    monkeypatch.setattr(roofline, "measure", lambda config: table)
    config = BenchmarkConfig(only=("roofline",), output=str(tmp_path), threads=3)
    assert run_benchmarks(config) == [table]
    found = json.loads((tmp_path / "roofline.json").read_text())
    assert (found["cases"][0]["figures"], found["versions"]["torch"]) == ({OURS: [1], "b": [2]}, torch.__version__)
    assert found["machine"]["memory"] > 1e9
    assert (found["settings"]["threads"], found["notes"]) == (3, ["n"])
    assert {"commit", "command"} <= found.keys()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(harness, "get_env_info", lambda: SimpleNamespace(_asdict=dict))  # it starts many commands
    run_benchmarks(config)
    assert json.loads((tmp_path / "roofline.json").read_text())["commit"] == "", "where git is missing"


def test_user_errors_come_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(roofline, "measure", lambda config: pytest.fail("nothing may be measured yet"))
    preset, nanogpt = tmp_path / "llama.yaml", {"only": ("roofline", "step"), "device": "cpu", "nanogpt": str(tmp_path)}
    expect_error(r"nanogpt = .*: has no model\.py", run_benchmarks, BenchmarkConfig(**nanogpt))
    (tmp_path / "model.py").touch()
    preset.write_text("model: {architecture: llama}\ntrain: {steps: 1}\n")
    config = BenchmarkConfig(**nanogpt, preset=str(preset))
    expect_error(r"nanogpt = .*: is a GPT-2, unlike the preset", run_benchmarks, config)
    expect_error("only = steps: should be 'step', 'prepare'", BenchmarkConfig.model_validate, {"only": ["steps"]})
    config = BenchmarkConfig(only=("roofline", "prepare"), text="/nowhere")
    expect_error("text = /nowhere: is not a file", run_benchmarks, config)
    config = BenchmarkConfig(only=("roofline",), device="cpu", output=str(preset / "o"))
    expect_error(r"output = .*cannot be written", run_benchmarks, config)


def test_the_package_does_not_import_the_benchmarks():
    package = Path(gpt2_ddp.__file__).parent
    imports = re.compile(r"^\s*(from|import) benchmarks", re.MULTILINE)
    assert [file for file in package.rglob("*.py") if imports.search(file.read_text(encoding="utf-8"))] == []


def test_ours_and_the_pool_count_the_same_tokens(tmp_path):
    rows = [{"text": f"document {number} of many\n" * number} for number in range(1, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ours = partial(prepare.ours, tmp_path / "rows.jsonl", 1, False)
    assert all(rate > 0 for rate in prepare.timed(ours))
    assert ours(tmp_path) == sum(len(prepare.tokens_of(row)) for row in rows)


def checkpoints(folder: Path) -> None:
    """What each contender of `checkpoint` resumes is what it saved, whatever was trained since."""
    config = BenchmarkConfig(device="cpu", preset=str(folder / "tiny.yaml"))
    training = step.short_run(config, folder, 1, "no", "off", checkpoint.CHANGES)
    step.random_tokens(folder / "random")
    with Run(training, Pretraining) as run:
        run.build()
        run.start()

        def state() -> dict[str, torch.Tensor]:
            snapshot = run.snapshot()
            assert snapshot
            return {name: value.clone() for name, value in (snapshot.model | snapshot.optimizer).items()}

        for name, (save, resume) in checkpoint.contenders(run, folder / "save").items():
            found = {}

            def save_noted(save=save, found=found):
                found.update(state())
                save()

            def resume_changed(resume=resume, found=found):
                train_step(run)
                assert not any(torch.equal(value, found[name]) for name, value in state().items())
                resume()

            still, durable, *_ = checkpoint.turn(run, folder / "save", save_noted, resume_changed)
            assert all(torch.equal(value, found[name]) for name, value in state().items()), name
            assert (durable > still) == ("background" in name), name


def test_what_a_contender_resumes_is_what_it_saved(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY_PRESET)
    run_ranks(checkpoints, 1, tmp_path)


@pytest.mark.slow
def test_a_tiny_step_and_a_tiny_roofline_of_every_contender(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "start_ranks", forked_ranks)  # fresh ones would import torch for seconds
    preset = tmp_path / "tiny.yaml"
    preset.write_text(TINY_PRESET)
    short = {"block_size": 32, "precision": ("no",), "repeats": 1, "seconds": 0.01, "output": str(tmp_path / "out")}
    config = BenchmarkConfig(only=("step", "roofline"), device="cpu", preset=str(preset), **short)
    (steps, notes), (rates, _) = run_benchmarks(config)
    rate, memory, tiny = steps
    assert set(rate.figures) == set(memory.figures) == {OURS, step.BARE, "transformers, Accelerate"}
    assert all(100 < figure < 1e6 for of in rate.figures.values() for figure in of)
    assert all(100 < figure < 4000 for of in memory.figures.values() for figure in of)
    assert set(tiny.figures) == {OURS, step.BARE}
    assert notes[0].startswith("bookkeeping: a tiny step of ours takes ")
    assert {case.unit for case in rates} == {"TFLOP/s", "GB/s"}
    assert json.loads((tmp_path / "out/step.json").read_text())["cases"][0]["figures"] == rate.figures
