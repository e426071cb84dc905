"""Units per second and MFU, by hand; what a device can do, by its exact name."""

import re
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from close import assert_close, distance
from ranks import run_ranks

from gpt2_ddp.config.training import ModelConfig
from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.training import peaks
from gpt2_ddp.training.meters import Throughput, peak_of_ranks
from gpt2_ddp.training.peaks import GPUS, peak_flops

CPU = torch.device("cpu")


class Clock:
    """In the place of time.perf_counter; it moves when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def fake_task(flops_per_unit: int = 100) -> SimpleNamespace:
    return SimpleNamespace(unit="tokens", flops_per_unit=flops_per_unit, feed=SimpleNamespace(waited=3.0))


def read(throughput: Throughput) -> list[float | None]:
    """A reading without the memory, of which a process has some megabytes."""
    found = throughput.read()
    assert 2**20 < found.pop("memory") < psutil.virtual_memory().total
    return [*found.values()]


def test_throughput_counts_training_alone(monkeypatch):
    clock, task = Clock(monkeypatch), fake_task()
    throughput = Throughput(task, CPU)
    clock.now += 50
    task.feed.waited += 50
    throughput.add(7)
    throughput.restart()  # what happened before it is in no reading
    clock.now += 1
    task.feed.waited += 0.25
    with throughput.paused():
        clock.now += 30
    throughput.add(600)
    clock.now += 1
    throughput.add(400)
    assert read(throughput) == [500.0, None, 0.125]
    clock.now += 4  # a reading begins where the last one ended
    throughput.add(10)
    assert read(throughput) == [2.5, None, 0.0]
    task.flops_per_unit = 0
    clock.now += 1
    assert read(throughput) == [0.0, 0.0], "of a job without FLOPs"


def test_mfu_is_flops_by_hand(monkeypatch):
    """3,000 tokens a second of a model with 2 layers of 3 heads of 8, T = 16, on a device of 2 GFLOP/s, by hand:
    6·N + 12·L·H·Q·T FLOPs a token, N of the padded vocabulary and without positions."""
    model = GPT(ModelConfig(n_layer=2, n_head=3, n_embd=24, block_size=16, bias=False), 100)
    block = 24 * 72 + 24 * 24 + 2 * 24 * 96 + 2 * 24  # qkv, projection, feed-forward, two LayerNorms
    weights = model.wte.weight.size(0) * 24 + 2 * block + 24
    clock = Clock(monkeypatch)
    throughput = Throughput(fake_task(flops_per_unit=model.flops_per_token()), CPU, 2e9)
    clock.now += 2
    throughput.add(6000)
    row = throughput.read()
    assert row["tokens_per_second"] == 3000
    assert_close(row["mfu"], 3000 * (6 * weights + 12 * 2 * 3 * 8 * 16) / 2e9, 1e-12)


def unlike_devices() -> tuple[float | None, float | None]:
    """On each rank the peaks of two GPUs that differ, and of two of which one is not known."""
    rank, gpu = build_accelerator("cpu").process_index, torch.device("cuda")
    torch.cuda.get_device_name = lambda device: f"GPU {rank}"
    peaks.GPUS[f"GPU {rank}"] = peaks.Gpu(1.0 + rank, 80, "")
    both = peak_of_ranks(gpu)
    if rank:
        del peaks.GPUS["GPU 1"]
    return both, peak_of_ranks(gpu)


def test_the_peak_is_the_sum_of_the_ranks():
    assert run_ranks(unlike_devices, 2) == [(3e12, None)] * 2


UNKNOWN = [
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "NVIDIA A10-24Q",
    "NVIDIA A2",
    "NVIDIA GeForce RTX 3090 Laptop GPU",
    "nvidia h200",
]


def test_the_peak_of_a_device_is_its_data_sheets_or_unknown():
    """Sheets print the dense figure, twice as much (sparsity), four times (FP8), or that of 8 or 72 GPUs together."""
    for name, gpu in GPUS.items():
        assert name.startswith("NVIDIA "), "as torch says it"
        assert (peak_flops(name), gpu.memory >= 16) == (gpu.tera * 1e12, True)
        figures = [float(text.replace(",", "")) for text in re.findall(r"\d[\d,.]*(?<=\d)", gpu.source)]
        printed = {figure / times for figure in figures for times in (1, 2, 4, 2 * 8, 2 * 72)}
        assert "whitepaper" in gpu.source or any(distance(gpu.tera, of) < 1e-3 for of in printed), name
    known = {"H200": 989.5, "A100-SXM4-40GB": 312, "H100 PCIe": 756.5, "GeForce RTX 4090": 165.2, "GB200": 2500}
    assert {name: peak_flops(f"NVIDIA {name}") for name in known} == {name: tera * 1e12 for name, tera in known.items()}
    assert {name: peak_flops(name) for name in UNKNOWN} == dict.fromkeys(UNKNOWN)
