"""`launch.parallel: fsdp`: the same run, whether
its ranks share one model or each has all of it."""

import os
import resource
import signal
import threading
from collections import Counter
from functools import partial
from itertools import cycle, product
from types import SimpleNamespace

import psutil
import pytest
import torch
from commands import expect_error
from conftest import module_text, once, write_shards
from hellaswag import items_file
from ranks import run_ranks, start_ranks
from runs import (
    assert_same,
    built,
    events,
    initial_weights,
    is_intact,
    newest_checkpoint,
    tensors_of,
    train,
    train_all,
    train_with_faults,
    training_config,
    untimed,
    weights,
)

from gpt2_ddp.distributed.ranks import LONGEST
from gpt2_ddp.model import gpt
from gpt2_ddp.model.architecture import ARCHITECTURES
from gpt2_ddp.model.optim import OPTIMIZERS
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training import loop
from gpt2_ddp.training.fsdp import Sharded

SLOW = pytest.mark.slow

FSDP = {"launch.parallel": "fsdp"}
MUON = {"optim.name": "muon", "model.dropout": 0.1}
WAYS = ("ddp", "fsdp")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Shards of bytes: 257 ids, so that every model pads its vocabulary."""
    texts = {"train": [module_text("textwrap")], "val": [module_text("bisect")]}
    return once(
        tmp_path_factory, "text", lambda folder: write_shards(folder, "stdlib", texts, "bytes")
    )


def cell(text, folder, architecture, optimizer, steps=8, **more):
    changes = {
        "model.architecture": architecture,
        "optim.name": optimizer,
        "train.steps": steps,
        "eval.every": steps,
    }
    return training_config(
        text, folder, {"run_name": f"{architecture}-{optimizer}"} | changes | more
    )


def train_bounded(configs):
    """Trains all; the outcomes. The watchdog bounds the collectives of every group."""
    from torch.distributed.distributed_c10d import _world

    outcomes = train_all(configs)
    assert {
        group._get_backend(torch.device("cpu")).options._timeout for group in _world.pg_map
    } <= {LONGEST}
    return outcomes


def compare(one, other, most=1e-4):
    """Two runs have the same order of data, and the same
    losses and weights but for the order of sums."""
    ours, theirs = ([row for row in untimed(run) if "loss" in row] for run in (one, other))
    assert ours[-1]["order_digest"] == theirs[-1]["order_digest"]
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    right = weights(other)
    largest = max((value - right[name]).abs().max().item() for name, value in weights(one).items())
    print(one, loss, largest)
    assert loss <= 5e-6
    assert largest <= most


@pytest.mark.parametrize(
    ("processes", "replicas", "architectures"),
    [
        (3, 1, ["nanochat"]),
        # each architecture with one of the optimizers
        pytest.param(4, 2, ARCHITECTURES, marks=SLOW),
        *(
            pytest.param(number, 1, ARCHITECTURES, marks=[SLOW, pytest.mark.soak])
            for number in (1, 2, 3)
        ),
    ],
)
def test_the_same_run_as_ddp(text, tmp_path, processes, replicas, architectures):
    """Equal order; equal losses and weights, but for the order of sums. In one process, equal
    bits."""
    cells = [*product(architectures, OPTIMIZERS)]
    if processes == 4:
        cells = [*zip(architectures, cycle(OPTIMIZERS))]
    ways = {"ddp": {}, "fsdp": FSDP | {"launch.replicas": replicas}}
    configs = [
        cell(text, tmp_path / way, *names, 4, **ways[way]) for way in ways for names in cells
    ]
    outcomes = run_ranks(train_bounded, processes, configs, timeout=300)
    assert outcomes == [["completed"] * len(configs)] * processes
    for names in cells:
        runs = (tmp_path / way / "-".join(names) for way in ways)
        compare(*runs, 0 if processes == 1 else 1e-4 if "muon" in names else 1e-5)


class Experts(torch.nn.Module):
    """A model without blocks, whose experts are a stack of matrices."""

    def __init__(self, vocab_size):
        super().__init__()
        self.tokens = torch.nn.Embedding(vocab_size, 16)
        self.experts = torch.nn.Parameter(torch.randn(3, 16, 24) / 4)
        self.head = torch.nn.Linear(24, vocab_size)

    def forward(self, tokens, targets, reduction):
        x = self.tokens(tokens)[..., None, :] @ self.experts[tokens % 3]
        logits = self.head(x.squeeze(-2).relu())
        return torch.nn.functional.cross_entropy(logits.mT, targets, reduction=reduction)


def train_own(config):
    Pretraining.make_model = lambda task, vocab_size, *_: Experts(vocab_size)
    return train(config)


@SLOW
def test_muon_and_sharding_of_a_model_without_blocks(text, tmp_path):
    """Stacks of matrices are Muon's. The runs are equal, but for the order of sums."""
    for way in WAYS:
        changes = {"optim.embedding_lr": 0.01, "launch.parallel": way}
        config = cell(text, tmp_path / way, "gpt2", "muon", **changes)
        assert run_ranks(train_own, 2, config) == ["completed"] * 2
    compare(*(tmp_path / way / "gpt2-muon" for way in WAYS))
    state = tensors_of(newest_checkpoint(tmp_path / "fsdp/gpt2-muon"), "optimizer")
    assert [name for name in state if name.startswith("momentum_buffer.")] == [
        "momentum_buffer.experts"
    ]


@SLOW
def test_a_run_that_changes_between_ddp_and_fsdp(corpus, tmp_path, monkeypatch):
    """Each way resumes the other's checkpoints, with dropout, document masks, recomputed
    activations, a loss in chunks, scores of tasks and samples."""
    more = MUON | {
        "model.document_mask": True,
        "eval.tasks": [items_file(tmp_path)],
        "eval.every": 2,
        "eval.tokens": 130,
    }
    more |= {"train.activation_checkpointing": True, "train.micro_batch_size": 1}
    monkeypatch.setattr(gpt, "loss_chunk", lambda x: 16)
    more |= {"tracking.sample_every": 2, "optim.decay_steps": 10, "optim.average": 0.3}
    more |= {"model.block_size": 16, "train.global_batch_tokens": 192}
    train_with_faults(training_config(corpus, tmp_path / "alone", more | {"train.steps": 10}))
    for number, (processes, way, replicas) in enumerate(
        [(1, "ddp", 1), (2, "fsdp", 1), (3, "ddp", 1), (4, "fsdp", 2), (1, "ddp", 1)], 1
    ):
        how = {"train.steps": 2 * number, "launch.parallel": way, "launch.replicas": replicas}
        run_ranks(
            train_with_faults, processes, training_config(corpus, tmp_path / "changed", more | how)
        )
    alone = tmp_path / "alone/run"
    changed = tmp_path / "changed/run"
    compare(alone, changed)
    assert events(alone, "sample") == events(changed, "sample")
    assert is_intact(changed)


def train_until_killed_in_a_save(config, step, killed, at_manifest):
    """Trains. In the save of this step, that rank is killed, or all (-1): after its own files, or
    when the main process has the manifest."""
    from gpt2_ddp.checkpoint import store

    write_part = store.write_part
    write_manifest = store.write_manifest

    def kill(folder):
        if folder.name == f".step-{step:08d}.tmp":
            os.kill(os.getpid(), signal.SIGKILL)

    def write(snapshot, folder):
        files = write_part(snapshot, folder)
        if not at_manifest and killed in (-1, snapshot.part.number):
            kill(folder)
        return files

    def seal(files, folder, *format):
        write_manifest(files, folder, *format)
        kill(folder)

    store.write_part = write
    if at_manifest:
        store.write_manifest = seal
    train(config)


KILLS = {
    False: [(2, 0, False), (2, 0, True), (4, 1, False)],
    True: [(2, 1, False), (2, -1, False), (4, 0, True)],
}
"""By whether checkpoints are saved in the background:
step, rank and whether the manifest is written."""


@SLOW
def test_kills_while_parts_are_written(corpus, tmp_path):
    """Nothing half written is taken, and the resumed
    run is that which was left alone, bit for bit."""
    more = FSDP | MUON | {"train.steps": 4, "train.global_batch_tokens": 192, "checkpoint.every": 2}
    run_ranks(train, 2, training_config(corpus, tmp_path / "alone", more))
    for background, kills in KILLS.items():
        killed = training_config(
            corpus, tmp_path / str(background), more | {"checkpoint.background": background}
        )
        for step, rank, at_manifest in kills:
            started = start_ranks(train_until_killed_in_a_save, 2, killed, step, rank, at_manifest)
            for process, _ in started:
                process.join(120)
            assert -signal.SIGKILL in [process.exitcode for process, _ in started]
        assert run_ranks(train, 2, killed) == ["completed"] * 2
        assert_same(tmp_path / "alone/run", tmp_path / f"{background}/run")
        assert is_intact(tmp_path / f"{background}/run")


SHARDED = {
    "wide": {"model.architecture": "qwen3", "model.n_embd": 8, "model.n_head": 4},
    "two": {"launch.replicas": 2},
    "replicas": {"launch.replicas": 4, "checkpoint.background": True},
}


@SLOW
def test_four_processes(corpus, tmp_path):
    """More processes than rows of a parameter, and than items of a task; two
    replicas; four, saved in the background."""
    alike = MUON | {
        "train.micro_batch_size": 1,
        "train.steps": 3,
        "eval.tasks": [items_file(tmp_path, 3)],
    }
    alike |= {"train.global_batch_tokens": 256, "eval.tokens": 130}
    ways = {name: FSDP | own for name, own in SHARDED.items()} | {
        "wide-ddp": SHARDED["wide"],
        "ddp": {},
    }
    configs = [
        training_config(corpus, tmp_path, alike | way | {"run_name": name})
        for name, way in ways.items()
    ]
    assert run_ranks(train_all, 4, configs) == [["completed"] * len(configs)] * 4
    for name in SHARDED:
        compare(tmp_path / ("wide-ddp" if name == "wide" else "ddp"), tmp_path / name)
        assert is_intact(tmp_path / name)


def test_the_same_initial_weights(text, tmp_path):
    """The main process draws them as every process does with DDP."""
    (whole,) = run_ranks(initial_weights, 1, cell(text, tmp_path / "ddp", "gpt2", "adamw"))
    config = cell(text, tmp_path / "fsdp", "gpt2", "adamw", **FSDP)
    assert run_ranks(initial_weights, 2, config) == [whole] * 2


def test_a_buffer_that_no_checkpoint_has_is_made_on_a_device():
    from gpt2_ddp.training import fsdp  # a second to import

    def make(device):
        model = torch.nn.Linear(1, 1)
        model.register_buffer("scale", torch.ones(1, device=device), persistent=False)
        return model

    assert fsdp.make_model(partial(make, "cpu"))[0].scale == 1
    expect_error("task = scale: ", fsdp.make_model, partial(make, None))


def growth(work):
    """MiB by which this process's resident set grows while it works, at most."""
    size = psutil.Process().memory_info
    found = [size().rss]
    done = threading.Event()

    def watch():
        while not done.wait(0.002):
            found.append(size().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    work()
    done.set()
    watching.join()
    return (max(found) - found[0]) >> 20


def rank_memory(config):
    """MiB of this rank: the peak of its resident set before, after the start and after a step; what
    torch's tracker finds at the peak of the second step; and what a save and a load add."""
    # its import is no part of the start
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, MemTracker

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

    found = {"before": peak()}
    with built(config) as trainer:
        store = trainer.run.store
        found["start"] = peak()
        trainer.warm_up()
        loop.train_step(trainer)
        found["step"] = peak()
        if config.launch.parallel == "fsdp":
            tracker = FSDPMemTracker(trainer.model, trainer.optimizer.plain)
        else:
            tracker = MemTracker()
            tracker.track_external(trainer.model, trainer.optimizer.plain)
        with tracker:
            loop.train_step(trainer)
        sizes = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
        found |= {
            str(getattr(kind, "value", kind)): size >> 20
            for kind, size in sizes.items()
            if size >> 20
        }
        found["save"] = growth(lambda: store.save(trainer.snapshot()))
        newest = store.newest()
        assert newest
        return found | {"load": growth(lambda: trainer.load(newest))}


@SLOW
@pytest.mark.parametrize(
    ("processes", "way"),
    [
        (2, "fsdp"),
        *(
            pytest.param(number, way, marks=pytest.mark.soak)
            for number in (1, 2, 4)
            for way in WAYS
        ),
    ],
)
def test_memory_of_100_million_parameters(text, tmp_path, processes, way):
    """No rank but the first, at the start, has the whole model, of 382 MiB. A save and a load take
    a tensor, of 11 MiB, beside the part."""
    more = {
        "model": {"n_layer": 12, "n_embd": 832, "n_head": 13, "block_size": 8},
        "launch.parallel": way,
    }
    more |= {"train.global_batch_tokens": 32, "train.micro_batch_size": 4 // processes}
    found = run_ranks(rank_memory, processes, cell(text, tmp_path, "gpt2", "adamw", **more))
    print(processes, way, *found, sep="\n")
    if way == "fsdp":
        assert found[0]["Total"] <= 1580 / processes + 150
        for number, rank in enumerate(found):  # glibc keeps some
            assert rank["start"] - rank["before"] < 382 * (not number) + 382 / processes + 150
    assert max(rank[what] for rank in found for what in ("save", "load")) < 11 + 30


def collectives_of_a_step(config, keeps=False):
    """Takes two steps, of three micro-batches each. Of the second: how often weights were gathered
    and gradients were reduced, how often FSDP ended its backward pass, and the loss of each."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

    from gpt2_ddp.training import memory

    memory.KEEPS_WEIGHTS_ON = ("cpu",) if keeps else ()
    counts = Counter()

    def count(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        setattr(owner, name, counted)

    count(groups, "foreach_all_gather")
    count(groups, "foreach_reduce")
    count(groups.FSDPParamGroup, "finalize_backward")
    with built(config) as trainer:
        losses = []
        for _ in range(2):
            counts.clear()
            result = loop.train_step(trainer)
            losses.append(result.losses["loss"].item())
        counts["weights of a group that stay gathered"] = sum(
            group.is_unsharded
            for module in (*trainer.run.task.model.h, trainer.run.task.model)
            for group in module._get_fsdp_state()._fsdp_param_groups
        )
    return dict(counts), losses


def test_weights_that_fit_are_gathered_once_a_step(text, tmp_path):
    """Otherwise in each forward and backward pass, but once in both for what is no block. Only the
    last backward pass sums gradients and ends. Losses are the same bits."""
    more = FSDP | {"model.n_layer": 3, "train.global_batch_tokens": 192}
    configs = [
        cell(
            text, tmp_path / str(keeps), "gpt2", "adamw", 2, **more | {"train.micro_batch_size": 1}
        )
        for keeps in (False, True)
    ]
    usual, keeping = (
        run_ranks(collectives_of_a_step, 2, config, keeps) for keeps, config in enumerate(configs)
    )
    for (freed, losses), (kept, same) in zip(usual, keeping, strict=True):
        assert freed["foreach_all_gather"] == 3 * (2 * 3 + 1)
        assert kept["foreach_all_gather"] == 3 + 1
        assert losses == same
        for counts in (freed, kept):
            assert counts["foreach_reduce"] == counts["finalize_backward"] == 3 + 1
            assert counts["weights of a group that stay gathered"] == 0


def test_the_norm_of_no_gradients_is_on_the_device(monkeypatch):
    """NCCL refuses tensors of the CPU."""
    devices = []

    def all_reduce(tensor, group):
        devices.append(tensor.device.type)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    strategy = object.__new__(Sharded)
    strategy.accelerator = SimpleNamespace(device=torch.device("meta"))
    strategy.shards = None
    assert strategy.clip([], 1.0).shape == ()
    assert devices == ["meta"]


def order_of_muon(config):
    """Of one step: collectives of Muon in the order in which they start (with their tensors' rows)
    and in which they are waited for."""
    found = []

    def record(name):
        function = getattr(torch.distributed, name)

        def start(tensor, *args, **kwargs):
            work = function(tensor, *args, **kwargs)
            if not kwargs.get("async_op"):
                return work
            number = len(found)
            found.append(name)

            def wait():
                found.append(number)
                return work.wait()

            return SimpleNamespace(wait=wait)

        setattr(torch.distributed, name, start)

    with built(config) as trainer:
        for name in ("broadcast", "gather", "scatter", "all_gather_into_tensor", "all_gather"):
            record(name)
        trainer.warm_up()
        loop.train_step(trainer)
        matrices = len(trainer.optimizer.plain.param_groups[-1]["params"])
    return matrices, found


@pytest.mark.parametrize("way", WAYS)
def test_muon_sends_all_matrices_before_it_waits_for_one(text, tmp_path, way):
    """With fsdp, each matrix goes to the rank that orthogonalizes it, and to no other."""
    config = cell(text, tmp_path, "gpt2", "muon", 2, **{"launch.parallel": way})
    for matrices, found in run_ranks(order_of_muon, 2, config):
        assert matrices == 8
        if way == "ddp":
            assert found == ["broadcast"] * 8 + [*range(8)]
        else:
            first = ["gather"] * 8 + [*range(8)]
            assert found == first + ["scatter"] * 8 + [*range(16, 24)]


def flip_on_rank(config, rank):
    """What the replica check says of a bit that changed on one rank."""
    from gpt2_ddp.training.replica_check import ReplicaMismatch

    with built(config) as trainer:
        trainer.check_replicas()
        if trainer.run.accelerator.process_index == rank:
            with torch.no_grad():
                trainer.run.strategy.local(trainer.parameters[0]).view(-1)[0] += 1
        with pytest.raises(ReplicaMismatch) as error:
            trainer.check_replicas()
        return str(error.value)


@SLOW
def test_replicas_of_a_part_are_compared(text, tmp_path):
    told = run_ranks(
        flip_on_rank, 4, cell(text, tmp_path, "gpt2", "adamw", **FSDP, **{"launch.replicas": 2}), 3
    )
    assert len({*told}) == 1
    # no majority of two
    assert [f"rank {rank} (" in told[0] for rank in range(4)] == [False, True, False, True]


def test_accelerate_config_selects_fsdp(text, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    config = cell(text, tmp_path, "gpt2", "adamw", 2)
    assert train(config) == "completed"
    # two on two busy cores took 702 s for a test's run that one takes 47 s for
    assert torch.get_num_threads() == 1
    (start,) = events(tmp_path / "gpt2-adamw", "start")
    assert start["config"]["launch"] == {"parallel": "fsdp", "replicas": 1}
    # the last step is evaluated, which gathers the blocks
    assert is_intact(tmp_path / "gpt2-adamw")
