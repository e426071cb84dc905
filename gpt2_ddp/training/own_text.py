"""`own_text`: completes the configuration of a new run by its text and the speed of its devices."""

# accelerate has no type stubs
# pyright: reportMissingTypeStubs=false

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from gpt2_ddp.config.own_text import Choice, Machine, Text, choose, describe_shape
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import Manifest, read_manifest, text_bytes
from gpt2_ddp.distributed.ranks import on_every_rank, on_main
from gpt2_ddp.errors import print_line
from gpt2_ddp.evaluation.forecast import Forecast, count_text
from gpt2_ddp.evaluation.ladder import Expectation, describe_interval, find_ladder

ROWS = 2048
WIDTH = 512
"""Shape of the measured products: [ROWS, WIDTH] x [WIDTH, WIDTH]."""
SECONDS = 0.3
"""Time of the measurement."""
SHARE = 0.35
"""Share of the products' speed that training reaches (docs/own-text.md)."""


class Completed(NamedTuple):
    """A configuration that the rule has completed, and what a run of it should reach.

    Attributes:
        forecast: by counts of the text; None for several folders, and for very little text.
        expectation: by a ladder of runs on the text; None without one, and beyond its limits.
    """

    config: TrainingConfig
    forecast: Forecast | None
    expectation: Expectation | None


def settle_own_text(
    config: TrainingConfig, accelerator: Accelerator, machine: Machine | None = None
) -> Completed:
    """What the rule chooses for the text of the configuration's folders, and what to expect of it.
    Collective: the main process measures, unless a machine is given, and counts. Raises:
    UserError."""
    measured = machine or on_main(partial(this_machine, accelerator))
    choice = on_every_rank(lambda: complete(config, measured))
    manifests = read_manifests(config)
    forecast = on_main(partial(foretell, choice, manifests))
    expectation = on_main(partial(_by_ladder, config, choice, manifests))
    line = describe(choice, text_of(manifests), sum(map(text_bytes, manifests)))
    completed = choice.config
    interval = expectation.at_end(choice.tokens) if expectation else None
    if interval:
        line += f"; expect {describe_interval(interval)} bits per byte, by the ladder on this text"
    elif forecast:
        line += f"; expect about {forecast.bits_per_byte:.1f} bits per byte"
    print_line(line)
    if expectation and completed.eval.tokens == "auto":  # the same validation text
        evals = completed.eval.model_copy(update={"tokens": expectation.val_tokens})
        completed = completed.model_copy(update={"eval": evals})
    return Completed(completed, forecast, expectation)


def _by_ladder(
    config: TrainingConfig, choice: Choice[TrainingConfig], manifests: Sequence[Manifest]
) -> Expectation | None:
    """What a run will reach by the ladder on its text; None without one, and beyond its limits."""
    ladder = find_ladder(config, manifests)
    return ladder.expectation(choice.parameters, choice.tokens) if ladder else None


def complete(config: TrainingConfig, machine: Machine) -> Choice[TrainingConfig]:
    """What the rule chooses for the text of the configuration's folders. Raises: UserError for a
    folder without shards, and for given fields that contradict each other."""
    return choose(config, text_of(read_manifests(config)), machine)


def read_manifests(config: TrainingConfig) -> list[Manifest]:
    """The manifests of a run's folders. Raises: UserError for a folder without shards."""
    return [read_manifest(Path(path)) for path in config.data.paths]


def text_of(manifests: Sequence[Manifest]) -> Text:
    """The text of all folders together."""
    tokens = sum(manifest.tokens("train") for manifest in manifests)
    return Text(max(tokens, 1), manifests[0].vocab_size)


def foretell(choice: Choice[TrainingConfig], manifests: Sequence[Manifest]) -> Forecast | None:
    """What a run will reach; None for several folders, and for very little text. Raises: UserError
    if a shard is damaged."""
    if len(manifests) > 1:
        return None
    text = count_text(Path(choice.config.data.paths[0]), manifests[0])
    return Forecast(text, choice.parameters, choice.tokens) if text else None


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
    shape = f"{describe_shape(model.n_layer, model.n_embd)}, context {model.block_size}"
    passes = f"about {choice.tokens / text.tokens:.1f} passes over the text"
    if config.train.minutes:
        passes += f" in {config.train.minutes:g} minutes"
    amount = f"{size / 1e6:.1f} MB of text, {text.tokens:,} tokens"
    return f"{amount}: {choice.parameters / 1e6:.1f}M active parameters ({shape}), {passes}"
