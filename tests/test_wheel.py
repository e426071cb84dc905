"""The scripts by their names, and the wheel that brings them to where no clone is."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = (
    "--train.steps 4 --train.global_batch_tokens 256 --model.n_layer 1 --model.n_head 2 --model.n_embd 32"
    " --model.block_size 32 --optim.warmup_steps 2 --eval.tokens 512 --train.device cpu"
)


def run(*words: str, path: Path = ROOT, folder: Path | None = None) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the wheel is installed, without what it depends on."""
    made, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps")
    found = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(ROOT))
    assert found.returncode == 0, found.stderr
    [wheel] = made.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.check_output(["git", "-C", ROOT, "ls-files", "gpt2_ddp", "scripts", "configs"], text=True)
    wanted = {name if name.startswith("gpt2_ddp/") else f"gpt2_ddp/{name}" for name in tracked.split()}
    assert {name for name in names if ".dist-info/" not in name} == wanted
    found = run(*pip, "--target", str(site), str(wheel))
    assert found.returncode == 0, found.stderr
    return site


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(installed, tmp_path):
    """Prepared, trained by two processes of a launcher and of its own, without a file of the clone."""
    command = str(installed / "bin/gpt2-ddp")
    accelerate = str(Path(sys.executable).with_name("accelerate"))
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n\n" * 500)

    def works(*words: str) -> str:
        found = run(*words, path=installed, folder=tmp_path)
        assert found.returncode == 0, found.stdout + found.stderr
        assert str(ROOT) + "/" not in (found.stdout + found.stderr).replace(sys.prefix, "")
        return found.stdout + found.stderr

    works(command, "prepare_data", "--source", "text.txt", "--output", "data/mine", "--tokenizer", "bytes")
    train = ["train_gpt2", "--config", "configs/gpt2_small_corpus.yaml", "--data.path", "data/mine", *TINY.split()]
    flags = ("launch", "-q", "--config_file", str(installed / "gpt2_ddp/configs/accelerate/cpu_processes.yaml"))
    said = works(accelerate, *flags, "-m", "gpt2_ddp", *train, "--run_name", "mine")
    assert "step      4/4" in said
    assert "gpt2-ddp generate runs/mine" in said
    assert "scripts/" not in said
    assert "weight " in works(command, "train_regression", "--train.epochs", "1", "--launch.processes", "2")
