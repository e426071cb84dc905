#!/bin/bash
# Checks that this image trains here: two compiled steps of a tiny GPT on every GPU, or on the CPU. Leaves no files.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus > 0 ? gpus : 1))
python scripts/prepare_data.py --source 'gpt2_ddp/**/*.py' --tokenizer bytes --output "$folder/data"
torchrun --nproc_per_node "$ranks" scripts/train_gpt2.py --data.path "$folder/data" --output_dir "$folder" \
    --run_name health --train.steps 2 --train.compile model --train.global_batch_tokens $((ranks * 128)) \
    --model.n_layer 1 --model.n_head 2 --model.n_embd 32 --model.block_size 32 --optim.warmup_steps 1 \
    --eval.tokens 256 --tracking.sample_every 0
echo "health: two steps on $gpus GPUs$([ "$gpus" -gt 0 ] || echo ', so on the CPU'): ok"
