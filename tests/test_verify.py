"""A run that was really trained is intact; each way of tampering with it is found, named, and exits with 1."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import training_config
from ranks import run_ranks
from small_jobs import job_config

from gpt2_ddp.config.jobs import RegressionConfig
from gpt2_ddp.config.tools import VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.feed import Feed, contiguous
from gpt2_ddp.data.shards import read_manifest, write_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.reports.verify import check_order, verify_run
from gpt2_ddp.run.checkpoint import MANIFEST, MODEL, STATE, seal


def run_training(config: TrainingConfig) -> str:
    from gpt2_ddp.run.loop import train
    from gpt2_ddp.tasks.pretraining import Pretraining

    return train(config, Pretraining).outcome


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 5 steps in one process and 5 more in two, with checkpoints at 5 and 10."""
    runs = tmp_path_factory.mktemp("runs")
    for processes, steps in ((1, 5), (2, 10)):
        config = training_config(corpus, runs, {"train.steps": steps, "optim.warmup_steps": 2})
        run_ranks(run_training, processes, config)
    return runs / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def row(run: Path, step: int) -> dict:
    return next(row for line in (run / "metrics.jsonl").open() if (row := json.loads(line))["step"] == step)


def expect_defect(run: Path, capsys: pytest.CaptureFixture, *defects: str) -> None:
    assert verify_run(VerifyConfig(run=str(run))) == 1
    out = capsys.readouterr().out
    found = [line.removeprefix("defect  ") for line in out.splitlines() if line.startswith("defect  ")]
    assert len(found) == len(defects)
    assert all(line.startswith(defect) for line, defect in zip(found, defects, strict=True)), found
    assert out.endswith(f"{run} is not intact, defects: {len(defects)}\n")


def test_trained_run_is_intact(run: Path, capsys: pytest.CaptureFixture) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')  # what a kill leaves
    assert verify_run(VerifyConfig(run=str(run))) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok      metrics.jsonl: 11 rows, steps strictly increasing",
        "ok      checkpoints: 2, every file as it was written",
        "ok      order of the data: every digest up to step 10, recomputed from seed 1337",
        f"{run} is intact",
    ]


def test_another_seed_is_found_in_rows_and_checkpoints(run: Path, capsys: pytest.CaptureFixture) -> None:
    change(run / "config.yaml", "seed: 1337", "seed: 1338")
    assert verify_run(VerifyConfig(run=str(run))) == 1
    out = capsys.readouterr().out
    assert "defect  metrics.jsonl, line 2: order_digest of step 1 is " in out
    assert out.count("defect  ") == 6
    assert "defect  ... and 7 more like these" in out  # 10 rows and 2 checkpoints, 5 of them shown
    assert out.endswith("defects: 12\n")


def test_changed_digest_and_counts(run: Path, capsys: pytest.CaptureFixture) -> None:
    digest, tokens = row(run, 4)["order_digest"], row(run, 7)["tokens"]
    change(run / "metrics.jsonl", digest, "f" * 64)
    change(run / "metrics.jsonl", f'"tokens": {tokens},', f'"tokens": {tokens + 32},')
    expect_defect(
        run,
        capsys,
        f"metrics.jsonl, line 5: order_digest of step 4 is {'f' * 12}, not {digest[:12]}",
        f"metrics.jsonl, line 8: step 7 does not go with tokens {tokens + 32}",
    )


def test_steps_that_do_not_increase_and_broken_lines(run: Path, capsys: pytest.CaptureFixture) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3] = lines[3][:-5]
    lines.insert(6, lines[5])
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    expect_defect(run, capsys, "metrics.jsonl, line 4: is not a row", "metrics.jsonl, line 7: step 5 after step 5")


def test_step_that_nobody_could_reach_costs_nothing(run: Path, capsys: pytest.CaptureFixture) -> None:
    change(run / "metrics.jsonl", '"step": 10,', '"step": 10000000000000,')
    expect_defect(run, capsys, "metrics.jsonl, line 11: step 10000000000000 does not go with tokens")


def test_flipped_bit_and_missing_file(run: Path, capsys: pytest.CaptureFixture) -> None:
    model = run / "checkpoints" / "step-00000005" / MODEL
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    (run / "checkpoints" / "step-00000010" / STATE).unlink()
    expect_defect(
        run,
        capsys,
        "checkpoints/step-00000005/model.safetensors: its SHA-256",
        "checkpoints/step-00000010/state.json: is missing",
    )


def test_state_forged_together_with_its_hash(run: Path, capsys: pytest.CaptureFixture) -> None:
    five, ten = run / "checkpoints" / "step-00000005", run / "checkpoints" / "step-00000010"
    digest, wrong_digest = row(run, 5)["order_digest"], row(run, 10)["order_digest"]
    for checkpoint, old, new in ((five, digest, wrong_digest), (ten, '"position": 240', '"position": 264')):
        before = sha256_file(checkpoint / STATE)
        change(checkpoint / STATE, old, new)
        change(checkpoint / MANIFEST, before, sha256_file(checkpoint / STATE))
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        change(checkpoint / MANIFEST, manifest["sha256"], seal(manifest))
    five.rename(five.with_name("step-00000006"))
    expect_defect(
        run,
        capsys,
        "checkpoints/step-00000006/state.json: is the state of step 5",
        "checkpoints/step-00000006/state.json: order_digest of step 5",
        "checkpoints/step-00000010/state.json: step 10 does not go with tokens 7680, position 264",
    )


def test_run_without_metrics_or_checkpoints(run: Path, capsys: pytest.CaptureFixture) -> None:
    (run / "metrics.jsonl").unlink()
    shutil.rmtree(run / "checkpoints")
    expect_defect(run, capsys, "metrics.jsonl: has no rows")


def test_mistakes_of_the_user(run: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run = .*/nothing: holds no config.yaml; name a run folder"):
        verify_run(VerifyConfig(run=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match=r"data = .*/absent"):
        verify_run(VerifyConfig(run=str(run), data=str(tmp_path / "absent")))
    other = shutil.copytree(corpus, tmp_path / "other")
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, splits={"train": manifest.splits["train"][:-1]}))
    with pytest.raises(UserError, match=r"data = .*/other: other tokens than the run was trained on"):
        verify_run(VerifyConfig(run=str(run), data=str(other)))
    assert verify_run(VerifyConfig(run=str(run), data=str(shutil.copytree(corpus, tmp_path / "moved")))) == 0


def train_regression(config: RegressionConfig) -> None:
    from gpt2_ddp.tasks.jobs import run_job

    run_job(config)


def test_a_small_job_is_intact_from_its_first_row_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A run of 101 samples in steps of 12; with its last epoch's checkpoint, and before it had any."""
    run_ranks(train_regression, 1, job_config("regression", tmp_path))
    run = tmp_path / "run"
    assert verify_run(VerifyConfig(run=str(run))) == 0
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    change(run / "metrics.jsonl", json.loads(rows[4])["order_digest"], "f" * 64)
    expect_defect(run, capsys, f"metrics.jsonl, line 5: order_digest of step 4 is {'f' * 12}, not ")
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("".join(rows[:4]))
    assert verify_run(VerifyConfig(run=str(run))) == 0
    (run / "config.yaml").write_text("")
    with pytest.raises(UserError, match="is empty"):
        verify_run(VerifyConfig(run=str(run)))


def went_back(corpus: Path) -> dict[str, dict]:
    """Records of a run that went from step 6 back to step 4, and from step 7 back to step 3; and two checkpoints."""
    feed = Feed(range((read_manifest(corpus).tokens("train") - 1) // 32), 1337, 24, contiguous(1, 1))
    records, stood, rollbacks = {}, {}, 0
    for step in (1, 2, 3, 4, 5, 6, -4, 5, 6, 7, -3, 4, 5, 6, 7, 8):
        place = f"line {len(records) + 1}"
        if step > 0:
            feed.next_step()
            records[place] = {"step": step, "tokens": step * 24 * 32, "order_digest": feed.order_digest}
            stood[step] = {"position": feed.position, "passed": list(feed.passed), "rollbacks": rollbacks}
            newest = records[place] | stood[step]
            if step == 3:
                records["state of step 3"] = newest
        else:
            end, rollbacks, begun = feed.position, rollbacks + 1, newest["step"]
            position, passed = stood[-step]["position"], stood[-step]["passed"]
            digest = next(r["order_digest"] for r in records.values() if r["step"] == -step)
            feed.seek(position, digest, passed)
            feed.pass_over(position, end)
            event = {"event": "rollback", "step": -step, "from": begun, "passed": [position, end]}
            records[place] = event | {"order_digest": feed.order_digest}
    return records | {"state of step 3": records.pop("state of step 3"), "state of step 8": newest}


def test_a_run_that_went_back_is_replayed(corpus: Path, tmp_path: Path) -> None:
    records = went_back(corpus)
    settings = training_config(corpus, tmp_path).model_dump(mode="json")
    assert check_order(settings, None, records) == []
    first = next(place for place, record in records.items() if "event" in record)
    for place, altered in (
        (first, {"passed": [96, 145]}),
        (first, {"order_digest": "f" * 64}),
        (first, {"from": 5}),
        (first, {"from": 10**15}),
        (first, {"passed": "all"}),
        ("state of step 8", {"passed": [[72, 241]]}),
        ("state of step 8", {"rollbacks": 3}),
        ("state of step 8", {"rollbacks": 1}),
        ("line 9", {"tokens": 6 * 24 * 32 + 1}),
    ):
        found = check_order(settings, None, records | {place: records[place] | altered})
        assert found, (place, altered)
        assert found[0].startswith(place), found


def test_an_order_that_nothing_tells_yet_is_no_defect(tmp_path: Path) -> None:
    """Before its first checkpoint, nothing says how many processes scaled a job's batch."""
    config = job_config("regression", tmp_path, {"scale_with_processes": True})
    records = {"line 2": {"step": 1, "samples": 24, "order_digest": "0" * 64}}
    assert check_order(config.model_dump(mode="json"), None, records) is None
