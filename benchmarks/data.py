"""Batches of training windows: ours in exact order, nanoGPT's memory map, and `datasets` in torch's format."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Contender, Done, Table, make_case, time_contenders
from benchmarks.step import random_tokens
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.manifest import HEADER_BYTES, read_manifest
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.distributed.launch import build_accelerator

TOKENS = 100_000_000
BATCH, BLOCK_SIZE = 16, 1024  # windows and their tokens


def measure(config: BenchmarkConfig) -> Table:
    """CPU time of the training process per batch, without and with one loader process; and its memory."""
    cases = []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        data = Path(folder, "data")
        random_tokens(data, "gpt2", TOKENS)
        for workers in (0, 1):
            contenders: dict[str, Contender] = {OURS: (ours, (data, workers))}
            contenders["datasets, torch"] = (with_datasets, (data, workers))
            if not workers:
                contenders["memmap at random"] = (memory_map, (data,))
            timings = time_contenders(contenders, torch.device("cpu"), config)
            what = f"main process, {workers or 'no'} loader process"
            cases.append(make_case(what, "CPU µs/batch", timings, lambda one: 1e6 * one.seconds, more_is_better=False))
            cases.append(make_case(what, "peak MiB", timings, lambda one: one.memory / 2**20, more_is_better=False))
    size = f"{BATCH} x {BLOCK_SIZE} of {TOKENS:,} tokens, int64 on the CPU"
    return cases, [size, "ours: exact order, digest, deliveries compared; memmap: drawn with replacement"]


def ours(done: Done, data: Path, workers: int) -> None:
    """The training's feed: a step of one micro-batch."""
    source = Windows(TokenStream(data, read_manifest(data), "train"), BLOCK_SIZE)
    batch = GlobalBatch(BATCH, interleaved(1, BATCH))
    feed = Feed(Order(1, len(source)), batch, source, build_accelerator("cpu", "no"), workers)
    while True:
        for batch in feed.next_step().micro_batches:
            assert len(batch.rows[0]) == BATCH
        done()


def memory_map(done: Done, data: Path) -> None:
    """nanoGPT's get_batch, which opens the map for each batch, or its memory would grow."""
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = np.memmap(data / "train_000000.bin", "<u2", "r", HEADER_BYTES)
        starts = torch.randint(len(tokens) - BLOCK_SIZE, (BATCH,), generator=generator)
        parts = [tokens[start : start + BLOCK_SIZE + 1].astype(np.int64) for start in starts]
        torch.stack([torch.from_numpy(part[:-1]) for part in parts])
        torch.stack([torch.from_numpy(part[1:]) for part in parts])
        done()


def with_datasets(done: Done, data: Path, workers: int) -> None:
    """Rows of an Arrow file in torch's format, shuffled by a DataLoader."""
    import datasets

    datasets.disable_progress_bars()
    cache = str(data.with_name(f"arrow-{workers}"))
    source = {"file": data / "train_000000.bin"}
    rows: Any = datasets.Dataset.from_generator(windows, gen_kwargs=source, cache_dir=cache)
    loader = DataLoader(rows.with_format("torch"), BATCH, shuffle=True, drop_last=True, num_workers=workers)
    while True:
        for batch in loader:
            _ = batch["ids"][:, :-1].long(), batch["ids"][:, 1:].long()
            done()


def windows(file: Path) -> Iterator[dict[str, np.ndarray]]:
    """The windows of a shard, uint16 [BLOCK_SIZE + 1] each."""
    tokens = np.memmap(file, "<u2", "r", HEADER_BYTES)
    for start in range(0, len(tokens) - BLOCK_SIZE, BLOCK_SIZE + 1):
        yield {"ids": tokens[start : start + BLOCK_SIZE + 1]}
