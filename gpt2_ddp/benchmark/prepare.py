"""Text to tokens: prepare_data.py with gigatoken and with tiktoken, and loops as others write them."""

import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.fast_encoder import fast_encoder
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.preparation.sources import read_pieces

TEXT = 40_000_000
"""Characters of the text that is measured, where none is named."""
SHARD = 100_000_000
"""Tokens."""


class Spent(NamedTuple):
    """Seconds of the clock, and of CPU time in all processes; and how many tokens there were."""

    wall: float
    cpu: float
    tokens: int


def check(config: BenchmarkConfig) -> None:
    """Raises: UserError where the text is no file."""
    if config.text and not os.path.isfile(config.text):
        raise UserError("text", config.text, "is no file; name a jsonl file with a column `text`")


def measure(config: BenchmarkConfig) -> Table:
    """The table: tokens per second of each worker's CPU time with one, then by the clock with one and more workers."""
    name = "gigatoken" if fast_encoder(load_tokenizer("gpt2")) else "tiktoken"
    cores, cases = usable_cores(hyperthreads=True), []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        text = Path(config.text or Path(folder, "text.jsonl"))
        if config.text is None:
            write_library(text)
        for workers in sorted({1, *(2**power for power in range(1, cores.bit_length())), cores}):
            sides: dict[str, Callable[[Path], int]] = {OURS: partial(ours, text, workers, True)}
            if name == "gigatoken":
                sides["ours, tiktoken"] = partial(ours, text, workers, False)
            sides["pool, tiktoken"] = partial(pool_and_tiktoken, text, workers)
            sides["datasets.map, tiktoken"] = partial(datasets_map, text, workers)
            found = interleave({side: partial(timed, run) for side, run in sides.items()}, config.repeats, warm_up=0)
            what = f"{workers} worker{'s' * (workers > 1)}"
            rates = {side: [one.tokens / one.wall / 1e6 for one in of] for side, of in found.items()}
            cases.append(Case(what, "M tokens/s", rates))
            rates = {side: [one.tokens / one.cpu / 1e6 for one in of] for side, of in found.items()}
            cases.append(Case(what, "M tokens/CPU s", rates))
        size = text.stat().st_size
    notes = [
        f"ours encodes with {name}; {size:,} bytes of jsonl, to shards on disk, from the command's begin to its end"
    ]
    return Table("prepare", cases, config.model_dump(mode="json"), notes)


def timed(run: Callable[[Path], int]) -> Spent:
    """Runs in a folder of its own; processes that it starts and waits for are counted."""
    with TemporaryDirectory(prefix="benchmark-") as folder:
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        tokens = run(Path(folder))
        return Spent(time.perf_counter() - wall, sum(os.times()[:4]) - cpu, tokens)


def write_library(path: Path) -> None:
    """The standard library's source as JSON lines, again and again."""
    texts = [piece.text for piece in read_pieces(PrepareConfig())]
    with path.open("w") as file:
        written = 0
        while written < TEXT:
            for text in texts:
                written += file.write(json.dumps({"text": text}) + "\n")


def ours(text: Path, workers: int, fast: bool, folder: Path) -> int:
    """prepare_data.py's work."""
    values = {"source": str(text), "output": str(folder / "data"), "tokenizer": "gpt2", "workers": workers}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        manifest = prepare(PrepareConfig.model_validate(values), fast)
    return sum(map(manifest.tokens, manifest.splits))


def pool_and_tiktoken(text: Path, workers: int, folder: Path) -> int:
    """As build-nanogpt prepares FineWeb: documents to a pool, their tokens back, into shards; nothing is hashed."""
    total, filled, shards, tokens = 0, 0, 0, np.empty(SHARD, np.uint16)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for found in pool.imap(tokens_of, _rows(text), chunksize=16):
            total += len(found)
            while len(found):
                part, found = np.split(found, [SHARD - filled])
                tokens[filled : filled + len(part)] = part
                filled += len(part)
                if filled == SHARD:
                    np.save(folder / f"{shards}.npy", tokens)
                    filled, shards = 0, shards + 1
        pool.close()
        pool.join()
    np.save(folder / f"{shards}.npy", tokens[:filled])
    return total


def datasets_map(text: Path, workers: int, folder: Path) -> int:
    """As nanoGPT prepares OpenWebText: `datasets` maps tokens to Arrow files, which are copied into one memory map."""
    import datasets

    datasets.disable_progress_bars()
    rows: Any = datasets.load_dataset("json", data_files=str(text), split="train", cache_dir=str(folder))
    encoded = rows.map(ids_of, remove_columns=rows.column_names, num_proc=workers)
    total, written = int(np.sum(encoded["length"], dtype=np.uint64)), 0
    mapped = np.memmap(folder / "train.bin", np.uint16, "w+", shape=(total,))
    for number in range(64):
        part = encoded.shard(64, number, contiguous=True).with_format("numpy")
        if len(part):
            tokens = np.concatenate(part["ids"])
            mapped[written : written + len(tokens)] = tokens
            written += len(tokens)
    mapped.flush()
    return total


def tokens_of(row: dict[str, Any]) -> np.ndarray:
    """A document's tokens, uint16."""
    encoding = _encoding()
    tokens = np.array([encoding.eot_token, *encoding.encode_ordinary(row["text"])])
    assert (tokens < 2**16).all()
    return tokens.astype(np.uint16)


def ids_of(row: dict[str, Any]) -> dict[str, Any]:
    """The same, as a row."""
    ids = [*_encoding().encode_ordinary(row["text"]), _encoding().eot_token]
    return {"ids": ids, "length": len(ids)}


@cache
def _encoding() -> Any:
    return load_tokenizer("gpt2").encoding


def _rows(text: Path) -> Iterator[dict[str, Any]]:
    with text.open() as file:
        yield from map(json.loads, file)
