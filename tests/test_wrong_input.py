"""The user's mistakes: exit code 2, one `error:` line that names the field and the hint, no traceback, nothing changed.

Mistakes that the configuration finds are in test_config.py, those that the data's reader finds in test_shards.py. Here
one process runs the real scripts in turn.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import expect_error, expect_mistake, run_script, run_scripts, snapshot
from faults.mutations import check_told
from ranks import run_ranks
from runs import built, edit_manifest, training_config

from gpt2_ddp.checkpoint.checkpoint import find_checkpoint
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import ReportConfig, StatusConfig
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.reports.report import report
from gpt2_ddp.reports.status import show_status
from gpt2_ddp.tasks import pretraining
from gpt2_ddp.tasks.pretraining import missing_data

Case = tuple[str, list[str], list[str]]
"""A script, its arguments, and words of its `error:` line."""


def expect_mistakes(folder: Path, cases: dict[str, Case]) -> None:
    before = snapshot(folder)
    (answers,) = run_ranks(run_scripts, 1, [(script, arguments) for script, arguments, _ in cases.values()])
    for (case, (*_, words)), (code, errors) in zip(cases.items(), answers, strict=True):
        assert (code, errors.count("error: ")) == (2, 1), (case, errors)
        line = errors.splitlines()[-1]
        assert line.startswith("error: "), (case, errors)
        assert all(word in line for word in words), (case, line)
        check_told(UserError.join([line.removeprefix("error: ")]))
    assert {name: digest for name, digest in snapshot(folder).items() if name in before} == before


LONG = "a" * 5000
FLAGS = {
    "a flag": (["--optim.lr", "nan"], "optim.lr = nan", "finite"),
    "a file": (["--config", "{place}/more.yaml"], "did you mean model.n_head?"),
    "cuda without cuda": (["--train.device", "cuda"], "train.device = cuda", "not available"),
    "init_from nowhere": (["--train.init_from", "/no/place"], "train.init_from = /no/place", "no intact checkpoint"),
    "missing data folder": (["--data.path", "/no/such/place"], "data = /no/such/place", "no such folder"),
    "missing recipe": (["--data.path", "/none", "--data.prepare", "no.yaml"], "data.prepare = no.yaml", "No such file"),
    "long run_name": (["--run_name", LONG],), "long output_dir": (["--output_dir", LONG],),
    "a file as data.path": (["--data.path", "{place}/config.yaml"],),
    "a pipe as output_dir": (["--output_dir", "{place}/pipe"],),
    "a loop of links": (["--data.path", "{place}/loop", "--data.prepare", "configs/data_stdlib.yaml"],),
}  # fmt: skip
LENET = ["--config", "configs/jobs/cifar100_lenet.yaml"]
JOBS: dict[str, Case] = {
    "model": ("train_classifier", ["--model.name", "vgg"], ["model.name = vgg"]),
    "clusters": ("train_classifier", ["--config", "mlp_clusters.yaml", "--data.path", "x"], ["is for images; set"]),
    "no images": ("train_classifier", [*LENET, "--data.path", "/no/such"], ["data.path"]),
    "no GPU": ("train_classifier", ["--config", "configs/jobs/cifar100_resnet18.yaml", "--model.sync_batchnorm"],
     ["model.sync"]),
    "width": ("train_transformer", ["--model.n_embd", "13"], ["model.n_embd = 13"]),
    "batch": ("train_regression", ["--train.global_batch_size", "0"], ["train.global_batch_size = 0"]),
}  # fmt: skip


def test_flags_and_files(place):
    (place / "more.yaml").write_text("model: {n_heads: 1}")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    config = ["--config", str(place / "config.yaml")]
    cases: dict[str, Case] = {}
    for case, (arguments, *words) in FLAGS.items():
        cases[case] = ("train_gpt2", [*config, *(word.format(place=place) for word in arguments)], words)
    own = ["--output_dir", str(place / "jobs"), "--train.device", "cpu", "--train.mixed_precision", "no"]
    expect_mistakes(place, cases | {case: (name, [*flags, *own], words) for case, (name, flags, words) in JOBS.items()})
    assert not list((place / "jobs").glob("*"))


def edit(file: Path, offset: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


def too_large_id(data: Path) -> None:
    """The manifest agrees with the shard's bytes, so that only what they mean is wrong."""
    shard = data / "train_000001.bin"
    edit(shard, 1024, np.full(5000, 600, "<u2").tobytes())
    splits = json.loads((data / "manifest.json").read_text())["splits"]
    splits["train"][1]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    edit_manifest(data, splits=splits)


DATA: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "token id outside the vocabulary": (too_large_id, "train_000001.bin", "vocabulary"),
    "tokenizer missing": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer", "tokenizer.json"),
    "another tokenizer": (lambda data: edit_manifest(data, tokenizer="gpt2"), "tokenizer", "restore that file"),
    "unknown tokenizer": (lambda data: edit_manifest(data, tokenizer="gpt9"), "gpt9", "gpt2"),
}


def test_a_model_larger_than_the_free_memory(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "free_memory", lambda: 10**5)
    expect_error("model = 42,880 parameters: ", built, training_config(corpus, tmp_path))


def test_data(place):
    cases: dict[str, Case] = {}
    for case, (damage, *words) in DATA.items():
        damage(shutil.copytree(place / "data", place / case))
        arguments = ["--config", str(place / "config.yaml"), "--data.path", str(place / case)]
        cases[case] = ("train_gpt2", arguments, words)
    expect_mistakes(place, cases)


def test_damaged_data_stop_all_ranks(place):
    edit(place / "data/train_000001.bin", 5000, b"\x01\x01")  # rank 1 of 2 hashes the second shard
    arguments = ["--config", str(place / "config.yaml")]
    expect_mistake(place, "train_gpt2", arguments, "train_000001.bin", "SHA-256", world=2)


@pytest.fixture
def arguments(trained, tmp_path) -> list[str]:
    """Those that resume a copy of a run of ten steps."""
    shutil.copytree(trained, tmp_path / "run")
    return ["--config", str(tmp_path / "run/config.yaml"), "--output_dir", str(tmp_path), "--train.steps", "20"]


def test_resume_names_every_field_that_differs(arguments, tmp_path):
    changes = {
        "seed": ("5", "1337"),
        "model.n_layer": ("3", "2"),
        "model.dropout": ("0.5", "0.0"),
        "optim.lr": ("0.01", "0.003"),
        "optim.schedule": ("wsd", "cosine"),
        "optim.decay_steps": ("50", "10"),
        "train.global_batch_tokens": ("768", "384"),
    }
    more = [word for name, (value, _) in changes.items() for word in (f"--{name}", value)]
    ((code, errors),) = run_ranks(run_script, 1, "train_gpt2", arguments + more)
    assert code == 2
    lines = dict(line.removeprefix("error: ").split(": ", 1) for line in errors.splitlines())
    assert lines.keys() == {f"{name} = {value}" for name, (value, _) in changes.items()}
    for name, (value, before) in changes.items():
        assert f"started with {before}" in lines[f"{name} = {value}"]
        assert f"(--config {tmp_path}/run/config.yaml)" in lines[f"{name} = {value}"]


def test_runs_that_cannot_be_resumed_or_read(arguments, trained, tmp_path):
    manifest = json.loads((trained.parent / "data/manifest.json").read_text())
    data = shutil.copytree(trained.parent / "data", tmp_path / "data")
    edit_manifest(data, splits={"train": manifest["splits"]["train"]})
    shutil.copytree(trained, tmp_path / "damaged")
    damaged = str(tmp_path / "damaged/checkpoints/step-00000010")
    edit(Path(damaged, "model.safetensors"), 3000, b"\x01\x02\x03")
    gone = tmp_path.with_name(f"{tmp_path.name}-gone")  # its checkpoints are renamed
    for file in Path(shutil.copytree(trained, gone / "run")).glob("checkpoints/*/model.safetensors"):
        file.unlink()
    run, new = str(tmp_path / "run"), str(tmp_path / "new")
    cases: dict[str, Case] = {
        "none intact": ("train_gpt2", [*arguments, "--output_dir", str(gone)], ["none is intact"]),
        "other data": ("train_gpt2", [*arguments, "--data.path", str(data)], ["data.path", "its tokens differ"]),
        "evaluate": ("evaluate", ["--checkpoint", new], ["no intact checkpoint"]),
        "no split": ("evaluate", ["--checkpoint", run, "--split", "test"], ["split = test"]),
        "no data": ("evaluate", ["--checkpoint", run, "--data", "/no/such/place"], ["data = "]),
        "generate": ("generate", ["--checkpoint", new], ["no intact checkpoint"]),
        "damaged": ("generate", ["--checkpoint", damaged], ["model.safetensors", "SHA-256"]),
        "device": ("generate", ["--checkpoint", run, "--device", "cuda"], ["device = cuda"]),
        "report": ("report", ["--runs", new], ["no such folder"]),
        "verify_run": ("verify_run", ["--run", new], ["new"]),
        "source": ("prepare_data", ["--source", f"{new}/*.txt", "--output", new], ["source"]),
        "tokenizer": ("prepare_data", ["--source", f"{run}/*.yaml", "--tokenizer", "gpt9", "--output", new], ["gpt9"]),
        "a flag": ("evaluate", ["--batch_size", "0"], ["batch_size = 0"]),
    }
    expect_mistakes(tmp_path, cases)
    assert len(list(gone.glob("run/checkpoints/*.corrupt"))) == 2


def test_ranks_started_with_other_configurations(place):
    """Rank 1 has another seed: every rank would train on other windows."""
    answers = run_ranks(other_seed_on_rank_1, 2, ["--config", str(place / "config.yaml")])
    assert [code for code, _ in answers] == [2, 2]
    assert answers[0][1].splitlines()[-1] == "error: seed = 0: rank 1 has 1; give all ranks the same"


def other_seed_on_rank_1(arguments: list[str]) -> tuple[int, str]:
    return run_script("train_gpt2", [*arguments, "--seed", os.environ["RANK"]])


def test_text_and_shards_in_the_place_of_something_else(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "texts").mkdir()
    (place / "texts/my book.txt").write_text("text")
    (place / "data/raw").mkdir()
    for text, name in (("texts", "texts"), ("texts/my book.txt", "my book"), ("data/raw", "raw-tokens")):
        command = f"prepare_data.py --source '{text}' --output data/{name}"
        expect_error(command, read_manifest, Path(text))
        expect_error(command, missing_data, training_config(Path(text), place, {"data.prepare": "data_stdlib.yaml"}))
    for field in ("checkpoint", "train.init_from"):
        expect_error(f"{field} = data: holds token shards; name a run folder", find_checkpoint, Path("data"), field)
    for look, command in ((show_status, StatusConfig), (report, ReportConfig)):
        expect_error("runs = .*data: holds token shards; name a run", look, load(command, ["data"]))


def test_a_command_without_any_run_names_the_trainers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = "train_gpt2.py, train_classifier.py, train_regression.py and train_transformer.py make one"
    expect_error(f"runs = .*runs/stdlib: no such folder; name a run folder; {names}", report, ReportConfig())
    expect_error(f"runs = runs: no such folder; name a run folder; {names}", show_status, StatusConfig())
