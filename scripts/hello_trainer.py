"""A trainer in one file: DataLoader, mixed precision, gradient accumulation, snapshots and resume.

    python scripts/hello_trainer.py                                           # one process
    torchrun --standalone --nproc_per_node 2 scripts/hello_trainer.py         # two: on GPUs, or else on the CPU

Read `train` first: it is plain PyTorch; hello_gpt.py does the same on Accelerate. The same command again resumes from
runs/hello_trainer.pt. docs/first-steps.md explains the program.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice

import torch.distributed.nn  # before the process group: a later import would keep it from ending
from torch import Tensor, distributed, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SEED, POINTS, LR, MOMENTUM = 1337, 12_000, 0.05, 0.5
BATCH, MICRO = 1_200, 100  # points of one step over all processes; points of one forward pass on one process
STEPS, SAVE_EVERY = 80, 15  # an epoch has 10 steps, so most snapshots are within an epoch
SNAPSHOT = "runs/hello_trainer.pt"
GPUS = torch.cuda.device_count()


def make() -> tuple[TensorDataset, nn.Linear, SGD]:
    """Points on y = 2x + 3 with noise, model and optimizer: the same on every process."""
    x, noise = torch.randn(2, POINTS, 1, generator=torch.Generator().manual_seed(SEED))
    torch.manual_seed(SEED)
    line = nn.Linear(1, 1)
    return TensorDataset(x, 2 * x + 3 + 0.1 * noise), line, SGD(line.parameters(), LR, MOMENTUM)


def micro_batches(loader: DataLoader, sampler: DistributedSampler, first: int) -> Iterator[list[Tensor]]:
    """This process's micro-batches from number `first` on, epoch after epoch."""
    for epoch in count(first // len(loader)):
        sampler.set_epoch(epoch)  # a new order; without this call, every epoch has the same
        yield from islice(loader, first % len(loader), None)  # after a resume, reads and drops those before `first`
        first = 0


def save(line: nn.Linear, optimizer: Optimizer, step: int, loss: Tensor, world: int) -> None:
    weight, bias = line.weight.item(), line.bias.item()
    print(f"step {step}: loss {loss:.4f}, y = {weight:.4f} x + {bias:.4f}; processes: {world}", flush=True)
    os.makedirs("runs", exist_ok=True)
    parts = {"line": line.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(parts, SNAPSHOT + ".new")
    os.replace(SNAPSHOT + ".new", SNAPSHOT)  # a process killed while it writes leaves the old snapshot whole


def load(line: nn.Linear, optimizer: Optimizer, rank: int) -> int:
    """Loads the snapshot on every process, and returns its step; without a snapshot, 0."""
    if not os.path.exists(SNAPSHOT):
        return 0
    saved = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
    line.load_state_dict(saved["line"])
    optimizer.load_state_dict(saved["optimizer"])
    if rank == 0:
        print(f"resumed at step {saved['step']} of {STEPS}; to begin again, remove {SNAPSHOT}", flush=True)
    return saved["step"]


def train(amp: str) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if GPUS else torch.device("cpu")
    meet = "env://" if world > 1 else "tcp://127.0.0.1:0"  # env: at the address that the launcher has set
    distributed.init_process_group("nccl" if GPUS else "gloo", meet, rank=rank, world_size=world)

    data, line, optimizer = make()
    line.to(device)
    step = load(line, optimizer, rank)
    model = DistributedDataParallel(line)
    sampler = DistributedSampler(data, world, rank, seed=SEED)  # its share of an epoch
    loader = DataLoader(data, MICRO, sampler=sampler)

    accumulate = BATCH // (MICRO * world)  # micro-batches of a step on each process
    batches = micro_batches(loader, sampler, step * accumulate)
    while step < STEPS:
        mean = torch.zeros((), device=device)  # loss of this process's points
        for number in range(1, accumulate + 1):
            x, y = (part.to(device) for part in next(batches))
            with nullcontext() if number == accumulate else model.no_sync():  # DDP sends gradients once per step
                with torch.autocast(device.type, torch.bfloat16, enabled=amp == "bf16"):
                    loss = mse_loss(model(x).float(), y) / accumulate  # gradients add up
                loss.backward()
            mean += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0 or step == STEPS:
            distributed.all_reduce(mean)  # on every process, or the others would wait forever
            if rank == 0:
                save(line, optimizer, step, mean / world, world)
    del model  # gloo may hang if DDP outlives the process group
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--amp", choices=["no", "bf16"], default="no", help="precision")
    flags = parser.parse_args()
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > GPUS > 0:
        raise SystemExit("error: more processes than GPUs; start fewer, or set CUDA_VISIBLE_DEVICES= to use the CPU")
    if BATCH % (MICRO * int(os.environ.get("WORLD_SIZE", "1"))):
        raise SystemExit(f"error: these processes cannot share {BATCH} points equally; start 1, 2, 3, 4, 6 or 12")
    train(flags.amp)
    if os.environ.get("RANK", "0") == "0":
        print("next: docs/ddp-lab.md, common mistakes with DDP")
