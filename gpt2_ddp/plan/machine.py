"""What a training is planned for: this machine, or GPUs by their name."""

import difflib
from dataclasses import dataclass

import psutil
import torch

from gpt2_ddp.config.plan import PlanConfig
from gpt2_ddp.distributed.launch import pick_device
from gpt2_ddp.errors import UserError
from gpt2_ddp.training.meters import device_name
from gpt2_ddp.training.peaks import PEAKS, peak_flops

MEMORY = {
    "NVIDIA A10": 24,
    "NVIDIA A10G": 24,
    "NVIDIA A30": 24,
    "NVIDIA A40": 48,
    "NVIDIA L4": 24,
    "NVIDIA L40": 48,
    "NVIDIA L40S": 48,
    "NVIDIA H100 PCIe": 80,
    "NVIDIA H100 NVL": 94,
    "NVIDIA H200": 141,
    "NVIDIA H200 NVL": 141,
    "NVIDIA H800": 80,
    "NVIDIA H800 PCIe": 80,
    "NVIDIA H20": 96,
    "NVIDIA GH200 480GB": 96,
    "NVIDIA GH200 144G HBM3e": 144,
    "NVIDIA B200": 180,
    "NVIDIA B300 SXM6 AC": 270,
    "NVIDIA GB200": 186,
    "NVIDIA GB300": 279,
    "NVIDIA RTX A6000": 48,
    "NVIDIA RTX A5000": 24,
    "NVIDIA RTX A4000": 16,
    "NVIDIA RTX 6000 Ada Generation": 48,
    "NVIDIA RTX 5000 Ada Generation": 32,
    "NVIDIA GeForce RTX 3090": 24,
    "NVIDIA GeForce RTX 3090 Ti": 24,
    "NVIDIA GeForce RTX 4080": 16,
    "NVIDIA GeForce RTX 4090": 24,
    "NVIDIA GeForce RTX 5080": 16,
    "NVIDIA GeForce RTX 5090": 32,
}
"""GB (1e9 bytes, at least so many) by data sheet, of the GPUs in `PEAKS` whose names do not say it, as
`NVIDIA A100-SXM4-80GB` does."""


@dataclass(frozen=True)
class Machine:
    """What a training runs on.

    Args:
        device: a GPU's exact name, or cpu or mps.
        kind: cuda, cpu or mps.
        processes: in all, one per device. nodes: machines, which have equally many.
        memory: bytes that a process may take.
        peak: FLOP/s of a device; None where that is not known.
        is_here: it is this machine, rather than one that is asked about.
    """

    device: str
    kind: str
    processes: int
    nodes: int
    memory: float
    peak: float | None
    is_here: bool


def find_machine(config: PlanConfig, started: int) -> Machine:
    """The machine that is planned for.

    Args:
        started: processes that a launcher started here.

    Raises:
        UserError: a GPU that is not known, and of which memory is not given either; a device that is not there.
    """
    per_node = config.gpus or max(started // config.nodes, 1)
    processes, own = per_node * config.nodes, config.tracking.peak_flops
    given = config.gpu_memory * 1e9 if config.gpu_memory else None
    if config.gpu is None:
        device = pick_device(config.train.device, "train.")
        name = device_name(device)
        if device.type == "cuda":
            free = float(torch.cuda.get_device_properties(device).total_memory)
        else:  # the processes of a machine share it
            free = psutil.virtual_memory().available / per_node
        return Machine(name, device.type, processes, config.nodes, given or free, own or peak_flops(name), True)
    name = config.gpu if config.gpu in PEAKS else f"NVIDIA {config.gpu.removeprefix('NVIDIA ')}"
    memory = given or _memory(name)
    if memory is None:
        near = difflib.get_close_matches(name, PEAKS, n=3, cutoff=0.3)
        hint = f"is not known here; the nearest are {', '.join(near)}" if near else "is not known here"
        raise UserError("gpu", config.gpu, f"{hint}; or say --gpu_memory GB and --tracking.peak_flops FLOP/s")
    return Machine(name, "cuda", processes, config.nodes, memory, own or peak_flops(name), False)


def _memory(name: str) -> float | None:
    if name not in PEAKS:
        return None
    named = [int(word[:-2]) for word in name.replace("-", " ").split() if word[:-2].isdigit() and word[-2:] == "GB"]
    return 1e9 * MEMORY.get(name, named[0] if named else 0) or None
