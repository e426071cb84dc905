"""Stops, as people and schedulers ask for them: what was trained is saved, or there was nothing to save."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from commands import ROOT, environment
from matrix import BEFORE_TRAINING, STAGES, Cell, disturb, equal, finish
from ranks import run_ranks, wait_until

from gpt2_ddp.data.feed import Feed, GlobalBatch, interleaved
from gpt2_ddp.data.order import Order

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Numbers:
    """Items are numbers; a worker that is asked for one of `stuck` never answers."""

    def __init__(self, n: int, stuck: tuple[int, ...] = ()):
        self.n, self.stuck, self.reader = n, stuck, os.getpid()

    def __len__(self) -> int:
        return self.n

    def read(self, items: np.ndarray) -> tuple[torch.Tensor, ...]:
        if os.getpid() != self.reader and set(items.tolist()) & set(self.stuck):
            time.sleep(600)
        return (torch.from_numpy(items),)


def load_under_signals() -> int:
    """Loads with three workers that are signalled from their first moment on; returns how many signals they got."""
    from gpt2_ddp.distributed.launch import build_accelerator

    multiprocessing.set_start_method("fork", force=True)
    accelerator, sent, over = build_accelerator("cpu", "no"), 0, threading.Event()

    def flood() -> None:
        nonlocal sent
        while not over.is_set():
            for worker in psutil.Process().children():
                for number in SIGNALS:
                    worker.send_signal(number)
                    sent += 1

    threading.Thread(target=flood, daemon=True).start()
    feed = Feed(Order(1, 1000), GlobalBatch(6, interleaved(1, 2)), Numbers(1000), accelerator, workers=3)
    for _ in range(20):
        step = feed.next_step()
        delivered = [batch.rows[0] for batch in step.micro_batches]
        assert torch.cat(delivered).tolist() == step.items.tolist()
        time.sleep(0.01)
    over.set()
    return sent


def test_loader_workers_outlive_signals_to_their_group():
    assert run_ranks(load_under_signals, 1)[0] > 50


def leave_stuck_workers() -> tuple[float, int]:
    """Seconds that it takes to leave four workers of which three never answer, and how many are there after that."""
    from gpt2_ddp.distributed.launch import build_accelerator

    multiprocessing.set_start_method("fork", force=True)
    accelerator, later = build_accelerator("cpu", "no"), Order(1, 1000).items_at(np.arange(5, 40)).tolist()
    source, batch = Numbers(1000, stuck=tuple(later)), GlobalBatch(1, interleaved(1, 1))
    feed = Feed(Order(1, 1000), batch, source, accelerator, workers=4)
    list(feed.next_step().micro_batches)
    workers = psutil.Process().children()
    begun = time.monotonic()
    feed.seek(500, feed.order_digest, [])
    seconds = time.monotonic() - begun
    assert len(workers) == 4
    return seconds, len(psutil.wait_procs(workers, timeout=5)[1])


@pytest.mark.slow
def test_stuck_workers_hold_nothing_up():
    seconds, alive = run_ranks(leave_stuck_workers, 1)[0]
    assert seconds < 30
    assert not alive


@pytest.mark.slow
@pytest.mark.parametrize(("number", "stage"), [
    (signal.SIGTERM, "encoding"), (signal.SIGINT, "merging"),
    pytest.param(signal.SIGUSR1, "encoding", marks=pytest.mark.soak),
])  # fmt: skip
def test_a_preparation_that_is_stopped_leaves_nothing(tmp_path, number, stage):
    flags = ["--tokenizer", "gpt2", "--workers", "2", "--shard_tokens", "20000"]
    if stage == "merging":  # words that no other resembles take long to merge
        letters = np.random.default_rng(0).integers(97, 123, (300_000, 12), np.uint8)
        (tmp_path / "words.txt").write_bytes(b" ".join(map(bytes, letters)))
        flags = ["--source", str(tmp_path / "words.txt"), "--vocab_size", "100000"]
    with (tmp_path / "said").open("w") as said:
        command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), *flags, "--output", f"{tmp_path}/new/data"]
        pipes = {"stdout": said, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)
    shards = lambda: list(tmp_path.glob("new/.data.tmp/train_*.bin"))  # noqa: E731
    wait_until(lambda: shards() or "merging" in (tmp_path / "said").read_text(), process=process)
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    last = f"stopped by {signal.Signals(number).name}; nothing was lost: run the same command again"
    assert [line for line in errors.splitlines() if not line.endswith("received: stopping")] == [last]
    assert not (tmp_path / "new").exists()
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=5)[1]


def code(cell: Cell) -> int:
    """What the started process ends with: launchers end as they like when the signal is theirs."""
    number = signal.Signals[f"SIG{cell.signal}"]
    if cell.launcher in ("python", "processes"):
        return 75
    if cell.launcher == "accelerate":
        return 0 if cell.target == "rank" else -number
    if cell.target == "rank":
        return 1 if cell.stage in BEFORE_TRAINING else 0
    return -number if cell.signal == "USR1" else 1  # torchrun does not know USR1


def check(cell: Cell, folder: Path, corpus: Path) -> None:
    """Stops the cell's command: what was trained is saved in time, and nothing and nobody else is left."""
    seen = disturb(cell, folder, corpus)
    print(cell, seen.code, seen.status, seen.seconds)
    assert not seen.left
    assert seen.code == code(cell), seen.errors
    assert not re.search(r'File ".*/(gpt2_ddp|scripts)/|Exception ignored', seen.errors), seen.errors
    if cell.stage in BEFORE_TRAINING:
        assert not seen.folder_is_there
    else:
        assert seen.status["state"] == "stopped", seen.errors
        assert (folder / f"run/checkpoints/step-{seen.status['step']:08d}").is_dir()
        assert "stopped" in seen.seconds, "before all had ended"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cell",
    [
        Cell("python", "launcher", "INT", "imports"),
        Cell("accelerate", "launcher", "TERM", "imports"),
        Cell("accelerate", "launcher", "TERM", "training"),
        Cell("torchrun", "rank", "USR1", "hashing"),
        Cell("torchrun", "group", "TERM", "training", workers=2),
        Cell("processes", "launcher", "TERM", "training"),
    ],
    ids=str,
)
def test_a_few_stops(cell, corpus, tmp_path):
    check(cell, tmp_path, corpus)


MATRIX = [
    Cell(launcher, target, name, stage, workers)
    for launcher in ("python", "accelerate", "torchrun", "processes")
    for stage in (STAGES if launcher != "processes" else ("imports", "training"))
    for target in ("launcher", "rank", "group")
    for name in ("TERM", "INT", "USR1")
    for workers in ((0,) if stage in BEFORE_TRAINING or launcher == "processes" else (0, 2))
    if (launcher, target) != ("python", "rank")  # its launcher is its rank
]


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory):
    """Makes, once for each launcher, a run that nothing stops."""
    made: dict[str, Path] = {}

    def make(launcher: str) -> Path:
        if launcher not in made:
            cell = Cell(launcher, "launcher", "TERM", "training")
            made[launcher] = finish(cell, tmp_path_factory.mktemp("undisturbed"), corpus)
        return made[launcher]

    return make


@pytest.mark.soak
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_all_stops(cell, corpus, tmp_path, undisturbed):
    """And the same command gives, in the end, the same numbers as one that nothing stopped."""
    check(cell, tmp_path, corpus)
    assert equal(finish(cell, tmp_path, corpus), undisturbed(cell.launcher))
