# What jobs and `slurm/run.sh` do first, on each node, in the project's folder. Edit this file for your site.
[ -f .venv/bin/activate ] && . .venv/bin/activate
# module load python/3.11              # or what your site has in place of .venv
# . ~/miniconda3/bin/activate gpt2     # conda

# Compute nodes without internet: the Hub then fails at once, and wandb logs into the run folder (`wandb sync` sends it).
# export HF_HUB_OFFLINE=1 WANDB_MODE=offline

# Nodes with several networks (`ip -br addr` lists them). NCCL sends the gradients, gloo the stop requests. By default,
# gloo uses the address of the host name. On some systems this is 127.0.1.1, which other nodes cannot reach: the run then
# waits at its start.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# The command that runs another one in a container; empty without one.
container=()
# container=(apptainer exec --nv --bind "$PWD" --env "PYTHONPATH=$PWD" gpt2_ddp.sif)
