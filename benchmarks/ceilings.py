"""What a GPU can do at most, `python -m benchmarks.ceilings`: a copy, and products, also those of
GPT-2 (124M)."""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

WIDTHS = {
    "qkv": (768, 2304),
    "attention's output": (768, 768),
    "fc": (768, 3072),
    "proj": (3072, 768),
}
WIDTHS |= {"head": (768, 50304)}
"""Inputs and outputs of each linear layer of GPT-2 (124M)."""


def milliseconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of one call, by the GPU's clock."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(3):
        work()
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(first.elapsed_time(second) for first, second in pairwise(marks))


def random(*shape: int) -> Tensor:
    """Random numbers in bf16: products of zeros are faster."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def main(rows: int) -> None:
    """Prints the figures; `rows`: tokens of a micro-batch."""
    source, target = (torch.randn(2**30, device="cuda") for _ in range(2))
    rate = 2 * source.nbytes / milliseconds(partial(target.copy_, source), 10) / 1e9
    print(f"copy: {rate:.2f} TB/s, read and written")
    del source, target
    one = random(8192, 8192)
    other = random(8192, 8192)
    size = 2 * 8192**3
    rate = size / milliseconds(partial(torch.mm, one, other), 10) / 1e9
    print(f"8192 x 8192 x 8192: {rate:.0f} TFLOP/s in a burst")
    end = time.monotonic() + 5
    found = 0.0
    while time.monotonic() < end:
        found = milliseconds(partial(torch.mm, one, other), 100)
    print(f"8192 x 8192 x 8192: {size / found / 1e9:.0f} TFLOP/s after 5 s")
    del one, other
    for name, (inputs, outputs) in WIDTHS.items():
        x = random(rows, inputs)
        weight = random(outputs, inputs)
        gradient = random(rows, outputs)
        products = {"y": partial(torch.mm, x, weight.T), "dx": partial(torch.mm, gradient, weight)}
        products |= {"dw": partial(torch.mm, gradient.T, x)}
        of = {what: milliseconds(product, 10) for what, product in products.items()}
        rates = [
            f"{what} {2 * rows * inputs * outputs / ms / 1e9:.0f} ({ms:.3f} ms)"
            for what, ms in of.items()
        ]
        print(f"{name} {rows} x {inputs} x {outputs}: TFLOP/s: {', '.join(rates)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 65_536)
