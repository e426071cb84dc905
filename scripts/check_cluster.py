"""Check new machines: connections, versions, and correctness and speed of the all-reduce.

    torchrun --nproc_per_node 8 scripts/check_cluster.py  # one machine
    accelerate launch --config_file configs/accelerate/multi_node.yaml \\
        --machine_rank 0 --main_process_ip ADDRESS --main_process_port 29500 \\
        scripts/check_cluster.py  # several machines; on the others 1, 2, ...

Launchers wait long for a machine that is missing before they start anything: see
docs/several-machines.md.
"""

from gpt2_ddp.config.tools import CheckClusterConfig
from gpt2_ddp.script import run_command

if __name__ == "__main__":
    run_command(CheckClusterConfig, "gpt2_ddp.cluster:check_cluster")
