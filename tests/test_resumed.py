"""A run that is stopped and killed, and resumed, equals the same run left alone, bit for bit."""

import json
import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cifar import write_cifar
from ranks import run_ranks, run_until_killed
from runs import assert_same, job_config, lasting_state, rows, train_with_faults, training_config, verified, weights

from gpt2_ddp.config.run import RunConfig

KEPT = {"checkpoint.keep_last": 9}
SAMPLED = {"tracking.sample_every": 5, "tracking.sample_prompt": ["def ", ""]}
GUARDED = {"guard": {"patience": 3, "norm_sigmas": 50.0, "loss_sigmas": 50.0}, "model.dropout": 0.1}
GPT = GUARDED | SAMPLED | KEPT | {"checkpoint.every": 4, "eval.every": 5, "tracking.log_every": 2}


def same_as_alone(
    whole: RunConfig, parts: RunConfig, world: int, stops: list[tuple[int, int]], bad: tuple[int, int] = (0, 0)
) -> Path:
    """Trains one run, and another that gets each signal of `stops` before so many steps of its process. Rows, samples,
    states, weights and moments are the same. Gradients at the positions in `bad` are not finite. Returns the second."""
    assert run_ranks(train_with_faults, world, whole, bad) == ["completed"] * world
    one, other = (Path(config.output_dir) / "run" for config in (whole, parts))
    for number, at in stops:
        if number == signal.SIGKILL:
            run_until_killed(train_with_faults, world, parts, bad, float("nan"), at)
        else:
            outcomes = run_ranks(train_with_faults, world, parts, bad, float("nan"), at, number)
            assert outcomes == ["stopped"] * world
            assert json.loads((other / "status.json").read_text())["state"] == "stopped"
    assert run_ranks(train_with_faults, world, parts, bad) == ["completed"] * world
    assert_same(one, other)
    if (one / "samples.jsonl").exists():
        assert rows(other, "samples.jsonl") == rows(one, "samples.jsonl")
    for checkpoint in (one / "checkpoints").iterdir():
        again = other / "checkpoints" / checkpoint.name
        assert lasting_state(checkpoint) == lasting_state(again)
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (again / file).read_bytes() == (checkpoint / file).read_bytes()
    return other


@pytest.mark.parametrize("world", [2, *[pytest.param(world, marks=pytest.mark.soak) for world in (1, 3)]])
def test_stopped_and_killed_anywhere(corpus, short_documents, tmp_path, capsys, world):
    """With all that a state depends on: dropout, two sources, masked documents, sums over steps and evaluations, and a
    stretch of bad data, steps 9 to 13, from which the run goes back to step 8."""
    changes = GPT | {"data": {"path": [str(corpus), str(short_documents)], "weights": [2, 1]}}
    changes |= {"model.document_mask": True, "eval.patience": 9, "optim.name": "muon", "train.steps": 16}
    rng = random.Random(world)
    stop_at, killed_at = rng.randint(2, 6), rng.randint(10, 11)
    stops = [(signal.SIGKILL, 1), (signal.SIGTERM, stop_at), (signal.SIGKILL, killed_at - stop_at)]
    stops += [(signal.SIGUSR1, 5 + rng.randint(2, 6))]
    whole, parts = (training_config(corpus, tmp_path / name, changes) for name in "ab")
    run = same_as_alone(whole, parts, world, stops, (12 * 8, 12 * 13))
    (event,) = [row for row in rows(run) if "event" in row]
    assert (event["step"], event["from"], event["skipped_range"]) == (8, 13, [96, 156])
    last = rows(run)[-1]
    assert sum(last[f"tokens/{source}"] for source in parts.data.names) == last["tokens"] == 16 * 12 * 32
    assert verified(run, capsys)[0] == 0


def test_sharded_over_two_ranks(corpus, tmp_path):
    """A rank with NaN makes all skip these steps, and go back at the same step, judged two steps late."""
    changes = (
        GUARDED | KEPT | {"launch.parallel": "fsdp", "optim.name": "muon", "checkpoint.every": 3, "train.steps": 18}
    )
    whole, parts = (training_config(corpus, tmp_path / name, changes | {"eval.every": 8}) for name in "ab")
    run = same_as_alone(whole, parts, 2, [(signal.SIGKILL, 6), (signal.SIGTERM, 7)], (12 * 9, 12 * 12))
    assert [row["skipped_range"] for row in rows(run) if "skipped_range" in row] == [[12 * 9, 12 * 14]]


def test_a_job_that_is_killed_inside_its_second_epoch(tmp_path):
    whole, parts = (job_config("transformer", tmp_path / name, KEPT | {"train.epochs": 2}) for name in "ab")
    same_as_alone(whole, parts, 2, [(signal.SIGKILL, 6)])


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed < 6 else pytest.mark.soak) for seed in range(60)]
)
def test_any_task_layout_optimizer_and_stops(corpus, tmp_path, capsys, seed):
    rng = random.Random(seed)
    kinds = ["gpt2", "regression", "mlp", "lenet", "resnet18", "transformer"]
    kind, world, bad = kinds[seed % 6], rng.choice([1, 2, 3]), (0, 0)
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
    stops = [(rng.choice(signals), rng.randint(1, 4)) for _ in range(rng.randint(1, 3))]
    changes: dict[str, Any] = {}
    if kind == "gpt2":
        changes = GPT | {"train.steps": 20, "launch.parallel": rng.choice(["ddp", "fsdp"])}
        changes |= {"optim.name": rng.choice(["adamw", "muon"]), "model.document_mask": rng.random() < 0.5}
        bad = rng.choice([bad, (12 * 8, 12 * 13)])
        whole, parts = (training_config(corpus, tmp_path / name, changes) for name in "ab")
    else:
        changes = KEPT | {"optim.name": rng.choice(["sgd", "adam"]), "checkpoint.save_every": rng.choice([1, 2])}
        if kind in ("lenet", "resnet18"):
            images = write_cifar(tmp_path / "cifar", 224 if kind == "lenet" else 56, 10)
            changes |= {"data.path": str(images), "data.image_size": 16 if kind == "lenet" else 8, "data.augment": True}
        whole, parts = (job_config(kind, tmp_path / name, changes) for name in "ab")
    print(kind, world, changes, stops, bad)
    run = same_as_alone(whole, parts, world, stops, bad)
    assert verified(run, capsys)[0] == 0
    if kind == "resnet18":
        micro_batches = sum(math.ceil(math.ceil(n / world) / 4) for n in (12, 12, 12, 12, 8))
        assert weights(run)["bn1.num_batches_tracked"] == 4 * micro_batches
