"""What a run recorded is what its training gives again, to the bit; what was altered since is
found, and nothing in the run folder is touched."""

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from commands import expect_error
from ranks import in_turn, run_ranks
from runs import (
    checkpoint_at,
    complete,
    events,
    expect_defect,
    forge,
    reseal,
    said,
    training_config,
    verified,
)
from safetensors.torch import load_file, save_file

from gpt2_ddp.checkpoint.format import MODEL, OPTIMIZER
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.files import read_json
from gpt2_ddp.reports import replay as replay_module
from gpt2_ddp.reports.replay import compare_rows, plan
from gpt2_ddp.reports.verify import verify_run

INTACT = (
    "ok      replay from step 4 to 8, processes: 1, rows: 4, and all tensors, bit for bit",
    "ok      replay from step 8 to 10, processes: 1, rows: 2, bit for bit",
)
"""From one checkpoint to the next; and to a row before the
next, in a part that was trained again after a rollback."""


def replayed(run, replay, data=None):
    """Exit code of verify_run.py, and its lines from the
    one of the order on. The training warns of nothing."""
    code, text, errors = said(
        verify_run, VerifyConfig(run=str(run), replay=replay, data=(str(data),) if data else ())
    )
    assert "warning" not in errors
    lines = text.splitlines()
    return code, lines[
        next(n for n, line in enumerate(lines) if "learning rates: recomputed" in line) :
    ]


@pytest.fixture(scope="module")
def recorded(corpus, tmp_path_factory):
    """A run of 12 tiny steps with dropout and checkpoints at 4, 8 and 12; its shards are beside it.
    Steps 9 to 12 are bad at first: the run goes back to step 8 and skips their data."""
    place = tmp_path_factory.mktemp("replayed")
    shutil.copytree(corpus, place / "data")
    changes = {
        "train.steps": 12,
        "checkpoint.every": 4,
        "eval.every": 3,
        "model.dropout": 0.1,
        "guard.patience": 2,
    }
    changes |= {"train.global_batch_tokens": 128, "eval.tokens": 200, "train.micro_batch_size": 4}
    complete(training_config(place / "data", place, changes), 1, (32, 48))
    assert [row["step"] for row in events(place / "run", "rollback")] == [8]
    return place


@pytest.mark.parametrize(
    ("name", "value"), [("position", 48), ("skipped_ranges", []), ("skipped_ranges", [[32, 40]])]
)
def test_a_state_after_a_rollback(recorded, tmp_path, capsys, name, value):
    """The rows know which data the run skipped."""
    run = Path(shutil.copytree(recorded / "run", tmp_path / "run"))
    assert verified(run, capsys)[0] == 0
    file = checkpoint_at(run, 12) / "state.json"
    state = read_json(file)
    state["feed"][name] = value
    file.write_text(json.dumps(state))
    reseal(file)
    forge(run)
    expect_defect(run, capsys, f"checkpoints/step-00000012/state.json: feed.{name} is ")


def test_trained_again_it_is_the_same_and_nothing_is_touched(recorded):
    """While a trainer holds the run's lock; by as many threads, as sums are in another order for
    another number of them."""
    run = recorded / "run"
    before = {file: file.stat().st_mtime_ns for file in (run, *run.rglob("*"))}
    with (run / ".lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        ((found, threads),) = run_ranks(replayed_by_three_threads, 1, run)
    for (code, lines), line in zip(found, INTACT, strict=True):
        assert (code, lines[1:], threads) == (0, [line, f"{run} is intact"], 1)
    assert {file: file.stat().st_mtime_ns for file in (run, *run.rglob("*"))} == before


def replayed_by_three_threads(run):
    import torch

    torch.set_num_threads(3)
    return [replayed(run, steps) for steps in ("4:8", "8:10")], torch.get_num_threads()


def test_another_device_or_torch_is_compared_to_a_tolerance(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    state = {"device": "cpu", "processes": 1, "versions": {}}
    for changes, exact in (
        ({}, True),
        ({"device": "NVIDIA H200"}, False),
        ({"versions": {"torch": "2.0.0"}}, False),
    ):
        processes, reasons = replay_module._how_exactly(config, state | changes)
        assert (processes, reasons == []) == (1, exact)
    dropout = training_config(corpus, tmp_path, {"model.dropout": 0.1})
    expect_error("dropout", replay_module._how_exactly, dropout, state | {"device": "NVIDIA H200"})


@pytest.mark.parametrize(
    ("setting", "device", "settled"),
    [
        # it says so itself
        ("auto", "cpu", "model"),
        ("auto", "NVIDIA H200", "auto"),
        ("off", "cpu", "off"),
    ],
)
def test_what_auto_came_to_is_what_the_run_says(corpus, tmp_path, setting, device, settled):
    """A span's few steps could make it come to something
    else; on another device it is settled for that one."""
    saved = training_config(corpus, tmp_path, {"train.compile": setting}).model_dump(mode="json")
    state = {"device": device, "compile": "model", "micro_batch": 2}
    found = replay_module._config("gpt2", saved, str(tmp_path), (), state)
    assert found.train.compile == settled


def alter_tensor(place, step, file_name, name, factor):
    file = checkpoint_at(place / "run", step) / file_name
    tensors = load_file(file)
    tensors[name].view(-1)[5] *= factor
    save_file(tensors, file)
    reseal(file)
    forge(place / "run")


def alter_row(place, name, times):
    def edit(rows):
        row = next(row for row in rows if row["step"] == 6 and "event" not in row)
        row[name] *= times

    forge(place / "run", edit)


ALTERED = [
    (
        lambda place: alter_tensor(place, 4, MODEL, "h.1.mlp.c_fc.weight", 2),
        "metrics.jsonl: ",
        None,
    ),
    (
        lambda place: alter_tensor(place, 8, OPTIMIZER, "exp_avg.ln_f.weight", 1.00001),
        f"checkpoints/step-00000008/{OPTIMIZER}: has other bits",
        1,
    ),
    (lambda place: alter_row(place, "loss", 1 + 2**-52), "metrics.jsonl: loss of step 6 is ", 1),
    (
        lambda place: (checkpoint_at(place / "run", 4) / MODEL).write_bytes(b""),
        "replay from step 4 to 8: its checkpoint is damaged, so it cannot be trained again",
        1,
    ),
]
"""An edit after which all hashes fit, but for the
last; the beginning of the first defect, and the
number of defects; None: one or more."""


def test_what_was_altered_is_found(recorded, tmp_path):
    """By the replay alone. Weights that were altered
    spoil only the stretches that they belong to."""
    places = [
        Path(shutil.copytree(recorded, tmp_path / str(number))) for number in range(len(ALTERED))
    ]
    for place, (alter, _, _) in zip(places, ALTERED, strict=True):
        alter(place)
    calls = [(replayed, place / "run", "4:8", place / "data") for place in places]
    calls.append((replayed, places[0] / "run", "8:12", places[0] / "data"))
    *found, (_, later) = run_ranks(in_turn, 1, *calls)[0]
    for place, (_, first, defects), (code, lines) in zip(places, ALTERED, found, strict=True):
        wrong = [line.removeprefix("defect  ") for line in lines if line.startswith("defect")]
        assert code == 1
        assert wrong[0].startswith(first), wrong
        assert len(wrong) == defects or defects is None
        assert lines[-1].startswith(f"{place / 'run'} is not intact, defects: ")
    assert not any(line.startswith("defect") for line in later)


def test_what_is_not_there_cannot_be_replayed(recorded, tmp_path):
    for steps in ("5:8", "8:8", "8:4", "8:13", "4:9", "4:12"):
        expect_error(f"^replay = {steps}: .*4, 8, 12", plan, recorded / "run", steps)
    expect_error("^replay = 1:2", plan, tmp_path, "1:2")
    for text in ("8", "a:b", "4:8:12"):
        expect_error("replay = ", load, VerifyConfig, [f"--replay={text}"])
    shutil.copytree(recorded / "run/checkpoints", tmp_path / "checkpoints")  # nothing was recorded
    expect_error("^replay = 4:5", plan, tmp_path, "4:5")


def test_a_small_job_ends_where_it_is_told_to(trained_job):
    """Inside its second epoch, or at its end; the mean loss of that is compared too."""
    (found,) = run_ranks(
        in_turn, 1, *[(replayed, trained_job, steps) for steps in ("9:12", "9:18")]
    )
    assert [(code, lines[1]) for code, lines in found] == [
        (0, "ok      replay from step 9 to 12, processes: 1, rows: 3, bit for bit"),
        (
            0,
            "ok      replay from step 9 to 18, processes: 1, rows: 9, and all tensors, bit for bit",
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "exact", "near"),
    [
        ({}, 0, 0),
        ({"loss": 2.0 + 9e-6}, 1, 0),
        ({"loss": 2.0 + 2e-5}, 1, 1),
        ({"loss": None}, 1, 1),
        ({"grad_norm": 1.0}, 1, 1),
        ({"tokens": 8, "lr": 0.1001, "order_digest": "b"}, 3, 3),
        ({"mfu": 3.0, "own": 1.0, "tokens/x": 1}, 0, 0),
        ({"val_accuracy": 0.5}, 1, 0),
        ({"val_loss": 1.0}, 1, 1),
    ],
)
def test_sums_may_differ_in_their_last_digits_and_nothing_else_may(changes, exact, near):
    row = {"step": 1, "loss": 2.0, "grad_norm": None, "lr": 0.1, "tokens": 7}
    row |= {"order_digest": "a", "val_accuracy": 0.25, "mfu": 1.0, "own": 2.0}
    for pair in (({1: row}, {1: row | changes}), ({1: row | changes}, {1: row})):
        assert [len(compare_rows(*pair, exact=way)) for way in (True, False)] == [exact, near]
    assert len(compare_rows({1: row}, {}, exact=True)) == 1


def test_a_rollback_that_its_checkpoint_cannot_have_is_not_replayed(recorded, tmp_path):
    run = Path(shutil.copytree(recorded / "run", tmp_path / "run"))
    forge(
        run,
        lambda rows: [
            row.update(skipped_range=[1, 2]) for row in rows if row.get("event") == "rollback"
        ],
    )
    code, text, _ = said(verify_run, VerifyConfig(run=str(run), replay="8:12"))
    assert (code, "to step 8 does not match the skipped positions [1, 2]" in text) == (1, True)
    assert "note    replay of 8:12: not possible" in text


@pytest.mark.slow
def test_each_stretch_has_the_processes_that_it_had(trained):
    ((code, lines),) = run_ranks(replayed, 1, trained, "5:10")
    words = "ok      replay from step 5 to 10, processes: 2, rows: 5, and all tensors, bit for bit"
    assert (code, lines[1]) == (0, words)
