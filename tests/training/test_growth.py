"""Long runs: memory and time of a resume, a report and a check of many rows."""

import os
import shutil
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from ranks import run_ranks
from runs import all_rows, checkpoint_at, edit_manifest, train, training_config

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER, Snapshot
from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.checkpoint.verify import verify
from gpt2_ddp.config.cli import dump
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.files import sha256_file
from gpt2_ddp.project import PROJECT
from gpt2_ddp.records.run_folder import RunFolder, RunLog
from gpt2_ddp.state import Best, LogEnd, LossSum, Progress, Unjudged
from gpt2_ddp.tasks.supervised import contiguous
from gpt2_ddp.training.optimizer import lr_at

MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    lines = open("/proc/self/status").readlines()
    print(*(line for line in lines if line.startswith("VmHWM")), file=sys.stderr)
"""


def make_long_run(trained, place, steps):
    """A stopped run of so many steps, each with a row,
    and a checkpoint at the last. All records agree."""
    rare = {"eval.every": 10**9, "checkpoint.every": 10**9}
    config = training_config(
        trained.parent / "data", place, {"train.steps": steps, "optim.decay_steps": 10, **rare}
    )
    folder = RunFolder(config)
    folder.open()
    log = RunLog(folder)
    start = all_rows(trained)[0] | {
        "steps": steps,
        "config": config.model_dump(mode="json"),
        "kept": [],
    }
    log.resume(LogEnd(), Progress(), start)
    scores = {"val_loss": 5.5, "val_tokens": 512, "val_bits_per_byte": 3.0}
    log.append({"step": 0, "epoch": 0.0, "tokens": 0, **scores})
    feed = Feed(
        Permutation(config.seed, start["epoch_size"]), GlobalBatch(12, partial(contiguous, 1, 1))
    )
    for step in range(1, steps + 1):
        feed.next_step()
        row = {
            "step": step,
            "epoch": round(feed.state.position / len(feed.order), 4),
            "tokens": step * 12 * 32,
        }
        row |= {
            "loss": 5.0,
            "loss_mean": 5.0,
            "lr": lr_at(step, config.optim),
            "grad_norm": 1.0 + 1 / step,
        }
        row |= {"skipped": 0, "tokens_per_second": 5000.5, "mfu": None, "data_share": 0.01}
        log.append(
            row | {"order_digest": feed.state.order_digest} | (scores if step == steps else {})
        )
    content = verify(checkpoint_at(trained, 10))
    best = Best(step=0, val_loss=5.5, tokens=512, since=1)
    progress = {"step": steps, "scores": scores, "scored_at": steps, "best": best}
    unjudged = [Unjudged(step, 5.0, False) for step in (steps - 1, steps)]
    units = steps * 12 * 32  # no row says that an epoch ended
    sections = {
        "guard": {"judged": steps - 2, "unjudged": unjudged},
        "setup": {"processes": start["processes"]},
        "progress": progress,
        "losses": {"epoch": LossSum(5.0 * units, units, units)},
    }
    own = {
        name: getattr(content.state, name).model_copy(update=changes)
        for name, changes in sections.items()
    }
    state = content.state.model_copy(update={"feed": feed.state, "log": log.end()} | own)
    model, moments = ({**content.tensors(file)} for file in (MODEL, OPTIMIZER))
    counts = {name: torch.tensor(float(steps)) for name in moments if name.startswith("step.")}
    CheckpointStore(folder, log).save(Snapshot(state, dump(config), model, moments | counts))
    log.append({"event": "end", "step": steps, "outcome": "stopped", "kept": [steps]})
    log.write_config(config)
    log.write_status("stopped", steps)
    folder.release()


def measured(script, *args):
    """Peak memory of a script in GB, and its time in seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-c", MEASURED, f"{PROJECT}/scripts/{script}.py", *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert result.returncode == 0, result.stdout + result.stderr
    *_, peak = (line for line in result.stderr.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1e6, time.monotonic() - begun


@pytest.mark.slow
def test_the_memory_of_20_000_further_rows(trained, tmp_path):
    """They take less than 0.008 GB; in a report, which keeps each, less than 0.05 GB. Libraries
    take 0.3 GB with torch's CPU build, else more."""
    peaks = []
    for steps in (2_000, 22_000):
        folder = tmp_path / str(steps)
        make_long_run(trained, folder, steps)
        again = ("--config", folder / "run/config.yaml", "--train.steps", steps + 1)
        found = (
            measured("verify_run", folder / "run"),
            measured("report", folder / "run"),
            measured("train_gpt2", *again),
        )
        print(steps, *found, sep="\n")
        peaks.append([peak for peak, _ in found])
    assert all(
        after - before < most
        for before, after, most in zip(*peaks, (0.008, 0.05, 0.008), strict=True)
    ), peaks


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(corpus, tmp_path):
    """A training over 500 MB of zeros holds what one over 10 MB holds, the hashes of all shards
    checked in both. Memory of two such trainings differs by some 20 MB."""
    resident = {}
    for tokens in (5_000_000, 250_000_000):
        folder = shutil.copytree(corpus, tmp_path / str(tokens))
        file = folder / "train_000000.bin"
        header = np.fromfile(file, "<i4", 256)
        header[2] = tokens
        header.tofile(file)
        os.truncate(file, 1024 + 2 * tokens)  # sparse
        shard = {
            "file": file.name,
            "tokens": tokens,
            "bytes": file.stat().st_size,
            "sha256": sha256_file(file),
        }
        edit_manifest(folder, splits={"train": [shard]})
        changes = {
            "run_name": str(tokens),
            "train.steps": 40,
            "train.global_batch_tokens": 64 * 32,
            "train.micro_batch_size": 64,
        }
        (resident[tokens],) = run_ranks(
            resident_bytes, 1, training_config(folder, tmp_path / "runs", changes)
        )
    small, big = resident.values()
    assert big < small + 245_000_000, resident


def resident_bytes(config):
    train(config)
    return psutil.Process().memory_info().rss
