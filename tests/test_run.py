"""A run: opened by small files, refused before long work, captured and restored in the middle, held by one trainer."""

import io
import json
import multiprocessing
import os
import shutil
import signal
import time
from contextlib import closing, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ranks import RankError, run_ranks, start_ranks
from runs import job_config, rows, train, training_config

from gpt2_ddp.config.run import RunConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.manifest import read_manifest, write_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import sha256_file
from gpt2_ddp.run.checkpoint import MANIFEST
from gpt2_ddp.run.folder import RunFolder
from gpt2_ddp.run.layout import SAVED, STATUS


def train_and_tell(config: RunConfig) -> str:
    """What a training prints."""
    with redirect_stdout(io.StringIO()) as said:
        train(config)
    return said.getvalue()


def files(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


# Captured and restored


def there_and_back(config: RunConfig) -> list[Any]:
    """Trains four steps, captures; then three times four more from there, and what they came to each time."""
    import torch

    from gpt2_ddp.run.loop import train_step
    from gpt2_ddp.run.run import Run
    from gpt2_ddp.tasks.jobs import Supervised, make_job
    from gpt2_ddp.tasks.pretraining import Pretraining

    make_task = Pretraining if isinstance(config, TrainingConfig) else lambda *given: Supervised(make_job, *given)
    found = []
    with closing(Run(config, make_task)) as run:
        run.build()
        run.settle()
        for _ in range(4):
            train_step(run)
        present = run.capture()
        snapshot = present.copied({}) if present else None
        for _ in range(3):
            losses = [train_step(run) for _ in range(4)]
            norms = torch.stack([torch.stack([step.loss_sum, step.grad_norm]) for step in losses]).tolist()
            after = run.capture()
            moments = (
                {} if after is None else {name: value.numpy().tobytes() for name, value in after.optimizer.items()}
            )
            weights = {name: value.detach().numpy().tobytes() for name, value in run.task.model.state_dict().items()}
            state = after.state if after else {}
            found.append((norms, run.step, run.task.feed.order_digest, weights, moments, state))
            run.restore(snapshot)
            assert run.step == 4
        run.accelerator.end_training()
    return found


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        *[(kind, 2) for kind in ("gpt2", "gpt2 with workers", "gpt2 with muon", "mlp")],
        *[pytest.param(kind, 1, marks=pytest.mark.slow) for kind in ("gpt2", "gpt2 with workers", "mlp")],
        *[pytest.param("regression", world, marks=pytest.mark.slow) for world in (1, 2)],
    ],
)
def test_back_in_the_middle_of_a_run(corpus: Path, tmp_path: Path, kind: str, world: int) -> None:
    """The same four steps have the same bits, on every rank: weights, moments, order, sums over the epoch."""
    changes = {"model.dropout": 0.1, "data.workers": 2 if "workers" in kind else 0}
    changes |= {"optim.name": "muon"} if "muon" in kind else {}
    config = training_config(corpus, tmp_path, changes) if "gpt2" in kind else job_config(kind, tmp_path)
    for first, *others in run_ranks(there_and_back, world, config):
        assert first[1] == 8
        assert all(other == first for other in others)


# Older releases


def forge(place: Path, name: str, change: Any) -> None:
    """Changes a small file of a checkpoint as another release would have written it."""
    file = place / name
    before = sha256_file(file)
    size = file.stat().st_size
    values = yaml.safe_load(file.read_text())
    change(values)
    file.write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values))
    manifest = (place / MANIFEST).read_text().replace(before, sha256_file(file))
    entries = json.loads(manifest)
    assert entries["files"][name]["bytes"] == size
    entries["files"][name]["bytes"] = file.stat().st_size
    entries["version"] = 1  # theirs had no hash of its own
    (place / MANIFEST).write_text(json.dumps(entries))


@pytest.fixture(scope="module")
def halfway(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5 of 10 steps."""
    folder = tmp_path_factory.mktemp("halfway")
    run_ranks(train, 1, training_config(corpus, folder, {"train.steps": 5, "optim.decay_steps": 10, "eval.every": 5}))
    return folder


def test_fields_that_have_come_or_gone_since(corpus, tmp_path, halfway):
    """What a checkpoint lacks takes its default, what it has too much is ignored with a line; nothing else changes."""
    config = training_config(corpus, tmp_path / "whole", {"train.steps": 10, "eval.every": 5})
    run_ranks(train, 1, config)
    shutil.copytree(halfway, tmp_path / "parts")
    place = tmp_path / "parts/run/checkpoints/step-00000005"

    def older(values: dict) -> None:
        del values["optim"]["eps"], values["model"]["bias"]
        values["optim"]["nesterov"] = True

    forge(place, "config.yaml", older)
    since = ("passed", "epoch_size", "epoch_loss", "epoch_units", "kind", "metrics", "skipped", "run_id", "tokens")
    since += ("since_row", "best_evaluation")
    forge(place, "state.json", lambda state: [state.pop(name) for name in since])
    (said,) = run_ranks(
        train_and_tell, 1, training_config(corpus, tmp_path / "parts", {"train.steps": 10, "eval.every": 5})
    )
    assert [line for line in said.splitlines() if "optim.nesterov" in line and "ignored" in line]
    timings = {"tokens_per_second", "data_share"}
    whole, parts = (
        [{k: v for k, v in row.items() if k not in timings} for row in rows(tmp_path / name / "run")]
        for name in ("whole", "parts")
    )
    assert parts == whole


# Refused before long work


def train_without_long_work(config: RunConfig, large: tuple[str, ...] = (".bin", ".safetensors")) -> str:
    """`train_and_tell`, while nothing is hashed but small files, and no model is built."""
    import gpt2_ddp.files
    from gpt2_ddp.data import hashes
    from gpt2_ddp.run import checkpoint
    from gpt2_ddp.tasks import jobs, pretraining

    def small(path: Path) -> str:
        assert path.suffix not in large, f"{path} is hashed"
        return gpt2_ddp.files.sha256_file(path)

    def build(*args: object) -> None:
        raise AssertionError("a model is built")

    hashes.sha256_file = checkpoint.sha256_file = small
    pretraining.GPT = jobs.make_job = build
    return train_and_tell(config)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.lr": 1e-3}, "optim.lr = 0.001: the run was started with 0.003"),
        ({"optim.name": "muon"}, "optim.name = muon: .* adamw; .* .train.init_from takes this one's weights along"),
        ({"model.n_layer": 3, "seed": 1}, "seed = 1: the run was started with 1337"),
        ({"train.global_batch_tokens": 12 * 32}, "train.global_batch_tokens = 384: the run was started with 768"),
    ],
)
def test_another_training_is_refused(corpus, tmp_path, halfway, world, changes, message):
    shutil.copytree(halfway, tmp_path / "runs")
    before = files(tmp_path)
    config = training_config(corpus, tmp_path / "runs", {"train.steps": 10, **changes})
    with pytest.raises(RankError, match=message):
        run_ranks(train_without_long_work, world, config)
    assert files(tmp_path) == before


def test_other_data_are_refused(corpus, tmp_path, halfway):
    shutil.copytree(halfway, tmp_path / "runs")
    other = tmp_path / "other"
    shutil.copytree(corpus, other)
    manifest = read_manifest(other)
    write_manifest(other, replace(manifest, splits={"train": manifest.splits["train"]}))
    before = files(tmp_path / "runs")
    with pytest.raises(RankError, match=r"data.path = .*not the ones that the run was started with"):
        run_ranks(train_without_long_work, 1, training_config(other, tmp_path / "runs", {"train.steps": 10}))
    assert files(tmp_path / "runs") == before


def test_another_kind_of_run_is_refused(corpus, tmp_path, halfway):
    shutil.copytree(halfway, tmp_path / "runs")
    with pytest.raises(RankError, match="run_name = run: is a run of another kind, gpt2"):
        run_ranks(train_without_long_work, 1, job_config("regression", tmp_path / "runs"))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.init_from": "nowhere"}, "train.init_from = nowhere"),
        ({"data.path": "nowhere"}, "data = nowhere: is not a folder"),
        ({"train.global_batch_tokens": 7 * 32, "eval.every": 1}, "processes = 2"),
    ],
)
def test_a_refused_run_leaves_no_folder(corpus, tmp_path, world, changes, message):
    if message.startswith("processes") and world == 1:
        pytest.skip("one process can always have the whole batch")
    with pytest.raises(RankError, match=message):
        run_ranks(train_without_long_work, world, training_config(corpus, tmp_path / "runs", changes))
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("kind", ["gpt2", "regression", "transformer"])
def test_a_complete_run_says_so_at_once(corpus, tmp_path, kind):
    """Without hashing the corpus, building, or writing anything; only the newest checkpoint is looked at."""
    config = training_config(corpus, tmp_path, {"train.steps": 3}) if kind == "gpt2" else job_config(kind, tmp_path)
    assert run_ranks(train, 1, config) == ["completed"]
    before = files(tmp_path)
    (said,) = run_ranks(train_without_long_work, 1, config, (".bin",))
    assert said.startswith("run is complete at step")
    assert files(tmp_path) == before


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_whose_last_checkpoint_is_damaged_is_not_complete(corpus, tmp_path, world):
    """It trains its end again, from the one before, and ends as it did."""
    config = training_config(corpus, tmp_path, {"train.steps": 10})
    run_ranks(train, world, config)
    weights = tmp_path / "run/checkpoints/step-00000010/model.safetensors"
    first, content = rows(tmp_path / "run"), weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run_ranks(train, world, config) == ["completed"] * world
    assert weights.read_bytes() == content
    assert [row.get("loss") for row in rows(tmp_path / "run")] == [row.get("loss") for row in first]


def test_a_killed_end_is_recorded_as_completed(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 3})
    run_ranks(train, 1, config)
    whole = (tmp_path / "run/status.json").read_text()
    (tmp_path / "run/status.json").write_text(whole.replace("completed", "running"))
    run_ranks(train, 1, config)
    assert (tmp_path / "run/status.json").read_text() == whole


# Whose checkpoints are gone


def remove_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("kind", ["gpt2", "regression"])
@pytest.mark.parametrize("older", [False, True])
def test_a_run_whose_checkpoints_are_gone_is_not_started_over(corpus, tmp_path, halfway, kind, older):
    """Nor when it is of a release that left no mark. Whoever wants that removes the metrics, or takes another name."""
    if kind == "gpt2":
        shutil.copytree(halfway, tmp_path, dirs_exist_ok=True)
        config = training_config(corpus, tmp_path, {"train.steps": 6})
    else:
        config = job_config(kind, tmp_path, {"train.epochs": 1})
        run_ranks(train, 1, config)
    run = tmp_path / "run"
    remove_checkpoints(run)
    (run / (SAVED if older else STATUS)).unlink()
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RankError, match=r"run_name = run: the checkpoints in .*/run are gone"):
        run_ranks(train_without_long_work, 1, config)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    (run / "metrics.jsonl").unlink()
    RunFolder(config).release()


def test_a_run_that_never_had_a_checkpoint_starts_over(corpus, tmp_path, halfway):
    """As when it was killed before its first one."""
    shutil.copytree(halfway, tmp_path, dirs_exist_ok=True)
    run = tmp_path / "run"
    remove_checkpoints(run)
    (run / SAVED).unlink()
    (run / STATUS).write_text('{"state": "running", "step": 4, "reason": ""}')
    config = training_config(corpus, tmp_path, {"train.steps": 2})
    assert run_ranks(train, 1, config) == ["completed"]
    assert [row["step"] for row in rows(run)] == [0, 1, 2]


# Held by one trainer


def train_twice(config: TrainingConfig) -> list[str]:
    further = config.model_copy(update={"train": config.train.model_copy(update={"steps": 4})})
    return [train(config), train(further), train(further)]


def test_one_process_may_train_again(corpus, tmp_path):
    config = training_config(corpus, tmp_path, {"train.steps": 2, "optim.decay_steps": 10})
    assert run_ranks(train_twice, 1, config) == [["completed"] * 3]
    assert rows(tmp_path / "run")[-1]["step"] == 4


def train_and_stay(config: TrainingConfig, done: Path) -> None:
    train(config)
    done.touch()
    time.sleep(600)


def test_a_training_that_ended_lets_go_of_its_folder(corpus, tmp_path):
    """Though the process that ran it, such as a notebook, lives on."""
    config = training_config(corpus, tmp_path, {"train.steps": 2})
    ((process, _),) = start_ranks(train_and_stay, 1, config, tmp_path / "done")
    try:
        while not (tmp_path / "done").exists():
            assert process.is_alive()
            time.sleep(0.05)
        RunFolder(config).release()
    finally:
        process.kill()
        process.join()


def hold(config: TrainingConfig) -> None:
    RunFolder(config)
    time.sleep(600)


def test_a_second_trainer_is_refused(corpus, tmp_path):
    config = training_config(corpus, tmp_path)
    ((process, _),) = start_ranks(hold, 1, config)
    try:
        while not (tmp_path / "run/.lock").exists():
            time.sleep(0.01)
        time.sleep(0.2)  # the file is there a moment before its lock
        with pytest.raises(UserError, match="another trainer is running"):
            RunFolder(config)
        assert (tmp_path / "run/.lock").exists()
    finally:
        process.kill()
        process.join()
    RunFolder(config).release()


def train_with_forked_workers(config: TrainingConfig) -> None:
    """As a script does it: the tests' own processes come from a server, and so would their loader's workers."""
    multiprocessing.set_start_method("fork", force=True)
    train(config)


def test_killed_with_loader_workers_it_can_be_started_again_at_once(corpus, tmp_path):
    """Workers are forked, and outlive the trainer for seconds; they must not hold its lock."""
    changes = {"data.workers": 2, "train.steps": 10**6, "eval.every": 10**6, "checkpoint.every": 5}
    config = training_config(corpus, tmp_path, changes)
    ((process, _),) = start_ranks(train_with_forked_workers, 1, config)
    while not list((tmp_path / "run").glob("checkpoints/step-*")):
        assert process.is_alive()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    RunFolder(config).release()
