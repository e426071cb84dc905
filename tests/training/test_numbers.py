"""Each printed figure, recomputed from a tiny run's shards and checkpoints in plain PyTorch, by no
code of the package.

Loss, mean loss, validation loss, perplexity, bits per byte, learning rate, gradient norm, tokens
per second, MFU and the time left; in metrics.jsonl, in the lines of the terminal and in
evaluate.py's. The run has two processes.
"""

import math
import re
import time

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from close import assert_close, distance
from ranks import run_ranks
from runs import by_definition, checkpoint_at, said, tensors_of, train, training_config
from runs import rows as rows_of
from tokenizers import Tokenizer

from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.tools import EvaluateConfig
from gpt2_ddp.tasks.checkpoints import evaluate_checkpoint

CHANGES = {
    "train.steps": 12,
    "eval": {"every": 6, "patience": 9},
    "tracking": {"log_every": 3},
    "checkpoint": {"every": 1, "keep_last": 99},
}
STEP_SECONDS = 2.0
PEAK = 1e9


def train_by_the_clock(config):
    """Trains while steps take two seconds each, evaluations a hundred, and devices have 10^9
    FLOP/s; what it says."""
    from gpt2_ddp.tasks import pretraining
    from gpt2_ddp.training import loop
    from gpt2_ddp.training import throughput as meters

    meters.peak_of_ranks = lambda device: 2 * PEAK  # of both processes
    now = [100.0]
    time.perf_counter = lambda: now[0]
    step = loop.train_step
    evaluate = pretraining.evaluate

    def train_step(run):
        now[0] += STEP_SECONDS
        return step(run)

    def evaluate_slowly(*arguments):
        now[0] += 100
        return evaluate(*arguments)

    loop.train_step = train_step
    pretraining.evaluate = evaluate_slowly
    CheckpointStore._delete_except = lambda self, keep: None  # the first checkpoint is read below
    return said(train, config)[1]


# ---- By hand


def read_tokens(corpus, split):
    """A header of 1,024 bytes, then uint16."""
    files = sorted(corpus.glob(f"{split}_*.bin"))
    return torch.from_numpy(
        np.concatenate([np.fromfile(file, "<u2", offset=1024) for file in files]).astype(np.int64)
    )


def losses(weights, tokens, n_head=2):
    """GPT-2: int64 [B, T + 1] -> cross-entropy in nats of the last T tokens, [B, T]."""

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    B, T = tokens[:, :-1].shape
    x = weights["wte.weight"][tokens[:, :-1]] + weights["wpe.weight"][:T]
    for layer in range(2):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").view(B, T, 3, n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # 3 x [B, H, T, Q]
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(
            torch.ones(T, T).triu(1).bool(), -math.inf
        )
        x = x + linear(
            (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1), f"h.{layer}.attn.c_proj"
        )
        hidden = F.gelu(
            linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc"), approximate="tanh"
        )
        x = x + linear(hidden, f"h.{layer}.mlp.c_proj")
    logits = norm(x, "ln_f") @ weights["wte.weight"].T
    return logits.logsumexp(-1) - logits.gather(-1, tokens[:, 1:, None])[..., 0]


def lr_of(step):
    """3e-3 after 2 steps of warm-up, then half a cosine to 3e-4 at step 12."""
    return (
        3e-3 * step / 2
        if step < 2
        else 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * (step - 2) / 10)) / 2
    )


def spelled(corpus, tokens):
    """UTF-8 bytes of the tokens; the end of a text has none."""
    return len(Tokenizer.from_file(str(corpus / "tokenizer.json")).decode(tokens.tolist()).encode())


def numbers(line):
    """The figures in a line of the terminal or of evaluate.py:
    what stands before or behind each number names it."""
    line = line.replace(",", "").replace("\n", "")
    line = re.sub(
        r"(\d+):(\d+) left", lambda clock: f"{60 * int(clock[1]) + int(clock[2])} s left", line
    )
    named = re.findall(
        r"(loss_mean|val_loss|val loss|bits/byte|lr|norm|mfu|perplexity) (\d[\d.e-]*)", line
    )
    behind = re.findall(r"([\d.]+) (tokens/s|s left|bits per byte|tokens|bytes)(?![\w/])", line)
    return {
        name: float(value) for name, value in [*named, *((name, value) for value, name in behind)]
    }


def test_every_printed_figure(corpus, tmp_path):
    text, _ = run_ranks(train_by_the_clock, 2, training_config(corpus, tmp_path, CHANGES))
    run = tmp_path / "run"
    rows = {row["step"]: row for row in rows_of(run)}
    shown = {
        int(line[4:].split("/")[0]): numbers(line)
        for line in text.splitlines()
        if re.match(r"step +\d+/12  ", line)
    }
    assert list(rows) == list(shown) == [0, 3, 6, 9, 12]
    weights = [tensors_of(checkpoint_at(run, step), "model") for step in range(13)]
    T = 32
    G = 12
    tokens, val = (read_tokens(corpus, split) for split in ("train", "val"))

    by_step = [math.nan]
    norms = [math.nan]
    for step in range(1, 13):
        windows = [
            by_definition(1337, (len(tokens) - 1) // T, p) for p in range((step - 1) * G, step * G)
        ]
        leaves = {name: value.requires_grad_() for name, value in weights[step - 1].items()}
        loss = losses(leaves, torch.stack([tokens[w * T : w * T + T + 1] for w in windows])).mean()
        loss.backward()
        by_step.append(loss.item())
        norms.append(
            math.sqrt(sum(leaf.grad.double().pow(2).sum().item() for leaf in leaves.values()))
        )
    weights = [{name: value.detach() for name, value in each.items()} for each in weights]

    n_windows = (len(val) - 1) // T
    chosen = [k * n_windows // 16 for k in range(16)]  # 6 % of 6 steps of 12 windows would be 5
    rows_of_val = torch.stack([val[w * T : w * T + T + 1] for w in chosen])
    assert yaml.safe_load((run / "config.yaml").read_text())["eval"]["tokens"] == 16 * T
    matrices = sum(value.numel() for name, value in weights[0].items() if name != "wpe.weight")
    flops = 6 * matrices + 12 * 2 * 32 * T  # layers, width

    for step, row in rows.items():
        line = shown[step]
        if step % 6 == 0:
            nll = losses(weights[step], rows_of_val).double().sum().item()
            bits = nll / math.log(2) / spelled(corpus, rows_of_val[:, 1:].flatten())
            assert_close(row["val_loss"], nll / (16 * T), 1e-5)
            assert_close(row["val_bits_per_byte"], bits, 1e-5)
            assert distance((line["val_loss"], line["bits/byte"]), (nll / (16 * T), bits), 1) < 1e-4
        else:
            assert not {"val_loss", "val_bits_per_byte"} & row.keys()
        if step == 0:
            continue
        mean = sum(by_step[step - 2 : step + 1]) / 3
        assert_close(row["loss"], by_step[step], 1e-5)
        assert_close(row["loss_mean"], mean, 1e-5)
        assert_close(row["grad_norm"], norms[step], 1e-4)
        assert_close(row["lr"], lr_of(step), 1e-9)
        speed = G * T / STEP_SECONDS
        assert row["tokens_per_second"] == speed
        assert_close(row["mfu"], speed * flops / (2 * PEAK), 1e-9)
        assert distance(line["loss_mean"], mean, 1) < 1e-4
        assert distance(line["lr"], lr_of(step)) < 6e-3, "three digits"
        assert distance(line["norm"], norms[step]) < 6e-3
        assert line["tokens/s"] == speed
        assert distance(line["mfu"], 100 * speed * flops / (2 * PEAK), 1) < 0.06
        assert line.get("s left", 0) == (12 - step) * STEP_SECONDS

    again = EvaluateConfig(checkpoint=str(run), device="cpu", mixed_precision="no")
    line = numbers(run_ranks(said, 1, evaluate_checkpoint, again)[0][1])
    tail = len(val) - 1 - n_windows * T
    whole = torch.stack([val[w * T : w * T + T + 1] for w in range(n_windows)])
    nll = (
        losses(weights[12], whole).double().sum()
        + losses(weights[12], val[None, -tail - 1 :]).double().sum()
    )
    loss = nll.item() / (len(val) - 1)
    assert tail > 0
    assert_close(line["val loss"], loss, 1e-5)
    assert_close(line["perplexity"], math.exp(loss), 1e-5)
    assert_close(line["bits per byte"], nll.item() / math.log(2) / spelled(corpus, val[1:]), 1e-5)
    assert (line["tokens"], line["bytes"]) == (len(val) - 1, spelled(corpus, val[1:]))
