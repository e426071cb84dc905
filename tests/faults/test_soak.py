"""Half an hour of random faults on one run of two processes, beside the same run left alone.

Every round starts the run again and does one thing to it: it is killed, stopped, suspended; a rank raises, hangs, flips
a bit of its weights or finds the disk full; between rounds, files of the run folder are damaged.
Its data hold a stretch that makes every gradient NaN. Nobody repairs anything. At the end, the run's digest and weights
are those of the run that was left alone.
"""

import itertools
import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from disk import interpose, refuse
from faults.mutations import flip
from ranks import start_ranks
from runs import (
    before_each_step,
    newest_checkpoint,
    same,
    saved_steps,
    state_of,
    status,
    train_with_faults,
    training_config,
    weights,
)

SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("SOAK_SEED", "1337"))
PATIENCE = 8
POISON = (24 * 400, 24 * 406)
"""Positions whose gradients are NaN, in the run that is left alone as well."""

INSIDE = ("raise", "hang", "flip", "full disk")
OUTSIDE = ("kill", "kill all", "term", "int", "usr1", "suspend")
BETWEEN = ("nothing", "nothing", "flip a file", "torn rows", "no status")


def trains(config, fault, rank, after, number):
    """Trains; `fault` happens on that rank when this process has taken `after` steps."""
    taken = itertools.count(1)

    def happen(run):
        if next(taken) != after or run.accelerator.process_index != rank:
            return
        if fault == "raise":
            raise ZeroDivisionError("a rank of the soak raises")
        if fault == "hang":
            time.sleep(10**6)
        if fault == "flip":
            parameter = random.choice(run.parameters)
            parameter.data.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << (number % 31))

    if fault == "full disk":
        written = itertools.count(1)

        def tell(operation, name):
            if next(written) > number % 200 + 20:
                refuse()

        interpose(Path(config.output_dir), tell)
    before_each_step(happen)
    return train_with_faults(config, POISON)


def settings(corpus, folder, steps):
    changes = {"train.steps": steps, "train.global_batch_tokens": 24 * 32, "train.micro_batch_size": 4}
    changes |= {"train.patience_seconds": PATIENCE, "eval": {"every": 150, "tokens": 4000}}
    changes |= {"guard.patience": 3, "checkpoint": {"every": 25, "keep_last": 2}}
    return training_config(corpus, folder, changes | {"model.dropout": 0.1, "optim.decay_steps": 100_000})


def ended(started, seconds):
    """Whether all ranks end within that time; those that do not are killed."""
    deadline = time.monotonic() + seconds
    for process, _ in started:
        process.join(max(deadline - time.monotonic(), 0))
    alive = [process for process, _ in started if process.is_alive()]
    for process in alive:
        process.kill()
        process.join()
    return not alive


def damage(run, what, rng):
    if what == "flip a file" and len(saved_steps(run)) > 1:
        file = rng.choice([*newest_checkpoint(run).iterdir()])
        file.write_bytes(flip(file.read_bytes(), rng))
    if what == "torn rows" and (run / "metrics.jsonl").is_file():
        with (run / "metrics.jsonl").open("a") as rows:
            rows.write('{"step": 10, "lo')
    if what == "no status":
        (run / "status.json").unlink(missing_ok=True)


@pytest.mark.soak
def test_soak(corpus, tmp_path):
    rng, begun = random.Random(SEED), time.monotonic()
    print(f"\nseed {SEED}, {SECONDS:.0f} s")

    steps = max(int(SECONDS * 2), 600)
    alone = settings(corpus, tmp_path / "alone", steps)
    started, memory, files = start_ranks(trains, 2, alone, "", 0, 0, 0), [], []
    processes = [psutil.Process(process.pid) for process, _ in started]
    while started[0][0].is_alive():
        time.sleep(1)
        with suppress(psutil.Error):  # they end
            memory.append(sum(process.memory_info().rss for process in processes))
            files.append(sum(process.num_fds() for process in processes))
    assert ended(started, 60)
    assert status(tmp_path / "alone/run")["state"] == "completed"
    part = len(files) // 4
    early, late = ((median(memory[of]), min(files[of])) for of in (slice(part, 2 * part), slice(-part, None)))
    print(f"left alone: {steps} steps; bytes of memory and open files {early} -> {late}")
    assert late[0] < 1.02 * early[0]
    assert late[1] <= early[1]  # a save opens files for a moment

    config, run, counts, rounds = settings(corpus, tmp_path / "soaked", steps), tmp_path / "soaked/run", {}, 0
    while time.monotonic() - begun < SECONDS - 30 and status(run).get("state") != "completed":
        fault, rank, after = rng.choice(INSIDE + OUTSIDE), rng.randrange(2), rng.randrange(1, 120)
        started = start_ranks(trains, 2, config, fault, rank, after, rng.randrange(10**6))
        if fault in OUTSIDE:
            time.sleep(rng.uniform(1, 12))
            number = {"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1, "suspend": signal.SIGSTOP}
            for other, (process, _) in enumerate(started):
                if (other == rank or fault == "kill all") and process.is_alive():
                    os.kill(process.pid, number.get(fault, signal.SIGKILL))
        limit = 90 if fault in INSIDE else 15 if "kill" in fault else PATIENCE + 50
        in_time = ended(started, limit)
        counts[fault] = counts.get(fault, 0) + 1
        rounds += 1
        print(f"{time.monotonic() - begun:6.0f} s  {fault:10} on rank {rank}: {status(run)}"[:200], flush=True)
        assert in_time, f"{fault} on rank {rank}: not ended after {limit} s"
        damage(run, rng.choice(BETWEEN), rng)
    last = start_ranks(trains, 2, config, "", 0, 0, 0)
    assert ended(last, SECONDS)
    print(f"{rounds} rounds: {counts}")
    assert status(run)["state"] == "completed", status(run)
    assert state_of(run)["feed"] == state_of(tmp_path / "alone/run")["feed"]
    assert same(weights(run), weights(tmp_path / "alone/run"))
    shutil.rmtree(run)
