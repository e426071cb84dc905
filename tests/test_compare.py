"""The comparison: every way trains the same, and what the table says is what was measured."""

import json
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from close import assert_close
from commands import expect_error
from ranks import run_ranks
from runs import job_config, training_config

from gpt2_ddp.compare import compare as module
from gpt2_ddp.compare.compare import Machine, Row, Strategy, as_markdown, compare, difference, read_job
from gpt2_ddp.compare.run import WARM_UP, CommFraction, RunResult, communication_share, measure, peak_memory
from gpt2_ddp.config.tools import CompareConfig
from gpt2_ddp.config.training import TrainingConfig

CPU = Machine(gpus=0, cores=2, device="cpu")


def tiny(corpus: Path, folder: Path) -> TrainingConfig:
    return training_config(corpus, folder, {"train.mixed_precision": "no"})


def test_ddp_and_data_parallel_end_with_the_parameters_of_one_process(tmp_path, corpus):
    config, runs = tiny(corpus, tmp_path / "runs"), {}
    for name, world, steps in (("single", 1, 6), ("ddp", 2, 6), ("replicas", 1, 6), ("shorter", 1, 5)):
        own = config.model_copy(update={"run_name": name})
        runs[name], *others = run_ranks(measure, world, own, name == "replicas", 1, steps, tmp_path / name)
        assert all(run == runs[name] for run in others)
    single, ddp = runs["single"], runs["ddp"]
    assert difference(tmp_path / "ddp", tmp_path / "single")[0] < 1e-5
    assert difference(tmp_path / "replicas", tmp_path / "single")[0] < 1e-5
    assert difference(tmp_path / "shorter", tmp_path / "single")[0] > 1e-4, "a step that was not taken would show"
    assert (ddp.steps, ddp.samples, ddp.parameters) == (single.steps, single.samples, single.parameters)
    assert_close(ddp.metrics, single.metrics, 1e-4)
    assert ddp.steps_per_epoch == single.steps_per_epoch
    assert (single.communication, len(single.peak_memory), single.threads) == (None, 1, 1)
    assert ddp.communication is not None
    assert -1 < ddp.communication.share < 1
    assert ddp.communication.noise > 0
    assert [50e6 < peak < 2e9 for peak in ddp.peak_memory] == [True, True]


def test_only_the_timed_steps_count(tmp_path, corpus):
    run = run_ranks(timed_by_hand, 1, tiny(corpus, tmp_path), tmp_path / "weights")[0]
    assert run.samples == 4 * 12
    assert_close(run.seconds, 4 * 0.05)  # the clock stands still but in steps: 1 s in those of the warm-up


def timed_by_hand(config, weights) -> RunResult:
    from gpt2_ddp.compare import run as module

    train_step, clock, taken = module.train_step, [0.0], []

    def slow(run):
        taken.append(run)
        clock[0] += 1 if len(taken) <= WARM_UP else 0.05
        return train_step(run)

    module.train_step, module.time = slow, SimpleNamespace(perf_counter=lambda: clock[0])
    return measure(config, False, 1, 4, weights)


def test_difference(tmp_path):
    from safetensors.torch import save_file

    one = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    save_file(one, tmp_path / "one")
    save_file({"a": one["a"] + torch.tensor([0.03, 0.0]), "b": one["b"] - 0.04}, tmp_path / "other")
    norm, largest = difference(tmp_path / "other", tmp_path / "one")
    assert_close(norm, 0.05 / 5, 1e-4)
    assert_close(largest, 0.04, 1e-4)
    assert difference(tmp_path / "one", tmp_path / "one") == (0, 0)


def test_peak_memory_keeps_what_was_freed():
    before, after = run_ranks(peaks_around_an_allocation, 1)[0]
    assert 250e6 < after - before < 350e6


def peaks_around_an_allocation() -> tuple[int, int]:
    device = torch.device("cpu")
    before = peak_memory(device)
    torch.ones(75_000_000)
    return before, peak_memory(device)


@pytest.mark.timed
@pytest.mark.slow
def test_share_of_a_known_communication(tmp_path):
    # whole steps of 24: a short one takes as long, and samples are counted
    config = job_config("mlp", tmp_path, {"train.mixed_precision": "no", "data.points": 96})
    shares = run_ranks(share_with, 2, config.model_copy(update={"run_name": "hook"}), 0.04, 0)
    assert all(0.6 < share < 1 for share in shares)
    waiting, slow = run_ranks(share_with, 2, config.model_copy(update={"run_name": "slow"}), 0, 0.1)
    assert waiting > 0.5
    assert slow < 0.2


def share_with(config, all_reduce: float, last_rank: float) -> float | None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from gpt2_ddp.compare import run as module
    from gpt2_ddp.tasks.jobs import make_job
    from gpt2_ddp.tasks.supervised import Supervised
    from gpt2_ddp.training.run import Run

    train_step = module.train_step

    def hook(state, bucket):
        time.sleep(all_reduce)
        return allreduce_hook(None, bucket)

    def slow(run):
        time.sleep(last_rank * run.accelerator.process_index)
        return train_step(run)

    module.train_step = slow
    run = Run(config, partial(Supervised, make_job))
    run.build()
    run.model.register_comm_hook(None, hook)
    share = communication_share(run, 2)
    return share and share.share


def runs(*seconds: float, communication: CommFraction | None = None) -> list[RunResult]:
    peaks, metrics = (300_000_000, 200_000_000), {"val_loss": 1.5}
    return [RunResult(10, 320, s, peaks, communication, metrics, 7, 1, 5) for s in seconds]


@pytest.fixture
def rows() -> list[Row]:
    single, double = runs(2.0, 2.2, 3.0), runs(1.0, 1.3, 1.25, communication=CommFraction(0.2, 0.01))
    zero, small = [(0.0, 0.0)] * 3, [(1e-7, 1e-8), (3e-7, 2e-8), (0.0, 0.0)]
    return [
        Row("gpt2", Strategy("single", 1, 1), "", single, single, zero),
        Row("gpt2", Strategy("DataParallel", 1, 2), "needs 2 GPUs, this comparison has 0", [], single, []),
        Row("gpt2", Strategy("DDP-2", 2, 2), "", double, single, small),
    ]


def test_the_table(rows):
    lines = as_markdown(rows, ["a note"]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|") if cell.strip()] for line in lines[:5]]
    assert all(len(line) == 11 for line in cells)
    assert (cells[0][2], cells[0][-1]) == ("wall s (min–max)", "largest Δ")
    assert cells[2][:5] == ["gpt2", "single", "2.2 (2–3)", "145.5", "1.00"]
    assert cells[3][:4] == ["gpt2", "DataParallel", "needs 2 GPUs, this comparison has 0", "–"]
    right = "gpt2 | DDP-2 | 1.25 (1–1.3) | 256 | 1.76 (1.69–2.40) | 88% | 300 | 20.0% ± 1.0% | val_loss 1.5000"
    assert cells[4] == [*right.split(" | "), "3.0e-07", "2.0e-08"]
    assert lines[-1] == "- a note"


def test_the_noise_of_communication_is_that_of_the_blocks_or_of_the_repeats():
    def numbers(*shares: tuple[float, float]) -> dict:
        repeats = [runs(1.0, communication=CommFraction(*share))[0] for share in shares]
        n = len(shares)
        return Row("line", Strategy("DDP-2", 2, 2), "", repeats, runs(*[1.0] * n), [(0.0, 0.0)] * n).numbers()

    two, three = [(0.1, 0.03), (0.1, 0.05)], [(0.0, 0.01), (0.1, 0.01), (0.2, 0.01)]
    for shares, share, noise in (([(0.1, 0.03)], 0.1, 0.03), (two, 0.1, 0.04), (three, 0.1, 0.1)):
        found = numbers(*shares)
        assert_close((found["communication"], found["communication_noise"]), (share, noise))
    cells = list(module.table_row(numbers((-0.02, 0.12))).values())
    assert cells[7] == "below the noise of ± 12.0%"
    assert cells[2:5] == ["1", "320", "1.00"], "of one run there are no extremes"


@pytest.fixture
def no_machine(monkeypatch):
    """No run is real: a step takes a second, but the first ten take a minute more; the machine is idle."""
    taken = []

    def run_way(name, job, config, way, steps, weights):
        taken.append(steps)
        weights.write_bytes(b"")
        return runs(60.0 * (steps < 10) + 0.01 * steps)[0]

    monkeypatch.setattr(module, "run_way", run_way)
    monkeypatch.setattr(module, "difference", lambda one, other: (0.0, 0.0))
    monkeypatch.setattr(module.psutil, "cpu_percent", lambda interval: 0.0)
    return taken


def test_trials_grow_to_a_tenth_of_the_steps(tmp_path, no_machine):
    _, job = read_job("regression", CompareConfig(), CPU, tmp_path)
    single = CPU.ways(())[0][0]
    assert module.steps_for("line", job, CompareConfig(seconds=700), single, tmp_path) == 5000
    assert no_machine == [5, 20, 500], "by the first alone, it would be 58"
    assert module.steps_for("line", job, CompareConfig(epochs=4), single, tmp_path) == 4 * 5 - WARM_UP


def test_what_was_measured_stays_when_a_later_job_fails(tmp_path, no_machine, monkeypatch, capsys):
    config = CompareConfig(jobs=("regression", "transformer"), steps=10, repeats=1, device="cpu", output=str(tmp_path))
    run_way = module.run_way

    def killed(name, *others):
        if name.startswith("transformer"):
            raise KeyboardInterrupt
        return run_way(name, *others)

    monkeypatch.setattr(module, "run_way", killed)
    with pytest.raises(KeyboardInterrupt):
        compare(config)
    found = json.loads((tmp_path / "compare.json").read_text())
    assert {row["job"] for row in found["rows"]} == {"regression"}
    assert found["notes"][0] == "not finished: without transformer"
    assert "- not finished: without transformer" in (tmp_path / "compare.md").read_text()
    monkeypatch.setattr(module, "run_way", run_way)
    compare(config)
    assert "not finished" not in capsys.readouterr().out
    assert {row["job"] for row in json.loads((tmp_path / "compare.json").read_text())["rows"]} == set(config.jobs)


def test_a_busy_machine_is_noted(no_machine, monkeypatch):
    assert module.busy_cores() == 0
    monkeypatch.setattr(module.psutil, "cpu_percent", lambda interval: 50.0)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    note = "other programs kept 2.0 cores busy at the start: measure again on an idle machine"
    assert note in module.find_notes(CompareConfig(), CPU, module.busy_cores())
    assert not any("busy" in one for one in module.find_notes(CompareConfig(), Machine("cuda", 4, 2), 0.1))


def test_ways_say_why_they_are_missing():
    for machine, missing in ((CPU, {"DataParallel": (2, 0)}), (Machine("cuda", 2, 8), {"DDP-4": (4, 2)})):
        found = {way.name: reason for way, reason in machine.ways((2, 4))}
        assert list(found) == ["single", "DataParallel", "DDP-2", "DDP-4"]
        reasons = {name: f"needs {needed} GPUs, this comparison has {n}" for name, (needed, n) in missing.items()}
        assert {name: reason for name, reason in found.items() if reason} == reasons


def test_too_few_cores_are_said():
    assert 0 < module.find_machine("cpu").cores <= len(os.sched_getaffinity(0)), "those that may be used"
    notes = module.find_notes(CompareConfig(processes=(2, 4)), CPU, busy=0.1)
    (note,) = (note for note in notes if "too few cores" in note)
    assert note == "DDP-4: too few cores for a full speed-up: 4 processes with 1 thread each share 2"
    assert any("DDP-2: too few cores" in note for note in module.find_notes(CompareConfig(threads=2), CPU, 0.1))
    on_gpus = module.find_notes(CompareConfig(processes=(4,)), Machine("cuda", 4, 2), 0.1)
    assert not any("too few" in note for note in on_gpus)


@pytest.mark.parametrize("kind", module.KINDS)
def test_every_job_is_the_same_for_every_way(tmp_path, kind):
    name, job = read_job(kind, CompareConfig(), CPU, tmp_path)
    assert name == Path(module.KINDS[kind][1]).stem
    assert (job.train.mixed_precision, job.train.device) == ("no", "cpu")
    assert job.output_dir == str(tmp_path / "runs")
    if kind == "gpt2":
        assert job.global_batch_windows // job.train.micro_batch_size == 8  # 4 on each of two processes
        assert 25e6 < 12 * job.model.n_layer * job.model.n_embd**2 < 35e6


def test_mistakes(tmp_path, monkeypatch):
    is_no_job = "jobs = lenet: is not a job; use regression, classifier, transformer, gpt2"
    expect_error(is_no_job, read_job, "lenet", CompareConfig(), CPU, tmp_path)
    three = CompareConfig(processes=(3,))
    expect_error("processes = 3: does not divide the global batch of gpt2, 16", read_job, "gpt2", three, CPU, tmp_path)
    expect_error(r"epochs = 2: should not be combined with steps", CompareConfig, steps=1, epochs=2)
    for wrong in (1,), (65,):
        expect_error("should be numbers from 2 to 64", CompareConfig, processes=wrong)
    expect_error(r"--config = no.yaml", read_job, "regression:no.yaml", CompareConfig(), CPU, tmp_path)
    expect_error(r"output = /dev/null/x: cannot be written", compare, CompareConfig(output="/dev/null/x"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_error("starts its own processes", compare, CompareConfig())


def test_a_comparison_is_run_and_written(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "start_processes", lambda function, world, *args: run_ranks(function, world, *args)[0])
    config = job_config("regression", tmp_path / "runs", {"train.mixed_precision": "no"})
    config = config.model_dump(mode="json", exclude={"fresh", "launch"})
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(config))
    jobs = (f"regression:{tmp_path}/tiny.yaml",)
    options = {"steps": 5, "repeats": 2, "device": "cpu", "output": str(tmp_path / "out")}
    compare(CompareConfig(jobs=jobs, **options))
    found = capsys.readouterr()
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"compare.md", "compare.json"}
    assert (tmp_path / "out/compare.md").read_text() == found.out
    assert found.out.endswith("\n- next: docs/compare.md explains the columns, docs/ddp-lab.md common mistakes\n")
    assert not (tmp_path / "runs").exists()
    rows = json.loads((tmp_path / "out/compare.json").read_text())["rows"]
    assert [(row["job"], row["way"]) for row in rows] == [("tiny", way) for way in ("single", "DataParallel", "DDP-2")]
    single, _, ddp = rows
    assert single["steps_per_epoch"] == -(-config["data"]["points"] // config["train"]["global_batch_size"])
    assert single["difference_norm"] == 0, "a repeat is bitwise the same"
    assert ddp["difference_norm"] < 1e-4
    assert (-1 < ddp["communication"] < 1, ddp["threads"]) == (True, 1)
    order = [line.split()[:2] for line in found.err.splitlines() if line.startswith("tiny ")]
    assert order == [["tiny", "single"], ["tiny", "DDP-2"]] * 2
