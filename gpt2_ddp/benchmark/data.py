"""Batches of training windows: ours in exact order, nanoGPT's memory map, and `datasets` in torch's format."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.utils.data import DataLoader

from gpt2_ddp.benchmark.sides import Side, StepTimer, started
from gpt2_ddp.benchmark.step import GPT2_IDS, random_tokens
from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.manifest import HEADER_BYTES, read_manifest
from gpt2_ddp.data.order import Order
from gpt2_ddp.data.shards import TokenStream, Windows
from gpt2_ddp.distributed.launch import build_accelerator

TOKENS = 100_000_000
BATCH, BLOCK_SIZE = 16, 1024
"""Windows and their tokens."""


def measure(config: BenchmarkConfig) -> Table:
    """The table: CPU time of the training process per batch, alone or with one loader process; and its memory."""
    cases, notes = [], [f"{BATCH} x {BLOCK_SIZE} of {TOKENS:,} tokens, int64 on the CPU"]
    with TemporaryDirectory(prefix="benchmark-") as folder:
        data = Path(folder, "data")
        random_tokens(data, GPT2_IDS, TOKENS)
        for workers in (0, 1):
            sides: dict[str, Side] = {
                OURS: (ours, (data, workers)),
                "datasets, torch": (with_datasets, (data, workers)),
            }
            if not workers:
                sides["memmap at random"] = (memory_map, (data,))
            with started(sides, torch.device("cpu"), 1, config.seconds) as (turns, reasons):
                found = interleave(turns, config.repeats, warm_up=0)
            notes += reasons
            what = "main process, 1 loader process" if workers else "main process, no loader process"
            times = {side: [1e6 * one.seconds for one in of] for side, of in found.items()}
            memory = {side: [max(one.memory for one in of) / 2**20] for side, of in found.items()}
            cases.append(Case(what, "CPU µs/batch", times, more_is_better=False))
            cases.append(Case(what, "peak MiB", memory, more_is_better=False))
    notes.append("ours: exact order, digest and what was delivered held against it; memmap: drawn with replacement")
    return Table("data", cases, config.model_dump(mode="json"), notes)


def ours(turns: StepTimer, data: Path, workers: int) -> None:
    """The training's feed: a step of one micro-batch."""
    source = Windows(TokenStream(data, read_manifest(data), "train"), BLOCK_SIZE)
    batch = GlobalBatch(BATCH, interleaved(1, BATCH))
    feed = Feed(Order(1, len(source)), batch, source, build_accelerator("cpu", "no"), workers)
    while True:
        for batch in feed.next_step().micro_batches:
            assert len(batch.rows[0]) == BATCH
        turns.done()


def memory_map(turns: StepTimer, data: Path) -> None:
    """nanoGPT's get_batch, which opens the map for each batch, or its memory would grow."""
    generator, dtype = torch.Generator().manual_seed(1), TokenStream(data, read_manifest(data), "train").dtype
    while True:
        tokens = np.memmap(data / "train_000000.bin", dtype, "r", HEADER_BYTES)
        starts = torch.randint(len(tokens) - BLOCK_SIZE, (BATCH,), generator=generator)
        parts = [tokens[start : start + BLOCK_SIZE + 1].astype(np.int64) for start in starts]
        torch.stack([torch.from_numpy(part[:-1]) for part in parts])
        torch.stack([torch.from_numpy(part[1:]) for part in parts])
        turns.done()


def with_datasets(turns: StepTimer, data: Path, workers: int) -> None:
    """Rows of an Arrow file in torch's format, shuffled by a DataLoader."""
    import datasets
    import pyarrow as pa

    path, length = data.with_name(f"rows-{workers}.arrow"), BLOCK_SIZE + 1
    tokens = np.memmap(data / "train_000000.bin", np.uint16, "r", HEADER_BYTES)
    tokens = tokens[: len(tokens) // length * length]
    rows = pa.ListArray.from_arrays(pa.array(np.arange(0, len(tokens) + 1, length, dtype=np.int32)), pa.array(tokens))
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, pa.schema({"ids": rows.type})) as writer:
        for start in range(0, len(rows), 1000):
            writer.write_batch(pa.record_batch([rows[start : start + 1000]], names=["ids"]))
    del rows, tokens
    found = datasets.Dataset.from_file(str(path)).with_format("torch")
    loader = DataLoader(found, BATCH, shuffle=True, drop_last=True, num_workers=workers)  # pyright: ignore[reportArgumentType]
    while True:
        for batch in loader:
            _ = batch["ids"][:, :-1].long(), batch["ids"][:, 1:].long()
            turns.done()
