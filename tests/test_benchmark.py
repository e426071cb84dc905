"""benchmark.py: its tables, turns and mistakes on made-up sides; and, slowly, real ones on a tiny model."""

import json
import os
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from ranks import forked_ranks, run_ranks

from gpt2_ddp.benchmark import benchmark, ceiling, checkpoint, gpu, sides, step
from gpt2_ddp.benchmark.peers import definitions
from gpt2_ddp.benchmark.sides import StepTimer, Unavailable
from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.compare.run import CommFraction
from gpt2_ddp.compare.table import share_words
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.compare import CompareConfig
from gpt2_ddp.config.jobs import ClassifierConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.data.tokenizer import TOKENIZER_FILE
from gpt2_ddp.errors import UserError

ROOT = Path(__file__).parents[1]
TINY = "train: {steps: 10}\nmodel: {n_layer: 1, n_head: 2, n_embd: 32}\noptim: {warmup_steps: 5}\n"


def test_ratios_are_of_one_turn_and_say_how_many_times_better_ours_is():
    rates = Case("a", "tokens/s", {OURS: [2.0, 6.0, 9.0], "peer": [1.0, 2.0, 9.0]})
    seconds = Case("b", "s", {OURS: [2.0, 6.0, 9.0], "peer": [1.0, 2.0, 9.0]}, more_is_better=False)
    assert (rates.ratios("peer"), seconds.ratios("peer")) == ([2, 3, 1], [1 / 2, 1 / 3, 1])
    assert rates.lines()[1] == ["a", "tokens/s", "peer", "2", "2.000 (1.000–3.000)"]
    alone = Case("c", "GB/s", {"cpu": [1.0]})
    assert alone.lines() == [["c", "GB/s", "cpu", "1", ""]]


def test_sides_take_turns_and_warm_up_does_not_count():
    seen: list[str] = []

    def side(name: str):
        return lambda: seen.append(name) or float(len(seen))

    assert interleave({"a": side("a"), "b": side("b")}, repeats=2) == {"a": [3, 5], "b": [4, 6]}
    assert seen == ["a", "b"] * 3


def test_a_turn_has_steps_for_its_seconds_and_a_side_ends_with_the_pipe():
    ours, theirs = Pipe()
    steps: list[int] = []

    def side() -> None:
        turns = StepTimer(theirs, torch.device("cpu"), 0.05)
        with suppress(SystemExit):
            while True:
                time.sleep(0.01)
                steps.append(1)
                turns.done()

    thread = Thread(target=side, daemon=True)
    thread.start()
    assert ours.recv() is None, "warm"
    assert len(steps) == 2
    ours.send(None)
    reading = ours.recv()
    assert 1 <= len(steps) - 2 <= 6  # five of 0.01 s, or fewer where sleeping takes longer
    assert reading.memory > 50e6
    ours.close()
    thread.join(10)
    assert not thread.is_alive()


def test_the_json_holds_what_it_takes_to_read_the_figures(tmp_path, monkeypatch):
    found = json.loads(Table("x", [Case("a", "s", {OURS: [1.0], "b": [2.0]}, False)], {"k": 1}, ["n"]).as_json())
    assert (found["cases"][0]["ratios"], found["versions"]["torch"]) == ({"b": [2]}, torch.__version__)
    assert found["machine"]["memory"] > 1e9
    assert (found["settings"], found["notes"]) == ({"k": 1}, ["n"])
    assert {"commit", "command"} <= found.keys()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert json.loads(Table("step", [], {}, []).as_json())["commit"] == "", "where git is missing"


def test_communication_that_noise_could_be_is_no_figure():
    assert share_words(CommFraction(0.03, 0.01)) == "3.0% ± 1.0%"
    assert share_words(CommFraction(0.01, 0.02)) == share_words(CommFraction(-0.5, 0.02)) == "below the noise of ± 2.0%"


def test_mistakes_come_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(ceiling, "measure", lambda config: pytest.fail("nothing may be measured yet"))
    with pytest.raises(UserError, match=r"nanogpt = .*: has no model\.py"):
        benchmark.run_benchmarks(
            BenchmarkConfig(only=("ceiling", "step"), device="cpu", nanogpt=str(tmp_path), output=str(tmp_path / "o"))
        )
    with pytest.raises(UserError, match="only = steps: is no benchmark"):
        BenchmarkConfig(only=("steps",))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output = .*cannot be written"):
        benchmark.run_benchmarks(BenchmarkConfig(only=("ceiling",), device="cpu", output=str(tmp_path / "file/o")))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_what_cannot_be_measured_here_says_so(tmp_path, monkeypatch, capsys):
    config = BenchmarkConfig(only=("ceiling",), output=str(tmp_path))
    with pytest.raises(Unavailable):
        ceiling.check(config)
    with pytest.raises(UserError, match="only = ceiling: needs a GPU"):
        benchmark.run_benchmarks(config)
    monkeypatch.setattr(benchmark, "BENCHMARKS", ("ceiling",))
    assert benchmark.run_benchmarks(BenchmarkConfig(output=str(tmp_path))) == []
    assert capsys.readouterr().out.startswith("ceiling: not measured, as it needs a GPU")


CHECKOUT = """
import beside
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    n_layer: int = 1

class GPT(nn.Module):
    pass

raise SystemExit("a training")
"""


def test_a_checkouts_classes_are_had_without_its_training(tmp_path):
    (tmp_path / "beside.py").write_text("raise ValueError")
    (tmp_path / "train.py").write_text(CHECKOUT)
    found = definitions(tmp_path / "train.py")
    assert found.GPTConfig(n_layer=3).n_layer == 3
    assert isinstance(found.GPT(), torch.nn.Module)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_commands_for_a_gpu_are_such_that_a_script_takes_them(device):
    words = gpu._words(BenchmarkConfig(output="o"), device)
    kinds = {"train_gpt2": TrainingConfig, "train_classifier": ClassifierConfig, "benchmark": BenchmarkConfig}
    kinds["compare_parallel"] = CompareConfig
    for name, part in gpu.PARTS.items():
        command = part.format(**words).split()
        script = next(number for number, word in enumerate(command) if word.startswith("scripts/"))
        assert (ROOT / command[script]).is_file(), name
        if kind := kinds.get(Path(command[script]).stem):
            config = load(kind, command[script + 1 :], "configs/gpt2_stdlib.yaml" if kind is TrainingConfig else None)
            if name in ("AdamW", "200 in bf16"):
                assert config.optim.name == {"AdamW": "adamw"}.get(name, "muon"), "one is compared with the other"
            assert name != "ResNet" or config.model.sync_batchnorm == (device == "cuda")


@pytest.fixture
def parts(monkeypatch):
    """Three parts on a clock of their own: what each takes, and (part, seconds it was given) of those that were run."""
    clock, takes, given = [0.0], {"short": 5.0, "long": 100.0, "broken": 5.0}, []

    def run(part, environment, limit, log):
        given.append((part, limit))
        log.write_text("...\nlast words")
        os.utime(log, (len(given), len(given)))
        clock[0] += min(takes[part], limit)
        return 124 if takes[part] > limit else int(part == "broken"), min(takes[part], limit)

    monkeypatch.setattr(gpu, "PARTS", {name: name for name in takes})
    monkeypatch.setattr(gpu, "LIMITS", {"short": 20, "long": 100, "broken": 20})
    monkeypatch.setattr(gpu, "_run", run)
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(gpu, "random_tokens", lambda *_: None)
    monkeypatch.setattr(gpu, "_pictures", lambda _: None)
    return SimpleNamespace(clock=clock, takes=takes, given=given)


def call(output: Path, within: float | None) -> Table:
    return gpu.measure(BenchmarkConfig(device="cpu", output=str(output), within=within))


def test_a_call_for_a_gpu_ends_within_its_seconds_and_the_next_one_goes_on(parts, tmp_path):
    first = call(tmp_path, 60)
    assert parts.given == [("short", 40), ("broken", 40)], "limits are twice as long on a CPU; `long` does not fit"
    assert first.notes[-1].endswith("goes on: long")
    call(tmp_path, 60)
    assert parts.given[2:] == [("long", 50)], "never begun; no call has its 200 s: it gets what there is"
    call(tmp_path, 60)
    assert parts.given[3:] == [("broken", 40)], "tried before `long`, whose turn was later"
    parts.takes["long"] = 30
    call(tmp_path, 60)
    assert parts.given[4:] == [("long", 50)]
    assert [case.what for case in call(tmp_path, None).cases] == list(gpu.PARTS), "in their order, whatever ran first"


def test_a_part_for_a_gpu_that_did_not_end_well_is_told_and_run_again(parts, tmp_path):
    parts.takes["long"] = 300
    table = call(tmp_path, None)
    units = {case.what: case.unit for case in table.cases}
    assert units == {"short": "s", "long": "s, out of time", "broken": "s, FAILED"}
    ends = [note.split(" (")[0] for note in table.notes]
    assert ends == ["long: ended with 124: last words", "broken: ended with 1: last words"]
    call(tmp_path, None)
    assert [part for part, _ in parts.given] == ["short", "long", "broken", "long", "broken"]
    assert "long: ended with 124 after the 50 of 200 s that --within left" in call(tmp_path, 60).notes[0]
    assert "broken: ended with 1: " in call(tmp_path, 30).notes[0], "not for want of time"


def test_a_part_for_a_gpu_begins_its_run_anew_but_where_it_goes_on_with_one(monkeypatch, tmp_path):
    """The run of one that failed would be resumed, and `straight` not be straight."""
    monkeypatch.setattr(gpu, "random_tokens", lambda *_: None)
    monkeypatch.setattr(gpu, "_pictures", lambda _: None)
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.PARTS[name] for name in ("straight", "first half", "second half")})
    codes, begun = {"straight": [1, 0], "first half": [1, 0], "second half": [1, 0]}, []

    def run(part, environment, limit, log):
        name, folder = log.stem.replace("_", " "), tmp_path / part.partition("--run_name ")[2].split()[0]
        begun.append((name, folder.exists()))
        folder.mkdir(exist_ok=True)
        log.write_text("last words")
        return codes[name].pop(0), 1.0

    monkeypatch.setattr(gpu, "_run", run)
    assert call(tmp_path, None).notes[-1].endswith("goes on: second half")
    for _ in range(3):
        call(tmp_path, None)
    anew = [("straight", False), ("first half", False)]
    assert begun == anew * 2 + [("second half", True)] * 2


def test_random_tokens_that_a_kill_has_cut_short_are_written_anew(tmp_path):
    folder = tmp_path / "random"
    folder.mkdir()
    for name in (".prepare.lock", TOKENIZER_FILE, ".train_000000.bin.tmp"):
        (folder / name).touch()
    step.random_tokens(folder, 257, 1000)
    assert len(TokenStream(folder, read_manifest(folder), "train")) == 1000


def checkpoints(folder: Path) -> None:
    """Every side of `checkpoint`: what it takes from its file is what it saved, whatever was trained since."""
    training = checkpoint.Training(BenchmarkConfig(device="cpu", preset=str(folder / "tiny.yaml")))

    def state() -> dict[str, torch.Tensor]:
        snapshot = training.snapshot()
        return {name: value.clone() for name, value in (snapshot.model | snapshot.optimizer).items()}

    sides = {"ours": "ours", "behind": "ours", "torch": "torch", "accelerate": "accelerate"}
    for save, resume in sides.items():
        training.place = folder / save
        training.step()
        found = {}

        def trained_on(save=save, found=found):
            found.update(state())
            getattr(training, f"save_{save}")()

        def resumed(resume=resume, found=found):
            training.step()
            assert not any(torch.equal(value, found[name]) for name, value in state().items())
            getattr(training, f"resume_{resume}")()

        took = training.turn(trained_on, resumed)
        assert all(torch.equal(value, found[name]) for name, value in state().items()), save
        assert (took.durable > took.still) == (save == "behind"), took


def test_what_a_side_resumes_is_what_it_saved(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    run_ranks(checkpoints, 1, tmp_path)


@pytest.mark.slow
def test_a_tiny_step_and_a_tiny_ceiling_on_every_side(tmp_path, monkeypatch):
    monkeypatch.setattr(sides, "start_ranks", forked_ranks)  # fresh ones would import torch for seconds
    preset = tmp_path / "tiny.yaml"
    preset.write_text(TINY)
    short = {"block_size": 32, "precision": ("no",), "repeats": 1, "seconds": 0.01, "output": str(tmp_path / "out")}
    config = BenchmarkConfig(only=("step", "ceiling"), device="cpu", preset=str(preset), **short)
    steps, ceilings = benchmark.run_benchmarks(config)
    rate, memory, tiny = steps.cases
    assert set(rate.figures) == set(memory.figures) == {OURS, step.BARE, "transformers, Accelerate"}
    assert all(100 < figure < 1e6 for of in rate.figures.values() for figure in of)
    assert all(100 < figure < 4000 for of in memory.figures.values() for figure in of)
    assert set(tiny.figures) == {OURS, step.BARE}
    assert {case.unit for case in ceilings.cases} == {"TFLOP/s", "GB/s"}
    assert json.loads((tmp_path / "out/step.json").read_text())["cases"][0]["figures"] == rate.figures
