"""The precision of a training: on a CPU, `train.mixed_precision: fast` is what a measurement finds to be faster. Some
CPUs have instructions for bf16 that are slower than those for fp32, and some emulate bf16."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.launch import multiplies_bf16, pick_precision
from gpt2_ddp.distributed.ranks import on_main

ROWS, WIDEST = 256, 384
"""Rows of the measured inputs, and most inputs and outputs of the matrix."""
LEAST, SECONDS = 3, 0.1
"""Rounds of the measurement: so many, then more until that time is over."""
MARGIN = 1.1
"""How much faster bf16 has to be: nearer ones differ by noise, and fp32 is more accurate."""

Config = TypeVar("Config", bound=RunConfig)
Speeds = dict[str, float]
"""GFLOP/s of a thread by precision: `no` (fp32) and `bf16`. Empty without a measurement."""


def measure_speeds(matrix: tuple[int, int], clock: Callable[[], float] = time.thread_time) -> Speeds:
    """Speeds of a linear layer's three products, forward and backward. It takes 0.2 s or less and draws no random
    numbers. Other processes may use the cores. So it takes the fastest of several turns on one thread, in CPU time:
    several threads wait for each other, and share each product alike."""
    inputs, outputs = (min(width, WIDEST) for width in matrix)
    x, weight = torch.ones(ROWS, inputs), torch.ones(outputs, inputs)
    dtypes = {"no": torch.float32, "bf16": torch.bfloat16}
    seconds = dict.fromkeys(dtypes, math.inf)
    threads, begun, rounds = torch.get_num_threads(), time.monotonic(), 0
    torch.set_num_threads(1)
    while rounds < LEAST or time.monotonic() - begun < SECONDS:
        for name, dtype in dtypes.items():
            start = clock()
            _train_layer(x, weight, dtype)
            seconds[name] = min(seconds[name], clock() - start)
        rounds += 1
    torch.set_num_threads(threads)
    operations = 6 * ROWS * inputs * outputs
    return {name: round(operations / 1e9 / took, 1) for name, took in seconds.items()}


def _train_layer(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """The products of a linear layer, with the casts of autocast; fp32 [B, inputs] and [outputs, inputs]."""
    x, weight = x.to(dtype), weight.to(dtype)
    y = torch.nn.functional.linear(x, weight)
    torch.mm(y, weight)  # the inputs' gradient, if y were that of the outputs
    torch.mm(y.mT, x).float()


def faster(speeds: Speeds) -> str:
    """The precision to train in: `bf16` if it is clearly faster, else `no`."""
    return "bf16" if speeds["bf16"] >= MARGIN * speeds["no"] else "no"


def settle_precision(config: Config, device: torch.device, before: str = "") -> tuple[Config, str, Speeds]:
    """`train.mixed_precision` as `no`, `bf16` or `fp16`. For `fast`, a resumed run keeps its precision `before`.
    Collective: the main process measures.

    Returns:
        The configuration with that value in place of `fast`; the value; and speeds, if a CPU may train in bf16.
    """
    wish, speeds = config.train.mixed_precision, {}
    precision = pick_precision(wish, device, "train.")
    if device.type == "cpu" and precision in ("fast", "bf16"):
        speeds = on_main(partial(measure_speeds, config.matrix))
    if wish != "fast":
        return config, precision, speeds
    if before in ("no", "bf16"):
        precision = before
    elif precision == "fast":
        precision = faster(speeds)
    train = config.train.model_copy(update={"mixed_precision": precision})
    return config.model_copy(update={"train": train}), precision, speeds


def describe_precision(precision: str, device: torch.device, speeds: Speeds) -> str:
    """The precision of a training as text, with a hint if another would be faster."""
    best = precision
    if speeds:
        best = faster(speeds)
    elif device.type == "cuda":
        best = "bf16" if multiplies_bf16(device) else "no"
    if precision == "fp16" or precision == best:
        return precision
    measured = " ({no:g} GFLOP/s in fp32, {bf16:g} in bf16)".format(**speeds) if speeds else ""
    return f"{precision}, here slower than {best.replace('no', 'fp32')}{measured}; set --train.mixed_precision {best}"
