"""Text to tokens: prepare_data.py with gigatoken and with tiktoken, next to other trainers' loops."""

import io
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache, partial
from itertools import cycle
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Table, interleave, make_case
from gpt2_ddp.config.tools import PrepareConfig
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.environment import usable_cores
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.encode import fast_encoder
from gpt2_ddp.preparation.prepare import prepare
from gpt2_ddp.preparation.sources import read_pieces, scan

UNITS = ("M tokens/s", "M tokens/CPU s")
TEXT_BYTES = 40_000_000  # of the text without `--text`


def check(config: BenchmarkConfig) -> None:
    """Raises: UserError where the text is no file."""
    if config.text and not os.path.isfile(config.text):
        raise UserError("text", config.text, "is not a file; name a jsonl file with a column `text`")


def measure(config: BenchmarkConfig) -> Table:
    """Tokens per second, and per second of CPU time, with one worker and with more."""
    name = "gigatoken" if fast_encoder(load_tokenizer("gpt2")) else "tiktoken"
    cores, cases = usable_cores(hyperthreads=True), []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        text = Path(config.text or write_library(Path(folder, "text.jsonl")))
        for workers in sorted({*(2**power for power in range(cores.bit_length())), cores}):
            contenders: dict[str, Callable[[Path], int]] = {OURS: partial(ours, text, workers, True)}
            if name == "gigatoken":
                contenders["ours, tiktoken"] = partial(ours, text, workers, False)
            contenders["pool, tiktoken"] = partial(pool_and_tiktoken, text, workers)
            turns = {contender: partial(timed, run) for contender, run in contenders.items()}
            found = interleave(turns, config.repeats, warm_up=0)
            what = f"{workers} worker{'s' * (workers > 1)}"
            cases += [make_case(what, unit, found, itemgetter(n)) for n, unit in enumerate(UNITS)]
        size = text.stat().st_size
    return cases, [f"ours encodes with {name}; {size:,} bytes of jsonl to shards on disk, the whole command"]


def timed(run: Callable[[Path], int]) -> tuple[float, float]:
    """The figures of `UNITS` of a run in a folder of its own. The processes that it starts and waits for count."""
    with TemporaryDirectory(prefix="benchmark-") as folder:
        wall, cpu = time.perf_counter(), sum(os.times()[:4])
        millions = run(Path(folder)) / 1e6
        return millions / (time.perf_counter() - wall), millions / (sum(os.times()[:4]) - cpu)


def write_library(path: Path) -> Path:
    """Writes the standard library's source as JSON lines, repeatedly up to TEXT_BYTES."""
    source = scan(PrepareConfig())
    pieces = cycle(read_pieces(source.config, source.parts, Counter()))
    with path.open("w") as file:
        while file.tell() < TEXT_BYTES:
            file.write(json.dumps({"text": next(pieces).text}) + "\n")
    return path


def ours(text: Path, workers: int, fast: bool, folder: Path) -> int:
    """The work of prepare_data.py."""
    values = {"source": str(text), "output": str(folder / "data"), "tokenizer": "gpt2", "workers": workers}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        manifest = prepare(PrepareConfig.model_validate(values), fast)
    return sum(map(manifest.tokens, manifest.splits))


def pool_and_tiktoken(text: Path, workers: int, folder: Path) -> int:
    """As build-nanogpt prepares FineWeb: a pool encodes documents, and the parent writes them. Nothing is hashed.
    Returns the number of tokens."""
    count = 0
    with multiprocessing.get_context("spawn").Pool(workers) as pool, open(folder / "train.bin", "wb") as file:
        for tokens in pool.imap(tokens_of, map(json.loads, text.open()), chunksize=16):
            count += len(tokens)
            file.write(tokens.tobytes())
    return count


def tokens_of(row: dict[str, Any]) -> np.ndarray:
    """A document's tokens, uint16, end-of-text first."""
    encoding = load_cached("gpt2").encoding
    return np.array([encoding.eot_token, *encoding.encode_ordinary(row["text"])], np.uint16)


load_cached = cache(load_tokenizer)  # in each process of a pool
