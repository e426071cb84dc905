"""The user's mistakes: exit code 2, one `error:` line that names the field and the cure, no traceback, nothing changed.

Each case runs the real script, in a process of its own that has torch loaded already.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import expect_mistake, run_script
from ranks import run_ranks, start_ranks
from runs import edit_manifest, training_config

from gpt2_ddp.config.cli import dump


def train_arguments(place: Path, *more: str) -> list[str]:
    return ["--config", str(place / "config.yaml"), *more]


FLAGS = {
    "unknown flag": (["--optim.learning_rate", "1"], "--optim.learning_rate", "no such flag"),
    "unknown flag, near": (["--model.n_layr", "1"], "did you mean --model.n_layer?"),
    "unknown section": (["--optimizer.lr", "1"], "did you mean --optim.lr?"),
    "abbreviation": (["--model.n_lay", "2"], "--model.n_lay:", "no such flag"),
    "flag without value": (["--seed"], "--seed", "expected one argument"),
    "value without flag": (["12"], "12", "a value without a flag"),
    "text for int": (["--model.n_layer", "two"], "model.n_layer = two", "integer"),
    "fraction for int": (["--model.n_layer", "2.5"], "model.n_layer = 2.5", "integer"),
    "bool for int": (["--train.steps", "true"], "train.steps = true", "integer"),
    "text for float": (["--optim.lr", "fast"], "optim.lr = fast", "number"),
    "nan": (["--optim.lr", "nan"], "optim.lr = nan", "finite"),
    "infinity": (["--optim.lr", "inf"], "optim.lr = inf", "finite"),
    "negative lr": (["--optim.lr", "-1"], "optim.lr = -1", "greater than 0"),
    "zero lr": (["--optim.lr", "0"], "optim.lr = 0", "greater than 0"),
    "zero layers": (["--model.n_layer", "0"], "model.n_layer = 0", "greater than or equal to 1"),
    "dropout of 1": (["--model.dropout", "1"], "model.dropout = 1", "less than 1"),
    "betas out of range": (["--optim.betas", "0.9", "1.5"], "optim.betas", "less than 1"),
    "one beta": (["--optim.betas", "0.9"], "optim.betas", "2 values"),
    "unknown choice": (["--optim.schedule", "linear"], "optim.schedule = linear", "'cosine'"),
    "unknown optimizer": (["--optim.name", "sgd"], "optim.name = sgd", "'adamw'"),
    "unknown precision": (["--train.mixed_precision", "fp8"], "train.mixed_precision = fp8", "'bf16'"),
    "unknown device": (["--train.device", "tpu"], "train.device = tpu", "'cuda'"),
    "text for bool": (["--train.deterministic", "maybe"], "train.deterministic = maybe", "boolean"),
    "unknown way to compile": (["--train.compile", "maybe"], "train.compile = maybe", "'blocks'"),
    "negative seed": (["--seed", "-1"], "seed = -1", "greater than or equal to 0"),
    "huge seed": (["--seed", str(2**63)], f"seed = {2**63}", "less than"),
    "zero keep_last": (["--checkpoint.keep_last", "0"], "checkpoint.keep_last = 0"),
    "zero eval.every": (["--eval.every", "0"], "eval.every = 0"),
    "run_name with a slash": (["--run_name", "../x"], "run_name = ../x"),
    "empty run_name": (["--run_name", ""], "run_name"),
    "no steps": (["--train.steps", "null"], "train.steps = None", "train.epochs"),
    "heads do not divide": (["--model.n_head", "3"], "model.n_embd = 32", "multiple of model.n_head (3)"),
    "batch not of blocks": (["--train.global_batch_tokens", "100"], "train.global_batch_tokens = 100", "like 96"),
    "min_lr above lr": (["--optim.min_lr", "1"], "optim.min_lr = 1.0", "at most optim.lr"),
    "warmup after decay": (["--optim.decay_steps", "4"], "optim.warmup_steps = 5", "less than"),
    "missing config file": (["--config", "/no/such/place.yaml"], "--config = /no/such/place.yaml", "No such file"),
    "no such tracker": (["--tracking.log_with", "mlflow"], "tracking.log_with = mlflow"),
    "cuda without cuda": (["--train.device", "cuda"], "train.device = cuda", "not available"),
    "fp16 on the CPU": (["--train.mixed_precision", "fp16"], "train.mixed_precision = fp16", "CUDA"),
    "init_from nowhere": (
        ["--train.init_from", "/no/such/place"],
        "train.init_from = /no/such/place",
        "no intact checkpoint",
    ),
    "missing data folder": (["--data.path", "/no/such/place"], "data = /no/such/place", "is not a folder"),
    "missing recipe": (["--data.path", "/tmp/none", "--data.prepare", "no.yaml"], "--config = no.yaml", "No such file"),
    "recipe for another folder": (
        ["--data.path", "/tmp/none", "--data.prepare", "configs/data_stdlib.yaml"],
        "data.path = /tmp/none",
        "writes to data/stdlib",
    ),
    "a file as output_dir": (["--output_dir", "/dev/null"], "output_dir", "cannot be written"),
    "block larger than the split": (
        ["--model.block_size", "99999", "--train.global_batch_tokens", "99999"],
        "data.path",
        "a window needs 100000 tokens",
    ),
}


@pytest.mark.parametrize("case", FLAGS)
def test_flags(place, case):
    arguments, *words = FLAGS[case]
    expect_mistake(place, "train_gpt2", train_arguments(place, *arguments), *words)


FILES = {
    "unknown key": ("optim: {learning_rate: 1}", "optim.learning_rate = 1", "no such key"),
    "unknown key, near": ("model: {n_heads: 1}", "did you mean model.n_head?"),
    "unknown section": ("modell: {n_head: 1}", "did you mean model?"),
    "value for a section": ("train: 5", "train = 5", "section of keys"),
    "bool for int": ("seed: true", "seed = True", "not true or false"),
    "number for text": ("data: {path: 5}", "data.path = 5", "string"),
    "nan": ("optim: {lr: .nan}", "optim.lr = nan", "finite"),
    "list": ("[1, 2]", "sections and keys"),
    "not yaml": ("a: [", "not valid YAML"),
    "not text": (b"\xff\xfe\x00", "--config"),
}


@pytest.mark.parametrize("case", FILES)
def test_config_files(place, case):
    text, *words = FILES[case]
    file = place / "more.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    expect_mistake(place, "train_gpt2", train_arguments(place, "--config", str(file)), *words)


def shard(place: Path) -> Path:
    return place / "data/train_000001.bin"


def edit(file: Path, offset: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(data)] = data
    file.write_bytes(content)


def claim_hash(place: Path) -> None:
    """Makes the manifest agree with the shard's bytes, so that only what they mean is wrong."""
    manifest = json.loads((place / "data/manifest.json").read_text())
    manifest["splits"]["train"][1]["sha256"] = hashlib.sha256(shard(place).read_bytes()).hexdigest()
    edit_manifest(place / "data", splits=manifest["splits"])


def too_large_id(place: Path) -> None:
    edit(shard(place), 1024 + 2 * 100, np.array([600], "<u2").tobytes())
    claim_hash(place)


DATA: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "shard missing": (lambda place: shard(place).unlink(), "train_000001.bin", "missing"),
    "shard empty": (lambda place: shard(place).write_bytes(b""), "train_000001.bin", "bytes"),
    "shard truncated": (lambda place: shard(place).write_bytes(shard(place).read_bytes()[:-2]), "_000001.bin", "bytes"),
    "bit flipped": (lambda place: edit(shard(place), 5000, b"\x01\x01"), "train_000001.bin", "SHA-256"),
    "wrong magic": (lambda place: edit(shard(place), 0, b"\x00"), "train_000001.bin", "magic"),
    "wrong version": (lambda place: edit(shard(place), 4, b"\x09"), "train_000001.bin", "version"),
    "token id outside the vocabulary": (too_large_id, "train_000001.bin", "vocabulary"),
    "manifest missing": (lambda place: (place / "data/manifest.json").unlink(), "data", "manifest.json"),
    "manifest torn": (lambda place: (place / "data/manifest.json").write_text('{"vers'), "manifest.json", "again"),
    "manifest of another version": (lambda place: edit_manifest(place / "data", version=9), "version", "manifest.json"),
    "manifest changed": (lambda place: edit(place / "data/manifest.json", 14, b"1"), "manifest.json", "sha256 differs"),
    "another vocabulary": (lambda place: edit_manifest(place / "data", vocab_size=500), "vocab_size 500", "has 512"),
    "another end-of-text": (lambda place: edit_manifest(place / "data", eot=5), "eot 5", "has 0"),
    "no training split": (lambda place: edit_manifest(place / "data", splits={}), "manifest.json", "prepare"),
    "tokenizer missing": (lambda place: (place / "data/tokenizer.json").unlink(), "tokenizer", "tokenizer.json"),
    "another tokenizer": (
        lambda place: edit_manifest(place / "data", tokenizer="gpt2"),
        "tokenizer",
        "put that one back",
    ),
    "unknown tokenizer": (lambda place: edit_manifest(place / "data", tokenizer="gpt9"), "gpt9", "gpt2"),
}


@pytest.mark.parametrize("case", DATA)
def test_data(place, case):
    damage, *words = DATA[case]
    damage(place)
    expect_mistake(place, "train_gpt2", train_arguments(place), *words)


def test_damaged_data_stop_all_ranks(place):
    edit(shard(place), 5000, b"\x01\x01")  # the second shard: rank 1 of 2 is the one that hashes it
    expect_mistake(place, "train_gpt2", train_arguments(place), "train_000001.bin", "SHA-256", world=2)


def test_processes_that_do_not_divide_the_batch(place):
    arguments = train_arguments(place, "--train.global_batch_tokens", "256")
    expect_mistake(place, "train_gpt2", arguments, "processes = 3", "use 1, 2, 4, 8 processes", world=3)


@pytest.fixture(scope="module")
def finished(corpus, tmp_path_factory) -> Path:
    """A finished run of ten steps, to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(corpus, folder / "data")
    changes = {"train.steps": 10, "checkpoint.keep_last": 5}
    (folder / "config.yaml").write_text(dump(training_config(folder / "data", folder / "runs", changes)))
    ((code, errors),) = run_ranks(run_script, 1, "train_gpt2", ["--config", str(folder / "config.yaml")])
    assert code == 0, errors
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    config = (finished / "config.yaml").read_text().replace(str(finished), str(tmp_path))
    (tmp_path / "config.yaml").write_text(config)
    return tmp_path


RESUME = {
    "model": (["--model.n_layer", "3"], "model.n_layer = 3", "started with 2"),
    "dropout": (["--model.dropout", "0.5"], "model.dropout = 0.5", "started with 0.0"),
    "seed": (["--seed", "5"], "seed = 5", "started with 1337"),
    "optimizer": (["--optim.lr", "0.01"], "optim.lr = 0.01", "started with 0.003"),
    "schedule": (["--optim.schedule", "wsd"], "optim.schedule = wsd", "started with cosine"),
    "schedule's length": (["--optim.decay_steps", "50"], "optim.decay_steps = 50", "started with 10"),
    "global batch": (["--train.global_batch_tokens", "384"], "train.global_batch_tokens = 384", "started with 768"),
    "fresh": (["--fresh"], "fresh", "nothing is overwritten"),
}


@pytest.mark.parametrize("case", RESUME)
def test_resume_with_something_else(run, case):
    arguments, *words = RESUME[case]
    expect_mistake(run, "train_gpt2", train_arguments(run, "--train.steps", "20", *arguments), *words)


def test_resume_names_every_field_that_differs(run):
    arguments = train_arguments(run, "--seed", "5", "--optim.lr", "0.01", "--model.bias", "false")
    ((code, errors),) = run_ranks(run_script, 1, "train_gpt2", arguments)
    assert code == 2
    assert [line.split(" = ")[0] for line in errors.splitlines()] == [
        "error: seed",
        "error: model.bias",
        "error: optim.lr",
    ]


def test_resume_on_other_data(run):
    edit_manifest(
        run / "data", splits={"train": json.loads((run / "data/manifest.json").read_text())["splits"]["train"]}
    )
    expect_mistake(run, "train_gpt2", train_arguments(run, "--train.steps", "20"), "data.path", "not the ones")


def test_resume_with_no_intact_checkpoint(run):
    for file in run.glob("runs/run/checkpoints/*/model.safetensors"):
        file.write_bytes(b"")
    arguments = train_arguments(run, "--train.steps", "20")
    ((code, errors),) = run_ranks(run_script, 1, "train_gpt2", arguments)
    assert code == 2
    assert [line for line in errors.splitlines() if line.startswith("error:")] == [errors.splitlines()[-1]]
    assert "none is intact" in errors
    assert len(list(run.glob("runs/run/checkpoints/*.corrupt"))) == 2


OTHERS = {
    "evaluate: no checkpoint": ("evaluate", ["--checkpoint", "{run}/nothing"], "no intact checkpoint"),
    "evaluate: no split": ("evaluate", ["--checkpoint", "{run}/runs/run", "--split", "test"], "split = test"),
    "evaluate: zero batch": ("evaluate", ["--batch_size", "0"], "batch_size = 0"),
    "evaluate: no data": ("evaluate", ["--checkpoint", "{run}/runs/run", "--data", "/no/such/place"], "data = "),
    "generate: no checkpoint": ("generate", ["--checkpoint", "{run}/nothing"], "no intact checkpoint"),
    "generate: negative temperature": ("generate", ["--temperature", "-1"], "temperature = -1"),
    "generate: top_p of 0": ("generate", ["--top_p", "0"], "top_p = 0"),
    "generate: no device": ("generate", ["--checkpoint", "{run}/runs/run", "--device", "cuda"], "device = cuda"),
    "report: no run": ("report", ["--runs", "{run}/nothing"], "no such folder"),
    "verify_run: no run": ("verify_run", ["--run", "{run}/nothing"], "nothing"),
    "prepare: no source": ("prepare_data", ["--source", "{run}/none/*.txt", "--output", "{run}/new"], "source"),
    "prepare: vocabulary too small": ("prepare_data", ["--vocab_size", "200"], "vocab_size = 200"),
    "prepare: unknown tokenizer": (
        "prepare_data",
        ["--tokenizer", "gpt9", "--output", "{run}/new"],
        "gpt9",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_scripts(run, case):
    script, arguments, *words = OTHERS[case]
    expect_mistake(run, script, [word.format(run=run) for word in arguments], *words)


def test_a_damaged_checkpoint_is_named(run):
    edit(run / "runs/run/checkpoints/step-00000010/model.safetensors", 3000, b"\x01\x02\x03")
    checkpoint = str(run / "runs/run/checkpoints/step-00000010")
    expect_mistake(run, "generate", ["--checkpoint", checkpoint], "model.safetensors", "SHA-256")


def test_ranks_started_with_other_configurations(place):
    """Rank 1 has another seed: every rank would train on other windows, in silence."""
    started = start_ranks(_other_seed_on_rank_1, 2, train_arguments(place))
    answers = [receiver.recv()[0] for _, receiver in started if receiver.poll(60)]
    for process, _ in started:
        process.join(10)
    assert [code for code, _ in answers] == [2, 2]
    assert answers[0][1].splitlines()[-1] == "error: seed = 0: rank 1 has 1; give all ranks the same"


def _other_seed_on_rank_1(arguments: list[str]) -> tuple[int, str]:
    import os

    return run_script("train_gpt2", [*arguments, "--seed", os.environ["RANK"]])
