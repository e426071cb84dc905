"""A training step through the whole loop, next to the same model in a bare loop and to other
trainers' steps."""

import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from benchmarks.config import BenchmarkConfig
from benchmarks.harness import OURS, Case, Contender, Done, time_contenders
from gpt2_ddp.config.cli import resolve
from gpt2_ddp.config.training import ModelConfig, TrainingConfig
from gpt2_ddp.data.manifest import HEADER_BYTES, MANIFEST, read_manifest
from gpt2_ddp.data.tokenizer import load_tokenizer
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.export.transformers_layout import LAYOUTS, transformers_config
from gpt2_ddp.model.compiled import compiled
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.preparation.encode import ShardWriter, write_manifest
from gpt2_ddp.preparation.prepare import make_manifest
from gpt2_ddp.tasks.pretraining import Pretraining
from gpt2_ddp.training.loop import train_loop
from gpt2_ddp.training.start import Training, build, open_run, start
from gpt2_ddp.training.task import Due

BARE = "bare PyTorch loop"
# steps of a contender, and the norm to which it clips gradients
ENDLESS = 10**9
GRAD_CLIP = 1.0


def measure(config: BenchmarkConfig) -> Iterator[Case]:
    """Of each variant: tokens per second (per CPU second on a CPU), and peak memory."""
    device = pick_device(config.device)
    for batch, precision, how in variants(config):
        with TemporaryDirectory(prefix="benchmark-") as folder:
            run = short_run(config, Path(folder), batch, precision, how, {})
            random_tokens(Path(run.data.paths[0]))
            timings = time_contenders(contenders(config, run, device), device, config)
        sizes = f"{batch} x {run.model.block_size}"
        what = f"{Path(config.preset).stem}, {sizes}, {precision}, compile {how}"
        tokens = run.train.global_batch_tokens
        unit = "tokens/s" if device.type == "cuda" else "tokens/CPU s"
        yield Case(
            what, unit, {name: [tokens / one.seconds for one in of] for name, of in timings.items()}
        )
        memory = {name: [one.memory / 2**20 for one in of] for name, of in timings.items()}
        yield Case(what, "peak MiB", memory, more_is_better=False)


def contenders(
    config: BenchmarkConfig, run: TrainingConfig, device: torch.device
) -> dict[str, Contender]:
    """The contenders of a training, by name."""
    found: dict[str, Contender] = {
        OURS: partial(ours, config=run),
        BARE: partial(bare, config=run, device=device),
        "transformers, Accelerate": partial(hugging_face, config=run, device=device),
    }
    if config.nanogpt:
        found["nanoGPT"] = partial(nanogpt, config=run, device=device, checkout=config.nanogpt)
    return found


def ours(done: Done, config: TrainingConfig) -> None:
    """The training as it is, with order, digest, guard and rows. No evaluation and no checkpoint is
    ever due."""

    class Timed(Pretraining):
        def due(self, step: int, last: bool) -> Due:
            done()
            return Due(step % config.tracking.log_every == 0)

    with quiet_run(config, Timed) as training:
        train_loop(training)  # until `done` raises


@contextmanager
def quiet_run(config: TrainingConfig, task: type[Pretraining]) -> Iterator[Training]:
    """A run that can take steps, without its output."""
    with (
        redirect_stderr(io.StringIO()),
        redirect_stdout(io.StringIO()),
        open_run(config, task) as run,
        start(build(run)) as training,
    ):
        yield training


def bare(done: Done, config: TrainingConfig, device: torch.device) -> None:
    """Our model and optimizer in a loop without Accelerate and without our bookkeeping."""
    model = GPT(config.model, read_shard(config)[0]).to(device)
    loop(
        done,
        config,
        device,
        model,
        build_optimizer(model, config.optim, config.train.mixed_precision == "bf16"),
    )


def nanogpt(done: Done, config: TrainingConfig, device: torch.device, checkout: str) -> None:
    """The model and the optimizer of a checkout of nanoGPT, in the loop of its train.py."""
    sys.path.insert(0, checkout)
    theirs = import_module("model")
    optim = config.optim
    names = {*theirs.GPTConfig.__dataclass_fields__} & {*ModelConfig.model_fields}
    padded = -(-read_shard(config)[0] // 64) * 64
    shape = theirs.GPTConfig(
        **{name: getattr(config.model, name) for name in names}, vocab_size=padded
    )
    model = theirs.GPT(shape).to(device)
    optimizer = model.configure_optimizers(optim.weight_decay, optim.lr, optim.betas, device.type)
    loop(done, config, device, model, optimizer)


def loop(
    done: Done, config: TrainingConfig, device: torch.device, model: nn.Module, optimizer: Optimizer
) -> None:
    """Endless steps of plain PyTorch on random windows. The model returns the loss, or a tuple of
    logits and loss."""
    how = config.train.compile
    run = compiled(model, how if how == "off" or isinstance(model, GPT) else "model")
    batch = int(config.train.micro_batch_size)
    size = config.model.block_size
    stream = read_shard(config)[1]
    parts = config.train.global_batch_tokens // (batch * size)
    rng = np.random.default_rng(0)
    autocast = config.train.mixed_precision == "bf16"
    while True:
        for _ in range(parts):
            rows = [
                stream[at : at + size + 1].astype(np.int64)
                for at in rng.integers(0, len(stream) - size, batch)
            ]
            tokens = torch.from_numpy(np.stack(rows))
            tokens = (
                tokens.pin_memory().to(device, non_blocking=True)
                if device.type == "cuda"
                else tokens
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                found: Any = run(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            loss: Tensor = found[1] if isinstance(found, tuple) else found
            (loss / parts).backward()
        nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done()


def hugging_face(done: Done, config: TrainingConfig, device: torch.device) -> None:
    """transformers' class of the architecture in the loop of Accelerate's documentation."""
    import transformers

    train = config.train
    size = config.model.block_size
    ids, stream = read_shard(config)
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=train.mixed_precision)
    kind = getattr(transformers, LAYOUTS[config.model.architecture].class_name)
    model = kind(kind.config_class(**transformers_config(config.model, ids, ids - 1)))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.optim.lr, weight_decay=config.optim.weight_decay
    )
    windows: Any = torch.from_numpy(stream[: len(stream) // size * size].astype(np.int64)).view(
        -1, size
    )
    loader = DataLoader(windows, int(train.micro_batch_size), shuffle=True, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = compiled(model, "off" if train.compile == "off" else "model")
    model.train()
    while True:
        for tokens in loader:
            loss = run(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), GRAD_CLIP)
            optimizer.step()
            optimizer.zero_grad()
            done()


def read_shard(config: TrainingConfig) -> tuple[int, np.ndarray]:
    """The size of the vocabulary, and the shard's tokens: uint16 [n], a memory map."""
    folder = Path(config.data.paths[0])
    return read_manifest(folder).vocab_size, np.memmap(
        folder / "train_000000.bin", "<u2", "r", HEADER_BYTES
    )


def short_run(
    config: BenchmarkConfig,
    folder: Path,
    batch: int,
    precision: str,
    how: str,
    changes: Mapping[str, object],
) -> TrainingConfig:
    """The preset's training with one micro-batch per step, on the tokens in `folder/random`; its
    windows are shorter on a CPU. Raises: UserError."""
    size = config.block_size or (256 if pick_device(config.device).type == "cpu" else None)
    changes = ({"model.block_size": size} if size else {}) | dict(changes)
    size = resolve(TrainingConfig, [config.preset], changes).model.block_size
    values: dict[str, object] = {
        "output_dir": str(folder / "runs"),
        "data.path": str(folder / "random"),
        "data.prepare": None,
        "train.steps": ENDLESS,
        "train.epochs": None,
        "train.global_batch_tokens": batch * size,
        "train.micro_batch_size": batch,
        "train.mixed_precision": precision,
        "train.compile": how,
        "train.device": config.device,
        "checkpoint.background": False,  # the first one's copy would stay in memory
        "tracking.sample_every": 0,
    }
    return resolve(TrainingConfig, [config.preset], values | changes)


def variants(config: BenchmarkConfig) -> Iterator[tuple[int, str, str]]:
    """Micro-batch, precision (fp32 first) and `train.compile` of each training to measure."""
    on_cpu = pick_device(config.device).type == "cpu"
    batches = config.micro_batch or ((2,) if on_cpu else (16, 32, 64))
    precisions = config.precision or (("no",) if on_cpu else ("no", "bf16"))
    return product(batches, precisions, config.compile)


def random_tokens(folder: Path, tokenizer: str = "gpt2", count: int = 1_000_000) -> None:
    """Writes a shard of random tokens, unless it is there."""
    if (folder / MANIFEST).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    known = load_tokenizer(tokenizer)
    writer = ShardWriter(folder, "train", count, known.vocab_size)
    writer.add(np.random.default_rng(0).integers(0, known.vocab_size, count))
    write_manifest(folder, make_manifest(known, "random", {"train": writer.close()}, {}))
