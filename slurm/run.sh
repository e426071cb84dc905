#!/bin/bash
# slurm/run.sh COMMAND...: runs a command under srun. Several tasks are the ranks of one world, without a launcher:
#
#   srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 slurm/run.sh python scripts/check_cluster.py
. slurm/environment.sh
if [ "$SLURM_NTASKS" -gt 1 ]; then
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${SLURM_NTASKS_PER_NODE:-1}
    export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}
    export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
fi
exec "${container[@]}" "$@"
