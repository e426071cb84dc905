"""One process, nn.DataParallel and DDP on the same training: speed-up and memory.

    python scripts/compare_parallel.py  # no launcher: it starts the processes
    python scripts/compare_parallel.py --jobs gpt2 --processes 2 4 --repeats 5
    python scripts/compare_parallel.py --jobs classifier:configs/jobs/cifar100_lenet.yaml \\
        --steps 2000

docs/compare.md explains the columns.
"""

from gpt2_ddp.config.tools import CompareConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(CompareConfig, "gpt2_ddp.compare:compare")
