"""Each row of the DDP lab is a test; and each claim fails when its right way is broken."""

import functools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from ranks import run_ranks
from test_launch import ROOT, environment

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.lab.experiment import experiment
from gpt2_ddp.lab.lab import EXPERIMENTS, ROOMS, choose, run_experiments, run_lab

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}


@pytest.fixture(scope="module")
def rows():
    return {row.experiment.name: row for row in run_experiments(list(EXPERIMENTS), seed=5)}


@pytest.mark.parametrize("name", BY_NAME)
def test_claim_holds(rows, name):
    assert rows[name].holds, rows[name].measured
    assert not any(brace in rows[name].measured for brace in "{}")


def test_the_page_has_every_lesson_in_the_order_of_the_table():
    page = (ROOT / "docs" / "ddp-lab.md").read_text()
    assert re.findall(r"^\*\*(\w+)\.\*\*", page, re.MULTILINE) == list(BY_NAME)
    assert re.findall(r"^## (.*)", page, re.MULTILINE) == list(ROOMS)


def mutations() -> dict:
    """What breaks the right way of each experiment."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin
    from torch.nn import BatchNorm1d
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim.lr_scheduler import LinearLR
    from torch.utils.data import DistributedSampler, Subset

    from gpt2_ddp.lab import data, gradients, loop, ranks, wrapper

    rank = int(os.environ.get("RANK", "0"))
    no_ddp = lambda model, **_: model  # noqa: E731
    own_seed = lambda data, seed: DistributedSampler(data, seed=seed + rank)  # noqa: E731
    cut = lambda data, **options: DistributedSampler(Subset(data, range(60)), **options)  # noqa: E731
    step, checkpoint, set_seed = LinearLR.step, wrapper.checkpoint, ranks.set_seed
    return {
        "mean_of_gradients": (gradients, "DDP", no_ddp),
        "different_replicas": (gradients, "DDP", functools.partial(DDP, init_sync=False)),
        "set_epoch": (DistributedSampler, "set_epoch", lambda self, epoch: None),
        "seed_per_rank": (data, "DistributedSampler", own_seed),
        "padded_test_set": (Accelerator, "gather_for_metrics", Accelerator.gather),
        "training_sampler_on_test_set": (data, "DistributedSampler", cut),
        "unequal_batches": (data, "Join", lambda models: nullcontext()),
        "rank_0s_loss": (Accelerator, "reduce", lambda self, tensor, reduction: tensor),
        "short_last_window": (loop, "window_length", lambda index, batches, window: window),
        "scheduler_steps": (LinearLR, "step", lambda self: [step(self), step(self)]),
        "multiplied_learning_rate": (loop, "DDP", no_ddp),
        "batch_norm": (gradients.AllReducedBatchNorm, "forward", BatchNorm1d.forward),
        "no_sync": (DDP, "no_sync", lambda self: nullcontext()),
        "unused_parameters": (
            gradients,
            "DDP",
            lambda model, **_: torch.nn.parallel.DistributedDataParallel(model),
        ),
        "bucket_size": (gradients, "DDP", lambda model, **_: DDP(model, bucket_cap_mb=0.1)),
        "unequal_shares": (Accelerator, "reduce", lambda self, tensor, reduction: tensor * 2),
        "logging_each_step": (loop, "LOG_EVERY", 1),
        "end_of_loader": (
            loop,
            "GradientAccumulationPlugin",
            lambda num_steps, **_: GradientAccumulationPlugin(num_steps=num_steps),
        ),
        "collective_on_one_rank": (ranks, "sum_over_ranks", lambda value, group: value),
        "early_stopping": (ranks, "sum_over_ranks", lambda value, group: value),
        "dropout_seed": (ranks, "set_seed", lambda seed, device_specific: set_seed(seed)),
        "every_rank_saves": (Accelerator, "is_main_process", property(lambda self: True)),
        "called_module": (DDP, "forward", lambda self, inputs: self.module(inputs)),
        "loaded_after_wrapping": (wrapper, "DDP", functools.partial(DDP, init_sync=False)),
        "module_prefix": (Accelerator, "unwrap_model", lambda self, model: model),
        "reentrant_checkpointing": (
            wrapper,
            "checkpoint",
            lambda *arguments, use_reentrant: checkpoint(*arguments, use_reentrant=True),
        ),
    }


def measure_broken() -> dict[str, dict]:
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    found = {}
    for name, mutation in mutations().items():
        with mock.patch.object(*mutation):
            found[name] = BY_NAME[name].measure(accelerator, 5)
    return found


@pytest.fixture(scope="module")
def broken():
    return run_ranks(measure_broken, 2, timeout=120)[0]


@pytest.mark.parametrize("name", BY_NAME)
def test_claim_fails_when_its_right_way_is_broken(broken, name):
    assert not BY_NAME[name].holds(SimpleNamespace(**broken[name])), broken[name]


@experiment(claim="", wrong="", right="", measured="{x}", holds=lambda m: True)
def killed(accelerator, seed):
    raise AssertionError("never measured: its name is unknown to the ranks")


def test_a_failing_experiment_does_not_stop_the_next():
    rows = list(run_experiments([killed, BY_NAME["set_epoch"]], seed=0))
    assert [row.holds for row in rows] == [False, True]
    assert rows[0].measured.startswith("rank 0 failed: UserError")


@pytest.mark.slow
def test_experiments_that_die_or_hang_are_reported_and_the_next_begins_afresh(monkeypatch):
    rows = run_experiments([BY_NAME["set_epoch"]] * 5, seed=0)
    assert next(rows).holds
    for number, message in ((signal.SIGKILL, "rank [01] (died|failed)"), (signal.SIGSTOP, "rank . did not end within")):
        os.kill(ranks_of_the_lab()["rank 1"], number)
        if number == signal.SIGSTOP:
            monkeypatch.setattr("gpt2_ddp.lab.lab.BOUND", 2.0)
        row = next(rows)
        assert not row.holds
        assert re.match(message, row.measured)
        assert not ranks_of_the_lab()
        monkeypatch.undo()
        assert next(rows).holds
    rows.close()
    assert not ranks_of_the_lab()


def ranks_of_the_lab() -> dict[str, int | None]:
    return {child.name: child.pid for child in multiprocessing.active_children() if child.name.startswith("rank ")}


@pytest.mark.slow
def test_a_table_that_nobody_reads_ends_the_ranks_too():
    command = [sys.executable, "scripts/ddp_lab.py", "--only", "set_epoch"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) != 0


def test_an_output_that_cannot_be_written_is_said_before_the_work(tmp_path, capsys):
    with pytest.raises(UserError, match=r"output = .*: cannot be written"):
        run_lab(LabConfig(only=("set_epoch",), output=str(tmp_path)))
    assert capsys.readouterr().out == ""


def test_the_command(tmp_path):
    output = str(tmp_path / "lab.json")
    command = [sys.executable, "scripts/ddp_lab.py", "--only", "set_epoch", "rank_0s_loss", "--output", output]
    found = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "| claim | wrong way | right way | measured |" in found.stdout
    numbers = json.loads((tmp_path / "lab.json").read_text())
    assert set(numbers) == {"set_epoch", "rank_0s_loss"}
    assert numbers["set_epoch"]["forgotten"] == 1


def test_a_claim_that_fails_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr("gpt2_ddp.lab.lab.run_experiments", lambda *_: (row for row in [failed_row()]))
    assert run_lab(LabConfig()) == 1
    assert "FAILS" in capsys.readouterr().out


def failed_row():
    from gpt2_ddp.lab.lab import Row

    return Row(BY_NAME["set_epoch"], {}, False, "measured nothing")


def test_mistakes(monkeypatch):
    with pytest.raises(UserError, match="only = set_epochs: is no experiment; there are mean_of_gradients"):
        choose(("set_epochs",))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="starts its own two processes"):
        run_lab(LabConfig())
