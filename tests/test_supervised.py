"""Supervised: equal to a hand-written loop on any number of processes, exact in its scores, bitwise after any stop."""

import math
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cifar import pictures, write_cifar, write_parquet
from close import assert_close, float64, in_float64
from ranks import RankError, in_turn, run_ranks
from runs import (
    assert_same,
    evaluate_checkpoint,
    forge,
    job_config,
    newest_checkpoint,
    rows,
    said,
    train_with_faults,
    weights,
)
from runs import run_small_job as train
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.checkpoint import MODEL, OPTIMIZER, reset_optimizer_state
from gpt2_ddp.config.jobs import JobOptimConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.data.order import Order
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.state import JobData
from gpt2_ddp.tasks.jobs import LeNet, ResNet18, make_job
from gpt2_ddp.tasks.supervised import Samples, Supervised, build_job_optimizer, job_schedule, means, score_each


@pytest.fixture(scope="session")
def cifar(tmp_path_factory) -> str:
    return str(write_cifar(tmp_path_factory.mktemp("data") / "cifar", 130, 37))


def assert_by_hand(folder: Path, config) -> list[float]:
    """Linear regression in plain PyTorch: no Accelerate, no module of ours but the order of the samples. Compares the
    weights of the run in `folder`; returns the losses."""
    generator = torch.Generator().manual_seed(config.seed)
    x, noise = torch.randn(2, config.data.points, generator=generator)
    y = 2 * x + 3 + 0.1 * noise
    torch.manual_seed(config.seed)
    line = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), config.optim.lr, config.optim.momentum)
    losses = []
    for epoch in range(config.train.epochs):
        positions = np.arange(epoch * len(x), (epoch + 1) * len(x))
        order = Order(config.seed, len(x)).items_at(positions).astype("int64")
        for batch in torch.from_numpy(order).split(config.train.global_batch_size):
            loss = torch.nn.functional.mse_loss(line(x[batch, None])[:, 0], y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for name, value in line.named_parameters():
        assert_close(weights(folder / "run")[f"linear.{name}"], value, 1e-5)
    return losses


@pytest.mark.parametrize(("world", "micro"), [(1, 5), (3, 2)])
@float64()
def test_equal_to_a_hand_written_loop(tmp_path, world, micro):
    config = job_config("regression", tmp_path, {"data.points": 97, "train.micro_batch_size": micro})
    results = run_ranks(in_float64, world, train, config)
    losses = assert_by_hand(tmp_path, config)
    logged = rows(tmp_path / "run")[1:]
    assert_close([row["loss"] for row in logged], losses)
    assert_close([row["loss_mean"] for row in logged], losses)
    assert results[0].step == len(losses) == 36
    sizes = [12] * 8 + [1]
    last = sum(loss * size for loss, size in zip(losses[-9:], sizes, strict=True)) / 97
    assert_close(results[0].metrics["train_loss"], last)
    assert all(result.metrics == results[0].metrics for result in results)


def test_rates_by_epochs(tmp_path):
    changes = {"optim.lr": 0.2, "optim.warmup_epochs": 1, "optim.schedule": "cosine"}
    cosine = job_schedule(job_config("regression", tmp_path, changes), 0.2, 7)
    assert_close([cosine(step) for step in (1, 7, 14, 28)], [0.2 / 7, 0.2, 0.15, 0.0])
    changes |= {"optim.schedule": "step", "optim.step_epochs": (2, 3.5), "optim.step_factor": 0.5}
    steps = job_schedule(job_config("regression", tmp_path, changes), 0.2, 7)
    assert_close([steps(step) for step in (7, 14, 15, 24, 25)], [0.2, 0.2, 0.1, 0.1, 0.05])
    constant = job_schedule(job_config("regression", tmp_path), 0.01, 7)
    assert {constant(step) for step in (1, 28, 10**6)} == {0.01}


@pytest.mark.slow
def test_a_cosine_goes_on_to_the_end_that_it_had(tmp_path, capsys):
    changes = {"optim.schedule": "cosine", "optim.warmup_epochs": 1.5}
    run_ranks(train, 1, job_config("regression", tmp_path / "whole", changes))
    parts = job_config("regression", tmp_path / "parts", changes)
    assert run_ranks(train_with_faults, 1, parts, (0, 0), 1.0, 14, signal.SIGTERM) == ["stopped"]
    with pytest.raises(RankError, match=r"train.epochs = 6: the run was started with 4; restore it"):
        run_ranks(train, 1, job_config("regression", tmp_path / "parts", {**changes, "train.epochs": 6}))
    run_ranks(train, 1, parts)
    run = tmp_path / "parts/run"
    assert_same(tmp_path / "whole/run", run)
    rates = [row["lr"] for row in rows(run)[1:]]
    assert (max(rates), rates[-1]) == (rates[13], 0.0)
    assert verify_run(VerifyConfig(run=str(run))) == 0
    forge(run, lambda rows: [row.update(lr=rates[19]) for row in rows if row.get("lr") == rates[20]])
    assert verify_run(VerifyConfig(run=str(run))) == 1
    assert f"lr of step 21 is {rates[19]}, not {rates[20]}" in capsys.readouterr().out


def resnet18_by_hand(config, images: np.ndarray, labels: np.ndarray) -> list[float]:
    """The losses of its steps in plain PyTorch; a rank's work, as the number of threads decides the order of sums."""
    optim, size, epochs = config.optim, config.train.global_batch_size, config.train.epochs
    torch.manual_seed(config.seed)
    model = ResNet18(10)
    optimizer = torch.optim.SGD(model.parameters(), optim.lr, optim.momentum, weight_decay=optim.weight_decay)
    warm_up, steps = round(optim.warmup_epochs * len(images) // size), epochs * len(images) // size
    cosine = lambda i: (1 + math.cos(math.pi * (i + 1 - warm_up) / (steps - warm_up))) / 2  # noqa: E731
    share = lambda i: (i + 1) / warm_up if i + 1 < warm_up else cosine(i)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    inputs = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous() / 127.5 - 1
    order = Order(config.seed, len(images)).items_at(np.arange(epochs * len(images))).astype("int64")
    losses = []
    for batch in torch.from_numpy(order).split(size):
        loss = torch.nn.functional.cross_entropy(model(inputs[batch]), torch.from_numpy(labels)[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_resnet18_trains_as_in_plain_pytorch(tmp_path):
    images, labels = pictures(80, 10, size=8)
    write_parquet(tmp_path / "data", "train", images, labels)
    write_parquet(tmp_path / "data", "test", images[:10], labels[:10])
    changes = {"data.name": "images", "data.path": str(tmp_path / "data"), "train.mixed_precision": "no"}
    changes |= {"train.epochs": 10, "train.global_batch_size": 16, "train.micro_batch_size": 16}
    changes |= {"eval.every": 10, "checkpoint.save_every": 10}
    optim = {"lr": 0.002, "momentum": 0.9, "weight_decay": 5e-4, "schedule": "cosine", "warmup_epochs": 2}
    config = job_config("resnet18", tmp_path, changes | {f"optim.{name}": value for name, value in optim.items()})
    run_ranks(in_float64, 1, train, config)
    [losses] = run_ranks(in_float64, 1, resnet18_by_hand, config, images, labels)
    assert len(losses) == 50
    assert_close([row["loss"] for row in rows(tmp_path / "run")[1:]], losses)


SETS = ((1, 4), (2, 1), (5, 4), (7, 2), (37, 8), (48, 8))
"""Samples and batch size: what no number of processes and no batch divides, and less than a batch."""


def score_everything() -> list[tuple[dict[str, float], int]]:
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    found = []
    for n, batch_size in SETS:
        generator = torch.Generator().manual_seed(n)
        samples = Samples(torch.randn(n, 3, generator=generator), torch.arange(n) % 3)
        computed = []

        def score(model, inputs, targets, computed=computed):
            computed.append(len(targets))
            return {"accuracy": model(inputs).argmax(1) == targets, "weighted": targets * inputs[:, 0]}

        scored = score_each(accelerator, torch.nn.Identity(), samples, score, batch_size)
        found.append((means(*scored), sum(computed)))
    return found


def test_each_test_sample_is_scored_once():
    ranks = run_ranks(score_everything, 3)
    for number, (n, _) in enumerate(SETS):
        inputs = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
        targets = torch.arange(n) % 3
        accuracy = (inputs.argmax(1) == targets).double().mean().item()
        weighted = (targets * inputs[:, 0]).double().mean().item()
        assert sum(found[number][1] for found in ranks) >= n
        for found in ranks:
            means = {"val_accuracy": accuracy, "val_weighted": weighted, "val_samples": n}
            assert_close(found[number][0], means)


@pytest.fixture(scope="module")
def lenet(cifar, tmp_path_factory) -> Path:
    """A run of LeNet of one epoch, in one process."""
    folder = tmp_path_factory.mktemp("lenet")
    run_ranks(train, 1, job_config("lenet", folder, {"data.path": cifar, "train.epochs": 1}))
    return folder


def test_accuracy_is_that_of_a_plain_computation_on_any_number_of_processes(cifar, lenet):
    images, labels = pictures(37, seed=2)
    model = LeNet(100, (32, 32))
    model.load_state_dict(weights(lenet / "run"))
    with torch.no_grad():
        outputs = model(torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1)
    targets = torch.from_numpy(labels)
    loss = torch.nn.functional.cross_entropy(outputs, targets).item()
    top5 = (outputs.topk(5).indices == targets[:, None]).any(1).double().mean().item()
    accuracy = (outputs.argmax(1) == targets).double().mean().item()
    expected = {"val_loss": loss, "val_accuracy": accuracy, "val_top5": top5, "val_samples": 37}
    more = job_config("lenet", lenet, {"data.path": cifar, "train.epochs": 2})  # or there would be nothing to build
    last = rows(lenet / "run")[-1]
    for scores in [last, *run_ranks(evaluate_checkpoint, 3, more)]:
        assert_close({name: scores[name] for name in expected}, expected, 1e-5, loss)


def test_a_finished_run_says_so_and_more_epochs_go_on(trained_job, tmp_path):
    shutil.copytree(trained_job, tmp_path / "run")
    before = rows(tmp_path / "run")
    (again,) = run_ranks(train, 1, job_config("regression", tmp_path, {"train.epochs": 2}))
    assert (again.outcome, again.step) == ("completed", before[-1]["step"])
    assert again.metrics == {name: before[-1][name] for name in again.metrics}
    assert rows(tmp_path / "run") == before
    longer = job_config("regression", tmp_path, {"train.epochs": 3})
    run_ranks(train, 2, longer)
    assert rows(tmp_path / "run")[: len(before)] == before
    assert rows(tmp_path / "run")[-1]["step"] == again.step // 2 * 3
    assert_by_hand(tmp_path, longer)


@pytest.mark.slow
def test_checkpoints_without_moments(tmp_path, capsys):
    changes = {"train.epochs": 2, "checkpoint.save_optimizer": False}
    run_ranks(train, 1, job_config("mlp", tmp_path, {**changes, "checkpoint.save_optimizer": True}))
    bare = tmp_path / "bare"
    assert "moments" not in run_ranks(said, 1, train, job_config("mlp", bare, changes))[0][1]
    size = lambda run: sum((newest_checkpoint(run) / name).stat().st_size for name in (MODEL, OPTIMIZER))  # noqa: E731
    assert size(bare / "run") < 0.4 * size(tmp_path / "run")
    assert load_file(newest_checkpoint(bare / "run") / OPTIMIZER) == {}
    assert_same(tmp_path / "run", bare / "run")
    changes |= {"train.epochs": 3, "checkpoint.save_optimizer": True}
    [(_, printed, _)] = run_ranks(said, 1, train, job_config("mlp", bare, changes))
    assert printed.count("note: the checkpoint of step 10 has no optimizer state") == 1
    moments = load_file(newest_checkpoint(bare / "run") / OPTIMIZER)
    assert (newest_checkpoint(bare / "run").name, moments["step.0.weight"].item()) == ("step-00000015", 5)
    assert verify_run(VerifyConfig(run=str(bare / "run"), replay="10:15")) == 0
    assert (
        "note    replay from step 10 to 15: not possible, its checkpoint has no optimizer state"
        in capsys.readouterr().out
    )


def test_moments_begin_at_zero_again_in_place():
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_job_optimizer(torch.nn.ParameterList([parameter]), JobOptimConfig(momentum=0.9), 0.1)
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [0, 0, 0], "before the first step"
    parameter.sum().backward()
    optimizer.step()
    buffer = optimizer.state[parameter]["momentum_buffer"]
    assert buffer.tolist() == [1, 1, 1]
    reset_optimizer_state(optimizer)
    assert optimizer.state[parameter]["momentum_buffer"] is buffer
    assert buffer.tolist() == [0, 0, 0]


def test_a_folder_of_images_may_move(tmp_path, cifar, lenet):
    shutil.copytree(lenet, tmp_path, dirs_exist_ok=True)
    moved = shutil.copytree(cifar, tmp_path / "moved")
    run_ranks(train, 1, job_config("lenet", tmp_path, {"data.path": str(moved), "train.epochs": 2}))
    assert rows(tmp_path / "run")[-1]["epoch"] == 2


def test_scale_with_processes(tmp_path):
    run_ranks(train, 2, job_config("regression", tmp_path, {"scale_with_processes": True}))
    assert_by_hand(tmp_path, job_config("regression", tmp_path, {"train.global_batch_size": 24, "optim.lr": 0.02}))


@pytest.mark.parametrize(("changes", "processes", "message"), [
    ({"launch.processes": 3}, 1, "launch.processes = 3: the launcher started 1"),
    ({"train.global_batch_size": 2}, 3, "train.global_batch_size = 2: should be at least 1 for each of the 3"),
    ({"scale_with_processes": True}, 1, "scale_with_processes = True: the run's batch of 24 would become 12"),
])  # fmt: skip
def test_another_number_of_processes(tmp_path, changes, processes, message):
    task = JobData(global_batch_size=24, lr=0.02, data_hash="")
    saved: Any = SimpleNamespace(state=SimpleNamespace(task=task))
    accelerator: Any = SimpleNamespace(num_processes=processes)
    with pytest.raises(UserError, match=message):
        Supervised(make_job, job_config("regression", tmp_path, changes), accelerator, saved)


def test_refused_before_the_first_step(trained_job, tmp_path):
    shutil.copytree(trained_job, tmp_path / "run")
    images, labels = pictures(17, 2, size=8)  # the last step of an epoch has one, of which ResNet-18 makes one pixel
    write_parquet(tmp_path / "data", "train", images, labels)
    write_parquet(tmp_path / "data", "test", images[:3], labels[:3])
    small = {"data.name": "images", "data.path": str(tmp_path / "data"), "train.global_batch_size": 16}
    micro = small | {"train.micro_batch_size": 16}
    kept = {"seed": 5, "optim.lr": 0.5, "train.global_batch_size": 6, "data.noise": 0.2, "train.epochs": 3}
    refused = {
        "fresh = true": ("regression", "", {"fresh": True}),
        "train.global_batch_size = 16: leaves a micro-batch of 1": ("resnet18", "a", micro),
    }  # fmt: skip
    configs = [job_config(kind, tmp_path / place, changes) for kind, place, changes in refused.values()]
    calls = [(train, config) for config in (job_config("regression", tmp_path, kept), *configs)]
    ((changed, *others),) = run_ranks(in_turn, 1, *calls)
    for field in ("seed = 5", "optim.lr = 0.5", "train.global_batch_size = 6", "data.noise = 0.2"):
        assert f"{field}: the run was started with" in changed
    assert all(found.startswith(message) for found, message in zip(others, refused, strict=True)), others
