"""The training loop: equal to a hand-written one, and
for every way of splitting its steps over processes."""

import gc
import math
import os
import shutil
from copy import deepcopy
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from close import assert_close, float64, in_float64
from commands import expect_error
from ranks import in_turn, run_ranks
from runs import (
    before_each_step,
    built,
    checkpoint_at,
    complete,
    is_intact,
    job_config,
    rows,
    saved_steps,
    state_of,
    status,
    tensors_of,
    train,
    training_config,
    weights,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import TokenStream
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.state import Pending, Progress
from gpt2_ddp.training import loop
from gpt2_ddp.training.loop import Result, finish_pending, train_step
from gpt2_ddp.training.optimizer import GuardedOptimizer, lr_at


def losses(run):
    return [row["loss"] for row in rows(run) if "loss" in row]


@pytest.mark.parametrize("shift", [0, 19])
@float64()
def test_equal_to_a_hand_written_loop(corpus, tmp_path, shift):
    """10 steps against plain PyTorch: no Accelerate, no module of ours but the model, the schedule
    and the reader. tests/model/test_optim.py has Muon. So are the average of the weights and its
    validation loss. The first epoch's windows are shifted by 19 tokens with data.shift_windows
    (tests/data/test_shifted_windows.py)."""
    run = tmp_path / "run"
    changes = {"checkpoint.every": 10, "optim.average": 0.3, "eval.every": 5, "eval.tokens": None}
    changes["data.shift_windows"] = shift > 0
    config = training_config(corpus, tmp_path, changes)
    run_ranks(in_float64, 1, train, config)
    ours = rows(run)

    optim = config.optim.model_copy(update={"decay_steps": 10})
    stream = TokenStream(corpus, read_manifest(corpus), "train")
    n_windows = (len(stream) - 32 if shift else len(stream) - 1) // 32
    torch.manual_seed(config.seed)
    model = GPT(config.model, 512)
    average = deepcopy(model)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": others, "weight_decay": 0.0}], weight_decay=0.1
    )
    order = Permutation(config.seed, n_windows)
    for step in range(1, 11):
        loss_sum = 0.0
        windows = order.items_at(np.arange(12 * step - 12, 12 * step)).astype(np.int64)
        starts = windows * 32 + shift
        for tokens in torch.from_numpy(stream.read(starts, 33).astype(np.int64)).split(3):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:]) / 4
            loss.backward()
            loss_sum += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group.update(lr=lr_at(step, optim), betas=(0.9, 0.95))
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean += min(1.0, (1 / 0.3 - 1) / step) * (weight - mean)
        if step % 5 == 0:
            assert_close(ours[step]["val_loss"], validation_loss(average, corpus), says=step)
        assert_close(
            (ours[step]["loss"], ours[step]["grad_norm"]), (loss_sum, norm.item()), says=step
        )
    assert losses(run)[-1] < losses(run)[0] - 0.2
    kept = tensors_of(checkpoint_at(run, 10), "optimizer")
    trained = {name: kept[f"trained_weights.{name}"] for name, _ in model.named_parameters()}
    for found, right in ((weights(run), average), (trained, model)):
        assert_close(found, right.state_dict())


@torch.no_grad()
def validation_loss(model, corpus):
    """Mean loss over all targets of the validation split, in nats."""
    stream = TokenStream(corpus, read_manifest(corpus), "val")
    tokens = torch.from_numpy(stream.read(np.array([0]), len(stream))[0].astype(np.int64))
    nll = 0.0
    for begin in range(0, len(tokens) - 1, 32):
        window = tokens[begin : begin + 33]
        logits = model(window[None, :-1])[0]
        nll += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return nll / (len(tokens) - 1)


class CountSyncs(TorchDispatchMode):
    """Counts the operations that read a tensor's value on the host, which waits for a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def counted(config):
    """Trains. Returns the host syncs of each step; and the bytes that DDP hands to its all-reduce
    in its first synchronisation and in all later ones."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from gpt2_ddp.training.ddp import Replicated

    step = loop.train_step
    warm_up = Replicated.warm_up
    syncs = []
    reduced = []

    def hook(state, bucket):
        reduced[-1] += bucket.buffer().nbytes
        return allreduce_hook(state, bucket)

    def warm_up_and_count(strategy, model, *rest):
        if hasattr(model, "register_comm_hook"):
            model.register_comm_hook(None, hook)
        reduced.append(0)
        warm_up(strategy, model, *rest)
        reduced.append(0)

    def train_step(*args):
        with CountSyncs() as found:
            result = step(*args)
        syncs.append(found.count)
        return result

    loop.train_step = train_step
    Replicated.warm_up = warm_up_and_count
    train(config)
    return syncs, reduced


def test_processes_times_accumulation(corpus, tmp_path):
    """12 windows on 1 process and on 5, which pad 3, train the same, with the same dropout. Each
    gradient byte is all-reduced once per optimizer step, and no step waits for a device."""
    found = []
    changes = {
        "train.steps": 3,
        "optim.name": "muon",
        "train.micro_batch_size": 1,
        "model.dropout": 0.1,
    }
    changes["model.n_layer"] = 1
    for world in (1, 5):
        config = training_config(corpus, tmp_path / str(world), changes)
        for syncs, (first, later) in run_ranks(counted, world, config):
            # the first one starts the loader, which draws a seed on the CPU
            assert syncs[1:] == [0, 0]
            model = 0
            if world > 1:
                model = sum(4 * p.numel() for p in GPT(config.model, 512).parameters())
            assert (first, later) == (model, 3 * model)
        found.append(rows(tmp_path / str(world) / "run")[1:])
    assert_alike(*found)


def test_steps_leave_nothing_for_the_garbage_collector(corpus, tmp_path, monkeypatch):
    """So no collection of old objects, a tenth of a second, is ever due."""
    changes = {"train.steps": 20, "train.mixed_precision": "no", "model.n_layer": 1}
    changes |= {"eval.every": 100, "checkpoint.every": 100, "tracking.log_every": 3}
    config = training_config(corpus, tmp_path, changes)
    garbage = []
    step = loop.train_step

    def train_step(trainer):
        if trainer.run.step in (5, 10, 15):
            gc.disable()
            garbage.append(gc.collect())
        return step(trainer)

    monkeypatch.setattr(loop, "train_step", train_step)
    try:
        train(config)
    finally:
        gc.enable()
    assert len(garbage) == 3
    # what ends meanwhile, such as a thread of another test, leaves some once
    assert min(garbage[1:]) == 0


def test_a_step_that_needs_too_much_memory(corpus, tmp_path, monkeypatch):
    """One line says what to lower: the micro-batch of
    the steps, which may be smaller than the setting."""
    monkeypatch.setattr(
        loop, "train_step", MagicMock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    )
    gpt = training_config(corpus, tmp_path / "gpt", {"train.micro_batch_size": 8})
    job = job_config("regression", tmp_path / "job", {"train.micro_batch_size": 8})
    for config, advice in ((gpt, "use 4"), (job, "halve it")):
        expect_error(f"train.micro_batch_size = 6: .* memory; {advice}, or", train, config)
        assert status(tmp_path / config.output_dir / "run")["state"] == "failed"


def test_a_model_that_needs_too_much_memory(corpus, tmp_path, monkeypatch):
    """Before the first step, and with the smallest micro-batch, the line says what else would
    help."""
    full = MagicMock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(GuardedOptimizer, "__init__", full)
    config = training_config(corpus, tmp_path, {"train.micro_batch_size": 1})
    ways = "a micro-batch of 1 takes .* GB; try --train.activation_checkpointing true, or"
    expect_error(f"train.micro_batch_size = 1: needs more than .* memory; {ways}", train, config)


def assert_alike(rows, others):
    """Rows with the same order of the data, and the same losses but for the order of sums."""
    for a, b in zip(rows, others, strict=True):
        assert (a["step"], a["order_digest"], a["lr"]) == (b["step"], b["order_digest"], b["lr"])
        assert_close((a["loss"], a["grad_norm"]), (b["loss"], b["grad_norm"]), 1e-4)


def test_resumed_on_other_numbers_of_processes(corpus, tmp_path, trained):
    """A run of 1, 2 and 3 processes, which was complete before, trains what one process does. Its
    past is not changed."""
    changes = {"train.steps": 14, "optim.decay_steps": 10}
    complete(training_config(corpus, tmp_path / "whole", changes))
    shutil.copytree(trained, tmp_path / "run")
    complete(training_config(trained.parent / "data", tmp_path, changes), 3)
    whole = rows(tmp_path / "whole/run")
    parts = rows(tmp_path / "run")
    assert parts[:11] == rows(trained)
    assert_alike(whole[1:], parts[1:])
    assert state_of(tmp_path / "run")["task"]["micro_batch"] == 2, "of 4 windows on each"
    assert is_intact(tmp_path / "run")


def train_on_unlike_processors(config):
    from gpt2_ddp.model import optim

    optim.multiplies_bf16 = lambda device: os.environ.get("RANK") != "1"
    return train(config)


@pytest.mark.slow
def test_ranks_with_unlike_processors_stay_replicas(tiny_config, tmp_path):
    """They are compared before a checkpoint is saved."""
    config = tiny_config({"train.steps": 5, "optim.name": "muon"})
    assert run_ranks(train_on_unlike_processors, 2, config) == ["completed"] * 2


def test_time_budget_stops_with_a_checkpoint(tiny_config, tmp_path):
    config = tiny_config({"train.steps": 10**6, "train.max_minutes": 1e-6, "eval.every": 10**6})
    assert run_ranks(train, 1, config) == ["stopped"]
    ended = status(tmp_path / "runs/run")
    assert "max_minutes" in ended["reason"]
    assert saved_steps(tmp_path / "runs/run")[-1] == ended["step"]


def test_init_from_starts_with_the_weights_of_another_run(tiny_config, tmp_path, trained):
    complete(tiny_config({"train.init_from": str(trained), "train.steps": 1}))
    assert_close(rows(tmp_path / "runs/run")[0]["val_loss"], rows(trained)[-1]["val_loss"], 1e-6)


def test_data_are_prepared_on_first_use(tmp_path):
    """One process of the node prepares, the others wait; the second run finds the folder ready.
    Where the recipe is wrong, all ranks end."""
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question\n" * 400)
    recipe = tmp_path / "recipe.yaml"
    data = tmp_path / "shards"
    settings = f"output: {data}\nvocab_size: 300\nval_fraction: 0.2\nsource: {tmp_path}/"
    changes = {"data.prepare": str(recipe), "train.steps": 1, "optim.decay_steps": 9}
    config = training_config(data, tmp_path, changes)
    write = recipe.write_text
    calls = [
        (write, f"{settings}nothing/*.txt\n"),
        (train, config),
        (write, f"{settings}a.txt\n"),
        (train, config),
    ]
    for _, refused, _, outcome in run_ranks(in_turn, 2, *calls):
        assert refused.startswith(f"source = {tmp_path}/nothing")
        assert outcome == "completed"
    assert rows(tmp_path / "run")[-1]["val_tokens"] > 0
    made = (data / "manifest.json").stat()
    complete(training_config(data, tmp_path, changes | {"train.steps": 2}))
    assert (data / "manifest.json").stat().st_mtime_ns == made.st_mtime_ns


@pytest.mark.slow
def test_compiled_training_equals_eager(short_documents, tmp_path):
    """Compiled, in bf16, with masked documents: the same losses
    to bf16's precision; checkpoints with plain names."""
    changes = {
        "train.mixed_precision": "bf16",
        "train.steps": 4,
        "model.document_mask": True,
        "model.n_layer": 1,
    }
    for how in ("off", "model"):
        config = training_config(short_documents, tmp_path / how, changes | {"train.compile": how})
        run_ranks(train, 1, config, timeout=400)
    eager = tmp_path / "off/run"
    compiled = tmp_path / "model/run"
    assert_close(losses(eager), losses(compiled), 0.05)
    assert_close(rows(eager)[-1]["val_loss"], rows(compiled)[-1]["val_loss"], 0.05)
    assert weights(eager).keys() == weights(compiled).keys()


# Settings take effect


def what_a_step_does(config):
    """Trains; what autocast, determinism and activation
    checkpointing were inside, and where gradients are."""
    from gpt2_ddp.model.gpt import Block

    found = {"blocks": 0, "dtypes": set(), "places": []}
    forward = Block.forward

    def watched(self, x, *rest):
        if self.training and torch.is_grad_enabled():
            found["blocks"] += 1
            found["dtypes"].add(str(self.mlp.c_fc(x).dtype))
        return forward(self, x, *rest)

    def look(run):
        gradients = [p.grad for p in run.task.model.parameters() if p.grad is not None]
        found["places"].append([gradient.data_ptr() for gradient in gradients])
        found["storages"] = len({gradient.untyped_storage().data_ptr() for gradient in gradients})

    Block.forward = watched
    before_each_step(look)
    train(config)
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    return found


def test_settings_take_effect(corpus, tmp_path):
    """Precision, determinism, activation checkpointing and a length in epochs; or none of them.
    Each block of two runs once per micro-batch, and a second time in the backward pass where
    activations are recomputed."""
    changes = {
        "train.mixed_precision": "bf16",
        "train.deterministic": True,
        "train.activation_checkpointing": True,
    }
    changes |= {"train.epochs": 0.05, "train.steps": None}
    (found,) = run_ranks(what_a_step_does, 1, training_config(corpus, tmp_path / "on", changes))
    steps = math.ceil(0.05 * ((read_manifest(corpus).tokens("train") - 1) // 32) / 12)
    assert (found["dtypes"], found["deterministic"]) == ({"torch.bfloat16"}, True)
    assert found["blocks"] == 2 * 4 * steps * 2
    assert len(losses(tmp_path / "on/run")) == steps
    assert losses(tmp_path / "on/run")[-1] < losses(tmp_path / "on/run")[0] - 0.1

    changes = {"train.mixed_precision": "no", "train.steps": 4}
    for found in run_ranks(what_a_step_does, 2, training_config(corpus, tmp_path / "off", changes)):
        assert (found["dtypes"], found["deterministic"]) == ({"torch.float32"}, False)
        assert found["blocks"] == 2 * (1 + 2 * 4)  # once to settle the buckets
        # Else each micro-batch under no_sync would make second gradients, and each step copy them.
        assert [] != found["places"][1] == found["places"][2] == found["places"][3]
        assert found["storages"] == 1  # all of the tiny model's gradients fit into one bucket


def test_the_newest_checkpoint_of_a_result(tmp_path):
    for step in (5, 10, 20):
        checkpoint_at(tmp_path, step).mkdir(parents=True)
    assert Result("completed", 20, {}, 1.0, tmp_path, None).checkpoint == checkpoint_at(
        tmp_path, 20
    )


def test_a_stop_during_an_evaluation_is_agreed_on_at_once():
    training = MagicMock()
    training.run = MagicMock(step=0, early_end="", is_complete=False)
    training.run.progress = Progress(pending=Pending(evaluate=True))
    training.stop.is_agreed = False
    training.interval = None
    training.trainer.evaluate.return_value = {}
    assert finish_pending(training) is None
    training.stop.sync.assert_called_once()


def stages_of_a_step(config):
    with built(config) as trainer:
        stages = []
        trainer.run.watchdog.heartbeat = lambda *stage: stages.append(stage)
        train_step(trainer)
    return stages


def test_each_stage_of_a_step_is_a_sign_of_life(tiny_config):
    (stages,) = run_ranks(stages_of_a_step, 1, tiny_config({"train.micro_batch_size": 6}))
    assert stages == [
        ("data", 1),
        ("forward/backward",),
        ("data",),
        ("forward/backward",),
        ("step",),
    ]
