"""Ranks that stand still, die or raise in the middle
of a training: it ends soon, and names them."""

import os
import re
import signal
import socket
import sys
import time
from itertools import count, product
from pathlib import Path

import pytest
from commands import ROOT, TORCHRUN, launch
from ranks import results, start_ranks, wait_until, write_to
from runs import before_each_step, job_config, status, train

from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.reports.status import health

SOAK = pytest.mark.soak

PATIENCE = 5.0
"""Of the runs here, in which nothing should take a second."""
SILENCE = 10.0
"""What a rank that says nothing is forgiven at least."""
STEP = 9 + 4
"""Of a fault that is in a step. An epoch has 9; the second
evaluation comes after it, the second save after two."""
HOST = socket.gethostname()


def endless():
    while True:
        time.sleep(0.1)


def slow():
    time.sleep(2)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def fail():
    raise ValueError("a bad sector")


def faulty(config, folder, stage, victim, fault):
    """Trains; on rank `victim` the `fault` comes in the middle
    of `stage`, where the file `fault` is written first."""
    from gpt2_ddp.data.feed import Feed
    from gpt2_ddp.tasks.pretraining import Pretraining
    from gpt2_ddp.tasks.supervised import Supervised
    from gpt2_ddp.training.start import Trainer

    task = Pretraining if isinstance(config, TrainingConfig) else Supervised
    rank = int(os.environ["RANK"])
    # pytest's own do not survive here
    write_to([f"{folder}/stdout-{rank}", f"{folder}/stderr-{rank}"])
    places = {
        "data": (Feed, "next_step", STEP),
        "forward/backward": (task, "loss", STEP + 1),  # settling is one
        "evaluate": (task, "evaluate", 2),
        "save": (Trainer, "snapshot", 2),
        "sample": (task, "sample", 1),
    }
    place, name, at = places[stage]
    sick = range(at, at + 5) if fault is slow else [at]
    original = getattr(place, name)
    calls = count(1)

    def broken(*args, **kwargs):
        if next(calls) in sick and rank == victim:
            if fault in (stop, kill):
                # steps take milliseconds; by then the others have a heartbeat, which names the host
                time.sleep(2)
            (folder / "fault").touch()
            fault()
        return original(*args, **kwargs)

    setattr(place, name, broken)
    return train(config)


def job(folder, **changes):
    return job_config(
        "regression", folder, {"train.epochs": 3, "train.patience_seconds": PATIENCE} | changes
    )


def scene(config, world, stage, victim, fault):
    """The exit codes, and what the ranks said. The first
    error, and the reason in status.json, are of the victim."""
    folder = Path(config.output_dir)
    folder.mkdir(exist_ok=True)
    started = start_ranks(faulty, world, config, folder, stage, victim, fault)
    files = [folder / f"stderr-{rank}" for rank in range(world)]
    try:
        begun = wait_until(lambda: (folder / "fault").exists())
        spoke = wait_until(
            lambda: any(re.search("error: |Traceback", file.read_text()) for file in files)
        )
        gone = wait_until(lambda: not any(process.is_alive() for process, _ in started))
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    print(
        f"{stage} {fault.__name__} of {victim}/{world}: verdict {spoke - begun:.1f} s, gone "
        f"{gone - begun:.1f} s"
    )
    said = "\n".join(file.read_text() for file in files)
    ended = status(folder / "run")
    first = re.findall("^error: (rank.*)", said, re.MULTILINE)[0]
    assert re.match(f"rank {victim} on {HOST}: {MESSAGES[fault].format(stage)}", first)
    assert fault is fail or "Traceback" not in said
    assert "gloo" not in said
    if victim or fault in (endless, fail):
        assert ended["state"] == "failed"
        assert first in ended["reason"] or fault is fail
    return [process.exitcode for process, _ in started], said


MESSAGES = {
    stop: r"no [^\n]*; last stage: {}",
    endless: r"no [^\n]* at {}",
    kill: "ended without an error message; last stage: ",
    fail: r"ValueError: a bad sector \(at {}",
}
"""What is said of a rank with this fault in a stage."""
QUICK = {
    ("data", endless, 1),
    ("forward/backward", stop, 0),
    ("forward/backward", kill, 1),
    ("data", fail, 1),
}
CASES = [*product(("data", "forward/backward", "evaluate", "save"), MESSAGES, (0, 1))]


@pytest.mark.parametrize(
    ("stage", "fault", "victim"),
    [pytest.param(*case, marks=pytest.mark.slow if case in QUICK else SOAK) for case in CASES],
)
def test_a_sick_rank_is_named(tmp_path, stage, fault, victim):
    codes, said = scene(job(tmp_path), 2 if fault in (stop, endless) else 3, stage, victim, fault)
    if fault in (stop, endless):
        step = {"evaluate": 9, "save": 18}.get(stage, STEP)
        assert re.search(f"^error: .* {stage}, step {step}$", said, re.MULTILINE)
        assert codes[1 - victim] == 1
        assert codes[victim] == (1 if fault is endless else -signal.SIGKILL)
    elif fault is kill and victim == 0:
        assert health(tmp_path / "run").state == "dead"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "fault"), [("forward/backward", kill), ("save", endless), ("sample", fail)]
)
def test_of_ranks_that_share_a_model_one_is_named(tiny_config, tmp_path, stage, fault):
    changes = {
        "launch.parallel": "fsdp",
        "train.patience_seconds": PATIENCE,
        "tracking.sample_every": 5,
    }
    scene(tiny_config(changes), 3, stage, 1, fault)


@SOAK
@pytest.mark.parametrize("victim", [0, 1])
def test_a_slow_rank_is_not_accused(tmp_path, victim):
    """Steps of milliseconds, and then some of two
    seconds, of which one rank alone needs nearly all."""
    started = start_ranks(faulty, 2, job(tmp_path), tmp_path, "forward/backward", victim, slow)
    assert results(started, timeout=180) == ["completed"] * 2


def endless_steps(config, folder):
    """Trains in steps of a tenth of a second, until the file `enough` is there."""

    def wait(run):
        if run.step == STEP:
            (folder / f"here-{run.accelerator.process_index}").touch()
            while not (folder / "enough").exists():
                run.watchdog.progress()
                time.sleep(0.1)

    before_each_step(wait)
    return train(config)


@SOAK
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_all_ranks_suspended_and_woken_in_any_order_go_on(tmp_path, order):
    config = job_config("regression", tmp_path, {"train.patience_seconds": PATIENCE})
    started = start_ranks(endless_steps, 2, config, tmp_path)
    wait_until(lambda: all((tmp_path / f"here-{rank}").exists() for rank in order), 120)
    for number, seconds in (signal.SIGSTOP, SILENCE + 15), (signal.SIGCONT, 3):
        for rank in order:
            os.kill(started[rank][0].pid or 0, number)
            time.sleep(SILENCE / 2)
        time.sleep(seconds)
    (tmp_path / "enough").touch()
    assert results(started, timeout=180) == ["completed"] * 2


@SOAK
@pytest.mark.parametrize(
    ("fault", "victim"), [(stop, 0), (stop, 1), (endless, 0), (kill, 1), (fail, 1)]
)
def test_under_torchrun(tmp_path, fault, victim):
    flags = ["--nproc_per_node", "2", "--master_port", str(reserve_port())]
    command = [*TORCHRUN, *flags, __file__, str(tmp_path), "data", str(victim), fault.__name__]
    assert launch(command, PYTHONPATH=f"{ROOT}:{ROOT}/tests", OMP_NUM_THREADS="1").returncode == 1
    named = f"rank {victim} on {HOST}: "
    assert any(f"error: {named}" in file.read_text() for file in tmp_path.glob("stderr-*"))
    assert named in status(tmp_path / "run")["reason"] or (fault, victim) == (stop, 0)


if __name__ == "__main__":
    folder, stage, victim, fault = sys.argv[1:]
    faulty(job(Path(folder)), Path(folder), stage, int(victim), globals()[fault])
