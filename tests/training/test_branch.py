"""Branching: a new run continues another one's training, under the same schedule or another; both
record it. And the schedule of a resumed run."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import expect_error
from ranks import in_turn, run_ranks, run_until_killed
from runs import (
    checkpoint_at,
    complete,
    events,
    gpt_state,
    is_intact,
    resolved,
    said,
    same,
    train,
    train_with_faults,
    training_config,
    untimed,
)
from safetensors.torch import load_file

from gpt2_ddp.checkpoint.format import MANIFEST, Checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.saved import check_resumable
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.state import LogEnd, Pending, Progress
from gpt2_ddp.training.branch import branch_off, find_parent
from gpt2_ddp.training.optimizer import lr_at


def progress(run, step):
    return json.loads((checkpoint_at(run, step) / "state.json").read_text())["progress"]


@pytest.fixture
def branching(trained, tmp_path):
    """Makes the configuration of a branch of the run `long`, a copy of the shared run, whose steps
    6 to 10 were trained by two processes."""
    long = shutil.copytree(trained, tmp_path / "long")

    def make(changes=(), name="branch"):
        start = {
            "run_name": name,
            "train.branch_from": str(checkpoint_at(long, 5)),
            "checkpoint.keep_last": 9,
        }
        return training_config(trained.parent / "data", tmp_path, start | dict(changes))

    return make


def test_with_the_same_schedule_it_is_the_parent_that_goes_on(tmp_path, branching):
    """Bit for bit: rows, weights and moments; both sides record where it began."""
    complete(branching(), 2)
    whole, branch = (untimed(tmp_path / name) for name in ("long", "branch"))
    (event,) = events(tmp_path / "branch", "branch")
    assert branch[1:] == whole[6:]
    assert "loss" not in branch[0]
    assert "val_loss" in branch[0]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert same(
            *(load_file(checkpoint_at(tmp_path / name, 10) / file) for name in ("long", "branch"))
        )

    begun = checkpoint_at(tmp_path / "long", 5)
    origin = {"parent": str(begun), "run_id": progress(tmp_path / "long", 5)["run_id"], "step": 5}
    origin["checkpoint_sha256"] = sha256_file(begun / MANIFEST)
    stood = {"position": 60, "skipped_ranges": [], "order_digest": whole[5]["order_digest"]}
    assert event == {"event": "branch"} | origin | stood
    own = progress(tmp_path / "branch", 10)
    assert own["branched_from"] == origin
    assert own["run_id"] != origin["run_id"]
    for name in ("long", "branch"):
        assert is_intact(tmp_path / name)


def test_another_schedule_and_a_branch_of_a_branch(tmp_path, branching, capsys):
    """The second begins at the newest checkpoint of the
    first; their rates are their own, the data go on."""
    own = {"optim.schedule": "wsd", "optim.lr": 1e-3, "optim.decay_fraction": 0.5}
    first = branching(own | {"train.steps": 8})
    changes = {"train.branch_from": f"{tmp_path}/branch", "train.steps": 9}
    second = branching(changes, "second")
    further = branching(own | {"train.steps": 9, "train.branch_from": "/gone"})
    run_ranks(in_turn, 1, *((train, config) for config in (first, second, first, further)))
    for parent, name, config, begin, end in (
        ("long", "branch", first, 5, 8),
        ("branch", "second", second, 8, 9),
    ):
        begun = checkpoint_at(tmp_path / parent, begin)
        optim = config.optim.model_copy(update={"decay_steps": end})
        found = [
            (row["step"], row.get("lr")) for row in untimed(tmp_path / name)[: end - begin + 1]
        ]
        assert found == [
            (begin, None),
            *((step, lr_at(step, optim)) for step in range(begin + 1, end + 1)),
        ]
        assert is_intact(tmp_path / name)
        assert f"{begun} is unchanged" in capsys.readouterr().out
        assert events(tmp_path / name, "branch")[0]["parent"] == str(begun)
    assert untimed(tmp_path / "branch")[-1]["step"] == 9  # it goes on with its own checkpoints
    (begun / MANIFEST).write_text("{}")
    assert is_intact(tmp_path / "second")
    assert f"{begun} is missing or changed" in capsys.readouterr().out


def test_killed_before_its_first_own_checkpoint(tmp_path, branching):
    """The same command gives what it would have given."""
    config = branching()
    run = tmp_path / "branch"
    run_until_killed(train_with_faults, 2, config, (0, 0), math.nan, 3)
    assert [row["step"] for row in untimed(run)] == [5, 6, 7]
    complete(config, 2)
    assert len(events(run, "branch")) == 1
    assert untimed(run)[1:] == untimed(tmp_path / "long")[6:]
    assert is_intact(run)


def test_a_branch_goes_back_to_its_beginning_and_is_branched_off_again(tmp_path, branching):
    """What it passed over enters the history of the second branch."""
    changes = {"guard": {"patience": 3}, "checkpoint.every": 2, "eval.every": 100}
    second = branching(
        changes | {"train.branch_from": f"{tmp_path}/branch", "train.steps": 11}, "second"
    )
    calls = [(train_with_faults, branching(changes), (60, 96)), (train, second)]
    assert run_ranks(in_turn, 1, *calls) == [["completed"] * 2]
    (event,) = events(tmp_path / "branch", "rollback")
    assert (event["step"], event["skipped_range"]) == (5, [60, 120])
    assert events(tmp_path / "second", "branch")[0]["skipped_ranges"] == [[60, 120]]
    for name in ("branch", "second"):
        assert is_intact(tmp_path / name)


def test_what_it_branches_off_may_lie_elsewhere_on_another_machine(branching):
    one, other, none = (
        branching({"train.branch_from": path}) for path in ("/a/long", "/b/long", None)
    )
    assert one.shared == other.shared != none.shared


MISTAKES = [
    {"seed": 5, "model.n_layer": 3, "model.dropout": 0.1, "train.global_batch_tokens": 192},
    {"optim.name": "muon"},
    {"train.steps": 5},
    {"train.epochs": 0.01},
]


@pytest.mark.parametrize("mistakes", MISTAKES)
def test_mistakes(branching, mistakes):
    config = branching(
        {"train.steps": None if "train.epochs" in mistakes else 10, "optim.lr": 1.0} | mistakes
    )
    with pytest.raises(UserError) as raised:
        find_parent(config)
    for mistake, (field, value) in zip(raised.value.mistakes, mistakes.items(), strict=True):
        assert mistake.startswith(f"{field} = {value}: ")


def test_what_a_branch_begins_with(branching):
    """All that the next step depends on, and nothing of what befell the parent."""
    parent = find_parent(branching())
    befell = Progress(run_id="abc", step=5, rollbacks=2, pending=Pending(sample=True))
    befell.add_scores({"val_loss": 5.0})
    of_parent = parent.state.model_copy(update={"progress": befell})
    begun = branch_off(replace(parent, state=of_parent), branching()).state
    origin = begun.progress.branched_from
    own = {"progress": Progress(step=5, branched_from=origin), "log": LogEnd()}
    assert begun == of_parent.model_copy(update=own)
    assert origin.run_id == "abc"


# The schedule of a run that goes on

SCHEDULES = [
    ("--train.steps 4", 4, "--train.steps 600", 600),
    ("--train.steps 4", 3, "--train.steps 5", 6),
    ("--train.steps 20", 5, "--train.steps 10", 10),
    ("--train.steps 20", 6, "--train.steps 40", 20),
    ("--train.steps 20 --optim.decay_steps 15", 4, "--train.steps 40", 40),
    ("--train.steps 20 --optim.decay_steps 15", 6, "--train.steps 40", 15),
    ("--train.steps 20", 4, "--train.steps 40 --optim.decay_steps 30", 30),
    ("--train.epochs 0.1", 4, "--train.epochs 0.2", 16),
    ("--optim.schedule wsd --train.steps 20", 10, "--train.steps 40", 40),
    ("--optim.schedule wsd --train.steps 20", 11, "--train.steps 40", 20),
    ("--optim.schedule wsd --train.steps 40", 11, "--train.steps 20", 40),
    ("--optim.schedule constant --train.steps 20", 20, "--train.steps 40", 40),
]
"""Flags at the start, a step, what the resumed run has in
their place or besides, and where its schedule ends."""
SHORT = (
    "--model.block_size 32 --train.global_batch_tokens 768 --optim.warmup_steps 5"
    " --optim.decay_fraction 0.5 "
)


@pytest.mark.parametrize(("before", "step", "now", "length"), SCHEDULES)
def test_a_schedule_follows_the_steps_until_one_depends_on_it(before, step, now, length):
    """So no step of the past is another, which is computed here. A schedule that was chosen, and a
    trial within the warm-up."""
    schedule = re.findall(r"--optim.schedule \w+", before)
    started = resolved(load(TrainingConfig, (SHORT + before).split()))
    saved = Checkpoint(Path("saved"), gpt_state(int(step), 1900), started.model_dump(mode="json"))
    config = load(TrainingConfig, " ".join([SHORT, *schedule, now]).split())
    check_resumable(config, saved.kind, saved.config, saved.step)
    resumed = resolved(config, saved)
    assert resumed.optim.decay_steps == int(length)
    assert all(
        lr_at(past, started.optim) == lr_at(past, resumed.optim) for past in range(1, int(step) + 1)
    )


def test_an_end_that_steps_depend_on_cannot_be_moved(tiny_config):
    saved = tiny_config({"optim.decay_steps": 20}).model_dump(mode="json")
    config = tiny_config({"optim.decay_steps": 40})
    check_resumable(config, "gpt2", saved, 2)
    expect_error("optim.decay_steps = 40: ", check_resumable, config, "gpt2", saved, 3)


# What follows a decay to 0

DECAYED = {
    "optim.schedule": "wsd",
    "optim.min_lr": 0.0,
    "train.steps": 8,
    "optim.decay_fraction": 0.25,
}


@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_a_run_whose_learning_rate_is_0_is_branched_off(tmp_path, corpus, schedule):
    """Its message names what trains on, and each other way is refused before any work."""
    changes = DECAYED | {
        "optim.schedule": schedule,
        "checkpoint": {"every": 2, "keep_last": 9, "background": False},
    }
    config = training_config(corpus, tmp_path, changes)
    more = training_config(corpus, tmp_path, changes | {"train.steps": 12})
    run = tmp_path / "run"
    parent = run / f"checkpoints/step-{6 if schedule == 'wsd' else 2:08d}"
    flags = f"--run_name NEW --train.branch_from {parent} --train.steps N --optim.decay_steps N"
    (_, said_first, _), (_, said_then, _) = run_ranks(
        in_turn, 1, (said, train, config), (said, train, config)
    )[0]
    assert "0 from step" not in said_first
    ends = "is complete at step 8; its learning rate has decayed to 0; to train further"
    assert f"{ends}, start a branch" in said_then
    assert flags in said_then
    before = untimed(run)
    expect_error(
        "train.steps = 12: the learning rate is 0 from step 8 on; to train further", train, more
    )
    assert untimed(run) == before
    branch = changes | {"run_name": "branch", "train.branch_from": str(run), "train.steps": 12}
    over = training_config(corpus, tmp_path, branch | {"optim.decay_steps": 8, "optim.lr": 1e-3})
    expect_error(
        "optim.decay_steps = 8: the learning rate is 0 from step 8 on, where this branch begins",
        train,
        over,
    )
    assert not (tmp_path / "branch").exists()
    train(training_config(corpus, tmp_path, branch | {"optim.decay_steps": 12}))
    assert all(row["lr"] > 0 for row in untimed(tmp_path / "branch") if 8 < row["step"] < 12)


def test_the_last_step_of_a_decay_to_0_is_taken_after_a_stop(tmp_path, corpus):
    """So are steps after it, of a run that began with as
    many: the same command resumes it. A note says so."""
    changes = DECAYED | {"checkpoint.every": 7, "optim.decay_steps": 8}
    for steps in (8, 9):
        config = training_config(corpus, tmp_path / str(steps), changes | {"train.steps": steps})
        run_until_killed(train_with_faults, 1, config, (0, 0), math.nan, 8)
        outcome, _, errors = said(train, config)
        assert outcome == "completed"
        assert ("note: the learning rate is 0 from step 8 on" in errors) == (steps == 9)
