"""The copy of a run in a bucket: machines that are lost, damaged objects, leases, and storage that fails."""

import json
import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, run_until_killed
from runs import assert_same, newest_checkpoint, same, train_with_faults, training_config, verified
from safetensors.torch import load_file

from gpt2_ddp.checkpoint import mirror
from gpt2_ddp.checkpoint.checkpoint import list_checkpoints, newest_intact
from gpt2_ddp.checkpoint.mirror import LEASE, Mirror
from gpt2_ddp.config.tools import EvaluateConfig, StatusConfig, VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.remote import Bucket, with_local_runs


def train_fast(config: TrainingConfig, *arguments: Any) -> str:
    """Trains with a mirror that looks often, on a machine of its own."""
    mirror.LOOK, mirror.EXPIRES = 0.002, 0.2
    return train_with_faults(config, (0, 0), math.nan, *arguments)


def with_mirror(corpus: Path, folder: Path, bucket: Path, **more: Any) -> TrainingConfig:
    changes = {"checkpoint.every": 2, "checkpoint.keep_last": 2, "checkpoint.mirror": f"file://{bucket}", **more}
    return training_config(corpus, folder, changes)


@pytest.fixture(scope="module")
def copied(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of ten steps and its copy in `bucket`."""
    folder = tmp_path_factory.mktemp("copied")
    assert train_fast(with_mirror(corpus, folder, folder / "bucket")) == "completed"
    return folder


def test_a_copy_has_what_the_run_has(copied):
    """Files of kept checkpoints, byte by byte, and no lease."""
    assert not (copied / "bucket/run" / LEASE).exists()
    files = {file.relative_to(copied / "run") for file in (copied / "run").rglob("*") if file.is_file()}
    there = {file.relative_to(copied / "bucket/run") for file in (copied / "bucket/run").rglob("*") if file.is_file()}
    assert {Path(*file.parts[-2:]) for file in files if file.name[0] != "."} == there
    for file in there:
        here = copied / "run" / ("checkpoints" if len(file.parts) > 1 else "") / file
        assert here.read_bytes() == (copied / "bucket/run" / file).read_bytes()


@pytest.mark.parametrize(("world", "machines"), [(1, 1), pytest.param(2, 9, marks=pytest.mark.slow)])
def test_lost_machines(corpus, tmp_path, capsys, world, machines):
    """Each is killed in some step, and its disk is lost. The run equals one that was left alone; no row is twice."""
    more = {"train.steps": 4 * (1 + machines)}
    whole = training_config(corpus, tmp_path / "whole", {"checkpoint.every": 2, "checkpoint.keep_last": 2, **more})
    assert run_ranks(train_with_faults, world, whole) == ["completed"] * world
    rng = random.Random(machines)
    for machine in range(machines):
        folder = tmp_path / f"machine-{machine}"
        config = with_mirror(corpus, folder, tmp_path / "bucket", **more)
        run_until_killed(train_fast, world, config, rng.randrange(3, 5))
        shutil.rmtree(folder)
    last = tmp_path / "last"
    assert run_ranks(train_fast, world, with_mirror(corpus, last, tmp_path / "bucket", **more)) == ["completed"] * world
    assert_same(tmp_path / "whole/run", last / "run")
    assert verified(last / "run", capsys)[0] == 0


def restored(bucket: Path, folder: Path) -> Path:
    """The run on a new machine."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True)
    one = Mirror(f"file://{bucket}", run, 5)
    one.start()
    one.close()
    return run


@pytest.mark.parametrize("count", [40, pytest.param(960, marks=pytest.mark.slow)])
def test_damaged_objects(copied, tmp_path, capsys, count):
    """A flipped bit or a cut in any object: what is restored is the same as it was, or is named and left out."""
    rng = random.Random(count)
    objects = sorted(file.relative_to(copied / "bucket") for file in (copied / "bucket").rglob("step-*/*"))
    known = {place.name: weights_of(place) for place in list_checkpoints(copied / "run/checkpoints")}
    for number in range(count):
        bucket = tmp_path / f"bucket-{number}"
        shutil.copytree(copied / "bucket", bucket)
        damaged = rng.choice(objects)
        content = bytearray((bucket / damaged).read_bytes())
        place = rng.randrange(1, len(content))
        if number % 2:
            del content[place:]
        else:
            content[place] ^= 1 << rng.randrange(8)
        (bucket / damaged).write_bytes(content)
        run = restored(bucket, tmp_path / f"machine-{number}")
        found = list_checkpoints(run / "checkpoints")
        assert {place.name for place in found} == known.keys() - {damaged.parent.name}
        assert all(same(weights_of(place), known[place.name]) for place in found)
        assert f"{damaged.parent.name}: {damaged.name}" in capsys.readouterr().err
        shutil.rmtree(bucket)


def weights_of(checkpoint: Path) -> Any:
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture
def bucket(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mirror, "LOOK", 0.002)
    monkeypatch.setattr(mirror, "EXPIRES", 0.4)
    shutil.copytree(copied / "bucket", tmp_path / "bucket")
    return tmp_path / "bucket"


def test_an_object_that_differs_is_written_again(bucket, tmp_path):
    """Written is what is read back."""
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="is not what was written"):
        Bucket(f"file://{bucket}", "").put(tmp_path / "file", "file", "0" * 64)


def hold_lease(bucket: Path, owner: str, age: float = 0.0) -> None:
    (bucket / "aside").write_text(json.dumps({"owner": owner, "time": time.time() - age}))
    (bucket / "aside").replace(bucket / "run" / LEASE)


def test_a_machine_that_trains_keeps_others_out(bucket, tmp_path):
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            hold_lease(bucket, "other:/runs/run")

    other = threading.Thread(target=renew)
    hold_lease(bucket, "other:/runs/run")
    other.start()
    try:
        with pytest.raises(UserError, match="other:/runs/run trains this run now"):
            restored(bucket, tmp_path / "here")
    finally:
        over.set()
        other.join()
    assert not any((tmp_path / "here/run/checkpoints").iterdir())


@pytest.mark.parametrize("age", [0.0, 100.0])
def test_a_lost_machines_lease_ends(bucket, tmp_path, age):
    hold_lease(bucket, "lost:/runs/run", age)
    assert list_checkpoints(restored(bucket, tmp_path / "here") / "checkpoints")
    assert not (bucket / "run" / LEASE).exists()


def test_a_machine_whose_lease_was_taken_stops(bucket, tmp_path, monkeypatch):
    sent = threading.Event()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.set() if number == signal.SIGTERM else None)
    run = tmp_path / "here/run"
    (run / "checkpoints").mkdir(parents=True)
    one = Mirror(f"file://{bucket}", run, 5)
    one.start()
    hold_lease(bucket, "other:/runs/run")
    assert sent.wait(10)
    shutil.move(run / "checkpoints/step-00000008", run / "checkpoints/step-00000009")
    one.close()
    assert {place.name for place in (bucket / "run").glob("step-*")} == {"step-00000008", "step-00000010"}
    assert json.loads((bucket / "run" / LEASE).read_text())["owner"] == "other:/runs/run"


def test_the_newer_state_wins_and_another_run_is_refused(corpus, copied, bucket, tmp_path):
    """A run that is newer here is copied, not replaced."""
    here = tmp_path / "here"
    shutil.copytree(copied / "run", here / "run")
    shutil.rmtree(bucket / "run/step-00000010")
    run = here / "run"
    one = Mirror(f"file://{bucket}", run, 5)
    one.start()
    one.close()
    assert newest_checkpoint(run).name == "step-00000010"
    assert (bucket / "run/step-00000010/manifest.json").exists()
    other = with_mirror(corpus, tmp_path / "other", tmp_path / "empty", **{"train.steps": 4})
    assert train_fast(other) == "completed"
    with pytest.raises(UserError, match="has another run of this name"):
        Mirror(f"file://{bucket}", tmp_path / "other/run", 5).start()
    assert not (bucket / "run" / LEASE).exists()


def test_a_damaged_checkpoint_here_is_replaced(copied, bucket, tmp_path):
    shutil.copytree(copied / "run", tmp_path / "here/run")
    (tmp_path / "here/run/checkpoints/step-00000010/state.json").write_text("{}")
    one = Mirror(f"file://{bucket}", tmp_path / "here/run", 5)
    one.start()
    one.close()
    assert newest_intact(tmp_path / "here/run/checkpoints").step == 10


def test_a_bucket_that_fails_is_a_warning(corpus, tmp_path, capfd, monkeypatch):
    """One access of twenty fails. The run completes, and the copy, too."""
    calls = [0]

    def sometimes(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[0] += 1
            if not calls[0] % 20 or calls[0] == 5:
                raise TimeoutError("503: slow down")
            return method(*arguments)

        return call

    for name in ("put", "write", "remove_all"):
        monkeypatch.setattr(Bucket, name, sometimes(getattr(Bucket, name)))
    monkeypatch.setattr(mirror, "RETRIES", (0.01,) * 200)
    assert train_fast(with_mirror(corpus, tmp_path, tmp_path / "bucket")) == "completed"
    assert "cannot be written (TimeoutError: 503: slow down); the run goes on" in capfd.readouterr().err
    names = {place.name for place in list_checkpoints(tmp_path / "run/checkpoints")}
    assert Bucket(f"file://{tmp_path}/bucket/run", "").checkpoints().keys() == names


def test_a_bucket_that_is_down_at_the_end(corpus, tmp_path, capfd, monkeypatch):
    def fail(_: Any, name: str) -> None:
        if name == LEASE:  # removed last
            raise ConnectionRefusedError

    monkeypatch.setattr(Bucket, "remove", fail)
    monkeypatch.setattr(mirror, "RETRIES", (0.01,))
    assert train_fast(with_mirror(corpus, tmp_path, tmp_path / "bucket")) == "completed"
    assert "lacks the end of the run: ConnectionRefusedError" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("s3://key:secret@bucket/runs", "without credentials"),
        ("nothing://bucket", "cannot be used"),
        ("file:///proc/nothing", "cannot be read"),
    ],
)
def test_a_wrong_url_is_one_line_before_the_first_step(corpus, tmp_path, url, hint):
    with pytest.raises(UserError, match=hint) as error:
        train_fast(training_config(corpus, tmp_path, {"checkpoint.mirror": url}))
    assert len(error.value.mistakes) == 1
    assert not (tmp_path / "run").exists()


def test_commands_read_a_run_at_a_url(copied, bucket, tmp_path, capsys, monkeypatch):
    """A copy follows the bucket: what is new there, and what is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{bucket}/run"
    shutil.move(bucket / "run/step-00000010", tmp_path / "aside")
    for newest in ("step-00000008", "step-00000010"):
        run = Path(with_local_runs(VerifyConfig(run=url)).run)
        assert newest_checkpoint(run).name == newest
        if newest == "step-00000008":
            shutil.move(tmp_path / "aside", bucket / "run/step-00000010")
    assert verified(run, capsys)[0] == 0
    assert Path(with_local_runs(EvaluateConfig(checkpoint=url)).checkpoint) == run
    shutil.rmtree(bucket / "run/step-00000008")
    (status,) = with_local_runs(StatusConfig(runs=(url,))).runs
    assert (Path(status) / "status.json").exists()
    with pytest.raises(UserError, match=r"run = file.*cannot be read"):
        with_local_runs(VerifyConfig(run=f"file://{bucket}/nothing"))


def test_data_at_a_url(corpus, tmp_path, monkeypatch):
    """They are copied once. The run is that of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{corpus}"
    for name, path in (("here", corpus), ("there", url), ("again", url)):
        config = training_config(Path("."), tmp_path / name, {"data": {"path": str(path)}})
        assert train_with_faults(config) == "completed"
        monkeypatch.setattr(Bucket, "get_file", None if name == "there" else Bucket.get_file)
    assert_same(tmp_path / "here/run", tmp_path / "again/run")
    with pytest.raises(UserError, match=r"data.path = file.*cannot be read"):
        train_with_faults(training_config(Path("."), tmp_path / "none", {"data": {"path": f"file://{tmp_path}/no"}}))
