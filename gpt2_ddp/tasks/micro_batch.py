"""`train.micro_batch_size: auto` (docs/benchmarks.md): by a GPU's memory, with a trial, or by a CPU's caches."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import micro_batches
from gpt2_ddp.model.gpt import GPT, without_init
from gpt2_ddp.model.memory import estimate, pick_micro_batch, setting_of


def estimated_micro_batch(config: TrainingConfig, vocab_size: int, accelerator: Accelerator) -> int:
    """Windows per forward pass by the memory estimate, equal on all ranks. Collective."""
    device, processes = accelerator.device, accelerator.num_processes
    with torch.device("meta"), without_init():
        model = GPT(config.model, vocab_size)

    def peak(size: int) -> float:
        return estimate(setting_of(config, model, device.type, processes, accelerator.mixed_precision, size)).peak

    room = float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else 0.0
    sizes = micro_batches(config.global_batch_windows, processes)
    return min(gather_object([pick_micro_batch(sizes, device.type, config.model.block_size, peak, room)]))


def tried_micro_batch(model: GPT, accelerator: Accelerator, windows: int, size: int) -> int:
    """The largest micro-batch up to `size` whose forward and backward pass fits on every device, with the optimizer
    state; 1 if none fits. Collective. `windows`: of a step."""
    model.to(accelerator.device)
    sizes = (number for number in micro_batches(windows, accelerator.num_processes) if 1 < number <= size)
    return next((one for one in sizes if all(gather_object([_fits(model, accelerator, one)]))), 1)


def _fits(model: GPT, accelerator: Accelerator, size: int) -> bool:
    tokens = torch.zeros(size, model.config.block_size, dtype=torch.int64, device=accelerator.device)
    try:
        optimizer_state = [torch.empty_like(parameter) for parameter in model.parameters() for _ in range(2)]
        with accelerator.autocast():
            loss = model(tokens, tokens, reduction="sum")
        loss.backward()
        del optimizer_state, loss
        fits = True
    except torch.OutOfMemoryError:
        fits = False
    model.zero_grad(set_to_none=True)
    if accelerator.device.type == "cuda":
        torch.cuda.empty_cache()
    return fits
