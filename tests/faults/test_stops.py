"""Stops, as people and schedulers ask for them: what
was trained is saved, or there was nothing to save."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest
from commands import ACCELERATE, ROOT, TORCHRUN, environment
from ranks import start_ranks, wait_until, write_to
from runs import assert_same, job_config, rows, saved_steps, status, train, training_config

from gpt2_ddp.config.cli import dump
from gpt2_ddp.distributed.ranks import LONGEST, on_every_rank
from gpt2_ddp.distributed.signals import exit_on_signal
from gpt2_ddp.tasks.supervised import Supervised

SLOW = pytest.mark.slow

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@SLOW
@pytest.mark.parametrize(
    ("number", "stage"), [(signal.SIGTERM, "encoding"), (signal.SIGINT, "merging")]
)
def test_a_preparation_that_is_stopped_leaves_nothing(tmp_path, number, stage):
    flags = "--tokenizer gpt2 --workers 2 --shard_tokens 20000"
    if stage == "merging":  # words that no other resembles take long to merge
        letters = np.random.default_rng(0).integers(97, 123, (100_000, 12), np.uint8)
        (tmp_path / "words.txt").write_bytes(b" ".join(map(bytes, letters)))
        flags = f"--source {tmp_path}/words.txt --vocab_size 100000"
    command = [
        sys.executable,
        *f"{ROOT}/scripts/prepare_data.py {flags} --output {tmp_path}/new/data".split(),
    ]
    with (tmp_path / "said").open("w") as said:
        pipes = {"stdout": said, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)

    def shards():
        return list(tmp_path.glob("new/.data.tmp/train_*.bin"))

    wait_until(
        lambda: shards() or "training a BPE" in (tmp_path / "said").read_text(), process=process
    )
    workers = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75
    (last,) = [line for line in errors.splitlines() if not line.endswith("received: stopping")]
    assert last.startswith(f"stopped by {signal.Signals(number).name}")
    assert list((tmp_path / "new").iterdir()) == []
    assert len(workers) >= 2
    assert not psutil.wait_procs(workers, timeout=60)[1]


def train_after_long_preparation(config, folder):
    """Trains, once the main process has prepared data for minutes."""
    rank = os.environ["RANK"]
    write_to([f"{folder}/out-{rank}", f"{folder}/err-{rank}"])
    load = Supervised.load

    def prepare():
        (folder / f"prepares-{rank}").touch()
        if rank == "0":
            for _ in range(1000):
                time.sleep(0.1)

    def prepare_and_load(self, watchdog, *more):
        watchdog.heartbeat("preparing data", timeout=LONGEST.total_seconds())
        on_every_rank(prepare)
        load(self, watchdog, *more)

    Supervised.load = prepare_and_load
    with exit_on_signal(lambda line: print(line, file=sys.stderr)):
        train(config)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_while_rank_0_prepares_data_stops_both(tmp_path, rank):
    """Each says so in two lines, without a C++ stack of the lost store."""
    config = job_config("regression", tmp_path / "runs")
    started = start_ranks(train_after_long_preparation, 2, config, tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("prepares-*"))) == 2)
    os.kill(started[rank][0].pid, signal.SIGTERM)
    for process, _ in started:
        process.join(60)
        process.kill()
    assert [process.exitcode for process, _ in started] == [75, 75]
    for file in tmp_path.glob("err-*"):
        said = file.read_text()
        assert re.fullmatch("(SIGTERM received: .*\n)?stopped by SIGTERM; .*\n", said), said
    assert not (tmp_path / "runs/run").exists()


# A command is started as people do, and signalled while it imports or trains. test_resumed.py has
# stops in evaluations, samples and saves, test_signals.py those before a training begins.

MARK = "GPT2_DDP_STOP_TEST"
LAUNCHERS = {
    "python": [sys.executable],
    "accelerate": ACCELERATE,
    "torchrun": [*TORCHRUN, "--standalone", "--nproc_per_node", "2"],
    "processes": [sys.executable],
    "nohup": ["nohup", *TORCHRUN, "--standalone", "--nproc_per_node", "2"],
}
"""`nohup` ignores a hangup for torchrun, which heeds it nevertheless. `processes` is
`--launch.processes 2`, which only the small jobs have; these two and torchrun have two ranks."""


class Cell(NamedTuple):
    """One stop: who started the command, who gets which signal and when.

    Args:
        target: launcher (the process that was started), rank (the last one), or group (every
            process, at once).
    """

    launcher: str
    target: str
    signal: str
    stage: str

    def __str__(self):
        return "-".join(map(str, self))


def command(cell, folder, corpus):
    """What a user types."""
    if cell.launcher == "processes":
        script = "train_regression"
        flags = f"--launch.processes 2 --output_dir {folder} --run_name run "
        flags += "--train.device cpu --train.epochs 40 --tracking.log_every 1"
    else:
        values = {"train.steps": 150, "train.global_batch_tokens": 8 * 32}
        values |= {"eval.every": 10**6, "checkpoint.every": 10**6}
        (folder / "config.yaml").write_text(dump(training_config(corpus, folder, values)))
        script = "train_gpt2"
        flags = f"--config {folder}/config.yaml"
    return [*LAUNCHERS[cell.launcher], f"{ROOT}/scripts/{script}.py", *flags.split()]


def finish(cell, folder, corpus):
    """Gives the cell's command until it is complete; returns the run's folder."""
    words = command(cell, folder, corpus)
    env = environment(OMP_NUM_THREADS="1")
    subprocess.run(words, env=env, cwd=ROOT, timeout=240, check=True)
    assert status(folder / "run")["state"] == "completed"
    return folder / "run"


def check(cell, folder, corpus):
    """Stops the cell's command: what was trained is saved
    in time, and nothing and nobody else is left."""
    words = command(cell, folder, corpus)
    mark = uuid.uuid4().hex
    log = folder / "stderr"
    run = folder / "run"
    with log.open("w") as errors:
        env = environment(OMP_NUM_THREADS="1", **{MARK: mark})
        pipes = {"stdout": subprocess.DEVNULL, "stderr": errors}
        process = subprocess.Popen(words, env=env, cwd=ROOT, start_new_session=True, **pipes)
    said_so = False
    try:
        await_stage(cell, folder, process, mark)
        targets = {"launcher": [process], "rank": ranks(mark)[-1:], "group": family(mark)}
        for target in targets[cell.target]:
            # the parent forwards the signal, and a rank may end before its turn
            with suppress(ProcessLookupError):
                os.kill(target.pid, signal.Signals[f"SIG{cell.signal}"])
        deadline = time.monotonic() + 60
        while (left := family(mark)) and time.monotonic() < deadline:
            said_so = said_so or status(run).get("state") == "stopped"
            process.poll()
            time.sleep(0.05)
    finally:
        for found in family(mark):
            found.kill()
        exit_code = process.wait()
    errors = log.read_text()
    assert not left
    assert exit_code == expected_code(cell), errors
    assert not re.search(r'File ".*/(gpt2_ddp|scripts)/|Exception ignored', errors), errors
    assert said_so == run.exists() == (cell.stage == "training")  # before all had ended
    if said_so:
        assert saved_steps(run)[-1] == status(run)["step"]


def expected_code(cell):
    """What the started process ends with: launchers end as they like when the signal is theirs."""
    number = signal.Signals[f"SIG{cell.signal}"]
    if cell.launcher in ("python", "processes"):
        return 75
    if cell.launcher == "accelerate":
        return 0 if cell.target == "rank" else -number
    if cell.target == "rank":
        return 1 if cell.stage == "imports" else 0
    return -number if cell.signal == "USR1" else 1  # torchrun does not know USR1


def await_stage(cell, folder, process, mark):
    metrics = folder / "run/metrics.jsonl"
    world = 1 if cell.launcher in ("python", "accelerate") else 2

    def trains():
        is_whole = metrics.exists() and metrics.read_text().endswith("\n")
        return is_whole and any(row["step"] >= 3 for row in rows(metrics.parent))

    if cell.stage == "imports":
        wait_until(lambda: len(ranks(mark)) == world, process=process)
        wait_until(
            lambda: any("libtorch" in line.path for line in ranks(mark)[-1].memory_maps()),
            process=process,
        )
    else:
        wait_until(trains, process=process)


def family(mark):
    """Every process, dead ones apart, that was started
    by the command with this mark, the oldest first."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: (process.create_time(), process.pid))


def ranks(mark):
    """The processes that train, in the order of their
    ranks: not the launcher, nor the loader's workers."""
    found = {}
    for process in family(mark):
        with suppress(psutil.Error):
            words = process.cmdline()
            rank = process.environ().get("RANK")
            launches = {"accelerate", "torchrun"} & {Path(word).name for word in words}
            is_script = any("scripts/train_" in word for word in words) and not launches
            if is_script or (rank and any("multiprocessing.spawn" in word for word in words)):
                # workers are younger than their rank
                found.setdefault(-1 if rank is None else int(rank), process)
    if len(found) > 1:
        found.pop(-1, None)  # the script that started the ranks
    return [found[rank] for rank in sorted(found)]


@SLOW
@pytest.mark.parametrize(
    "cell",
    [
        Cell("python", "launcher", "INT", "imports"),
        Cell("accelerate", "launcher", "TERM", "training"),
        Cell("torchrun", "group", "TERM", "training"),
        Cell("processes", "launcher", "TERM", "training"),
        Cell("python", "launcher", "HUP", "training"),
        Cell("nohup", "group", "HUP", "training"),
    ],
    ids=str,
)
def test_a_few_stops(cell, corpus, tmp_path):
    check(cell, tmp_path, corpus)


MATRIX = [
    Cell(launcher, *cell)
    for launcher, cell in product(
        LAUNCHERS,
        product(
            ("launcher", "rank", "group"), ("TERM", "INT", "USR1", "HUP"), ("imports", "training")
        ),
    )
    if (launcher, cell[0]) != ("python", "rank")  # its launcher is its rank
]


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory):
    """Makes, once for each launcher, a run that nothing stops."""

    def make(launcher):
        return finish(Cell(launcher, "", "", ""), tmp_path_factory.mktemp(launcher), corpus)

    return cache(make)


@pytest.mark.soak
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_all_stops(cell, corpus, tmp_path, undisturbed):
    """And the same command gives, in the end, the same numbers as one that nothing stopped."""
    check(cell, tmp_path, corpus)
    assert_same(finish(cell, tmp_path, corpus), undisturbed(cell.launcher))
