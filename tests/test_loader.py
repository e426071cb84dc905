"""The order of the tokens: every window once per epoch, whatever the ranks, batches and restarts."""

import math
import random
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import training_config
from ranks import run_ranks

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.loader import (
    FIRST_DIGEST,
    Order,
    PositionSampler,
    WindowDataset,
    count_windows,
    next_digest,
    split_batch,
    train_batches,
)
from gpt2_ddp.data.shards import Manifest, Shard, TokenStream, read_manifest, write_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file


@pytest.mark.parametrize("n_windows", [1, 2, 3, 4, 5, 10, 97, 100, 1000, 65_536, 65_537])
def test_every_epoch_is_a_permutation(n_windows):
    order = Order(seed=7, n_windows=n_windows)
    epochs = [order.windows(e * n_windows, (e + 1) * n_windows) for e in range(3)]
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(n_windows))
    if n_windows >= 10:
        assert not np.array_equal(epochs[0], epochs[1])
        assert not np.array_equal(epochs[0], Order(8, n_windows).windows(0, n_windows))


def test_order_looks_random():
    n = 10_007
    values = Order(seed=1, n_windows=n).windows(0, n).astype(np.float64)
    correlations = [np.corrcoef(values[:-lag], values[lag:])[0, 1] for lag in (1, 2, 3, 16, 100)]
    assert max(map(abs, correlations)) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(values, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
    counts = np.histogram2d(np.arange(n), values, bins=10)[0]  # position against window: uniform
    chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
    assert chi2 < 81 + 5 * math.sqrt(2 * 81)


def test_first_window_is_uniform_over_seeds():
    n = 16
    counts = np.bincount([int(Order(seed, n).windows(0, 1)[0]) for seed in range(4000)], minlength=n)
    assert ((counts - 250) ** 2 / 250).sum() < 15 + 5 * math.sqrt(30)


def test_random_ranks_batches_and_restarts_consume_every_window_once():
    """Property test over random N, G, W, b and restarts, W x b changing at each restart."""
    rng = random.Random(0)
    for _ in range(60):
        n_windows, global_batch = rng.randint(1, 400), rng.choice([1, 2, 4, 6, 8, 12, 24])
        order = Order(rng.randrange(2**63), n_windows)
        steps = math.ceil(2 * n_windows / global_batch) + 1
        consumed, digest, step = [], FIRST_DIGEST, 0
        while step < steps:
            world = rng.choice([w for w in range(1, 9) if global_batch % w == 0])
            batch, accumulation = split_batch(global_batch, world, rng.randint(1, 8))
            assert batch * accumulation * world == global_batch
            samplers = [iter(PositionSampler(step * global_batch, batch)) for _ in range(world)]
            ranks = [_every_nth(sampler, rank, world) for rank, sampler in enumerate(samplers)]
            for _ in range(rng.randint(1, 10)):  # until the next restart
                if step == steps:
                    break
                taken = [next(rank) for _ in range(accumulation) for rank in ranks]
                windows = np.concatenate([order.windows(positions.start, positions.stop) for positions in taken])
                consumed.append(windows)
                digest = next_digest(digest, windows)
                step += 1
        flat = np.concatenate(consumed)
        for epoch in range(len(flat) // n_windows):
            part = flat[epoch * n_windows : (epoch + 1) * n_windows]
            assert np.array_equal(np.sort(part), np.arange(n_windows))
        alone = FIRST_DIGEST
        for start in range(0, steps * global_batch, global_batch):
            alone = next_digest(alone, order.windows(start, start + global_batch))
        assert digest == alone


def _every_nth(batches, rank, world):
    """What Accelerate's BatchSamplerShard gives rank `rank`."""
    for index, batch in enumerate(batches):
        if index % world == rank:
            yield batch


def test_digest_tells_order_and_step_boundaries():
    a, b = np.array([1, 2], np.uint64), np.array([2, 1], np.uint64)
    assert next_digest(FIRST_DIGEST, a) != next_digest(FIRST_DIGEST, b)
    assert next_digest(next_digest(FIRST_DIGEST, a), b) != next_digest(FIRST_DIGEST, np.concatenate([a, b]))
    assert next_digest(FIRST_DIGEST, a) == next_digest(FIRST_DIGEST, a.astype(">u8"))


def test_seek_takes_no_time_whatever_the_position():
    order = Order(seed=3, n_windows=10**9 + 7)
    order.windows(0, 512)
    start = time.perf_counter()
    order.windows(10**15, 10**15 + 512)
    assert time.perf_counter() - start < 0.01


@pytest.mark.parametrize(
    ("tokens", "block", "windows"), [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2)]
)
def test_count_windows(tokens, block, windows):
    assert count_windows(tokens, block) == windows


@pytest.mark.parametrize(
    ("share", "limit", "expected"), [(8, 8, (8, 1)), (8, 5, (4, 2)), (7, 5, (1, 7)), (6, 100, (6, 1)), (1, 16, (1, 1))]
)
def test_micro_batch_is_the_largest_divisor(share, limit, expected):
    assert split_batch(share * 3, 3, limit) == expected


def test_processes_that_do_not_divide_the_batch_are_named_with_those_that_do():
    with pytest.raises(UserError, match=r"processes = 3: .*8 windows.*use 1, 2, 4, 8 processes"):
        split_batch(8, 3, 16)


def big_corpus(folder: Path, tokens: int, vocab_size: int = 512) -> Path:
    """Sparse shards of zeros with the tokenizer of another folder's name; they take no room on the disk."""
    per_shard = min(tokens, 100_000_000)
    name, count = "train_{:06d}.bin", tokens // per_shard
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, per_shard
    for index in range(count):
        with (folder / name.format(index)).open("wb") as file:
            file.write(header.tobytes())
            file.truncate(1024 + 2 * per_shard)
    sha256 = sha256_file(folder / name.format(0))
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"))
    shards = [Shard(name.format(i), per_shard, 1024 + 2 * per_shard, sha256) for i in range(count)]
    write_manifest(
        folder, Manifest(1, "tokenizer.json", tokenizer.sha256, vocab_size, tokenizer.eot, "zeros", {"train": shards})
    )
    return folder


def loading(folder: Path, n_batches: int, batch_size: int, block_size: int, workers: int) -> dict[str, float]:
    """Takes batches as a training does; returns microseconds of this thread per batch, and the seek to a far step."""
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    stream = TokenStream(folder, read_manifest(folder), "train")
    order = Order(1, count_windows(len(stream), block_size))
    dataset = WindowDataset(stream, order, block_size)
    batches = train_batches(accelerator, dataset, 0, batch_size, workers)
    next(batches), next(batches)
    times = []
    for _ in range(n_batches):
        start = time.thread_time()
        tokens, windows = next(batches)
        times.append(time.thread_time() - start)
        assert tokens.shape == (batch_size, block_size + 1)
        assert tokens.dtype == torch.int64
    start = time.perf_counter()
    far = train_batches(accelerator, dataset, 10**6 * 512, batch_size, 0)
    _, windows = next(far)
    seek = time.perf_counter() - start
    assert np.array_equal(windows, order.windows(10**6 * 512, 10**6 * 512 + batch_size))
    return {"us_per_batch": 1e6 * statistics.median(times), "seek_ms": 1e3 * seek}


@pytest.mark.slow
def test_loading_costs_little(corpus, tmp_path):
    """At most 200 microseconds of the main thread per batch of 16 x 1024; step 1,000,000 within 10 ms."""
    shutil.copy(corpus / "tokenizer.json", tmp_path)
    folder = big_corpus(tmp_path, 300_000_000)
    found = [run_ranks(loading, 1, folder, 200, 16, 1024, 0)[0] for _ in range(3)]
    print(found)
    assert min(run["us_per_batch"] for run in found) <= 200, found
    assert min(run["seek_ms"] for run in found) < 10, found


def resident_bytes_of_a_training(config: TrainingConfig) -> int:
    from gpt2_ddp.run.loop import train

    train(config)
    return psutil.Process().memory_info().rss


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(corpus, tmp_path):
    """A training over 4 GB holds what one over 10 MB holds, the hashes of all shards checked in both."""
    resident = {}
    for tokens in (5_000_000, 2_000_000_000):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        shutil.copy(corpus / "tokenizer.json", folder)
        changes = {"run_name": str(tokens), "train.steps": 200, "train.global_batch_tokens": 64 * 32}
        config = training_config(big_corpus(folder, tokens), tmp_path / "runs", changes)
        (resident[tokens],) = run_ranks(resident_bytes_of_a_training, 1, config)
    small, big = resident.values()
    print(resident)
    assert big < 1.05 * small, resident


def delivered(folder: Path, workers: int) -> list[list[int]]:
    from gpt2_ddp.processes.launch import build_accelerator

    accelerator = build_accelerator("cpu", "no")
    stream = TokenStream(folder, read_manifest(folder), "train")
    dataset = WindowDataset(stream, Order(1, 100), 32)
    batches = train_batches(accelerator, dataset, 10**9, 3, workers)
    taken = [next(batches) for _ in range(5)]
    for tokens, windows in taken:
        expected = stream.read(windows.astype(np.int64) * 32, 33)
        assert np.array_equal(tokens.numpy(), expected)
    return [windows.tolist() for _, windows in taken]


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 1), (2, 0), (3, 1)])
def test_accelerate_gives_each_rank_its_share(corpus, world, workers):
    """Rank r gets, as micro-batch m of b windows, the positions p + (m W + r) b onwards."""
    for rank, batches in enumerate(run_ranks(delivered, world, corpus, workers)):
        for micro, windows in enumerate(batches):
            start = 10**9 + (micro * world + rank) * 3
            assert windows == Order(1, 100).windows(start, start + 3).tolist()
