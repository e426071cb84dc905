"""hello_ddp.py in plain torch.distributed, step for step; docs/first-steps.md explains both.

python scripts/hello_torch_ddp.py 2                                       # without a number: one per GPU, or two
torchrun --standalone --nproc_per_node 2 scripts/hello_torch_ddp.py       # torchrun starts the processes
"""

import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)  # before the slow imports: Ctrl-C ends a process without a traceback
import torch.distributed.nn  # noqa: E402  before the process group: a later import would keep it from ending
from torch import distributed, multiprocessing, nn  # noqa: E402

SEED, TRAIN, TEST = 1337, 10_000, 2_000  # points to train on, and to test on
EPOCHS, BATCH, LR = 40, 10_000, 0.1  # BATCH: points of one step, over all processes
GPUS = torch.cuda.device_count()


def main(rank: int, world: int) -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if GPUS else torch.device("cpu")
    distributed.init_process_group("nccl" if GPUS else "gloo", rank=rank, world_size=world)  # meets the others
    generator = torch.Generator().manual_seed(SEED)  # every process makes the same points
    drawn = [torch.randn(2, n, 1, generator=generator).to(device) for n in (TRAIN, TEST)]
    (x, y), (test_x, test_y) = [(x, 2 * x + 3 + 0.1 * noise) for x, noise in drawn]
    torch.manual_seed(SEED)
    line = nn.Linear(1, 1).to(device)
    model = nn.parallel.DistributedDataParallel(line)
    optimizer = torch.optim.SGD(line.parameters(), LR)
    for epoch in range(EPOCHS):
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(epoch))  # the same on every process
        for batch in order.split(BATCH):
            own = batch[rank::world]  # this process's share of the batch
            loss = ((model(x[own]) - y[own]) ** 2).sum() / len(batch) * world  # as DDP divides by `world`
            optimizer.zero_grad()
            loss.backward()  # in here, DDP averages the gradients of all processes
            optimizer.step()
    del model  # gloo may hang if DDP outlives the process group
    with torch.no_grad():
        error = ((line(test_x[rank::world]) - test_y[rank::world]) ** 2).sum()  # each test point on one process
    distributed.all_reduce(error)
    if rank == 0:  # one process saves and prints
        os.makedirs("runs", exist_ok=True)
        torch.save(line.state_dict(), "runs/hello_torch_ddp.pt")
        print(f"y = {line.weight.item():.4f} x + {line.bias.item():.4f}, loss {error / TEST:.4f}; processes: {world}")
        print("next: scripts/hello_trainer.py, a trainer; docs/first-steps.md explains both")
    distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].isdigit():
        sys.exit(print(__doc__))
    processes = int(os.environ.get("LOCAL_WORLD_SIZE") or (sys.argv[1] if sys.argv[1:] else GPUS or 2))
    if 0 < GPUS < processes:
        sys.exit("error: more processes than GPUs; start fewer, or use the CPU: CUDA_VISIBLE_DEVICES= python …")
    if "RANK" in os.environ:  # torchrun has started this process
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        multiprocessing.spawn(main, (processes,), processes)  # pyright: ignore[reportPrivateImportUsage]
