"""The copy of a run in a bucket: machines that are lost, damaged objects, leases, and storage that fails."""

import json
import math
import os
import random
import shutil
import signal
import threading
import time
from contextlib import suppress
from filecmp import dircmp
from itertools import count
from pathlib import Path

import pytest
from commands import expect_error
from faults.mutations import flip
from ranks import run_ranks, run_until_killed
from runs import assert_same, complete, edit_manifest, is_intact, newest_checkpoint, train_with_faults, training_config

from gpt2_ddp.checkpoint import mirror
from gpt2_ddp.checkpoint.checkpoint import MODEL, list_checkpoints
from gpt2_ddp.checkpoint.intact import newest_intact
from gpt2_ddp.checkpoint.mirror import LEASE, Mirror
from gpt2_ddp.config.tools import EvaluateConfig, StatusConfig, VerifyConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json
from gpt2_ddp.remote import Bucket, fetch_data, with_local_runs


def train_fast(config, *arguments):
    """Trains with a mirror that looks often, on a machine of its own."""
    mirror.LOOK, mirror.EXPIRES = 0.002, 0.2
    return train_with_faults(config, (0, 0), math.nan, *arguments)


def with_mirror(corpus, folder, bucket, **more):
    changes = {"checkpoint.every": 2, "checkpoint.keep_last": 2, "checkpoint.mirror": f"file://{bucket}", **more}
    return training_config(corpus, folder, changes)


@pytest.fixture(scope="module")
def copied(corpus, tmp_path_factory):
    """A folder with a run of ten steps and its copy in `bucket`."""
    folder = tmp_path_factory.mktemp("copied")
    assert train_fast(with_mirror(corpus, folder, folder / "bucket")) == "completed"
    return folder


@pytest.mark.parametrize(("world", "machines"), [(1, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_lost_machines(corpus, tmp_path, world, machines):
    """Each is killed in some step, and its disk is lost. The run equals one that was left alone; no row is twice."""
    bucket, more = tmp_path / "bucket", {"train.steps": 4 * (1 + machines)}
    whole = with_mirror(corpus, tmp_path / "whole", bucket, **more, **{"checkpoint.mirror": None})
    complete(whole, world)
    rng, here = random.Random(machines), with_mirror(corpus, tmp_path / "here", bucket, **more)
    for _ in range(machines):
        run_until_killed(train_fast, world, here, rng.randrange(3, 5))
        shutil.rmtree(tmp_path / "here")
    assert run_ranks(train_fast, world, here) == ["completed"] * world
    assert_same(tmp_path / "whole/run", tmp_path / "here/run")
    assert is_intact(tmp_path / "here/run")


def restored(bucket, folder):
    """The run on a machine, after a start that trains nothing."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    one = Mirror(f"file://{bucket}", run)
    one.start()
    one.close()
    return run


@pytest.mark.parametrize("count", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_damaged_objects(copied, tmp_path, capsys, count):
    """A flipped bit or a cut in any object: what is restored is the same as it was, or is named and left out."""
    rng = random.Random(count)
    objects = sorted(file.relative_to(copied / "bucket") for file in (copied / "bucket").rglob("step-*/*"))
    known = models(copied / "run")
    for number in range(count):
        bucket = tmp_path / f"bucket-{number}"
        shutil.copytree(copied / "bucket", bucket)
        damaged = rng.choice(objects)
        content = (bucket / damaged).read_bytes()
        damage = content[: rng.randrange(len(content))] if number % 2 else flip(content, rng)
        (bucket / damaged).write_bytes(damage)
        found = models(restored(bucket, tmp_path / f"machine-{number}"))
        assert found == {name: model for name, model in known.items() if name != damaged.parent.name}
        assert f"{damaged.parent.name}: {damaged.name}" in capsys.readouterr().err
        shutil.rmtree(bucket)


def models(run):
    """The weights of each checkpoint."""
    return {place.name: (place / MODEL).read_bytes() for place in list_checkpoints(run / "checkpoints")}


@pytest.fixture
def bucket(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "LOOK", 0.002)
    monkeypatch.setattr(mirror, "EXPIRES", 0.4)
    shutil.copytree(copied / "bucket", tmp_path / "bucket")
    return tmp_path / "bucket"


def test_an_object_that_differs_is_written_again(bucket, tmp_path):
    """Written is what is read back."""
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="is not what was written"):
        Bucket(f"file://{bucket}", "").put(tmp_path / "file", "file", "0" * 64)


def test_threads_write_an_object_in_turn(bucket, monkeypatch):
    """The status is written with each copy and with each renewal of the lease."""
    there, both = Bucket(f"file://{bucket}", ""), threading.Barrier(2)
    put, problems = there._files.pipe_file, []

    def pipe_file(path, content):
        put(path, content)
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)

    def write(content):
        try:
            there.write("status.json", content)
        except Exception as problem:
            problems.append(problem)

    monkeypatch.setattr(there._files, "pipe_file", pipe_file)
    threads = [threading.Thread(target=write, args=(content,)) for content in (b"one", b"other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_no_renewal_follows_the_end(bucket, tmp_path, monkeypatch):
    """One that is late: its status and lease are not the last."""
    renew, renewing = Mirror._renew, threading.Event()

    def late(one):
        if threading.current_thread() is one._threads[1]:
            renewing.set()
            time.sleep(0.2)
        renew(one)

    monkeypatch.setattr(Mirror, "_renew", late)
    run = tmp_path / "here/run"
    (run / "checkpoints").mkdir(parents=True)
    one = Mirror(f"file://{bucket}", run)
    one.start()
    assert renewing.wait(60)
    one.close()
    one._threads[1].join()
    assert not (bucket / "run" / LEASE).exists()


def hold_lease(bucket, owner, age=0.0):
    (bucket / "aside").write_text(json.dumps({"owner": owner, "time": time.time() - age}))
    (bucket / "aside").replace(bucket / "run" / LEASE)


def test_a_machine_that_trains_keeps_others_out(bucket, tmp_path):
    over = threading.Event()

    def renew():
        while not over.wait(0.02):
            hold_lease(bucket, "other:/runs/run")

    other = threading.Thread(target=renew)
    hold_lease(bucket, "other:/runs/run")
    other.start()
    try:
        expect_error("other:/runs/run", restored, bucket, tmp_path / "here")
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
    one = Mirror(f"file://{bucket}", run)
    one.start()
    hold_lease(bucket, "other:/runs/run")
    assert sent.wait(60)
    shutil.move(run / "checkpoints/step-00000008", run / "checkpoints/step-00000009")
    one.close()
    assert {place.name for place in (bucket / "run").glob("step-*")} == {"step-00000008", "step-00000010"}
    assert read_json(bucket / "run" / LEASE)["owner"] == "other:/runs/run"


def test_the_newer_state_wins_and_another_run_is_refused(corpus, copied, bucket, tmp_path):
    """A run that is newer here is copied, not replaced."""
    here = tmp_path / "here"
    shutil.copytree(copied / "run", here / "run")
    shutil.rmtree(bucket / "run/step-00000010")
    assert newest_checkpoint(restored(bucket, here)).name == "step-00000010"
    assert (bucket / "run/step-00000010/manifest.json").exists()
    other = with_mirror(corpus, tmp_path / "other", tmp_path / "empty", **{"train.steps": 4})
    assert train_fast(other) == "completed"
    expect_error("has another run of this name", Mirror(f"file://{bucket}", tmp_path / "other/run").start)
    assert not (bucket / "run" / LEASE).exists()


def test_a_folder_that_is_lost_is_not_deleted_there(copied, bucket, tmp_path):
    """Its trainer lives on for a while, as that of a disk that fails."""
    shutil.copytree(copied / "run", tmp_path / "run")
    one = Mirror(f"file://{bucket}", tmp_path / "run")
    one.start()
    shutil.move(tmp_path / "run", tmp_path / "aside")
    one.close()
    assert Bucket(f"file://{bucket}/run", "").checkpoints().keys() == models(copied / "run").keys()


def test_old_copies_stay_until_the_newest_is_copied(copied, bucket, tmp_path, monkeypatch):
    """A slow copy: the run deletes what is copied, before its last file."""
    run = tmp_path / "run"
    shutil.copytree(copied / "run", run)
    shutil.copytree(run / "checkpoints/step-00000010", tmp_path / "later/step-00000012")

    def put(there, file, name, sha256):
        raise FileNotFoundError(file)

    monkeypatch.setattr(Bucket, "put", put)
    one = Mirror(f"file://{bucket}", run)
    one.start()
    shutil.move(run / "checkpoints", tmp_path / "aside")
    shutil.move(tmp_path / "later", run / "checkpoints")
    one.close()
    assert Bucket(f"file://{bucket}/run", "").checkpoints().keys() == models(copied / "run").keys()


def test_a_damaged_checkpoint_here_is_replaced(copied, bucket, tmp_path):
    shutil.copytree(copied / "run", tmp_path / "run")
    (newest_checkpoint(tmp_path / "run") / "state.json").write_text("{}")
    assert newest_intact(restored(bucket, tmp_path) / "checkpoints").step == 10


def test_a_bucket_that_fails_is_a_warning(corpus, tmp_path, capfd, monkeypatch):
    """One access of twenty fails. The run completes, and the copy, too."""
    calls = count(1)

    def sometimes(method):
        def call(*arguments):
            if next(calls) % 20 == 5:
                raise TimeoutError("503: slow down")
            return method(*arguments)

        return call

    for name in ("put", "write", "remove_all"):
        monkeypatch.setattr(Bucket, name, sometimes(getattr(Bucket, name)))
    monkeypatch.setattr(mirror, "RETRIES", (0.01,) * 200)
    assert train_fast(with_mirror(corpus, tmp_path, tmp_path / "bucket")) == "completed"
    assert "the run goes on" in capfd.readouterr().err
    assert Bucket(f"file://{tmp_path}/bucket/run", "").checkpoints().keys() == models(tmp_path / "run").keys()


def test_a_bucket_that_is_down_at_the_end(corpus, tmp_path, capfd, monkeypatch):
    remove = Bucket.remove

    def fail(there, name):
        if name == LEASE:  # removed last
            raise ConnectionRefusedError
        remove(there, name)

    monkeypatch.setattr(Bucket, "remove", fail)
    monkeypatch.setattr(mirror, "RETRIES", (0.01,))
    assert train_fast(with_mirror(corpus, tmp_path, tmp_path / "bucket")) == "completed"
    assert "ConnectionRefusedError" in capfd.readouterr().err


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/runs", "nothing://bucket", "file:///proc/nothing"])
def test_a_wrong_url_is_one_line_before_the_first_step(tiny_config, tmp_path, url):
    with pytest.raises(UserError) as error:
        train_fast(tiny_config({"checkpoint.mirror": url}))
    (mistake,) = error.value.mistakes
    assert ("without credentials" in mistake) == ("secret" in url)
    assert not (tmp_path / "runs/run").exists()


def test_commands_read_a_run_at_a_url(bucket, tmp_path, monkeypatch):
    """A copy follows the bucket: what is new there, and what is gone."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    url = f"file://{bucket}/run"
    shutil.move(bucket / "run/step-00000010", tmp_path / "aside")
    run = Path(with_local_runs(VerifyConfig(run=url)).run)
    assert newest_checkpoint(run).name == "step-00000008"
    shutil.move(tmp_path / "aside", bucket / "run/step-00000010")
    assert with_local_runs(EvaluateConfig(checkpoint=url)).checkpoint == str(run)
    assert newest_checkpoint(run).name == "step-00000010"
    assert is_intact(run)
    shutil.rmtree(bucket / "run/step-00000008")
    (status,) = with_local_runs(StatusConfig(runs=(url,))).runs
    assert (Path(status) / "status.json").exists()
    expect_error(r"run = file.*cannot be used", with_local_runs, VerifyConfig(run=f"file://{bucket}/nothing"))


def test_data_at_a_url(corpus, tmp_path, monkeypatch):
    """They are copied once. The run is that of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    url = f"file://{corpus}"
    config = lambda name, path: training_config(corpus, tmp_path / name, {"data.path": str(path)})  # noqa: E731
    for name, path in (("here", corpus), ("there", url), ("again", url)):
        assert train_with_faults(config(name, path)) == "completed"
        monkeypatch.setattr(Bucket, "get", None if name == "there" else Bucket.get)
    assert_same(tmp_path / "here/run", tmp_path / "again/run")
    expect_error(r"data.path = file.*cannot be used", train_with_faults, config("none", f"file://{tmp_path}/no"))


def test_data_at_a_url_whose_tokenizer_is_no_file(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data", ignore=shutil.ignore_patterns("tokenizer.json"))
    edit_manifest(tmp_path / "data", tokenizer="gpt2")
    fetch_data(tmp_path / "copy", f"file://{tmp_path}/data")
    assert not dircmp(tmp_path / "data", tmp_path / "copy").left_only
