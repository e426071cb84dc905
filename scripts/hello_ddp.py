"""The smallest DDP program on Accelerate: the line y = 2x + 3, found from noisy points.

    python scripts/hello_ddp.py  # one process
    torchrun --standalone --nproc_per_node 2 scripts/hello_ddp.py  # two: on GPUs, or the CPU
    accelerate launch --multi_gpu --num_processes 2 scripts/hello_ddp.py  # the same, on the CPU too

docs/first-steps.md explains it, line by line.
"""

import os
import sys

import torch.distributed.nn  # before the process group: a later import would keep it from ending
from accelerate import Accelerator

# points to train on, and to test on
SEED = 1337
TRAIN = 10_000
TEST = 2_000
# BATCH: points of one step, over all processes
EPOCHS = 40
BATCH = 10_000
LR = 0.1


def main() -> None:
    # meets the other processes; takes one GPU
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    rank = accelerator.process_index
    world = accelerator.num_processes
    device = accelerator.device

    generator = torch.Generator().manual_seed(SEED)  # every process makes the same points
    drawn = [torch.randn(2, n, 1, generator=generator).to(device) for n in (TRAIN, TEST)]
    (x, y), (test_x, test_y) = [(x, 2 * x + 3 + 0.1 * noise) for x, noise in drawn]
    torch.manual_seed(SEED)
    line = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(line.parameters(), LR)
    # moves the line to the device, and wraps it in DDP
    model, optimizer = accelerator.prepare(line, optimizer)

    for epoch in range(EPOCHS):
        # the same on every process
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            own = batch[rank::world]  # this process's share of the batch
            # as DDP divides by `world`
            loss = ((model(x[own]) - y[own]) ** 2).sum() / len(batch) * world
            optimizer.zero_grad()
            accelerator.backward(loss)  # in here, DDP averages the gradients of all processes
            optimizer.step()

    # gloo may hang if DDP outlives the process group
    model, optimizer = accelerator.free_memory(model, optimizer)
    with torch.no_grad():
        # each test point on one process
        error = ((line(test_x[rank::world]) - test_y[rank::world]) ** 2).sum()
    error = torch.as_tensor(accelerator.reduce(error, "sum"))
    if accelerator.is_main_process:  # one process saves and prints
        os.makedirs("runs", exist_ok=True)
        torch.save(line.state_dict(), "runs/hello_ddp.pt")
        print(f"y = {line.weight.item():.4f} x + {line.bias.item():.4f}", end=", ")
        print(f"loss {error / TEST:.4f}; processes: {world}")
        print("next: docs/first-steps.md explains this program, line by line")
    accelerator.end_training()  # leaves the process group


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(print(__doc__))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count() > 0:
        hint = "start fewer, or use the CPU: CUDA_VISIBLE_DEVICES= torchrun …"
        sys.exit(f"error: more processes than GPUs; {hint}")
    main()
