"""Intact runs are intact; each way of tampering with one is found, named, and exits with 1."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import ROOT, expect_error
from faults.mutations import flip
from ranks import in_turn, run_ranks
from runs import (
    all_rows,
    change,
    complete,
    edit_rows,
    expect_defect,
    forge,
    open_folder,
    reseal,
    train,
    training_config,
    verified,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpt2_ddp.checkpoint.format import CONFIG, MANIFEST, MODEL, OPTIMIZER, STATE
from gpt2_ddp.checkpoint.verify import find_checkpoint, record_defect
from gpt2_ddp.config.tools import ExportConfig
from gpt2_ddp.data.feed import Feed
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.export.export import export_hf
from gpt2_ddp.files import read_json, sha256_file
from gpt2_ddp.preparation.encode import write_manifest
from gpt2_ddp.records.rows import METRICS, STATUS
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.reports import recompute, verify
from gpt2_ddp.reports.states import end_defect
from gpt2_ddp.state import LogEnd, Progress
from gpt2_ddp.tasks.trained_model import load_model

FIVE = "checkpoints/step-00000005"
TEN = "checkpoints/step-00000010"
NEW_STATE, NEW_CONFIG, NEW_MODEL, NEW_OPTIMIZER = (
    f"{TEN}/{name}" for name in (STATE, CONFIG, MODEL, OPTIMIZER)
)


@pytest.fixture
def run(trained, corpus, tmp_path):
    """The shared run, with two samples; its shards are beside it, in `data`."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.copytree(corpus, tmp_path / "data")
    samples = [{"event": "sample", "step": 10, "prompt": "", "text": text} for text in "ab"]
    edit_rows(run, lambda rows: rows.__setitem__(slice(-2, -2), samples))
    before = (run / METRICS).read_text().splitlines(keepends=True)[:-2]  # of the newest checkpoint
    end = {"chain": json.loads(before[-1])["chain"], "bytes": sum(map(len, before))}
    (run / NEW_STATE).write_text(json.dumps(read_json(run / NEW_STATE) | {"log": end}))
    reseal(run / NEW_STATE)
    forge(run)
    return run


def last_chain(run):
    return json.loads((run / METRICS).read_text().splitlines()[-1])["chain"]


def at(rows, step):
    return next(row for row in rows if row["step"] == step and "event" not in row)


# Intact runs


def test_a_run_is_intact(run, capsys):
    """One that a kill left with half a row."""
    with (run / METRICS).open("a") as file:
        file.write('{"step": 11, "lo')
    code, defects, others = verified(run, capsys)
    assert (code, defects) == (0, [])
    assert [line.split()[0] for line in others].count("ok") == 7


def test_a_complete_run_says_what_its_killed_session_did_not(run, trained, capsys):
    """Its last two rows, of the newest checkpoint and of the end; it leaves a sound one alone."""
    shutil.copytree(trained, run, dirs_exist_ok=True)
    config = training_config(trained.parent / "data", run.parent, {"optim.decay_steps": 10})
    whole = (run / METRICS).read_bytes()
    rewrite(run, METRICS, r"(.*\n){2}\Z", "")
    assert verified(run, capsys)[0] == 1
    rewrite(run, STATUS, "completed", "running")
    assert verified(run, capsys)[0] == 0
    assert run_ranks(in_turn, 1, (train, config), (train, config)) == [["completed"] * 2]
    assert (run / METRICS).read_bytes() == whole
    assert verified(run, capsys)[0] == 0


def test_a_small_job(trained_job, tmp_path, capsys):
    """A run of 101 samples in steps of 12."""
    run = Path(shutil.copytree(trained_job, tmp_path / "run"))
    assert verified(run, capsys)[0] == 0
    forge(run, lambda rows: at(rows, 4).update(order_digest="f" * 64, lr=0.02))
    expect_defect(run, capsys, f"{METRICS}, line 6: order_digest", f"{METRICS}, line 6: lr")


def test_a_run_may_go_on_meanwhile(run, monkeypatch, capsys):
    """It removes a checkpoint and appends a row, right after its rows were read."""

    def read(*args):
        found = Log(*args)
        shutil.rmtree(run / FIVE, ignore_errors=True)
        edit_rows(
            run,
            lambda rows: rows.append(
                {"step": 10, "event": "checkpoint", "sha256": "", "kept": [10]}
            ),
        )
        return found

    edit_rows(run, lambda rows: rows.pop(-1))
    rewrite(run, STATUS, "completed", "running")
    Log = verify.Log
    monkeypatch.setattr(verify, "Log", read)
    assert verified(run, capsys)[:2] == (0, [])


def test_a_training_that_begins_meanwhile_has_no_end_yet(run, monkeypatch, capsys):
    """Its start drops the end before it."""
    edit_rows(run, lambda rows: rows.pop())
    found = iter([read_json(run / STATUS), {}])
    monkeypatch.setattr(verify, "ended_status", lambda folder: next(found))
    assert verified(run, capsys)[:2] == (0, [])
    assert not [*found]


def test_the_end_of_a_run_is_in_its_rows():
    status = {"state": "completed", "step": 10}
    start = {"event": "start", "step": 10}
    end = {"event": "end", "step": 10, "outcome": "completed"}
    row = {"step": 10}
    assert not end_defect(status, [start, end], end)
    assert not end_defect({}, [start], row), "it trains"
    assert not end_defect(status, [start], start), "a kill came before its status"
    defect = "metrics.jsonl: status.json says that the run completed at step 10, but the row of"
    assert end_defect(status, [start], row).startswith(defect)
    assert end_defect(status, [end, start], row)
    for other in ({"outcome": "stopped"}, {"step": 9}):
        assert end_defect(status, [start, end | other], end)


def test_mistakes_of_the_user(run, trained, tmp_path, capsys):
    """Data that are others, by their manifest: a mistake
    in --data, and a defect of the run's own folder."""
    expect_error("run = .*/nothing", verified, tmp_path / "nothing", capsys)
    own = str(trained.parent / "data")
    data = str(tmp_path / "data")
    manifest = read_manifest(tmp_path / "data")
    write_manifest(
        tmp_path / "data", replace(manifest, splits={"train": manifest.splits["train"][:-1]})
    )
    for name in (str(tmp_path / "absent"), data):
        expect_error(f"data = {name}", verified, run, capsys, data=[name])
    change(run / CONFIG, own, data)
    edit_rows(
        run,
        lambda rows: [row["config"]["data"].update(path=data) for row in rows if "config" in row],
    )
    expect_defect(run, capsys, f"data = {data}: has other tokens")


# Tampering


def rewrite(run, file, old, new):
    """Replaces what matches `old` in a file of a run, or all of it; with None, deletes it. A
    function is of each tensor. The manifest of the newest checkpoint fits again."""
    path = run / file
    if new is None:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        return
    if not isinstance(new, str):
        save_file({name: new(value) for name, value in load_file(path).items()}, path)
    else:
        text, count = re.subn(old or r"(?s)\A.*\Z", new, path.read_text() if old else "")
        assert count
        path.write_text(text)
    if path.parent == run / TEN:
        reseal(path)


FAKE = json.dumps("\x1b[2K\rx\nok      everything")
REWRITTEN = [
    (METRICS, '{"step": 2,', '{"step" 2,', f"{METRICS}, line 5: "),
    (METRICS, '"step": 10,', '"step": 10000000000000,', f"{METRICS}, line 14: "),
    (METRICS, ', "chain": "[0-9a-f]*"', "", f"{METRICS}, line 1: "),
    (METRICS, "", None, f"{METRICS}: has no start"),
    (METRICS, r"(.*\n){5}\Z", "", f"{TEN}: its chain"),
    (METRICS, r"(.*\n)\Z", "", f"{METRICS}: {STATUS} says that the run completed at step 10"),
    (CONFIG, "  patience: 20\n", "", f"{CONFIG}: guard.patience"),
    (CONFIG, "", "a: ]", f"{CONFIG} = "),
    (CONFIG, "", None, f"{CONFIG} = "),
    (CONFIG, "1337", FAKE.replace("\\", r"\\"), f"{CONFIG}: seed is "),
    (METRICS, '"text": "a"', '"text": "c"', f"{METRICS}, line 15: "),
    ("checkpoints", "", None, FIVE),
    (NEW_STATE, "", "[1]", NEW_STATE),
    (NEW_CONFIG, "", "a: ]", NEW_CONFIG),
    (NEW_OPTIMIZER, "", Tensor.neg, f"{TEN}: its manifest"),
    ("../data/train_000000.bin", "", None, "shard = "),
    ("../data/tokenizer.json", r"\A{", "{ ", ""),
    ("../data/manifest.json", '"eot": ', '"eot": 1', "data = "),
]
"""File, old, new, and the beginning of a defect."""


@pytest.mark.parametrize(("file", "old", "new", "defect"), REWRITTEN)
def test_each_tampering_is_found_and_named(run, capsys, file, old, new, defect):
    rewrite(run, file, old, new)
    code, defects, others = verified(run, capsys, data=[str(run.parent / "data")])
    assert code == 1
    assert any(line.startswith(defect) for line in defects), defects
    assert "everything" not in "".join(others)


def test_a_flipped_bit_in_any_file(run, tmp_path, capsys):
    """Unless a configuration is the same. It is never a user error."""
    rng = random.Random(1337)
    names = [METRICS, CONFIG, "checkpoints/*/*", "../data/*.bin", "../data/*.json"]
    data = [str(tmp_path / "data")]
    for file in (file for name in names for file in sorted(run.glob(name))):
        sound = file.read_bytes()
        for _ in range(6 if file.parent == run else 2):
            file.write_bytes(flip(sound, rng))
            if verified(run, capsys, data=data)[0] != 1:
                assert yaml.safe_load(file.read_bytes()) == yaml.safe_load(sound), file
        file.write_bytes(sound)
    assert verified(run, capsys, data=data)[0] == 0


def far_end(run, rows):
    rows[-1]["step"] = 10**12
    for row in rows:
        if "steps" in row:
            row["steps"] = row["config"]["train"]["steps"] = 10**12


def new_seed(run, rows):
    change(run / CONFIG, "seed: 1337", "seed: 1")
    for row in rows:
        if "config" in row:
            row["config"]["seed"] = 1


def field(step, name, value):
    return lambda run, rows: at(rows, step).update({name: value})


FORGED = [
    (field(7, "lr", 0.003), "lr of step 7"),
    (field(7, "tokens", 1), "tokens of step 7"),
    (field(7, "epoch", 0.5), "epoch of step 7"),
    (field(7, "order_digest", "f" * 64), "order_digest of step 7"),
    (field(7, "val_loss", 1.5), "step 7 has a val_loss"),
    (field(8, "step", 7), "step 7 follows step 7"),
    (field(7, "loss", 1.5), ""),
    (lambda run, rows: rows.remove(at(rows, 7)), "step 7 has no row"),
    (lambda run, rows: rows.pop(0), f"{METRICS}: has no start"),
    (lambda run, rows: rows.pop(8), f"{FIVE}: is not recorded"),
    (lambda run, rows: rows.pop(-2), f"{TEN}: is not recorded"),
    (lambda run, rows: rows.insert(-4, {"event": "sample", "step": 10, "text": "f"}), ""),
    (lambda run, rows: rewrite(run, NEW_MODEL, "", Tensor.neg), ""),
    (far_end, "train.steps"),
    (field(9, "step", 10**12), "step 9 has no row"),
    (new_seed, "order_digest of step 1"),
]
"""An edit of rows, and what recomputing finds once all
hashes fit; empty: nothing, so only an anchor does."""


@pytest.mark.parametrize(("edit", "defect"), FORGED)
def test_a_consistent_forgery_is_found_by_an_anchor(
    run, tmp_path, monkeypatch, capsys, edit, defect
):
    """Where only the chain fits, the checkpoints find it."""
    monkeypatch.setattr(recompute, "MOST_STEPS", 1000)
    anchor = last_chain(run)
    assert verified(run, capsys, anchor=anchor)[0] == 0
    other = Path(shutil.copytree(run, tmp_path / "other"))
    edit_rows(other, lambda rows: edit(other, rows))
    forge(run, lambda rows: edit(run, rows))
    code, defects, _ = verified(run, capsys)
    assert (code, bool(defects)) == (bool(defect), bool(defect))
    assert defect in "\n".join(defects)
    assert verified(other, capsys)[0] == 1
    code, defects, _ = verified(run, capsys, anchor=anchor)
    assert code == 1
    assert any("anchor" in line for line in defects)


def test_the_pages_have_the_numbers_of_these_tables():
    tables = [REWRITTEN, FORGED, STATES, LACKING, MALFORMED, FAR]
    count = sum(map(len, tables))
    by_anchor = sum(not defect for _, defect in FORGED)
    pages = {
        "README.md": f"{count} of {count} kinds, {by_anchor} of them",
        "docs/verify.md": f"in {count} ways",
    }
    pages |= {
        "README.zh-CN.md": f"{count} 种中的 {count} 种",
        "docs/reliability.md": f"{count} of {count}",
    }
    for page, words in pages.items():
        assert words in (ROOT / page).read_text(), page


def test_an_anchor_is_the_chain_of_a_row(run, trained, tmp_path, capsys):
    """A resumed run keeps that of its newest checkpoint."""

    def verify_by(anchor):
        return verified(run, capsys, anchor=anchor)[0]

    last = last_chain(run)
    older, newest = (read_json(run / name / STATE)["log"]["chain"] for name in (FIVE, TEN))
    assert [verify_by(chain) for chain in (last, newest, older, "f" * 64)] == [0, 0, 0, 1]
    config = training_config(
        trained.parent / "data", tmp_path, {"train.steps": 11, "optim.decay_steps": 10}
    )
    complete(config)
    assert [verify_by(chain) for chain in (last, newest)] == [1, 0]
    expect_error("anchor = f: ", verify_by, "f")


def edit_state(place, section, name, value):
    """Changes a field of a checkpoint's state; its manifest fits again."""
    state = read_json(place / STATE)
    (state[section] if section else state)[name] = value
    (place / STATE).write_text(json.dumps(state))
    reseal(place / STATE)


STATES = [
    ("feed", "position", 132),
    ("feed", "order_digest", "f" * 64),
    ("feed", "skipped_ranges", [[120, 132]]),
    ("progress", "rollbacks", 1),
    ("progress", "scored_at", 5),
    ("progress", "scores", {}),
    ("progress", "best", {"step": 5, "val_loss": 1.0, "tokens": 512, "since": 1}),
    (
        "progress",
        "branched_from",
        {"parent": "a", "run_id": "b", "step": 5, "checkpoint_sha256": ""},
    ),
    ("progress", "pending", {"row": {"step": 10, "tokens": 1}}),
    ("progress", "pending", {"evaluate": True}),
    ("guard", "judged", 0),
    ("guard", "first_bad", 3),
    ("guard", "unjudged", []),
    ("guard", "unjudged", [[9, 1.0, False], [10, 1.0, False]]),
    ("guard", "losses", [1.0, 1.0, 1.0]),
    ("optimizer", "norms", [1.0, 1.0, 1.0]),
    ("losses", "epoch", [1.0, 3840.0, 3840.0]),
    ("losses", "since_row", [1.0, 1.0, 1.0]),
    ("losses", "skipped", 1),
    ("setup", "epoch_size", 10),
    ("setup", "processes", 3),
    ("task", "micro_batch", 1),
    ("task", "vocab_size", 2**40),
    ("task", "data_manifest", "f" * 64),
]
"""A section of a state, a field, and a value that the rows or the recomputed order contradict."""


@pytest.mark.parametrize(("section", "name", "value"), STATES)
def test_a_state_that_the_rows_contradict(run, capsys, section, name, value):
    """All hashes fit, so a resume would take it, and train on with other data or numbers."""
    edit_state(run / TEN, section, name, value)
    forge(run)
    expect_defect(run, capsys, f"{TEN}/{STATE}: ")


@pytest.mark.parametrize(
    ("name", "value", "defect"),
    [
        ("step", 9, "holds the state of step 9"),
        ("run_id", "other", "is of the run other"),
    ],
)
def test_a_state_of_another_step_or_run(run, capsys, name, value, defect):
    edit_state(run / TEN, "progress", name, value)
    forge(run)
    expect_defect(run, capsys, f"{TEN}: {defect}")


def test_the_length_of_the_rows_before_a_checkpoint(run, capsys):
    """A resume cuts the rows there."""
    log = read_json(run / NEW_STATE)["log"]
    edit_state(run / TEN, "", "log", log | {"bytes": log["bytes"] - 1})
    edit_rows(run, lambda rows: rows[-2].update(sha256=sha256_file(run / TEN / MANIFEST)))
    expect_defect(run, capsys, f"{TEN}: log.bytes is ")


def test_a_state_of_a_small_job(trained_job, tmp_path, capsys):
    run = Path(shutil.copytree(trained_job, tmp_path / "run"))
    edit_state(run / "checkpoints/step-00000018", "feed", "position", 12)
    forge(run)
    expect_defect(run, capsys, f"checkpoints/step-00000018/{STATE}: feed.position is 12, not 202")


def without(step, *names):
    return lambda run, rows: [at(rows, step).pop(name) for name in names]


LACKING = [
    *(without(7, name) for name in ("lr", "tokens", "epoch", "order_digest")),
    without(5, "val_loss"),
    without(10, "skipped"),
    lambda run, rows: rows.append(rows[-1]),
    lambda run, rows: rows[-1].update(step=11),
    lambda run, rows: rows[-1].update(outcome="lost"),
    lambda run, rows: rows[-2].update(kept=[5, 7, 10]),
]
"""Edits of rows that other rows or the recomputed order contradict."""


@pytest.mark.parametrize("edit", LACKING)
def test_rows_that_lack_or_contradict_a_field(run, capsys, edit):
    forge(run, lambda rows: edit(run, rows))
    assert verified(run, capsys)[0] == 1


def header(edit):
    """Changes the header of a safetensors file, as nobody's library writes it."""

    def change_file(file):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        fields = json.loads(content[8 : 8 + size])
        edit(fields)
        text = json.dumps(fields).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])

    return change_file


def longer_header(file):
    content = file.read_bytes()
    file.write_bytes((2**40).to_bytes(8, "little") + content[8:])


MALFORMED = [
    (MODEL, longer_header, "is no safetensors file"),
    (
        MODEL,
        header(lambda found: found["ln_f.weight"].update(data_offsets=[0, 128])),
        "is no safetensors file",
    ),
    (
        MODEL,
        header(lambda found: found["ln_f.weight"].update(dtype="I32")),
        "ln_f.weight has shape [32] of int32",
    ),
    (
        MODEL,
        header(lambda found: found["ln_f.weight"].update(shape=[1, 32])),
        "ln_f.weight has shape [1, 32]",
    ),
    (
        OPTIMIZER,
        header(lambda found: found.update(foo=found.pop("exp_avg.ln_f.weight"))),
        "foo has shape [32]",
    ),
    (
        OPTIMIZER,
        header(lambda found: found.update({"a.ln_f.bias": found.pop("exp_avg.ln_f.bias")})),
        "a.ln_f.bias",
    ),
]
"""A file of tensors, a change of it, and what is said."""


@pytest.mark.parametrize(("name", "spoil", "defect"), MALFORMED)
def test_malformed_tensors_whose_hashes_fit(run, capsys, name, spoil, defect):
    spoil(run / TEN / name)
    reseal(run / TEN / name)
    forge(run)
    expect_defect(run, capsys, f"{TEN}/{name}: {defect}")
    if defect == "is no safetensors file":  # others are user errors once the model is there
        assert find_checkpoint(run).step == 5


def test_state_that_the_optimizer_lacks(run, capsys):
    """Without it, training would begin anew with that parameter."""
    for gone in ("exp_avg.ln_f.weight", "ln_f.weight", ""):
        file = run / NEW_OPTIMIZER
        save_file(
            {name: value for name, value in load_file(file).items() if not name.endswith(gone)},
            file,
        )
        reseal(file)
        forge(run)
        expect_defect(run, capsys, f"{NEW_OPTIMIZER}: ")


def test_a_manifest_that_is_nested_deeply(run, tmp_path, capsys):
    for file in (run / TEN / MANIFEST, tmp_path / "data" / MANIFEST):
        file.write_text("[" * 100_000)
    code, defects, _ = verified(run, capsys, data=[str(tmp_path / "data")])
    assert code == 1
    assert any("nested" in line for line in defects)


def far_rows(step, **changes):
    def edit(run, rows):
        rows[-1:] = [{"step": step, "loss": 1.0}] * 5
        for row in rows:
            if "config" in row:
                row["config"]["tracking"].update(changes)

    return edit


def far_rollback(run, rows):
    rows[-1] = {
        "event": "rollback",
        "step": 5,
        "from": 10**12,
        "skipped_range": [60, 10**13],
        "order_digest": "f" * 64,
    }


FAR = [
    far_rows(10**12),
    far_rows(10**12, log_every=10**12),
    far_rows(10**5, log_every=10**12),
    far_rollback,
]
"""Edits of rows that claim steps far away."""


@pytest.mark.parametrize("edit", FAR)
def test_a_step_in_a_file_is_no_bound_of_the_work(run, monkeypatch, capsys, edit):
    """No more steps are recomputed than the rows and an epoch of the data have."""
    taken = []
    next_step = Feed.next_step
    monkeypatch.setattr(Feed, "next_step", lambda feed: (taken.append(feed), next_step(feed))[1])
    forge(run, lambda rows: edit(run, rows))
    assert verified(run, capsys)[0] == 1
    assert len(taken) < 20


def test_many_ranges_of_a_branch(run, capsys):
    ranges = [[2 * number, 2 * number + 1] for number in range(5000)]
    forge(run, lambda rows: rows[0].update(skipped_ranges=ranges))
    expect_defect(run, capsys, f"{METRICS}, line 1: is no row: skipped_ranges is ")


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("n_inner", 10**7, "model section"),
        ("n_head", [1], "model.n_head = "),
        ("n_layer", 3, "h.2.attn.c_attn.bias"),
        ("n_layer", 10_000, "tensors for 10000 layers"),
    ],
)
def test_a_checkpoint_of_a_stranger(run, tmp_path, monkeypatch, name, value, field):
    """Its configuration may claim any size. Each
    reader gives one line before it builds anything."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((run / NEW_CONFIG).read_text())
    config["model"][name] = value
    (run / NEW_CONFIG).write_text(yaml.safe_dump(config))
    reseal(run / NEW_CONFIG)
    forge(run)
    expect_error(re.escape(field), load_model, find_checkpoint(run, kind="gpt2"))
    expect_error(re.escape(field), export_hf, ExportConfig(checkpoint=str(run)))
    assert not [*tmp_path.glob("exports/*")]


@pytest.mark.parametrize("row", ["checkpoint", "end"])
def test_weights_whose_checkpoint_claims_a_later_row(run, capsys, row):
    """A state has the chain of the row before it was saved. With that of a later one, no row would
    record its hash. No row is changed, so the anchor is there, and nobody may take the weights."""
    rewrite(run, NEW_MODEL, "", Tensor.neg)
    lines = (run / METRICS).read_text().splitlines(keepends=True)
    number = 1 + max(at for at, line in enumerate(lines) if json.loads(line).get("event") == row)
    end = {"chain": json.loads(lines[number - 1])["chain"], "bytes": sum(map(len, lines[:number]))}
    (run / NEW_STATE).write_text(json.dumps(read_json(run / NEW_STATE) | {"log": end}))
    reseal(run / NEW_STATE)
    code, defects, _ = verified(run, capsys, anchor=last_chain(run))
    assert code == 1
    assert any(f"{TEN}: holds the chain of a row" in defect for defect in defects)
    assert find_checkpoint(run).step == 5
    assert "the chain of a row" in capsys.readouterr().err


@pytest.mark.parametrize(
    "events",
    [
        [{"event": "checkpoint", "step": 10, "sha256": "a"}, {"event": "start", "step": 10}],
        [{"event": "checkpoint", "step": 10, "sha256": "a"}, {"event": "rollback", "step": 2}],
        [{"event": "checkpoint", "step": 2, "sha256": "a"}],
        [{"event": "end", "step": 10}, {"event": "start", "step": 10}],
    ],
)
def test_a_checkpoint_that_a_kill_left_without_a_row(run, events):
    """A run may save a step again after a start or a rollback. A kill may come before the row."""
    assert not record_defect(find_checkpoint(run), events, len(events))


def test_a_resumed_run_does_not_vouch_for_rows_that_someone_changed(tmp_path, capsys):
    """It warns, keeps a copy, and the change is found
    afterwards, too. Rows after the checkpoint are dropped."""
    log = RunLog(open_folder(tmp_path / "run"))
    log.resume(LogEnd(), Progress(), {"event": "start", "step": 0})
    for step in (1, 2):
        log.append({"event": "sample", "step": step, "text": "a"})
    end = log.end()
    log.append({"step": 3})
    rewrite(log.path, METRICS, '1, "text": "a"', '1, "text": "b"')
    log.resume(end, Progress(step=2), {"event": "start", "step": 2})
    assert METRICS in capsys.readouterr().err
    assert [row["step"] for row in all_rows(log.path)] == [0, 1, 2, 2]
    (defect,) = verify.Log(log.path / METRICS, ()).defects
    assert defect.startswith(f"{METRICS}, line 2: its chain")
