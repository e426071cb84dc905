"""Processes from Python: results and mistakes come back, signals go out, nobody is left behind."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from commands import ACCELERATE, ROOT, TORCHRUN, environment, launch
from ranks import free_port
from runs import rows

from gpt2_ddp.errors import UserError
from gpt2_ddp.processes.signals import Stopped
from gpt2_ddp.processes.spawn import run_processes, start_processes


def who_am_i(word: str) -> list[str]:
    return [word, *[os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]]


def fail(rank: str, how: str) -> str:
    if os.environ["RANK"] == rank:
        if how == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
        if how == "mistake":
            raise UserError("field", "value", "cure")
        if how == "crash":
            raise RuntimeError("a bug")
        os.kill(os.getpid(), signal.SIGKILL)
    if how != "mistake":
        time.sleep(600)
    return "done"


def test_the_main_ranks_result_comes_back():
    before = dict(os.environ)
    assert run_processes(who_am_i, 2, "hello") == ["hello", "0", "0", "2", "2"]
    assert dict(os.environ) == before


def test_without_processes_it_is_a_call(monkeypatch):
    assert run_processes(os.getpid, None) == os.getpid()
    monkeypatch.setenv("RANK", "0")
    assert run_processes(os.getpid, 2) == os.getpid()


def start_from_a_fresh_process() -> tuple[int, str | None, str, int]:
    """Its pid, rank and start method; and the pid of what it forks, which stays, like a loader's worker that is stuck
    in a disk."""
    if child := os.fork():
        return os.getpid(), os.environ.get("RANK"), multiprocessing.get_start_method(), child
    time.sleep(30)
    os._exit(0)


def test_one_fresh_process_has_no_rank_starts_others_as_usual_and_is_alone_waited_for():
    """Loader workers that are spawned, too, would import torch in every evaluation."""
    process, rank, method, child = start_processes(start_from_a_fresh_process, 1)
    assert process != os.getpid()
    assert rank is None
    assert method == multiprocessing.get_start_method()
    left = psutil.Process(child)
    assert left.status() != psutil.STATUS_ZOMBIE
    left.kill()


def test_a_mistake_comes_back_as_one():
    with pytest.raises(UserError, match="field = value: cure"):
        run_processes(fail, 2, "0", "mistake")


def test_a_mistake_that_another_rank_meets_alone_ends_with_2():
    with pytest.raises(SystemExit) as end:
        run_processes(fail, 2, "1", "mistake")
    assert end.value.code == 2


@pytest.mark.parametrize("how", ["crash", "kill"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_crash_of_one_ends_all(monkeypatch, capfd, rank, how):
    """The other rank would sleep for ten minutes, like one that waits in a collective."""
    monkeypatch.setattr("gpt2_ddp.processes.spawn.GRACE_SECONDS", 0.5)
    with pytest.raises(SystemExit) as end:
        run_processes(fail, 2, rank, how)
    assert end.value.code == 1
    errors = capfd.readouterr().err
    assert "a process crashed (exit codes rank 0: " in errors
    assert ("a bug" in errors) == (how == "crash")
    assert not psutil.Process().children() or all(
        "rank" not in str(child.cmdline()) for child in psutil.Process().children()
    )


def test_a_rank_that_is_stopped_on_its_own_stops_all(monkeypatch, capfd):
    """The other rank would sleep for ten minutes, and is told, not killed."""
    monkeypatch.setattr("gpt2_ddp.processes.spawn.GRACE_SECONDS", 600)
    with pytest.raises(Stopped, match="a signal to a rank"):
        run_processes(fail, 2, "1", "stop")
    assert not capfd.readouterr().err


REGRESSION = [str(ROOT / "scripts/train_regression.py"), "--train.device", "cpu"]


def long_run(tmp_path: Path) -> subprocess.Popen:
    """Two processes started from Python, in a run that would take for ever."""
    command = [sys.executable, *REGRESSION, "--output_dir", str(tmp_path), "--launch.processes", "2"]
    process = subprocess.Popen(
        [*command, "--train.epochs", "1000000"], env=environment(), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "regression/metrics.jsonl"
    deadline = time.monotonic() + 90
    while not metrics.exists() or len(rows(metrics.parent)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process


def state(tmp_path: Path) -> str:
    return json.loads((tmp_path / "regression/status.json").read_text())["state"]


@pytest.mark.slow
def test_sigterm_stops_all_with_a_checkpoint_and_75(tmp_path):
    process = long_run(tmp_path)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert state(tmp_path) == "stopped"
    assert "Traceback" not in errors


@pytest.mark.slow
def test_kill_9_of_the_parent_leaves_no_orphans(tmp_path):
    process = long_run(tmp_path)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert not alive
    assert state(tmp_path) == "stopped"


LAUNCHERS = {
    "python": [sys.executable],
    "from Python": [sys.executable],
    "torchrun": [*TORCHRUN, "--nproc_per_node", "2"],
    "accelerate": [*ACCELERATE, "--multi_gpu", "--num_processes", "2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.soak if way == "torchrun" else ()) for way in LAUNCHERS]
)
def test_regression_by_every_launcher(tmp_path, way):
    port = {"torchrun": "--master_port", "accelerate": "--main_process_port"}.get(way)
    launcher = LAUNCHERS[way] + ([port, str(free_port())] if port else [])
    flags = ["--launch.processes", "2"] if way == "from Python" else []
    flags += ["--train.epochs", "4", "--output_dir", str(tmp_path)]
    found = launch([*launcher, *REGRESSION, *flags])
    assert found.returncode == 0, found.stderr
    words = found.stdout.replace(",", "").split()
    weight, bias, loss = (float(words[words.index(name) + 1]) for name in ("weight", "bias", "loss"))
    assert weight == pytest.approx(2, abs=0.02)
    assert bias == pytest.approx(3, abs=0.02)
    assert loss == pytest.approx(0.01, abs=0.001)
    processes = json.loads((tmp_path / "regression/checkpoints/step-00001252/state.json").read_text())["processes"]
    assert processes == (1 if way == "python" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize(
    ("script", "flags", "field"),
    [
        ("train_classifier.py", ["--model.name", "vgg"], "model.name = vgg"),
        ("train_classifier.py", ["--config", "configs/cifar100_lenet.yaml", "--data.path", "/no/such"], "data.path"),
        ("train_classifier.py", ["--config", "configs/cifar100_lenet.yaml"], "data.name = cifar100"),
        ("train_classifier.py", ["--config", "configs/cifar100_resnet18.yaml", "--model.sync_batchnorm"], "model.sync"),
        ("train_transformer.py", ["--model.n_embd", "13"], "model.n_embd = 13"),
        ("train_regression.py", ["--train.global_batch_size", "0"], "train.global_batch_size = 0"),
    ],
)
def test_wrong_input_ends_with_2_and_one_line(tmp_path, script, flags, field, processes):
    command = [sys.executable, str(ROOT / "scripts" / script), *flags, "--output_dir", str(tmp_path)]
    found = launch([*command, "--train.device", "cpu", "--launch.processes", processes], HF_HUB_OFFLINE="1")
    assert found.returncode == 2, found.stderr
    lines = found.stderr.splitlines()
    assert len(lines) == 1, found.stderr
    assert lines[0].startswith(f"error: {field}")
