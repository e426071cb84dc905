"""A GPT-2 trainer in one file, from windows of tokens to checkpoint and resume.

    python scripts/prepare_data.py --config configs/data_stdlib.yaml  # once: makes tokens
    python scripts/hello_gpt.py  # one process
    torchrun --standalone --nproc_per_node 2 scripts/hello_gpt.py  # two: on GPUs, or the CPU
    accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 scripts/hello_gpt.py

Read `main` first. `in earnest` names the module below gpt2_ddp/ that does a part for train_gpt2.py.
Both have the same losses on the same windows. The same command again resumes from
runs/hello_gpt.pt. docs/first-steps.md explains more.
"""

import json
import math
import os
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import torch.distributed.nn  # before the process group: a later import would keep it from ending
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer

DATA = Path("data/stdlib")
CHECKPOINT = Path("runs/hello_gpt.pt")
# 1.3M parameters; GPT-2 (124M) has 12, 12, 768, 1024
LAYERS = 2
HEADS = 3
WIDTH = 192
CONTEXT = 128
# windows of one step over all processes; windows of one forward pass on one process
BATCH = 16
MICRO = 4
SEED = 1337
STEPS = 300
LR = 2e-3
WARMUP = 30
WEIGHT_DECAY = 0.1
MAX_NORM = 1.0
LOG_EVERY = 10
EVAL_EVERY = 100
SAVE_EVERY = 50
EVAL_WINDOWS = 96
GPUS = torch.cuda.device_count()


# in earnest: data/shards.py, which reads what a step needs
def read_windows(manifest: dict, split: str) -> Tensor:
    """All windows [N, T + 1] of a split. Window i begins at token i·T: T inputs, and their targets
    one token later."""
    dtype = "<u2" if manifest["vocab_size"] <= 65_536 else "<u4"
    shards = [
        np.fromfile(DATA / shard["file"], dtype, offset=1024) for shard in manifest["splits"][split]
    ]
    return torch.from_numpy(np.concatenate(shards).astype(np.int64)).unfold(0, CONTEXT + 1, CONTEXT)


@cache
# in earnest: data/order.py, which keeps no list of all windows
def permutation(epoch: int, count: int) -> Tensor:
    """The order of the windows in an epoch, the same on every process."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))


def windows_of_step(step: int, count: int) -> Tensor:  # in earnest: data/feed.py
    """Numbers [BATCH] of a step's windows, over all processes. They depend on the step alone, so a
    resume can seek."""
    return torch.stack(
        [permutation(i // count, count)[i % count] for i in range((step - 1) * BATCH, step * BATCH)]
    )


class Block(nn.Module):  # in earnest: model/architecture.py
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.ModuleDict(
            {"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        B, T, C = x.shape
        # 3 x [B, H, T, Q]
        q, k, v = self.attn["c_attn"](self.ln_1(x)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        # each token attends to itself and those before it
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn["c_proj"](y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp["c_proj"](gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):  # in earnest: model/gpt.py
    def __init__(self, vocab_size: int):
        super().__init__()
        # of tokens, of positions
        self.wte, self.wpe = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # the residual x sums 2 * LAYERS outputs of these
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS))

    def forward(self, windows: Tensor) -> Tensor:  # [B, T + 1] -> mean loss per token, in nats
        x = self.wte(windows[:, :-1]) + self.wpe.weight  # [B, T, C]
        for block in self.h:
            x = block(x)
        logits = self.ln_f(x) @ self.wte.weight.T  # [B, T, V]
        return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def make_optimizer(gpt: GPT) -> Optimizer:  # in earnest: model/optim.py
    matrices, others = (
        [p for p in gpt.parameters() if (p.dim() >= 2) == decays] for decays in (True, False)
    )
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return AdamW(groups, LR, betas=(0.9, 0.95), fused=True)


def lr_at(step: int) -> float:  # in earnest: model/optim.py
    """Learning rate of a step, the first being 1: linear warm-up to LR, then linear to 0 at the
    last step."""
    return LR * min(step / WARMUP, (STEPS - step) / (STEPS - WARMUP))


@torch.no_grad()
# in earnest: evaluation/evaluate.py
def evaluate(accelerator: Accelerator, gpt: GPT, val: Tensor) -> float:
    """Loss of EVAL_WINDOWS windows, evenly spread. Each process scores its share; then the
    processes add their sums."""
    numbers = torch.arange(EVAL_WINDOWS) * len(val) // EVAL_WINDOWS
    total = torch.zeros((), device=accelerator.device)
    for share in numbers.split(MICRO)[accelerator.process_index :: accelerator.num_processes]:
        total += gpt(val[share].to(accelerator.device)) * len(share)
    return torch.as_tensor(accelerator.reduce(total, "sum")).item() / EVAL_WINDOWS


def save(step: int, gpt: GPT, adamw: Optimizer) -> None:  # in earnest: checkpoint/store.py
    CHECKPOINT.parent.mkdir(exist_ok=True)
    new = CHECKPOINT.with_suffix(".new")
    torch.save({"step": step, "model": gpt.state_dict(), "optimizer": adamw.state_dict()}, new)
    os.replace(new, CHECKPOINT)  # a process killed while it writes leaves the old checkpoint whole


def load(gpt: GPT, adamw: Optimizer) -> int:  # in earnest: training/start.py
    """Loads the checkpoint on every process, and returns its step; without a checkpoint, 0."""
    if not CHECKPOINT.exists():
        return 0
    saved = torch.load(CHECKPOINT, map_location="cpu", weights_only=True)
    gpt.load_state_dict(saved["model"])
    adamw.load_state_dict(saved["optimizer"])
    return saved["step"]


def main() -> None:  # in earnest: training/loop.py
    accelerator = Accelerator(cpu=not GPUS)  # connects the processes; each takes one GPU
    rank = accelerator.process_index
    world = accelerator.num_processes
    device = accelerator.device
    manifest = json.loads((DATA / "manifest.json").read_text())
    train, val = (read_windows(manifest, split) for split in ("train", "val"))
    torch.manual_seed(SEED)  # the same initial weights on every process
    gpt = GPT(manifest["vocab_size"]).to(device)
    adamw = make_optimizer(gpt)
    begin = load(gpt, adamw)
    accelerator.print(f"begins at step {begin} of {STEPS}; processes: {world}", flush=True)
    # DDP around the model; autocast in mixed precision
    model, optimizer = accelerator.prepare(gpt, adamw)

    for step in range(begin + 1, STEPS + 1):
        # [micro-batches, MICRO]
        shares = windows_of_step(step, len(train)).view(-1, world, MICRO)[:, rank]
        mean = torch.zeros((), device=device)  # loss of this process's windows
        for number, share in enumerate(shares, 1):
            # one all-reduce per step
            with nullcontext() if number == len(shares) else accelerator.no_sync(model):
                loss = model(train[share].to(device)) / len(shares)  # gradients add up
                accelerator.backward(loss)
            mean += loss.detach()
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            # on every process, or the others would wait
            mean = torch.as_tensor(accelerator.reduce(mean, "mean"))
            accelerator.print(f"step {step}: loss {mean:.6f}  lr {lr_at(step):.3g}", flush=True)
        if step % EVAL_EVERY == 0 or step == STEPS:
            accelerator.print(
                f"step {step}: val_loss {evaluate(accelerator, gpt, val):.6f}", flush=True
            )
        if accelerator.is_main_process and (step % SAVE_EVERY == 0 or step == STEPS):
            save(step, gpt, adamw)
    # gloo may hang if DDP outlives the process group
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(print(__doc__))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > GPUS > 0:
        hint = "start fewer, or use the CPU: CUDA_VISIBLE_DEVICES= torchrun …"
        sys.exit(f"error: more processes than GPUs; {hint}")
    if BATCH % (MICRO * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"error: these processes cannot share {BATCH} windows equally; start 1, 2 or 4")
    if not (DATA / "manifest.json").exists():
        command = "python scripts/prepare_data.py --config configs/data_stdlib.yaml"
        sys.exit(f"error: {DATA} is missing; run: {command}")
    main()
