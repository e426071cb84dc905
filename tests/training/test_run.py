"""A run: opened by small files, refused before long work, captured and restored in the middle."""

import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ROOT
from ranks import in_turn, run_ranks, run_until_killed
from runs import (
    checkpoint_at,
    complete,
    expect_defect,
    job_config,
    open_folder,
    reseal,
    rows,
    said,
    spoil,
    status,
    train,
    train_with_faults,
    training_config,
    untimed,
    verified,
)

from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.preparation.encode import write_manifest
from gpt2_ddp.records.rows import METRICS, STATUS, is_locked
from gpt2_ddp.records.run_folder import RunFolder, RunLog


def files(folder):
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


# Captured and restored


def there_and_back(config):
    """Trains four steps, saves; then three times four
    more from there, and what they came to each time."""
    import torch
    from runs import built

    from gpt2_ddp.training.loop import train_step

    found = []
    with built(config) as trainer:
        run = trainer.run
        trainer.warm_up()
        for _ in range(4):
            train_step(trainer)
        run.store.save(trainer.snapshot(), wait=True)
        saved = run.store.newest()
        assert saved
        for _ in range(3):
            losses = torch.stack([train_step(trainer).losses["loss"] for _ in range(4)]).tolist()
            after = trainer.snapshot()
            tensors = {
                name: value.numpy().tobytes()
                for name, value in (after.model | after.optimizer).items()
            }
            found.append((losses, run.step, tensors, after.state))
            trainer.load(saved)
            assert run.step == 4
        run.accelerator.end_training()
    return found


@pytest.mark.parametrize("kind", ["muon", "mlp"])
def test_back_in_the_middle_of_a_run(corpus, tmp_path, kind):
    """The same four steps have the same bits, on every
    rank: weights, average, moments, order, sums over the epoch."""
    changes = {"model.dropout": 0.1, "optim.name": "muon", "optim.average": 0.3}
    if kind == "muon":
        config = training_config(corpus, tmp_path, changes)
    else:
        config = job_config(kind, tmp_path)
    for first, *others in run_ranks(there_and_back, 2, config):
        assert first[1] == 8
        assert all(other == first for other in others)


# Fields that have come or gone


def test_a_run_without_scores_begins_without_a_row(corpus, tmp_path):
    """One without a validation split; its evaluations have rows as other steps."""
    config = training_config(
        other_data(corpus, tmp_path), tmp_path, {"train.steps": 2, "eval.every": 2}
    )
    assert train(config) == "completed"
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


# Refused before long work


def without_long_work(configs, large=(".bin", ".safetensors")):
    """What each training prints, or its refusal, while nothing
    is hashed but small files, and no model is built."""
    import hashlib

    from gpt2_ddp.tasks import pretraining, supervised

    file_digest = hashlib.file_digest

    def small(file, algorithm):
        assert Path(file.name).suffix not in large, f"{file.name} is hashed"
        return file_digest(file, algorithm)

    def build(*args):
        raise AssertionError("a model is built")

    os.environ["CXX"] = "no-such-compiler"
    hashlib.file_digest = small
    pretraining.GPT = supervised.build_job_optimizer = build
    found = in_turn(*[(said, train, config) for config in configs])
    return [one if isinstance(one, str) else one[1] for one in found]


def other_data(corpus, folder):
    other = Path(shutil.copytree(corpus, folder / "other"))
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, splits={"train": manifest.splits["train"]}))
    return other


def test_another_training_is_refused(corpus, tmp_path, halfway):
    """Other settings, other data, another kind of run; nothing is written.
    tests/config/test_wrong_input.py has each field."""
    shutil.copytree(halfway, tmp_path / "runs")
    other = training_config(other_data(corpus, tmp_path), tmp_path / "runs")
    configs = [training_config(corpus, tmp_path / "runs", {"optim.name": "muon"})]
    configs.append(job_config("regression", tmp_path / "runs"))
    expected = [
        "differ from those that the run was started with",
        "optim.name = muon: the run was started with adamw; restore it",
        "run_name = run: the run folder holds a run of another kind, gpt2",
    ]
    before = files(tmp_path)
    # the checkpoint is hashed before the data are compared
    calls = [(without_long_work, [other], (".bin",)), (without_long_work, configs)]
    for found in run_ranks(in_turn, 2, *calls):
        for message, refusal in zip(expected, [*found[0], *found[1]], strict=True):
            assert message in refusal
    assert files(tmp_path) == before


def test_a_refused_run_leaves_no_folder(corpus, tmp_path):
    other = str(other_data(corpus, tmp_path))
    refused = {
        "train.init_from = nowhere": {"train.init_from": "nowhere"},
        "data.path = nowhere: manifest.json cannot be read": {"data.path": "nowhere"},
        "processes = 2: more than the 1 windows": {
            "train.global_batch_tokens": 32,
            "eval.every": 1,
        },
        "train.compile = blocks: needs a compiler": {
            "train.compile": "blocks",
            "data.path": "nowhere",
        },
        f"eval.patience = 2: {other} has no validation split": {
            "eval.patience": 2,
            "data.path": other,
        },
    }
    configs = [training_config(corpus, tmp_path / "runs", changes) for changes in refused.values()]
    for refusals in run_ranks(without_long_work, 2, configs):
        assert all(
            message in refusal for message, refusal in zip(refused, refusals, strict=True)
        ), refusals
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_complete_run_says_so_at_once(corpus, tmp_path, trained, trained_job):
    """Without hashing the corpus, building, or writing
    anything; of its data, only small files are compared."""
    shutil.copytree(trained, tmp_path / "gpt2/run")
    shutil.copytree(trained_job, tmp_path / "job/run")
    changes = {"optim.decay_steps": 10}
    configs = [
        training_config(trained.parent / "data", tmp_path / "gpt2", changes),
        job_config("regression", tmp_path / "job", {"train.epochs": 2}),
        training_config(other_data(corpus, tmp_path), tmp_path / "gpt2", changes),
    ]
    before = files(tmp_path)
    (found,) = run_ranks(without_long_work, 1, configs, (".bin",))
    assert [text.startswith("run is complete at step") for text in found] == [True, True, False], (
        found
    )
    assert "differ from those that the run was started with" in found[2]
    assert files(tmp_path) == before


@pytest.mark.parametrize("is_forged", [False, True])
def test_a_run_whose_last_checkpoint_is_damaged_is_not_complete(
    tmp_path, trained, capsys, is_forged
):
    """It trains its end again, from the one before, and ends
    as it did. That somebody forged one stays a defect."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    weights = checkpoint_at(run, 10) / "model.safetensors"
    content = weights.read_bytes()
    spoil(weights)
    if is_forged:
        reseal(weights)
    config = training_config(trained.parent / "data", tmp_path, {"optim.decay_steps": 10})
    complete(config, 2)
    assert weights.read_bytes() == content
    assert untimed(run) == untimed(trained)
    assert verified(run, capsys)[0] == is_forged
    if is_forged:
        shutil.rmtree(run / "checkpoints/step-00000010.rejected")
        expect_defect(
            run, capsys, "checkpoints/step-00000010.rejected: is not what metrics.jsonl recorded"
        )


# Whose checkpoints are gone


def test_a_run_whose_checkpoints_are_gone_is_not_started_over(corpus, tmp_path, halfway):
    """The rows name its checkpoints. Whoever wants to start
    over removes the metrics, or takes another name."""
    run = Path(shutil.copytree(halfway / "run", tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    (run / STATUS).unlink()
    config = training_config(corpus, tmp_path)
    metrics = (run / METRICS).read_bytes()
    ((refusal,),) = run_ranks(without_long_work, 1, [config])
    assert f"run_name = run: {run} has lost its checkpoints" in refusal
    assert (run / METRICS).read_bytes() == metrics
    (run / METRICS).unlink()
    folder = RunFolder(config)
    folder.open()
    folder.release()


def test_a_resume_from_an_older_checkpoint_than_the_rows_record_says_so(corpus, tmp_path):
    """In one line, once: the resumed run's rows record
    what is there. A run that has all says nothing."""
    config = training_config(corpus, tmp_path)
    train(config)
    shutil.rmtree(checkpoint_at(tmp_path / "run", 10))
    _, _, errors = said(train, config)
    gone = (
        "warning: the checkpoint of step 10, which metrics.jsonl records, is gone; the run "
        "resumes from step 5\n"
    )
    assert errors.count(gone) == 1
    _, _, errors = said(train, config)
    assert "gone" not in errors


RECORDS = [
    ([], 0),
    ([("start", 0, []), ("checkpoint", 5, [0, 5])], 5),
    ([("checkpoint", 5, [5]), ("checkpoint", 9, [5, 9]), ("rollback", 5, None)], 5),
    ([("checkpoint", 9, [5, 9]), ("end", 12, [5])], 5),
    ([("checkpoint", 9, [5, 9]), ("start", 5, [5])], 5),
]
"""Events with their steps and the checkpoints that
were there; the newest one that should be there."""


@pytest.mark.parametrize(("records", "newest"), RECORDS)
def test_the_newest_checkpoint_by_the_rows(tmp_path, records, newest):
    folder = open_folder(tmp_path / "run")
    log = RunLog(folder)
    for event, step, kept in records:
        log.append({"event": event, "step": step} | ({} if kept is None else {"kept": kept}))
    assert log.newest_checkpoint() == newest
    folder.release()


def test_a_run_that_is_killed_before_its_first_checkpoint_starts_over(tmp_path, trained_job):
    config = job_config("regression", tmp_path, {"train.epochs": 2})
    run_until_killed(train_with_faults, 1, config, (0, 0), math.nan, 3)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    complete(config)
    assert untimed(tmp_path / "run") == untimed(trained_job)


# Held by one trainer


def is_locked_after(config):
    """Trains; whether another process then finds the folder locked."""
    train(config)
    child = os.fork()
    if not child:
        os._exit(is_locked(Path(config.output_dir) / config.run_name))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_one_process_lets_go_of_its_folder(corpus, tmp_path):
    """Though the process, such as a notebook, lives on."""
    assert run_ranks(is_locked_after, 1, training_config(corpus, tmp_path, {"train.steps": 1})) == [
        0
    ]


def recorded_early(config):
    """What status.json holds if a rank is lost before the task is made."""
    from gpt2_ddp.distributed import watchdog
    from gpt2_ddp.training.start import open_run

    records = []
    report_to = watchdog.Watchdog.report_to
    watchdog.Watchdog.report_to = lambda self, report, record: (
        records.append(record),
        report_to(self, report, record),
    )

    def make_task(*_):
        records[0]("rank 1 was killed", False)
        raise UserError("data", "x", "ends the start")

    with pytest.raises(UserError, match="ends the start"):
        open_run(config, make_task).__enter__()
    return status(Path(config.output_dir) / config.run_name)


def test_a_rank_that_is_lost_while_the_start_is_found_is_recorded(corpus, tmp_path):
    (found,) = run_ranks(recorded_early, 1, training_config(corpus, tmp_path))
    assert found == {"state": "failed", "step": 0, "reason": "rank 1 was killed"}


# Described


@pytest.mark.parametrize("way", ["save", "start"])
def test_architecture_names_the_calls_of_a_save_and_of_a_start_in_their_order(trained, way):
    text = (ROOT / "docs/architecture.md").read_text()
    items = text.partition(f"**The way of a {way}**")[2].split("\n\n")[1].splitlines()
    names = [name for item in items for name in re.findall(r"`([\w.]+)`", item.partition(":")[0])]
    assert len(names) > 5
    called = json.loads((trained.parent / "calls.json").read_text())
    found = [name for call in called for name in names if call.endswith(f".{name}")]
    assert found == names


def test_each_name_of_architectures_tour_is_in_the_file_beside_it():
    text = (ROOT / "docs/architecture.md").read_text()
    table = text.partition("| step of the tour |")[2].partition("\n\n")[0]
    tour = text.partition("```python")[2].partition("```")[0]
    rows = [line.split("|") for line in table.splitlines() if "](../" in line]
    assert len(rows) > 8
    for _, names, files, _ in rows:
        code = "".join(
            (ROOT / "docs" / path).read_text() for path in re.findall(r"\]\((.*?)\)", files)
        )
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"(def|class) {name}\b|\b{name}:", code), name
            assert re.search(rf"\b{name}\b", tour) or name == "Task", name
