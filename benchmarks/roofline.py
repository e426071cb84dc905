"""Upper limits of the device: matrix products of the model's shapes, attention by each SDPA backend, a copy."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

from benchmarks.config import BenchmarkConfig
from benchmarks.harness import Case, Table, interleave, read_clock
from benchmarks.step import PRECISIONS, preset, variants
from gpt2_ddp.config.plan import GPT2_IDS
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.model.gpt import GPT

Work = Callable[[], object]
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


def measure(config: BenchmarkConfig) -> Table:
    """TFLOP/s and GB/s; of CPU seconds on a CPU."""
    device, shape, cases, notes = pick_device(config.device), preset(config).model, [], {}
    size, width, heads, keys = shape.block_size, shape.n_embd, shape.n_head, shape.key_heads
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # as in training
    with torch.device("meta"):
        model = GPT(shape, GPT2_IDS)
    layers = {name: part.weight.shape for name, part in model.h[0].named_modules() if isinstance(part, nn.Linear)}
    layers["head"] = model.wte.weight.shape
    for batch, precision in dict.fromkeys((batch, precision) for batch, precision, _ in variants(config)):
        name, dtype = PRECISIONS[precision]
        random, rows = partial(torch.randn, device=device, dtype=dtype), batch * size
        for layer, (n_out, n_in) in layers.items():
            product = partial(F.linear, random(rows, n_in), random(n_out, n_in))
            rates = measure_rates({device.type: product}, 2 * rows * n_in * n_out / 1e12, config)
            cases.append(Case(f"{layer} [{rows}, {n_in}] x [{n_in}, {n_out}], {name}", "TFLOP/s", rates))
        q, k, v = (random(batch, n, size, width // heads, requires_grad=True) for n in (heads, keys, keys))
        able: dict[str, Work] = {}
        for backend in BACKENDS:
            try:
                attention(backend, q, k, v)
                able[backend] = partial(attention, backend, q, k, v)
            except RuntimeError as error:  # the backend does not take these inputs
                notes[f"{backend}: not for {name} here ({str(error).splitlines()[0]})"] = None
        flops = 3.5 * 4 * batch * size * size * width / 2  # two products forward, five backward, half of them masked
        what = f"attention {list(q.shape)}, {name}, forward and backward"
        cases.append(Case(what, "TFLOP/s", measure_rates(able, flops / 1e12, config)))
    data = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    rates = measure_rates({device.type: data.clone}, 2 * len(data) / 1e9, config)
    return [*cases, Case(f"copy of {len(data) >> 20} MiB, read and written", "GB/s", rates)], list(notes)


def attention(backend: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """A causal attention by one backend, forward and backward, of [B, H, T, Q] and two [B, K, T, Q]."""
    with sdpa_kernel(SDPBackend.__members__[backend]):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) > k.size(1))
        torch.autograd.grad(y, (q, k, v), y.detach())


def measure_rates(able: dict[str, Work], work: float, config: BenchmarkConfig) -> dict[str, list[float]]:
    """`work` per second of each function, in turn."""
    clock = partial(read_clock, pick_device(config.device))

    def rate(function: Work) -> float:
        timer = Timer("function()", timer=clock, globals={"function": function}, num_threads=config.threads)
        return work / timer.blocked_autorange(min_run_time=config.seconds / len(able) / 10).median

    return interleave({name: partial(rate, function) for name, function in able.items()}, config.repeats)
