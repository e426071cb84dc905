"""The copy of a run in a bucket: machines that are lost, damaged objects, leases, and storage that fails."""

import io
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from filecmp import dircmp
from itertools import count
from pathlib import Path

import psutil
import pytest
from commands import expect_error
from faults.mutations import flip
from ranks import run_ranks, run_until_killed, wait_until
from runs import assert_same, complete, edit_manifest, is_intact, newest_checkpoint, train_with_faults, training_config

from gpt2_ddp.cache import local_copy
from gpt2_ddp.checkpoint import mirror, mirror_process
from gpt2_ddp.checkpoint.checkpoint import MODEL, list_checkpoints
from gpt2_ddp.checkpoint.intact import newest_intact
from gpt2_ddp.checkpoint.mirror import LEASE, Mirror
from gpt2_ddp.checkpoint.mirror_process import MirrorProcess
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import EvaluateConfig, StatusConfig, VerifyConfig
from gpt2_ddp.data import missing
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import read_json
from gpt2_ddp.remote import Bucket, fetch_data, reading
from gpt2_ddp.run_urls import with_local_runs
from gpt2_ddp.transfer import TransferConfig, transfer

ENDED = threading.Event()
ENDED.set()


def with_mirror(corpus, folder, bucket, **more):
    changes = {"checkpoint.every": 2, "checkpoint.keep_last": 2, "checkpoint.mirror": f"file://{bucket}", **more}
    return training_config(corpus, folder, changes)


@pytest.fixture(scope="module")
def copied(corpus, tmp_path_factory):
    """A folder with a run of ten steps and its copy in `bucket`."""
    folder = tmp_path_factory.mktemp("copied")
    assert train_with_faults(with_mirror(corpus, folder, folder, **{"checkpoint.mirror": None})) == "completed"
    assert mirror_at(folder / "bucket", folder / "run").copy(ENDED) == 0
    return folder


def mirror_at(bucket, run):
    run.mkdir(parents=True, exist_ok=True)
    return Mirror(Bucket(f"file://{bucket}/run"), run)


def copiers(run):
    """The processes that copy a run."""
    words = (f"--folder={run}", "--action=mirror")
    return [one for one in psutil.process_iter(["cmdline"]) if {*words} <= {*(one.info["cmdline"] or ())}]


@pytest.mark.parametrize(("world", "machines"), [(1, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_lost_machines(corpus, tmp_path, world, machines):
    """Each is killed in some step, and its disk is lost. The run equals one that was left alone; no row is twice. If
    only the trainer is killed, all that it has saved is copied, and the lease is given back."""
    bucket, more = tmp_path / "bucket", {"train.steps": 4 * (1 + machines)}
    whole = with_mirror(corpus, tmp_path / "whole", bucket, **more, **{"checkpoint.mirror": None})
    complete(whole, world)
    rng, here = random.Random(machines), with_mirror(corpus, tmp_path / "here", bucket, **more)
    for _ in range(machines):
        run_until_killed(train_with_faults, world, here, (0, 0), 0.0, rng.randrange(3, 5))
        is_lost = machines > 1 and rng.random() < 0.5
        for copier in copiers(tmp_path / "here/run"):
            copier.send_signal(signal.SIGKILL if is_lost else signal.SIGTERM)
        wait_until(lambda: not copiers(tmp_path / "here/run"))
        if not is_lost:
            assert not (bucket / "run" / LEASE).exists()
            assert models_at(bucket / "run") == models(tmp_path / "here/run")
        shutil.rmtree(tmp_path / "here")
    assert run_ranks(train_with_faults, world, here) == ["completed"] * world
    assert_same(tmp_path / "whole/run", tmp_path / "here/run")
    assert is_intact(tmp_path / "here/run")


def restored(bucket, folder):
    """The run on a machine, after a start that trains nothing."""
    run = folder / "run"
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    one = mirror_at(bucket, run)
    one.restore()
    one.copy(ENDED)
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
    return models_at(run / "checkpoints")


def models_at(folder):
    return {place.name: (place / MODEL).read_bytes() for place in list_checkpoints(folder)}


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
        Bucket(f"file://{bucket}").put(tmp_path / "file", "file", "0" * 64)


def test_threads_write_an_object_in_turn(bucket, monkeypatch):
    """The status is written with each copy and with each renewal of the lease."""
    there, both = Bucket(f"file://{bucket}"), threading.Barrier(2)
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
    renew, renewing, ended = Mirror._renew, threading.Event(), threading.Event()

    def late(one):
        renewing.set()
        time.sleep(0.2)
        renew(one)

    monkeypatch.setattr(Mirror, "_renew", late)
    copying = threading.Thread(target=mirror_at(bucket, tmp_path / "here/run").copy, args=(ended,))
    copying.start()
    assert renewing.wait(60)
    ended.set()
    copying.join()
    time.sleep(0.3)
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_machine_whose_lease_was_taken_stops(bucket, tmp_path, monkeypatch):
    """First the process that copies."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    threads = threading.active_count()
    run = restored(bucket, tmp_path / "here")
    hold_lease(bucket, "other:/runs/run")
    shutil.move(run / "checkpoints/step-00000008", run / "checkpoints/step-00000009")
    with pytest.raises(SystemExit, match="0"):
        mirror_at(bucket, run).copy(ENDED)
    wait_until(lambda: threading.active_count() == threads)  # no renewal either
    assert {place.name for place in (bucket / "run").glob("step-*")} == {"step-00000008", "step-00000010"}
    assert read_json(bucket / "run" / LEASE)["owner"] == "other:/runs/run"


class Ended:
    """A process that has ended."""

    stdin = io.StringIO()

    def __init__(self, code):
        self.poll = self.wait = lambda: code


def test_the_process_that_copies_ends(tmp_path, monkeypatch, capsys):
    """With 0, as it has lost the lease: the run stops. By a crash: it is started again, later."""
    sent, started, codes = [], [], iter((0, -11, 1))
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(mirror_process, "start_module", lambda *words, **_: started.append(words) or Ended(next(codes)))
    one = MirrorProcess(["module"], tmp_path)
    assert one.status() == {}
    assert sent == [signal.SIGTERM]
    one._start()
    one.status()
    assert len(started) == 2
    monkeypatch.setattr(mirror_process, "RESTART", 0.0)
    (tmp_path / ".mirror").write_text('{"mirror_step": 8}  ')
    assert one.status() == {"mirror_step": 8}
    assert len(started) == 3
    assert sent == [signal.SIGTERM]
    one.close()
    assert "lacks the end of the run" in capsys.readouterr().err


def test_the_newer_state_wins_and_another_run_is_refused(corpus, copied, bucket, tmp_path):
    """A run that is newer here is copied, not replaced."""
    here = tmp_path / "here"
    shutil.copytree(copied / "run", here / "run")
    shutil.rmtree(bucket / "run/step-00000010")
    assert newest_checkpoint(restored(bucket, here)).name == "step-00000010"
    assert (bucket / "run/step-00000010/manifest.json").exists()
    other = training_config(corpus, tmp_path / "other", {"train.steps": 4})
    assert train_with_faults(other) == "completed"
    expect_error("has another run of this name", mirror_at(bucket, tmp_path / "other/run").restore)
    assert not (bucket / "run" / LEASE).exists()


def test_a_folder_that_is_lost_is_not_deleted_there(copied, bucket, tmp_path):
    """Its trainer lives on for a while, as that of a disk that fails."""
    shutil.copytree(copied / "run", tmp_path / "run")
    one = mirror_at(bucket, tmp_path / "run")
    one.restore()
    shutil.move(tmp_path / "run", tmp_path / "aside")
    one.copy(ENDED)
    assert Bucket(f"file://{bucket}/run").checkpoints().keys() == models(copied / "run").keys()


def test_old_copies_stay_until_the_newest_is_copied(copied, bucket, tmp_path, monkeypatch):
    """A slow copy: the run deletes what is copied, before its last file."""
    run = tmp_path / "run"
    shutil.copytree(copied / "run", run)
    shutil.copytree(run / "checkpoints/step-00000010", tmp_path / "later/step-00000012")

    def put(there, file, name, sha256):
        raise FileNotFoundError(file)

    monkeypatch.setattr(Bucket, "put", put)
    one = mirror_at(bucket, run)
    one.restore()
    shutil.move(run / "checkpoints", tmp_path / "aside")
    shutil.move(tmp_path / "later", run / "checkpoints")
    one.copy(ENDED)
    assert Bucket(f"file://{bucket}/run").checkpoints().keys() == models(copied / "run").keys()


def test_a_damaged_checkpoint_here_is_replaced(copied, bucket, tmp_path):
    shutil.copytree(copied / "run", tmp_path / "run")
    (newest_checkpoint(tmp_path / "run") / "state.json").write_text("{}")
    assert newest_intact(restored(bucket, tmp_path) / "checkpoints").step == 10


def test_a_bucket_that_fails_is_a_warning(copied, bucket, tmp_path, capfd, monkeypatch):
    """One access of twenty fails. Then the copy is complete."""
    calls = count(1)

    def sometimes(method):
        def call(*arguments):
            if next(calls) % 20 == 5:
                raise TimeoutError("503: slow down")
            return method(*arguments)

        return call

    for name in ("put", "write", "remove_all"):
        monkeypatch.setattr(Bucket, name, sometimes(getattr(Bucket, name)))
    monkeypatch.setattr(mirror, "PAUSE", 0.01)
    monkeypatch.setattr(mirror, "ATTEMPTS", 200)
    assert mirror_at(tmp_path / "new", copied / "run").copy(ENDED) == 0
    assert "the run goes on" in capfd.readouterr().err
    assert models_at(tmp_path / "new/run") == models(copied / "run")
    assert read_json(copied / "run/.mirror") == {"mirror_step": 10, "mirror_problem": ""}


def test_a_bucket_that_is_down_at_the_end(copied, bucket, capfd, monkeypatch):
    remove = Bucket.remove

    def fail(there, name):
        if name == LEASE:  # removed last
            raise ConnectionRefusedError
        remove(there, name)

    monkeypatch.setattr(Bucket, "remove", fail)
    assert mirror_at(bucket, copied / "run").copy(ENDED) == 1
    assert "ConnectionRefusedError" in read_json(copied / "run/.mirror")["mirror_problem"]
    assert "ConnectionRefusedError" in capfd.readouterr().err


def test_an_unknown_storage():
    with pytest.raises(UserError, match=r"data.path = nothing://bucket: cannot be used \(ValueError"):  # noqa: SIM117
        with reading("nothing://bucket", "data.path"):
            pass


@pytest.fixture
def in_this_process(monkeypatch):
    """Data are copied, and runs are restored, without a process: slow tests start one."""

    def run_module(module, *words):
        transfer(load(TransferConfig, words))

    for module in (missing, mirror_process):
        monkeypatch.setattr(module, "run_module", run_module)


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/runs", "file:///proc/nothing"])
def test_a_wrong_url_is_one_line_before_the_first_step(tiny_config, tmp_path, url, in_this_process):
    with pytest.raises(UserError) as error:
        train_with_faults(tiny_config({"checkpoint.mirror": url}))
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


def test_data_at_a_url(corpus, tmp_path, monkeypatch, in_this_process):
    """They are copied once. The run is that of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    url = f"file://{corpus}"
    for name, path in (("here", corpus), ("there", url)):
        assert train_with_faults(training_config(corpus, tmp_path / name, {"data.path": str(path)})) == "completed"
    assert_same(tmp_path / "here/run", tmp_path / "there/run")
    monkeypatch.setattr(Bucket, "get", None)
    fetch_data(Path(local_copy(url)), url)
    nothing = training_config(corpus, tmp_path / "none", {"data.path": f"file://{tmp_path}/no"})
    expect_error(r"data.path = file.*cannot be used", train_with_faults, nothing)


def test_data_at_a_url_whose_tokenizer_is_no_file(corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "data", ignore=shutil.ignore_patterns("tokenizer.json"))
    edit_manifest(tmp_path / "data", tokenizer="gpt2")
    fetch_data(tmp_path / "copy", f"file://{tmp_path}/data")
    assert not dircmp(tmp_path / "data", tmp_path / "copy").left_only
