"""Each row of the DDP lab is a test; and each claim fails when its right way is broken."""

import functools
import json
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
from commands import ROOT, expect_error
from conftest import once
from pages import load_docs
from ranks import run_ranks

from gpt2_ddp.config.tools import LabConfig
from gpt2_ddp.lab.lab import EXPERIMENTS, run_lab

WAITING = ("unequal_batches", "collective_on_one_rank")  # for timeouts
NAMES = [
    pytest.param(name, marks=pytest.mark.slow if name in WAITING else ()) for name in EXPERIMENTS
]

LAB = load_docs("lab")
PAGE = (ROOT / "docs/ddp-lab.md").read_text()
MEASURED = dict(
    re.findall(
        r"^### Figures: (\w+)\n(?:(?!^###).*\n)*?- \*\*measured\*\*: (.*)", PAGE, re.MULTILINE
    )
)
"""The figures on docs/ddp-lab.md, by lesson."""
NUMBER = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
TIMES = rf"{NUMBER} and {NUMBER} ms|{NUMBER} s until"


def measure_all(names, broken=None):
    """The numbers of experiments, each with its mutation of `broken` if there are any."""
    from accelerate import data_loader

    from gpt2_ddp.distributed.launch import build_accelerator

    # to look for loaders of its own, it would import it for seconds
    data_loader.is_datasets_available = lambda: False
    accelerator = build_accelerator("cpu", "no")
    found = {}
    changes = mutations() if broken is not None else {}
    for name in names:
        with mock.patch.object(*changes[name]) if broken is not None else nullcontext():
            found[name] = EXPERIMENTS[name].run(accelerator)
    return found


@pytest.fixture
def numbers(tmp_path_factory):
    """Measures, once for all tests, the experiments that wait, or all others."""

    def of(name):
        names = [other for other in EXPERIMENTS if (other in WAITING) == (name in WAITING)]

        def make(folder):
            return (folder / "all.json").write_text(json.dumps(run_ranks(measure_all, 2, names)[0]))

        return json.loads(
            (once(tmp_path_factory, f"lab-{name in WAITING}", make) / "all.json").read_text()
        )[name]

    return of


@pytest.mark.parametrize("name", NAMES)
def test_claim_holds_and_the_documentation_has_the_measured_numbers(numbers, name):
    experiment = EXPERIMENTS[name]
    found = numbers(name)
    assert experiment.holds(SimpleNamespace(**found)), found
    printed = " ".join(experiment.measured.format_map(found).split())
    texts = [re.sub(TIMES, "", text) for text in (printed, MEASURED[name])]
    here, there = ([float(number) for number in re.findall(NUMBER, text)] for text in texts)
    assert re.sub(NUMBER, "", texts[0]) == re.sub(NUMBER, "", texts[1])
    near = [abs(a - b) <= 0.05 * abs(b) + 1e-5 for a, b in zip(here, there, strict=True)]
    assert all(near), "run `python docs/lab.py`, and commit the page"


def test_the_page_has_every_lesson_with_its_code_and_a_line_in_its_first_table():
    assert re.findall(r"^### (\w+)$", PAGE, re.MULTILINE) == list(MEASURED) == list(EXPERIMENTS)
    assert sorted(re.findall(r"\[(\w+)\]\(#", PAGE)) == sorted([*EXPERIMENTS, "Helpers"])
    assert LAB.page(PAGE, MEASURED) == PAGE, "run `python docs/lab.py`, and commit the page"


def mutations():
    """What breaks the right way of each experiment."""
    from accelerate import Accelerator
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.optim.lr_scheduler import LinearLR
    from torch.utils.data import DistributedSampler

    from gpt2_ddp.lab import lessons

    def no_ddp(model, **_):
        return model

    step = LinearLR.step
    return {
        "mean_of_gradients": (lessons, "DDP", no_ddp),
        "set_epoch": (DistributedSampler, "set_epoch", lambda self, epoch: None),
        "padded_test_set": (Accelerator, "gather_for_metrics", Accelerator.gather),
        "unequal_batches": (lessons, "Join", lambda models: nullcontext()),
        "scheduler_steps": (LinearLR, "step", lambda self: [step(self), step(self)]),
        "multiplied_learning_rate": (lessons, "DDP", no_ddp),
        "batch_norm": (nn, "GroupNorm", lambda groups, width: nn.BatchNorm1d(width)),
        "no_sync": (DDP, "no_sync", lambda self: nullcontext()),
        "unused_parameters": (lessons, "DDP", lambda model, **_: DDP(model)),
        "unequal_shares": (Accelerator, "reduce", lambda self, tensor, reduction: tensor * 2),
        "collective_on_one_rank": (lessons, "sum_over_ranks", lambda value, group: value),
        "every_rank_saves": (Accelerator, "is_main_process", property(lambda self: True)),
        "called_module": (DDP, "forward", lambda self, inputs: self.module(inputs)),
        "loaded_after_wrapping": (lessons, "DDP", functools.partial(DDP, init_sync=False)),
        "module_prefix": (Accelerator, "unwrap_model", lambda self, model: model),
    }


@pytest.mark.slow
def test_claims_fail_when_their_right_ways_are_broken():
    broken = run_ranks(measure_all, 2, list(EXPERIMENTS), {})[0]
    assert [
        name for name in EXPERIMENTS if EXPERIMENTS[name].holds(SimpleNamespace(**broken[name]))
    ] == []


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr(
        "gpt2_ddp.lab.lab.start_processes",
        lambda function, n, *args: run_ranks(function, n, *args)[0],
    )
    assert run_lab(LabConfig(only=("no_sync", "module_prefix"))) == 0
    assert EXPERIMENTS["module_prefix"].claim in capsys.readouterr().out
    expect_error("only = set_epochs: ", run_lab, LabConfig(only=("set_epochs",)))
    wrong = {
        "called_module": {"module": 0.5, "model": 0.25},
        "set_epoch": {"forgotten": 1.0, "told": 0.0},
    }
    monkeypatch.setattr("gpt2_ddp.lab.lab.run_experiments", lambda names: wrong)
    assert run_lab(LabConfig()) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"called_module FAILS\n- **claim**: {EXPERIMENTS['called_module'].claim}\n- **wrong**: "
    )
    assert "\n\nset_epoch\n" in printed
    monkeypatch.setenv("WORLD_SIZE", "2")
    expect_error("processes = 2: ", run_lab, LabConfig())
