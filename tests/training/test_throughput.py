"""Units per second; what a device can do, by its exact name. test_numbers.py has MFU."""

import time
from types import SimpleNamespace

import psutil
import torch
from ranks import run_ranks

from gpt2_ddp.distributed.launch import build_accelerator
from gpt2_ddp.training import gpus as peaks
from gpt2_ddp.training.gpus import GPUS, peak_flops
from gpt2_ddp.training.throughput import Throughput, peak_of_ranks


def read(throughput):
    """A reading without the memory, of which a process has some megabytes."""
    found = throughput.read()
    assert 2**20 < found.pop("memory") < psutil.virtual_memory().total
    return [*found.values()]


def test_throughput_counts_training_alone(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    task = SimpleNamespace(unit="tokens", flops_per_unit=100, units_per_item=2)
    task.feed = SimpleNamespace(waited=3.0, state=SimpleNamespace(consumed=8))
    throughput = Throughput(task, torch.device("cpu"))
    clock.now += 50
    task.feed.waited += 50
    task.feed.state.consumed += 7
    throughput.restart()  # what happened before it is in no reading
    clock.now += 1
    task.feed.waited += 0.25
    with throughput.paused():
        clock.now += 30
    task.feed.state.consumed += 300
    clock.now += 1
    task.feed.state.consumed += 200
    assert read(throughput) == [500.0, None, 0.125]
    clock.now += 4  # a reading begins where the last one ended
    task.feed.state.consumed += 5
    assert read(throughput) == [2.5, None, 0.0]
    task.flops_per_unit = 0
    clock.now += 1
    assert read(throughput) == [0.0, 0.0], "of a job without FLOPs"


def unlike_devices():
    """On each rank the peaks of two GPUs that differ, and of two of which one is not known."""
    rank = build_accelerator("cpu").process_index
    gpu = torch.device("cuda")
    torch.cuda.get_device_name = lambda device: f"GPU {rank}"
    peaks.GPUS[f"GPU {rank}"] = peaks.Gpu(1.0 + rank, 80)
    both = peak_of_ranks(gpu)
    if rank:
        del peaks.GPUS["GPU 1"]
    return both, peak_of_ranks(gpu)


def test_the_peak_is_the_sum_of_the_ranks():
    assert run_ranks(unlike_devices, 2) == [(3e12, None)] * 2


def test_the_peak_of_a_device_is_its_data_sheets_or_unknown():
    for name, gpu in GPUS.items():
        assert name.startswith("NVIDIA "), "as torch says it"
        assert (peak_flops(name), gpu.memory >= 16) == (gpu.tera * 1e12, True)
    for name, tera in {
        "A100-SXM4-40GB": 312,
        "H100 PCIe": 756.5,
        "GeForce RTX 4090": 165.2,
        "GB200": 2500,
    }.items():
        assert peak_flops(f"NVIDIA {name}") == tera * 1e12
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A2", "nvidia h200"):
        assert peak_flops(name) is None
