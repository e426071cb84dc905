"""`train.mixed_precision: fast`: on CPUs, a measurement decides between bf16 and fp32. Some CPUs
have instructions for bf16 that are slower than those for fp32, and some emulate bf16."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.distributed.launch import pick_precision
from gpt2_ddp.distributed.ranks import on_main

C = TypeVar("C", bound=RunConfig)

ROWS = 256
WIDEST = 384
"""Rows of the measured inputs, and most inputs and outputs of the matrix."""
LEAST = 3
SECONDS = 0.1
"""Rounds of the measurement: so many, then more until that time is over."""
MARGIN = 1.1
"""How much faster bf16 has to be: nearer ones differ by noise, and fp32 is more accurate."""


def settle_fast(config: C, device: torch.device, before: str = "") -> C:
    """The configuration with `no` or `bf16` in place of `fast`: the precision `before` of a resumed
    run, or else `bf16` if it is clearly faster. Collective: the main process measures."""
    precision = before if before in ("no", "bf16") else pick_precision("fast", device)
    if precision == "fast":
        seconds = on_main(partial(measure, config.matrix))
        precision = "bf16" if MARGIN * seconds["bf16"] <= seconds["no"] else "no"
    train = config.train.model_copy(update={"mixed_precision": precision})
    return config.model_copy(update={"train": train})


def measure(
    matrix: tuple[int, int], clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Seconds of a linear layer's three products, forward and backward, by precision. It takes 0.2
    s or less and draws no random numbers. Other processes may use the cores. So it takes the
    fastest of several turns on one thread, in CPU time: several threads wait for each other, and
    share each product alike."""
    inputs, outputs = (min(width, WIDEST) for width in matrix)
    x = torch.ones(ROWS, inputs)
    weight = torch.ones(outputs, inputs)
    dtypes = {"no": torch.float32, "bf16": torch.bfloat16}
    seconds = dict.fromkeys(dtypes, math.inf)
    threads = torch.get_num_threads()
    begun = time.monotonic()
    rounds = 0
    torch.set_num_threads(1)
    while rounds < LEAST or time.monotonic() - begun < SECONDS:
        for name, dtype in dtypes.items():
            start = clock()
            _train_layer(x, weight, dtype)
            seconds[name] = min(seconds[name], clock() - start)
        rounds += 1
    torch.set_num_threads(threads)
    return seconds


def _train_layer(x: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    """The products of a linear layer, with the casts of autocast; fp32 [B, inputs] and [outputs,
    inputs]."""
    x = x.to(dtype)
    weight = weight.to(dtype)
    y = torch.nn.functional.linear(x, weight)
    torch.mm(y, weight)  # the inputs' gradient, if y were that of the outputs
    torch.mm(y.mT, x).float()
