"""The programs of docs/first-steps.md: any number of processes, and the full job, end at the same line."""

import re
import runpy
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from close import assert_close, distance
from commands import ROOT, TORCHRUN, environment, forked
from conftest import once
from ranks import free_port, rank_environment
from runs import newest_checkpoint
from safetensors.torch import load_file

FIRST = ROOT / "scripts/hello_ddp.py"
TRAINER = ROOT / "scripts/hello_trainer.py"
GPT = ROOT / "scripts/hello_gpt.py"
ALL = [FIRST, TRAINER, GPT]


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.stem)
def test_it_stands_alone_and_is_as_short_as_the_pages_say(script):
    lines = len(script.read_text().splitlines())
    assert lines <= {TRAINER: 120, GPT: 180}.get(script, 62)
    assert not re.search(r"^\s*(import|from) gpt2_ddp", script.read_text(), re.MULTILINE)
    for page, text in (("first-steps.md", f"It has {lines} lines."), ("first-steps.zh-CN.md", f"它有 {lines} 行")):
        assert text in (ROOT / "docs" / page).read_text(encoding="utf-8")


MORE = [(script, 1, "LOCAL_WORLD_SIZE", "2", "more processes than GPUs; start fewer") for script in ALL]
UNEQUAL = [
    (TRAINER, 0, "WORLD_SIZE", "5", "these processes cannot share 1200 points equally; start 1, 2, 3, 4"),
    (GPT, 0, "WORLD_SIZE", "3", "these processes cannot share 16 windows equally; start 1, 2 or 4"),
]
NO_DATA = GPT, 0, "WORLD_SIZE", "1", r"data/stdlib is missing; run: python scripts/prepare_data\.py --config"


@pytest.mark.parametrize(("script", "gpus", "variable", "processes", "message"), [*MORE, *UNEQUAL, NO_DATA])
def test_what_cannot_start_ends_with_one_line(script, gpus, variable, processes, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.setenv(variable, processes)
    monkeypatch.setattr("sys.argv", [str(script)])
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        runpy.run_path(str(script), run_name="__main__")


def saved_line(folder: Path) -> torch.Tensor:
    """Weight and bias that hello_ddp.py has saved here."""
    saved = torch.load(folder / "runs/hello_ddp.pt")
    return torch.cat([value.flatten() for value in saved.values()])


@pytest.mark.slow
def test_the_program_and_the_full_job_end_at_the_same_line(tmp_path):
    """Each on 1 and 2 processes. The last of the 40 steps moves the line by 8e-5."""
    env = environment(OMP_NUM_THREADS="1")
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(FIRST)]
    ends = []
    for processes, start in (
        (1, lambda: forked([str(FIRST)], tmp_path)),
        (2, lambda: subprocess.run(torchrun, cwd=tmp_path, env=env, capture_output=True, text=True)),
    ):
        found = start()
        assert found.returncode == 0, found.stderr
        assert found.stdout.startswith(f"y = 1.9997 x + 3.0009, loss 0.0103; processes: {processes}\nnext: ")
        ends.append(saved_line(tmp_path))
    flags = "--train.global_batch_size 10000 --train.epochs 40 --optim.lr 0.1"
    assert f"python scripts/train_regression.py {flags}" in (ROOT / "docs/first-steps.md").read_text()
    for processes in "12":
        own = ["--launch.processes", processes, "--run_name", processes, "--output_dir", str(tmp_path)]
        own += ["--eval.every", "40", "--checkpoint.save_every", "40"]
        found = forked([str(ROOT / "scripts/train_regression.py"), *flags.split(), *own], tmp_path)
        assert found.returncode == 0, found.stderr
        saved = load_file(newest_checkpoint(tmp_path / processes) / "model.safetensors")
        ends.append(torch.stack([saved["linear.weight"][0, 0], saved["linear.bias"][0]]))
    for end in ends:
        assert_close(end, ends[0], 1e-5, says=ends)


ENDS = """
import glob, runpy, sys
from torch.nn.parallel import DistributedDataParallel as DDP
for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
    del sys.modules[name]
init = DDP.__init__
def init_and_import(*args, **kwargs):
    init(*args, **kwargs)
    import torch.distributed.nn.functional  # as the first step of an optimizer does
DDP.__init__, sys.argv = init_and_import, {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
threads = [open(file).read() for file in glob.glob("/proc/self/task/*/comm")]
assert not [name for name in threads if "gloo" in name], threads
"""
"""Runs a program, whose process group must end with it: a thread of gloo that wants Python's lock while the interpreter
shuts down aborts the process ("terminate called without an active exception")."""


def run_trainer(folder: Path, world: int) -> None:
    """Runs hello_trainer.py on forked ranks."""
    alone = rank_environment(0, 1, free_port()) if world == 1 else {}
    done = forked(["-c", ENDS.format(argv=[str(TRAINER)])], folder, world, **alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"; processes: {world}\nnext: docs/ddp-lab.md, common mistakes with DDP\n")


def end_of(folder: Path) -> torch.Tensor:
    """Weight, bias, and the momentum of both, after the last step."""
    snapshot = torch.load(folder / "runs/hello_trainer.pt")
    assert snapshot["step"] == 80
    momenta = [state["momentum_buffer"] for state in snapshot["optimizer"]["state"].values()]
    return torch.cat([part.flatten() for part in (*snapshot["line"].values(), *momenta)])


KILLED = """
import os, runpy, signal, sys
from torch.nn.parallel import DistributedDataParallel as DDP
saves, replace, local, no_sync = [], os.replace, [], DDP.no_sync
DDP.no_sync = lambda self: local.append(self) or no_sync(self)
def replace_or_die(*names):
    saves.append(names)
    if len(saves) == 6:
        print("backward passes under no_sync:", len(local), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
os.replace, sys.argv = replace_or_die, {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Rank 0 dies within the last save, at step 80, and prints how many of its backward passes sent nothing."""


@pytest.fixture
def whole_trainer(tmp_path_factory):
    """The end of the trainer without interruption, which runs once for all tests."""
    return lambda world: end_of(once(tmp_path_factory, f"hello_trainer-{world}", lambda to: run_trainer(to, world)))


def resumed(folder: Path, *worlds: int) -> torch.Tensor:
    """The end of a training that `worlds[0]` processes begin, of which the first is killed at step 80, and that
    `worlds[1]` processes resume."""
    killed = forked(["-c", KILLED.format(argv=[str(TRAINER)])], folder, worlds[0])
    assert f"backward passes under no_sync: {80 * (12 // worlds[0] - 1)}\n" in killed.stdout
    done = forked([str(TRAINER)], folder, worlds[1])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resumed at step 75 of 80; "), "within an epoch"
    return end_of(folder)


def test_a_killed_trainer_resumes_and_ends_at_the_same_bits(whole_trainer, tmp_path):
    assert torch.equal(resumed(tmp_path, 2, 2), whole_trainer(2))


@pytest.mark.slow
def test_any_number_of_processes_ends_at_the_same_line(whole_trainer, tmp_path):
    """Also after a resume on another number."""
    for end in (whole_trainer(2), resumed(tmp_path, 2, 3)):
        assert_close(end, whole_trainer(1), 1e-5)


@pytest.mark.slow
def test_the_trainer_in_mixed_precision_by_torchrun(whole_trainer, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(TRAINER), "--amp", "bf16"]
    subprocess.run(command, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), check=True)
    found, plain = end_of(tmp_path)[:2], whole_trainer(2)[:2]
    assert_close(found, plain, 4e-2)
    assert distance(found, plain) > 1e-5, "bf16 rounds"
