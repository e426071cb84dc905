"""The scripts by their names, and the wheel that brings them to where no clone is."""

import subprocess
import sys
import zipfile

import pytest
from commands import ACCELERATE, ROOT, launch

TINY = (
    "--train.steps 4 --train.global_batch_tokens 256 --model.n_layer 1 --model.n_head 2"
    " --model.n_embd 32"
    " --model.block_size 32 --optim.warmup_steps 2 --eval.tokens 512 --train.device cpu"
)


def run(*words, path=ROOT, folder=ROOT):
    """What a command that succeeds prints."""
    found = launch(words, folder, PYTHONPATH=str(path), OMP_NUM_THREADS="1")
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder in which the wheel is installed, without what it depends on."""
    made = tmp_path_factory.mktemp("wheel")
    site = tmp_path_factory.mktemp("site")
    pip = (sys.executable, "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", made, ROOT)
    [wheel] = made.iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    tracked = subprocess.check_output(
        ["git", "-C", ROOT, "ls-files", "gpt2_ddp", "scripts", "configs"], text=True
    )
    wanted = {
        name if name.startswith("gpt2_ddp/") else f"gpt2_ddp/{name}" for name in tracked.split()
    }
    assert {name for name in names if ".dist-info/" not in name} == wanted
    run(*pip, "install", "--no-deps", "--target", site, wheel)
    return site


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(installed, tmp_path):
    """Prepared, trained by two processes of a launcher
    and of its own, without a file of the clone."""
    command = installed / "bin/gpt2-ddp"
    (tmp_path / "text.txt").write_text("To be, or not to be, that is the question.\n\n" * 500)

    def works(*words):
        said = run(*words, path=installed, folder=tmp_path)
        assert f"{ROOT}/" not in said.replace(sys.prefix, "")
        return said

    works(
        command,
        "prepare_data",
        "--source",
        "text.txt",
        "--output",
        "data/mine",
        "--tokenizer",
        "bytes",
    )
    train = [
        "train_gpt2",
        "--config",
        "configs/gpt2_small_corpus.yaml",
        "--data.path",
        "data/mine",
        *TINY.split(),
    ]
    flags = ("-q", "--config_file", installed / "gpt2_ddp/configs/accelerate/cpu_processes.yaml")
    said = works(*ACCELERATE, *flags, "-m", "gpt2_ddp", *train, "--run_name", "mine")
    assert "step      4/4" in said
    assert "scripts/" not in said
    assert "weight " in works(
        command, "train_regression", "--train.epochs", "1", "--launch.processes", "2"
    )
