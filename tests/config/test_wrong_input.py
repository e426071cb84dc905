"""The user's mistakes: exit code 2, one `error:` line that names the field and the hint, no
traceback, nothing changed.

Those that the data's reader finds are in test_shards.py. Here one process runs the real scripts in
turn.
"""

import hashlib
import os
import re
import shlex
import shutil
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import expect_error, last_of_each, run_script, snapshot
from faults.mutations import check_told
from ranks import run_ranks
from runs import built, edit_manifest, spoil, training_config

from gpt2_ddp.checkpoint.verify import find_checkpoint, newest_intact
from gpt2_ddp.config.cli import load
from gpt2_ddp.config.tools import ImportConfig, ReportConfig, StatusConfig, VerifyConfig
from gpt2_ddp.config.training import TrainingConfig
from gpt2_ddp.data.fetch import missing_data
from gpt2_ddp.data.manifest import read_manifest
from gpt2_ddp.errors import UserError
from gpt2_ddp.export.imports import import_hf
from gpt2_ddp.files import read_json
from gpt2_ddp.reports.report import report
from gpt2_ddp.reports.status import show_status
from gpt2_ddp.reports.verify import verify_run
from gpt2_ddp.script import run_command
from gpt2_ddp.tasks import pretraining
from gpt2_ddp.tasks.pretraining import make_pretraining
from gpt2_ddp.training import loop
from gpt2_ddp.training.initial_weights import find_model

COMMANDS = [
    ("train_gpt2 --optim.lr nan", "optim.lr"),
    ("train_gpt2 --config PLACE/more.yaml", "model.n_heads", "model.n_head"),
    ("train_gpt2 --train.device cuda", "train.device"),
    ("train_gpt2 --train.init_from /no/place", "train.init_from"),
    ("train_gpt2 --data.path /no/such/place", "data.path"),
    ("train_gpt2 --data.path /none --data.prepare no.yaml", "data.prepare"),
    ("train_gpt2 --run_name LONG", "output_dir"),
    ("train_gpt2 --output_dir LONG", "output_dir"),
    ("train_gpt2 --data.path PLACE/config.yaml", "data.path"),
    ("train_gpt2 --output_dir PLACE/pipe", "output_dir"),
    ("train_gpt2 --data.path PLACE/loop --data.prepare configs/data_stdlib.yaml", "data.path"),
    ("train_gpt2 --model.n_embd 33", "model.n_embd"),
    ("train_gpt2 --model.n_kv_head 5", "model.n_kv_head"),
    ("train_gpt2 --model.architecture llama --model.n_kv_head 5", "model.n_kv_head"),
    ("train_gpt2 --model.architecture llama --model.n_embd 34", "model.n_embd"),
    ("train_gpt2 --model.architecture mamba", "model.architecture"),
    ("train_gpt2 --train.global_batch_tokens 1500", "train.global_batch_tokens"),
    ("train_gpt2 --optim.lr 1e-5", "optim.min_lr"),
    ("train_gpt2 --optim.decay_steps 2", "optim.warmup_steps"),
    ("train_gpt2 --optim.muon_lr 0.02", "optim.muon_lr"),
    ("train_gpt2 --train.steps null", "train.steps"),
    ("train_gpt2 --run_name ../x", "run_name"),
    ("train_gpt2 --run_name 'my run'", "run_name"),
    ("train_gpt2 --run_name ''", "run_name"),
    ("train_gpt2 --tracking.log_with wandb mlflow", "tracking.log_with"),
    ("train_gpt2 --seed -1", "seed"),
    ("train_gpt2 --seed", "seed"),
    ("train_gpt2 12 texts/a.txt", "command line"),
    ("train_gpt2 --model.n_layer 0", "model.n_layer"),
    ("train_gpt2 --model.n_layer 2.5", "model.n_layer"),
    ("train_gpt2 --model.n_layer 1000000000", "model.n_layer"),
    ("train_gpt2 --model.n_embd 99999999996", "model.n_embd"),
    ("train_gpt2 --model.n_inner 1000000000", "model.n_inner"),
    ("train_gpt2 --train.global_batch_tokens 4611686018427387904", "train.global_batch_tokens"),
    ("train_gpt2 --train.epochs 1e308", "train.epochs"),
    ("train_gpt2 --launch.replicas 2", "launch.replicas"),
    ("train_gpt2 --launch.parallel fsdp --launch.replicas 2", "launch.replicas"),
    ("train_gpt2 --launch.parallel fsdp --train.compile model", "train.compile"),
    ("train_gpt2 --optim.name sgd", "optim.name"),
    ("train_gpt2 --optim.betas 0.9 1.0", "optim.betas"),
    ("train_gpt2 --optim.betas 0.9", "optim.betas"),
    ("train_gpt2 --optim.lr fast", "optim.lr"),
    ("train_gpt2 --optim.lr -1e-3", "optim.lr"),
    ("train_gpt2 --train.epochs nan", "train.epochs"),
    ("train_gpt2 --train.micro_batch_size true", "train.micro_batch_size"),
    ("train_gpt2 --train.compile maybe", "train.compile"),
    ("train_gpt2 --checkpoint.background maybe", "checkpoint.background"),
    ("train_gpt2 --checkpoint.seconds 0", "checkpoint.seconds", "above 0"),
    ("train_gpt2 --checkpoint.seconds -60", "checkpoint.seconds", "above 0"),
    ("train_gpt2 --checkpoint.seconds 1m", "checkpoint.seconds"),
    ("train_gpt2 --checkpoint.overhead 0", "checkpoint.overhead", "above 0"),
    ("train_gpt2 --checkpoint.overhead 2.5", "checkpoint.overhead", "below 1"),
    ("train_gpt2 --eval.tokens 0", "eval.tokens"),
    ("train_gpt2 --eval.tokens Auto", "eval.tokens"),
    ("train_gpt2 --config missing.yaml", "--config"),
    ("train_gpt2 --config PLACE", "--config"),
    ("train_gpt2 --config LONG", "--config"),
    ("train_gpt2 --config=--", "--config"),
    ("train_gpt2 --config PLACE/binary.yaml", "--config"),
    ("train_gpt2 --optim 3", "optim"),
    ("train_gpt2 --model.n_layers 3", "model.n_layers", "model.n_layer"),
    ("train_gpt2 --lr 3", "lr", "optim.lr"),
    ("train_gpt2 --train.lr 3", "train.lr", "optim.lr"),
    ("train_gpt2 --train.steps 99999999999999999999", "train.steps"),
    ("train_gpt2 --data.path a b c --data.weights 1 2", "data.weights"),
    ("train_gpt2 --data.path a b c --data.weights 1 -1 2", "data.weights"),
    ("train_gpt2 --data.path a b c --data.weights 0 0 0", "data.weights"),
    ("train_gpt2 --data.path a b c --data.weights 1 1 nan", "data.weights"),
    ("train_gpt2 --data.path a b c --data.weights 1e308 1e308 1e308", "data.weights"),
    ("train_gpt2 --data.path a b c --data.phases 32000:1:1", "data.phases, number 1"),
    ("train_gpt2 --data.path a b c --data.phases 32000", "data.phases, number 1"),
    ("train_gpt2 --data.path a b c --data.phases 0:1:1:1", "data.phases"),
    ("train_gpt2 --data.path a b c --data.phases 32000:1:1:1 31000:1:1:1", "data.phases"),
    ("train_gpt2 --data.path a b a/", "data.path"),
    ("train_gpt2 --data.path MANY", "data.path"),
    (
        "train_gpt2 --train.branch_from PLACE --train.init_from runs/x",
        "train.branch_from",
        "remove one of the two",
    ),
    ("train_gpt2 --train.branch_from /no/such/run", "train.branch_from"),
    (
        "PET_NNODES=2 PET_NPROC_PER_NODE=1 PET_NODE_RANK=0 train_gpt2",
        "processes",
        "torchrun --nproc_per_node 2",
    ),
    (
        "SLURM_STEP_NUM_TASKS=2 SLURM_PROCID=0 train_gpt2",
        "processes",
        "torchrun --nproc_per_node 2",
    ),
    ("OMPI_COMM_WORLD_SIZE=2 train_gpt2", "OMPI_COMM_WORLD_SIZE", "use torchrun"),
    ("ACCELERATE_USE_DEEPSPEED=true train_gpt2", "ACCELERATE_USE_DEEPSPEED"),
    ("ACCELERATE_DYNAMO_BACKEND=INDUCTOR train_gpt2", "ACCELERATE_DYNAMO_BACKEND"),
    ("ACCELERATE_MIXED_PRECISION=fp16 train_gpt2", "train.mixed_precision"),
    ("WORLD_SIZE=two RANK=two LOCAL_WORLD_SIZE=two PET_NNODES=two train_gpt2", "WORLD_SIZE"),
    ("ACCELERATE_USE_FSDP=true FSDP_VERSION=1 train_gpt2", "FSDP_VERSION"),
    ("ACCELERATE_USE_FSDP=true FSDP_OFFLOAD_PARAMS=true train_gpt2", "FSDP_OFFLOAD_PARAMS"),
    ("ACCELERATE_USE_FSDP=true FSDP_AUTO_WRAP_POLICY=NO_WRAP train_gpt2", "FSDP_AUTO_WRAP_POLICY"),
    (
        "ACCELERATE_USE_FSDP=true FSDP_ACTIVATION_CHECKPOINTING=true train_gpt2",
        "FSDP_ACTIVATION_CHECKPOINTING",
    ),
    ("train_classifier --model.name vgg", "model.name"),
    ("train_classifier --data.name images --model.name lenet", "data.path"),
    ("train_classifier --data.name me/mine --data.path x --model.name lenet", "data.path"),
    ("train_classifier --data.name cifar100 --model.name mlp", "model.name"),
    ("train_classifier --model.name lenet", "model.name"),
    ("train_classifier --model.sync_batchnorm", "model.sync_batchnorm"),
    ("train_classifier --model.hidden 5 0", "model.hidden"),
    ("train_classifier --config configs/jobs/mlp_clusters.yaml --data.path x", "data.path"),
    (
        "train_classifier --config configs/jobs/cifar100_lenet.yaml --data.path /no/such",
        "data.path",
    ),
    (
        "train_classifier --data.name cifar100 --model.name resnet18 --model.sync_batchnorm",
        "model.sync_batchnorm",
    ),
    ("train_classifier --tracking.log_every 0", "tracking.log_every", "50"),
    ("train_transformer --model.n_embd 13", "model.n_embd"),
    ("train_regression --train.global_batch_size 0", "train.global_batch_size"),
    ("train_regression --launch.backend nccl", "launch.backend"),
    ("train_regression --train.mixed_precision fp16", "train.mixed_precision"),
    ("train_regression --bogus 1", "bogus"),
]
"""Variables and a command, the field of its error, and what the hint has to name."""

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20)
)
FILES = {
    BOMB: "--config",
    BOMB.replace("[", "{<<: [").replace("]", "]}"): "--config",
    "seed: " + "[" * 1000 + "]" * 1000: "--config",
    "".join(" " * i + "a:\n" for i in range(350)): "--config",
    "seed: 0x" + "f" * 5000: "seed",
    "seed: !!float 1" + ":1" * 999 + ".5": "seed",
    "seed: " + "[" * 60 + "]" * 60: "--config",
    "seed: " + "1" * 400: "--config",
    "train: 3": "train",
    "- a\n- b": "--config",
    "a: [": "--config",
    "data: {path: 5}": "data.path",
    "data: {path: []}": "data.path",
    'data: {path: [a, b, c], phases: ["8000"]}': "data.phases, number 1",
    "optim: {weight_decay: .nan}": "optim.weight_decay",
    "model: &a {n_layer: *a}": "--config",
    "seed: 1\nseed: 2": "--config",
    "model: {n_layer: 1}\nmodel: {n_head: 2}": "--config",
    "seed: 1\n---\nseed: 2": "--config",
    "seed: !!int x": "seed",
    "train: {compile: !!bool x}": "train.compile",
    "? [1, 2]\n: 3": "--config",
    "seed: !!python/object/apply:os.getpid []": "seed",
    "model: !!map [1]": "model",
    "1: 2": "1",
    "1: 2\n3: 4": "--config",
    "model: {2: 3}": "model",
    "optim.lrs: 0.1": "optim.lrs",
    "model: {n_layer: 1:30}": "model.n_layer",
    "seed: 2026-01-02": "seed",
    "optim: {lr: 1:30.5}": "optim.lr",
    "seed: [[2.5]]": "seed",
    "seed: 0o17": "seed",
    "eval: {tokens: 1e29}": "eval.tokens",
    "eval: {tokens: 1.0e+29}": "eval.tokens",
    "<<: {seed: 1}": "<<",
    "model: {n_layers: 3}": "model.n_layers",
    "optimizer: {lr: 1}": "optimizer",
    "optim: {betas: [false, false]}": "optim.betas",
    "train: {steps: true}": "train.steps",
    "optim: {lr: true, min_lr: 0}": "optim.lr",
    "eval: {tokens: false}": "eval.tokens",
    "train: {max_minutes: true}": "train.max_minutes",
    "seed: true": "seed",
}
"""Text of a configuration, and the field of its error."""


def run_commands(commands, flags):
    """What each command answers, with its variables, in turn in this process; `flags` come first; a
    command replaces those that it has."""
    found = []
    before = dict(os.environ)
    for words in map(shlex.split, commands):
        count = next(number for number, word in enumerate(words) if "=" not in word)
        os.environ.update(word.split("=", 1) for word in words[:count])
        script, *own = words[count:]
        found.append(
            run_script(script, last_of_each((flags if script == "train_gpt2" else []) + own))
        )
        os.environ.clear()
        os.environ.update(before)
    return found


def expect_fields(folder, commands, *flags):
    """Each command ends with 2 and one error line of its field, which
    names what follows the field. No file of the folder is touched. Of
    another trainer than train_gpt2, the outputs are in the folder too."""
    before = snapshot(folder)
    (answers,) = run_ranks(run_commands, 1, [command for command, *_ in commands], [*flags])
    for (command, field, *near), (code, errors) in zip(commands, answers, strict=True):
        lines = [
            line.removeprefix("error: ")
            for line in errors.splitlines()
            if line.startswith("error: ")
        ]
        assert (code, len(lines), "Traceback" in errors) == (2, 1, False), (command, errors)
        assert re.match(rf"{re.escape(field)}(\.\d)?( =|:)", lines[0]), (command, lines)
        assert all(name in lines[0] for name in near), (command, lines)
        check_told(UserError.join(lines))
    assert {name: digest for name, digest in snapshot(folder).items() if name in before} == before


def test_commands_and_files(place):
    (place / "more.yaml").write_text("model: {n_heads: 1}")
    (place / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    os.mkfifo(place / "pipe")
    (place / "loop").symlink_to("loop")
    stand_for = {"PLACE": str(place), "LONG": "a" * 5000, "MANY": " ".join(map(str, range(33)))}
    commands = []
    for command, *expected in COMMANDS:
        for name, text in stand_for.items():
            command = command.replace(name, text)
        commands.append((command, *expected))
    for number, (text, field) in enumerate(FILES.items()):
        (place / f"{number}.yaml").write_text(text)
        commands.append((f"train_gpt2 --config {place}/{number}.yaml", field))
    expect_fields(place, commands, "--config", str(place / "config.yaml"))


def too_large_id(data):
    """The manifest agrees with the shard's bytes, so that only what they mean is wrong."""
    shard = data / "train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:1024] + np.full(20_000, 600, "<u2").tobytes())
    splits = read_json(data / "manifest.json")["splits"]
    splits["train"][1]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    edit_manifest(data, splits=splits)


DATA = {
    "id": (too_large_id, "shard"),
    "missing": (lambda data: (data / "tokenizer.json").unlink(), "tokenizer"),
    "other": (lambda data: edit_manifest(data, tokenizer="gpt2"), "data.path"),
    "unknown": (lambda data: edit_manifest(data, tokenizer="gpt9"), "tokenizer"),
}


def test_a_model_larger_than_the_free_memory(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(pretraining, "free_memory", lambda: 10**5)
    config = training_config(corpus, tmp_path)
    expect_error("model = 42,880 parameters: ", built(config).__enter__)


def test_a_training_whose_optimizer_does_not_fit(monkeypatch):
    """On CPUs, each process has weights, gradients and
    the optimizer's values in this machine's memory."""
    model = TrainingConfig.model_validate({"train": {"steps": 1}}).model
    vocab_size = 512
    size = 4 * pretraining.count_parameters(model, vocab_size)
    monkeypatch.setattr(pretraining, "free_memory", lambda: 6 * size - 1)
    for processes in (0, 1):
        pretraining.check_memory(model, vocab_size, processes)
    expect_error(
        "weights, gradients and optimizer take at least",
        pretraining.check_memory,
        model,
        vocab_size,
        2,
    )
    monkeypatch.setattr(pretraining, "free_memory", lambda: 4 * size - 1)
    pretraining.check_memory(model, vocab_size, 1)
    expect_error(
        "weights, their average, gradients and optimizer take at least",
        pretraining.check_memory,
        model,
        vocab_size,
        1,
        0.05,
    )


TOO_LITTLE = {
    "torch": lambda: torch.empty(10**15),
    "numpy": lambda: np.empty(10**15),
    "python": lambda: bytes(10**15),
    "linux": lambda: os.read(os.open("/dev/zero", os.O_RDONLY), 10**15),
}


@pytest.mark.parametrize("library", TOO_LITTLE)
def test_too_little_memory_is_one_line(library, monkeypatch, capsys):
    """A class each: RuntimeError, two of MemoryError, and what Linux says to a read."""
    monkeypatch.setattr(sys, "argv", ["status.py"])
    with pytest.raises(SystemExit, match="2"):
        run_command(StatusConfig, lambda config: TOO_LITTLE[library]())
    assert re.fullmatch("error: memory = .*more: does not fit .*\n", capsys.readouterr().err)


def test_too_little_memory_while_training_is_recorded_as_such(tiny_config, monkeypatch):
    monkeypatch.setattr(loop, "train_step", lambda run: torch.empty(10**15))
    config = tiny_config()
    expect_error(
        "^memory = 4,000,000.0 GB more: does not fit", loop.train, config, make_pretraining
    )
    assert read_json(Path(config.output_dir, "run/status.json"))["reason"].startswith(
        "UserError: memory = "
    )


def test_data(place):
    commands = []
    for case, (damage, field) in DATA.items():
        damage(shutil.copytree(place / "data", place / case))
        commands.append((f"train_gpt2 --data.path {place}/{case}", field))
    expect_fields(place, commands, "--config", str(place / "config.yaml"))


def test_damaged_data_stop_all_ranks(place):
    spoil(place / "data/train_000001.bin")  # rank 1 of 2 hashes the second shard
    (code, errors), other = run_ranks(
        run_script, 2, "train_gpt2", ["--config", str(place / "config.yaml")]
    )
    assert (code, other) == (2, (2, ""))
    assert re.match(r"error: .*train_000001\.bin: .*SHA-256.*\n$", errors)


@pytest.fixture
def arguments(trained, tmp_path):
    """Those that resume a copy of a run of ten steps."""
    shutil.copytree(trained, tmp_path / "run")
    return [
        "--config",
        str(tmp_path / "run/config.yaml"),
        "--output_dir",
        str(tmp_path),
        "--train.steps",
        "20",
    ]


CHANGES = [
    ("seed", 5, 1337),
    ("model.n_layer", 3, 2),
    ("model.dropout", 0.5, 0.0),
    ("optim.lr", 0.01, 0.003),
    ("optim.schedule", "wsd", "cosine"),
    ("optim.decay_steps", 50, 10),
    ("train.global_batch_tokens", 768, 384),
]
"""Fields, and their values now and before."""


def test_resume_names_every_field_that_differs(arguments, tmp_path):
    more = [word for name, value, _ in CHANGES for word in (f"--{name}", str(value))]
    ((code, errors),) = run_ranks(run_script, 1, "train_gpt2", arguments + more)
    assert code == 2
    for line, (name, value, before) in zip(errors.splitlines(), CHANGES, strict=True):
        assert line.startswith(f"error: {name} = {value}: ")
        assert f"started with {before}" in line
        assert f"(--config {tmp_path}/run/config.yaml)" in line


def test_runs_that_cannot_be_resumed_or_read(arguments, trained, tmp_path):
    manifest = read_json(trained.parent / "data/manifest.json")
    data = shutil.copytree(trained.parent / "data", tmp_path / "data")
    edit_manifest(data, splits={"train": manifest["splits"]["train"]})
    shutil.copytree(trained, tmp_path / "damaged")
    damaged = str(tmp_path / "damaged/checkpoints/step-00000010")
    spoil(Path(damaged, "model.safetensors"))
    gone = tmp_path.with_name(f"{tmp_path.name}-gone")  # its checkpoints are renamed
    for file in Path(shutil.copytree(trained, gone / "run")).glob(
        "checkpoints/*/model.safetensors"
    ):
        file.unlink()
    run = tmp_path / "run"
    new = tmp_path / "new"
    commands = [
        (f"train_gpt2 --output_dir {gone}", "run folder"),
        (f"train_gpt2 --data.path {data}", "data.path"),
        (f"evaluate --checkpoint {new}", "checkpoint"),
        (f"evaluate --checkpoint {run} --split test", "split"),
        (f"evaluate --checkpoint {run} --data /no/such/place", "data"),
        ("evaluate --batch_size 0", "batch_size"),
        (f"generate --checkpoint {new}", "checkpoint"),
        (f"generate --checkpoint {damaged}", "checkpoint"),
        (f"generate --checkpoint {run} --device cuda", "device"),
        (f"report --runs {new}", "runs"),
        (f"verify_run --run {new}", "run"),
        (f"prepare_data --source {new}/*.txt --output {new}", "source"),
        (f"prepare_data --source {run}/*.yaml --tokenizer gpt9 --output {new}", "tokenizer"),
    ]
    expect_fields(tmp_path, commands, *arguments)
    assert len(list(gone.glob("run/checkpoints/*.corrupt"))) == 2


def test_text_and_shards_in_the_place_of_something_else(place, monkeypatch):
    monkeypatch.chdir(place)
    (place / "texts").mkdir()
    command = r"data\.path = texts: .*prepare_data.py"
    expect_error(command, read_manifest, Path("texts"))
    expect_error(
        command,
        missing_data,
        training_config(Path("texts"), place, {"data.prepare": "configs/data_stdlib.yaml"}),
    )
    for field in ("checkpoint", "train.init_from"):
        expect_error(
            f"{field} = data: holds no intact checkpoint", find_checkpoint, Path("data"), field
        )
        for name in ("dat", "data/dat", "nowhere/step-00000010", "texts/step-00000010"):
            near = r"; did you mean data\?" if name == "dat" else ""
            expect_error(
                f"{field} = {name}: there is no such folder{near}; name ",
                find_checkpoint,
                Path(name),
                field,
            )
    for look, command in (
        (show_status, StatusConfig),
        (report, ReportConfig),
        (verify_run, VerifyConfig),
    ):
        for folder, problem in {
            "data": "(is no run folder|has no config)",
            "dat": "there is no such folder; did you",
        }.items():
            expect_error(f"runs? = .*{folder}: {problem}", look, load(command, [folder]))


def test_a_checkpoint_is_no_run_to_verify(trained):
    checkpoint = trained / "checkpoints/step-00000010"
    expect_error(
        f"run = {checkpoint}: is a checkpoint; name its run folder, {trained}$",
        verify_run,
        load(VerifyConfig, [str(checkpoint)]),
    )


def test_a_pointer_of_git_lfs_in_the_place_of_weights(trained, tmp_path):
    """A checkpoint that git has not fetched is not damaged:
    it stays in its place, and no older one takes it."""
    run = shutil.copytree(trained, tmp_path / "run")
    for file in run.glob("checkpoints/*/model.safetensors"):
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    before = snapshot(run)
    newest = run / "checkpoints/step-00000010"
    for look in (
        partial(find_checkpoint, run),
        partial(newest_intact, run / "checkpoints", put_aside=True),
    ):
        expect_error(
            rf"checkpoint = {newest}/model.safetensors: is a pointer of git-LFS.* `git lfs pull`",
            look,
        )
    assert snapshot(run) == before


WRONG_MODELS = {
    "gpt2": (
        "there is no such folder; a model on the Hub is hub:OWNER/NAME, like "
        "hub:openai-community/gpt2"
    ),
    "me/mine": "there is no such folder; a model on the Hub is hub:OWNER/NAME",
    "empty": "(has no config.json and no model|holds no intact checkpoint)",
    "run": "it is a run, which needs no import",
    "hub:": "is no name of a model on the Hub",
    "hub:a/b/c": "is no name of a model on the Hub",
}


@pytest.mark.parametrize("source", WRONG_MODELS)
def test_a_model_that_is_not_there(trained, tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("empty").mkdir()
    Path("run").symlink_to(trained)
    expect_error(
        f"^source = {source}: .*{WRONG_MODELS[source]}", import_hf, ImportConfig(source=source)
    )
    if source != "run" and not source.startswith("hub:"):
        config = training_config(trained.parent / "data", tmp_path, {"train.init_from": source})
        expect_error(f"^train.init_from = {source}: {WRONG_MODELS[source]}", find_model, config)
