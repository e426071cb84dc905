"""What the device gives at best: matrix products of the model's shapes, a copy, attention by each SDPA backend."""

import time
from collections.abc import Callable
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_ddp.benchmark.sides import Unavailable
from gpt2_ddp.benchmark.step import block_size, micro_batches, precisions, preset
from gpt2_ddp.benchmark.table import Case, Table, interleave
from gpt2_ddp.compare.compare import find_machine
from gpt2_ddp.config.benchmark import BenchmarkConfig

BACKENDS = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16}


def check(config: BenchmarkConfig) -> None:
    """Raises: Unavailable on a CPU, unless that is asked for."""
    if find_machine(config.device).device == "cpu" and config.device != "cpu":
        raise Unavailable("needs a GPU (--device cpu shows how it goes)")


def measure(config: BenchmarkConfig) -> Table:
    """TFLOP/s and GB/s; seconds are those between CUDA events, or of the CPU."""
    device, model, size = torch.device(find_machine(config.device).device), preset(config).model, block_size(config)
    torch.set_num_threads(config.threads)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in training
    cases, notes, width, heads = [], [], model.n_embd, model.n_head
    shapes = {
        "c_attn": (width, 3 * width),
        "attn.c_proj": (width, width),
        "c_fc": (width, 4 * width),
        "mlp.c_proj": (4 * width, width),
        "head": (width, 50304),
    }
    for precision, batch in product(precisions(config), micro_batches(config)):
        make = {"device": device, "dtype": DTYPES[precision]}
        rows, name = batch * size, "fp32" if precision == "no" else precision
        for what, (n_in, n_out) in shapes.items():
            x, weight = torch.randn(rows, n_in, **make), torch.randn(n_out, n_in, **make)
            flops = 2 * rows * n_in * n_out
            figures = rates({"": lambda x=x, weight=weight: F.linear(x, weight)}, flops / 1e12, config, device)
            cases.append(Case(f"{what} [{rows}, {n_in}] x [{n_in}, {n_out}], {name}", "TFLOP/s", figures))
        q, k, v = (torch.randn(batch, heads, size, width // heads, requires_grad=True, **make) for _ in range(3))
        sides: dict[str, Callable[[], object]] = {}
        for backend, chosen in BACKENDS.items():
            attention = Attention(chosen, q, k, v)
            try:
                attention()
                sides[backend] = attention
            except RuntimeError as error:  # PyTorch's word for a backend that does not take these
                notes.append(f"{backend}: not for {name} here ({str(error).splitlines()[0]})")
        work = 3.5 * 4 * batch * size * size * width / 2  # two products forward, five backward, half of them masked
        figures = rates(sides, work / 1e12, config, device)
        cases.append(Case(f"attention {list(q.shape)}, {name}, both ways", "TFLOP/s", figures))
    data = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    copied = rates({"": data.clone}, 2 * len(data) / 1e9, config, device)
    cases.append(Case(f"copy of {len(data) >> 20} MiB, read and written", "GB/s", copied))
    return Table("ceiling", cases, config.model_dump(mode="json"), [*dict.fromkeys(notes)])


class Attention:
    """A causal attention of [B, H, T, Q], forward and backward, by one backend."""

    def __init__(self, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor):
        self.backend, self.inputs, self.gradient = backend, (q, k, v), torch.randn_like(q)

    def __call__(self) -> None:
        with sdpa_kernel(self.backend):
            y = F.scaled_dot_product_attention(*self.inputs, is_causal=True)
            torch.autograd.grad(y, self.inputs, self.gradient)


def rates(
    sides: dict[str, Callable[[], object]], work: float, config: BenchmarkConfig, device: torch.device
) -> dict[str, list[float]]:
    """`work` per second of each, in turn; a side's name is the device's where it has none."""

    def turn(side: Callable[[], object]) -> float:
        begun = time.perf_counter()
        seconds(side, 1, device)
        times = max(round(config.seconds / len(sides) / 10 / max(time.perf_counter() - begun, 1e-9)), 1)
        return work / seconds(side, times, device)

    named = {name or device.type: (lambda side=side: turn(side)) for name, side in sides.items()}
    return interleave(named, config.repeats)


def seconds(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Of the device, for one of `times` in a row."""
    if device.type == "cpu":
        begun = time.process_time()
        for _ in range(times):
            work()
        return max(time.process_time() - begun, 1e-9) / times
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000 / times
