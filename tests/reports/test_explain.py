"""Why two runs differ: planted differences are named first, and none is invented."""

import json
import math
import os
import shutil
import signal
import struct
from pathlib import Path

import numpy as np
import pytest
from close import assert_close
from commands import expect_error, run_script
from conftest import once
from ranks import in_turn, run_ranks
from runs import (
    all_rows,
    checkpoint_at,
    edit_manifest,
    edit_rows,
    forge,
    job_config,
    reseal,
    spoil,
    train,
    train_with_faults,
    training_config,
)
from safetensors.torch import load_file, save_file

from gpt2_ddp import explain
from gpt2_ddp.config.base import leaves
from gpt2_ddp.config.saved import CONFIGS
from gpt2_ddp.config.tools import ExplainConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Permutation
from gpt2_ddp.data.shards import count_windows
from gpt2_ddp.files import sha256_file
from gpt2_ddp.remote.copies import with_local_runs
from gpt2_ddp.reports import conditions, explanation
from gpt2_ddp.reports.conditions import EFFECTS, effects_of
from gpt2_ddp.reports.evidence import LIMITS, limit
from gpt2_ddp.reports.explain import explain_runs
from gpt2_ddp.reports.partings import Apart
from gpt2_ddp.tasks.user_task import Code, find, trust

CLASS = """
from gpt2_ddp import Pretraining

RATE = 1e-3


class Mine(Pretraining):
    def schedule(self, step):
        return {"lr": RATE, "weight_decay": 0.1}
"""
FIELDS = {
    "optim.weight_decay": 0.2,
    "optim.betas": [0.9, 0.99],
    "optim.name": "muon",
    "optim.schedule": "constant",
    "optim.grad_clip": 0.1,
    "model.n_layer": 1,
    "model.n_head": 4,
    "model.architecture": "llama",
    "model.dropout": 0.1,
    "model.document_mask": True,
    "train.init_from": "runs/other",
    "train.mixed_precision": "bf16",
    "train.activation_checkpointing": True,
    "launch.parallel": "fsdp",
    "eval.tokens": 600,
    "data.weights": [2, 1],
}
"""Another value of a field, by the field."""
ROUNDING = ("train.mixed_precision", "train.activation_checkpointing", "launch.parallel")
UNSEEN = {
    "tracking.log_every": 2,
    "tracking.sample_every": 5,
    "checkpoint.every": 2,
    "checkpoint.mirror": "s3://bucket/runs",
    "eval.every": 5,
    "guard.patience": 3,
    "train.max_minutes": 60,
    "train.mixed_precision": "auto",
    "optim.muon_lr": 0.03,
    "output_dir": "elsewhere",
    "run_name": "other",
    "data.path": ["moved/data"],
}
"""Fields that change no number of this run."""


def trained_window(data):
    """A window of the first shard that step 5 trains on."""
    manifest = read_manifest(data)
    order = Permutation(1337, count_windows(manifest.tokens("train"), 32))
    items = order.items_at(np.arange(48, 60)).tolist()
    return next(item for item in items if item < manifest.splits["train"][0].tokens // 32)


def make_runs(corpus, folder):
    """Trains GPTs of ten steps, and jobs."""
    shutil.copytree(corpus, folder / "data")
    shutil.copytree(corpus, folder / "window")
    change_token(folder / "window", 32 * trained_window(corpus) + 5)
    for name, rate in (("mine", "1e-3"), ("other", "2e-3")):
        (folder / f"{name}.py").write_text(CLASS.replace("1e-3", rate))
        trust(find(f"{folder / name}.py:Mine"))

    def config(name, changes):
        given = {"run_name": name, "train.mixed_precision": "no"} | changes
        return training_config(folder / given.pop("data", "data"), folder, given)

    masks = {"model.dropout": 0.1}
    middle = str(folder / "base/checkpoints/step-00000005")
    trained = {
        "base": {},
        "again": {"tracking.log_every": 2, "checkpoint.every": 2},
        "seed": {"seed": 1},
        "lr": {"optim.lr": 0.004},
        "micro": {"train.micro_batch_size": 2},
        "masks": masks,
        "masks-micro": masks | {"train.micro_batch_size": 2},
        "length": {"train.steps": 8},
        "batch": {"train.global_batch_tokens": 192},
        "window": {"data": "window"},
        "branch": {"train.branch_from": middle, "optim.lr": 0.002},
        "mine": {"task": f"{folder}/mine.py:Mine"},
        "other": {"task": f"{folder}/other.py:Mine"},
    }
    calls = [(train, config(name, changes)) for name, changes in trained.items()]
    rolled = config("rolled", {"guard.patience": 1})
    stopped = config("stopped", {})
    ranks = config("ranks", {})
    calls.append((train_with_faults, rolled, (72, 84)))
    calls.append((train_with_faults, stopped, (0, 0), 1, 4, signal.SIGTERM))
    calls.append((train, stopped))
    calls.append((train_with_faults, ranks, (0, 0), 1, 5, signal.SIGTERM))
    for name, changes in JOBS.items():
        calls.append((train, job_config("regression", folder, {"run_name": name} | changes)))
    (outcomes,) = run_ranks(in_turn, 1, *calls, timeout=600)
    assert {*outcomes} == {"completed", "stopped"}, outcomes
    assert run_ranks(train, 2, ranks) == ["completed"] * 2


JOBS = {
    "job": {},
    "job-again": {"tracking.log_every": 5},
    "job-rate": {"optim.lr": 0.02},
    "job-points": {"data.points": 102},
}


def change_token(folder, token):
    """Changes a training token of the first shard, and makes the manifest fit."""
    splits = json.loads((folder / "manifest.json").read_text())["splits"]
    shard = splits["train"][0]
    with (folder / shard["file"]).open("r+b") as file:
        file.seek(1024 + 2 * token)
        (before,) = struct.unpack("<H", file.read(2))
        file.seek(-2, os.SEEK_CUR)
        file.write(struct.pack("<H", (before + 1) % 500))
    shard["sha256"] = sha256_file(folder / shard["file"])
    edit_manifest(folder, splits=splits)


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """A folder with all runs."""
    return once(tmp_path_factory, "explained", lambda folder: make_runs(corpus, folder))


@pytest.fixture
def pair(runs, tmp_path):
    """The base run, and a copy of it that a test changes."""
    return runs / "base", Path(shutil.copytree(runs / "base", tmp_path / "copy"))


def first_row(rows, event="start"):
    return next(row for row in rows if row.get("event") == event)


def words(found):
    """The text, with single blanks in place of line breaks."""
    return " ".join(found.text.split())


# Planted differences


PLANTED = {
    "base seed": "seed",
    "base lr": "optim.lr",
    "base micro": "train.micro_batch_size",
    "masks masks-micro": "train.micro_batch_size",
    "base masks": "model.dropout",
    "base length": "train.steps",
    "base batch": "train.global_batch_tokens",
    "base window": "data",
    "base branch": "optim.lr",
    "base rolled": "skipped positions",
    "base ranks": "processes",
    "mine other": "code",
    "base mine": "code",
    "job job-rate": "optim.lr",
    "job job-points": "data.points",
}


@pytest.mark.parametrize("names", PLANTED)
def test_the_first_cause_of_two_trained_runs(runs, names):
    pair = [runs / name for name in names.split()]
    for first, second in (pair, pair[::-1]):
        found = explain(first, second)
        assert (found.first, found.exit_code) == (PLANTED[names], 1), found.text
        assert f"A and B differ first in {PLANTED[names]} (" in words(found)


def set_field(rows, name, value):
    """Changes a field in the recorded configuration."""
    section, _, key = name.rpartition(".")
    config = first_row(rows)["config"]
    (config[section] if section else config)[key] = value


@pytest.mark.parametrize("name", FIELDS)
def test_a_changed_field_is_the_first_cause(pair, name):
    """Losses and gradients are other ones from step 4 on, too, or, of an evaluation, its scores."""
    scale = 1 + (2e-6 if name in ROUNDING else 0.01)

    def edit(rows):
        set_field(rows, name, FIELDS[name])
        for row in rows[6:]:
            for field in ("val_loss",) if name == "eval.tokens" else ("loss", "grad_norm"):
                row.update({field: row[field] * scale} if field in row else {})

    forge(pair[1], edit)
    found = explain(*pair)
    assert (found.first, found.exit_code) == (name, 1), found.text
    assert [cause.name for cause in found.causes] == [name]


RECORDED = {
    "versions.torch": lambda start: start["versions"].update(torch="2.9.0"),
    "versions.python": lambda start: start["versions"].update(python="3.9.1"),
    "threads": lambda start: start.update(threads=7),
    "device": lambda start: start.update(device="NVIDIA H100"),
    "compile": lambda start: start.update(compile="model"),
    "commit": lambda start: start.update(commit="0" * 40),
    "hardware": lambda start: start.update(hardware="other"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_change_of_a_recorded_start_is_the_first_cause(pair, name):
    forge(pair[1], lambda rows: RECORDED[name](first_row(rows)))
    found = explain(*pair)
    assert (found.first, found.exit_code, found.partings) == (name, 1, []), found.text
    assert "This has changed no number in their common steps 1 to 10." in words(found)


def test_a_changed_tensor_is_named_and_not_explained(pair):
    file = checkpoint_at(pair[1], 10) / "model.safetensors"
    weights = load_file(file)
    weights["h.1.mlp.c_fc.weight"][3, 4] += 0.5
    save_file(weights, file)
    reseal(file)
    forge(pair[1])
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("tensor h.1.mlp.c_fc.weight", 3), found.text
    (parting,) = found.partings
    assert (parting.step, parting.equal_until) == (10, 5)
    assert_close(parting.most[0].largest, 0.5, 1e-6)
    assert "record no difference" in words(found)


def test_a_changed_loss_is_not_explained(pair):
    forge(pair[1], lambda rows: rows[6].update(loss=rows[6]["loss"] + 0.25))
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("loss", 3), found.text
    assert found.partings[0].step == all_rows(pair[0])[6]["step"]


def test_rounding_explains_no_large_difference(pair):
    """Threads differ, and losses are 1 % larger."""

    def edit(rows):
        first_row(rows)["threads"] = 7
        scaled(rows, "loss", 4)

    forge(pair[1], edit)
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("loss", 3), found.text
    assert "rounding in fp32 explains at most" in words(found)
    assert [cause.name for cause in found.causes] == ["threads"]


def test_a_changed_order_is_not_explained_by_rounding(pair):
    def edit(rows):
        first_row(rows)["threads"] = 7
        for row in rows[6:]:
            if "order_digest" in row:
                row["order_digest"] = row["order_digest"][::-1]

    forge(pair[1], edit)
    assert (explain(*pair).first, explain(*pair).exit_code) == ("order", 3)


def line_of(run, field, step=None):
    """The number of the first row with a field, of a step; and its step."""
    rows = enumerate(all_rows(run), 1)
    return next((n, row["step"]) for n, row in rows if field in row and step in (None, row["step"]))


CHANGES = {
    "val_bits_per_byte": (10, "line {} (step 10)"),
    "loss": (6, "line {} (step 6)"),
    "lr": (4, "line {} (step 4)"),
    "commit": (None, "line {} (start, step 0)"),
}
"""Fields of rows, the step, and how the changed row is named."""


@pytest.mark.parametrize("field", CHANGES)
def test_a_row_that_was_changed_is_said_first(pair, field):
    """It explains nothing, in either run."""
    step, place = CHANGES[field]
    number, _ = line_of(pair[1], field, step)
    file = pair[1] / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    value = json.loads(lines[number - 1])[field]
    lines[number - 1] = lines[number - 1].replace(
        f'"{field}": {json.dumps(value)}', f'"{field}": 1.5'
    )
    file.write_text("".join(lines))
    for runs, name in ((pair, "B"), (pair[::-1], "A")):
        found = explain(*runs)
        assert (found.verdict, found.first, found.exit_code) == ("changed", "records", 3)
        beginning, *_ = found.text.split("\n\n")[1:]
        assert beginning.startswith(f"{name} was changed after it was written: metrics.jsonl, ")
        assert place.format(number) in " ".join(beginning.split())
        assert f"verify_run.py {pair[1]}` checks all of {name}" in words(found)
    partings = [] if field == "commit" else [step]
    assert [parting.step for parting in found.partings] == partings
    assert all(not names for names in found.explained_by)


def test_a_changed_run_is_not_explained_by_another_cause(runs, tmp_path):
    """Its learning rate differs, too."""
    run = Path(shutil.copytree(runs / "lr", tmp_path / "copy"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    del lines[7]
    (run / "metrics.jsonl").write_text("".join(lines))
    found = explain(runs / "base", run)
    assert (found.verdict, found.exit_code) == ("changed", 3), found.text
    assert [cause.name for cause in found.causes] == ["optim.lr"]
    assert "metrics.jsonl, line 8 (checkpoint, step 5): this row was changed, or" in words(found)
    assert "Expected of unchanged files: optim.lr explains" in words(found)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_checkpoint_that_was_changed_is_said_first(pair, is_sealed):
    """Also if its manifest fits again, but is not the one that the rows have."""
    file = checkpoint_at(pair[1], 10) / "model.safetensors"
    spoil(file)
    place = "model.safetensors: its SHA-256 differs from the manifest's"
    if is_sealed:
        reseal(file)
        place = "step-00000010: its manifest's SHA-256 differs from metrics.jsonl's"
    found = explain(*pair)
    assert (found.verdict, found.first, found.exit_code) == ("changed", "checkpoints", 3)
    assert "B was changed after it was written: checkpoints/step-00000010" in words(found)
    assert place in words(found)
    assert found.checkpoints == [5, 10]
    (parting,) = found.partings
    assert (parting.what, parting.step, len(parting.tensors)) == ("tensors", 10, 1)
    assert "No number that is compared differs" not in words(found)


def test_a_checkpoint_without_readable_tensors_is_left_out(pair):
    file = checkpoint_at(pair[1], 10) / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * 16)
    found = explain(*pair)
    assert (found.verdict, found.checkpoints) == ("changed", [5]), found.text
    assert (
        "note: the checkpoint of step 10 is not compared: its tensors cannot be read" in found.text
    )


def cut(run, step):
    """Deletes the rows from a step on; the chain of the others stays right."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if json.loads(line)["step"] < step))


def test_rows_that_were_cut_off_are_a_change(pair):
    """The checkpoints follow rows that are missing."""
    cut(pair[1], 5)
    found = explain(*pair)
    assert (found.verdict, found.first, found.exit_code) == ("changed", "records", 3), found.text
    assert "metrics.jsonl: checkpoints 5, 10 followed rows that are missing here" in words(found)
    shutil.rmtree(pair[1] / "checkpoints")
    found = explain(*pair)
    assert found.verdict == "changed"
    assert "says that the run completed at step 10, but the row of that end is missing" in words(
        found
    )


def test_a_run_that_trains_has_no_end(pair, monkeypatch):
    """A killed one, too. Its newest checkpoint may have no row yet. A training may begin while the
    rows are read, or be killed before its start is in status.json."""
    file = pair[1] / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    saved = max(n for n, line in enumerate(lines) if '"event": "checkpoint"' in line)
    file.write_text("".join(lines[:saved]))
    completed = (pair[1] / "status.json").read_text()
    (pair[1] / "status.json").write_text('{"state": "running", "step": 10}')
    assert explain(*pair).verdict == "equal"
    found = iter([json.loads(completed), {}])
    with monkeypatch.context() as begins:
        begins.setattr(
            conditions, "ended_status", lambda folder: next(found) if folder == pair[1] else {}
        )
        assert explain(*pair).verdict == "equal"
    assert not [*found]
    file.write_text("".join(lines[: saved + 1]))
    edit_rows(pair[1], lambda rows: rows.append(rows[0] | {"step": 10}))
    (pair[1] / "status.json").write_text(completed)
    assert explain(*pair).verdict == "equal"


def test_an_edited_configuration_is_a_note(pair):
    """The rows have the one that was used."""
    file = pair[1] / "config.yaml"
    text = file.read_text()
    assert "warmup_steps: 2" in text
    file.write_text(text.replace("warmup_steps: 2", "warmup_steps: 3"))
    found = explain(*pair)
    assert found.exit_code == 0
    (note,) = found.notes
    beginning = "B: config.yaml: optim.warmup_steps is 3, in metrics.jsonl 2, whose value is"
    assert note.startswith(beginning)
    assert f"verify_run.py {pair[1]}` checks all of B" in note


def test_a_checkpoint_that_is_missing_is_a_note(pair):
    shutil.rmtree(checkpoint_at(pair[1], 5))
    found = explain(*pair)
    assert found.exit_code == 0
    (note,) = found.notes
    assert note.startswith("B: the rows keep checkpoints that are missing, of steps 5; ")
    assert f"verify_run.py {pair[1]}` checks all of B" in note


def test_a_forged_score_is_not_explained(pair):
    """All hashes fit. No other number differs."""
    forge(pair[1], lambda rows: rows[-3].update(val_bits_per_byte=1.0))
    assert "val_bits_per_byte" in all_rows(pair[0])[-3]
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("scores", 3), found.text
    (parting,) = found.partings
    assert (parting.field, parting.step) == ("val_bits_per_byte", 10)
    assert "The scores (val_bits_per_byte) differ first at step 10" in words(found)


FORGED = {
    "tokens": "counts",
    "loss_mean": "loss",
    "lambada_accuracy": "scores",
    "val_loss/a": "scores",
}
"""Fields of rows, and what the difference belongs to."""


@pytest.mark.parametrize("field", FORGED)
def test_all_recorded_numbers_are_compared(pair, field):
    """Also those of sources and tasks."""

    def add(rows, value):
        first_row(rows)["tasks"] = {"lambada": "0" * 64}
        rows[-3][field] = value

    for run, value in zip(pair, (1.5, 2.5), strict=True):
        if run == pair[0]:
            run = Path(shutil.copytree(run, pair[1].parent / "first"))
        forge(run, lambda rows, value=value: add(rows, value))
    found = explain(pair[1].parent / "first", pair[1])
    assert [(each.what, each.field) for each in found.partings] == [(FORGED[field], field)]
    assert (found.verdict, found.exit_code) == ("not explained", 3), found.text


def test_numbers_of_a_class_are_noted_and_not_judged(pair):
    """Such as a time; a speed is not even noted."""

    def edit(rows):
        rows[-3].update(seconds=3.0, tokens_per_second=1.0)

    forge(pair[1], edit)
    first = Path(shutil.copytree(pair[0], pair[1].parent / "first"))
    forge(first, lambda rows: rows[-3].update(seconds=2.0))
    found = explain(first, pair[1])
    assert (found.verdict, found.partings) == ("equal", [])
    assert found.notes == ["numbers of a class of one's own differ, and are not judged: seconds"]


def test_evaluations_of_other_amounts_are_not_compared(pair):
    """The amounts are, and bits per byte."""

    def edit(rows):
        set_field(rows, "eval.tokens", 600)
        for row in rows:
            row.update({"val_tokens": 600, "val_loss": 5.0} if "val_tokens" in row else {})

    forge(pair[1], edit)
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("eval.tokens", 1), found.text
    assert [(each.field, each.step) for each in found.partings] == [("val_tokens", 0)]


def test_a_forged_row_between_equal_ones_is_no_training(pair):
    forge(pair[1], lambda rows: rows[6].update(loss=rows[6]["loss"] + 0.25))
    step = all_rows(pair[0])[6]["step"]
    assert f"equal again at step {step + 1}: rows were changed" in words(explain(*pair))


def test_a_forged_checkpoint_between_equal_rows_is_no_training(pair):
    file = checkpoint_at(pair[1], 5) / "model.safetensors"
    weights = load_file(file)
    weights["h.1.mlp.c_fc.weight"][3, 4] += 0.5
    save_file(weights, file)
    reseal(file)
    forge(pair[1])
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("tensor h.1.mlp.c_fc.weight", 3), found.text
    assert "a file of the checkpoint of step 5 was changed, not the training" in words(found)
    assert "of step 5, the oldest checkpoint of both runs, 1 of" in words(found)


def test_a_shard_that_was_changed_on_disk(runs, tmp_path):
    """The manifest that both runs record is the same."""
    shutil.copytree(runs / "data", tmp_path / "moved")
    run = Path(shutil.copytree(runs / "base", tmp_path / "copy"))

    def edit(rows):
        first_row(rows)["config"]["data"]["path"] = [str(tmp_path / "moved")]
        rows[6]["loss"] *= 1.25

    forge(run, edit)
    spoil(tmp_path / "moved/train_000001.bin")
    found = explain(runs / "base", run)
    assert (found.verdict, found.first, found.exit_code) == ("changed", "data", 3), found.text
    assert "The data of B were changed after they were written" in words(found)
    assert "train_000001.bin" in words(found)


# No difference


@pytest.mark.parametrize("name", ["base", "again", "stopped"])
def test_runs_of_equal_numbers_are_equal(runs, name):
    """The same run, trained again with other rows and checkpoints, and resumed."""
    found = explain(runs / "base", runs / name)
    assert (found.verdict, found.exit_code, found.first) == ("equal", 0, ""), found.text
    assert (found.causes, found.partings) == ([], [])
    assert "A and B are equal" in words(found)


@pytest.mark.parametrize("name", UNSEEN)
def test_a_field_without_an_effect_is_no_cause(pair, name):
    forge(pair[1], lambda rows: set_field(rows, name, UNSEEN[name]))
    found = explain(*pair)
    assert (found.verdict, found.causes, found.ignored) == ("equal", [], [name]), found.text


def test_no_difference_of_a_job_and_of_a_torn_row(runs, pair):
    assert explain(runs / "job", runs / "job-again").exit_code == 0
    with (pair[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert explain(*pair).exit_code == 0


def test_a_shorter_run_is_equal_up_to_its_end(runs, pair):
    edit_rows(pair[1], lambda rows: rows.__delitem__(slice(7, None)))
    shutil.rmtree(pair[1] / "checkpoints")
    (pair[1] / "status.json").write_text('{"state": "running", "step": 6}')
    found = explain(*pair)
    assert found.exit_code == 0
    assert "later steps are not compared" in words(found)


# Several causes


def scaled(rows, field, first):
    """Multiplies a field by 1.01 in the rows from a step on."""
    for row in rows:
        if row["step"] >= first and field in row and "event" not in row:
            row[field] *= 1.01


SEVERAL = {"model.dropout": 0.1, "optim.weight_decay": 0.2, "optim.min_lr": 0.001}


def test_of_several_causes_the_first_is_that_of_the_first_difference(pair):
    """The learning rate can differ by `optim.min_lr` only, after the warm-up of two steps."""

    def edit(rows):
        for name, value in SEVERAL.items():
            set_field(rows, name, value)
        scaled(rows, "lr", 3)
        scaled(rows, "loss", 4)

    forge(pair[1], edit)
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("optim.min_lr", 1), found.text
    assert [(each.what, each.step) for each in found.partings] == [
        ("learning rate", 3),
        ("loss", 4),
    ]
    assert found.explained_by == [["optim.min_lr"]] * 2
    assert found.causes[0].step == 3


def test_causes_that_cannot_be_told_apart(pair):
    def edit(rows):
        for name in ("optim.weight_decay", "optim.betas"):
            set_field(rows, name, FIELDS[name])
        scaled(rows, "loss", 2)

    forge(pair[1], edit)
    found = explain(*pair)
    assert found.explained_by == [["optim.weight_decay", "optim.betas"]], found.text
    assert "Each explains it, and these numbers do not tell which did." in words(found)


def test_dropout_leaves_the_scores_of_the_untrained_model(pair):
    """So equal scores of step 0 do not rule it out beside another cause, and other ones are not
    explained by it."""

    def edit(rows, first):
        for name in ("model.dropout", "optim.weight_decay"):
            set_field(rows, name, FIELDS[name])
        for field in ("val_loss", "val_bits_per_byte"):
            scaled(rows, field, first)

    forge(pair[1], lambda rows: edit(rows, 1))
    (parting,) = explain(*pair).partings
    assert (parting.equal_until, parting.step) == (0, 10)
    assert explain(*pair).explained_by == [["model.dropout", "optim.weight_decay"]]
    forge(pair[1], lambda rows: edit(rows, 0))
    assert (explain(*pair).first, explain(*pair).exit_code) == ("scores", 3)


def test_an_update_explains_no_loss_of_its_own_step(pair):
    """The loss of step 1 is that of the initial weights."""

    def edit(rows):
        set_field(rows, "optim.weight_decay", 0.2)
        scaled(rows, "loss", 1)

    forge(pair[1], edit)
    assert (explain(*pair).first, explain(*pair).exit_code) == ("loss", 3)


def test_another_tokenizer_is_the_first_cause(pair):
    """Its losses are of other tokens, so bits per byte are compared."""

    def edit(rows):
        start = first_row(rows)
        start.update(tokenizer_sha256="0" * 64, vocab_size=300, data_manifest="1" * 64)
        start["epoch_size"] += 7
        start["config"]["data"]["path"] = ["moved/data"]
        scaled(rows, "val_bits_per_byte", 0)
        others = {
            "loss": 7.5,
            "val_loss": 7.5,
            "val_tokens": 7,
            "tokens": 7,
            "order_digest": "0" * 64,
        }
        for row in rows:
            if "event" not in row:
                row.update({field: value for field, value in others.items() if field in row})

    forge(pair[1], edit)
    found = explain(*pair)
    assert (found.first, found.exit_code) == ("tokenizer", 1), found.text
    assert [parting.field for parting in found.partings] == ["val_bits_per_byte"]
    assert [cause.name for cause in found.causes] == ["tokenizer"]
    assert "differ first in tokenizer (512 tokens (" in words(found)
    assert "data.path" not in found.ignored
    assert "The order of the data is the same" not in words(found)


def test_two_texts_are_named_beside_their_tokenizers(runs, tmp_path):
    """From the manifests. Values of the user are named before those of a rule."""
    base, run = (Path(shutil.copytree(runs / "base", tmp_path / name)) for name in "ab")
    folder = Path(shutil.copytree(runs / "data", tmp_path / "data"))
    edit_manifest(folder, source="/texts/other.txt", tokenizer_sha256="0" * 64)
    command = "scripts/train_gpt2.py --data.path data/mine --optim.weight_decay 0.2"
    forge(base, lambda rows: first_row(rows).update(command=command))

    def edit(rows):
        start = first_row(rows)
        start.update(tokenizer_sha256="0" * 64, data_manifest=read_manifest(folder).hash)
        start["command"] = command
        start["config"]["data"]["path"] = [str(folder)]
        for name in ("optim.lr", "optim.min_lr", "model.n_layer", "model.n_head", "model.n_embd"):
            set_field(rows, name, 3)
        set_field(rows, "optim.weight_decay", 0.2)
        scaled(rows, "val_bits_per_byte", 0)
        scaled(rows, "lr", 3)

    forge(run, edit)
    found = explain(base, run)
    causes = {cause.name: cause for cause in found.causes}
    source = read_manifest(runs / "data").source
    assert causes["data"].values == (Path(source).name, "other.txt"), found.text
    assert f"differ first in text and tokenizer ({Path(source).name} and other.txt, " in words(
        found
    )
    assert "They also differ in optim.weight_decay, " in words(found)
    (rate,) = (each for each in found.partings if each.what == "learning rate")
    one, other = rate.apart[0].values
    assert f"learning rates differ first at step 3: {one:.3g} and {other:.3g}" in words(found)


def test_the_better_run_is_said(runs, pair):
    last = [row for row in all_rows(runs / "base") if "val_bits_per_byte" in row][-1]
    bits = last["val_bits_per_byte"]
    found = explain(runs / "base", runs / "base")
    assert f"The last val_bits_per_byte: A {bits:.4f} (step 10), B {bits:.4f}" in words(found)
    assert (found.last_scores.values, found.last_scores.better) == ((bits, bits), "")
    forge(pair[1], lambda rows: rows[-3].update(val_bits_per_byte=bits - 0.25))
    for runs_, name in ((pair, "B"), (pair[::-1], "A")):
        assert f"; {name} is better, by 0.25." in words(explain(*runs_))
    scores = explain(runs / "base", runs / "window").last_scores
    assert not scores.is_of_one_text
    job = explain(runs / "job", runs / "job-rate").last_scores
    assert job.field == "val_loss"


def test_a_score_that_is_equal_again_was_changed(runs, tmp_path):
    """A training does not come back to its numbers."""
    pair = [Path(shutil.copytree(runs / "base", tmp_path / name)) for name in "ab"]
    for run, value in zip(pair, (1.0, 2.0), strict=True):
        forge(run, lambda rows, value=value: rows[6].update(val_bits_per_byte=value))
    found = explain(*pair)
    assert "They are equal again at step 10: rows were changed, not the training." in words(found)


def test_other_data_are_in_no_list_of_what_changes_nothing(runs):
    assert explain(runs / "base", runs / "window").ignored == ["run_name"]


def test_a_section_without_settings_is_no_cause(pair):
    """A setting of a class is one of its own; of two classes, it follows from the class."""
    assert (
        "own" not in first_row(all_rows(pair[0]))["config"]
        or not (first_row(all_rows(pair[0]))["config"]["own"])
    )
    forge(pair[1], lambda rows: first_row(rows)["config"].update(own={"times": 3}))
    assert [cause.name for cause in explain(*pair).causes] == ["own.times"]
    code = {"name": "wide.py:Wide", "sha256": "0" * 64}
    forge(pair[1], lambda rows: first_row(rows).update(code=code))
    assert [cause.name for cause in explain(*pair).causes] == ["code"]


def test_steps_that_a_time_has_settled_are_not_the_users(runs, tmp_path):
    pair = [Path(shutil.copytree(runs / "base", tmp_path / name)) for name in "ab"]

    def settle(rows, steps):
        """Inserts the event after the row of step 2."""
        config = json.loads(json.dumps(first_row(rows)["config"]))
        config["train"]["steps"] = config["optim"]["decay_steps"] = steps
        first_row(rows)["config"]["train"].update(steps=None, minutes=1.0)
        first_row(rows)["config"]["optim"]["decay_steps"] = None
        number = next(n for n, row in enumerate(rows) if row["step"] == 2 and "loss" in row)
        event = {"event": "length", "step": 2, "steps": steps, "minutes": 1.0, "config": config}
        rows.insert(number + 1, event)

    def resume(rows):
        """Adds a start with the steps that were settled."""
        event = first_row(rows) | {"step": 10, "config": first_row(rows, "length")["config"]}
        rows.append(event)

    for run, steps in zip(pair, (10, 12), strict=True):
        forge(run, lambda rows, steps=steps: settle(rows, steps))
    forge(pair[0], resume)
    found = explain(*pair)
    assert [cause.name for cause in found.causes] == ["train.steps"], found.text
    assert found.ignored == []
    text = (
        "differ first in train.steps (10 by train.minutes and 12 by train.minutes, from step 3 on)"
    )
    assert text in words(found)


def test_values_of_the_rule_for_a_text_are_not_the_users(pair):
    def edit(rows):
        command = "scripts/train_gpt2.py --data.path data/mine --optim.warmup_steps 3"
        first_row(rows)["command"] = command
        set_field(rows, "optim.lr", 0.02)
        set_field(rows, "optim.warmup_steps", 3)

    forge(pair[1], edit)
    origins = {cause.name: cause.origins for cause in explain(*pair).causes}
    assert origins == {"optim.lr": ("", "own_text"), "optim.warmup_steps": ("", "")}


# What is said of a cause


def test_the_shard_the_window_and_its_first_step(runs):
    """Losses part in the step that trains on the window, and in no step before."""
    found = explain(runs / "base", runs / "window")
    shard = read_manifest(runs / "data").splits["train"][0].file
    differ, windows, step = found.causes[0].details
    assert differ.endswith(f"differ in train shard {shard}")
    assert windows.endswith(f"windows differ; the first is window {trained_window(runs / 'data')}")
    assert windows.startswith("1 of ")
    (loss,) = (parting for parting in found.partings if parting.what == "loss")
    assert (loss.equal_until, loss.step) == (4, 5)
    assert found.causes[0].step == 5
    assert step == "step 5 is the first that trained on one of them"


def test_changed_lines_of_a_class_are_shown_and_not_executed(runs, monkeypatch):
    monkeypatch.setattr(Code, "load", None)
    details = explain(runs / "mine", runs / "other").causes[0].details
    assert {"-RATE = 1e-3", "+RATE = 2e-3"} <= {*details}


def test_each_cause_has_its_first_step(runs):
    found = explain(runs / "base", runs / "ranks")
    assert found.causes[0].step == 6
    assert "The order of the data is the same" in words(found)
    rolled = explain(runs / "base", runs / "rolled")
    assert rolled.causes[0].step == 6
    branch = explain(runs / "base", runs / "branch")
    assert (branch.causes[0].step, branch.steps) == (6, (5, 10))


def test_what_a_difference_follows_from_has_its_effects(runs):
    """A schedule without an end of its own ends with the run."""
    (cause,) = explain(runs / "base", runs / "length").causes
    assert cause.effects == ("rate", "length")
    (cause,) = explain(runs / "masks", runs / "masks-micro").causes
    assert cause.effects == ("model", "rounding")


def test_every_field_has_an_effect():
    """The longest beginning of its name; a new section needs a decision."""
    for command in CONFIGS.values():
        for name, _ in leaves(command):
            assert effects_of(name, {}, {}), name
            assert name in EFFECTS or name.rpartition(".")[0] in EFFECTS, name
    assert effects_of("own.experts", {}, {}) == effects_of("code", {}, {})


def test_limits_grow_with_the_steps():
    for precision, limits in LIMITS.items():
        steps, shares = zip(*limits, strict=True)
        assert [*steps] == sorted(steps)
        assert [*shares] == sorted(shares)
        assert limit(precision, 1) == shares[0]
        assert limit(precision, 10**9) == shares[-1]


def test_shares_have_one_notation():
    shares = [5.3e-8, 3e-5, 0.0301, 0.9876, math.inf, math.nan]
    found = ["5.3e-08", "3e-05", "0.03", "0.99", "no number", "no number"]
    assert [explanation._share(share) for share in shares] == found
    assert explanation._amount(Apart(1, (2.0, 2.5))) == "5.0e-01 (0.25)"
    assert explanation._amount(Apart(1, (0.0, 2.0))) == "2.0e+00"
    assert explanation._amount(Apart(1, (None, 2.0))) == "no number"


def test_no_command_is_cut_at_the_end_of_a_line():
    command = "`python scripts/verify_run.py runs/a-run-of-mine`"
    for before in range(explanation.LINE):
        lines = explanation._filled(f"{'a ' * before}{command} checks all").splitlines()
        assert any("runs/a-run-of-mine`" in line for line in lines)
        assert max(map(len, lines)) <= explanation.LINE


# The command


def test_the_command_prints_json(runs, capsys):
    config = ExplainConfig(runs=(str(runs / "base"), str(runs / "lr")), json=True)
    assert explain_runs(config) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["first"], found["exit_code"]) == ("optim.lr", 1)
    assert found["text"] == explain(runs / "base", runs / "lr").text
    assert found["partings"][0]["explained_by"] == ["optim.lr"]


def test_runs_at_urls(runs, tmp_path, monkeypatch, capsys):
    """Copies of rows and checkpoints are compared."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    urls = [mirrored(runs / name, tmp_path / "bucket") for name in ("base", "lr")]
    config = with_local_runs(ExplainConfig(runs=(urls[0], urls[1]), json=True))
    assert explain_runs(config) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == urls
    assert found["text"].startswith(f"A = {urls[0]}\nB = {urls[1]}\n")
    assert f"{tmp_path}/cache" not in json.dumps(found)
    here = explain(runs / "base", runs / "lr").as_json()
    assert found["partings"] == here["partings"]
    assert found["checkpoints"] == [5, 10]
    url = mirrored(runs / "lr", tmp_path / "spoiled")
    spoil(tmp_path / "spoiled/lr/step-00000010/model.safetensors")
    spoiled = with_local_runs(ExplainConfig(runs=(url, urls[0])))
    changed = explain(*map(Path, spoiled.runs))
    assert changed.verdict == "changed"
    assert f"verify_run.py {url}` checks all of A" in words(changed)
    expect_error(f"is of a regression run, {url} of", explain, Path(spoiled.runs[0]), runs / "job")


def mirrored(run, bucket):
    """The URL of a copy of a run, as `checkpoint.mirror` makes it."""
    for file in ("metrics.jsonl", "config.yaml", "status.json"):
        (bucket / run.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(run / file, bucket / run.name)
    for checkpoint in (run / "checkpoints").iterdir():
        shutil.copytree(checkpoint, bucket / run.name / checkpoint.name)
    return f"file://{bucket}/{run.name}"


def test_wrong_input_is_one_line(runs, pair, tmp_path):
    base = runs / "base"
    code, errors = run_script("explain", [str(base)])
    assert (code, errors.count("error: ")) == (2, 1)
    assert "should be two run folders" in errors
    expect_error("is of a regression run, .* of a gpt2 run", explain, base, runs / "job")
    expect_error("there is no such folder", explain, base, tmp_path / "missing")
    expect_error("is no run folder", explain, base, tmp_path)
    expect_error("is a checkpoint", explain, checkpoint_at(base, 5), base)
    (pair[1] / "metrics.jsonl").write_text("no row\n")
    expect_error("has no row of a start", explain, *pair)
    edit = {"event": "start", "step": 0, "kind": "of a stranger"}
    (pair[1] / "metrics.jsonl").write_text(json.dumps(edit) + "\n")
    expect_error("unknown kind of run", explain, *pair)
