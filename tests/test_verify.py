"""Runs with any kind of life are intact; each way of tampering with one is found, named, and exits with 1."""

import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import expect_error
from golden_runs import CORPUS, GOLDEN
from ranks import in_turn, run_ranks, run_until_killed
from runs import (
    change,
    edit_rows,
    expect_defect,
    forge,
    job_config,
    reseal,
    train,
    train_with_faults,
    training_config,
    verified,
)
from safetensors.torch import load_file, save_file

from gpt2_ddp.checkpoint.checkpoint import CONFIG, MODEL, OPTIMIZER, STATE, find_checkpoint
from gpt2_ddp.checkpoint.metrics import Metrics, Sample
from gpt2_ddp.checkpoint.run_files import METRICS, SAMPLES
from gpt2_ddp.checkpoint.run_folder import RunFolder, RunLog
from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.export import default_output, export
from gpt2_ddp.files import sha256_file
from gpt2_ddp.preparation.encode import write_manifest
from gpt2_ddp.reports import verify
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.state import LogEnd, Progress
from gpt2_ddp.tasks.trained_model import load_model

FIVE, TEN = "checkpoints/step-00000005", "checkpoints/step-00000010"
RUNNING = '{"state": "running", "step": 4, "reason": ""}'
Edit = Callable[[Path], object]


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def eventful(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `run` of a run with samples that was killed, resumed and rolled back to step 4. Its shards are beside
    it, in `data`."""
    place = tmp_path_factory.mktemp("eventful")
    shutil.copytree(corpus, place / "data")
    changes = {"train.steps": 12, "checkpoint.every": 4, "guard.patience": 2, "tracking.sample_every": 4}
    config = training_config(place / "data", place, changes | {"eval.every": 4, "model.n_layer": 1})
    bad = (12 * 5, 12 * 8)
    run_until_killed(train_with_faults, 1, config, bad, float("nan"), 6)
    assert verify_run(VerifyConfig(run=str(place / "run"))) == 0
    assert run_ranks(train_with_faults, 1, config, bad) == ["completed"]
    return place / "run"


def at(rows: list[dict], step: int) -> dict:
    return next(row for row in rows if row["step"] == step and "event" not in row)


# Intact runs


def test_trained_run_is_intact(run: Path, capsys: pytest.CaptureFixture) -> None:
    with (run / METRICS).open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill leaves
    code, defects, others = verified(run, capsys)
    assert (code, defects) == (0, [])
    assert [line.split()[0] for line in others] == ["ok"] * 7 + ["note", str(run)]
    for shards, line in {"none": "note    no shard was read", "sampled": "ok      data: 3 of 3 shards ("}.items():
        assert line in "\n".join(verified(run, capsys, shards=shards)[2])


def test_a_run_that_was_killed_and_rolled_back_is_intact(eventful: Path, capsys: pytest.CaptureFixture) -> None:
    code, defects, others = verified(eventful, capsys)
    assert (code, defects) == (0, [])
    assert any(line.startswith(f"ok      {SAMPLES}: ") for line in others)
    assert (eventful / SAMPLES).read_text()


@pytest.mark.parametrize("name", ["gpt2_run", "regression_run"])
def test_a_recorded_run_is_intact(name: str, capsys: pytest.CaptureFixture) -> None:
    data = [str(CORPUS)] if name == "gpt2_run" else []
    assert verified(GOLDEN / name, capsys, data=data)[:2] == (0, [])


def test_a_complete_run_says_what_its_killed_session_did_not(
    run: Path, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its last two rows, of the newest checkpoint and of the end, and its status; it leaves a sound one alone."""
    config = training_config(trained.parent / "data", run.parent, {"optim.decay_steps": 10})
    whole = (run / METRICS).read_bytes()
    cut_off(2)(run)
    (run / "status.json").write_text('{"state": "running", "step": 9, "reason": ""}')
    assert verified(run, capsys)[0] == 0
    assert run_ranks(in_turn, 1, (train, config), (train, config)) == [["completed"] * 2]
    assert (run / METRICS).read_bytes() == whole
    assert verified(run, capsys)[0] == 0
    edit_rows(run, lambda rows: rows[-1].update(outcome="stopped"))  # of more steps, lowered since
    assert run_ranks(train, 1, config) == ["completed"]
    assert (run / METRICS).read_bytes() == whole


def test_a_small_job_is_intact_from_its_first_row_on(
    trained_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run of 101 samples in steps of 12; with its last epoch's checkpoint, and before it had any."""
    run = Path(shutil.copytree(trained_job, tmp_path / "run"))
    rows = (run / METRICS).read_text().splitlines(keepends=True)
    forge(run, lambda rows: at(rows, 4).update(order_digest="f" * 64, lr=0.02))
    line = f"{METRICS}, line 6: "
    expect_defect(run, capsys, f"{line}order_digest of step 4 is {'f' * 64}", f"{line}lr of step 4 is 0.02, not 0.01")
    shutil.rmtree(run / "checkpoints")
    (run / "status.json").write_text(RUNNING)
    (run / METRICS).write_text("".join(rows[:5]))
    code, defects, others = verified(run, capsys)
    assert (code, defects) == (0, [])
    assert "note    the last 4 rows are newer than the newest checkpoint" in "\n".join(others)


def test_a_run_may_go_on_meanwhile(run: Path, monkeypatch, capsys) -> None:
    """It removes a checkpoint and appends a sample, right after its rows were read."""

    def read(*args: Any) -> verify.Log:
        found = Log(*args)
        shutil.rmtree(run / FIVE, ignore_errors=True)
        (run / SAMPLES).write_text('{"step": 10, "prompt": "", "text": "x"}\n')
        edit_rows(run, lambda rows: rows.append({"step": 10, "event": "room", "kept": [10]}))
        return found

    edit_rows(run, lambda rows: rows.pop(-1))
    (run / "status.json").write_text(RUNNING)
    Log = verify.Log
    monkeypatch.setattr(verify, "Log", read)
    assert verified(run, capsys)[:2] == (0, [])


def test_killed_before_the_row_of_a_step_saved_again(run: Path, capsys: pytest.CaptureFixture) -> None:
    """Its chain is behind the row of the first save; one that is not behind it was altered."""
    rows = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    start = next(row for row in reversed(rows) if row.get("event") == "start")
    saved = {name: rows[-2][name] for name in ("step", "sha256")}
    resumed = start | {"step": 10, "checkpoint": saved, "kept": [5, 10]}
    edit_rows(run, lambda rows: rows.__setitem__(slice(-1, None), [resumed]))
    before, newest = (json.loads(line)["chain"] for line in (run / METRICS).read_text().splitlines()[-2:])
    (run / "status.json").write_text(RUNNING)
    for old, new, defects in ((rows[-3]["chain"], newest, 0), (newest, before, 1)):
        change(run / TEN / STATE, old, new)
        reseal(run / TEN / STATE)
        assert len(verified(run, capsys)[1]) == defects


def test_mistakes_of_the_user(run: Path, corpus: Path, tmp_path: Path) -> None:
    nothing = VerifyConfig(run=str(tmp_path / "nothing"))
    expect_error(r"run = .*/nothing: has no config.yaml", verify_run, nothing)
    other = shutil.copytree(corpus, tmp_path / "other")
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, splits={"train": manifest.splits["train"][:-1]}))
    for name in ("absent", "other"):
        expect_error(rf"data = .*/{name}", verify_run, VerifyConfig(run=str(run), data=(str(tmp_path / name),)))
    moved = str(shutil.copytree(corpus, tmp_path / "moved"))
    assert verify_run(VerifyConfig(run=str(run), data=(moved,))) == 0
    (run / CONFIG).write_text("")
    expect_error("is empty", verify_run, VerifyConfig(run=str(run)))


# Tampering


def in_checkpoint(name: str, old: str, new: str) -> Edit:
    """Changes a file of the newest checkpoint, whose manifest fits again."""

    def edit(run: Path) -> None:
        change(run / TEN / name, old, new)
        reseal(run / TEN / name)

    return edit


def nonsense(name: str, content: str) -> Edit:
    def write(run: Path) -> None:
        (run / TEN / name).write_text(content)
        reseal(run / TEN / name)

    return write


def in_tensors(name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def write(run: Path) -> None:
        tensors = load_file(run / TEN / name)
        edit(tensors)
        save_file(tensors, run / TEN / name)
        reseal(run / TEN / name)

    return write


def older_checkpoint(run: Path) -> None:
    shutil.rmtree(run / TEN)
    shutil.copytree(run / FIVE, run / TEN)


def flipped_bit(run: Path) -> None:
    content = bytearray((run / TEN / MODEL).read_bytes())
    content[len(content) // 2] ^= 1
    (run / TEN / MODEL).write_bytes(content)


def in_config(old: str, new: str) -> Edit:
    return lambda run: change(run / CONFIG, old, new)


def in_file(old: str, new: str) -> Edit:
    return lambda run: change(run / METRICS, old, new)


def in_rows(edit: Callable[[list[dict]], object]) -> Edit:
    return lambda run: edit_rows(run, edit)


def cut_off(count: int) -> Edit:
    def cut(run: Path) -> None:
        lines = (run / METRICS).read_text().splitlines(keepends=True)
        (run / METRICS).write_text("".join(lines[:-count]))

    return cut


def none_kept(run: Path) -> None:
    edit_rows(run, lambda rows: [row.update(kept=[]) for row in rows if "kept" in row])
    shutil.rmtree(run / "checkpoints")


def without_chains(run: Path) -> None:
    (run / METRICS).write_text(re.sub(', "chain": "[0-9a-f]*"', "", (run / METRICS).read_text()))


def far_end(rows: list[dict]) -> None:
    rows[-1]["step"] = 10**12
    for row in rows:
        if "steps" in row:
            row["steps"] = row["config"]["train"]["steps"] = 10**12


OTHER = f"{TEN}: its manifest's SHA-256 differs"
CUT = f"{TEN}: its chain is not in metrics.jsonl"
BROKEN = "metrics.jsonl, line {}: its chain is wrong"
TAMPERINGS: dict[str, tuple[Edit, str]] = {
    # rows
    "lr of a row": (in_file('"lr": 0.0015', '"lr": 0.0016'), BROKEN.format(4)),
    "a line that is no row": (in_file('{"step": 2,', '{"step" 2,'), BROKEN.format(5)),
    "a far step": (in_file('"step": 10,', '"step": 10000000000000,'), BROKEN.format(14)),
    "the chain left away": (in_file(', "chain"', ', "chained"'), "metrics.jsonl, line 1: has no chain"),
    "a blank behind a chain": (in_file('"}\n', '"} \n'), "metrics.jsonl, line 1: has no chain"),
    "all chains left away": (without_chains, "metrics.jsonl, line 1: has no chain"),
    "no rows": (lambda run: (run / METRICS).unlink(), "metrics.jsonl: has no start"),
    "the last rows cut off": (cut_off(3), CUT),
    "lr, chained": (in_rows(lambda rows: at(rows, 7).update(lr=0.003)), CUT),
    "val_loss, chained": (in_rows(lambda rows: at(rows, 10).update(val_loss=1.5)), CUT),
    "tokens, chained": (in_rows(lambda rows: at(rows, 7).update(tokens=1)), "metrics.jsonl, line 11: tokens of step 7"),
    "a row missing, chained": (in_rows(lambda rows: rows.remove(at(rows, 7))), CUT),
    "a row twice, chained": (in_rows(lambda rows: rows.insert(10, at(rows, 7))), CUT),
    "the first start removed, chained": (in_rows(lambda rows: rows.pop(0)), "metrics.jsonl: has no start"),
    "a start removed, chained": (in_rows(lambda rows: rows.pop(8)), CUT),
    "a far end, chained": (in_rows(far_end), CUT),
    "a checkpoint's row removed, chained": (in_rows(lambda rows: rows.pop(-2)),
     f"{TEN}: is not recorded in metrics.jsonl"),
    "a sample's row invented, chained": (
     in_rows(lambda rows: rows.insert(-2, {"event": "sample", "step": 10, "samples_sha256": "f"})),
     "samples.jsonl: lines are missing"),
    # configuration, status, samples
    "n_layer": (in_config("n_layer: 2", "n_layer: 3"), "config.yaml: model.n_layer is 3, in metrics.jsonl 2"),
    "a field that may change": (in_config("every: 5\n", "every: 9\n"), "config.yaml: checkpoint.every is 9"),
    "a key misspelt": (in_config("  n_layer:", "  n_layers:"), "config.yaml: model.n_layer is None"),
    "lines deleted": (in_config("  rollbacks: 3\n", ""), "config.yaml: guard.rollbacks is None"),
    "no status": (lambda run: (run / "status.json").unlink(), "status.json: is missing"),
    "garbage for a status": (lambda run: (run / "status.json").write_text("{"), "status.json: has state None"),
    "an unknown status": (lambda run: change(run / "status.json", "completed", "kompleted"),
     "status.json: has state kompleted"),
    "completed at another step": (lambda run: change(run / "status.json", '"step": 10', '"step": 11'),
     "status.json: has completed at step 11"),
    "completed without an end": (cut_off(1), "status.json: has completed at step 10"),
    "a sample invented": (lambda run: (run / SAMPLES).write_text('{"step": 90, "text": "x"}\n'),
     "samples.jsonl, line 1: was changed or added"),
    # checkpoints
    "all deleted": (lambda run: shutil.rmtree(run / "checkpoints"), f"{FIVE}: is missing"),
    "none, and none kept": (none_kept, "checkpoints: all are missing"),
    "a file missing": (lambda run: (run / TEN / STATE).unlink(), f"{TEN}/state.json: is missing"),
    "a flipped bit": (flipped_bit, f"{TEN}/model.safetensors: its SHA-256 differs"),
    "a state that is none": (nonsense(STATE, "[1]"), f"{TEN}/state.json: has state = [1]"),
    "a state without JSON": (nonsense(STATE, "{"), f"{TEN}/state.json: cannot be read"),
    "a configuration without YAML": (nonsense(CONFIG, "a: ]"), f"{TEN}/config.yaml: cannot be read"),
    "weights that are none": (nonsense(MODEL, "no"), f"{TEN}/model.safetensors: is no safetensors file"),
    "an older one, forged": (older_checkpoint, OTHER),
    "another run's, forged": (in_checkpoint(STATE, '"run_id": "', '"run_id": "f'), OTHER),
    "configuration, forged": (in_checkpoint(CONFIG, "lr: 0.003\n", "lr: 0.004\n"), OTHER),
    "tokenizer, forged": (in_checkpoint("tokenizer.json", "{", "{ "), OTHER),
    "scores, forged": (in_checkpoint(STATE, '"val_bits_per_byte": ', '"val_bits_per_byte": 1'), OTHER),
    "processes, forged": (in_checkpoint(STATE, '"processes": 2', '"processes": 1'), OTHER),
    "best, forged": (in_checkpoint(STATE, '"best": {\n   "step": 10', '"best": {\n   "step": 5'), OTHER),
    "a weight, forged": (in_tensors(MODEL, lambda tensors: tensors["wpe.weight"].fill_(float("nan"))), OTHER),
    "another type, forged": (
     in_tensors(MODEL, lambda tensors: tensors.update({"wpe.weight": tensors["wpe.weight"].double()})), OTHER),
    "squares of Adam, forged": (
     in_tensors(OPTIMIZER, lambda tensors: tensors["exp_avg_sq.h.0.ln_1.weight"].neg_()), OTHER),
    "no optimizer state, forged": (in_tensors(OPTIMIZER, lambda tensors: tensors.clear()), OTHER),
}  # fmt: skip
"""An edit of a run, and the beginning of a defect that it causes. `chained`: the chain is computed again; `forged`: the
checkpoint's manifest, too."""


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_found_and_named(run: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    tamper, defect = TAMPERINGS[name]
    tamper(run)
    expect_defect(run, capsys, defect)


@pytest.mark.parametrize("name", [name for name in TAMPERINGS if name.endswith("forged")])
def test_a_resume_does_not_take_what_the_rows_did_not_record(run: Path, trained: Path, name: str) -> None:
    TAMPERINGS[name][0](run)
    folder = RunFolder(training_config(trained.parent / "data", run.parent))
    checkpoints = CheckpointStore(folder, RunLog(folder))
    for look in (checkpoints.peek, checkpoints.newest):
        found = look()
        assert found
        assert found.step == 5
    assert checkpoints.listing()["rejected"] == ["step-00000010.rejected"]


def test_a_random_byte_in_a_random_file(eventful: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    place = Path(shutil.copytree(eventful.parent, tmp_path / "copy"))
    names = [METRICS, SAMPLES, CONFIG, "checkpoints/*/*", "../data/[!.]*"]
    files = [file for name in names for file in sorted((place / "run").glob(name))]
    assert verified(place / "run", capsys, data=[str(place / "data")])[0] == 0
    rng = random.Random(1337)
    for number in range(40):
        file = files[number % len(files)]
        sound = file.read_bytes()
        content = bytearray(sound)
        offset = rng.randrange(len(sound))
        content[offset] ^= rng.randrange(1, 256)
        file.write_bytes(content)
        with suppress(UserError):  # of a file without which nothing can be checked
            code, defects, _ = verified(place / "run", capsys, data=[str(place / "data")])
            assert (code, bool(defects)) == (1, True), (file, offset, sound[offset], content[offset])
        file.write_bytes(sound)


def new_seed(run: Path) -> None:
    forge(run, lambda rows: [row["config"].update(seed=1) for row in rows if "config" in row])
    change(run / CONFIG, "seed: 1337", "seed: 1")


def forgotten(run: Path) -> None:
    shutil.rmtree(run / FIVE)
    forge(run, lambda rows: [row["kept"].remove(5) for row in rows[-2:]])


def new_weights(run: Path) -> None:
    in_tensors(MODEL, lambda tensors: tensors["wpe.weight"].mul_(2))(run)
    forge(run)


FORGERIES: dict[str, tuple[Edit, str]] = {
    "lr": (lambda run: forge(run, lambda rows: at(rows, 7).update(lr=0.003)), "lr of step 7 is 0.003"),
    "tokens": (lambda run: forge(run, lambda rows: at(rows, 7).update(tokens=1)), "tokens of step 7 is 1"),
    "epoch": (lambda run: forge(run, lambda rows: at(rows, 7).update(epoch=0.5)), "epoch of step 7 is 0.5"),
    "digest": (lambda run: forge(run, lambda rows: at(rows, 7).update(order_digest="f" * 64)), "order_digest of step"),
    "a row missing": (lambda run: forge(run, lambda rows: rows.remove(at(rows, 7))), "1 rows before step 8 are"),
    "a row twice": (lambda run: forge(run, lambda rows: at(rows, 8).update(step=7)), "step 7 follows step 7"),
    "an evaluation": (lambda run: forge(run, lambda rows: at(rows, 7).update(val_loss=1.5)), "step 7 has a val_loss"),
    "an end": (lambda run: forge(run, far_end), "unlike eval.every"),
    "the seed": (new_seed, "order_digest of step 1"),
    "a loss": (lambda run: forge(run, lambda rows: at(rows, 7).update(loss=1.5)), ""),
    "an evaluation's loss": (lambda run: forge(run, lambda rows: at(rows, 10).update(val_loss=1.5)), ""),
    "weights": (new_weights, ""),
    "a checkpoint removed": (forgotten, ""),
}  # fmt: skip
"""Edits after which all hashes are made to fit, and what recomputing finds; empty: nothing, so only an anchor does."""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_consistent_forgery_is_found_by_an_anchor(run: Path, tmp_path: Path, capsys, name: str) -> None:
    anchor = str(tmp_path / "anchor")
    assert verified(run, capsys, anchor=anchor)[0] == 0
    tamper, recomputed = FORGERIES[name]
    tamper(run)
    code, defects, _ = verified(run, capsys)
    assert code == bool(recomputed)
    assert not recomputed or any(recomputed in defect for defect in defects)
    code, defects, _ = verified(run, capsys, anchor=anchor)
    assert code == 1
    assert any("anchor" in defect for defect in defects)


def test_an_anchor_is_a_file_or_the_chain_of_a_row(run: Path, trained: Path, tmp_path: Path, capsys) -> None:
    """A file is renewed by an intact run, and stays as it is after a defect. A resumed run keeps it."""
    file = tmp_path / "anchor"
    older = json.loads((run / FIVE / STATE).read_text())["log"]["chain"]
    file.write_text(json.dumps({"step": 5, "chain": older, "sha256": sha256_file(run / FIVE / MODEL)}))
    assert verified(run, capsys, anchor=str(file))[0] == 0
    anchor = json.loads(file.read_text())
    assert (anchor["step"], anchor["sha256"]) == (10, sha256_file(run / TEN / MODEL))
    for row in [anchor["chain"], anchor["newest"], older]:
        assert verified(run, capsys, anchor=row)[0] == 0
    assert verified(run, capsys, anchor="f" * 64)[0] == 1
    for field in ("chain", "sha256"):
        wrong = json.dumps(anchor | {field: "f" * 64})
        file.write_text(wrong)
        assert verified(run, capsys, anchor=str(file))[0] == 1
        assert file.read_text() == wrong
    file.write_text("[]")
    for place in (file, tmp_path / "none/anchor"):
        expect_error(rf"anchor = {place}: ", verify_run, VerifyConfig(run=str(run), anchor=str(place)))
    file.write_text(json.dumps(anchor))
    config = training_config(trained.parent / "data", tmp_path, {"train.steps": 11, "optim.decay_steps": 10})
    assert run_ranks(train, 1, config) == ["completed"]
    assert verified(run, capsys, anchor=str(file))[0] == 0


FAKE = "\x1b[2K\rx\nok      everything"


@pytest.mark.parametrize("tamper", [
    in_rows(lambda rows: at(rows, 7).update({FAKE: 1})), in_rows(lambda rows: rows[-1].update(event=FAKE)),
    in_rows(lambda rows: at(rows, 7).update(order_digest=FAKE)), in_rows(lambda rows: rows[-2].update(kept=[5, FAKE])),
    lambda run: (run / "status.json").write_text(json.dumps({"state": FAKE, "step": 1})),
    in_checkpoint(STATE, '"run_id": "', f'"run_id": {json.dumps(FAKE)[:-1]}'),
    in_config("  lr: 0.003", f"  {json.dumps(FAKE)}: 1\n  lr: 0.003"),
])  # fmt: skip
def test_text_of_a_forger_stays_on_the_line_of_its_defect(run: Path, capsys, tamper) -> None:
    tamper(run)
    code, defects, others = verified(run, capsys)
    assert (code, bool(defects)) == (1, True)
    assert not [line for line in others if "everything" in line]
    assert "\x1b" not in "".join(defects)


@pytest.mark.parametrize(("name", "value", "says"), [
    ("model.n_layer", 10**4, "too few numbers for n_layer"), ("model.n_embd", 10**6, "too few numbers for n_embd"),
    ("model.n_inner", 10**7, "has too few numbers for n_inner"), ("model.block_size", 10**8, "for block_size"),
    ("model.n_layer", 3, "h.2.attn.c_attn.bias is none"), ("train.global_batch_tokens", 2**27, None),
    ("model.n_head", [1], "model.n_head = "), ("data", {"path": 5}, "data.path = 5"),
])  # fmt: skip
def test_a_checkpoint_of_a_stranger(
    run: Path, tmp_path: Path, monkeypatch, name: str, value: Any, says: str | None
) -> None:
    """Its configuration may claim any size. Each reader gives one line before it builds anything."""
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((run / TEN / CONFIG).read_text())
    section, _, key = name.rpartition(".")
    (config[section] if section else config)[key] = value
    if name == "model.block_size":
        config["train"]["global_batch_tokens"] = value
    (run / TEN / CONFIG).write_text(yaml.safe_dump(config))
    reseal(run / TEN / CONFIG)
    forge(run)
    checkpoint = find_checkpoint(run, kind="gpt2")
    if says:
        for read in (load_model, lambda checkpoint: export(checkpoint, default_output(checkpoint))):
            expect_error(re.escape(says), read, checkpoint)
    else:
        load_model(checkpoint)
        assert default_output(checkpoint).parent == Path("exports")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run") in ([], ["exports"])


def test_shards_that_are_others(run: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Overwritten, or missing; or another data set of the same length in their place, with a manifest of its own. So is
    a tokenizer."""
    data = Path(shutil.copytree(trained.parent / "data", tmp_path / "data"))
    shard = data / "train_000000.bin"
    sound = shard.read_bytes()
    other = sound[:-2] + b"\1\1"
    shard.write_bytes(other)
    assert verified(run, capsys, data=[str(data)])[1] == [f"{shard}: its SHA-256 differs from {data}/manifest.json's"]
    assert verified(run, capsys, data=[str(data)], shards="none")[0] == 0
    shard.unlink()
    assert str(shard) in verified(run, capsys, data=[str(data)])[1][0]
    shard.write_bytes(sound)
    change(data / "tokenizer.json", "{", "{ ")
    (defect,) = verified(run, capsys, data=[str(data)])[1]
    assert defect.startswith(f"{data}/tokenizer.json: ")
    shard.write_bytes(other)
    manifest = read_manifest(data)
    train = [replace(one, sha256=sha256_file(data / one.file)) for one in manifest.splits["train"]]
    write_manifest(data, replace(manifest, splits={**manifest.splits, "train": train}))
    old, new = str(trained.parent / "data"), str(data)
    change(run / CONFIG, old, new)
    edit_rows(run, lambda rows: [row["config"]["data"].update(path=new) for row in rows if "config" in row])
    expect_defect(run, capsys, f"{data}: has other tokens than the run was trained on")


# Samples


START = {"event": "start", "step": 2, "steps": 9, "config": {}}


def begun_log(folder: Path) -> RunLog:
    log = RunLog(RunFolder(job_config("regression", folder)))
    log.resume(LogEnd(), Progress(), START | {"step": 0})
    return log


def sample_defects(run: Path) -> list[str]:
    found = verify.Found(run, {}, None, {}, [], verify.Log(run / METRICS, set()), verify._hash_samples(run))
    return [*verify._check_samples(found)]


def test_samples_are_in_the_chain(tmp_path: Path) -> None:
    """Also after a rollback, and after a resumed run has dropped some. A killed process may lack the newest ones."""
    run = begun_log(tmp_path)
    metrics = Metrics(run, 1, 9)
    metrics.show_samples(1, [Sample("", "x")])
    metrics.show_samples(2, [Sample("", "a"), Sample("b", "bc")])
    metrics.go_back({"event": "rollback", "step": 1, "from": 2, "skipped_range": [12, 24]})
    end = run.end()
    metrics.show_samples(3, [Sample("", "d")])
    file = run.path / SAMPLES
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 1, 3]
    for text, number in ((whole, 0), (whole + lines[0], 6), (whole.replace('"d"', '"e"'), 5), ("".join(lines[1:]), 1)):
        file.write_text(text)
        assert [defect.split(":")[0] for defect in sample_defects(run.path)] == [f"{SAMPLES}, line {number}"] * (
            number > 0
        )
    file.write_text("".join(lines[:-1]))
    assert sample_defects(run.path) == []
    run.append({"event": "end", "step": 3})
    assert sample_defects(run.path) == [f"{SAMPLES}: lines are missing after line 4"]
    run.resume(end, Progress(step=2, rollbacks=1), START)
    assert (file.read_text(), sample_defects(run.path)) == ("".join(lines[:-1]), [])


@pytest.mark.parametrize("edit", [
    lambda lines: lines[1:], lambda lines: lines[:1], lambda lines: [], lambda lines: [lines[1], lines[0]],
    lambda lines: [lines[0].replace("a", "b"), lines[1]], lambda lines: [*lines[:1], '{"step": 1}\n', *lines[1:]], None,
])  # fmt: skip
def test_a_resumed_run_does_not_vouch_for_samples_that_someone_changed(tmp_path: Path, capsys, edit) -> None:
    """It warns, keeps a copy, and the change is found afterwards, too. Samples after the checkpoint are dropped."""
    run = begun_log(tmp_path)
    file, damaged = run.path / SAMPLES, run.path / "samples.jsonl.damaged"
    for step in (1, 2):
        run.append_sample({"step": step, "text": "a"}, {"event": "sample", "step": step})
    end, sound = run.end(), file.read_text()
    run.append_sample({"step": 3}, {"event": "sample", "step": 3})
    run.resume(end, Progress(step=2), START)
    assert (file.read_text(), capsys.readouterr().err, sample_defects(run.path)) == (sound, "", [])
    altered = "".join(edit(sound.splitlines(keepends=True))) if edit else ""
    file.write_text(altered) if edit else file.unlink()
    run.resume(end, Progress(step=2), START)
    assert "samples.jsonl: the checkpoint has another SHA-256 of it" in capsys.readouterr().err
    assert not edit or damaged.read_text() == altered
    for _ in range(2):
        assert "someone changed samples.jsonl before this start" in sample_defects(run.path)[0]
        run.resume(run.end(), Progress(step=2), START)
        assert capsys.readouterr().err == ""
