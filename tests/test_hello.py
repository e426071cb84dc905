"""The two programs of docs/first-steps.md: any number of processes, and the full job, end at the same line."""

import runpy
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from commands import ROOT, TORCHRUN, environment, forked
from ranks import free_port, rank_environment
from runs import newest_checkpoint
from safetensors.torch import load_file

SCRIPTS = [ROOT / "scripts/hello_ddp.py", ROOT / "scripts/hello_torch_ddp.py"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_it_is_short_and_stands_alone(script):
    text = script.read_text()
    assert len([line for line in text.splitlines() if line.strip()]) < 60
    assert "gpt2_ddp" not in text


def test_the_pages_have_the_length_of_the_program():
    lines = len(SCRIPTS[0].read_text().splitlines())
    for page, text in (("first-steps.md", f"It has {lines} lines."), ("first-steps.zh-CN.md", f"它有 {lines} 行")):
        assert text in (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help_explains_it_and_trains_nothing(script, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.setattr("sys.argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert not end.value.code
    assert f"torchrun --standalone --nproc_per_node 2 scripts/{script.name}" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_more_processes_than_gpus_end_with_one_line(script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(signal, "signal", lambda number, action: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("sys.argv", [str(script)])
    with pytest.raises(SystemExit, match=r"^error: more processes than GPUs; start fewer"):
        runpy.run_path(str(script), run_name="__main__")


def saved_line(file: Path) -> torch.Tensor:
    return torch.cat([value.flatten() for value in torch.load(file).values()])  # weight, bias


@pytest.mark.slow
def test_all_of_them_end_at_the_same_line(tmp_path):
    """1 and 2 processes of both programs and of the full job. The last of the 40 steps moves the line by 8e-5."""
    accelerate, plain = map(str, SCRIPTS)
    env, torchrun = environment(OMP_NUM_THREADS="1"), [*TORCHRUN, "--standalone", "--nproc_per_node", "2", accelerate]
    ends = []
    for script, processes, start in (
        (accelerate, 1, lambda: forked([accelerate], tmp_path)),
        (accelerate, 2, lambda: subprocess.run(torchrun, cwd=tmp_path, env=env, capture_output=True, text=True)),
        (plain, 1, lambda: forked([plain], tmp_path, **rank_environment(0, 1, free_port()))),
        (plain, 2, lambda: forked([plain, "2"], tmp_path)),
    ):
        found = start()
        assert found.returncode == 0, found.stderr
        assert found.stdout == f"y = 1.9997 x + 3.0009, loss 0.0103; processes: {processes}\n"
        ends.append(saved_line(tmp_path / f"runs/{Path(script).stem}.pt"))
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
        assert torch.allclose(end, ends[0], rtol=0, atol=1e-6), ends


@pytest.mark.slow
def test_small_batches_train_the_same_on_three_processes(tmp_path):
    """Batches of 103, which three processes cannot share out equally, and a last one of 9."""
    ends = []
    for script, processes in zip(SCRIPTS, (3, 1), strict=True):
        smaller = tmp_path / script.name
        smaller.write_text(script.read_text().replace("BATCH, LR = 40, 10_000, 0.1", "BATCH, LR = 1, 103, 0.01"))
        found = forked([str(smaller)], tmp_path, processes, **rank_environment(0, 1, free_port()))
        assert found.returncode == 0, found.stderr
        ends.append(saved_line(tmp_path / f"runs/{script.stem}.pt"))
    assert 1.5 < ends[0][0] < 1.7, "far from the end, where another order would not show"
    assert torch.allclose(*ends, rtol=0, atol=1e-6), ends
