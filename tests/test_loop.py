"""The training loop: equal to a hand-written one, equal for every way of splitting it, equal after any stop."""

import json
import math
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import training_config
from ranks import RankError, run_ranks, start_ranks
from safetensors.torch import load_file
from small_jobs import rows
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import lr_at


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if "loss" in row]


def run_training(config: TrainingConfig) -> str:
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    return train(config, Pretraining).outcome


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


@pytest.mark.parametrize(("name", "tolerance"), [("adamw", 1e-6), ("muon", 5e-3)])  # bf16 makes much of roundings
def test_equal_to_a_hand_written_loop(corpus, tmp_path, name, tolerance):
    """50 steps against plain PyTorch: no Accelerate, no module of ours but the model, the schedule and the reader."""
    changes = {"train.steps": 50, "eval.every": 50, "checkpoint.every": 50, "optim.name": name}
    config = training_config(corpus, tmp_path, changes)
    run_ranks(run_training, 1, config)
    ours = rows(tmp_path / "run")

    torch.set_num_threads(1)
    optim = config.optim.model_copy(update={"decay_steps": 50})
    stream = TokenStream(corpus, read_manifest(corpus), "train")
    n_windows = (len(stream) - 1) // 32
    torch.manual_seed(config.seed)
    model = GPT(config.model, 512)
    matrices = [p for p in model.h.parameters() if p.dim() == 2 and name == "muon"]
    decay = [p for p in model.parameters() if p.dim() >= 2 and not any(p is matrix for matrix in matrices)]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": others, "weight_decay": 0.0}], weight_decay=0.1)
    muon = torch.optim.Muon(matrices, weight_decay=0.1) if matrices else None
    order = Order(config.seed, n_windows)
    for step in range(1, 51):
        loss_sum = 0.0
        for micro in range(6):
            start = (step - 1) * 24 + micro * 4
            tokens = np.stack(
                [stream.read(np.array([int(w) * 32]), 33)[0] for w in order.at(np.arange(start, start + 4))]
            )
            tokens = torch.from_numpy(tokens.astype(np.int64))
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 512), tokens[:, 1:].reshape(-1)) / 6
            loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group.update(lr=lr_at(step, optim), betas=(0.9, 0.95))
        if muon:
            muon.param_groups[0]["lr"] = lr_at(step, optim) / 3e-3 * 0.01  # one schedule, a peak of its own
            muon.step()
        optimizer.step()
        model.zero_grad()
        assert ours[step]["loss"] == pytest.approx(loss_sum, abs=tolerance), step
        assert ours[step]["grad_norm"] == pytest.approx(norm.item(), rel=100 * tolerance), step
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.8


def count_reduced_bytes(config: TrainingConfig) -> tuple[int, int, int]:
    """Trains, and counts the bytes that DDP hands to its all-reduce: (first synchronisation, all later ones, model)."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from gpt2_ddp.run import run as module

    counted = []
    settle = module.settle_buckets

    def hook(state, bucket):
        counted.append(bucket.buffer().numel() * bucket.buffer().element_size())
        return allreduce_hook(state, bucket)

    before = []

    def settle_and_count(model, *rest):
        model.register_comm_hook(None, hook)
        settle(model, *rest)
        before.append(sum(counted))

    module.settle_buckets = settle_and_count
    run_training(config)
    model = GPT(config.model, 512)
    return before[0], sum(counted) - before[0], sum(4 * p.numel() for p in model.parameters())


def test_processes_times_accumulation(corpus, tmp_path):
    """1 x 8, 2 x 4 and 4 x 2 train the same; each gradient byte is all-reduced once per optimizer step."""
    changes = {"train.global_batch_tokens": 16 * 32, "train.micro_batch_size": 2}
    configs = {
        world: training_config(corpus, tmp_path / str(world), {**changes, "run_name": "run"}) for world in (1, 2, 4)
    }
    run_ranks(run_training, 1, configs[1])
    for world in (2, 4):
        for first, later, model in run_ranks(count_reduced_bytes, world, configs[world]):
            assert first == model
            assert later == 20 * model
    one, *others = (rows(tmp_path / str(world) / "run")[1:] for world in (1, 2, 4))
    assert len(one) == 20
    for other in others:
        for a, b in zip(one, other, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
            assert a["order_digest"] == b["order_digest"]


def stopping_training(config: TrainingConfig, stop_at: int, number: int) -> str:
    """Trains, and has this rank's own process signalled in the middle of step `stop_at`."""
    from gpt2_ddp.run import loop as module

    step = module.train_step

    def train_step(run):
        if run.step + 1 == stop_at and run.accelerator.process_index == run.accelerator.num_processes - 1:
            os.kill(os.getpid(), number)
        return step(run)

    module.train_step = train_step
    return run_training(config)


@pytest.mark.parametrize(
    ("name", "world"),
    [
        ("adamw", 1),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in (("adamw", 3), ("muon", 2))],
        pytest.param("adamw", 2, marks=pytest.mark.soak),
    ],
)
def test_stopped_anywhere_and_resumed_is_bitwise_equal(corpus, tmp_path, name, world):
    """Dropout on. Stopped by signals and by kill -9 at random steps, then run to the end."""
    rng = random.Random(world)
    changes = {"model.dropout": 0.1, "optim.decay_steps": 20, "optim.name": name}
    whole = training_config(corpus, tmp_path / "whole", changes)
    assert run_ranks(run_training, world, whole) == ["completed"] * world

    parts = training_config(corpus, tmp_path / "parts", changes)
    stop_at = rng.randint(2, 6)
    assert run_ranks(stopping_training, world, parts, stop_at, signal.SIGTERM) == ["stopped"] * world
    status = json.loads((tmp_path / "parts/run/status.json").read_text())
    assert status["state"] == "stopped"
    assert stop_at <= status["step"] <= stop_at + 1

    started = start_ranks(stopping_training, world, parts, rng.randint(11, 14), signal.SIGKILL)
    started[-1][0].join(60)
    assert started[-1][0].exitcode == -signal.SIGKILL
    for process, _ in started:
        process.kill()
        process.join()
    assert rows(tmp_path / "parts/run")[-1]["step"] >= 10
    assert run_ranks(stopping_training, world, parts, 17, signal.SIGUSR1) == ["stopped"] * world
    assert run_ranks(run_training, world, parts) == ["completed"] * world

    a, b = rows(tmp_path / "whole/run"), rows(tmp_path / "parts/run")
    assert [row["step"] for row in b] == list(range(21))
    for one, other in zip(a, b, strict=True):
        for timing in ("tokens_per_second", "mfu", "data_share"):
            one.pop(timing, None), other.pop(timing, None)
        assert one == other
    ours, theirs = weights(tmp_path / "whole/run", 20), weights(tmp_path / "parts/run", 20)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_resumed_on_other_numbers_of_processes(corpus, tmp_path):
    """1 -> 2 -> 4 -> 1 processes: the digest is the one-process run's, the losses too but for the order of sums."""
    whole = training_config(corpus, tmp_path / "whole")
    run_ranks(run_training, 1, whole)
    for world, steps in ((1, 5), (2, 10), (4, 15), (1, 20)):
        changes = {"train.steps": steps, "optim.decay_steps": 20}
        run_ranks(run_training, world, training_config(corpus, tmp_path / "parts", changes))
    a, b = ({row["step"]: row for row in rows(tmp_path / name / "run")} for name in ("whole", "parts"))
    assert a.keys() == b.keys()
    assert all(a[step]["order_digest"] == b[step]["order_digest"] for step in range(1, 21))
    assert max(abs(a[step]["loss"] - b[step]["loss"]) for step in range(1, 21)) < 5e-6


class CountSyncs(TorchDispatchMode):
    """Counts the operations that read a tensor's value on the host, which waits for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def steps_and_syncs(config: TrainingConfig) -> list[int]:
    from gpt2_ddp.run import loop as module

    step, counts = module.train_step, []

    def train_step(*args):
        with CountSyncs() as syncs:
            result = step(*args)
        counts.append(syncs.count)
        return result

    module.train_step = train_step
    run_training(config)
    return counts


@pytest.mark.parametrize("world", [1, 2])
def test_no_host_sync_inside_a_step(corpus, tmp_path, world):
    config = training_config(corpus, tmp_path, {"train.steps": 5})
    for counts in run_ranks(steps_and_syncs, world, config):
        assert counts[1:] == [0, 0, 0, 0]  # the first one starts the loader, which draws a seed on the CPU


def test_muon_trains_the_same_on_two_processes(corpus, tmp_path):
    """Each makes some of the updates, and nobody waits for a device; losses are equal but for the order of sums."""
    changes = {"train.steps": 5, "optim.name": "muon"}
    for world in (1, 2):
        config = training_config(corpus, tmp_path / str(world), changes)
        for counts in run_ranks(steps_and_syncs, world, config):
            assert counts[1:] == [0, 0, 0, 0]
    alone, both = (rows(tmp_path / str(world) / "run")[1:] for world in (1, 2))
    assert [row["order_digest"] for row in alone] == [row["order_digest"] for row in both]
    assert [row["loss"] for row in alone] == pytest.approx([row["loss"] for row in both], rel=1e-5)


def train_on_unlike_processors(config: TrainingConfig) -> str:
    from gpt2_ddp.model import muon

    muon.multiplies_bf16 = lambda device: os.environ.get("RANK") != "1"
    return run_training(config)


@pytest.mark.slow
def test_ranks_with_unlike_processors_stay_replicas(corpus, tmp_path):
    """They are compared before a checkpoint is saved."""
    config = training_config(corpus, tmp_path, {"train.steps": 5, "optim.name": "muon"})
    assert run_ranks(train_on_unlike_processors, 2, config) == ["completed"] * 2


def train_with_a_bad_gradient(config: TrainingConfig, bad_step: int) -> str:
    from gpt2_ddp.run import loop as module

    step = module.train_step

    def train_step(run):
        handle = None
        if run.step + 1 == bad_step and run.accelerator.is_main_process:
            handle = run.task.model.wte.weight.register_hook(lambda gradient: gradient * math.nan)
        result = step(run)
        if handle:
            handle.remove()
        return result

    module.train_step = train_step
    return run_training(config)


@pytest.mark.parametrize("name", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_bad_gradient_on_one_rank_is_skipped_by_all(corpus, tmp_path, name):
    changes = {"train.steps": 10, "optim.name": name}
    run_ranks(train_with_a_bad_gradient, 2, training_config(corpus, tmp_path, changes), 4)
    found = rows(tmp_path / "run")
    assert [row["skipped"] for row in found[1:]] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert found[4]["grad_norm"] is None
    assert all(math.isfinite(row["loss"]) for row in found[5:])
    state = json.loads((tmp_path / "run/checkpoints/step-00000010/state.json").read_text())
    assert state["skipped"] == 1


def test_complete_then_raised(corpus, tmp_path):
    """The same command again says that it is complete; more steps go on without changing the past."""
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.steps": 10}))
    first = rows(tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.steps": 10})) == ["completed"]
    after = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert after == before
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.steps": 14}))
    assert rows(tmp_path / "run")[:11] == first
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(15))
    assert rows(tmp_path / "run")[-1]["lr"] == pytest.approx(3e-4)  # the schedule's length is the first start's


def test_time_budget_stops_with_a_checkpoint(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 10**6, "train.max_minutes": 0.03, "eval.every": 10**6})
    assert run_ranks(run_training, 2, config) == ["stopped", "stopped"]
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert "max_minutes" in status["reason"]
    assert (tmp_path / f"run/checkpoints/step-{status['step']:08d}").is_dir()


def test_init_from_starts_with_the_weights_of_another_run(corpus, tmp_path):
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"run_name": "first"}))
    changes = {"run_name": "second", "train.init_from": str(tmp_path / "first"), "train.steps": 1}
    run_ranks(run_training, 2, training_config(corpus, tmp_path, changes))
    assert rows(tmp_path / "second")[0]["val_loss"] == pytest.approx(rows(tmp_path / "first")[-1]["val_loss"], rel=1e-6)
    assert rows(tmp_path / "second")[1]["step"] == 1


def test_a_run_shorter_than_its_warmup_leaves_a_config_that_can_be_given_back(corpus, tmp_path):
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.steps": 4}))
    again = load(TrainingConfig, ["--config", str(tmp_path / "run/config.yaml"), "--train.steps", "6"])
    assert again.optim.decay_steps == 6
    run_ranks(run_training, 1, again)
    assert rows(tmp_path / "run")[-1]["step"] == 6


def test_epochs(corpus, tmp_path):
    n_windows = (read_manifest(corpus).tokens("train") - 1) // 32
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.epochs": 0.05, "train.steps": None}))
    assert rows(tmp_path / "run")[-1]["step"] == math.ceil(0.05 * n_windows / 24)


def test_profile_writes_a_trace(corpus, tmp_path):
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.profile_steps": 2, "train.steps": 6}))
    trace = json.loads((tmp_path / "run/trace.json").read_text())
    assert any("scaled_dot_product" in event.get("name", "") for event in trace["traceEvents"])


@pytest.mark.parametrize("changes", [{"train.mixed_precision": "bf16"}, {"train.activation_checkpointing": True}])
def test_options_train(corpus, tmp_path, changes):
    run_ranks(run_training, 2, training_config(corpus, tmp_path, changes))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.3


@pytest.mark.parametrize("world", [1, 2])
def test_data_are_prepared_on_first_use(tmp_path, world):
    """One process of the node prepares, the others wait; the second run finds the folder ready."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"source: {tmp_path}/a.txt\noutput: {tmp_path}/shards\nvocab_size: 300\nval_fraction: 0.2\n")
    changes = {"data.prepare": str(recipe), "train.steps": 3, "eval.every": 3}
    config = training_config(tmp_path / "shards", tmp_path / "runs", changes)
    assert run_ranks(run_training, world, config) == ["completed"] * world
    made = (tmp_path / "shards/manifest.json").stat().st_mtime_ns
    assert rows(tmp_path / "runs/run")[-1]["val_tokens"] > 0
    run_ranks(run_training, world, config)
    assert (tmp_path / "shards/manifest.json").stat().st_mtime_ns == made


def test_a_recipe_that_fails_ends_all_ranks(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"source: {tmp_path}/nothing/*.txt\noutput: {tmp_path}/shards\n")
    config = training_config(tmp_path / "shards", tmp_path / "runs", {"data.prepare": str(recipe)})
    with pytest.raises(RankError, match=r"UserError: source = .*nothing"):
        run_ranks(run_training, 2, config, timeout=60)


@pytest.mark.slow
def test_compiled_training_equals_eager(corpus, tmp_path):
    """Compiled, in bf16, on two ranks: the same losses to bf16's precision, and checkpoints with plain names."""
    changes = {"train.mixed_precision": "bf16", "train.steps": 6, "eval.every": 3}
    run_ranks(run_training, 2, training_config(corpus, tmp_path / "eager", changes))
    run_ranks(
        run_training, 2, training_config(corpus, tmp_path / "compiled", {**changes, "train.compile": True}), timeout=400
    )
    eager, compiled = (rows(tmp_path / name / "run") for name in ("eager", "compiled"))
    for a, b in zip(eager, compiled, strict=True):
        assert a.get("loss", 0) == pytest.approx(b.get("loss", 0), abs=0.02)
        assert a.get("val_loss", 0) == pytest.approx(b.get("val_loss", 0), abs=0.02)
    assert weights(tmp_path / "compiled/run", 6).keys() == weights(tmp_path / "eager/run", 6).keys()


def test_deterministic_mode_trains(corpus, tmp_path):
    run_ranks(run_training, 1, training_config(corpus, tmp_path, {"train.deterministic": True, "train.steps": 3}))
    assert len(losses(tmp_path / "run")) == 3


# Settings take effect


def what_a_step_does(config: TrainingConfig) -> dict[str, object]:
    """Trains; what autocast, determinism and activation checkpointing were inside, and where gradients are."""
    import torch

    from gpt2_ddp.model.gpt import Block
    from gpt2_ddp.run import loop

    found: dict[str, object] = {"blocks": 0, "dtypes": set(), "places": []}
    forward, step = Block.forward, loop.train_step

    def watched(self, x, *rest):
        if self.training and torch.is_grad_enabled():
            found["blocks"] += 1
            found["dtypes"].add(str(self.mlp.c_fc(x).dtype))
        return forward(self, x, *rest)

    def train_step(run):
        result = step(run)
        gradients = [p.grad for p in run.task.model.parameters()]
        found["places"].append([None if gradient is None else gradient.data_ptr() for gradient in gradients])
        found["storages"] = len({g.untyped_storage().data_ptr() for g in gradients if g is not None})
        return result

    Block.forward, loop.train_step = watched, train_step
    run_training(config)
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return found


@pytest.mark.parametrize(("precision", "dtype"), [("no", "torch.float32"), ("bf16", "torch.bfloat16")])
def test_mixed_precision_takes_effect(corpus, tmp_path, precision, dtype):
    changes = {"train.mixed_precision": precision, "train.steps": 2}
    (found,) = run_ranks(what_a_step_does, 1, training_config(corpus, tmp_path, changes))
    assert found["dtypes"] == {dtype}


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_takes_effect(corpus, tmp_path, deterministic):
    changes = {"train.deterministic": deterministic, "train.steps": 2}
    (found,) = run_ranks(what_a_step_does, 1, training_config(corpus, tmp_path, changes))
    assert found["deterministic"] is deterministic


@pytest.mark.parametrize("recomputes", [True, False])
def test_activation_checkpointing_takes_effect(corpus, tmp_path, recomputes):
    """Two blocks, 6 micro-batches, 2 steps; each block runs a second time in the backward pass."""
    changes = {"train.activation_checkpointing": recomputes, "train.steps": 2}
    (found,) = run_ranks(what_a_step_does, 1, training_config(corpus, tmp_path, changes))
    assert found["blocks"] == 2 * 6 * 2 * (2 if recomputes else 1)


def test_gradients_stay_views_of_ddps_buckets(corpus, tmp_path):
    """Else each micro-batch under no_sync would make second gradients, and each step copy them."""
    for found in run_ranks(what_a_step_does, 2, training_config(corpus, tmp_path, {"train.steps": 4})):
        assert found["places"][1] == found["places"][2] == found["places"][3]
        assert None not in found["places"][0]
        assert found["storages"] == 1  # all of the tiny model's gradients fit into one bucket


def test_the_newest_checkpoint_of_a_result(tmp_path):
    from gpt2_ddp.run.loop import Result

    for step in (5, 10, 20):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    assert Result("completed", 20, {}, 1.0, tmp_path, None).checkpoint == tmp_path / "checkpoints/step-00000020"


def test_a_run_begins_with_a_row_only_where_there_are_scores():
    from types import SimpleNamespace

    from gpt2_ddp.run.loop import follow

    logged = []
    stop = SimpleNamespace(poll=None, is_agreed=False, agreed_now=lambda: False)
    running = SimpleNamespace(metrics=SimpleNamespace(log=logged.append), stop=stop)
    for step, scores in ((0, {}), (0, {"val_loss": 1.0}), (5, {})):
        run = SimpleNamespace(owed={"row": {"step": step}}, step=step, first_step=0, evaluate=lambda poll, s=scores: s)
        assert follow(run, running)  # pyright: ignore
        assert run.owed is None
    assert logged == [{"step": 0, "val_loss": 1.0}, {"step": 5}]
