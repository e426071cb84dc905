"""`own_text`: completes the configuration of a new run by its text and the speed of its devices."""

# accelerate has no type stubs
# pyright: reportMissingTypeStubs=false

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.own_text import Choice, Machine, Text, choose
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest, text_bytes
from gpt2_ddp.distributed.ranks import on_every_rank, on_main
from gpt2_ddp.errors import print_line

ROWS = 2048
WIDTH = 512
"""Shape of the measured products: [ROWS, WIDTH] x [WIDTH, WIDTH]."""
SECONDS = 0.3
"""Time of the measurement."""
SHARE = 0.35
"""Share of the products' speed that training reaches (docs/own-text.md)."""


def settle_own_text(
    config: TrainingConfig, accelerator: Accelerator, machine: Machine | None = None
) -> TrainingConfig:
    """The configuration with what the rule chooses for the text of its folders. Collective: the
    main process measures, unless a machine is given. Raises: UserError."""
    measured = machine or on_main(partial(this_machine, accelerator))
    completed = on_every_rank(lambda: complete(config, measured))
    print_line(completed.description)
    return completed.config


class Completed(NamedTuple):
    """A configuration that the rule has completed, and a line about what it will train."""

    config: TrainingConfig
    description: str


def complete(config: TrainingConfig, machine: Machine) -> Completed:
    """The configuration with what the rule chooses for the text of its folders. Raises: UserError
    for a folder without shards, and for given fields that contradict each other."""
    manifests = [read_manifest(Path(path)) for path in config.data.paths]
    tokens = sum(manifest.tokens("train") for manifest in manifests)
    text = Text(max(tokens, 1), manifests[0].vocab_size)
    choice = choose(config, text, machine)
    return Completed(choice.config, describe(choice, text, sum(map(text_bytes, manifests))))


def this_machine(accelerator: Accelerator) -> Machine:
    """The ranks of a run, and their speed by that of this one."""
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    ranks = accelerator.num_processes
    return Machine(SHARE * ranks * measure_speed(accelerator.device, dtype), ranks)


def measure_speed(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of matrix products on the device, of the fastest of several turns."""
    x = torch.ones(ROWS, WIDTH, device=device, dtype=dtype)
    weight = torch.ones(WIDTH, WIDTH, device=device, dtype=dtype)
    fastest = float("inf")
    begun = time.monotonic()
    while time.monotonic() - begun < SECONDS:
        fastest = min(fastest, _seconds(x, weight))
    return 2 * ROWS * WIDTH * WIDTH / fastest


def _seconds(x: Tensor, weight: Tensor) -> float:
    start = time.perf_counter()
    (x @ weight)[0, 0].item()  # waits for a GPU
    return time.perf_counter() - start


def describe(choice: Choice[TrainingConfig], text: Text, size: int) -> str:
    """What will be trained, in one line."""
    config = choice.config
    model = config.model
    shape = f"{model.n_layer} layers of {model.n_embd}, context {model.block_size}"
    length = f"{config.train.minutes:g} minutes" if config.train.minutes else "as given"
    passes = f"about {choice.tokens / text.tokens:.1f} passes over the text in {length}"
    amount = f"{size / 1e6:.1f} MB of text, {text.tokens:,} tokens"
    return f"{amount}: {choice.parameters / 1e6:.1f}M active parameters ({shape}), {passes}"
