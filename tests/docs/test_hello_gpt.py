"""The trainer in one file: the losses of train_gpt2.py on the same windows, on any number of
processes and resumed."""

import re
import shlex

import pytest
import torch
from close import assert_close, distance
from commands import ACCELERATE, ROOT, forked, last_of_each, launch
from conftest import once
from ranks import rank_environment
from runs import rows

from gpt2_ddp.config.cli import load
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.distributed.spawn import reserve_port
from gpt2_ddp.model.gpt import GPT

SCRIPT = ROOT / "scripts/hello_gpt.py"
PAGE = ROOT / "docs/first-steps.md"
CHECKPOINT = "runs/hello_gpt.pt"
SIZES = {
    "WIDTH": 48,
    "CONTEXT": 32,
    "STEPS": 12,
    "WARMUP": 3,
    "LOG_EVERY": 1,
    "EVAL_EVERY": 6,
    "SAVE_EVERY": 4,
}
FLAGS = (
    "--model.n_embd 48 --model.block_size 32 --train.global_batch_tokens 512 --train.steps 12"
    " --optim.warmup_steps 3"
    " --tracking.log_every 1 --tracking.sample_every 0 --eval.every 6 --eval.tokens 3072"
    " --train.device cpu"
)
"""The same sizes for hello_gpt.py and train_gpt2.py."""
RANK = """
import os, signal, sys
sys.path.insert(0, {scripts!r})
from functools import cache
from pathlib import Path
import accelerate, hello_gpt, numpy as np, torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from gpt2_ddp.data.order import Permutation
vars(hello_gpt).update({sizes!r}, DATA=Path({data!r}))
positions = lambda epoch, count: np.arange(epoch * count, (epoch + 1) * count)
epoch_of = lambda epoch, count: Permutation(hello_gpt.SEED, count).items_at(positions(epoch, count))
hello_gpt.permutation = cache(lambda *args: torch.from_numpy(epoch_of(*args).astype(np.int64)))

reduced, saves, prepare, replace = [], [], accelerate.Accelerator.prepare, os.replace
def count_and_reduce(_, bucket):
    reduced.append(bucket.buffer().numel())
    return allreduce_hook(None, bucket)
def prepare_and_count(self, model, optimizer):
    model, optimizer = prepare(self, model, optimizer)
    if self.num_processes > 1:
        model.register_comm_hook(None, count_and_reduce)
    return model, optimizer
def replace_or_die(*names):
    saves.append(names)
    if len(saves) == {dies_at}:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*names)
accelerate.Accelerator.prepare, os.replace = prepare_and_count, replace_or_die
hello_gpt.main()
rank = os.environ.get("RANK", "0")
print("rank", rank, "all-reduced", sum(reduced), "values, saved", len(saves), "times")
"""
"""A rank of the program in small, with the trainer's
order of windows. It dies in a save, if it shall."""


def run(folder, corpus, world, dies_at=0):
    """Runs hello_gpt.py on forked ranks; returns what they printed."""
    alone = rank_environment(0, 1, reserve_port()) if world == 1 else {}
    words = RANK.format(scripts=str(SCRIPT.parent), sizes=SIZES, data=str(corpus), dies_at=dies_at)
    done = forked(["-c", words], folder, world, **alone)
    assert dies_at or done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def whole(corpus, tmp_path_factory):
    """Runs it without interruption, once for all tests; returns its folder and what it printed."""

    def of(world):
        def make(folder):
            return (folder / "out").write_text(run(folder, corpus, world))

        folder = once(tmp_path_factory, f"hello_gpt-{world}", make)
        return folder, (folder / "out").read_text()

    return of


def figures(printed, kind="loss"):
    """Step, loss and learning rate of each line of this kind; or step and val_loss."""
    found = re.findall(rf"^step (\d+): {kind} (\S+)(?:  lr (\S+))?$", printed, re.MULTILINE)
    return torch.tensor(
        [[float(part) for part in line if part] for line in found], dtype=torch.float64
    )


def test_its_losses_are_those_of_the_trainer(whole, corpus, tmp_path):
    """The command that docs/first-steps.md gives, with fewer steps of another corpus."""
    (command,) = re.findall(
        r"^python scripts/train_gpt2.py (--optim.name adamw .*)$", PAGE.read_text(), re.MULTILINE
    )
    small = f"--data.path {corpus} --output_dir {tmp_path} --run_name run {FLAGS}"
    flags = [
        "--config",
        str(ROOT / "configs/gpt2_stdlib.yaml"),
        *last_of_each(shlex.split(f"{command} {small}")),
    ]
    config = load(TrainingConfig, flags)
    done = forked([str(ROOT / "scripts/train_gpt2.py"), *flags], tmp_path)
    assert done.returncode == 0, done.stderr
    folder, printed = whole(1)
    ours = [row for row in rows(tmp_path / "run") if "loss" in row]
    for kind, columns in (("loss", ("step", "loss", "lr")), ("val_loss", ("step", "val_loss"))):
        expected = [[row[column] for column in columns] for row in ours if kind in row]
        assert_close(figures(printed, kind), expected, 1e-5)
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.3
    # raises for other names or shapes
    GPT(config.model, 512).load_state_dict(torch.load(folder / CHECKPOINT)["model"])


def test_two_processes_train_the_same_and_resume_at_the_same_bits(whole, corpus, tmp_path):
    """One of them, killed in the save of step 12, resumes
    from step 8. Each value is all-reduced once per step."""
    (_, one) = whole(1)
    (folder, two) = whole(2)
    for kind in ("loss", "val_loss"):
        assert_close(figures(two, kind), figures(one, kind), 1e-5)
    end = torch.load(folder / CHECKPOINT)
    values = sum(value.numel() for value in end["model"].values())
    for rank, saves in ((0, 3), (1, 0)):
        assert f"rank {rank} all-reduced {12 * values} values, saved {saves} times\n" in two
    killed = run(tmp_path, corpus, 2, dies_at=3)
    assert torch.equal(figures(killed), figures(two))
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 8, "the checkpoint before is whole"
    resumed = run(tmp_path, corpus, 2)
    assert resumed.startswith("begins at step 8 of 12; processes: 2\nstep 9: ")
    assert torch.equal(figures(resumed), figures(two)[8:])
    assert distance(torch.load(tmp_path / CHECKPOINT), end) == 0


@pytest.mark.slow
def test_it_learns_in_bf16_by_a_launcher(corpus, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/stdlib").symlink_to(corpus)
    short = tmp_path / "hello_gpt.py"
    short.write_text(SCRIPT.read_text().replace("STEPS = 300", "STEPS = 60"))
    start = [
        *ACCELERATE,
        "--multi_gpu",
        "--num_processes",
        "2",
        "--mixed_precision",
        "bf16",
        str(short),
    ]
    done = launch(start, tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("begins at step 0 of 60; processes: 2\nstep 10: ")
    ((_, loss),) = figures(done.stdout, "val_loss").tolist()
    assert loss < figures(done.stdout)[0, 1] - 1
