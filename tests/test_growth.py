"""Long runs: memory and time of a resume, a report and a check of 300,000 rows."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from ranks import run_ranks
from runs import edit_manifest, reseal, train, training_config
from safetensors.torch import load_file, save_file

from gpt2_ddp.checkpoint.checkpoint import CONFIG, OPTIMIZER, STATE, checkpoint_ref, verify
from gpt2_ddp.checkpoint.run_files import HASH, METRICS, STATUS, next_chain
from gpt2_ddp.config.cli import dump
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.files import sha256_file
from gpt2_ddp.model.optim import lr_at
from gpt2_ddp.project import PROJECT
from gpt2_ddp.state import FIRST_CHAIN, NO_SAMPLES, Best, LogEnd
from gpt2_ddp.tasks.supervised import contiguous

SCORES = {"val_loss": 5.5, "val_tokens": 512, "val_bits_per_byte": 3.0}
MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""


def make_long_run(trained: Path, folder: Path, steps: int) -> None:
    """A stopped run of so many steps, each with a row, and a checkpoint at the last. All records agree."""
    rare = {"eval.every": 10**9, "checkpoint.every": 10**9}
    config = training_config(trained.parent / "data", folder, {"train.steps": steps, "optim.decay_steps": 10, **rare})
    run, last = folder / "run", f"checkpoints/step-{steps:08d}"
    shutil.copytree(trained / "checkpoints/step-00000010", run / last)
    facts = next(json.loads(line) for line in (trained / METRICS).read_text().splitlines())
    facts |= {"steps": steps, "config": config.model_dump(mode="json"), "kept": [], HASH: NO_SAMPLES}
    feed = Feed(Permutation(config.seed, facts["epoch_size"]), GlobalBatch(12, contiguous(1, 1)))
    chain = FIRST_CHAIN
    with (run / METRICS).open("w") as stream:

        def append(row: dict) -> None:
            nonlocal chain
            text = json.dumps({name: value for name, value in row.items() if name != "chain"})
            chain = next_chain(chain, text)
            stream.write(f'{text[:-1]}, "chain": "{chain}"}}\n')

        append(facts)
        append({"step": 0, "epoch": 0.0, "tokens": 0, **SCORES})
        for step in range(1, steps + 1):
            feed.next_step()
            row = {"step": step, "epoch": round(feed.position / len(feed.order), 4), "tokens": step * 12 * 32}
            row |= {"loss": 5.0, "loss_mean": 5.0, "lr": lr_at(step, config.optim), "grad_norm": 1.0 + 1 / step}
            row |= {"skipped": 0, "tokens_per_second": 5000.5 + step % 7, "mfu": None, "data_share": 0.01}
            row["order_digest"] = feed.order_digest
            append(row | (SCORES if step == steps else {}))
        stream.flush()
        before = verify(run / last).state
        best = Best(step=0, val_loss=5.5, tokens=512, since=1)
        progress = {"step": steps, "scores": SCORES, "scored_at": steps, "best": best}
        state = before.model_copy(
            update={
                "progress": before.progress.model_copy(update=progress),
                "feed": feed.state_dict(),
                "guard": before.guard.model_copy(update={"judged": steps - 2}),
                "setup": before.setup.model_copy(update={"processes": facts["processes"]}),
                "log": LogEnd(chain=chain, bytes=(run / METRICS).stat().st_size),
            }
        )
        (run / last / STATE).write_text(state.to_json())
        (run / last / CONFIG).write_text(dump(config))
        moments = load_file(run / last / OPTIMIZER)
        moments |= {name: value.fill_(steps) for name, value in moments.items() if name.startswith("step.")}
        save_file(moments, run / last / OPTIMIZER)
        for name in (STATE, CONFIG, OPTIMIZER):
            reseal(run / last / name)
        append({"event": "checkpoint", **checkpoint_ref(run / last), "kept": [steps]})
        append({"event": "end", "step": steps, "outcome": "stopped", "kept": [steps]})
    (run / CONFIG).write_text(dump(config))
    (run / STATUS).write_text(json.dumps({"state": "stopped", "step": steps, "reason": ""}))


def measured(script: str, *args: object) -> tuple[float, float]:
    """Peak memory of a script in GB, and its time in seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-c", MEASURED, str(PROJECT / f"scripts/{script}.py"), *map(str, args)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT)
    assert result.returncode == 0, result.stdout + result.stderr
    *_, peak = (line for line in result.stderr.splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1e6, time.monotonic() - begun


@pytest.mark.slow
def test_the_memory_of_300_000_rows(trained, tmp_path):
    """290,000 further rows take less than 0.12 GB. Libraries take 0.3 GB with torch's CPU build, else more."""
    peaks = []
    for steps in (10_000, 300_000):
        folder = tmp_path / str(steps)
        make_long_run(trained, folder, steps)
        found = {"verify_run": measured("verify_run", folder / "run"), "report": measured("report", folder / "run")}
        again = ("--config", folder / "run/config.yaml", "--train.steps", steps + 1)
        found["train_gpt2"] = measured("train_gpt2", *again)
        print(steps, {script: f"{peak:.3f} GB, {seconds:.1f} s" for script, (peak, seconds) in found.items()})
        peaks.append([peak for peak, _ in found.values()])
    assert all(after - before < 0.12 for before, after in zip(*peaks, strict=True)), peaks


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(corpus, tmp_path):
    """A training over 300 MB of zeros holds what one over 10 MB holds, the hashes of all shards checked in both."""
    resident = {}
    for tokens in (5_000_000, 150_000_000):
        folder = Path(shutil.copytree(corpus, tmp_path / str(tokens)))
        file = folder / "train_000000.bin"
        with file.open("r+b") as shard:
            header = np.frombuffer(shard.read(1024), "<i4").copy()
            header[2] = tokens
            shard.seek(0)
            shard.write(header.tobytes())
            shard.truncate(1024)
            shard.truncate(1024 + 2 * tokens)  # sparse
        shard = {"file": file.name, "tokens": tokens, "bytes": file.stat().st_size, "sha256": sha256_file(file)}
        edit_manifest(folder, splits={"train": [shard]})
        changes = {"run_name": str(tokens), "train.steps": 40, "train.global_batch_tokens": 64 * 32}
        (resident[tokens],) = run_ranks(resident_bytes, 1, training_config(folder, tmp_path / "runs", changes))
    small, big = resident.values()
    assert big < 1.05 * small, resident


def resident_bytes(config: TrainingConfig) -> int:
    train(config)
    return psutil.Process().memory_info().rss
