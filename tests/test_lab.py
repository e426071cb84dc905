"""Each row of the DDP lab is a test; and each claim fails when its right way is broken."""

import ast
import functools
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from commands import ROOT, expect_error
from conftest import once
from pages import load_docs
from ranks import forked_ranks, run_ranks

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.lab.experiment import experiment
from gpt2_ddp.lab.lab import EXPERIMENTS, Row, choose, explain, lesson, run_experiments, run_lab

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
WAITING = ("unequal_batches", "collective_on_one_rank", "early_stopping")  # for timeouts
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in WAITING else ()) for name in BY_NAME]


LAB = load_docs("lab")
PAGE = (ROOT / "docs/ddp-lab.md").read_text(encoding="utf-8")
MEASURED = dict(re.findall(r"^### (\w+)\n(?:(?!^###).*\n)*?- \*\*measured\*\*: (.*)", PAGE, re.MULTILINE))
"""The figures on docs/ddp-lab.md, by lesson."""
NUMBER = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
TIMES = rf"{NUMBER} and {NUMBER} ms|{NUMBER} s until"


def measure_all(names: list[str], broken: dict | None = None) -> dict[str, dict]:
    """The numbers of experiments, each with its mutation of `broken` if there are any."""
    from accelerate import data_loader

    from gpt2_ddp.distributed.launch import build_accelerator

    data_loader.is_datasets_available = lambda: False  # to look for loaders of its own, it would import it for seconds
    accelerator, found = build_accelerator("cpu", "no"), {}
    changes = mutations() if broken is not None else {}
    for name in names:
        with mock.patch.object(*changes[name]) if broken is not None else nullcontext():
            found[name] = BY_NAME[name].run(accelerator, LabConfig().seed)
    return found


@pytest.fixture
def numbers(tmp_path_factory) -> Callable[[str], dict]:
    """Measures, once for all tests, the experiments that wait, or all others."""

    def of(name: str) -> dict:
        names = [other for other in BY_NAME if (other in WAITING) == (name in WAITING)]
        make = lambda folder: (folder / "all.json").write_text(json.dumps(run_ranks(measure_all, 2, names)[0]))  # noqa: E731
        return json.loads((once(tmp_path_factory, f"lab-{name in WAITING}", make) / "all.json").read_text())[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_claim_holds_and_the_documentation_has_the_measured_numbers(numbers, name):
    experiment, found = BY_NAME[name], numbers(name)
    assert experiment.holds(SimpleNamespace(**found)), found
    printed = " ".join(experiment.measured.format_map(found).split())
    texts = [re.sub(TIMES, "", text) for text in (printed, MEASURED[name])]
    here, there = ([float(number) for number in re.findall(NUMBER, text)] for text in texts)
    assert re.sub(NUMBER, "", texts[0]) == re.sub(NUMBER, "", texts[1])
    assert here == pytest.approx(there, rel=0.05, abs=1e-5), "run `python docs/lab.py`, and commit the page"


def test_the_page_has_every_lesson_with_its_code_and_a_table_of_contents():
    assert re.findall(r"^### (\w+)", PAGE, re.MULTILINE) == list(MEASURED) == list(BY_NAME)
    assert LAB.page(PAGE, MEASURED) == PAGE, "run `python docs/lab.py`, and commit the page"
    for name, shown in BY_NAME.items():
        assert f"| [{name}](#{name}) | {shown.claim} |" in PAGE
        assert f"```python\n{shown.code.rstrip()}\n```" in PAGE


def test_a_lesson_has_one_set_of_figures():
    """Those that were measured: its text has settings, which are in the code, too."""
    for name, shown in BY_NAME.items():
        assert not re.findall(r"\d+(?:\.\d+)? %|\d+\.\d+|\de-\d+|\d+ of \d+", lesson(shown)), name


def test_a_lesson_is_told_with_the_code_that_measures_it(capsys, monkeypatch):
    assert run_lab(LabConfig(explain="no_sync")) == 0
    told = capsys.readouterr().out
    assert told.startswith("Accumulating over 4 micro-batches, gradients need to travel once")
    assert "\n\nGradient accumulation over 4 micro-batches all-reduces 4 times, unless the first 3" in told
    assert "\nwrong: DDP as it is: every backward all-reduces\nright: no_sync() for all" in told
    for part in ("def record_traffic(", "def no_sync(", "model.no_sync() if saves and i < 3 else nullcontext()"):
        assert told.count(part) == 1
    assert "@experiment" not in told
    assert "class TwoHeads" not in told, "of the same module, and not used"
    monkeypatch.setattr("gpt2_ddp.lab.lab.DOCUMENTATION", ROOT / "no docs, as in the image")
    assert explain(BY_NAME["no_sync"]).replace("\n\n", "", 1).startswith(f"{BY_NAME['no_sync'].claim}wrong: ")


@pytest.mark.parametrize("name", BY_NAME)
def test_the_code_of_a_lesson_is_whole(name):
    tree = ast.parse(BY_NAME[name].code)
    assert tree.body[-1].name == name
    module = vars(sys.modules[BY_NAME[name].measure.__module__])
    defined = {part.name for part in tree.body}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    ours = {used for used in used if getattr(module.get(used), "__module__", "") == BY_NAME[name].measure.__module__}
    assert ours <= defined


def mutations() -> dict:
    """What breaks the right way of each experiment."""
    from accelerate import Accelerator
    from accelerate.utils import GradientAccumulationPlugin
    from torch.nn import BatchNorm1d
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim.lr_scheduler import LinearLR
    from torch.utils.data import DistributedSampler, Subset

    from gpt2_ddp.lab import loop, ranks, wrapper

    rank = int(os.environ.get("RANK", "0"))
    no_ddp = lambda model, **_: model  # noqa: E731
    own_seed = lambda data, seed: DistributedSampler(data, seed=seed + rank)  # noqa: E731
    cut = lambda data, **options: DistributedSampler(Subset(data, range(60)), **options)  # noqa: E731
    step, checkpoint, set_seed, plugin = LinearLR.step, wrapper.checkpoint, ranks.set_seed, GradientAccumulationPlugin
    return {
        "mean_of_gradients": (wrapper, "DDP", no_ddp),
        "different_replicas": (wrapper, "DDP", lambda model, init_sync: DDP(model, init_sync=False)),
        "set_epoch": (DistributedSampler, "set_epoch", lambda self, epoch: None),
        "seed_per_rank": (ranks, "DistributedSampler", own_seed),
        "padded_test_set": (Accelerator, "gather_for_metrics", Accelerator.gather),
        "training_sampler_on_test_set": (ranks, "DistributedSampler", cut),
        "unequal_batches": (ranks, "Join", lambda models: nullcontext()),
        "rank_0s_loss": (Accelerator, "reduce", lambda self, tensor, reduction: tensor),
        "short_last_window": (loop, "window_length", lambda index, batches, window: window),
        "scheduler_steps": (LinearLR, "step", lambda self: [step(self), step(self)]),
        "multiplied_learning_rate": (loop, "DDP", no_ddp),
        "batch_norm": (wrapper.AllReducedBatchNorm, "forward", BatchNorm1d.forward),
        "no_sync": (DDP, "no_sync", lambda self: nullcontext()),
        "unused_parameters": (wrapper, "DDP", lambda model, **_: DDP(model)),
        "bucket_size": (wrapper, "DDP", lambda model, **_: DDP(model, bucket_cap_mb=0.1)),
        "unequal_shares": (Accelerator, "reduce", lambda self, tensor, reduction: tensor * 2),
        "logging_each_step": (loop, "LOG_EVERY", 1),
        "end_of_loader": (loop, "GradientAccumulationPlugin", lambda num_steps, **_: plugin(num_steps=num_steps)),
        "collective_on_one_rank": (ranks, "sum_over_ranks", lambda value, group: value),
        "early_stopping": (ranks, "sum_over_ranks", lambda value, group: value),
        "dropout_seed": (ranks, "set_seed", lambda seed, device_specific: set_seed(seed)),
        "every_rank_saves": (Accelerator, "is_main_process", property(lambda self: True)),
        "every_rank_downloads": (Path, "exists", lambda self: False),
        "called_module": (DDP, "forward", lambda self, inputs: self.module(inputs)),
        "loaded_after_wrapping": (wrapper, "DDP", functools.partial(DDP, init_sync=False)),
        "module_prefix": (Accelerator, "unwrap_model", lambda self, model: model),
        "reentrant_checkpointing": (wrapper, "checkpoint", lambda *a, **_: checkpoint(*a, use_reentrant=True)),
    }


@pytest.mark.slow
def test_claims_fail_when_their_right_ways_are_broken():
    broken = run_ranks(measure_all, 2, list(BY_NAME), {})[0]
    assert [name for name in BY_NAME if BY_NAME[name].holds(SimpleNamespace(**broken[name]))] == []


@pytest.fixture
def forked(monkeypatch):
    """The lab's ranks are forked: fresh ones would import torch for seconds."""
    monkeypatch.setattr("gpt2_ddp.lab.lab.start_ranks", forked_ranks)


@experiment(claim="", wrong="", right="", measured="{x}", holds=lambda m: True)
def killed(accelerator, seed):
    raise AssertionError("never measured: its name is unknown to the ranks")


def test_a_failing_experiment_does_not_stop_the_next(forked):
    rows = list(run_experiments([killed, BY_NAME["seed_per_rank"]], seed=0))
    assert [row.holds for row in rows] == [None, True]
    assert rows[0].measured.startswith("rank 0 failed: UserError")


@pytest.mark.parametrize("starts", [True, False])
def test_the_start_of_the_ranks_has_a_bound_of_its_own_and_a_failed_one_ends_the_lab(starts, monkeypatch):
    bounds = []
    rank, pipe = mock.Mock(), mock.Mock()
    pipe.poll.side_effect = lambda seconds: bounds.append(seconds) or starts
    pipe.recv.return_value = {"x": 1}, ""
    monkeypatch.setattr("gpt2_ddp.lab.lab._start_ranks", lambda: [(rank, pipe)] * 2)
    rows = list(run_experiments([killed] * 3, seed=0))
    assert bounds == ([300, 300] + [60, 60] * 3 if starts else [300])
    assert [row.verdict for row in rows] == (["holds"] * 3 if starts else ["not measured"])
    assert starts or rows[0].measured == "rank 0 did not start within 300 s; the lab ends here"
    assert rank.kill.called


@pytest.mark.slow
def test_experiments_that_die_or_hang_are_reported_and_the_next_begins_afresh(forked, monkeypatch):
    rows = run_experiments([BY_NAME["seed_per_rank"]] * 5, seed=0)
    assert next(rows).holds
    for number, message in ((signal.SIGKILL, "rank [01] (died|failed)"), (signal.SIGSTOP, "rank . did not end within")):
        os.kill(ranks_of_the_lab()["rank 1"], number)
        if number == signal.SIGSTOP:
            monkeypatch.setattr("gpt2_ddp.lab.lab.BOUND", 2.0)
        row = next(rows)
        assert row.holds is None
        assert re.match(message, row.measured)
        assert not ranks_of_the_lab()
        monkeypatch.setattr("gpt2_ddp.lab.lab.BOUND", 60.0)
        assert next(rows).holds
    rows.close()
    assert not ranks_of_the_lab()


def ranks_of_the_lab() -> dict[str, int | None]:
    return {child.name: child.pid for child in multiprocessing.active_children() if child.name.startswith("rank ")}


def test_a_table_that_nobody_reads_ends_the_ranks_too(forked, monkeypatch):
    def closed(*args, **options):
        assert ranks_of_the_lab()
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    with pytest.raises(BrokenPipeError) as broken:  # its traceback keeps what run_lab has not closed
        run_lab(LabConfig(only=("seed_per_rank",)))
    assert not ranks_of_the_lab(), broken


def test_the_command(forked, tmp_path, capsys):
    output = tmp_path / "lab.json"
    assert run_lab(LabConfig(only=("seed_per_rank", "rank_0s_loss"), output=str(output))) == 0
    assert "| claim | wrong way | right way | measured |" in capsys.readouterr().out
    numbers = json.loads(output.read_text())
    assert (set(numbers), numbers["seed_per_rank"]["common"]) == ({"seed_per_rank", "rank_0s_loss"}, 1000)


def test_the_table_and_the_exit_codes(monkeypatch, capsys, tmp_path):
    holds, fails = Row(BY_NAME["no_sync"], {}, True, "2576\n<i>"), Row(BY_NAME["set_epoch"], {}, False, "1 < 2")
    late = fails._replace(holds=None, measured="rank 0 died")
    for rows, code in (([late, holds], 4), ([late, holds, fails], 1)):
        monkeypatch.setattr("gpt2_ddp.lab.lab.run_experiments", lambda *_, rows=rows: (row for row in rows))
        assert run_lab(LabConfig(output=str(tmp_path / "lab.json"))) == code
    text = capsys.readouterr().out
    assert f"not measured  {late.experiment.claim}\n       rank 0 died\n" in text
    *_, head, rule, missing, good, bad, after = text.splitlines()
    assert (head, rule) == ("| claim | wrong way | right way | measured |", "| --- | --- | --- | --- |")
    assert good.startswith(f"| {holds.experiment.claim} | {holds.experiment.wrong} | ")
    assert (good[-13:], bad[-16:]) == (" | 2576 <i> |", " | 1 < 2 FAILS |")
    assert missing.endswith("| rank 0 died not measured |")
    assert after.startswith("Next: `python scripts/ddp_lab.py --explain set_epoch` has the code; ")


def test_user_errors_come_before_the_work(monkeypatch, tmp_path, capsys):
    expect_error("only = set_epochs: is not an experiment; choose from mean_of_gradients", choose, ("set_epochs",))
    expect_error(r"output = .*: cannot be written", run_lab, LabConfig(only=("set_epoch",), output=str(tmp_path)))
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_error("starts its own two processes", run_lab, LabConfig())
