"""Every training job trains what it has always trained: held against runs recorded from the first
training loops.

Which samples and how many are compared exactly, numbers to the tolerances below, because processors
sum in different orders.
"""

import json
import math
import shutil

import pytest
import yaml
from cifar import write_cifar
from close import assert_close
from conftest import once
from golden_runs import (
    CASES,
    CIFAR,
    CORPUS,
    GOLDEN,
    KINDS,
    RESUMED,
    change,
    draws,
    make_config,
    summary,
)
from ranks import run_ranks
from runs import train, train_all

from gpt2_ddp.config.saved import complete
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.reports.verify import verify_run

RECORDED = json.loads((GOLDEN / "runs.json").read_text())

# Ten times what other instruction sets (SSE, AVX2, AVX-512) were seen to change, and more.
FP32 = {"": 1e-5, "weights": 1e-4}
# its points, drawn from a normal distribution, differ in their last bits
REGRESSION = {"": 1e-4, "weights": 1e-4}
BF16 = {"": 1.5e-4, "grad_norm": 6e-3, "weights": 1.5e-2}
# statistics of a few samples amplify each rounding
BATCHNORM = {"": 5e-3, "grad_norm": 1e-1, "weights": 1e-1}
FIRST = {"": 1e-4, "grad_norm": 1e-3}  # of BatchNorm, before the first update


def tolerances(case, config):
    if case.kind in ("regression", "resnet18"):
        return REGRESSION if case.kind == "regression" else BATCHNORM
    return BF16 if config.train.mixed_precision == "bf16" else FP32


def other_draws(case):
    """Whether the case's dropout and crops are others here than where it was recorded."""
    random = {"model.dropout", "data.augment"} & case.changes.keys() or case.kind in (
        "lenet",
        "transformer",
    )
    return bool(random) and draws()["masks"] != RECORDED["draws"]["masks"]


def check(found, golden, case, config):
    """Compares two summaries; what `found` has more of does
    not matter, and a row's epoch is just its step again."""
    allowed = tolerances(case, config)
    numbers = not other_draws(case)
    assert [row["step"] for row in found["rows"]] == [row["step"] for row in golden["rows"]]
    pairs = [
        (f"step {row['step']}", row, now)
        for row, now in zip(golden["rows"], found["rows"], strict=True)
    ]
    for where, row, now in [*pairs, ("state", golden["state"], found["state"])]:
        for name, value in row.items():
            if name == "epoch":
                continue
            # each step has a row; those of the first trainers had no mean
            if name == "loss" and "loss_mean" in now:
                assert_close(now["loss_mean"], now["loss"], 1e-6, says=where)
            if not isinstance(value, float):
                assert now[name] == value, (where, name)
            elif name == "lr":
                assert_close(now[name], value, 1e-12, says=(where, name))
            elif numbers:
                of = FIRST if allowed is BATCHNORM and row["step"] < 2 else allowed
                near = of.get(name, of[""])
                assert_close(now[name], value, near, says=(where, name))
    tensors = found["weights"]["tensors"]
    recorded = golden["weights"]["tensors"]
    assert {name: size for name, (size, *_) in tensors.items()} == {
        name: size for name, (size, *_) in recorded.items()
    }
    if numbers:
        scale = [norm * math.sqrt(size) for size, norm, _ in recorded.values()]
        sums = [[part[1:] for part in parts.values()] for parts in (tensors, recorded)]
        assert_close(*sums, allowed["weights"], scale)


def every_world(cases):
    return [
        pytest.param(
            name,
            world,
            id=f"{name}-{world}",
            marks=[pytest.mark.slow] if world in case.slow else [],
        )
        for name, case in cases.items()
        for world in case.worlds
    ]


@pytest.fixture
def finished(tmp_path_factory):
    """Trains a case, and with it, once for all tests,
    the others of as many processes that are as slow."""

    def of(name, world):
        slow = world in CASES[name].slow
        names = [
            other
            for other, case in CASES.items()
            if world in case.worlds and (world in case.slow) == slow
        ]

        def make(folder):
            cifar = write_cifar(folder / "cifar", *CIFAR)
            configs = [make_config(CASES[other], folder / other, cifar) for other in names]
            assert run_ranks(train_all, world, configs) == [["completed"] * len(configs)] * world

        return once(tmp_path_factory, f"golden-{world}-{slow}", make) / name / "run"

    return of


@pytest.mark.parametrize(("name", "world"), every_world(CASES))
def test_trains_what_it_always_did(finished, name, world):
    case = CASES[name]
    run = finished(name, world)
    config = make_config(case, run.parent, run.parent)
    check(summary(run), RECORDED["cases"][name][str(world)], case, config)


@pytest.mark.parametrize(
    ("name", "world"), every_world({name: case for name, (case, _) in RESUMED.items()})
)
def test_resumes_a_recorded_run(name, world, tmp_path):
    """A run folder that was recorded halfway, with the
    configuration found in it, but for fields that are no more."""
    case, further = RESUMED[name]
    if case.kind == "regression" and draws()["normals"] != RECORDED["draws"]["normals"]:
        pytest.skip("this machine draws other points than the run was started with")
    shutil.copytree(GOLDEN / name, tmp_path / name)
    command, _ = KINDS[case.kind]
    saved = complete(command, yaml.safe_load((tmp_path / name / "config.yaml").read_text()))
    paths = {"output_dir": str(tmp_path)} | (
        {"data.path": str(CORPUS)} if case.kind == "gpt2" else {}
    )
    config = command.model_validate(change(saved, further | paths))
    run_ranks(train, world, config)
    golden = RECORDED["resumed"][name]
    check(summary(tmp_path / name), golden[str(world)], case, config)
    assert verify_run(VerifyConfig(run=str(tmp_path / name))) == 0
    if world == 1:
        check(summary(tmp_path / name), golden["uninterrupted"], case, config)
