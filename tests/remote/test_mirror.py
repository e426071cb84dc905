"""The copy of a run in a bucket: machines that are lost,
damaged objects, leases, and storage that fails."""

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
from functools import partial
from itertools import count
from pathlib import Path

import psutil
import pytest
from commands import expect_error
from faults.mutations import flip
from fsspec.implementations.local import LocalFileSystem
from ranks import run_ranks, run_until_killed, wait_until
from runs import (
    assert_same,
    complete,
    edit_manifest,
    is_intact,
    newest_checkpoint,
    said,
    train_with_faults,
    training_config,
)

from gpt2_ddp.checkpoint.format import MODEL, list_checkpoints, seal
from gpt2_ddp.checkpoint.verify import newest_intact
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import EvaluateConfig, ExplainConfig, StatusConfig, VerifyConfig
from gpt2_ddp.data import fetch as missing
from gpt2_ddp.distributed.process import this_process
from gpt2_ddp.errors import UserError
from gpt2_ddp.files import local_copy, read_json
from gpt2_ddp.records.rows import METRICS, STATUS, ended_status
from gpt2_ddp.remote import mirror, mirror_process
from gpt2_ddp.remote.copies import with_local_runs
from gpt2_ddp.remote.mirror import FIELD, LEASE, Lease, Mirror
from gpt2_ddp.remote.mirror_process import MirrorProcess
from gpt2_ddp.remote.objects import Bucket, describe, fetch_data, reading
from gpt2_ddp.remote.transfer import TransferConfig, transfer
from gpt2_ddp.reports.status import show_status
from gpt2_ddp.training.initial_weights import import_place

NUMBERS = count()
ENDED = threading.Event()
ENDED.set()


def with_mirror(corpus, folder, bucket, **more):
    changes = {
        "checkpoint.every": 2,
        "checkpoint.keep_last": 2,
        "checkpoint.mirror": f"file://{bucket}",
        **more,
    }
    return training_config(corpus, folder, changes)


@pytest.fixture(scope="module")
def copied(corpus, tmp_path_factory):
    """A folder with a run of ten steps and its copy in `bucket`."""
    folder = tmp_path_factory.mktemp("copied")
    config = with_mirror(corpus, folder, folder, **{"checkpoint.mirror": None})
    assert train_with_faults(config) == "completed"
    assert mirror_at(folder / "bucket", folder / "run").copy(ENDED) == 0
    return folder


def mirror_at(bucket, run):
    run.mkdir(parents=True, exist_ok=True)
    return Mirror(
        Bucket(f"file://{bucket}/run"), run, Lease(owner=f"here:{run}", id=f"{next(NUMBERS)}")
    )


def copiers(run):
    """The processes that copy a run."""
    words = (f"--folder={run}", "--action=mirror")
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if {*words} <= {*(one.info["cmdline"] or ())}
    ]


@pytest.mark.parametrize(
    ("world", "machines"), [(1, 1), pytest.param(2, 4, marks=pytest.mark.slow)]
)
def test_lost_machines(corpus, tmp_path, world, machines):
    """Each is killed in some step, and its disk is lost. The run equals one
    that was left alone; no row is twice. If only the trainer is killed, all
    that it has saved is copied, and the lease is given back."""
    bucket = tmp_path / "bucket"
    more = {"train.steps": 4 * (1 + machines)}
    whole = with_mirror(corpus, tmp_path / "whole", bucket, **more, **{"checkpoint.mirror": None})
    complete(whole, world)
    rng = random.Random(machines)
    here = with_mirror(corpus, tmp_path / "here", bucket, **more)
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
    """A flipped bit or a cut in any object: what is restored
    is the same as it was, or is named and left out."""
    rng = random.Random(count)
    objects = sorted(
        file.relative_to(copied / "bucket") for file in (copied / "bucket").rglob("step-*/*")
    )
    known = models(copied / "run")
    for number in range(count):
        bucket = tmp_path / f"bucket-{number}"
        shutil.copytree(copied / "bucket", bucket)
        damaged = rng.choice(objects)
        content = (bucket / damaged).read_bytes()
        damage = content[: rng.randrange(len(content))] if number % 2 else flip(content, rng)
        (bucket / damaged).write_bytes(damage)
        found = models(restored(bucket, tmp_path / f"machine-{number}"))
        assert found == {
            name: model for name, model in known.items() if name != damaged.parent.name
        }
        assert f"{damaged.parent.name}: {damaged.name}" in capsys.readouterr().err
        shutil.rmtree(bucket)


def models(run):
    """The weights of each checkpoint."""
    return models_at(run / "checkpoints")


def models_at(folder):
    return {place.name: (place / MODEL).read_bytes() for place in list_checkpoints(folder)}


@pytest.fixture
def bucket(copied, tmp_path, monkeypatch):
    monkeypatch.setattr(mirror, "POLL", 0.002)
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
    there = Bucket(f"file://{bucket}")
    both = threading.Barrier(2)
    put = there._files.pipe_file
    problems = []

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
    renew = Mirror._renew
    renewing = threading.Event()
    ended = threading.Event()

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


def rows_of(run):
    return (run / "metrics.jsonl").read_text().splitlines()


@pytest.fixture(scope="module", params=[2, 4])
def forked_run(corpus, tmp_path_factory, request):
    """A machine that was lost after it had saved step 6, while the bucket had step 4. Another one
    went on from there to step 10, with a checkpoint of step 6 or without: folders `first` and
    `second`, and the bucket `after`."""
    folder = tmp_path_factory.mktemp("forked")
    changes = {"checkpoint.every": 2, "checkpoint.keep_last": 9, "optim.decay_steps": 30}
    config = partial(training_config, corpus)
    assert train_with_faults(config(folder / "first", {**changes, "train.steps": 4})) == "completed"
    assert mirror_at(folder / "before", folder / "first/run").copy(ENDED) == 0
    shutil.copytree(folder / "first", folder / "second")
    assert train_with_faults(config(folder / "first", {**changes, "train.steps": 6})) == "completed"
    assert (
        train_with_faults(
            config(
                folder / "second", {**changes, "train.steps": 10, "checkpoint.every": request.param}
            )
        )
        == "completed"
    )
    shutil.copytree(folder / "before", folder / "after")
    assert mirror_at(folder / "after", folder / "second/run").copy(ENDED) == 0
    return folder


def test_a_machine_that_returns(forked_run, tmp_path, capsys, monkeypatch):
    """It has saved a step that was never copied, and another machine has trained that step. The run
    is that of the bucket, here and there."""
    monkeypatch.setattr(mirror, "POLL", 0.002)
    for name in ("first", "after"):
        shutil.copytree(forked_run / name, tmp_path / name)
    run = restored(tmp_path / "after", tmp_path / "first")
    assert (run / "checkpoints/step-00000006.overtaken").is_dir()
    assert "moved to step-00000006.overtaken" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    copy = Path(with_local_runs(VerifyConfig(run=f"file://{tmp_path}/after/run")).run)
    for one in (run, copy):
        assert rows_of(one) == rows_of(forked_run / "second/run")
        assert models(one) == models(forked_run / "second/run")
        assert is_intact(one)


def content(folder):
    return {
        file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()
    }


@pytest.mark.parametrize("damage", ["weights", "manifests", "checkpoints"])
@pytest.mark.parametrize("has_older", [False, True])
def test_a_damaged_bucket_is_no_empty_one(
    forked_run, tmp_path, capsys, monkeypatch, damage, has_older
):
    """Nothing there can be restored: nothing is trained, and nothing is changed there. The same on
    a machine that has an earlier state."""
    monkeypatch.setattr(mirror, "POLL", 0.002)
    bucket = tmp_path / "after"
    shutil.copytree(forked_run / "after", bucket)
    for place in (bucket / "run").glob("step-*"):
        if damage == "weights":
            (place / MODEL).write_bytes(b"")
        elif damage == "manifests":
            (place / "manifest.json").unlink()
        else:
            shutil.rmtree(place)
    if has_older:
        shutil.copytree(forked_run / "first", tmp_path / "here")
    before = content(bucket)
    rows = rows_of(tmp_path / "here/run") if has_older else None
    expect_error(
        "has a run up to step 10 or later, of which no checkpoint is intact",
        restored,
        bucket,
        tmp_path / "here",
    )
    assert content(bucket) == before
    assert rows is None or rows_of(tmp_path / "here/run") == rows


def test_a_machine_lost_during_its_first_copy(copied, bucket, tmp_path, capsys):
    """The bucket has no whole checkpoint, and never had one."""
    for place in (bucket / "run").iterdir():
        shutil.rmtree(place) if place.is_dir() else None
    part = bucket / "run/step-00000000"
    part.mkdir()
    (part / MODEL).write_bytes(b"a part")
    (bucket / "run/metrics.jsonl").write_text('{"event": "checkpoint", "step": 0, "sha256": "0"}\n')
    run = restored(bucket, tmp_path / "here")
    assert not list_checkpoints(run / "checkpoints")
    assert "only a part of that of step 0; the run starts anew" in capsys.readouterr().err


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


@pytest.mark.parametrize("age", [0.0, 100.0, -1e9])
def test_a_lost_machines_lease_ends(bucket, tmp_path, age):
    """Also if its clock was years ahead."""
    hold_lease(bucket, "lost:/runs/run", age)
    assert list_checkpoints(restored(bucket, tmp_path / "here") / "checkpoints")
    assert not (bucket / "run" / LEASE).exists()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"owner": "a", "time": NaN}', '{"owner": 1, "time": "x"}']
)
def test_a_lease_that_cannot_be_read_is_waited_for(bucket, tmp_path, capsys, content):
    """Nobody renews it. Its owner would."""
    (bucket / "run" / LEASE).write_text(content)
    one = mirror_at(bucket, tmp_path / "here/run")
    one.restore()
    assert "a machine whose lease cannot be read" in capsys.readouterr().err
    assert read_json(bucket / "run" / LEASE)["owner"] == f"here:{tmp_path}/here/run"
    (bucket / "run" / LEASE).write_text(content)
    one._renew_loop(Once())
    assert read_json(bucket / "run" / LEASE)["owner"] == f"here:{tmp_path}/here/run"


class Once:
    """An event that is waited for twice."""

    def __init__(self):
        self.ends = iter((False, True))

    def wait(self, seconds):
        return next(self.ends)


def test_two_machines_of_one_image(bucket, tmp_path, monkeypatch):
    """Equal hosts and folders. Of two that start at the same
    time, one trains. The other one leaves its lease."""
    first, second = (mirror_at(bucket, tmp_path / name / "run") for name in ("a", "b"))
    first._lease = Lease(owner="box:/runs/run", id="1")
    second._lease = Lease(owner="box:/runs/run", id="2")
    write = Mirror._write_lease
    over = threading.Event()

    def write_at_the_same_time(one):
        monkeypatch.setattr(Mirror, "_write_lease", write)
        write(one)
        second.restore()
        renewing.start()

    def renew():
        while not over.wait(0.02):
            second._renew()

    renewing = threading.Thread(target=renew)
    monkeypatch.setattr(Mirror, "_write_lease", write_at_the_same_time)
    try:
        expect_error("box:/runs/run trains this run now", first.restore)
    finally:
        over.set()
        renewing.join()
    first._give_back()
    assert read_json(bucket / "run" / LEASE)["id"] == "2"
    second._give_back()
    assert not (bucket / "run" / LEASE).exists()


def test_the_lease_of_a_process_that_has_ended_here_is_over(bucket, tmp_path, monkeypatch):
    """At once, by its PID on this machine. Not on another one."""
    monkeypatch.setattr(mirror, "EXPIRES", 1000.0)
    here = this_process()
    ended = {
        "owner": "box",
        "time": time.time(),
        "machine": here.machine,
        "pid": here.pid,
        "started": here.started - 1,
    }
    (bucket / "run" / LEASE).write_text(json.dumps(ended))
    assert list_checkpoints(restored(bucket, tmp_path / "here") / "checkpoints")
    assert not Lease.model_validate(ended | {"machine": "another"}).is_gone


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_machine_that_slept_while_another_one_trained_stops(
    forked_run, bucket, tmp_path, monkeypatch
):
    """The other one has ended, with its lease. What it has left is not overwritten."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    run = tmp_path / "here/run"
    shutil.copytree(forked_run / "first/run", run)
    shutil.rmtree(bucket / "run")
    shutil.copytree(
        forked_run / "first/run/checkpoints/step-00000004", bucket / "run/step-00000004"
    )
    one = mirror_at(bucket, run)
    one.restore()
    assert one._whole.keys() == {"step-00000004"}
    shutil.rmtree(bucket / "run")
    shutil.copytree(forked_run / "after/run", bucket / "run")
    before = content(bucket / "run")
    with pytest.raises(SystemExit, match="1"):
        one.copy(ENDED)
    assert content(bucket / "run") == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_machine_whose_lease_was_taken_stops(bucket, tmp_path, monkeypatch):
    """First the process that copies."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    threads = threading.active_count()
    run = restored(bucket, tmp_path / "here")
    hold_lease(bucket, "other:/runs/run")
    shutil.move(run / "checkpoints/step-00000008", run / "checkpoints/step-00000009")
    with pytest.raises(SystemExit, match="0"):
        mirror_at(bucket, run).copy(threading.Event())
    wait_until(lambda: threading.active_count() == threads)  # no renewal either
    assert {place.name for place in (bucket / "run").glob("step-*")} == {
        "step-00000008",
        "step-00000010",
    }
    assert read_json(bucket / "run" / LEASE)["owner"] == "other:/runs/run"


class Ended:
    """A process that has ended, or ends once it is killed."""

    stdin = io.StringIO()

    def __init__(self, code=None):
        self.code = code

    def poll(self):
        return self.code

    def wait(self, seconds):
        pass

    def kill(self):
        self.code = -signal.SIGKILL


@pytest.fixture
def start_copiers(monkeypatch):
    """Processes that end with these codes, None: not at
    all, are what is started. Returns how many were."""
    started = []

    def start(*codes):
        ends = iter(codes)

        def new(*words, **_):
            return started.append(words) or Ended(next(ends))

        monkeypatch.setattr(mirror_process, "start_module", new)
        return started

    return start


def test_the_process_that_copies_ends(tmp_path, monkeypatch, start_copiers):
    """With 0, as it has lost the lease: the run stops. By a crash: it is started again, later."""
    sent = []
    started = start_copiers(0, -11, 1)
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
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


ENDS = {
    "copied": ((0,), True, 1),
    "killed, then copied": ((-9, 0), True, 2),
    "killed twice": ((-9, -9), False, 2),
    "stopped, then copied": ((None, 0), True, 2),
    "never answers": ((None, None), False, 2),
    "the storage fails": ((1,), False, 1),
    "too late at a stop": ((-signal.SIGALRM,), False, 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_run_is_copied_or_the_exit_says_so(
    tmp_path, monkeypatch, capsys, start_copiers, end
):
    """The process that copies is started again. What is waited for is printed."""
    codes, is_copied, starts = ENDS[end]
    started = start_copiers(*codes)
    for name in ("SILENCE", "FIRST_NOTE"):
        monkeypatch.setattr(mirror_process, name, 0.05)
    (tmp_path / "status.json").write_text('{"state": "completed"}')
    (tmp_path / ".mirror").write_text('{"mirror_step": 8, "mirror_problem": ""}')
    one = MirrorProcess(["module", "--url=s3://bucket/run"], tmp_path)
    # 0 before the end: another machine has the lease
    one._process.code = None if codes[0] == 0 else codes[0]
    one._process.stdin = EndsWith(one._process, codes[0])
    if is_copied:
        one.end(None, None, None)
    else:
        with pytest.raises(SystemExit, match="75"):
            one.end(None, None, None)
    assert len(started) == starts
    said = capsys.readouterr().err
    assert ("started again" in said) == (starts == 2)
    assert ("warning: checkpoint.mirror lacks the end of the run" in said) == (not is_copied)
    waits = "waiting for the copy of the run's end: s3://bucket/run has the checkpoint of step 8"
    assert (waits in said) == (None in codes)


class EndsWith:
    """The standard input of a process, which ends when it is closed."""

    def __init__(self, process, code):
        self.close = lambda: setattr(process, "code", code)


def test_an_error_of_the_run_counts_more_than_its_copy(tmp_path, start_copiers, capsys):
    """And a stopped run has its exit code already."""
    start_copiers(1, 1)
    (tmp_path / "status.json").write_text('{"state": "completed"}')
    MirrorProcess(["module"], tmp_path).end(OSError, OSError(), None)
    (tmp_path / "status.json").write_text('{"state": "stopped"}')
    MirrorProcess(["module"], tmp_path).end(None, None, None)
    assert capsys.readouterr().err.count("lacks the end of the run") == 2


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


def test_the_end_of_a_run_is_copied_with_its_rows(copied, tmp_path, monkeypatch):
    """The run ends while it is copied, and while a command copies the copy. Nobody sees a status
    that is newer than the rows."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    run = tmp_path / "run"
    shutil.copytree(copied / "run", run)
    rows = (run / METRICS).read_text()
    status = (run / STATUS).read_text()
    bucket = tmp_path / "bucket/run"

    def train_again(folder):
        (folder / METRICS).write_text("".join(rows.splitlines(keepends=True)[:-1]))
        (folder / STATUS).write_text('{"state": "running", "step": 10}')

    def end(folder):
        (folder / METRICS).write_text(rows)
        (folder / STATUS).write_text(status)

    def ending(read, folder):
        def call(*arguments):
            found = read(*arguments)
            if Path(arguments[-1]).name in (METRICS, STATUS):
                end(folder)
            return found

        return call

    train_again(run)
    one = mirror_at(tmp_path / "bucket", run)
    one.restore()
    with monkeypatch.context() as ends:
        ends.setattr(mirror, "content_of", ending(mirror.content_of, run))
        one._copy(is_last=False)
    assert ended_status(run)
    assert not ended_status(bucket)
    one._renew()
    assert not ended_status(bucket)
    train_again(bucket)
    with monkeypatch.context() as ends:
        ends.setattr(LocalFileSystem, "get_file", ending(LocalFileSystem.get_file, bucket))
        (copy,) = with_local_runs(StatusConfig(runs=(f"file://{bucket}",))).runs
    assert ended_status(bucket)
    assert not ended_status(Path(copy))


def test_a_run_that_saves_and_deletes_faster_than_it_is_copied(copied, tmp_path, monkeypatch):
    """The newest is copied whole although the run deletes it meanwhile. Then come those that are
    newer, before older ones."""
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    shutil.copytree(copied / "run", run)
    later = tmp_path / "step-00000012"
    shutil.copytree(checkpoints / "step-00000010", later)
    put = Bucket.put
    written = []

    def put_slowly(there, file, name, sha256):
        if later.exists():
            shutil.move(later, checkpoints)
            shutil.rmtree(checkpoints / "step-00000010")
        put(there, file, name, sha256)
        written.append(name.partition("/")[0])

    monkeypatch.setattr(Bucket, "put", put_slowly)
    one = mirror_at(tmp_path / "bucket", run)
    one.restore()
    one._copy(is_last=False)
    there = Bucket(f"file://{tmp_path}/bucket/run")
    assert [*there.checkpoints()] == ["step-00000010"]
    one._copy(is_last=False)
    assert [*dict.fromkeys(written)][:2] == ["step-00000010", "step-00000012"]
    assert max(there.checkpoints()) == "step-00000012"


@pytest.mark.parametrize("last", ["manifest.json", "model.safetensors"])
def test_a_checkpoint_whose_copy_failed_and_that_is_deleted_stays_nowhere(
    copied, tmp_path, monkeypatch, last
):
    """The storage may have an object although its answer was lost."""
    run = tmp_path / "run"
    checkpoints = run / "checkpoints"
    shutil.copytree(copied / "run", run)
    later = tmp_path / "step-00000012"
    shutil.copytree(checkpoints / "step-00000010", later)

    def losing(method):
        def call(there, source, *arguments):
            result = method(there, source, *arguments)
            if f"step-00000010/{last}" in (source, *arguments):
                raise TimeoutError("the answer is lost")
            return result

        return call

    one = mirror_at(tmp_path / "bucket", run)
    one.restore()
    with monkeypatch.context() as faults:
        for name in ("put", "write"):
            faults.setattr(Bucket, name, losing(getattr(Bucket, name)))
        with pytest.raises(TimeoutError):
            one._copy(is_last=False)
    shutil.move(later, checkpoints)
    shutil.rmtree(checkpoints / "step-00000010")
    one._copy(is_last=False)
    there = {path.name for path in (tmp_path / "bucket/run").rglob("step-*")}
    assert "step-00000012" in there
    assert "step-00000010" not in there


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


LINKS = [
    ".mirror",
    "metrics.jsonl",
    "config.yaml",
    "status.json",
    ".lock",
    "checkpoints",
    "checkpoints/step-00000008",
]
LINKS += ["checkpoints/.step-00000012.tmp", "wandb", "evaluations"]


@pytest.mark.parametrize("name", LINKS)
def test_a_received_run_with_a_link_is_refused(copied, corpus, tmp_path, name):
    """Nothing is written through it."""
    here = tmp_path / "here/run"
    diary = tmp_path / "diary"
    shutil.copytree(copied / "run", here)
    (diary.mkdir if here.joinpath(name).is_dir() else diary.touch)()
    if here.joinpath(name).exists():
        here.joinpath(name).rename(tmp_path / "aside")
    here.joinpath(name).symlink_to(diary)
    config = with_mirror(corpus, tmp_path / "here", tmp_path / "new", **{"train.steps": 12})
    expect_error(f"{name}: is a link", train_with_faults, config)
    assert diary.is_dir() or not diary.stat().st_size
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "name",
    ["lease.json.tmp", "metrics.jsonl.tmp", "metrics.jsonl", "step-00000008", "step-00000010"],
)
def test_a_received_bucket_with_a_link_is_not_written(copied, tmp_path, name):
    """On a disk: nothing is written or deleted through it."""
    there = tmp_path / "bucket/run"
    diary = tmp_path / "diary"
    there.mkdir(parents=True)
    (diary.mkdir if "step" in name or name == "metrics.jsonl" else diary.touch)()
    if diary.is_dir():
        (diary / "manifest.json").write_text("mine")
    (there / name).symlink_to(diary)
    before = {file: file.read_bytes() for file in (diary, *diary.glob("*")) if file.is_file()}
    bucket = Bucket(f"file://{there}")
    for change in (
        lambda: bucket.write(name.removesuffix(".tmp"), b"x"),
        lambda: bucket.remove_all(name),
    ):
        with suppress(UserError, OSError):
            change()
        assert before == {
            file: file.read_bytes() for file in (diary, *diary.glob("*")) if file.is_file()
        }
    if "step" in name:
        expect_error(
            f"{name} = ?.*is a link|{name}: is a link",
            bucket.put,
            copied / "run/config.yaml",
            f"{name}/a",
            "",
        )


def test_a_large_or_endless_manifest_is_not_read(tmp_path):
    for scheme in ("file", "local"):
        folder = tmp_path / scheme
        folder.mkdir()
        with open(folder / "manifest.json", "wb") as file:
            file.truncate(2**40)
        expect_error(
            "data.path = .*cannot be used .*more than",
            fetch_data,
            tmp_path / "copy",
            f"{scheme}://{folder}",
        )
        (folder / "manifest.json").unlink()
        os.mkfifo(folder / "manifest.json")
        expect_error(
            "cannot be used .*ordinary", fetch_data, tmp_path / "copy", f"{scheme}://{folder}"
        )


def test_a_restore_writes_through_no_link(copied, bucket, tmp_path):
    """Also of a process that only restores."""
    run = tmp_path / "here/run"
    diary = tmp_path / "diary"
    (run / "checkpoints").mkdir(parents=True)
    diary.mkdir()
    (run / "checkpoints/.step-00000010.tmp").symlink_to(diary)
    for name in ("metrics.jsonl", "config.yaml", "status.json"):
        (diary / name).write_text("mine")
        (run / name).symlink_to(diary / name)
    restored(bucket, tmp_path / "here")
    assert {file.name: file.read_text() for file in diary.iterdir()} == dict.fromkeys(
        ("metrics.jsonl", "config.yaml", "status.json"), "mine"
    )
    assert rows_of(run) == rows_of(copied / "run")
    (run / ".mirror").unlink()
    (run / ".mirror").symlink_to(diary / "status.json")
    with pytest.raises(OSError, match="symbolic links"):
        mirror_at(bucket, run)


def test_an_unknown_storage():
    with (
        pytest.raises(
            UserError, match=r"data.path = nothing://bucket: cannot be used \(ValueError"
        ),
        reading("nothing://bucket", "data.path"),
    ):
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
    assert said(show_status, StatusConfig(runs=(status,)))[1].startswith(f"{url}  ")
    assert not (Path(status) / "checkpoints/step-00000010").exists()
    compared = with_local_runs(ExplainConfig(runs=(url, url))).runs
    assert newest_checkpoint(Path(compared[1])).name == "step-00000010"
    expect_error(
        r"run = file.*cannot be used", with_local_runs, VerifyConfig(run=f"file://{bucket}/nothing")
    )


def test_data_at_a_url(corpus, tmp_path, monkeypatch, in_this_process):
    """They are copied once. The run is that of the folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    url = f"file://{corpus}"
    for name, path in (("here", corpus), ("there", url)):
        config = training_config(corpus, tmp_path / name, {"data.path": str(path)})
        assert train_with_faults(config) == "completed"
    assert_same(tmp_path / "here/run", tmp_path / "there/run")
    monkeypatch.setattr(Bucket, "get", None)
    fetch_data(Path(local_copy(url)), url)
    nothing = training_config(corpus, tmp_path / "none", {"data.path": f"file://{tmp_path}/no"})
    expect_error(r"data.path = file.*cannot be used", train_with_faults, nothing)


def test_only_what_a_manifest_lists_is_fetched(corpus, tmp_path):
    """A tokenizer's name may be that of an encoding."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data, ignore=shutil.ignore_patterns("tokenizer.json", ".*"))
    edit_manifest(data, tokenizer="gpt2")
    (data / ".bashrc").write_text("a stranger's")
    (data / "more.bin").write_bytes(b"more")
    fetch_data(tmp_path / "copy", f"file://{data}")
    assert {*dircmp(data, tmp_path / "copy", ignore=[]).left_only} == {".bashrc", "more.bin"}
    next(data.glob("train_*.bin")).unlink()
    expect_error(
        r"data.path = file.*has no train_", fetch_data, tmp_path / "other", f"file://{data}"
    )
    assert not (tmp_path / "other/manifest.json").exists()


@pytest.mark.parametrize("name", ["../outside", "..", "/outside", "a/b", ".", ""])
def test_a_manifest_names_no_file_outside_of_its_folder(
    corpus, copied, tmp_path, monkeypatch, name
):
    """Of data and of a checkpoint, fetched and sent; where the file is there, too."""
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket/outside").write_text("a stranger's")
    shutil.copytree(corpus, tmp_path / "bucket/data")
    edit_manifest(tmp_path / "bucket/data", tokenizer=name)
    expect_error(
        "is not a manifest", fetch_data, tmp_path / "copy/data", f"file://{tmp_path}/bucket/data"
    )
    shutil.copytree(copied / "bucket/run", tmp_path / "bucket/run")
    stranger = tmp_path / "bucket/run/step-00000010"
    manifest = read_json(stranger / "manifest.json")
    manifest["files"][name] = manifest["files"]["state.json"]
    (stranger / "manifest.json").write_text(json.dumps(manifest | {"sha256": seal(manifest)}))
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    copy = Path(with_local_runs(VerifyConfig(run=f"file://{tmp_path}/bucket/run")).run)
    assert [file.name for file in (copy / "checkpoints/step-00000010").iterdir()] == [
        "manifest.json"
    ]
    restored(tmp_path / "bucket", tmp_path / "here")
    assert not [file for file in tmp_path.rglob("outside") if file.parent.name != "bucket"]
    run = tmp_path / "run"
    shutil.copytree(copied / "run", run)
    (run / "checkpoints/outside").write_text("mine")
    shutil.copy(copy / "checkpoints/step-00000010/manifest.json", run / "checkpoints/step-00000010")
    monkeypatch.setattr(mirror, "POLL", 0.002)
    mirror_at(tmp_path / "sent", run).copy(ENDED)
    assert not [*(tmp_path / "sent").rglob("outside")]


@pytest.mark.parametrize(
    "url", ["s3://bucket/../../../..", "file:///../../home", "s3://..", "memory://a/../../b"]
)
def test_a_url_leads_to_no_folder_outside_of_the_cache(corpus, tmp_path, url):
    expect_error(
        r"data.path = .*leads out of its folder",
        training_config,
        corpus,
        tmp_path,
        {"data.path": url},
    )
    expect_error(r"run = .*leads out of its folder", with_local_runs, VerifyConfig(run=url))
    expect_error("is no name of a model", import_place, f"hub:x/{url.partition('//')[2]}/../..")


@pytest.mark.parametrize(
    "url", ["s3://key:sec/ret@bucket/runs", "https://host/runs?sig=sec/ret", "az://a/b?sec/ret"]
)
def test_credentials_in_a_url_are_refused_and_not_printed(corpus, tmp_path, url):
    """The secret of a cloud may have slashes. A signature gives access to whoever has it."""
    makers = {
        name: partial(training_config, corpus, tmp_path, {name: url})
        for name in ("data.path", FIELD, "x")
    }
    makers |= {
        "run": partial(with_local_runs, VerifyConfig(run=url)),
        "seed": partial(UserError, "seed", 1, f"see {url}"),
    }
    for field, make in makers.items():
        with pytest.raises(UserError) as error:
            raise make()
        assert f"{field} = " in str(error.value)
        assert "ret" not in str(error.value).replace("secret", "")
    assert "/ret" not in describe(OSError(f"no answer from {url}"))
