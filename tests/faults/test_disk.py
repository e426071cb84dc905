"""Disks that are full, over quota, read-only or broken, wherever a training writes: one line,
nothing lost, goes on."""

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import run_script
from disk import interpose, refuse
from ranks import in_turn, run_ranks, start_ranks
from runs import (
    checkpoint_at,
    newest_checkpoint,
    open_folder,
    saved_steps,
    status,
    train,
    training_config,
    untimed,
)

from gpt2_ddp.checkpoint.format import MODEL
from gpt2_ddp.checkpoint.verify import verify
from gpt2_ddp.config.cli import dump
from gpt2_ddp.errors import UserError
from gpt2_ddp.records.run_folder import RunLog

SLOW = pytest.mark.slow

FURTHER = {"train.steps": 7, "optim.decay_steps": 10, "eval.every": 100, "tracking.sample_every": 5}
FURTHER |= {"checkpoint.every": 3, "checkpoint.keep_last": 1}
FAST = ("write checkpoints/.step-N.tmp/model.safetensors", "write metrics.jsonl")
FAST += ("rename checkpoints/.step-N.tmp", "rename checkpoints/step-N")


def refused_everywhere(halfway, config, wanted):
    """Trains the second half once for every place where it writes, which is refused once; then once
    more.

    Returns:
        The places, as `operation path`; those of `wanted` alone if it names any.
    """
    output = Path(config.output_dir)
    run = output / config.run_name
    told = []
    failing = ""

    def tell(operation, name):
        nonlocal failing
        told.append(f"{operation} {re.sub('step-[0-9]+', 'step-N', name)}")
        if told[-1] == failing:
            failing = ""
            refuse()

    interpose(run, tell)

    def trained(place=""):
        nonlocal failing
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(halfway, output)
        told.clear()
        failing = place
        return in_turn((train, config))[0]

    assert trained() == "completed"
    whole = ended(run)
    before = status(halfway / "run")
    places = [place for place in dict.fromkeys(told) if not wanted or place in wanted]
    for place in places:
        said = trained(place)
        assert failing == "", f"{place} was not come to"
        at = rf"(file|output_dir) = {run}.*: cannot be written \(No space left"
        is_harmless = ".status.json" in place  # then the old file is overwritten
        assert re.match(at, said) or is_harmless, (place, said)
        kept = saved_steps(run)
        assert [verify(checkpoint_at(run, step)).step for step in kept] == kept != [], place
        # what could not be removed is there until the next start
        if not place.startswith(("unlink", "rmdir")):
            assert left_behind(run) == [], place
        now = status(run)
        assert said == "completed" or now == before or "No space left" in now["reason"], place
        assert train(config) == "completed", place
        assert ended(run) == whole, place
        assert left_behind(run) == [], place
    return places


def left_behind(run):
    return [str(file) for file in run.rglob(".*") if file.name != ".lock"]


def ended(run):
    """Rows without timings, weights, checkpoints."""
    return untimed(run), (newest_checkpoint(run) / MODEL).read_bytes(), saved_steps(run)


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("wanted", [FAST, pytest.param((), marks=pytest.mark.soak, id="all")])
def test_a_full_disk_at_every_place_that_is_written(corpus, tmp_path, halfway, wanted, background):
    config = training_config(
        corpus, tmp_path / "runs", FURTHER | {"checkpoint.background": background}
    )
    (places,) = run_ranks(refused_everywhere, 1, halfway, config, wanted, timeout=600)
    assert len(places) == len(wanted) if wanted else len(places) >= 24, places
    print(len(places), *places, sep="\n")


OPTIMIZER = "checkpoints/.step-00000006.tmp/optimizer"


def script_on_a_bad_disk(arguments, run, number, refused=OPTIMIZER):
    """Runs the training script; exit code and stderr. EDQUOT: the main process's disk refuses one
    file. EROFS: from the first save on, nothing can be changed any more, as when Linux mounts a
    broken disk read-only."""
    dead = False

    def tell(operation, name):
        nonlocal dead
        dead = dead or (operation == "open" and name.endswith(".safetensors"))
        one = operation == "write" and name.startswith(refused)
        if dead if number == errno.EROFS else one:
            refuse(number)

    if os.environ.get("RANK", "0") == "0":
        interpose(run, tell)
    return run_script("train_gpt2", arguments)


def told(errors):
    """The only error."""
    (line,) = [line for line in errors.splitlines() if line.startswith("error:")]
    assert "Traceback" not in errors
    return line


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=SLOW)])
def test_all_ranks_end(corpus, tmp_path, halfway, parallel):
    """Where a checkpoint is saved, all ranks raise the same.
    Elsewhere, the others are ended by the watchdog."""
    shutil.copytree(halfway, tmp_path / "runs")
    arguments = write_config(
        tmp_path,
        training_config(corpus, tmp_path / "runs", FURTHER | {"launch.parallel": parallel}),
    )
    (code, said), other = run_ranks(
        script_on_a_bad_disk, 2, arguments, tmp_path / "runs/run", errno.EDQUOT
    )
    assert ".step-00000006.tmp/optimizer" in told(said)
    assert (code, *other) == (2, 2, "")
    assert saved_steps(tmp_path / "runs/run") == [5]


def test_a_row_that_cannot_be_written_ends_all_ranks_alike(corpus, tmp_path, halfway, capfd):
    """The main process alone has that error: it says so, and records it."""
    shutil.copytree(halfway, tmp_path / "runs")
    arguments = write_config(tmp_path, training_config(corpus, tmp_path / "runs", FURTHER))
    main, other = start_ranks(
        script_on_a_bad_disk, 2, arguments, tmp_path / "runs/run", errno.EDQUOT, "metrics"
    )
    (code, said), _ = main[1].recv()
    other[0].join(60)
    assert (code, other[0].exitcode) == (2, 2)
    assert told(said).startswith("error: file = ")
    assert "error" not in capfd.readouterr().err
    assert status(tmp_path / "runs/run")["state"] == "failed"


def test_a_failure_is_recorded_where_a_full_disk_has_room_for_no_second_file(monkeypatch, tmp_path):
    folder = open_folder(tmp_path / "run")
    log = RunLog(folder)
    log.write_status("running", 3)

    def refuse_file(path, *_):
        raise UserError("file", path, "cannot be written (No space left on device)")

    monkeypatch.setattr("gpt2_ddp.records.run_folder.write_atomically", refuse_file)
    log.write_failure(4, "the disk is full")
    assert status(folder.path) == {"state": "failed", "step": 4, "reason": "the disk is full"}
    other = tmp_path / "other.txt"
    other.write_text("of somebody else")
    (folder.path / "status.json").unlink()
    (folder.path / "status.json").symlink_to(other)
    RunLog(folder).write_failure(5, "the disk is full")
    folder.release()
    assert other.read_text() == "of somebody else"


@pytest.mark.parametrize("background", [False, pytest.param(True, marks=SLOW)])
def test_a_disk_that_dies(corpus, tmp_path, halfway, background):
    """Then status.json cannot be written either; what is
    told is what came first. In the background a row may."""
    shutil.copytree(halfway, tmp_path / "runs")
    config = training_config(
        corpus, tmp_path / "runs", FURTHER | {"checkpoint.background": background}
    )
    run = tmp_path / "runs/run"
    ((code, said),) = run_ranks(
        script_on_a_bad_disk, 1, write_config(tmp_path, config), run, errno.EROFS
    )
    assert code == 2, said
    assert MODEL in told(said) or (background and "metrics.jsonl" in said)
    assert (run_ranks(train, 1, config), saved_steps(run)[-1], left_behind(run)) == (
        ["completed"],
        7,
        [],
    )


def write_config(folder, config):
    (folder / "config.yaml").write_text(dump(config))
    return ["--config", f"{folder}/config.yaml"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 3 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], capture_output=True
    )
    if made.returncode:
        pytest.skip(f"a disk cannot be mounted here: {made.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


WIDE = {"model.n_embd": 64, "model.n_layer": 2, "eval.every": 100, "train.steps": 15}


def test_a_disk_too_small_for_two(corpus, tmp_path, small_disk):
    """A checkpoint takes 1.6 MB: the second does not fit, and the first stays, as does the small
    one of step 0. With room, the same command ends."""
    arguments = write_config(tmp_path, training_config(corpus, small_disk, WIDE))
    run = small_disk / "run"
    ((code, said),) = run_ranks(run_script, 1, "train_gpt2", arguments)
    assert code == 2, said
    assert str(run) in told(said)
    assert status(run)["state"] == "failed"
    assert [verify(checkpoint_at(run, step)).step for step in saved_steps(run)] == [0, 5]
    assert left_behind(run) == []
    subprocess.run(["mount", "-o", "remount,size=20m", str(small_disk)], check=True)
    ((code, said),) = run_ranks(run_script, 1, "train_gpt2", arguments)
    assert code == 0, said
    assert saved_steps(run) == [5, 10, 15]
