"""Checkpoints: what is written is what is read; what was damaged is found; what is kept is what should be."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import start_ranks

from gpt2_ddp.config.training import ModelConfig, OptimConfig
from gpt2_ddp.errors import UserError
from gpt2_ddp.model.gpt import GPT
from gpt2_ddp.model.optim import build_optimizer
from gpt2_ddp.run.checkpoint import (
    CheckpointFolder,
    Damaged,
    find_checkpoint,
    list_checkpoints,
    load_optimizer,
    load_weights,
    verify,
)

TINY = ModelConfig(n_layer=1, n_head=2, n_embd=8, block_size=4)


def trained_model() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(TINY, 100)
    optimizer = build_optimizer(model, OptimConfig())
    tokens = torch.arange(8).view(2, 4)
    model(tokens, tokens).backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int, keep_last: int = 3, val_loss: float | None = None) -> Path:
    checkpoints = CheckpointFolder(folder, keep_last)
    return checkpoints.save(*trained_model(), {"step": step, "val_loss": val_loss}, "seed: 1\n")


def steps(folder: Path) -> list[int]:
    return [int(place.name[5:]) for place in list_checkpoints(folder)]


def test_weights_and_optimizer_come_back_bitwise(tmp_path):
    model, optimizer = trained_model()
    place = CheckpointFolder(tmp_path).save(model, optimizer, {"step": 3}, "seed: 1\n")
    other = GPT(TINY, 100)
    other_optimizer = build_optimizer(other, OptimConfig())
    load_weights(place, other)
    load_optimizer(place, other, other_optimizer)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert optimizer.state[a].keys() == other_optimizer.state[b].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(optimizer.state[a][key], other_optimizer.state[b][key]) for key in optimizer.state[a])
    assert verify(place)["step"] == 3
    assert not any(b"cpickle" in file.read_bytes() or file.suffix in (".pt", ".pkl") for file in place.iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "config.yaml"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_every_damage_is_found_and_named(tmp_path, name, damage):
    place = save(tmp_path, 1)
    file = place / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(Damaged, match=name):
        verify(place)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": {"model.safetensors": 3}}', '{"version": 1, "files": {}}'])
def test_a_broken_manifest_is_damage(tmp_path, text):
    place = save(tmp_path, 1)
    (place / "manifest.json").write_text(text)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        verify(place)


def test_falls_back_to_the_newest_intact_and_says_why(tmp_path, capsys):
    save(tmp_path, 1), save(tmp_path, 2), save(tmp_path, 3)
    (tmp_path / "step-00000003/model.safetensors").write_bytes(b"x")
    place, state = CheckpointFolder(tmp_path).newest_intact()
    assert (place.name, state["step"]) == ("step-00000002", 2)
    warning = capsys.readouterr().err
    assert "step-00000003/model.safetensors" in warning
    assert "bytes instead of" in warning
    assert (tmp_path / "step-00000003.corrupt").is_dir()
    assert steps(tmp_path) == [1, 2]


def test_refuses_to_start_from_scratch_when_none_is_intact(tmp_path):
    assert CheckpointFolder(tmp_path).newest_intact() is None
    save(tmp_path, 1)
    (tmp_path / "step-00000001/state.json").unlink()
    for _ in range(2):  # the second time, all that is left is called *.corrupt
        with pytest.raises(UserError, match="none is intact"):
            CheckpointFolder(tmp_path).newest_intact()


def test_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = CheckpointFolder(tmp_path, keep_last=2)
    for step, val_loss in ((1, 3.0), (2, 2.0), (3, None), (4, 2.5), (5, 2.6)):
        checkpoints.save(*trained_model(), {"step": step, "val_loss": val_loss}, "")
    assert steps(tmp_path) == [2, 4, 5]


def test_a_damaged_one_does_not_count_and_is_not_removed(tmp_path, capsys):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003/state.json").write_text("{}")
    save(tmp_path, 4, keep_last=2)
    assert steps(tmp_path) == [2, 3, 4]
    assert "step-00000003" in capsys.readouterr().err


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step-00000002.tmp").mkdir()
    CheckpointFolder(tmp_path).clean()
    assert [place.name for place in tmp_path.iterdir()] == ["step-00000001"]


def save_for_ever(folder: Path) -> None:
    model, optimizer = trained_model()
    checkpoints = CheckpointFolder(folder, keep_last=1)
    step = 0
    while True:
        step += 1
        checkpoints.save(model, optimizer, {"step": step}, "seed: 1\n")


@pytest.mark.parametrize("attempt", range(4))
def test_killed_while_saving_an_intact_one_is_left(tmp_path, attempt):
    """keep_last is 1: the old one may go only when the new one is there."""
    ((process, _),) = start_ranks(save_for_ever, 1, tmp_path)
    while not steps(tmp_path):
        time.sleep(0.01)
    time.sleep(0.1 + 0.037 * attempt)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    found = list_checkpoints(tmp_path)
    assert found
    assert all(verify(place)["step"] == int(place.name[5:]) for place in found)


def test_find_checkpoint_takes_a_run_or_a_checkpoint(tmp_path):
    first, second = save(tmp_path / "checkpoints", 1), save(tmp_path / "checkpoints", 2)
    assert find_checkpoint(tmp_path) == second
    assert find_checkpoint(first) == first
    (second / "state.json").write_text("{}")
    assert find_checkpoint(tmp_path) == first
    with pytest.raises(UserError, match=r"state\.json"):
        find_checkpoint(second)
    shutil.rmtree(first)
    with pytest.raises(UserError, match="no intact checkpoint"):
        find_checkpoint(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path):
    place = save(tmp_path, 1)
    with pytest.raises(UserError, match=r"does not fit .*size mismatch"):
        load_weights(place, GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16, block_size=4), 100))


def test_the_manifest_lists_every_file(tmp_path):
    place = save(tmp_path, 1)
    listed = json.loads((place / "manifest.json").read_text())["files"]
    assert {file.name for file in place.iterdir()} == {*listed, "manifest.json"}
