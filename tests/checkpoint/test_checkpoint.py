"""Checkpoints: what is written is what is read; what
was damaged is found; what is kept is what should be."""

import errno
import hashlib
import math
import os
import random
import shutil
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from commands import expect_error
from disk import refuse
from faults.mutations import flip
from ranks import run_ranks
from runs import (
    change,
    checkpoint_at,
    edit_rows,
    open_folder,
    open_store,
    reseal,
    same,
    saved_steps,
    spoil,
    state_after,
)
from safetensors import SafetensorError
from safetensors.torch import save_file

from gpt2_ddp.checkpoint import loading
from gpt2_ddp.checkpoint import verify as intact
from gpt2_ddp.checkpoint.format import (
    DTYPES,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    STATE,
    Part,
    Snapshot,
    as_safetensors,
    list_checkpoints,
    optimizer_state,
    write_manifest,
    write_part,
)
from gpt2_ddp.checkpoint.loading import load_model_state, load_optimizer_state
from gpt2_ddp.checkpoint.store import CheckpointStore, copied
from gpt2_ddp.checkpoint.verify import CorruptCheckpoint, find_checkpoint, verify
from gpt2_ddp.config.run import KeepConfig
from gpt2_ddp.config.training import ModelConfig, OptimConfig
from gpt2_ddp.files import read_json, sha256_file, write_hashed
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.records.rows import METRICS
from gpt2_ddp.records.run_folder import RunLog
from gpt2_ddp.state import LogEnd, Progress
from gpt2_ddp.tasks.trained_model import load_weights

Tensors = dict[str, torch.Tensor]
TINY = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=4)


def trained_model():
    model = GPT(TINY, 100)
    optimizer = build_optimizer(model, OptimConfig())
    tokens = torch.arange(8).view(2, 4)
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


@cache
def trained_tensors():
    """Weights and moments."""
    model, optimizer = trained_model()
    return model.state_dict(), optimizer_state(model, optimizer)


CONFIG = "{run_name: run, data: {}, model: {}, optim: {}, train: {}}"


def snapshot(step, val_loss=None, **progress):
    return Snapshot(state_after(step, val_loss, **progress), CONFIG, *trained_tensors())


def save(run, step, val_loss=None, keep_last=3, **progress):
    checkpoints = open_store(run, keep_last)
    checkpoints.save(snapshot(step, val_loss, **progress))
    return checkpoints.place(step)


def after(log, step, **progress):
    """The snapshot of a step that was taken when the last row of `log` was the newest."""
    whole = snapshot(step, 2.0, **progress)
    return replace(whole, state=whole.state.model_copy(update={"log": log.end()}))


def expect_damage(message, place):
    with pytest.raises(CorruptCheckpoint, match=message):
        verify(place)


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_weights_and_moments_come_back_bitwise(run):
    """Into the tensors that are there. Moments that are not in the snapshot go, as when a run
    returns to its start."""
    place = save(run, 3)
    model, optimizer = trained_model()

    def values():
        return model.state_dict() | optimizer_state(model, optimizer)

    places = {name: tensor.data_ptr() for name, tensor in values().items()}
    read = verify(place)
    load_model_state(read.tensors(MODEL), model)
    load_optimizer_state(read.tensors(OPTIMIZER), model, optimizer)
    weights, moments = trained_tensors()
    assert same(values(), weights | moments)
    assert {name: tensor.data_ptr() for name, tensor in values().items()} == places
    assert {name.split(".")[0] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}
    load_optimizer_state({}, model, optimizer)
    assert not optimizer_state(model, optimizer)


def rows_of(tensors, number, count):
    """What a rank has of tensors that `count` ranks divide:
    rows, if any; and what has none in the first part."""
    parts = {
        name: value.chunk(count) if value.dim() else [value] for name, value in tensors.items()
    }
    return {name: part[number] for name, part in parts.items() if number < len(part)}


def write_parts(whole, place, count):
    """Writes a checkpoint as ranks do that share a model."""
    files = {}
    for number in range(count):
        held = [rows_of(tensors, number, count) for tensors in (whole.model, whole.optimizer)]
        part = replace(
            whole, model=held[0], optimizer=held[1], part=Part(number, count, number == 0)
        )
        files |= write_part(part, place)
    write_manifest(files, place)


@pytest.mark.parametrize("count", [2, 3, 40])
def test_parts_are_read_as_the_whole(tmp_path, count):
    """Tensor by tensor, and by any rows; also where a part has no row of a tensor."""
    whole = snapshot(3)
    write_parts(whole, tmp_path, count)
    for file, values in ((MODEL, whole.model), (OPTIMIZER, whole.optimizer)):
        read = verify(tmp_path).tensors(file)
        assert same({**read}, values)
        for name, value in values.items():
            assert (read.shapes[name], read.dtypes[name]) == ([*value.shape], value.dtype)
            size = len(value) if value.dim() else -1
            for start, stop in combinations(range(0, size + 1, 1 + max(size, 0) // 8), 2):
                assert torch.equal(read.rows(name, start, stop), value[start:stop])


def test_parts_that_do_not_belong_together(tmp_path):
    write_parts(snapshot(3), tmp_path, 3)
    second, third = (tmp_path / f"model-0000{number}-of-00003.safetensors" for number in (2, 3))
    third.unlink()
    expect_damage(third.name, tmp_path)
    files = read_json(tmp_path / MANIFEST)["files"]
    del files[third.name]
    write_manifest(files, tmp_path)
    expect_damage("does not list model", tmp_path)
    for other in (torch.ones(3, 9), torch.ones(3, 8).double()):
        save_file({"wte.weight": other}, tmp_path / "other")
        with pytest.raises(SafetensorError, match=r"wte\.weight .* in other"):
            loading.Tensors([second, tmp_path / "other"])


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_files_of_tensors_are_those_of_the_library(tmp_path, metadata):
    """Byte for byte: every kind of number, scalars, nothing at all, large ones, names that are not
    ASCII; and their size and hash are those of the file."""
    tensors = {
        f"{kind}.{n}": (torch.arange(n) % 2).to(dtype)
        for dtype, kind in DTYPES.items()
        for n in (0, 1, 7)
    }
    tensors |= {
        "é\n": torch.tensor(3.0),
        "large": torch.randn(2**18 + 3, 2),
        "b": torch.ones(3, 2**17),
    }
    tensors["turned"] = torch.randn(5, 3).T
    right = tmp_path / "right"
    own = tmp_path / "own"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, right, metadata)
    found = write_hashed(own, as_safetensors(tensors, metadata))
    assert own.read_bytes() == right.read_bytes()
    assert found == (right.stat().st_size, sha256_file(right))


def test_a_copy_stays_as_it_is_and_takes_the_same_memory_again():
    model, optimizer = trained_model()
    memory = {}
    live = Snapshot(state_after(1), "", model.state_dict(), optimizer_state(model, optimizer))
    copy = copied(live, memory)
    before = copied(copy, {})
    optimizer.step()
    live.state.progress.scores["val_loss"] = 2.0
    assert copy.state == state_after(1)
    assert same(copy.model | copy.optimizer, before.model | before.optimizer)
    assert not same(live.model, before.model)
    again = copied(live, memory)
    assert all(again.model[name] is tensor for name, tensor in copy.model.items())


DAMAGE = [
    ("model.safetensors", "gone", "is missing"),
    ("model.safetensors", "x", "has 1 bytes instead of"),
    ("manifest.json", "gone", "is missing"),
    ("manifest.json", "[]", "cannot be read"),
    ("manifest.json", '{"files": {}}', "cannot be read"),
    ("manifest.json", "large", "cannot be read \\(More than"),
    ("state.json", '{"kind": "gpt2"}', "progress: Field required"),
    ("config.yaml", "[]", "is no configuration"),
    ("config.yaml", "a: ]", "line 1, column 4"),
]
"""A file, its content, and the damage."""


@pytest.mark.parametrize(("name", "content", "reason"), DAMAGE)
def test_damage_is_found_and_a_resumed_run_falls_back_to_the_checkpoint_before(
    run, capsys, name, content, reason
):
    """A file that is missing or short, and forged content with right
    hashes. Without an intact checkpoint, no run starts from scratch;
    a process that only looks leaves everything where it is."""
    assert open_store(run).newest() is None
    place = save(run, 2)
    (place / name).write_text(content if content != "large" else " " * 2**20 + "{}")
    if content == "gone":
        (place / name).unlink()
    elif name != MANIFEST and content != "x":
        reseal(place / name)
    expect_damage(rf"{name}: {reason}", place)
    place.with_name(".step-00000003.tmp").mkdir()
    expect_error("none is intact", open_store(run, lock=False).newest)
    assert {*os.listdir(place.parent)} == {"step-00000002", ".step-00000003.tmp"}
    before = save(run, 1)
    assert open_store(run).newest().step == 1
    assert f"step-00000002/{name}: " in capsys.readouterr().err
    assert {*os.listdir(place.parent)} == {"step-00000001", "step-00000002.corrupt"}
    shutil.rmtree(before)
    expect_error("none is intact", open_store(run).newest)


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        ({"step.wpe": torch.ones(())}, r"step.wpe has shape \[\]"),
        ({"exp_avg.wte.weight": torch.ones(3)}, r"has shape \[3\]"),
        ({"exp_avg.ln_f.weight": torch.ones(8, dtype=torch.int32)}, "has the type int32"),
        (
            {"velocity.ln_f.weight": torch.ones(8)},
            "velocity.ln_f.weight is unknown to the optimizer",
        ),
        ({"exp_avg.ln_f.weight": None}, "exp_avg.ln_f.weight is missing"),
    ],
)
def test_optimizer_state_that_does_not_fit_is_refused(added, reason):
    model, optimizer = trained_model()
    state = optimizer_state(model, optimizer)
    changed = {name: value for name, value in (state | added).items() if value is not None}
    expect_error(
        rf"optimizer.safetensors: .*{reason}", load_optimizer_state, changed, model, optimizer
    )
    assert optimizer_state(model, optimizer).keys() == state.keys()  # nothing is lost


@pytest.mark.parametrize("name", [MODEL, STATE, "manifest.json"])
def test_an_error_of_the_disk_is_no_damage(run, monkeypatch, capsys, name):
    """The file is read again. If the error persists, it is
    named; no checkpoint is renamed, no older one is taken."""
    save(run, 1)
    place = save(run, 2)
    failures = [errno.EIO]
    opening = Path.open

    def opened(path, *args, **kwargs):
        if path == place / name and failures:
            refuse(failures.pop())
        return opening(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    monkeypatch.setattr("gpt2_ddp.checkpoint.verify.PAUSES", (0.0, 0.0, 0.0))
    assert open_store(run).newest().step == 2
    failures += [errno.EIO] * 9
    expect_error(rf"step-00000002/{name}: cannot be read", open_store(run).newest)
    assert saved_steps(run) == [1, 2]
    failures += [errno.EIO] * 9
    save(run, 3, keep_last=2)
    assert "step-00000002" in capsys.readouterr().err
    assert saved_steps(run) == [1, 2, 3]  # one that cannot be read is kept, and does not count


KEPT = [
    ([3.0, 2.0, 2.5, 2.6, 2.7], 2, None, [1, 3, 4]),
    ([2.0, 2.0, 3.0], 1, None, [0, 2]),  # of equal ones the first
    ([3.0, 2.0, 1.0], 1, None, [2]),
    ([math.nan, -math.inf, None, 2.0, 3.0], 1, None, [3, 4]),
    (
        [None, None, None, None, None],
        1,
        1,
        [1, 2, 3, 4],
    ),  # nobody has judged those after the last good one
    ([None, None, None], 3, 1, [1, 2]),  # once a later one is good, the first one goes
    ([None, None, None], 3, 0, [0, 1, 2]),
    ([1.0, None, None], 1, 1, [0, 1, 2]),  # unless it is the best
]
"""Losses, `keep_last`, the last good step, and the steps that are kept."""


@pytest.mark.parametrize(("losses", "keep_last", "good", "kept"), KEPT)
@pytest.mark.parametrize("first", [0, 7])
def test_what_is_kept(run, first, losses, keep_last, good, kept):
    """Of a run, and of a branch of another one: the
    newest, the best, and what a rollback may need."""
    origin = {"parent": "", "run_id": "", "step": first, "checkpoint_sha256": ""} if first else None
    checkpoints = open_store(run, keep_last)
    for step, loss in enumerate(losses, first):
        checkpoints.save(
            snapshot(step, loss, branched_from=origin), math.inf if good is None else first + good
        )
    assert saved_steps(run) == [first + step for step in kept]
    listing = checkpoints.listing()
    assert (listing["checkpoint"]["step"], listing["kept"]) == (
        first + len(losses) - 1,
        saved_steps(run),
    )
    checkpoints.remove_after(first)
    assert saved_steps(run) == [first] * (kept[0] == 0)


def test_the_best_is_of_evaluations_of_equally_many_tokens(run):
    for step, tokens in enumerate((5, 9, 9, 9)):
        save(run, step, keep_last=1, scores={"val_loss": float(step), "val_tokens": tokens})
    assert saved_steps(run) == [0, 1, 3]


SAVED = [
    "fsync config.yaml",
    "fsync model.safetensors",
    "fsync optimizer.safetensors",
    "fsync state.json",
    "fsync metrics.jsonl",
    "fsync .manifest.json.tmp",
    "fsync .step-00000002.tmp",
    "rename .step-00000002.tmp",
    "fsync checkpoints",
    "fsync metrics.jsonl",
    "rename step-00000001",
    "fsync checkpoints",
    "rmtree .step-00000001.removed",
]
"""The operations of a save after which the older checkpoint is deleted."""


def test_everything_is_on_disk_before_the_old_one_goes(run, monkeypatch):
    """Files, then their folder's manifest, then the name, its row, and the
    old one's other name, each fsynced; a crash between leaves a whole
    checkpoint. Before them, the rows whose chain it has. First of all, the
    names of the folders. A replacement that a crash interrupted is undone."""
    done = []

    def noted(owner, operation):
        function = getattr(owner, operation)

        def note(path, *args, **kwargs):
            place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            done.append(f"{operation} {Path(place).name}")
            return function(path, *args, **kwargs)

        monkeypatch.setattr(owner, operation, note)

    noted(os, "fsync")
    noted(Path, "rename")
    noted(shutil, "rmtree")
    run = run.with_name("runs") / "run"
    place = save(run, 1).with_name("step-00000002")
    assert done[:3] == ["fsync run", "fsync runs", f"fsync {run.parents[1].name}"]
    done.clear()
    save(run, 2, keep_last=1)
    assert done == SAVED
    shutil.copytree(place, place.with_name(".step-00000002.tmp"))
    place.rename(place.with_name(".step-00000002.replaced"))
    done.clear()
    assert open_store(run).newest(weights=False).step == 2
    assert done[:2] == ["rename .step-00000002.replaced", "fsync checkpoints"]
    assert done[2:] == ["rmtree .step-00000002.tmp"]


def test_a_planted_name_reaches_no_terminal():
    assert str(CorruptCheckpoint(Path("a/\x1b[2J"), "is missing")) == r"a/\x1b[2J: is missing"


def test_one_that_is_removed_while_it_is_read_is_not_damaged(run, monkeypatch, capsys):
    """By a run that goes on: the newest at first is none any longer, and there is a newer one."""
    save(run, 1)

    def late(place, weights):
        monkeypatch.undo()
        save(run, 2, keep_last=1)
        return verify(place, weights)

    monkeypatch.setattr("gpt2_ddp.checkpoint.verify.verify", late)
    assert find_checkpoint(run).path.name == "step-00000002"
    assert capsys.readouterr().err == ""


def test_weights_that_are_removed_before_they_are_loaded_or_of_another_shape(run):
    checkpoint = verify(save(run, 1))
    other = GPT(TINY.model_copy(update={"n_embd": 16}), 100)
    expect_error("does not fit .*has shape", load_weights, checkpoint, other)
    save(run, 2, keep_last=1)
    expect_error("step-00000001: was deleted", load_weights, checkpoint, other)


def test_another_format_is_a_user_error_and_no_damage(run):
    """Nothing is renamed, and no older checkpoint is loaded in its place."""
    save(run, 1)
    place = save(run, 2)
    change(place / MANIFEST, '"format": 1', '"format": 3')
    reseal(place / STATE)
    checkpoints = open_store(run)
    for look in (
        lambda: checkpoints.newest(weights=False),
        checkpoints.newest,
        lambda: find_checkpoint(run),
    ):
        expect_error(r"step-00000002: has format 3", look)
    assert saved_steps(run) == [1, 2]


@pytest.mark.parametrize("name", ["config.yaml", STATE])
def test_a_large_file_of_fields_is_not_read(run, monkeypatch, name):
    """Whoever computes its hash may have written any size, as of holes."""
    place = save(run, 1)
    monkeypatch.setitem(intact.LARGEST, name, (place / name).stat().st_size)
    verify(place)
    (place / name).write_text((place / name).read_text() + " ")
    reseal(place / name)
    expect_damage(f"{name}: has [0-9,]+ bytes, more than", place)


def test_a_manifest_lists_no_file_of_another_folder(run):
    place = save(run, 1)
    change(place / MANIFEST, '"files": {', '"files": {"../x": {"bytes": 0, "sha256": ""}, ')
    place.with_name("x").touch()
    reseal(place / STATE)
    expect_damage(r"lists \.\./x", place)


# Faults


def killed_at_every_operation(run, scenario, background, every):
    """Saves step 2 after step 1 (or `again`), killed once before each operation that changes a
    file, or each fifth one; after each, the next trainer finds an intact checkpoint and saves its
    own. Returns how many there are, or up to four more."""
    from disk import interpose

    told = 0
    limit = 0
    at = 1

    def tell(operation, name):
        nonlocal told
        told += 1
        if told == limit:
            os._exit(9)

    os.fsync = lambda descriptor: None  # what a kill does not undo
    save(run, 1)
    log = RunLog(open_folder(run))
    log.append({"event": "start", "step": 1} if scenario == "again" else {"step": 1})
    last = after(log, 1 if scenario == "again" else 2)
    first = run.rename(run.with_name("first"))
    interpose(run / "checkpoints", tell)
    while True:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(first, run)
        child = os.fork()
        if not child:
            checkpoints = open_store(run, keep_last=1, background=background)
            told = 0
            limit = at
            checkpoints.save(last)
            checkpoints.wait()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if scenario != "again":
            assert [*map(verify, list_checkpoints(run / "checkpoints"))]
        found = open_store(run, keep_last=1)
        newest = found.newest()
        assert newest.state in (state_after(1), last.state)
        assert not list((run / "checkpoints").glob(".*"))
        found.save(snapshot(3, 1.0))
        assert saved_steps(run) == [3]
        if code == 0:
            assert newest.state == last.state
            return at
        assert code == 9
        at += every


KILLED = [("the next", False), ("again", False), ("the next", True)]
SLOW = [pytest.param(*case, 1, marks=pytest.mark.slow) for case in KILLED]


@pytest.mark.parametrize(
    ("scenario", "background", "every"), [("the next", False, 5), ("again", False, 5), *SLOW]
)
def test_killed_at_every_operation_an_intact_one_is_left(run, scenario, background, every):
    """Also where the same step is saved again."""
    assert run_ranks(killed_at_every_operation, 1, run, scenario, background, every)[0] > 20


def test_every_flipped_bit_is_found(run):
    """In every file alike, however small it is."""
    files = sorted(save(run, 1, val_loss=2.5).iterdir())
    assert len(files) == 5
    for number, file in enumerate(files * 40):
        content = file.read_bytes()
        file.write_bytes(flip(content, random.Random(number)))
        expect_damage(file.name, file.parent)
        file.write_bytes(content)


def test_a_rollback_takes_an_older_one_where_one_has_rotted_since(run):
    """It was intact when it was written; it is put aside as at a resume."""
    checkpoints = open_store(run)
    for step in (1, 2, 3):
        checkpoints.save(snapshot(step))
    assert checkpoints.newest(2).step == 2
    spoil(checkpoints.place(2) / MODEL)
    assert checkpoints.newest(2).step == 1
    assert saved_steps(run) == [1, 3]
    assert checkpoints.newest(0) is None


def test_a_resume_hashes_one_checkpoint(run, monkeypatch, capsys):
    """All are hashed, once, before an older one is deleted. The best, whose weights are damaged,
    does not count then, so that the next best is kept."""
    for step in (1, 2, 3, 4):
        save(run, step, val_loss=2.0 + step)
    spoil(checkpoint_at(run, 1) / MODEL)
    digest = MagicMock(side_effect=hashlib.file_digest)
    monkeypatch.setattr(hashlib, "file_digest", digest)

    def hashed():
        files = [Path(call.args[0].name) for call in digest.call_args_list]
        return sorted(int(file.parent.name[-1]) for file in files if file.name == MODEL)

    checkpoints = open_store(run)
    checkpoints.newest()
    checkpoints.prune()
    assert hashed() == [4]
    assert capsys.readouterr().err == ""
    checkpoints.save(snapshot(5, 9.0))
    assert "step-00000001/model.safetensors: its SHA-256 differs" in capsys.readouterr().err
    assert hashed() == [1, 2, 3, 4]
    checkpoints.save(snapshot(6, 9.0))
    assert hashed() == [1, 2, 3, 4]
    assert saved_steps(run) == [1, 2, 4, 5, 6]


# Records


def foreign(place):
    """The checkpoint of another run, after this one."""
    save(place.parents[1].with_name("other"), 4, run_id="other").rename(
        place.with_name("step-00000004")
    )


def renamed(place):
    shutil.copytree(place.with_name("step-00000002"), place.with_name("step-00000004"))


def resealed(place):
    spoil(place / MODEL)
    reseal(place / MODEL)


def cut(place, *numbers):
    """Removes rows, of start, 1, checkpoint 1, 2, checkpoint 2, 3, checkpoint 3, end."""
    edit_rows(place.parents[1], lambda rows: rows.__delitem__(slice(*numbers)))


@pytest.fixture
def recorded(run):
    """The newest of three checkpoints, at the end of a run."""
    log = RunLog(folder := open_folder(run))
    checkpoints = CheckpointStore(folder, log, KeepConfig(background=False))
    log.resume(LogEnd(), Progress(), {"event": "start", "step": 0, "run_id": "abc"})
    for step in (1, 2, 3):
        log.append({"step": step})
        checkpoints.save(after(log, step, run_id="abc"))
    log.append({"event": "end", "step": 3})
    return checkpoints.place(3)


@pytest.mark.parametrize(
    ("forge", "step", "reason"),
    [
        (resealed, 3, "its manifest's SHA-256 differs from metrics.jsonl's"),
        (lambda place: cut(place, 6, 7), 3, "is not recorded in metrics.jsonl"),
        (foreign, 4, "is of the run other, its folder"),
        (renamed, 4, "holds the state of step 2"),
    ],
)
def test_a_checkpoint_that_the_run_did_not_record_is_not_taken(
    run, recorded, capsys, forge, step, reason
):
    """Neither by a resume nor by a reader. A resume renames it, and takes the next older one."""
    forge(recorded)
    place = recorded.with_name(f"step-{step:08d}")
    checkpoints = open_store(run)
    assert checkpoints.newest(weights=False).step == step - 1
    assert capsys.readouterr().err == ""
    assert find_checkpoint(run).step == step - 1
    expect_error(reason, find_checkpoint, place)
    assert saved_steps(run)[-1] == step
    capsys.readouterr()
    assert checkpoints.newest().step == step - 1
    said = capsys.readouterr().err
    assert f"{place}: {reason}" in said
    assert checkpoints.listing()["rejected"] == [f"{place.name}.rejected"]
    for place in list_checkpoints(checkpoints.folder):
        resealed(place)
    expect_error("none is intact", checkpoints.newest)


@pytest.mark.parametrize(
    "happen",
    [
        lambda place: cut(place, 6, None),
        lambda place: (
            cut(place, 7, None),
            os.truncate(rows := place.parents[1] / METRICS, rows.stat().st_size - 9),
        ),
        lambda place: (place.parents[1] / METRICS).unlink(),
    ],
)
def test_without_its_row_the_newest_is_taken(run, recorded, happen):
    """As a kill may have come before that, or within; and
    someone may have lost the rows, or put back older ones."""
    happen(recorded)
    assert open_store(run).newest().step == find_checkpoint(run).step == 3


def test_folders_with_other_names_are_no_checkpoints(run):
    for name in (
        "00000009",
        "00000010",
        "100000000",
        "99999999",
        "",
        "²²²",
        "٣",
        "5",
        "000000011",
        "1_00000000",
    ):
        (run / f"checkpoints/step-{name}").mkdir(parents=True)
    (run / "checkpoints/step-00000012.corrupt").mkdir()
    assert saved_steps(run) == [9, 10, 99999999, 100000000]
