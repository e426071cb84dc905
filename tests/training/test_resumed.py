"""A run that is stopped or killed anywhere, and resumed, equals the same run left alone, bit for
bit.

The matrix is {task x layout x optimizer x kind of stop}: each pair of two of them occurs.
"""

import math
import os
import signal
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from cifar import write_cifar
from hellaswag import items_file
from ranks import run_ranks, run_until_killed
from runs import (
    assert_same,
    events,
    is_intact,
    job_config,
    lasting_state,
    rows,
    state_of,
    status,
    train_with_faults,
    training_config,
    untimed,
    weights,
)
from test_task import LettersConfig

from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.tasks import jobs

RESNET18 = jobs.ResNet18
KINDS = ("gpt2", "resnet18", "transformer", "letters")
LAYOUTS = ((1, "ddp"), (2, "ddp"), (3, "ddp"), (2, "fsdp"))
STOPS = {
    "killed": {kind: [(signal.SIGKILL, at) for at in (1, 6, 7)] for kind in KINDS},
    "signalled": {
        kind: [(signal.SIGTERM, 4), (signal.SIGUSR1, 3), (signal.SIGINT, 3)] for kind in KINDS
    },
    "inside": {
        "gpt2": [("evaluate", 0), ("tasks", 5), ("sample", 5), ("evaluate", 12)],
        "transformer": [("evaluate", 8)],
        "resnet18": [("evaluate", 10)],
        "letters": [("evaluate", 10)],
    },
    "saving": {
        kind: [("save", at), (signal.SIGKILL, 3)]
        for kind, at in zip(KINDS, (8, 10, 8, 14), strict=True)
    },
}
"""A signal to the last rank before so many steps of its
process; or a SIGTERM in the middle of what follows a step."""
FAST = {("gpt2", 3), ("resnet18", 0), ("transformer", 0), ("letters", 1)}
CASES = [
    pytest.param(
        kind,
        *LAYOUTS[layout],
        (layout + number // 2) % 2,
        [*STOPS][(number + layout + 1) % 4],
        marks=[] if (kind, layout) in FAST else pytest.mark.slow,
    )
    for (number, kind), layout in product(enumerate(KINDS), range(4))
]
BAD = (12 * 4, 12 * 9)
"""Data of the GPT's steps 5 to 9, whose gradients are
not finite: the run goes back from there to step 4."""


def config_of(kind, corpus, short_documents, folder, optimizer, parallel, name):
    """A run with all that a state depends on: dropout or augmentation, last
    steps with fewer items, statistics of BatchNorm, sums over steps, epochs
    and evaluations; of a GPT also an average, two sources and masked documents."""
    output = folder / name
    if kind == "letters":
        return LettersConfig(
            output_dir=str(output), run_name="run", checkpoint=KeepConfig(keep_last=9)
        )
    changes = {"checkpoint.keep_last": 9, "optim.name": optimizer}
    if kind != "gpt2":
        if kind == "resnet18":
            changes |= {
                "data.path": f"{folder}/cifar",
                "data.image_size": 8,
                "data.augment": True,
                "train.epochs": 3,
            }
        return job_config(kind, output, changes)
    changes |= {
        "launch.parallel": parallel,
        "optim.average": 0.3,
        "model.architecture": {"adamw": "gpt2", "muon": "nanochat"}[optimizer],
        "data": {"path": [str(corpus), str(short_documents)], "weights": [2, 1]},
        "model.n_layer": 1,
        "model.block_size": 8,
        "model.document_mask": True,
        "model.dropout": 0.1,
        "guard": {"patience": 3, "sigmas": 50.0},
        "eval": {"every": 5, "tokens": 100, "patience": 9},
        "eval.tasks": [f"{folder}/items.jsonl"],
        "tracking": {"log_every": 2, "sample_every": 5, "sample_prompt": ["def ", ""]},
        "checkpoint.every": 4,
        "train.steps": 12,
        "train.global_batch_tokens": 96,
    }
    return training_config(corpus, output, changes)


def train_narrow(*arguments):
    """Trains with faults. A ResNet-18 has an eighth of the
    channels: the whole one has checkpoints of 134 MB."""
    jobs.ResNet18 = partial(RESNET18, width=8)
    return train_with_faults(*arguments)


def train_and_stop(config, bad, during, step, rank):
    """Trains; that rank is sent SIGTERM halfway `during` what follows step `step`. Returns the
    outcome, and how often the rest was polled."""
    from gpt2_ddp.checkpoint import store
    from gpt2_ddp.tasks import pretraining
    from gpt2_ddp.training import start, stop

    now = SimpleNamespace(place="", polls=0, after=0)

    def send():
        if (during, step, rank) == (now.place, now.run.step, now.run.accelerator.process_index):
            os.kill(os.getpid(), signal.SIGTERM)

    def watch(owner, name, place):
        method = getattr(owner, name)

        def entered(*arguments):
            now.place = place
            now.polls = 0
            if place == "save":
                send()
            return method(*arguments)

        setattr(owner, name, entered)

    def polled(self, done=False):
        now.polls += 1
        now.after += bool(self.reason)
        if now.polls == 2 and not self.reason:
            send()
        poll(self, done)

    def described(trainer):
        now.run = trainer.run
        return describe_start(trainer)

    poll = stop.StopRequest.poll
    describe_start = start.describe_start
    start.describe_start = described
    stop.StopRequest.poll = polled
    watch(start.Trainer, "evaluate", "evaluate")
    watch(start.Training, "sample", "sample")
    watch(pretraining, "answer", "tasks")
    watch(store.CheckpointStore, "save", "save")
    return train_narrow(config, bad), now.after


def stop_at(config, bad, world, what, at, rank):
    """One start of the run, which ends by a stop."""
    run = Path(config.output_dir) / "run"
    nan = float("nan")
    if what == signal.SIGKILL:
        run_until_killed(train_narrow, world, config, bad, nan, at)
        return
    if not isinstance(what, str):
        outcomes = run_ranks(train_narrow, world, config, bad, nan, at, what)
    else:
        outcomes, after = zip(
            *run_ranks(train_and_stop, world, config, bad, what, at, rank), strict=True
        )
        assert max(after) <= 2  # it does not go on to its end
        assert state_of(run)["progress"]["step"] == at
        # evaluations of the others end before the ranks agree
        if isinstance(config, TrainingConfig):
            assert any(state_of(run)["progress"]["pending"].values()) == (what != "save")
            assert what not in ("evaluate", "tasks") or not at or untimed(run)[-1]["step"] < at
    assert {*outcomes} == {"stopped"}
    assert status(run)["state"] == "stopped"


@pytest.mark.parametrize(("kind", "world", "parallel", "optimizer", "stops"), CASES)
def test_it_equals_the_run_left_alone(
    corpus, short_documents, tmp_path, monkeypatch, kind, world, parallel, optimizer, stops
):
    """Rows, samples, states, weights and moments."""
    items_file(tmp_path, 35)
    if kind == "resnet18":
        write_cifar(tmp_path / "cifar", 56, 10)
    name, bad = (
        (("adamw", "muon")[optimizer], BAD)
        if kind == "gpt2"
        else (("sgd", "adam")[optimizer], (0, 0))
    )
    given = kind, corpus, short_documents, tmp_path, name, parallel
    whole, parts = (config_of(*given, part) for part in ("whole", "parts"))
    one = tmp_path / "whole/run"
    other = tmp_path / "parts/run"
    assert run_ranks(train_narrow, world, whole, bad) == ["completed"] * world
    for number, stop in enumerate(STOPS[stops][kind]):
        stop_at(parts, bad, world, *stop, number % world)
    assert run_ranks(train_narrow, world, parts, bad) == ["completed"] * world

    assert_same(one, other)
    if kind == "gpt2":
        assert events(other, "sample") == events(one, "sample")
        (event,) = [row for row in rows(other) if "event" in row]
        assert (event["step"], event["from"], event["skipped_range"]) == (4, 9, [48, 108])
    if kind == "resnet18":
        micro_batches = sum(math.ceil(math.ceil(n / world) / 4) for n in (12, 12, 12, 12, 8))
        assert weights(other)["bn1.num_batches_tracked"] == 3 * micro_batches
    for checkpoint in (one / "checkpoints").iterdir():
        again = other / "checkpoints" / checkpoint.name
        assert lasting_state(checkpoint) == lasting_state(again)
        for file in checkpoint.glob("*.safetensors"):
            assert file.read_bytes() == (again / file.name).read_bytes()
    monkeypatch.setattr(jobs, "ResNet18", partial(RESNET18, width=8))  # as `train_narrow` has it
    assert kind == "letters" or is_intact(other)
