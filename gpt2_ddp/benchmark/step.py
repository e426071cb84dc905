"""A training step: ours through the whole loop, the same model in a bare one, and its peers'."""

import io
import json
from collections.abc import Iterator
from contextlib import redirect_stderr
from itertools import islice, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from gpt2_ddp.benchmark import peers
from gpt2_ddp.benchmark.sides import Side, StepTimer, StepTiming, started
from gpt2_ddp.benchmark.table import OURS, Case, Table, interleave
from gpt2_ddp.compare.compare import find_machine
from gpt2_ddp.config.benchmark import BenchmarkConfig
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import MANIFEST, Manifest
from gpt2_ddp.data.tokenizer import BYTE_OF_CHARACTER, END_OF_TEXT, TOKENIZER_FILE, load_tokenizer
from gpt2_ddp.distributed.launch import multiplies_bf16, pick_device
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.output_folder import locked_output, publish
from gpt2_ddp.preparation.shard_writer import ShardWriter, write_manifest
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_loop
from gpt2_ddp.training.meters import device_name
from gpt2_ddp.training.peaks import peak_flops
from gpt2_ddp.training.run import Run
from gpt2_ddp.training.task import Due

BARE = "bare PyTorch loop"
PRESET = "configs/gpt2_124m.yaml"
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32}
"""A model whose step is nearly all bookkeeping."""
GPT2_IDS, TINY_IDS = 50_257, 257
"""Of its tokenizer."""
FOR_EVER = 10**9
"""Steps."""
CHECKOUTS = {"nanogpt": ("nanoGPT", "model.py"), "build_nanogpt": ("build-nanogpt", "train_gpt2.py")}
"""Field of the configuration -> the name of the side, and the file that defines its model in a checkout."""


def check(config: BenchmarkConfig) -> None:
    """Raises: UserError where a preset, a size or a checkout is wrong."""
    for batch, precision, compiled in _settings(config):
        short_run(config, "/", batch, precision, compiled)
    for field, (name, file) in CHECKOUTS.items():
        folder = getattr(config, field)
        if folder and not (Path(folder) / file).is_file():
            raise UserError(field, folder, f"has no {file}; name a checkout of {name}")


def measure(config: BenchmarkConfig) -> Table:
    """The table: tokens per second of the GPU, or per CPU second, MFU where the peak is known, and peak memory."""
    device = torch.device(find_machine(config.device).device)
    cases: list[Case] = []
    notes: list[str] = []
    with TemporaryDirectory(prefix="benchmark-") as folder:
        for batch, precision, compiled in _settings(config):
            run = short_run(config, folder, batch, precision, compiled)
            what = (
                f"{Path(config.preset or PRESET).stem}, {batch} x {run.model.block_size}, {_words(precision, compiled)}"
            )
            readings, reasons = compare(config, run, GPT2_IDS, device)
            notes += [f"{what}: {reason}" for reason in reasons]
            cases += as_cases(what, readings, run, device)
        tiny = short_run(config, folder, 4, "no", "off", TINY)
        readings, _ = compare(config, tiny, TINY_IDS, device, (OURS, BARE))
    cases.append(
        Case("a tiny step", "ms", {side: [1e3 * one.seconds for one in of] for side, of in readings.items()}, False)
    )
    notes.append(bookkeeping(readings))
    return Table("step", cases, config.model_dump(mode="json"), notes)


def compare(
    config: BenchmarkConfig, run: TrainingConfig, ids: int, device: torch.device, only: tuple[str, ...] = ()
) -> tuple[dict[str, list[StepTiming]], list[str]]:
    """All sides' readings of `config.repeats` turns; and why others have none."""
    random_tokens(Path(run.data.paths[0]), ids)
    common = (run, ids, device)
    sides: dict[str, Side] = {
        OURS: (ours, (run,)),
        BARE: (peers.bare, common),
        "transformers, Accelerate": (peers.transformers, common),
    }
    for field, (name, file) in CHECKOUTS.items():
        if folder := getattr(config, field):
            sides[name] = (peers.nanogpt, (*common, Path(folder) / file))
    sides = {name: side for name, side in sides.items() if not only or name in only}
    with started(sides, device, config.threads, config.seconds) as (turns, reasons):
        return interleave(turns, config.repeats, warm_up=0), reasons


def ours(turns: StepTimer, config: TrainingConfig) -> None:
    """The training as it is, order, digest, guard, rows and all; but no evaluation and no checkpoint is ever due."""

    class Timed(Pretraining):
        def due(self, step: int, last: bool) -> Due:
            turns.done()
            return Due(step % config.tracking.log_every == 0, False, False, False)

    with redirect_stderr(io.StringIO()), Run(config, Timed) as run:
        run.build()
        run.start()
        train_loop(run)
        run.finish("completed")


def short_run(
    config: BenchmarkConfig, folder: str, batch: int, precision: str, compiled: str, shape: dict[str, int] | None = None
) -> TrainingConfig:
    """The preset's training with steps of one micro-batch, on random tokens in `folder`. Raises: UserError."""
    values: dict[str, Any] = preset(config).model_dump(mode="json")
    values["model"] |= shape or {"block_size": block_size(config)}
    values["data"] |= {
        "path": [f"{folder}/{'tiny' if shape else 'data'}"],
        "prepare": None,
        "weights": [],
        "phases": [],
    }
    values["train"] |= {
        "steps": FOR_EVER,
        "epochs": None,
        "global_batch_tokens": batch * values["model"]["block_size"],
        "micro_batch_size": batch,
        "mixed_precision": precision,
        "compile": compiled,
        "device": find_machine(config.device).device,
        "patience_seconds": 3600,  # between turns it stands still
        "init_from": None,
        "branch_from": None,
        "max_minutes": None,
        "profile_steps": 0,
    }
    values["eval"] |= {"patience": None, "tasks": []}
    values["tracking"] |= {"log_with": [], "sample_every": 0}
    name = f"{batch}-{precision}-{compiled}{'-tiny' * bool(shape)}"
    return TrainingConfig.model_validate(values | {"output_dir": f"{folder}/runs", "run_name": name})


def block_size(config: BenchmarkConfig) -> int:
    """Tokens of a window: the preset's own on a GPU."""
    if config.block_size or find_machine(config.device).device == "cpu":
        return config.block_size or 256
    return preset(config).model.block_size


def preset(config: BenchmarkConfig) -> TrainingConfig:
    """The training that is measured. Raises: UserError."""
    return load(TrainingConfig, ["--config", config.preset] if config.preset else [], PRESET)


def micro_batches(config: BenchmarkConfig) -> tuple[int, ...]:
    """Windows of a step."""
    return config.micro_batch or ((2,) if find_machine(config.device).device == "cpu" else (16, 32, 64))


def precisions(config: BenchmarkConfig) -> tuple[Literal["no", "bf16"], ...]:
    """fp32 (`no`) first, where nothing else was asked for."""
    return config.precision or (("no", "bf16") if multiplies_bf16(pick_device(config.device)) else ("no",))


def random_tokens(folder: Path, ids: int, count: int = 1_000_000) -> None:
    """Shards of random tokens, where there are none yet, with a tokenizer of so many ids that needs no package and no
    network: bytes, pairs of them, end-of-text. What a call that was killed left behind is written anew."""
    if (folder / MANIFEST).exists():
        return
    letters = list(BYTE_OF_CHARACTER)
    merges = [f"{first} {second}" for first, second in islice(product(letters, letters), ids - len(letters) - 1)]
    vocabulary = {token: rank for rank, token in enumerate([*letters, *(pair.replace(" ", "") for pair in merges)])}
    definition = {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "normalizer": None,
        "added_tokens": [{"id": ids - 1, "content": END_OF_TEXT}],
    }
    with locked_output(folder, waiting=f"waiting for another process that makes {folder}") as aside:
        (aside / TOKENIZER_FILE).write_text(json.dumps(definition))
        tokenizer, writer = load_tokenizer(str(aside)), ShardWriter(aside, "train", count, ids)
        writer.add(np.random.default_rng(0).integers(0, ids, count))
        shards = {"train": writer.close()}
        write_manifest(aside, Manifest(2, TOKENIZER_FILE, tokenizer.sha256, ids, tokenizer.eot, "random", shards))
        publish(aside, folder, last=MANIFEST)


def as_cases(
    what: str, readings: dict[str, list[StepTiming]], run: TrainingConfig, device: torch.device
) -> Iterator[Case]:
    """Rows of the table."""
    tokens = run.train.global_batch_tokens
    rates = {side: [tokens / reading.seconds for reading in of] for side, of in readings.items()}
    yield Case(what, "tokens/s" if device.type == "cuda" else "tokens/CPU s", rates)
    if peak := peak_flops(device_name(device)):
        with torch.device("meta"):
            flops = GPT(run.model, GPT2_IDS).flops_per_token()
        yield Case(what, "MFU", {side: [rate * flops / peak for rate in of] for side, of in rates.items()})
    memory = {side: [max(reading.memory for reading in of) / 2**20] for side, of in readings.items()}
    yield Case(what, "peak MiB", memory, more_is_better=False)


def bookkeeping(readings: dict[str, list[StepTiming]]) -> str:
    """What ours takes longer than the bare loop, where the arithmetic is next to nothing."""
    pairs = zip(readings[OURS], readings[BARE], strict=True)
    more = [1e3 * (own.seconds - other.seconds) for own, other in pairs]
    return (
        f"bookkeeping: a tiny step takes ours {median(more):.2f} ms ({min(more):.2f} to {max(more):.2f}) more than the "
        f"{BARE}"
    )


def _settings(config: BenchmarkConfig) -> Iterator[tuple[int, str, str]]:
    return product(micro_batches(config), precisions(config), config.compile)


def _words(precision: str, compiled: str) -> str:
    return {"no": "fp32"}.get(precision, precision) + ("" if compiled == "off" else f", compile {compiled}")
