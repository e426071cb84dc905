"""The programs of docs/first-steps.md: any number of
processes, and the full job, end at the same line."""

import re
import runpy
import signal

import pytest
import torch
from close import assert_close
from commands import ROOT, TORCHRUN, forked, launch
from runs import newest_checkpoint
from safetensors.torch import load_file

FIRST = ROOT / "scripts/hello_ddp.py"
GPT = ROOT / "scripts/hello_gpt.py"
ALL = [FIRST, GPT]


@pytest.mark.parametrize("script", ALL, ids=lambda script: script.stem)
def test_it_stands_alone_and_is_as_short_as_the_pages_say(script):
    lines = len(script.read_text().splitlines())
    assert not re.search(r"^\s*(import|from) gpt2_ddp", script.read_text(), re.MULTILINE)
    assert f"It has {lines} lines." in (ROOT / "docs/first-steps.md").read_text()


@pytest.mark.parametrize(
    ("script", "gpus", "variable", "processes", "message"),
    [
        *((script, 1, "LOCAL_WORLD_SIZE", "2", "more processes than GPUs") for script in ALL),
        (GPT, 0, "WORLD_SIZE", "3", "these processes cannot share 16 windows equally"),
        (GPT, 0, "WORLD_SIZE", "1", "data/stdlib is missing"),
    ],
)
def test_what_cannot_start_ends_with_one_line(
    script, gpus, variable, processes, message, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.setenv(variable, processes)
    monkeypatch.setattr("sys.argv", [str(script)])
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        runpy.run_path(str(script), run_name="__main__")


def saved_line(folder):
    """Weight and bias that hello_ddp.py has saved here."""
    saved = torch.load(folder / "runs/hello_ddp.pt")
    return torch.cat([value.flatten() for value in saved.values()])


@pytest.mark.slow
def test_the_program_and_the_full_job_end_at_the_same_line(tmp_path):
    """Each on 1 and 2 processes. The last of the 40 steps moves the line by 8e-5."""
    torchrun = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", str(FIRST)]
    ends = []
    for processes in (1, 2):
        launched = processes == 2
        if launched:
            found = launch(torchrun, tmp_path, OMP_NUM_THREADS="1")
        else:
            found = forked([str(FIRST)], tmp_path)
        assert found.returncode == 0, found.stderr
        assert found.stdout.startswith(
            f"y = 1.9997 x + 3.0009, loss 0.0103; processes: {processes}\nnext: "
        )
        ends.append(saved_line(tmp_path))
    flags = "--train.global_batch_size 10000 --train.epochs 40 --optim.lr 0.1"
    page = (ROOT / "docs/first-steps.md").read_text()
    assert f"python scripts/train_regression.py {flags}" in page
    for processes in "12":
        own = [
            "--launch.processes",
            processes,
            "--run_name",
            processes,
            "--output_dir",
            str(tmp_path),
        ]
        own += ["--eval.every", "40", "--checkpoint.every", "40"]
        found = forked([str(ROOT / "scripts/train_regression.py"), *flags.split(), *own], tmp_path)
        assert found.returncode == 0, found.stderr
        saved = load_file(newest_checkpoint(tmp_path / processes) / "model.safetensors")
        ends.append(torch.stack([saved["linear.weight"][0, 0], saved["linear.bias"][0]]))
    for end in ends:
        assert_close(end, ends[0], 1e-5, says=ends)
