"""A run that was really trained is intact; each way of tampering with it is found, named, and exits with 1."""

import json
import math
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
from ranks import in_turn, run_ranks
from runs import (
    change,
    edit_rows,
    expect_defect,
    gpt_state,
    job_config,
    record,
    reseal,
    state_of,
    train,
    training_config,
    verified,
)
from safetensors.torch import load_file, save_file

from gpt2_ddp.checkpoint.checkpoint import CONFIG, MODEL, OPTIMIZER, STATE, find_checkpoint
from gpt2_ddp.checkpoint.metrics import Metrics, Sample
from gpt2_ddp.checkpoint.run_files import HASH, METRICS, SAMPLES, is_own
from gpt2_ddp.checkpoint.run_folder import RunFolder, RunLog
from gpt2_ddp.checkpoint.store import CheckpointStore
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, GlobalBatch
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.data.order import Order
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.export import default_output, export
from gpt2_ddp.files import sha256_file
from gpt2_ddp.preparation.encode import write_manifest
from gpt2_ddp.reports.verify import Recorded, _read_samples, check_end, read_checkpoints, verify_run
from gpt2_ddp.reports.verify_checkpoints import check_kept, compare_state
from gpt2_ddp.reports.verify_rows import (
    RULES,
    Log,
    OrderReplay,
    Records,
    Schedule,
    Values,
    in_parts,
    replay_order,
    rule_of,
)
from gpt2_ddp.state import LogEnd, Losses, Progress
from gpt2_ddp.tasks.supervised import contiguous
from gpt2_ddp.tasks.trained_model import load_model


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def at(rows: list[dict], step: int) -> dict:
    return next(row for row in rows if row["step"] == step and "event" not in row)


def test_trained_run_is_intact(run: Path, corpus: Path, capsys: pytest.CaptureFixture) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill leaves
    assert verify_run(VerifyConfig(run=str(run))) == 0
    last = chain_of(run, 16)[:12]
    assert capsys.readouterr().out.splitlines() == [
        f"ok      metrics.jsonl: 11 rows, steps strictly increasing; 16 lines chained by hashes up to {last}",
        "ok      checkpoints: 2, all files unchanged, none missing",
        "ok      configuration: equal in config.yaml, starts and checkpoints, with one run id",
        "ok      status.json: agrees with metrics.jsonl",
        "ok      data: 3 of 3 shards unchanged",
        "ok      numbers of the rows: known fields, none missing or negative, equal where two agree",
        "ok      order of the data: all digests up to step 10, recomputed from seed 1337",
        "ok      learning rates as scheduled; rows, evaluations and checkpoints at their due steps",
        "note    losses, norms and weights: not checked; --rescore scores checkpoints again, --replay A:B trains again",
        f"{run} is intact",
    ]
    others = verified(run, capsys, shards="none")[2]
    assert "note    no shard was read: the tokens are not checked" in others
    assert "ok      data: 3 of 3 shards (" in "\n".join(verified(run, capsys, shards="sampled")[2])


@pytest.mark.parametrize("name", ["gpt2_run", "regression_run"])
def test_a_recorded_run_is_intact(name: str, capsys: pytest.CaptureFixture) -> None:
    code, defects, others = verified(GOLDEN / name, capsys, **({"data": [str(CORPUS)]} if name == "gpt2_run" else {}))
    assert (code, defects) == (0, [])
    assert any(line.startswith("ok      learning rates as scheduled; rows, evaluations") for line in others)


def test_a_complete_run_says_what_its_killed_session_did_not(
    run: Path, trained: Path, capsys: pytest.CaptureFixture
) -> None:
    """Its last two rows, of the newest checkpoint and of the end, and its status; it leaves a sound one alone."""
    config = training_config(trained.parent / "data", run.parent, {"optim.decay_steps": 10})
    whole = (run / "metrics.jsonl").read_bytes()
    cut_off(2)(run)
    (run / "status.json").write_text('{"state": "running", "step": 9, "reason": ""}')
    assert verified(run, capsys)[0] == 0
    assert run_ranks(in_turn, 1, (train, config), (train, config)) == [["completed"] * 2]
    assert (run / "metrics.jsonl").read_bytes() == whole
    assert verified(run, capsys)[0] == 0
    edit_rows(run, lambda rows: rows[-1].update(outcome="stopped"))  # of more steps, lowered since
    assert run_ranks(train, 1, config) == ["completed"]
    assert (run / "metrics.jsonl").read_bytes() == whole


def once_read(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Lets the run go on right after each reading of its rows."""

    def read(file: Path, *options: Any) -> Log:
        found = Log(file, *options)
        action()
        return found

    monkeypatch.setattr("gpt2_ddp.reports.verify.Log", read)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_run_may_go_on_meanwhile(run: Path, monkeypatch, capsys, is_known: bool) -> None:
    """And remove checkpoints that were verified, or made later, and of which the rows that were read tell."""
    folder = run / "checkpoints/step-00000005"
    found, damage = read_checkpoints(run)
    known = {place: checkpoint for place, checkpoint in found.items() if is_known or checkpoint.path != folder}

    def remove() -> None:
        shutil.rmtree(folder)
        edit_rows(run, lambda rows: rows.append({"step": 10, "event": "room", "kept": [10]}))

    monkeypatch.setattr("gpt2_ddp.reports.verify.read_checkpoints", lambda run: (known, damage))
    once_read(monkeypatch, remove)
    assert verified(run, capsys)[:2] == (0, [])


def test_mistakes_of_the_user(run: Path, corpus: Path, tmp_path: Path) -> None:
    nothing = VerifyConfig(run=str(tmp_path / "nothing"))
    expect_error(r"run = .*/nothing: has no config.yaml; name a run folder", verify_run, nothing)
    expect_error(r"data = .*/absent", verify_run, VerifyConfig(run=str(run), data=(str(tmp_path / "absent"),)))
    other = shutil.copytree(corpus, tmp_path / "other")
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, splits={"train": manifest.splits["train"][:-1]}))
    message = r"data = .*/other: has other tokens than the run was trained on"
    expect_error(message, verify_run, VerifyConfig(run=str(run), data=(str(other),)))
    assert verify_run(VerifyConfig(run=str(run), data=(str(shutil.copytree(corpus, tmp_path / "moved")),))) == 0


def test_a_small_job_is_intact_from_its_first_row_on(
    trained_job: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run of 101 samples in steps of 12; with its last epoch's checkpoint, and before it had any."""
    run = Path(shutil.copytree(trained_job, tmp_path / "run"))
    assert verify_run(VerifyConfig(run=str(run))) == 0
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    edit_rows(run, lambda rows: at(rows, 4).update(order_digest="f" * 64, lr=0.02))
    expect_defect(
        run,
        capsys,
        f"metrics.jsonl, line 6: order_digest of step 4 is {'f' * 64}, not ",
        "metrics.jsonl, line 6: lr of step 4 is 0.02, not 0.01",
    )
    edit_rows(run, lambda rows: rows.remove(at(rows, 18)))
    expect_defect(run, capsys, "metrics.jsonl, line 22: the row of step 18 is missing")
    shutil.rmtree(run / "checkpoints")
    (run / "status.json").write_text(RUNNING)
    (run / "metrics.jsonl").write_text("".join(rows[:5]))
    assert verify_run(VerifyConfig(run=str(run))) == 0
    assert "note    the last 4 rows are newer than the newest checkpoint" in capsys.readouterr().out
    (run / "config.yaml").write_text("")
    expect_error("is empty", verify_run, VerifyConfig(run=str(run)))


# Tampering


STEP = "checkpoints/step-00000010"
RUNNING = '{"state": "running", "step": 4, "reason": ""}'


def in_checkpoint(*changes: tuple[str, str, str]) -> Callable[[Path], None]:
    """Changes text of files of the newest checkpoint, whose hashes fit again."""

    def edit(run: Path) -> None:
        for name, old, new in changes:
            change(run / STEP / name, old, new)
            reseal(run / STEP / name)

    return edit


def nonsense(name: str, content: str) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        (run / STEP / name).write_text(content)
        reseal(run / STEP / name)

    return write


def older_checkpoint(run: Path) -> None:
    shutil.rmtree(run / STEP)
    shutil.copytree(run / "checkpoints/step-00000005", run / STEP)


def flipped_bit(run: Path) -> None:
    content = bytearray((run / STEP / MODEL).read_bytes())
    content[len(content) // 2] ^= 1
    (run / STEP / MODEL).write_bytes(content)


def in_tensors(name: str, edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        tensors = load_file(run / STEP / name)
        edit(tensors)
        save_file(tensors, run / STEP / name)
        reseal(run / STEP / name)

    return write


def layers_everywhere(number: int) -> Callable[[Path], None]:
    def write(run: Path) -> None:
        for file in (run / "config.yaml", run / STEP / CONFIG, run / "checkpoints/step-00000005" / CONFIG):
            change(file, "n_layer: 2", f"n_layer: {number}")
            if file.parent != run:
                reseal(file)
        edit_rows(run, lambda rows: [row["config"]["model"].update(n_layer=number) for row in rows if "config" in row])

    return write


def forgotten(run: Path) -> None:
    shutil.rmtree(run / "checkpoints/step-00000005")
    edit_rows(run, lambda rows: [row["kept"].remove(5) for row in rows[-2:]])


def far_end(rows: list[dict]) -> None:
    rows[-1]["step"] = 10**12
    for row in rows:
        if "steps" in row:
            row["steps"] = row["config"]["train"]["steps"] = 10**12


def in_config(old: str, new: str) -> Callable[[Path], None]:
    return lambda run: change(run / "config.yaml", old, new)


def in_rows(edit: Callable[[list[dict]], object]) -> Callable[[Path], None]:
    return lambda run: edit_rows(run, edit)


def cut_off(count: int) -> Callable[[Path], None]:
    def cut(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:-count]))

    return cut


def none_kept(run: Path) -> None:
    edit_rows(run, lambda rows: [row.update(kept=[]) for row in rows if "kept" in row])
    shutil.rmtree(run / "checkpoints")


def hidden_chains(run: Path) -> None:
    change(run / "metrics.jsonl", '"loss": 6', '"loss": 1')
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace("\n", " \n"))


def without_chains(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: value for name, value in row.items() if name != "chain"} for row in rows if "event" not in row]
    at(kept, 8)["loss"] = 1.0
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in kept))


OTHER_ROWS = f"{STEP}/state.json: its chain is not in metrics.jsonl"
NO_END = "status.json: has state completed, but metrics.jsonl has no end row"
TAMPERINGS: dict[str, tuple[Callable[[Path], object], *tuple[str, ...]]] = {
    "a checkpoint of another run": (
     in_checkpoint((STATE, '"run_id": "', '"run_id": "f'), (CONFIG, "lr: 0.003\n", "lr: 0.004\n")),
     f"{STEP}/state.json: run_id is f", f"{STEP}/config.yaml: optim.lr = 0.004: the run was started with 0.003",
     f"{STEP}: its manifest's SHA-256 differs"),
    "all checkpoints deleted": (lambda run: shutil.rmtree(run / "checkpoints"),
     "checkpoints/step-00000005: is missing", f"{STEP}: is missing"),
    "n_layer": (in_config("n_layer: 2", "n_layer: 3"),
     "config.yaml: model.n_layer = 3: the run was started with 2",
     f"{STEP}/model.safetensors: h.2.attn.c_attn.bias is none, by the model section F32 [96]"),
    "n_layer everywhere": (layers_everywhere(3),
     "checkpoints/step-00000005/model.safetensors: h.2.", f"{STEP}: its manifest's SHA-256 differs"),
    "lr": (in_config("lr: 0.003\n", "lr: 0.004\n"), "config.yaml: optim.lr = 0.004: the run was started with 0.003"),
    "seed": (in_config("seed: 1337", "seed: 1338"), "config.yaml: seed = 1338", "metrics.jsonl, line 4: order_digest"),
    "a field that may change": (in_config("every: 5\n", "every: 9\n"), "config.yaml: checkpoint.every is 9, in "),
    "lr of a row": (lambda run: change(run / "metrics.jsonl", '"lr": 0.0015', '"lr": 0.0016'),
     "metrics.jsonl, line 4: its chain is wrong", "metrics.jsonl, line 4: lr of step 1 is 0.0016, not 0.0015"),
    "a line that is no row": (lambda run: change(run / "metrics.jsonl", '{"step": 2,', '{"step" 2,'),
     "metrics.jsonl, line 5: is not a row", "metrics.jsonl, line 6: its chain is wrong"),
    "a step that nobody could reach, which costs nothing": (
     lambda run: change(run / "metrics.jsonl", '"step": 10,', '"step": 10000000000000,'),
     "metrics.jsonl, line 14: step 10000000000000 does not match tokens"),
    "no rows": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl: has no rows"),
    "no checkpoints, and none kept": (none_kept,
     "checkpoints: all are missing, although the run has saved some"),
    "lr of a row, chained": (in_rows(lambda rows: at(rows, 7).update(lr=0.003)),
     "metrics.jsonl, line 11: lr of step 7 is 0.003, not 0.00", OTHER_ROWS),
    "val_loss of a row, chained": (in_rows(lambda rows: at(rows, 10).update(val_loss=1.5)),
     f"{STEP}/state.json: val_loss is ", OTHER_ROWS),
    "val_loss where none was due": (in_rows(lambda rows: at(rows, 7).update(val_loss=1.5)),
     "metrics.jsonl, line 11: step 7 has a val_loss, unlike eval.every"),
    "tokens and epoch of a row": (in_rows(lambda rows: (at(rows, 7).update(tokens=1), at(rows, 8).update(epoch=0.5))),
     "metrics.jsonl, line 11: step 7 does not match tokens 1", "metrics.jsonl, line 12: epoch of step 8 is 0.5"),
    "a row missing, chained": (in_rows(lambda rows: rows.remove(at(rows, 7))),
     "metrics.jsonl, line 11: the row of step 7 is missing", OTHER_ROWS),
    "a row twice, chained": (in_rows(lambda rows: rows.insert(10, at(rows, 7))),
     "metrics.jsonl, line 12: step 7 after step 7", OTHER_ROWS),
    "a state that is none": (nonsense(STATE, "[1]"), f"{STEP}/state.json: has state = [1]"),
    "a state without JSON": (nonsense(STATE, "{"), f"{STEP}/state.json: cannot be read ("),
    "a configuration without YAML": (nonsense(CONFIG, "a: ]"), f"{STEP}/config.yaml: cannot be read ("),
    "weights that are none": (nonsense(MODEL, "no"), f"{STEP}/model.safetensors: is no safetensors file ("),
    "a key of config.yaml misspelt": (in_config("  n_layer:", "  n_layers:"),
     "config.yaml: model.n_layers: unknown key; did you mean model.n_layer?"),
    "lines of config.yaml deleted": (in_config("guard:\n  skip: true\n  norm_sigmas: null\n", "guard:\n"),
     "config.yaml: guard.skip is None, in"),
    "garbage for a status": (lambda run: (run / "status.json").write_text("{"),
     "status.json: has state None at step None; state should be one of running"),
    "a status that does not exist": (lambda run: change(run / "status.json", "completed", "kompleted"),
     "status.json: has state kompleted at step 10; state should be one of running"),
    "no status": (lambda run: (run / "status.json").unlink(), "status.json: is missing"),
    "another tokenizer, resealed": (in_checkpoint(("tokenizer.json", "{", "{ ")),
     f"{STEP}/tokenizer.json: its SHA-256 differs from tokenizer_sha256 in state.json"),
    "a tensor that is not finite, resealed": (
     in_tensors(MODEL, lambda tensors: tensors["h.0.ln_1.weight"].fill_(float("nan"))),
     f"{STEP}/model.safetensors: h.0.ln_1.weight is not finite"),
    "tensors of the optimizer missing, resealed": (
     in_tensors(OPTIMIZER, lambda tensors: [tensors.pop(name) for name in sorted(tensors)[:10]]),
     f"{STEP}/optimizer.safetensors: h.0.ln_1.weight has the optimizer state"),
    "no optimizer state, resealed": (in_tensors(OPTIMIZER, lambda tensors: tensors.clear()),
     f"{STEP}/optimizer.safetensors: has no tensors"),
    "negative squares of Adam, resealed": (
     in_tensors(OPTIMIZER, lambda tensors: tensors["exp_avg_sq.h.0.ln_1.weight"].neg_()),
     f"{STEP}/optimizer.safetensors: exp_avg_sq.h.0.ln_1.weight has negative squares"),
    "another number of Adam's steps, resealed": (
     in_tensors(OPTIMIZER, lambda tensors: tensors["step.h.0.ln_1.weight"].fill_(3)),
     f"{STEP}/optimizer.safetensors: step.h.0.ln_1.weight is 3.0, after 10 steps"),
    "a checkpoint removed, and its step from the rows after the newest one, chained": (forgotten,
     "metrics.jsonl, line 15: kept lacks a checkpoint of keep_last, step 5"),
    "the most layers": (layers_everywhere(10_000),
     "checkpoints/step-00000005/model.safetensors: has too few numbers for n_layer = 10000"),
    "an end that no loop reaches": (in_rows(far_end), "metrics.jsonl, line 16: the rows after step 10 are missing"),
    "weights of another type, resealed": (
     in_tensors(MODEL, lambda tensors: tensors.update({"wpe.weight": tensors["wpe.weight"].to(torch.float64)})),
     f"{STEP}/model.safetensors: wpe.weight is F64 [32, 32], by the model section F32 [32, 32]"),
    "scores of a state": (in_checkpoint((STATE, '"val_bits_per_byte": ', '"val_bits_per_byte": 1')),
     f"{STEP}/state.json: val_bits_per_byte is "),
    "facts and sums of a state": (
     in_checkpoint((STATE, '"threads": 1', '"threads": 9'), (STATE, '"since_row": [\n   0', '"since_row": [\n   1')),
     f"{STEP}/state.json: threads is 9, in metrics.jsonl, line 9 1",
     f"{STEP}/state.json: since_row is (1.0, 0.0, 0.0), after the row of step 10"),
    "the best evaluation of a state": (
     in_checkpoint((STATE, '"best": {\n   "step": 10', '"best": {\n   "step": 5')),
     f"{STEP}/state.json: best is Best(step=5, "),
    "val_tokens, chained": (in_rows(lambda rows: at(rows, 10).update(val_tokens=100)),
     "metrics.jsonl, line 14: val_tokens of step 10 is 100, not 512"),
    "a sample that was not due, chained": (
     in_rows(lambda rows: rows.insert(-2, {"event": "sample", "step": 10, "samples_sha256": "f"})),
     "metrics.jsonl, line 15: no sample was due at step 10", "samples.jsonl: lines are missing after line 0"),
    "an older checkpoint": (older_checkpoint,
     f"{STEP}/state.json: holds the state of step 5", f"{STEP}: its manifest's SHA-256 differs"),
    "a flipped bit": (flipped_bit, f"{STEP}/model.safetensors: its SHA-256 differs"),
    "a file of a checkpoint missing": (lambda run: (run / STEP / STATE).unlink(), f"{STEP}/state.json: is missing"),
    "digest and processes of a checkpoint": (
     lambda run: in_checkpoint((STATE, state_of(run)["feed"]["order_digest"], "f" * 64),
                               (STATE, '"processes": 2', '"processes": 1'))(run),
     f"{STEP}/state.json: order_digest of step 10 is ffff", f"{STEP}/state.json: processes is 1, in metrics.jsonl"),
    "the last rows cut off": (cut_off(3), NO_END, OTHER_ROWS),
    "completed at another step": (lambda run: change(run / "status.json", '"step": 10', '"step": 11'),
     "status.json: has completed at step 11, metrics.jsonl completed at step 10"),
    "a start removed, chained": (in_rows(lambda rows: rows.pop(8)),
     "metrics.jsonl, line 9: step 6 in a run of 5 steps", OTHER_ROWS),
    "the first start removed, chained": (in_rows(lambda rows: rows.pop(0)),
     "metrics.jsonl, line 1: the chain of rows does not begin with a start", OTHER_ROWS),
    "a checkpoint's row removed, chained": (in_rows(lambda rows: rows.pop(-2)),
     "metrics.jsonl, line 15: the checkpoint of step 10 was not recorded"),
    "the chain left away in a row": (lambda run: change(run / "metrics.jsonl", f', "chain": "{chain_of(run, 4)}"', ""),
     "metrics.jsonl, line 4: has no chain"),
    "the chain hidden from the check by a blank": (hidden_chains, "metrics.jsonl, line 1: has no chain"),
    "all chains left away": (without_chains, OTHER_ROWS),
    "a sample of a step that was never reached": (
     lambda run: (run / "samples.jsonl").write_text('{"step": 90, "text": "x"}\n'),
     "samples.jsonl, line 1: was changed or added"),
}  # fmt: skip
"""An edit of a run, and the beginnings of defects that it causes."""


def chain_of(run: Path, line: int) -> str:
    return json.loads((run / "metrics.jsonl").read_text().splitlines()[line - 1])["chain"]


@pytest.mark.parametrize("name", TAMPERINGS)
def test_each_tampering_is_found_and_named(run: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    tamper, *defects = TAMPERINGS[name]
    tamper(run)
    expect_defect(run, capsys, *defects)


FORGED = [name for name in TAMPERINGS if name.endswith("resealed") or "of a state" in name]
FORGED += ["a checkpoint of another run", "an older checkpoint", "digest and processes of a checkpoint"]


@pytest.mark.parametrize("name", FORGED)
def test_a_resume_does_not_take_what_the_rows_did_not_record(run: Path, trained: Path, name: str) -> None:
    TAMPERINGS[name][0](run)
    folder = RunFolder(training_config(trained.parent / "data", run.parent))
    checkpoints = CheckpointStore(folder, RunLog(folder))
    for look in (checkpoints.peek, checkpoints.newest):
        found = look()
        assert found
        assert found.step == 5
    assert checkpoints.listing()["rejected"] == ["step-00000010.rejected"]


FAKE = "\x1b[2K\rx\nok      everything"


@pytest.mark.parametrize("tamper", [
    in_rows(lambda rows: at(rows, 7).update({FAKE: 1})), in_rows(lambda rows: rows[-1].update(event=FAKE)),
    in_rows(lambda rows: at(rows, 7).update(order_digest=FAKE)), in_rows(lambda rows: rows[-2].update(kept=[5, FAKE])),
    lambda run: (run / "status.json").write_text(json.dumps({"state": FAKE, "step": 1})),
    in_tensors(MODEL, lambda tensors: tensors.update({FAKE: torch.zeros(1)})),
    in_checkpoint((STATE, '"run_id": "', f'"run_id": {json.dumps(FAKE)[:-1]}')),
    lambda run: change(run / "config.yaml", "  lr: 0.003", f"  {json.dumps(FAKE)}: 1\n  lr: 0.003"),
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
    for file in (run / STEP / CONFIG, run / CONFIG):
        config = yaml.safe_load(file.read_text())
        section, _, key = name.rpartition(".")
        fields = config[section] if section else config
        fields.pop(key) if value is ... else fields.update({key: value})
        if name == "model.block_size":
            config["train"]["global_batch_tokens"] = value
        file.write_text(yaml.safe_dump(config))
    reseal(run / STEP / CONFIG)
    record(run / STEP)
    checkpoint = find_checkpoint(run, kind="gpt2")
    if says:
        for read in (load_model, lambda checkpoint: export(checkpoint, default_output(checkpoint))):
            expect_error(re.escape(says), read, checkpoint)
    else:
        load_model(checkpoint)
        assert default_output(checkpoint).parent == Path("exports")
    with suppress(UserError):
        assert verify_run(VerifyConfig(run=str(run))) == 1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "run") in ([], ["exports"])


def test_shards_that_are_others(run: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Overwritten, or missing; or another data set of the same length in their place, with a manifest of its own. So is
    a tokenizer."""
    data = Path(shutil.copytree(trained.parent / "data", tmp_path / "data"))
    shard = data / "train_000000.bin"
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + b"\1\1")
    code, defects, _ = verified(run, capsys, data=(str(data),))
    assert (code, defects) == (1, [f"{shard}: its SHA-256 differs from {data / 'manifest.json'}'s"])
    assert verified(run, capsys, data=(str(data),), shards="none")[0] == 0
    shard.unlink()
    code, defects, _ = verified(run, capsys, data=(str(data),))
    assert code == 1
    assert str(shard) in defects[0]

    shard.write_bytes(content)
    change(data / "tokenizer.json", "{", "{ ")
    code, defects, _ = verified(run, capsys, data=(str(data),))
    assert (code, defects) == (1, ["tokenizer.json: its SHA-256 differs from tokenizer_sha256 in manifest.json"])

    shard.write_bytes(content[:-2] + b"\1\1")
    manifest = read_manifest(data)
    train = [replace(one, sha256=sha256_file(data / one.file)) for one in manifest.splits["train"]]
    write_manifest(data, replace(manifest, splits={**manifest.splits, "train": train}))
    change(run / "config.yaml", str(trained.parent / "data"), str(data))
    expect_defect(run, capsys, f"{data}: has other tokens than the run was trained on")


# The order of the data


def order_defects(corpus: Path, records: dict[str, dict]) -> list[str]:
    config = training_config(corpus, corpus, {"train.global_batch_tokens": 24 * 32})
    rows = {place: record for place, record in records.items() if place.startswith("line")}
    states = {place: record for place, record in records.items() if place not in rows}
    events = {place: row for place, row in rows.items() if "event" in row}
    history = replay_order(config, [read_manifest(corpus)], events, states)
    assert history is not None
    placed = in_parts(rows.items(), states)
    return [f"{place}: {defect}" for place, record in placed for defect in history.check(record)]


def went_back(corpus: Path, steps: tuple[int, ...], anew: bool = False) -> tuple[dict[str, dict], dict[int, dict]]:
    """Rows of a run of these steps, -4 being a rollback to step 4, and its states by step.

    Args:
        anew: each rollback saves the checkpoint that it went back to once more.
    """
    order = Order(1337, (read_manifest(corpus).tokens("train") - 1) // 32)
    feed = Feed(order, GlobalBatch(24, contiguous(1, 1)))
    records, states, stood, begun, rollbacks = {}, {}, {}, 0, 0
    for step in steps:
        if step > 0:
            feed.next_step()
            row, begun = {"step": step, "tokens": step * 24 * 32, "order_digest": feed.order_digest}, step
            stood[step] = feed.state_dict()
            states[step] = row | stood[step].model_dump(mode="json") | {"rollbacks": rollbacks}
        else:
            end, rollbacks = feed.position, rollbacks + 1
            feed.load_state_dict(stood[-step])
            start = int(feed.positions_from(feed.position)[0])
            feed.skip_range(start, end)
            row = {"event": "rollback", "step": -step, "from": begun, "skipped_range": [start, end]}
            row |= {"order_digest": feed.order_digest}
            stood |= {-step: feed.state_dict()} if anew else {}
            states[-step] |= stood[-step].model_dump(mode="json")
        records[f"line {len(records) + 1}"] = row
    return records, states


def test_a_run_that_went_back_is_replayed(corpus: Path) -> None:
    records, states = went_back(corpus, (1, 2, 3, 4, 5, 6, -4, 5, 6, 7, -3, 4, 5, 6, 7, 8))
    records |= {f"state of step {step}": states[step] for step in (3, 8)}
    assert order_defects(corpus, records) == []
    first = next(place for place, record in records.items() if "event" in record)
    for place, altered in (
        (first, {"skipped_range": [96, 145]}),
        (first, {"order_digest": "f" * 64}),
        *((first, {"from": step}) for step in (4, 5)),
        (first, {"from": 10**15}),
        (first, {"skipped_range": [144, 96]}),
        ("line 10", {"event": "branch", "step": 6, "position": 240, "skipped_ranges": [[96, 144], [144, 96]]}),
        ("line 10", {"event": "branch", "step": 3, "position": 72}),  # what follows is measured from there
        ("state of step 8", {"skipped_ranges": [[72, 241]]}),
        ("state of step 8", {"rollbacks": 1}),
        ("line 9", {"tokens": 6 * 24 * 32 + 1}),
    ):
        found = order_defects(corpus, records | {place: records[place] | altered})
        assert found, (place, altered)
        assert found[0].startswith(place), found


def test_an_order_that_nothing_tells_yet_is_no_defect(tmp_path: Path) -> None:
    """Before its first checkpoint, nothing says how many processes scaled a job's batch."""
    config = job_config("regression", tmp_path, {"scale_with_processes": True})
    rows = {"line 2": {"step": 1, "samples": 24, "order_digest": "0" * 64}}
    assert replay_order(config, [], rows, {}) is None


@pytest.mark.parametrize("anew", [False, True])
def test_a_run_may_go_back_to_the_same_checkpoint_twice(corpus: Path, anew: bool) -> None:
    """The checkpoint on the disk knows nothing of what was passed over since; one that was saved there anew does."""
    records, _ = went_back(corpus, (1, 2, 3, 4, 5, -2, 3, 4, -2, 3, 4, 5), anew)
    assert order_defects(corpus, records) == []
    second = [place for place, record in records.items() if "event" in record][1]
    start, end = records[second]["skipped_range"]
    for skipped in ([start, end + 1], [start + 1, end], [end, start]):
        assert order_defects(corpus, records | {second: records[second] | {"skipped_range": skipped}})


def end_defects(run: Path, *more: dict) -> list[str]:
    """What is wrong with the end of a run, whose rows `more` follow."""
    with (run / METRICS).open("a") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in more))
    found = Recorded(run, {}, job_config("regression", run), Log(run / METRICS), {}, None, _read_samples(run), [])
    return [defect for _, defects in check_end(found) for defect in defects or () if defect[:6] != "status"]


START = {"event": "start", "step": 2, "steps": 9, "config": {}}
BACK = {"event": "rollback", "step": 1, "from": 2, "skipped_range": [12, 24]}


def begun_log(folder: Path) -> RunLog:
    log = RunLog(RunFolder(job_config("regression", folder)))
    log.resume(LogEnd(), Progress(), START | {"step": 0})
    return log


def test_samples_are_in_the_chain(tmp_path: Path) -> None:
    """Also after a rollback, and after a resumed run has dropped some. A killed process may lack the newest ones."""
    run = begun_log(tmp_path)
    file, rows = run.path / SAMPLES, run.path / METRICS
    metrics = Metrics(run, 1, 9)
    metrics.show_samples(1, [Sample("", "x")])
    metrics.show_samples(2, [Sample("", "a"), Sample("b", "bc")])
    metrics.go_back(dict(BACK))
    end = run.end()
    metrics.show_samples(3, [Sample("", "d")])
    whole, recorded = file.read_text(), rows.read_text()
    lines = whole.splitlines(keepends=True)

    def defects(text: str, *more: dict) -> list[str]:
        file.write_text(text)
        rows.write_text(recorded)
        return end_defects(run.path, *more)

    assert [json.loads(line)["step"] for line in lines] == [1, 2, 2, 1, 3]
    for last in ([], [{"event": "end", "step": 3}]):
        assert defects(whole, *last) == []
        assert defects(whole + '{"step": 3, "prompt": "", "text": "invented"}\n', *last)[0].startswith(
            "samples.jsonl, line 6: was changed or added"
        )
        assert defects(whole.replace('"d"', '"e"'), *last)[0].startswith("samples.jsonl, line 5: was changed or added")
        assert defects(whole.replace('"a"', '"e"'), *last)[0].startswith("samples.jsonl, line 2: was changed or added")
        assert defects("".join(lines[1:]), *last)
    assert defects("".join(lines[:-1])) == []
    assert defects("".join(lines[:-1]), *last) == ["samples.jsonl: lines are missing after line 4"]
    assert defects(whole) == []
    run.resume(end, Progress(step=2, rollbacks=1), START)
    assert file.read_text() == "".join(lines[:-1])
    assert end_defects(run.path, *last) == []


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
    assert (file.read_text(), capsys.readouterr().err, end_defects(run.path)) == (sound, "", [])
    altered = "".join(edit(sound.splitlines(keepends=True))) if edit else ""
    file.write_text(altered) if edit else file.unlink()
    run.resume(end, Progress(step=2), START)
    assert "samples.jsonl: the checkpoint has another SHA-256 of it" in capsys.readouterr().err
    assert not edit or damaged.read_text() == altered
    for _ in range(2):
        assert "samples_sha256 differs from the one before" in end_defects(run.path)[0]
        run.resume(run.end(), Progress(step=2), START)
        assert capsys.readouterr().err == ""


def test_a_sample_is_appended_without_reading_the_others(tmp_path: Path, monkeypatch) -> None:
    run = begun_log(tmp_path)
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr(Path, "read_bytes", None)
    for step in range(3):
        run.append_sample({"step": step}, {"event": "sample", "step": step})
    monkeypatch.undo()
    recorded = json.loads((run.path / METRICS).read_text().splitlines()[-1])["samples_sha256"]
    assert recorded == sha256_file(run.path / SAMPLES)


def test_a_sample_that_comes_while_the_run_is_verified(run: Path, monkeypatch, capsys) -> None:
    edit_rows(run, lambda rows: rows.pop(-1))
    (run / "status.json").write_text(RUNNING)

    line = '{"step": 15, "prompt": "", "text": "x"}\n'
    once_read(monkeypatch, lambda: (run / SAMPLES).write_text(line))
    assert verified(run, capsys)[:2] == (0, [])


def golden_rows(run: str) -> Records:
    return dict(Log(GOLDEN / run / METRICS).items())


def check_values(rows: Records) -> list[str]:
    values = Values()
    return [f"{place}: {defect}" for place, row in rows.items() for defect in values.check(row)]


@pytest.mark.parametrize(("changes", "defect"), [
    ({"loss_mean": 1.5}, "loss_mean of step 7 is 1.5, not 5."), ({"loss": None}, "loss of step 7 is None"),
    ({"loss": ...}, "loss of step 7 is missing"), ({"skipped": 3}, "skipped is 3, 0 at step 6"),
    ({"accuracy": "0.99"}, "accuracy of step 7 is 0.99"), ({"cloze_acc": True}, "cloze_acc of step 7 is True"),
    ({"steps": 7}, "has the unknown field steps"), ({"loss/x": [7]}, "loss/x of step 7 is [7]"),
    ({"val_bits_per_byte": 5.0}, "val_bits_per_byte of step 10 is 5.0, not "),
    ({"val_samples": 30}, "val_samples of step 18 is 30, not 31"),
])  # fmt: skip
def test_numbers_that_contradict_each_other(changes: dict, defect: str) -> None:
    """Whatever the chain says. Two of them change at no step."""
    (name,) = changes
    rows = golden_rows("regression_run" if name == "val_samples" else "gpt2_run")
    assert [*check_values(rows)] == []
    place = [place for place, row in rows.items() if (name in row if "val_" in name else row["step"] == 7)][-1]
    rows[place] = {key: content for key, content in (rows[place] | changes).items() if content is not ...}
    assert check_values(rows)[0].startswith(f"{place}: {defect}")


def test_a_task_may_add_any_number_under_a_name_of_its_own() -> None:
    """The trainer's names are those that have a rule."""
    assert not [name for name in RULES if is_own(name)]
    assert [*filter(is_own, ("loss/x", "epoch/x", "my_per_second", "val_loss/x", "val_x", "x"))] == [
        "loss/x",
        "val_x",
        "x",
    ]
    assert rule_of("step/x") is rule_of("mine") is not rule_of("tokens/x")
    rows = golden_rows("gpt2_run")
    place = next(place for place, row in rows.items() if row["step"] == 7)
    rows[place] |= {"accuracy": -0.5, "step/x": 7, "grad_norm/h.0": None}
    assert check_values(rows) == []


def test_events_that_no_training_writes() -> None:
    rows = golden_rows("gpt2_run")
    end = {"event": "end", "step": 10}
    assert [*check_values(rows | {"more": end})] == ["more: follows the end of a session"]
    assert [*check_values(rows | {"more": {"event": "start", "step": 10}})] == []


def test_values_after_a_rollback_and_of_a_branch() -> None:
    """The mean of several steps, some of them undone, is not that of one step."""
    row = {"loss": 2.0, "loss_mean": 2.0, "lr": 0.1, "grad_norm": 1.0, "skipped": 1, "order_digest": "", "epoch": 0.5}
    other = row | {"loss_mean": 2.5}
    back = {"event": "rollback", "step": 4}
    rows = [row | {"step": 3}, row | {"step": 5, "loss_mean": 1.0, "skipped": 3}, back, other | {"step": 5}]
    assert [*check_values({str(n): one for n, one in enumerate(rows)})] == []
    branch = [{"event": "branch", "step": 7}, {"step": 7, "val_loss": 1.0}, row | {"step": 8, "skipped": 1}]
    assert [*check_values({str(n): one for n, one in enumerate(branch)})] == []


def test_kept_checkpoints_are_saved_ones() -> None:
    saved = {"event": "checkpoint", "step": 10, "sha256": "f"}
    start = {"event": "start", "step": 5, "checkpoint": {"step": 5, "sha256": "e"}, "kept": [5]}
    first = start | {"step": 0, "checkpoint": {"step": 0, "sha256": "d"}, "kept": [0]}
    first["config"] = {"checkpoint": {"keep_last": 2}}
    five, nine, twelve = (
        saved | {"step": step, "kept": kept} for step, kept in ((5, [0, 5]), (9, [5, 9]), (12, [9, 12]))
    )
    run = {"a": first, "b": five, "c": nine}
    again = first | {"step": 9, "checkpoint": {"step": 9, "sha256": "f"}, "kept": [9]}
    for rows, defects in (
        # step 12 was saved, 5 deleted, 12 undone by a rollback to 9; all that was cut as the run was resumed from 9
        (run | {"d": again, "e": twelve}, []),
        (run | {"d": twelve | {"kept": [12]}}, ["d: kept lacks a checkpoint of keep_last, step 9"]),
        ({"a": start, "b": saved | {"kept": [5, 10]}}, []),
        ({"a": start, "b": saved | {"kept": [5, 7, 10]}}, ["b: kept has step 7, which was not saved"]),
        ({"a": start | {"step": 7}}, []),
        ({"a": start, "b": start | {"step": 7}}, ["b: starts at step 7, without a checkpoint of that step"]),
        ({"a": start, "b": saved | {"kept": [5]}}, ["b: kept lacks its own checkpoint, of step 10"]),
    ):
        assert check_kept(rows)[2] == defects


def test_the_anchor_of_a_run_is_kept_elsewhere(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "anchor"
    code, _, others = verified(run, capsys, anchor=str(file))
    assert (code, others[-2]) == (0, f"ok      the anchor of step 10 is in {file}")
    anchor = json.loads(file.read_text())
    assert anchor["chain"] == state_of(run)["log"]["chain"]
    assert anchor["sha256"] == sha256_file(run / STEP / MODEL)
    older = json.loads((run / "checkpoints/step-00000005" / STATE).read_text())["log"]["chain"]
    weights = sha256_file(run / "checkpoints/step-00000005" / MODEL)
    file.write_text(json.dumps({"step": 5, "chain": older, "sha256": weights}))
    assert verified(run, capsys, anchor=str(file))[0] == 0
    assert json.loads(file.read_text()) == anchor, "an older link is renewed"
    for field, defect in (
        ("chain", "metrics.jsonl: lacks the anchor's chain, of step 10"),
        ("sha256", f"{STEP}/{MODEL}"),
    ):
        wrong = json.dumps(anchor | {field: "f" * 64})
        file.write_text(wrong)
        code, defects, _ = verified(run, capsys, anchor=str(file))
        assert (code, len(defects)) == (1, 1)
        assert defects[0].startswith(defect)
        assert file.read_text() == wrong, "and stays"
    file.write_text("[]")
    for place, problem in ((file, "is no anchor; name a file"), (tmp_path / "none/anchor", "cannot be written")):
        expect_error(rf"anchor = {place}: {problem}", verify_run, VerifyConfig(run=str(run), anchor=str(place)))


def test_a_sample_is_of_the_step_of_its_row(tmp_path: Path) -> None:
    """Also of a step that was undone: the run died after it had gone back, before it was there again."""
    lines = [{"step": 12, "prompt": "", "text": "x"}, BACK | {"step": 6}]
    rows = [{"event": "sample", "step": 12}, BACK | {"step": 6}]
    for number, row in enumerate(rows, 1):
        (tmp_path / SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines[:number]))
        row[HASH] = sha256_file(tmp_path / SAMPLES)
    for others in (rows, [rows[0], rows[1] | {"step": 5}], [rows[0], rows[1] | {"event": "sample"}]):
        (tmp_path / METRICS).write_text("")
        assert bool(end_defects(tmp_path, *others)) == (others is not rows)


def test_killed_before_the_row_of_a_step_saved_again(run: Path, capsys: pytest.CaptureFixture) -> None:
    """Its chain is behind the row of the first save; one that is not behind it was altered."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if '"checkpoint", "step": 10' in line)
    start = json.loads(next(line for line in reversed(lines) if '"event": "start"' in line))
    reference = {name: json.loads(lines[number])[name] for name in ("step", "sha256")}
    resumed = start | {"step": 10, "checkpoint": reference, "kept": [5, 10]}
    edit_rows(run, lambda rows: rows.__setitem__(slice(number + 1, None), [resumed]))
    before, newest = (json.loads(line)["chain"] for line in (run / "metrics.jsonl").read_text().splitlines()[-2:])
    state = json.loads((run / STEP / STATE).read_text())
    change(run / STEP / STATE, state["log"]["chain"], newest)
    reseal(run / STEP / STATE)
    (run / "status.json").write_text(RUNNING)
    assert verified(run, capsys)[:2] == (0, [])
    change(run / STEP / STATE, newest, before)
    reseal(run / STEP / STATE)
    expect_defect(run, capsys, f"{STEP}: its manifest's SHA-256 differs")


def missed(config: TrainingConfig, *records: dict) -> list[str]:
    """What a schedule finds wrong with these rows of a run of 8 steps without a validation split."""
    history = OrderReplay(Feed(Order(7, 500), GlobalBatch(10, contiguous(1, 1))), "tokens", 1)
    schedule = Schedule(config, history, is_branch=False)
    return [defect for record in records for defect in schedule.check(record)]


def test_checkpoints_that_a_rollback_undid_are_due_again(corpus: Path, tmp_path: Path) -> None:
    config = training_config(corpus, tmp_path, {"checkpoint.every": 2})
    start = {"event": "start", "step": 0, "steps": 8, "config": config.model_dump(mode="json")}
    rows = [{"step": step} for step in range(9)]
    saved = [{"event": "checkpoint", "step": step} for step in range(9)]
    end = {"event": "end", "step": 8, "outcome": "completed"}
    once = [start, *rows[1:3], saved[2], *rows[3:5], saved[4], *rows[5:7], saved[6]]
    assert missed(config, *once, *rows[7:], saved[8], end) == []
    back = {"event": "rollback", "step": 1, "from": 6}
    assert missed(config, *once, back, rows[2], saved[2], *rows[3:], saved[8], end) == [
        "the checkpoint of step 4 was not recorded",
        "the checkpoint of step 6 was not recorded",
    ]


def test_rows_before_a_later_start_are_missed(corpus: Path, tmp_path: Path) -> None:
    config = training_config(corpus, tmp_path)
    start = {"event": "start", "step": 0, "steps": 8, "config": config.model_dump(mode="json")}
    rows = [{"step": step} for step in range(9)]
    assert missed(config, start, *rows[1:5], start | {"step": 4}) == []
    assert missed(config, start, *rows[1:3], start | {"step": 4}) == ["the row of step 3 is missing"]


def test_a_field_of_another_type_makes_a_line_no_row(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for row, problem in (
        ({"step": 1, "lr": "x"}, "is no row: lr is x"),
        *(({"step": 1, "lr": lr}, f"is no row: lr is {lr}") for lr in (None, True, -0.5, math.nan)),
        ({"step": 1, "chain": 5}, "is no row: chain is 5"),
        ({"step": 1, "val_loss/x": -1}, "is no row: val_loss/x is -1"),
        ({"step": 1, "event": "hello"}, "is no row: event is hello"),
        (START | {"steps": None}, "is no row: steps is None"),
        ({"step": 1, "event": "start", "steps": 9}, "is no row: config is None"),
        *((BACK | {"skipped_range": odd}, f"is no row: skipped_range is {odd}")
          for odd in ("all", ["a", "b"], [-12, 24], [12], None)),
        ({"step": 1, "event": "branch", "skipped_ranges": [3]}, "is no row: skipped_ranges is [3]"),
        ({"step": 1, "event": "room", "kept": ["x"]}, "is no row: kept is ['x']"),
        *((row, "is not a row with a step") for row in ({"step": True}, {"step": -1}, {"lr": 0.1})),
        ({"step": 1, "loss": None}, "has no chain"),
    ):  # fmt: skip
        file.write_text(json.dumps(row) + "\n")
        assert Log(file).defects == [f"metrics.jsonl, line 1: {problem}"]


def test_a_state_without_its_row_contradicts_nothing():
    """Its step was not logged, or its row was pending."""
    progress = Progress(step=4)
    progress.add_scores({"val_loss": 1.0})
    state = gpt_state(progress=progress, losses=Losses(since_row=(1.0, 2, 2)))
    assert not [*compare_state("here", state, {3: {"step": 3, "loss": 2.0}})]
    rows = {4: {"step": 4, "loss": 2.0, "val_loss": 1.5}}
    assert len([*compare_state("here", state, rows)]) == 3
