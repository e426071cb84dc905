"""Supervised: equal to a hand-written loop on any number of
processes, exact in its scores, bitwise after any stop."""

import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cifar import pictures, write_cifar
from close import assert_close, float64, in_float64
from commands import expect_error
from ranks import in_turn, run_ranks
from runs import (
    job_config,
    rows,
    weights,
)
from runs import run_small_job as train

from gpt2_ddp.config.saved import check_resumable
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.errors import UserError
from gpt2_ddp.state import JobData
from gpt2_ddp.tasks.jobs import LeNet, make_job
from gpt2_ddp.tasks.supervised import Samples, Supervised, job_schedule, score_each


def assert_by_hand(folder, config):
    """Linear regression in plain PyTorch: no Accelerate, no module of ours but the order of the
    samples. Compares the weights of the run in `folder`; returns the losses."""
    generator = torch.Generator().manual_seed(config.seed)
    x, noise = torch.randn(2, config.data.points, generator=generator)
    y = 2 * x + 3 + 0.1 * noise
    torch.manual_seed(config.seed)
    line = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), config.optim.lr, config.optim.momentum)
    losses = []
    for epoch in range(config.train.epochs):
        positions = np.arange(epoch * len(x), (epoch + 1) * len(x))
        order = Permutation(config.seed, len(x)).items_at(positions).astype("int64")
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
    config = job_config(
        "regression", tmp_path, {"data.points": 97, "train.micro_batch_size": micro}
    )
    results = run_ranks(in_float64, world, train, config)
    losses = assert_by_hand(tmp_path, config)
    for name in ("loss", "loss_mean"):
        assert_close([row[name] for row in rows(tmp_path / "run")[1:]], losses)
    assert results[0].step == len(losses) == 36
    assert_close(results[0].metrics["train_loss"], (12 * sum(losses[-9:-1]) + losses[-1]) / 97)
    assert all(result.metrics == results[0].metrics for result in results)


def test_rates_by_epochs(tmp_path):
    changes = {"optim.lr": 0.2, "optim.warmup_epochs": 1, "optim.schedule": "cosine"}
    cosine = job_schedule(job_config("regression", tmp_path, changes), 7)
    assert_close([cosine(step) for step in (1, 7, 14, 28)], [0.2 / 7, 0.2, 0.15, 0.0])
    saved = job_config("regression", tmp_path, changes).model_dump(mode="json")
    longer = job_config("regression", tmp_path, changes | {"train.epochs": 6})
    expect_error("train.epochs = 6: ", check_resumable, longer, "regression", saved, 14)
    constant = job_schedule(job_config("regression", tmp_path, {"optim.lr": 0.01}), 7)
    assert {constant(step) for step in (1, 28, 10**6)} == {0.01}


SETS = ((1, 4), (2, 1), (37, 8), (48, 8))
"""Samples and batch size: what no number of processes
and no batch divides, and less than a batch."""


IDENTITY = torch.nn.Identity()


def sample_set(n):
    return Samples(
        torch.randn(n, 3, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 3
    )


def scores_of(model, inputs, targets):
    return {"accuracy": model(inputs).argmax(1) == targets, "weighted": targets * inputs[:, 0]}


def score_everything():
    from gpt2_ddp.distributed.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    return [
        score_each(accelerator, IDENTITY, sample_set(n), scores_of, size)[1].tolist()
        for n, size in SETS
    ]


def test_each_test_sample_is_scored_once_in_order():
    scores = [
        scores_of(IDENTITY, sample_set(n).inputs, sample_set(n).targets).values() for n, _ in SETS
    ]
    wanted = [torch.stack([score.double() for score in of]).T.tolist() for of in scores]
    assert run_ranks(score_everything, 3) == [wanted] * 3


def test_images_are_scored_as_by_a_plain_computation_and_their_folder_may_move(tmp_path):
    """The scores of a run that resumed."""
    data = write_cifar(tmp_path / "cifar", 100, 37, classes=10)
    moved = str(tmp_path / "moved")
    own = {"data.name": "images", "train.epochs": 1}
    first = job_config("lenet", tmp_path, own | {"data.path": str(data)})
    second = job_config("lenet", tmp_path, own | {"data.path": moved, "train.epochs": 2})
    run_ranks(in_turn, 1, (train, first), (shutil.move, data, moved), (train, second))
    last = rows(tmp_path / "run")[-1]
    loaded = weights(tmp_path / "run")
    images, labels = pictures(37, 10, seed=2)
    model = LeNet(10)
    targets = torch.from_numpy(labels)
    model.load_state_dict(loaded)
    outputs = model(torch.from_numpy(images).permute(0, 3, 1, 2) / 127.5 - 1)
    best = outputs.topk(5).indices == targets[:, None]
    loss = torch.nn.functional.cross_entropy(outputs, targets).item()
    expected = {
        "val_accuracy": best[:, 0].sum() / 37,
        "val_top5": best.sum() / 37,
        "val_loss": loss,
    }
    expected |= {"val_samples": 37, "epoch": 2}
    assert_close({name: last[name] for name in expected}, expected, 1e-5, loss)


@pytest.mark.parametrize(
    ("name", "value", "processes"),
    [
        ("launch.processes", 3, 1),
        ("train.global_batch_size", 2, 3),
    ],
)
def test_another_number_of_processes(tmp_path, name, value, processes):
    saved = SimpleNamespace(
        state=SimpleNamespace(task=JobData(global_batch_size=24, lr=0.02, data_hash=""))
    )
    accelerator = SimpleNamespace(num_processes=processes)
    config = job_config("regression", tmp_path, {name: value})
    expect_error(f"^{name} = {value}: ", Supervised, make_job, config, accelerator, saved)


def test_a_run_keeps_what_it_was_started_with(tmp_path):
    saved = job_config("regression", tmp_path).model_dump(mode="json")
    kept = {"seed": 5, "optim.lr": 0.5, "train.global_batch_size": 6, "data.noise": 0.2}
    fields = "|".join(f"{field} = {value}: " for field, value in kept.items())
    with pytest.raises(UserError) as refused:
        check_resumable(job_config("regression", tmp_path, kept), "regression", saved, 18)
    assert len(re.findall(fields, str(refused.value))) == 4
